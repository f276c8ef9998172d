"""The Triton kernels, in the interpreter against fp64, and compiled for real GPUs without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_cascade import cases, plan_of

from nets import logit_net, oracle, weights
from probemon import DynamicProbeManager
from probemon.core.branches import watched_probes
from probemon.core.dtypes import input_dtype
from probemon.core.hierarchy import ConceptTree
from probemon.core.inputs import prepare_input
from probemon.core.plan import CascadePlan
from probemon.core.probes import NORMS, InputSpec
from probemon.core.settings import CascadeConfig
from probemon.engine.cascade import descend, retain
from probemon.engine.kernels import score_probes, triton_pairs
from probemon.engine.kernels.triton_cascade import DeviceCascade

PROGRAM = Path(__file__).parents[1] / "programs" / "cross_compile.py"
# Shared memory that one program may have, in bytes, by compute capability.
LIMITS = {80: 163 << 10, 90: 227 << 10}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(
    "shape, d",
    [((), 1), ((), 300), ((3,), 37), ((16,), 300), ((40,), 37), ((16, 5), 37), ((40, 20), 37), ((33, 1), 1)],
    ids=str,
)
def test_split_probes_are_right_and_reset_their_counters(shape, d, dtype):
    """Several programs a probe, the last of which finishes it; in the interpreter they run one after another."""
    net = weights(shape, d, dtype)
    x = torch.randn(3, d, generator=torch.Generator().manual_seed(1)).to(input_dtype(dtype))
    rows, slots = torch.arange(3).repeat(11), torch.arange(11).repeat_interleave(3)
    first, again = (score_probes(x, net, rows, slots, impl="triton") for _ in range(2))
    strided = score_probes(
        x, net, torch.stack([rows, slots], dim=1)[:, 0], torch.stack([rows, slots], dim=1)[:, 1], impl="triton"
    )
    assert torch.equal(first, again) and torch.equal(first, strided)
    assert (first.reshape(11, 3).T - oracle(net, x)).abs().max() < 1e-6
    assert all(not counters.any() for counters in triton_pairs._ARRIVED.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "shape, n, d",
    [((3,), 1, 37), ((3,), 70, 64), ((40,), 3, 300), ((16, 5), 16, 129), ((40, 70), 1, 37), ((40, 70), 16, 129)],
    ids=str,
)
def test_products_of_many_states_are_right(shape, n, d, dtype, monkeypatch):
    """What a GPU's matrix units do, in fp32 here: probes in order, in disorder, out of range."""
    monkeypatch.setattr(triton_pairs, "uses_matrix_units", lambda device, dtype: True)
    net, generator = weights(shape, d, dtype), torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=generator).to(torch.bfloat16)
    exact = oracle(net, x)
    probes = torch.arange(11) if n < 70 else torch.tensor([0, 4, 10])  # interpreted, each takes seconds of many states
    rows, slots = torch.arange(n).repeat(len(probes)), probes.repeat_interleave(n)
    some = torch.randperm(len(rows), generator=generator)[: len(rows) * 2 // 3]
    for at, to in ((rows, slots), (rows[some], slots[some])):
        scores = triton_pairs.score_triton(x, net, at, to)
        assert (scores - exact[at, to]).abs().max() < 1e-6
    at, to = torch.tensor([0, 0, n, 0, -1, 0]), torch.tensor([4, 11, 4, 4, 2, -1])
    scores = torch.zeros(6)
    triton_pairs._score(x, net, at, to, scores, False, False)
    sound = torch.tensor([True, False, False, True, False, False])
    assert torch.equal(scores.isfinite(), sound) and (scores[sound] - exact[0, 4]).abs().max() < 1e-6
    assert all(not counters.any() for counters in triton_pairs._ARRIVED.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(20,), (20, 5)], ids=str)
def test_grouped_pairs_score_as_single_ones(shape, dtype, monkeypatch):
    """Groups of four of one probe, across two probes, and a rest of three."""
    net, n = weights(shape, 37, dtype), 9
    x = torch.randn(n, 37, generator=torch.Generator().manual_seed(1)).to(input_dtype(dtype))
    shuffled = torch.randperm(n * 11, generator=torch.Generator().manual_seed(2))
    rows, slots = torch.arange(n).repeat(11)[shuffled], torch.arange(11).repeat_interleave(n)[shuffled]
    alone = score_probes(x, net, rows, slots, impl="triton")
    launched = []
    monkeypatch.setattr(triton_pairs, "MANY", 99)
    kernel = triton_pairs._layered_groups
    monkeypatch.setattr(
        triton_pairs,
        "_layered_groups",
        type("Counted", (), {"__getitem__": lambda self, grid: launched.append(grid) or kernel[grid]})(),
    )
    together = score_probes(x, net, rows, slots, impl="triton")
    assert launched == [(25 * 2,)] and torch.equal(alone, together)
    assert (together - oracle(net, x)[rows, slots]).abs().max() < 1e-6
    assert all(not counters.any() for counters in triton_pairs._ARRIVED.values())


def test_every_kernel_compiles_for_real_gpus_within_shared_memory():
    """At the sizes that need most; at all of them by scripts/benchmarks/gpu_check.sh."""
    all_sizes = os.environ.get("PROBEMON_EVERY_SIZE") == "1"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, PROGRAM, *([] if all_sizes else ["--sample"])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    n_made = (
        3 * (6 + 6 + 6 + 1 + 4) + 52 + 2 * (4 * (2 + 3) + 3 * 4 + 3 + 2)
        if all_sizes
        else 2 * (3 + 3 + 2 + 3) + 1 + 3 + 2 + 1
    )
    assert {one["arch"] for one in made} == set(LIMITS) and len(made) == n_made
    for one in made:
        assert one["cubin_bytes"] > 0 and one["shared"] <= LIMITS[one["arch"]], one
        # Of one shape, whose columns do not meet; other instructions may add in another order.
        of_matrix = one["kernel"].startswith(("states", "matrix")) and not one["kernel"].startswith("states 2 2")
        assert set(one["products"]) == ({"m16n8k16"} if of_matrix else set()), one
    # A sum along D is made by the same threads in the same order whether a pair is scored alone, in a group or in a
    # descent, and as many products are fused with it: a kernel for groups holds the code of a pair five times.
    layouts, fused = {}, {}
    for one in made:
        for kind in ("layered groups", "layered", "cascade: score linear", "cascade: score", "linear"):
            if one["kernel"].startswith(kind):
                case = one["arch"], one["kernel"].removeprefix(kind)
                layouts.setdefault(case, []).append(one["layouts"])
                n_copies = 5 if kind == "layered groups" else 1
                assert one["fused"] % n_copies == 0, one
                fused.setdefault(case, set()).add(one["fused"] // n_copies)
                break
    assert sorted(map(len, layouts.values())) == (
        [2] * 2 * 4 + [3] * (6 + 6 + 6 + 1 + 4) if all_sizes else [2] * 2 + [3] * 2
    )  # linear ones are not grouped
    assert all(len(of[0]) == 1 and all(other == of[0] for other in of) for of in layouts.values()), layouts
    assert all(len(counts) == 1 and min(counts) > 0 for counts in fused.values()), fused


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_kernel_normalisation_equals_torch(norm, dtype):
    x = torch.randn(5, 3, 70, generator=torch.Generator().manual_seed(0))[:, 1] * torch.tensor(
        [[1.0], [100.0], [0.0], [1e25], [1.0]]
    )
    x[4, 3] = float("nan")
    mine, theirs = (
        triton_pairs.normalise_triton(x, norm, 1e-6, dtype),
        prepare_input(x, InputSpec("resid_post.0", norm, 1e-6), dtype),
    )
    if norm == "none":
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
    assert (
        mine.dtype == dtype
        and torch.equal(mine.isfinite(), theirs.isfinite())
        and mine[4].isnan().any()
        and (norm == "none" or mine[3].isinf().all())
    )
    error = (mine[:3].double() - theirs[:3].double()).abs()
    assert (error <= (1e-6 if dtype == torch.float32 else 2**-8) * theirs[:3].double().abs() + 1e-7).all()
    assert torch.equal(triton_pairs.normalise_triton(x[1:2], norm, 1e-6, dtype), mine[1:2])


def sets_of(found, n_probes):
    """Active sets and scores `[N, P]`, as the cascade has them."""
    active, scores = np.zeros((len(found.count), n_probes), bool), np.zeros((len(found.count), n_probes), np.float32)
    for row, n in enumerate(found.count.tolist()):
        ids = found.ids[row, :n].numpy()
        assert len(set(ids.tolist())) == n
        active[row, ids], scores[row, ids] = True, found.scores[row, :n].numpy()
    return active, scores


@settings(max_examples=25, deadline=None)
@given(cases())
def test_device_cascade_equals_the_cpu_or_reports_overflow(case):
    """Over two steps, the second from what the first retained; scores with many ties, as in test_compiled.py."""
    tree, path, alert, config, always_on, first, second, part = case
    plan = plan_of(tree, path, alert, config, always_on, watched_probes(tree, *part))
    if plan is None:
        return
    retained, before, states = None, None, torch.eye(len(first))
    for ticks in (first, second):
        net, n = logit_net(ticks), len(ticks)
        own = (
            score_probes(
                states, net, torch.arange(n).repeat(tree.n), torch.arange(tree.n).repeat_interleave(n), impl="triton"
            )
            .reshape(tree.n, n)
            .T.numpy()
        )
        expected = descend(plan, n, retained, lambda rows, probes, own=own: own[rows, probes])
        found = DeviceCascade(plan, net, np.zeros(tree.n)).descend(states, n, before)
        fits = found.overflowed.numpy() == 0
        assert not expected.dropped[fits].any()
        assert fits[~expected.dropped.any(axis=1) & (expected.active.sum(axis=1) < config.max_loaded_probes)].all()
        active, scores = sets_of(found, tree.n)
        assert np.array_equal(active[fits], expected.active[fits]) and np.array_equal(
            scores[fits], expected.scores[fits]
        )
        kept, _ = retain(plan, expected, np.arange(n))
        for row in np.flatnonzero(fits):
            assert sorted(p for p in found.kept[row].tolist() if p >= 0) == np.flatnonzero(kept[row]).tolist()
        retained = kept
        most = max(1, int(kept.sum(axis=1).max()))
        before = torch.full((n, most), -1, dtype=torch.int32)
        for row in range(n):
            ids = np.flatnonzero(kept[row])
            before[row, : len(ids)] = torch.from_numpy(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(), (20,), (20, 5)], ids=str)
def test_device_cascade_of_split_probes_with_two_inputs_is_right(shape, dtype):
    rng = np.random.default_rng(0)
    parents = [[] if i < 3 else [f"c{rng.integers(0, i)}"] for i in range(11)]
    _, tree = ConceptTree.build([f"c{i}" for i in range(11)], parents)
    net, input_of = weights(shape, 24, dtype), rng.integers(0, 2, 11)
    plan = CascadePlan.of(tree, "path", CascadeConfig(keep_top_k=3), np.full(11, 0.6, np.float32), [])
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(4)).to(
        input_dtype(dtype)
    )  # two inputs of three states
    exact = oracle(net, x).numpy().astype(np.float32)
    own = np.stack([[exact[input_of[p] * 3 + row, p] for p in range(11)] for row in range(3)])
    expected = descend(plan, 3, None, lambda rows, probes: own[rows, probes])
    active, scores = sets_of(DeviceCascade(plan, net, input_of).descend(x, 3, None), 11)
    assert (
        np.array_equal(active, expected.active)
        and np.abs(scores - expected.scores).max() < 1e-6
        and active.sum(axis=1).min() < 11
    )


def test_manager_descends_on_the_device_as_on_the_cpu_and_counts_overflows(pack):
    states = torch.randn(9, pack.architecture.hidden_size, generator=torch.Generator().manual_seed(5))
    for settings_, overflows in (
        ({}, False),
        ({"max_loaded_probes": 14, "load_threshold": 0.1}, True),
        ({"max_rounds": 1, "keep_top_k": 4}, False),
    ):
        there = DynamicProbeManager(pack, impl="triton", strategy="descent", **settings_)
        here = DynamicProbeManager(pack, impl="cpu", strategy="descent", **settings_)
        mine, theirs = there.score_tokens(states, prompt_len=4), here.score_tokens(states, prompt_len=4)
        assert (
            np.array_equal(mine.ptr, theirs.ptr)
            and np.array_equal(mine.probes, theirs.probes)
            and np.abs(mine.values - theirs.values).max() < 1e-6
        )
        assert (
            np.array_equal(mine.coverage.dropped, theirs.coverage.dropped)
            and bool(mine.coverage.dropped.any()) == overflows
        )
        assert (there.engine.on_device.n_overflowed > 0) == overflows


def chain_plan(parents, rule, thresholds, **settings_):
    ids = list(parents)
    order, tree = ConceptTree.build(ids, [list(parents[i]) for i in ids])
    return [ids[i] for i in order], CascadePlan.of(
        tree,
        rule,
        CascadeConfig(**settings_),
        np.asarray([thresholds.get(ids[i], 0.01) for i in order], np.float32),
        [],
    )


def constant_net(n, logits):
    return {"w1": torch.zeros(n, 1, 1), "b1": torch.tensor(logits, dtype=torch.float32)[:, None]}


def test_late_ancestors_that_open_in_a_later_round_overflow_the_state():
    """Each round brings an ancestor that opens in the next: more rounds than levels."""
    parents = {"r": "", "q": "", "a1": "r", "a2": "q", "a3": "q", "b1": "a1 a2", "b2": "a2 a3", "b3": "a3", "z": "b3"}
    names, plan = chain_plan({name: above.split() for name, above in parents.items()}, "path", {"q": 1.0})
    net = constant_net(9, [5.0] * 9)
    own = score_probes(
        torch.zeros(1, 1), net, torch.zeros(9, dtype=torch.int64), torch.arange(9), impl="triton"
    ).numpy()
    expected = descend(plan, 1, None, lambda rows, probes: own[probes])
    found = DeviceCascade(plan, net, np.zeros(9)).descend(torch.zeros(1, 1), 1, None)
    assert expected.active.all() and names.index("z") == 8
    assert found.overflowed.tolist() == [1] or sets_of(found, 9)[0].all()


def test_retained_sets_include_ancestors_on_trees():
    names, plan = chain_plan({"r": [], "a": ["r"], "b": ["a"]}, "path", {"r": 0.99, "a": 0.99, "b": 0.99})
    assert names == ["r", "a", "b"]
    found = DeviceCascade(plan, constant_net(3, [2.0] * 3), np.zeros(3)).descend(
        torch.zeros(1, 1), 1, torch.tensor([[2]], dtype=torch.int32)
    )
    active, scores = sets_of(found, 3)
    one = float(torch.tensor(2.0).sigmoid())
    assert active.all() and np.abs(scores[0] - [one, one**2, one**3]).max() < 1e-6


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_zero_score_is_retained_before_a_nan():
    _, plan = chain_plan({"r": [], "a": ["r"], "b": ["r"], "c": ["r"]}, "independent", {}, keep_top_k=2)
    found = DeviceCascade(plan, constant_net(4, [5.0, -200.0, float("nan"), 1.0]), np.zeros(4)).descend(
        torch.zeros(1, 1), 1, None
    )
    assert found.kept.tolist() == [[3, 1]]


def test_two_plans_of_one_engine_keep_separate_cascades(pack):
    manager = DynamicProbeManager(pack, impl="triton", strategy="descent")
    other = manager.plan_with(["c39"])
    plans = [manager.engine.on_device.steps(plan).cascade._plan for plan in (manager.plan, other, manager.plan)]
    assert plans[0] is manager.plan and plans[1] is other and plans[2] is manager.plan

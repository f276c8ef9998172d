"""Softmax groups give fp64 softmax scores in every implementation, and their descent equals an oracle."""

from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cascade import TICKS, plan_of

from cascade_oracle import cascade_oracle, compiled_descents
from conftest import HIDDEN
from grouped_packs import everything_by_fp64, write
from nets import SHAPES, logit_net
from probemon import DynamicProbeManager, ProbePack
from probemon.core.hierarchy import ConceptTree
from probemon.core.settings import CascadeConfig
from probemon.engine.cascade import apply_rule, descend, retain
from probemon.errors import ConfigError


def managers(pack, **settings):
    """Every way of evaluating a pack on a CPU, by name."""
    for impl in ("reference", "cpu", *(["numba"] if pack.dtype != torch.float16 else [])):
        for strategy in ("descent", "exhaustive"):
            yield f"{impl} {strategy}", DynamicProbeManager(pack, impl=impl, strategy=strategy, **settings)
    one = pack.weight_bytes() // pack.n_probes
    for impl in ("cpu", "numba") if pack.dtype != torch.float16 else ("cpu",):
        yield f"{impl} paged", DynamicProbeManager(pack, impl=impl, arena_bytes=one * 7, strategy="descent", **settings)


@pytest.mark.parametrize("rule", ["independent", "path"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_implementation_gives_the_softmax(tmp_path, shape, dtype, rule):
    pack = write(tmp_path / "pack", shape, dtype, rule)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = everything_by_fp64(pack, hidden).numpy()
    golden = everything_by_fp64(pack, pack.golden_hidden[:, 0]).numpy()
    assert np.abs(pack.golden_scores.numpy() - golden).max() < 1e-6
    assert pack.verify() == 0
    by_impl = {}
    for name, manager in managers(pack, load_threshold=0.3, keep_top_k=2):
        got = manager.score_all(hidden).numpy()
        assert np.abs(got - expected).max() < 1e-6, name
        assert np.array_equal(by_impl.setdefault(name.split()[0], got), got), name  # paged as resident, bit for bit
        if rule == "independent":
            for members in np.split(pack.tree.groups.members, pack.tree.groups.ptr[1:-1]):
                assert np.abs(got[:, members].sum(axis=1) - 1).max() < 1e-6, name
        document = manager.score_tokens(hidden, prompt_len=2)
        for t in range(5):
            active = document.active(t)
            assert np.array_equal(document.active_scores(t), got[t, active]), name  # bit for bit
            whole = np.zeros((1, pack.n_probes), dtype=bool)
            whole[0, active] = True
            assert np.array_equal(pack.tree.groups.close(whole), whole), name
        for t in range(2):  # a batch of 1 is the batch of N
            alone = manager.score_tokens(hidden[t : t + 1])
            assert np.array_equal(alone.active(0), document.active(t)), name
            assert np.array_equal(alone.active_scores(0), document.active_scores(t)), name


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.int8), ((24,), torch.float32)], ids=["linear", "one layer"])
def test_triton_gives_the_softmax(tmp_path, shape, dtype):
    """Its interpreter is slow: few states."""
    pack = write(tmp_path / "pack", shape, dtype)
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    manager = DynamicProbeManager(pack, impl="triton", strategy="descent", load_threshold=0.3)
    everything = manager.score_all(hidden)
    assert (everything - everything_by_fp64(pack, hidden)).abs().max() < 1e-6
    _, scores = manager.step(None, hidden[:1])
    assert np.array_equal(scores.active_scores(0), everything[0].numpy()[scores.active(0)])
    assert len(scores.active(0)) > 5
    _, theirs = DynamicProbeManager(pack, impl="cpu", load_threshold=0.3).step(None, hidden[:1])
    assert np.array_equal(scores.probes, theirs.probes)


def test_implementations_agree_on_active_and_retained_sets(tmp_path):
    pack = write(tmp_path / "pack", (), torch.float32, "path", sites=("resid_post.1", "resid_post.2"))
    random = torch.Generator().manual_seed(2)
    steps = [{site: torch.randn(3, HIDDEN, generator=random) for site in pack.sites} for _ in range(4)]
    seen = {}
    for name, manager in managers(pack, load_threshold=0.15, keep_top_k=3, max_loaded_probes=12):
        state, seen[name] = None, []
        for hidden in steps:
            state, scores = manager.step(state, hidden)
            seen[name].append((scores.ptr.tolist(), scores.probes.tolist(), state.retained.tolist()))
            seen[name].append((scores.coverage.dropped.tolist(), scores.coverage.not_reached.tolist()))
    first = seen.pop("reference descent")
    assert sum(map(sum, (entry[0] for entry in first[1::2]))) > 0  # some were dropped
    for name, others in seen.items():
        assert others == first, name


@pytest.mark.parametrize("rule", ["independent", "path"])
def test_device_descent_of_groups_equals_that_of_the_cpu(tmp_path, rule):
    """By Triton's interpreter: what is retained in part is completed, and scores have the bits of pairs."""
    pack = write(tmp_path / "pack", (), torch.float32, rule)
    settings = {"load_threshold": 0.2, "keep_top_k": 3, "strategy": "descent"}
    mine, theirs = (DynamicProbeManager(pack, impl=impl, **settings) for impl in ("triton", "cpu"))
    random, states = torch.Generator().manual_seed(6), [None, None]
    for _ in range(2):
        hidden = torch.randn(2, HIDDEN, generator=random)
        (states[0], here), (states[1], there) = (
            manager.step(state, hidden) for manager, state in zip((mine, theirs), states, strict=True)
        )
        assert np.array_equal(here.ptr, there.ptr) and np.array_equal(here.probes, there.probes)
        assert np.abs(here.values - there.values).max() < 1e-6
        assert np.array_equal(states[0].retained, states[1].retained)
        everything = mine.score_all(hidden).numpy()
        for row in range(2):
            assert np.array_equal(here.active_scores(row), everything[row, here.active(row)])
    [(_, steps)] = mine.engine.on_device._by_plan.values()
    assert steps is not None and mine.engine.on_device.n_overflowed == 0
    cut = [pack.tree.groups.close(state[None]).sum() > state.sum() for state in states[0].retained]
    assert any(cut)  # what was retained holds a group in part


def test_group_with_one_unscored_member_has_no_scores(tmp_path):
    """The sum of one member may overflow: then no member has a score, and a state at which they are active is unseen;
    what stands alone keeps its own.
    """
    pack = ProbePack.write(
        tmp_path / "pack",
        name="extreme",
        concepts=[{"id": name, "name": name, "parents": above} for name, above in EXTREME.items()],
        weights={"w1": torch.tensor([[[0.0, 1]], [[2, -2]], [[1, 0]]]), "b1": torch.tensor([[0.0], [0], [9]])},
        softmax_group=torch.tensor([-1, 0, 0]),
        score_rule="independent",
        inputs=[{"site": "resid_post.0"}],
        host={"model_id": "none"},
        licence="CC0-1.0",
        card="Random.",
    )
    # A sum of two products with weights of 2 may overflow from 2^127 / 4 = 4.3e37 on, with weights of 1 from 8.5e37.
    hidden = torch.tensor([[6e37, -6e37], [6e37, 6e37], [0.5, 0.25]])
    for impl in ("reference", "cpu", "numba"):
        for strategy in ("descent", "exhaustive"):
            manager = DynamicProbeManager(pack, impl=impl, strategy=strategy, load_threshold=0.5)
            nowhere = manager.score_all(hidden).isnan().tolist()
            assert nowhere == [[False, True, True]] * 2 + [[False] * 3], (impl, strategy)
            document = manager.score_tokens(hidden)
            assert [bool(reason) for reason in document.coverage.unseen] == [False, True, False], (impl, strategy)
            assert document.active(0).tolist() == [0], (impl, strategy)  # the group was not reached


EXTREME = {"alone": [], "large": ["alone"], "small": ["alone"]}


def test_group_with_late_weights_is_late(tmp_path):
    """Nobody waits: until all members are there none has a score, and then each has that of a resident pack."""
    pack = write(tmp_path / "pack", (), torch.float32)
    one, hidden = pack.weight_bytes() // pack.n_probes, torch.randn(1, HIDDEN) * 2
    settings = {"load_threshold": -1.0, "keep_top_k": 0}
    late = DynamicProbeManager(pack, impl="cpu", arena_bytes=one * 14, late=True, **settings)
    whole = DynamicProbeManager(pack, impl="cpu", strategy="descent", **settings).step(None, hidden)[1]
    n_late = []
    for _ in range(20):
        _, scores = late.step(None, hidden)
        active = np.zeros((1, pack.n_probes), dtype=bool)
        active[0, scores.probes] = True
        assert np.array_equal(pack.tree.groups.close(active), active)
        for probe, value in zip(scores.probes.tolist(), scores.values.tolist(), strict=True):
            assert value == float(whole.values[whole.probes == probe][0])
        n_late.append(int(scores.coverage.late[0]))
        late.engine.scorer.fetcher.wait()
    assert n_late[0] > 0 and late.engine.background_errors() == []


def test_several_packs_with_groups_score_as_alone(tmp_path):
    """Two packs of one architecture share an arena: groups of the second are not those of the first."""
    first, second = (write(tmp_path / name, (), torch.float32, name=name, seed=i) for i, name in enumerate("ab"))
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(3))
    one = first.weight_bytes() // first.n_probes
    for arguments in ({"impl": "numba"}, {"impl": "cpu"}, {"impl": "cpu", "arena_bytes": one * 20}):
        both = DynamicProbeManager([first, second], strategy="descent", load_threshold=0.3, **arguments)
        joint, everything = both.score_tokens(hidden), both.score_all(hidden).numpy()
        for i, pack in enumerate((first, second)):
            alone = DynamicProbeManager(pack, impl=arguments["impl"], strategy="descent", load_threshold=0.3)
            numbers = both.pack.numbers[i]
            assert np.array_equal(everything[:, numbers], alone.score_all(hidden).numpy())
            own = alone.score_tokens(hidden)
            for t in range(4):
                active = joint.active(t)[np.isin(joint.active(t), numbers)]
                assert active.tolist() == numbers[own.active(t)].tolist()
        assert len(both.pack.tree.groups) == 2 * len(first.tree.groups)


def test_audit_counts_softmax_scores(tmp_path):
    pack = write(tmp_path / "pack", (), torch.float32)
    manager = DynamicProbeManager(pack, strategy="descent", load_threshold=0.6, audit_rate=1.0)
    hidden = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(4)) * 2
    everything = everything_by_fp64(pack, hidden).numpy()
    kept, [scores] = manager.score_prompt(
        manager.plan, {"resid_post.1": hidden}, [11], audit=np.ones(12, dtype=bool), strategy="descent"
    )
    fires = everything > pack.alert_threshold.numpy()
    active = np.stack([np.isin(np.arange(pack.n_probes), scores.active(t)) for t in range(12)])
    assert scores.coverage.firing.tolist() == fires.sum(axis=1).tolist()
    assert scores.coverage.firing_missed.tolist() == (fires & ~active).sum(axis=1).tolist()
    assert (fires & ~active).any() and kept.shape == (1, pack.n_probes)


def test_exclusion_that_splits_a_group_is_refused(tmp_path):
    pack = write(tmp_path / "pack", (), torch.float32)
    with pytest.raises(ConfigError, match="c3 is left out by exclude or depth, and c2 of its softmax group is watched"):
        DynamicProbeManager(pack, exclude=["c3"])
    hidden = torch.randn(3, HIDDEN)
    everything = DynamicProbeManager(pack).score_all(hidden).numpy()
    for watched in (
        {"include": ["c10"]},
        {"exclude": ["c2", "c3", "c4", "c14"]},
        {"always_on": ["c12"], "load_threshold": 2},
    ):
        manager = DynamicProbeManager(pack, strategy="descent", **{"load_threshold": -1.0, **watched})
        scores = manager.score_tokens(hidden)
        for t in range(3):
            active = np.zeros((1, pack.n_probes), dtype=bool)
            active[0, scores.active(t)] = True
            assert np.array_equal(pack.tree.groups.close(active), active)
            assert np.array_equal(scores.active_scores(t), everything[t, scores.active(t)])
        names = {pack.concepts[probe]["id"] for probe in scores.active(0)}
        if (
            "include" in watched
        ):  # c10 with c12 of its group, c5 above and c6 of its group, the root c0; c0 stands alone
            assert names == {"c0", "c5", "c6", "c10", "c12"}
        elif "exclude" in watched:
            assert names == {f"c{i}" for i in range(15)} - {"c2", "c3", "c4", "c14"}
        else:
            assert names == {"c0", "c1", "c2", "c3", "c4", "c10", "c12"}


@st.composite
def grouped_cases(draw):
    """A hierarchy in which some siblings are groups; states; settings."""
    n = draw(st.integers(2, 12))
    ids = [str(i) for i in range(n)]
    above = []
    for i in range(n):
        alike = draw(st.booleans()) and i > 0
        above.append(
            above[-1] if alike else draw(st.lists(st.sampled_from(ids[:i]), max_size=2, unique=True)) if i else []
        )
    _, tree = ConceptTree.build(ids, above)
    by_parents = {}
    for i in range(n):
        by_parents.setdefault((tuple(sorted(above[i])),), []).append(i)
    group, n_groups = [-1] * n, 0
    for siblings in by_parents.values():
        if len(siblings) > 1 and draw(st.booleans()):
            members = draw(st.lists(st.sampled_from(siblings), min_size=2, unique=True))
            for i in members:
                group[i] = n_groups
            n_groups += 1
    _, tree = ConceptTree.build(ids, above, None, group)
    assert len(tree.groups) == n_groups
    path = draw(st.booleans())
    ticks = st.sampled_from(TICKS)
    alert = np.array(draw(st.lists(ticks, min_size=n, max_size=n)), dtype=np.float32)
    rule = draw(st.sampled_from(["exact", "calibrated", 0.3] if path else ["calibrated", 0.3]))
    config = CascadeConfig(
        load_threshold=rule,
        keep_top_k=draw(st.integers(0, 4)),
        aggressive_pruning=draw(st.booleans()),
        max_loaded_probes=draw(st.integers(1, 13)),
        unload_threshold=float(draw(ticks)),
        max_rounds=draw(st.sampled_from([None, 0, 1, 2])),
    )
    always_on = draw(st.lists(st.integers(0, n - 1), max_size=2, unique=True))
    rows = draw(st.integers(1, 3))
    own = [
        np.array(draw(st.lists(ticks, min_size=n * rows, max_size=n * rows)), dtype=np.float32).reshape(rows, n)
        for _ in range(2)
    ]
    return tree, path, alert, config, always_on, own


def close_groups(tree, probes):
    return {int(mate) for probe in probes for mate in tree.groups.mates(probe)}


@settings(max_examples=50, deadline=None)
@given(grouped_cases())
def test_descent_of_groups_equals_the_oracle(case):
    """Two turns, the second from what the first retained; by the rounds, and by the rule over all scores."""
    tree, path, alert, config, always_on, turns = case
    plan = plan_of(tree, path, alert, config, always_on, None)
    if plan is None:
        return
    parents, retained = [tree.parents(p).tolist() for p in range(tree.n)], None
    for own in turns:
        step = descend(plan, len(own), retained, lambda rows, probes, own=own: own[rows, probes])
        everything = own.copy()
        if path:
            tree.times_best_parent(everything)
        by_rule = apply_rule(plan, everything, retained)
        assert np.array_equal(step.active, by_rule.active) and np.array_equal(step.dropped, by_rule.dropped)
        assert np.array_equal(step.scores, by_rule.scores)
        kept, released = retain(plan, step, np.arange(len(own)))
        for row in range(len(own)):
            before = set(np.flatnonzero(retained[row]).tolist()) if retained is not None else set()
            args = parents, tree.level, path, plan.expand_threshold, config, always_on, before, own[row]
            expected = cascade_oracle(*args, with_groups=lambda probes: close_groups(tree, probes))
            active, dropped, scores, next_kept, n_released = expected
            assert set(np.flatnonzero(step.active[row]).tolist()) == active
            assert set(np.flatnonzero(step.dropped[row]).tolist()) == dropped
            assert {p: step.scores[row, p] for p in active} == scores
            assert set(np.flatnonzero(kept[row]).tolist()) == next_kept and released[row] == n_released
            assert close_groups(tree, active) == active and not close_groups(tree, dropped) & active
        retained = kept


@settings(max_examples=50, deadline=None)
@given(grouped_cases())
def test_compiled_descent_of_groups_equals_the_cascade(case):
    pytest.importorskip("probemon.engine.ways.compiled")
    kernels = pytest.importorskip("probemon.engine.kernels")
    tree, path, alert, config, always_on, turns = case
    plan = plan_of(tree, path, alert, config, always_on, None)
    if plan is None:
        return
    retained = None
    for own in turns:
        n = len(own)
        net_weights, states = logit_net(own), torch.eye(n)
        rows, slots = np.repeat(np.arange(n), tree.n), np.tile(np.arange(tree.n), n)
        pairs = states, net_weights, torch.from_numpy(rows), torch.from_numpy(slots)
        scores = kernels.score_probes(*pairs, impl="numba").numpy()
        logits = kernels.probe_logits(*pairs, impl="numba").numpy()
        if len(tree.groups):
            grouped = np.flatnonzero(tree.groups.of[slots] >= 0)
            order, starts = tree.groups.segments(rows[grouped], slots[grouped])
            at = grouped[order]
            scores[at] = kernels.group_scores(logits[at], starts, torch.device("cpu"), impl="numba")
        scores = scores.reshape(n, tree.n)
        expected = descend(plan, n, retained, lambda rows, probes, scores=scores: scores[rows, probes])
        for compiled in compiled_descents(net_weights, plan, states, retained, alert):
            active, dropped, found = astuple(compiled.descent(tree.n))
            assert np.array_equal(active, expected.active) and np.array_equal(dropped, expected.dropped)
            assert np.array_equal(found, expected.scores)
        retained, _ = retain(plan, expected, np.arange(n))

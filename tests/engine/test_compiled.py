"""Compiled CPU scoring and descent equal the cascade that the oracle proves, bit for bit."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_cascade import cases, plan_of

from cascade_oracle import compiled_descents
from nets import SHAPES, logit_net, oracle, weights
from probemon import DynamicProbeManager, ProbePack
from probemon.core.branches import watched_probes
from probemon.core.dtypes import input_dtype
from probemon.core.hierarchy import ConceptTree
from probemon.core.settings import CascadeConfig
from probemon.engine.cascade import collect, descend, retain
from probemon.engine.kernels import score_probes
from probemon.errors import ProbeLoadError

numba_compiled = pytest.importorskip("probemon.engine.kernels.numba_compiled")
compiled = pytest.importorskip("probemon.engine.ways.compiled")
numba_cpu = pytest.importorskip("probemon.engine.kernels.numba_cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("d", [1, 15, 16, 70, 576])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_scores_are_right_and_equal_in_every_tile(shape, d, dtype):
    net, n = weights(shape, d, dtype), 39  # tiles of 4 x 4 with a rest, of 1 x 4 with a rest, and single ones
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(1)).to(input_dtype(dtype))
    rows, slots = torch.arange(n).repeat_interleave(11), torch.arange(11).repeat(n)
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
    many = torch.empty(n, 11)
    many[rows[shuffled], slots[shuffled]] = score_probes(x, net, rows[shuffled], slots[shuffled], impl="numba")
    for group in (1, 3, 7):
        for at in range(0, n, group):
            part = x[at : at + group]
            some = score_probes(
                part,
                net,
                torch.arange(len(part)).repeat(11),
                torch.arange(11).repeat_interleave(len(part)),
                impl="numba",
            )
            assert torch.equal(some.reshape(11, -1).T, many[at : at + group])
    assert (many - oracle(net, x)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_cached_weight_views_follow_changes_of_the_weights(dtype):
    net, x = weights(SHAPES["two layers"], 24, dtype), torch.randn(3, 24).to(input_dtype(dtype))  # square first layers
    rows, slots = torch.arange(3).repeat(11), torch.arange(11).repeat_interleave(3)

    def check():
        found = score_probes(x, net, rows, slots, impl="numba").reshape(11, 3).T
        assert (found - oracle(net, x)).abs().max() < 1e-6
        return found

    def other(tensor):
        return (tensor.float() * 0.5).to(tensor.dtype)

    first = check()
    for name in ("w1", "b1", "w2", "b2", "w3", "b3"):
        net[name].copy_(other(net[name]))  # in place
        in_place = check()
        net[name] = other(net[name])  # another tensor
        replaced = check()
        net[name].data = other(net[name])  # the same tensor in another place
        assert len({tuple(one.flatten().tolist()) for one in (first, in_place, replaced, check())}) == 4, name
        first = check()
    net["w1"].transpose_(1, 2)  # the same tensor in the same place, of the same shape
    assert not torch.equal(check(), first)
    net["w2"] = net["w2"].mT.contiguous().mT  # strided, so that what is read is a copy
    first = check()
    net["w2"].copy_(other(net["w2"]))
    assert not torch.equal(check(), first)
    n_kept = len(numba_cpu._kept)
    net.clear()
    gc.collect()
    assert len(numba_cpu._kept) < n_kept


@settings(max_examples=150, deadline=None)
@given(cases())
def test_compiled_descent_equals_the_cascade(case):
    """Scores with many ties: a linear probe's weight is its logit for each of the one-hot states."""
    tree, path, alert, config, always_on, first, second, part = case
    plan = plan_of(tree, path, alert, config, always_on, watched_probes(tree, *part))
    if plan is None:
        return
    retained = None
    states = torch.eye(len(first))
    for ticks in (first, second):
        weights, n = logit_net(ticks), len(ticks)
        rows, slots = torch.arange(n).repeat(tree.n), torch.arange(tree.n).repeat_interleave(n)
        own = score_probes(states, weights, rows, slots, impl="numba").numpy().reshape(tree.n, n).T
        expected = descend(plan, n, retained, lambda rows, probes, own=own: own[rows, probes])
        for found in compiled_descents(weights, plan, states, retained, alert):
            step = found.descent(tree.n)
            assert np.array_equal(step.active, expected.active) and np.array_equal(step.dropped, expected.dropped)
            assert np.array_equal(step.scores, expected.scores)
            *theirs, n_dropped = collect(expected, alert)
            for mine, their in zip((found.ptr, found.probes, found.values, found.fired), theirs, strict=True):
                assert np.array_equal(mine, their) and mine.dtype == their.dtype
            assert np.array_equal(np.bincount(found.dropped_rows, minlength=n), n_dropped)
        kept, _ = retain(plan, expected, np.arange(n))
        for row in np.flatnonzero(~expected.dropped.any(axis=1)):
            most = config.keep_top_k if config.aggressive_pruning else tree.n
            mine = numba_compiled.best(found.ptr, found.probes, found.values, plan.exempt, np.array([row]), most)
            assert np.array_equal(mine[0], kept[row])
        retained = kept


def random_tree(sizes, seed):
    """Levels of these sizes; a third of the probes below the first have two parents in the level above."""
    rng, parents, first = np.random.default_rng(seed), [], 0
    for above, size in zip([0, *sizes], sizes, strict=False):
        parents += [
            sorted({f"c{p}" for p in rng.integers(first - above, first, size=1 + (i % 3 == 0))}) if above else []
            for i in range(size)
        ]
        first += size
    return ConceptTree.build([f"c{i}" for i in range(first)], parents)[1]


@pytest.mark.parametrize("path", [True, False], ids=["path", "independent"])
@pytest.mark.parametrize("most, top", [(60, 15), (100_000, 25)])
def test_compiled_descent_over_thousands_of_probes_equals_the_cascade(path, most, top):
    """Few of many are active, so lists are sorted where all of a few would be walked; arrays are used again, for one
    state and for several.
    """
    tree, n_inputs = random_tree([20, 300, 3000, 6000], seed=1), 16
    net = {"w1": torch.randn(tree.n, 1, n_inputs, generator=torch.Generator().manual_seed(2))}
    net["b1"] = torch.full((tree.n, 1), -2.6 if path else -3.4)
    config = CascadeConfig(max_loaded_probes=most, keep_top_k=top, load_threshold=0.3)
    alert = np.full(tree.n, 0.5, np.float32)
    plan, way = plan_of(tree, path, alert, config, [], None), compiled.CompiledNet(net)
    links = tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx
    n_dropped, kept = 0, {}
    for turn, n in enumerate([1, 7, 1, 3, 7, 1]):
        hidden = torch.randn(n, n_inputs, generator=torch.Generator().manual_seed(turn)) / 2
        rows, slots = torch.arange(n).repeat(tree.n), torch.arange(tree.n).repeat_interleave(n)
        own = score_probes(hidden, net, rows, slots, impl="numba").numpy().reshape(tree.n, n).T
        before = kept.get(n)
        expected = descend(plan, n, before, lambda rows, probes, own=own: own[rows, probes])
        for everything in (False, True):
            found = way.descend(
                links, tree.groups, np.zeros(tree.n, np.int64), 1, hidden, n, plan.start, before,
                plan.expand_threshold, alert, path_rule=path, max_rounds=None, max_active=most, everything=everything,
            )  # fmt: skip
            step = found.descent(tree.n)
            assert np.array_equal(step.active, expected.active) and np.array_equal(step.dropped, expected.dropped)
            assert np.array_equal(step.scores, expected.scores)
            assert np.array_equal(found.fired, found.values > 0.5)
        assert 20 * n < expected.active.sum() < tree.n * n / 32
        n_dropped += int(expected.dropped.sum())
        kept[n], _ = retain(plan, expected, np.arange(n))
    assert (n_dropped > 0) == (most == 60)


@pytest.mark.parametrize("strategy", ["descent", "exhaustive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_damaged_weights_are_detected_when_first_used(shape, dtype, strategy, bad, tmp_path):
    concepts = [{"id": f"c{i}", "name": f"c{i}", "parents": ["c0"] if i else []} for i in range(3)]
    for name, tensor in weights(shape, 20, dtype, n=3).items():
        if not tensor.dtype.is_floating_point:  # whole numbers are always finite
            continue
        pack = ProbePack.write(
            tmp_path / name,
            name="random",
            concepts=concepts,
            weights=weights(shape, 20, dtype, n=3),
            score_rule="independent",
            inputs=[{"site": "resid_post.0"}],
            host={"model_id": "none"},
            licence="CC0-1.0",
            card="Random.",
        )
        pack._weights = {key: held.clone() for key, held in pack.weights.items()}
        pack.weights[name].reshape(3, -1)[2, -1] = bad
        for threshold in (2.0, -1.0):  # not reached, and reached
            manager = DynamicProbeManager(pack, impl="numba", strategy=strategy, load_threshold=threshold)
            if threshold > 1 and strategy == "descent":
                manager.step(None, torch.zeros(1, 20))
                continue
            with pytest.raises(ProbeLoadError, match=f"{name} of concept 'c2'"):
                manager.step(None, torch.zeros(1, 20))
            assert not manager.arena.checked[2]


def test_kernel_is_chosen_by_device_and_the_reason_given(pack):
    chosen = DynamicProbeManager(pack)
    assert (chosen.impl, chosen.impl_why) == ("numba", "the weights are on a CPU")
    asked = DynamicProbeManager(pack, impl="cpu")
    assert asked.impl == "cpu" and asked.impl_why == "as asked"


def test_failed_descent_leaves_nothing_to_the_next(pack, monkeypatch):
    manager, hidden = DynamicProbeManager(pack, impl="numba", strategy="descent"), torch.randn(2, 16)
    _, expected = manager.step(None, hidden)
    real = compiled.descend

    def out_of_memory(*arguments):
        active, _, scores = arguments[-3]
        active[:], scores[:] = True, 1.0
        raise MemoryError

    monkeypatch.setattr(compiled, "descend", out_of_memory)
    with pytest.raises(MemoryError):
        manager.step(None, hidden)
    monkeypatch.setattr(compiled, "descend", real)
    _, found = manager.step(None, hidden)
    assert np.array_equal(found.probes, expected.probes) and np.array_equal(found.values, expected.values)


@pytest.mark.parametrize("strategy", ["descent", "exhaustive"])
def test_slots_read_by_compiled_code_are_counted_as_hits(pack, strategy):
    manager = DynamicProbeManager(pack, impl="numba", strategy=strategy)
    before = manager.arena.stats().hits
    scores = manager.score_tokens(torch.randn(5, pack.architecture.hidden_size), prompt_len=2)
    assert manager.arena.stats().hits - before == int(scores.coverage.evaluated.sum()) > 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_nan_score_of_a_parent_makes_its_children_nan(order):
    """Whatever its place among the parents: the largest of a NaN and a number is a NaN."""
    tree = ConceptTree([0, 1, 2, 2], [2, 2], [0, 0, 1])
    w1 = torch.zeros(3, 1, 16)
    w1[order[0], 0, :2] = torch.tensor([3e38, -3e38])
    net = compiled.CompiledNet({"w1": w1, "b1": torch.full((3, 1), 3.0)})
    for everything in (False, True):
        found = net.descend(
            (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx),
            tree.groups,
            np.zeros(3, np.int64),
            1,
            torch.full((1, 16), 10.0),
            1,
            np.array([0, 1]),
            None,
            np.full(3, 0.1, np.float32),
            np.full(3, 0.5, np.float32),
            path_rule=True,
            max_rounds=None,
            max_active=3,
            everything=everything,
        )
        scores = found.descent(3).scores
        assert np.isnan(scores[0, order[0]]) and np.isnan(scores[0, 2]) and scores[0, order[1]] > 0.9

"""Calibrated expand thresholds reach their target recall on held-out documents."""

import math
import random

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.core.hierarchy import ConceptTree
from probemon.core.intervals import mean_interval
from probemon.errors import CalibrationError, ConfigError
from probemon.lab.calibration import expansion
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.lab.calibration.expansion import (
    Reach,
    ThresholdFamily,
    calibrate_expansion,
    calibrate_on,
    documents_needed,
    measure_expansion,
    split,
)

RULES, SHAPES = ["independent", "path"], ["tree", "dag"]


def hierarchy(shape, n=16, seed=0):
    """A random forest (or DAG, up to two parents) with two roots."""
    rng = random.Random(seed)
    ids = [str(i) for i in range(n)]
    up = [
        [] if i < 2 else [ids[j] for j in rng.sample(range(i), k=min(i, rng.choice([1, 2]) if shape == "dag" else 1))]
        for i in range(n)
    ]
    return ConceptTree.build(ids, up)[1]


def random_scores(tree, rule, lengths, seed=0):
    """Scores of documents of these lengths, of eight values, so that ties are common."""
    rng = np.random.default_rng(seed)
    own = [rng.choice(np.float32([0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1]), size=(n, tree.n)) for n in lengths]
    return [tree.times_best_parent(scores) if rule == "path" else scores for scores in own]


def make_reach(rule, shape, seed=0, alert=None):
    tree = hierarchy(shape, seed=seed)
    alerts = (
        np.random.default_rng(seed).choice(np.float32([0.05, 0.3, 0.5]), size=tree.n)
        if alert is None
        else np.full(tree.n, alert, np.float32)
    )
    return Reach(tree, rule, alerts)


def descendants(tree, probe):
    return {d for child in tree.children(probe).tolist() for d in {child, *descendants(tree, child)}}


def walk(reach, expand, scores):
    """What one token reaches, by walking: dicts and a loop."""
    tree, path = reach.tree, reach.score_rule == "path"
    reached = {p for p in range(tree.n) if tree.level[p] in reach.base_layers} | set(reach.always_on)
    reached |= set(tree.roots.tolist()) if path else set()
    reached |= {a for p in reached for a in tree.ancestors(p)} if path else set()
    waiting = sorted(reached)
    while waiting:
        probe = waiting.pop()
        if scores[probe] > expand[probe]:
            for child in tree.children(probe).tolist():
                new = ({child} | (tree.ancestors(child) if path else set())) - reached
                reached |= new
                waiting += sorted(new)
    return reached


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_missed_probes_equal_a_walk_of_the_hierarchy(rule, shape, seed, monkeypatch):
    monkeypatch.setattr(expansion, "_CELLS", 16 * 7)  # batches of seven tokens
    reach = make_reach(rule, shape, seed)
    reach = Reach(reach.tree, rule, reach.alert, always_on=(7,)) if seed % 2 else reach
    documents = random_scores(reach.tree, rule, [1, 5, 0, 12, 2, 3, 7], seed)
    expand = np.random.default_rng(seed).choice(np.float32([-1, 0.1, 0.3, 0.6]), size=reach.tree.n)
    found = reach.missed(expand, documents)
    for i, scores in enumerate(documents):
        reached = [walk(reach, expand, row) for row in scores]
        fired = [{p for p in range(reach.tree.n) if row[p] > reach.alert[p]} for row in scores]
        counts = (
            sum(map(len, fired)),
            sum(len(f - r) for f, r in zip(fired, reached, strict=True)),
            len(scores),
            sum(map(len, reached)),
        )
        assert (found.fired[i], found.missed[i], found.tokens[i], found.active[i]) == counts
    assert found.missed.sum() > 0
    assert found.losses.tolist() == [
        m / f for m, f in zip(found.missed.tolist(), found.fired.tolist(), strict=True) if f
    ]
    assert found.share_evaluated == found.active.sum() / (30 * reach.tree.n)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_slack_bounds_the_share_of_scores_below_each_threshold(rule, shape):
    reach = make_reach(rule, shape, 1, alert=0.4)
    documents = random_scores(reach.tree, rule, [6] * 12, 2)
    family, exact = ThresholdFamily(reach, documents), reach.exact()
    few = 0
    for slack in (0.0, 0.03, 0.25, 0.5, 1.0, None):
        at = family.at(slack)
        for probe in range(reach.tree.n):
            below = descendants(reach.tree, probe)
            rows = [row for scores in documents for row in scores if any(row[d] > reach.alert[d] for d in below)]
            sample = sorted(float(row[probe]) for row in rows)
            safe = exact[probe] if rule == "path" else -1
            if not below:
                assert math.isnan(at[probe])
            elif slack is None or len(sample) < 5:
                few += len(sample) < 5
                assert at[probe] == safe
            else:
                failing = min(math.floor(slack * len(sample)), len(sample) - 1)
                assert sum(s <= at[probe] for s in sample) <= failing or at[probe] == safe
                assert at[probe] >= safe and (
                    sum(s <= sample[failing] for s in sample) > failing
                )  # a threshold of the next score would fail more
                assert at[probe] == safe or np.nextafter(at[probe], np.float32(2)) == np.float32(sample[failing])
    inner = int(reach.tree.has_children.sum())
    assert 0 <= family.n_unknown < inner and family.n_unknown * 6 >= few
    assert not reach.missed(family.at(0.0), documents).missed.any()  # lossless on what it was shaped on


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_less_slack_misses_no_more_and_the_fallback_misses_nothing(rule, shape, seed):
    reach = make_reach(rule, shape, seed)
    family = ThresholdFamily(reach, random_scores(reach.tree, rule, [4] * 10, seed))
    documents = random_scores(reach.tree, rule, [4] * 20, seed + 100)
    before, thresholds = reach.missed(family.at(None), documents), family.at(None)
    assert before.missed.sum() == 0
    inner = reach.tree.has_children
    for slack in (-1.0, -0.9, -0.3, -0.01, 0.0, 1e-4, 0.01, 0.1, 0.2, 0.4, 0.7, 1.0):
        at, now = family.at(slack), reach.missed(family.at(slack), documents)
        assert (
            (at[inner] >= thresholds[inner]).all()
            and (now.missed >= before.missed).all()
            and (now.active <= before.active).all()
        )
        before, thresholds = now, at
    assert before.missed.sum() > 0


def test_path_rule_thresholds_are_at_least_the_lowest_alert_below():
    reach = make_reach("path", "tree", 3, alert=0.6)
    family = ThresholdFamily(reach, random_scores(reach.tree, "path", [6] * 10, 3))
    inner = reach.tree.has_children
    assert (family.at(0.0)[inner] >= np.float32(0.6)).all() and (family.at(None)[inner] == np.float32(0.6)).all()


def test_probe_without_alerting_descendants_is_always_expanded():
    reach = make_reach("path", "tree", 3)
    alert = reach.alert.copy()
    below = sorted(descendants(reach.tree, 0))
    alert[below] = np.nan
    family = ThresholdFamily(Reach(reach.tree, "path", alert), random_scores(reach.tree, "path", [6] * 10, 3))
    assert (family.at(0.5)[[p for p in [0, *below] if reach.tree.has_children[p]]] == -1).all()


def test_negative_slack_lowers_thresholds_down_to_a_useful_minimum():
    for rule in RULES:
        reach = make_reach(rule, "tree", 4, alert=0.05)
        family = ThresholdFamily(
            reach, [np.maximum(scores, np.float32(0.3)) for scores in random_scores(reach.tree, rule, [8] * 10, 4)]
        )
        inner = reach.tree.has_children
        at, lowest = family.at(0.0)[inner], family.at(None)[inner]
        assert np.allclose(at, 0.3, atol=1e-6) and np.allclose(
            family.at(-0.25)[inner], np.maximum(at * 0.75**8, lowest), atol=1e-6
        )
        assert np.array_equal(family.at(-1.0)[inner], lowest) and lowest.tolist() == [
            np.float32(0.05 if rule == "path" else -1)
        ] * len(lowest)


# -- the guarantee -------------------------------------------------------------------------------


def population(rule, shape, n, seed):
    """Documents of which some are unlike the others: there what is above a firing probe scores low. Which probes fire
    is known.
    """
    reach = make_reach(rule, shape, seed, alert=0.02 if rule == "path" else 0.6)
    tree, rng = reach.tree, np.random.default_rng(seed)
    documents = []
    for _ in range(n):
        unlike = rng.random() < 0.12
        scores = rng.random((4, tree.n)) * 0.5
        leaves = np.flatnonzero(~tree.has_children)
        for row in scores:
            for leaf in rng.choice(leaves, size=2):
                row[leaf] = 0.7 + 0.3 * rng.random()
                for above in tree.ancestors(int(leaf)):
                    row[above] = 0.1 + 0.25 * rng.random() if unlike else 0.55 + 0.45 * rng.random() ** 0.5
        scores = scores.astype(np.float32)
        documents.append(tree.times_best_parent(scores) if rule == "path" else scores)
    return reach, documents


def mean_losses(reach, documents, n, recall, repeats, seed=0):
    """Mean held-out loss of each of many random splits, and the share of probes active, against that of the last
    resort.
    """
    rng = np.random.default_rng(seed)
    shaping, rest = documents[:30], documents[30:]
    losses, shares = [], []
    for _ in range(repeats):
        order = rng.permutation(len(rest))
        found = calibrate_on(reach, shaping, [rest[i] for i in order[:n]], recall=recall)
        held_out = reach.missed(found.expand_threshold, [rest[i] for i in order[n:]])
        losses.append(held_out.losses.mean())
        shares.append(held_out.share_evaluated)
    return np.array(losses), np.array(shares)


@pytest.mark.parametrize("n", [9, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_mean_recall_on_held_out_documents_reaches_the_target(rule, shape, n):
    reach, documents = population(rule, shape, 230, 5)
    losses, shares = mean_losses(reach, documents, n, 0.9, 150)
    assert 0 < losses.mean() <= 0.1 + 3 * losses.std() / math.sqrt(len(losses))
    assert n == 9 or losses.mean() > 0.03  # the share that may be missed is used
    assert (
        shares.min() < reach.missed(ThresholdFamily(reach, documents[:30]).at(None), documents).share_evaluated
    )  # not by opening everything


def test_without_the_conformal_correction_the_target_is_missed(monkeypatch):
    """The same splits with the plain mean in place of the conformal bound: the test above would fail."""
    reach, documents = population("independent", "tree", 230, 5)
    kept, _ = mean_losses(reach, documents, 10, 0.9, 300)
    monkeypatch.setattr(expansion, "_within", lambda total, n, recall: total <= (1 - recall) * n + 1e-9)
    broken, _ = mean_losses(reach, documents, 10, 0.9, 300)
    assert broken.mean() > 0.1 + 3 * broken.std() / math.sqrt(300) and kept.mean() < 0.1


def test_the_slack_is_the_largest_that_the_bound_allows():
    reach, documents = population("independent", "dag", 90, 6)
    shaping, calibrating = documents[:30], documents[30:]
    found = calibrate_on(reach, shaping, calibrating, recall=0.9)
    family = ThresholdFamily(reach, shaping)
    steps = [-0.5, -0.25, *((i / 1024) ** 2 for i in range(0, 1025, 8))]
    sums = {slack: reach.missed(family.at(slack), calibrating).losses.sum() for slack in [*steps, found.slack]}
    assert (sums[found.slack] + 1) / 61 <= 0.1 and all(
        (total + 1) / 61 > 0.1 for slack, total in sums.items() if slack > found.slack
    )
    assert (
        0 < found.slack < 1
        and found.loss == pytest.approx(sums[found.slack] / 60)
        and np.array_equal(found.expand_threshold, family.at(found.slack), equal_nan=True)
    )
    assert (found.n_shaping, found.n_calibration, found.n_units, found.n_unknown) == (30, 60, 60, family.n_unknown)
    assert found.share_evaluated == reach.missed(found.expand_threshold, calibrating).share_evaluated


def test_documents_without_firing_probes_do_not_count():
    reach, documents = population("independent", "tree", 60, 7)
    silent = [np.zeros((5, reach.tree.n), np.float32)] * 40
    with_them = calibrate_on(reach, [*silent, *documents[:30]], [*silent, *documents[30:]], recall=0.9)
    without = calibrate_on(reach, documents[:30], documents[30:], recall=0.9)
    assert (
        np.array_equal(with_them.expand_threshold, without.expand_threshold, equal_nan=True)
        and with_them.loss == without.loss
    )
    assert with_them.n_units == without.n_units == 30 and with_them.n_calibration == 70


def test_split_is_seeded_and_results_are_deterministic():
    shaping, calibrating = split(11, share=0.4, seed=1)
    assert (
        len(shaping) == 4
        and sorted([*shaping, *calibrating]) == list(range(11))
        and not np.array_equal(shaping, split(11, share=0.4, seed=2)[0])
    )
    reach, documents = population("path", "dag", 60, 8)
    one, two = (calibrate_expansion(reach, documents, recall=0.9, seed=3) for _ in range(2))
    assert np.array_equal(one.expand_threshold, two.expand_threshold, equal_nan=True) and one.slack == two.slack
    by_hand = calibrate_on(reach, *([documents[i] for i in part] for part in split(60, seed=3)), recall=0.9)
    assert by_hand.slack == one.slack and one.stated()["n_units"] == 30


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recall", "needed"), [(0.5, 1), (0.9, 9), (0.99, 99), (0.999, 999), (0.3, 1), (2 / 3, 2)])
def test_too_few_documents_are_refused_with_the_number_needed(recall, needed):
    assert documents_needed(recall) == needed
    if needed < 100:
        reach, documents = population("independent", "tree", 2 * needed, 9)
        assert calibrate_on(reach, documents[:needed], documents[needed:], recall=recall).n_units == needed
        with pytest.raises(
            CalibrationError,
            match=f"{needed - 1} documents with something firing are too few for a recall of .*: {needed} are needed",
        ):
            calibrate_on(reach, documents[:needed], documents[needed + 1 :], recall=recall)


def test_unreachable_root_is_reported():
    tree = ConceptTree([0, 1, 1, 1], [2], [0, 1, 1])  # probe 1 is a root at level 1
    documents = [np.full((2, 3), 0.9, np.float32)] * 40
    alert = np.full(3, 0.5, np.float32)
    with pytest.raises(CalibrationError, match=r"with every probe expanded 0.333 .* Add their level to base_layers"):
        calibrate_expansion(Reach(tree, "independent", alert), documents, recall=0.9)
    assert calibrate_expansion(Reach(tree, "path", alert), documents, recall=0.9).loss == 0
    assert calibrate_expansion(Reach(tree, "independent", alert, base_layers=(0, 1)), documents, recall=0.9).loss == 0


@pytest.mark.parametrize("recall", [0, 1, 1.5, True, "0.9", float("nan")])
def test_invalid_recall_is_refused(recall):
    with pytest.raises(ConfigError, match="recall is"):
        calibrate_expansion(*population("path", "tree", 4, 0), recall=recall)


def test_expansion_without_firing_probes_is_refused():
    reach, documents = population("path", "tree", 30, 0)
    with pytest.raises(CalibrationError, match="no probe has an alert threshold"):
        calibrate_expansion(Reach(reach.tree, "path", np.full(reach.tree.n, np.nan, np.float32)), documents, recall=0.9)
    with pytest.raises(CalibrationError, match="0 documents with something firing are too few"):
        calibrate_expansion(Reach(reach.tree, "path", np.ones(reach.tree.n, np.float32)), documents, recall=0.9)
    with pytest.raises(CalibrationError, match="nothing fires in these documents"):
        measure_expansion(
            Reach(reach.tree, "path", np.ones(reach.tree.n, np.float32)), np.zeros(reach.tree.n, np.float32), documents
        )
    with pytest.raises(ConfigError, match="share is 1"):
        calibrate_expansion(reach, documents, recall=0.9, share=1)


# -- measuring, and what runs --------------------------------------------------------------------


def test_recall_is_measured_per_document_and_overall_with_an_interval():
    reach, documents = population("independent", "dag", 50, 10)
    documents = [*documents, np.zeros((3, reach.tree.n), np.float32)]
    expand = np.full(reach.tree.n, 0.7, np.float32)
    measured, found = measure_expansion(reach, expand, documents, confidence=0.8), reach.missed(expand, documents)
    assert 0 < found.missed.sum() < found.fired.sum()
    assert measured.recall == pytest.approx(
        1 - np.mean([m / f for m, f in zip(found.missed, found.fired, strict=True) if f])
    )
    assert (measured.low, measured.high) == mean_interval(measured.recall, 50, 0.8)
    assert (
        measured.recall_of_all == 1 - found.missed.sum() / found.fired.sum()
        and measured.n_fired == found.fired.sum()
        and measured.n_documents == 50
    )
    assert measured.share_evaluated == found.share_evaluated


@pytest.mark.parametrize("rule", RULES)
def test_calibrated_pack_reaches_the_counted_probes(model, tmp_path, rule):
    """Through the manager: the memoryless descent with load_threshold="calibrated" has active what `Reach` counted."""
    pack = make_pack(tmp_path / "a", model, rule=rule)
    states = torch.randn(60, 8, HIDDEN, generator=torch.Generator().manual_seed(0))
    manager = DynamicProbeManager(pack, strategy="descent", impl="cpu", max_loaded_probes=40)
    documents = [manager.score_all(hidden).numpy() for hidden in states]
    reach = Reach(pack.tree, rule, pack.alert_threshold.numpy())
    found = calibrate_expansion(reach, documents[:40], recall=0.8)
    made = write_calibrated(pack, tmp_path / "b", expansion=found)
    calibrated = DynamicProbeManager(
        ProbePack.open(made.directory),
        load_threshold="calibrated",
        strategy="descent",
        impl="cpu",
        max_loaded_probes=40,
    )
    counted = reach.missed(found.expand_threshold, documents[40:])
    for i, hidden in enumerate(states[40:]):
        scores = calibrated.score_tokens(hidden)
        fired = sum(len(scores.fired(t)) for t in range(8))
        assert int(scores.coverage.active.sum()) == counted.active[i] and fired == counted.fired[i] - counted.missed[i]
    assert (
        counted.missed.sum() > 0
        and 0.6 < measure_expansion(reach, made.expand_threshold.numpy(), documents[40:]).recall < 1
    )

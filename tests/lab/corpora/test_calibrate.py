"""Calibrated alert thresholds hold their rate, say if they cannot, and are used by matching rules."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from conftest import make_model, make_pack
from corpora import make_tokenizer, random_texts
from forging import forge
from oracle import states
from probemon import DynamicProbeManager, ProbePack
from probemon.core.aggregate import Attention, Each, Ema, Max, Mean, RollingMax, RollingMean, over
from probemon.core.intervals import at_most, clopper_pearson, lower_bound, mean_interval, upper_bound
from probemon.core.request_counts import RequestCounts, RequestTraits
from probemon.core.score_counts import ScoreCounts
from probemon.errors import CalibrationError, ConfigError, PackCorrupt, PackError
from probemon.host.identity import manifest_host, model_identity
from probemon.lab.calibration.calibrate import CalibratedAlerts, Rates, calibrate_alerts, most_allowed, units_needed
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.lab.calibration.expansion import Expansion
from probemon.lab.cli.calibrate import _far_below, calibrate
from probemon.lab.cli.scored_documents import ScoredDocuments
from probemon.lab.corpora.corpus import score_documents
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, Window
from probemon.ops.drift.drift_monitor import DriftMonitor
from probemon.packs.edit import rename

AGGREGATORS = [Each(), Mean(), Max(), Ema(0.3), RollingMean(3), RollingMax(3), Attention(0.1)]
PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


# -- intervals -----------------------------------------------------------------------------------


def at_least(k, n, p):
    """Probability of k or more of n, as a fraction."""
    p = Fraction(float(p))
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


@pytest.mark.parametrize("n", [1, 2, 7, 30])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.999])
def test_clopper_pearson_bounds_invert_the_binomial_tail(n, confidence):
    lows, highs = clopper_pearson(np.arange(n + 1), n, confidence)
    side = (1 - confidence) / 2
    assert lows[0] == 0 and highs[n] == 1
    for k in range(n + 1):
        if k:
            assert float(at_least(k, n, lows[k])) == pytest.approx(side, rel=1e-10)
        if k < n:
            assert float(1 - at_least(k + 1, n, highs[k])) == pytest.approx(side, rel=1e-10)


@pytest.mark.parametrize("p", [0.003, 0.1, 0.5, 0.77])
def test_interval_covers_the_rate_as_often_as_stated(p):
    n, exact = 25, Fraction(p)
    lows, highs = clopper_pearson(np.arange(n + 1), n, 0.9)
    covered = sum(math.comb(n, k) * exact**k * (1 - exact) ** (n - k) for k in range(n + 1) if lows[k] <= p <= highs[k])
    assert 0.9 <= covered < 1 or p < 0.01


def test_bounds_of_many_trials_equal_closed_forms_and_log_sums():
    assert upper_bound(0, 10**6, 0.95) == pytest.approx(-math.expm1(math.log(0.05) / 10**6), rel=1e-10)
    assert lower_bound(10**6, 10**6, 0.95) == pytest.approx(math.exp(math.log(0.05) / 10**6), rel=1e-12)
    n, k, p = 40_000, 370, 0.01
    terms = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * math.log(p) + (n - i) * math.log1p(-p)
        for i in range(k + 1)
    ]
    assert at_most(k, n, p) == pytest.approx(math.fsum(map(math.exp, terms)), rel=1e-7)
    assert at_most(n, n, p) == 1 and clopper_pearson(0, 0) == (0, 1)


def test_mean_interval_has_closed_forms_for_constant_samples():
    for n in (1, 10, 1000):
        low, high = mean_interval(1.0, n, 0.95)
        assert high == 1 and low == pytest.approx(0.025 ** (1 / n), rel=1e-12)
        assert mean_interval(0.0, n, 0.95) == (0, pytest.approx(1 - 0.025 ** (1 / n), rel=1e-12))
    low, high = mean_interval(0.9, 50, 0.95)
    for q in (low, high):
        assert 50 * (0.9 * math.log(0.9 / q) + 0.1 * math.log(0.1 / (1 - q))) == pytest.approx(math.log(40), rel=1e-9)
    assert low < 0.9 < high and mean_interval(0.5, 0) == (0, 1)


@pytest.mark.parametrize("n", [3, 40])
def test_mean_interval_covers_the_mean_as_often_as_stated(n):
    rng = np.random.default_rng(0)
    means = rng.beta(0.3, 0.1, size=(2000, n)).mean(axis=1)  # mostly near 0 or 1
    low, high = mean_interval(means, n, 0.9)
    assert ((low <= 0.75) & (high >= 0.75)).mean() >= 0.9 and low.max() > 0.3


@pytest.mark.parametrize(
    "bad", [(5, 3, 0.9), (-1, 3, 0.9), (0.5, 3, 0.9), (1, 3, 1.0), (1, 3, 0), (1, 3, True), (math.nan, 3, 0.9)]
)
def test_invalid_counts_and_confidences_are_refused(bad):
    with pytest.raises(ConfigError):
        clopper_pearson(*bad)


# -- alerts --------------------------------------------------------------------------------------


def random_documents(n, k, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [(rng.random((rng.integers(1, longest), k)) ** 3).astype(np.float32) for _ in range(n)]


def largest_allowed(n, rate, risk):
    """By the bounds themselves; no more than rate * n can be allowed."""
    k = np.arange(min(n, int(rate * n) + 2))
    return max(k[upper_bound(k, n, 1 - risk) <= rate].tolist(), default=-1)


@pytest.mark.parametrize(
    ("n", "rate", "risk"),
    [(1, 0.5, 0.5), (299, 0.01, 0.05), (298, 0.01, 0.05), (2000, 0.01, 0.05 / 7), (5000, 0.2, 1e-6)],
)
def test_allowed_exceedances_are_the_most_the_upper_bound_permits(n, rate, risk):
    allowed = largest_allowed(n, rate, risk)
    assert most_allowed(n, rate, risk) == allowed
    needed = units_needed(rate, risk)
    assert (1 - rate) ** needed <= risk < (1 - rate) ** (needed - 1) and (allowed >= 0) == (n >= needed)


@pytest.mark.parametrize("family", [False, True])
@pytest.mark.parametrize("unit", ["token", "document"])
@pytest.mark.parametrize("aggregate", AGGREGATORS, ids=str)
def test_thresholds_and_rates_equal_plain_python(aggregate, unit, family):
    benign, k, fpr = random_documents(160, 3), 3, 0.1
    positives = [
        (scores, None if i % 2 else np.array([i % 4 == 0, True, False]))
        for i, scores in enumerate(random_documents(9, 3, seed=1))
    ]
    alerts = calibrate_alerts(benign, fpr=fpr, aggregate=aggregate, unit=unit, family=family, positives=positives)
    running = [over(aggregate, scores) for scores in benign]
    risk, rate = 0.05 / k, fpr / k if family else fpr
    for concept in range(k):
        tokens = [float(v) for part in running for v in part[:, concept]]
        highest = [max(part[:, concept].tolist()) for part in running]
        units = tokens if unit == "token" else highest
        allowed = largest_allowed(len(units), rate, risk)
        threshold = float(alerts.threshold[concept])
        expected = sorted(units, reverse=True)[allowed]
        assert alerts.allowed == allowed and threshold >= expected
        assert (
            threshold == expected or float(np.nextafter(np.float32(threshold), np.float32(0))) < expected
        )  # the nearest fp32 that is not lower
        assert sum(v > threshold for v in units) <= allowed
        for rates, values in ((alerts.tokens, tokens), (alerts.documents, highest)):
            count = sum(v > threshold for v in values)
            assert (rates.count[concept], rates.n[concept], rates.rate[concept]) == (
                count,
                len(values),
                count / len(values),
            )
            assert rates.low[concept] == lower_bound(count, len(values), 1 - risk)
        assert (
            (alerts.tokens if unit == "token" else alerts.documents).high[concept]
            == upper_bound(allowed, len(units), 1 - risk)
            <= rate
        )
        mine = [over(aggregate, scores)[:, concept] for scores, of in positives if of is None or of[concept]]
        assert alerts.positive_documents.count[concept] == sum(
            (v > threshold).any() for v in mine
        ) and alerts.positive_documents.n[concept] == len(mine)
        assert alerts.positive_tokens.count[concept] == sum(
            (v > threshold).sum() for v in mine
        ) and alerts.positive_tokens.n[concept] == sum(map(len, mine))
    together = [(part > alerts.threshold).any(axis=1) for part in running]
    assert alerts.any_token.count.tolist() == [sum(map(sum, together))] and alerts.any_document.count.tolist() == [
        sum(map(any, together))
    ]
    assert (alerts.n_tokens, alerts.n_documents) == (sum(map(len, running)), 160)


def test_threshold_is_rounded_up_so_that_no_more_tokens_exceed_it():
    """Nearest fp32 numbers would be lower than half of the values that they stand for, and one more token would exceed
    them.
    """
    benign = random_documents(100, 50)
    running = np.concatenate([over(Mean(), scores) for scores in benign])
    alerts = calibrate_alerts(benign, fpr=0.1, aggregate=Mean())
    expected = np.sort(running, axis=0)[-1 - alerts.allowed]
    assert (expected.astype(np.float32) < expected).any()
    assert ((running > alerts.threshold).sum(axis=0) == alerts.allowed).all()


def test_true_rates_are_within_the_target_as_often_as_stated():
    """Uniform scores: the true rate of a threshold is 1 minus it. Some concept is over the target in at most 10 % of
    the trials, and in far more without the correction.
    """
    rng, fpr, k, trials = np.random.default_rng(0), 0.05, 5, 200
    broken, uncorrected = 0, 0
    for _ in range(trials):
        scores = rng.random((150, k)).astype(np.float32)
        broken += (1 - calibrate_alerts([scores], fpr=fpr, confidence=0.9).threshold > fpr).any()
        uncorrected += any(
            1 - calibrate_alerts([scores[:, [i]]], fpr=fpr, confidence=0.9).threshold[0] > fpr for i in range(k)
        )
    assert broken / trials <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / trials)
    assert broken > 0 and uncorrected / trials > 0.25


def test_family_calibration_keeps_the_overall_false_alarm_rate():
    rng, fpr, trials = np.random.default_rng(1), 0.1, 80
    each, family = 0, 0
    for _ in range(trials):
        scores = rng.random((300, 6)).astype(np.float32)
        for name in (False, True):
            t = calibrate_alerts([scores], fpr=fpr, confidence=0.9, family=name).threshold
            over_any = 1 - np.prod(t.astype(np.float64)) > fpr
            family, each = family + (name and over_any), each + (not name and over_any)
    assert each == trials and family / trials <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / trials)


@pytest.mark.parametrize(
    ("settings", "needed"), [({}, 459), ({"family": True}, 2301), ({"confidence": 0.5}, 230), ({"fpr": 0.2}, 21)]
)
def test_too_few_benign_tokens_are_refused_with_the_number_needed(settings, needed):
    rate = settings.get("fpr", 0.01) / (5 if settings.get("family") else 1)
    assert needed == math.ceil(math.log((1 - settings.get("confidence", 0.95)) / 5) / math.log(1 - rate))
    scores = np.random.default_rng(0).random((needed, 5)).astype(np.float32)
    assert calibrate_alerts([scores], **{"fpr": 0.01, **settings}).allowed == 0
    with pytest.raises(
        CalibrationError, match=f"{needed - 1} benign tokens are too few .* over 5 concepts: {needed} tokens are needed"
    ):
        calibrate_alerts([scores[1:]], **{"fpr": 0.01, **settings})
    with pytest.raises(CalibrationError, match=f"1 benign documents are too few .*: {needed} documents are needed"):
        calibrate_alerts([scores], unit="document", **{"fpr": 0.01, **settings})


def test_unseen_tokens_are_left_out():
    benign = random_documents(60, 2)
    holes = [np.insert(scores, [0, len(scores) // 2], np.nan, axis=0) for scores in benign]
    for unit in ("token", "document"):
        whole, holed = (
            calibrate_alerts(d, fpr=0.1, aggregate="mean", unit=unit)
            for d in (benign, [*holes, np.full((3, 2), np.nan)])
        )
        assert (
            np.array_equal(whole.threshold, holed.threshold)
            and whole.n_tokens == holed.n_tokens
            and holed.n_documents == 60
        )
    holes[0][1, 0] = np.nan  # of one concept alone: a probe that does not score a number
    with pytest.raises(ConfigError, match="score 0 of 2 is nan"):
        calibrate_alerts(holes, fpr=0.1)


def test_tied_scores_are_counted_with_the_upper_bound_of_allowed_ones():
    """90 % zeros: the threshold may be 0, and the upper bound is still that of as many as were allowed."""
    scores = np.zeros((1000, 1), dtype=np.float32)
    scores[:100] = 0.5
    alerts = calibrate_alerts([scores], fpr=0.2)
    assert alerts.threshold.tolist() == [0] and alerts.tokens.count.tolist() == [100] and alerts.allowed > 150
    assert alerts.tokens.high[0] == upper_bound(alerts.allowed, 1000, 0.95) > upper_bound(100, 1000, 0.95)
    scores[:500] = 1.0
    alerts = calibrate_alerts([scores], fpr=0.2)
    assert alerts.threshold.tolist() == [1] and alerts.tokens.count.tolist() == [0]


def test_concept_without_positives_has_no_recall():
    alerts = calibrate_alerts(
        random_documents(60, 2), fpr=0.1, positives=[(np.ones((3, 2), np.float32), np.array([True, False]))]
    )
    entry = alerts.entry(1)
    assert entry["positive_tokens"] == {"count": 0, "n": 0, "rate": None, "low": 0.0, "high": 1.0}
    assert alerts.entry(0)["positive_documents"]["rate"] == 1.0
    assert "positive_tokens" not in calibrate_alerts(random_documents(60, 2), fpr=0.1).entry(0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fpr": 0}, "fpr is 0"),
        ({"fpr": True}, "fpr is True"),
        ({"fpr": 0.1, "confidence": 1}, "confidence is 1"),
        ({"fpr": 0.1, "unit": "row"}, "unit is 'row': give token or document"),
        ({"fpr": 0.1, "aggregate": "median"}, "median"),
    ],
)
def test_invalid_targets_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        calibrate_alerts(random_documents(60, 2), **settings)


def test_empty_documents_and_mismatched_concepts_are_refused():
    with pytest.raises(CalibrationError, match="no benign tokens"):
        calibrate_alerts([np.zeros((0, 2), np.float32)], fpr=0.1)
    with pytest.raises(ConfigError, match=r"of \[1, 2\] concepts"):
        calibrate_alerts([*random_documents(3, 2), *random_documents(3, 1)], fpr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(3,\)"):
        calibrate_alerts([np.zeros(3, np.float32)], fpr=0.1)


# -- the pack ------------------------------------------------------------------------------------


def made_alerts(aggregator, threshold):
    rates = Rates.of([0] * len(threshold), 500, 0.01)
    one = Rates.of([3], 500, 0.05)
    return CalibratedAlerts(
        aggregator,
        "token",
        0.01,
        0.95,
        False,
        1,
        500,
        20,
        np.asarray(threshold, np.float32),
        rates,
        rates,
        one,
        one,
        None,
        None,
    )


def made_expansion(pack, value=0.2):
    values = np.where(pack.tree.has_children, np.float32(value), np.float32(np.nan))
    return Expansion(values, 0.9, 0.01, 10, 10, 9, 0.05, 0.4, 2, (0,))


def test_aggregator_thresholds_are_stored_next_to_token_thresholds(pack, tmp_path):
    three, seven, eight = (pack.find(f"c{i}") for i in (3, 7, 8))
    once = write_calibrated(
        pack,
        tmp_path / "a",
        watched=[three, seven],
        alerts=made_alerts(Ema(0.3), [0.25, 0.5]),
        inputs={"benign": {"sha256_of_texts": "00"}},
    )
    assert once.name == "random-calibrated" and once.aggregated == ("ema(0.3)",) and pack.aggregated == ()
    assert torch.equal(once.alert_threshold, pack.alert_threshold) and torch.equal(
        once.thresholds_for(None), pack.alert_threshold
    )
    assert (
        once.thresholds_for(Ema(0.3))[[three, seven]].tolist() == [0.25, 0.5]
        and int(once.thresholds_for("ema(0.3)").isnan().sum()) == 38
    )
    assert torch.equal(once.golden_scores, pack.golden_scores) and once.concepts == pack.concepts
    twice = write_calibrated(once, tmp_path / "b", watched=[seven, eight], alerts=made_alerts(Ema(0.3), [0.75, 1.0]))
    assert (
        twice.thresholds_for(Ema(0.3))[[three, seven, eight]].tolist() == [0.25, 0.75, 1.0]
        and twice.name == "random-calibrated"
    )
    first, second = twice.manifest["provenance"]["calibrations"]
    assert (
        first["watched"] == ["c3", "c7"]
        and first["aggregator"] == "ema(0.3)"
        and first["inputs"] == {"benign": {"sha256_of_texts": "00"}}
        and first["fpr"] == 0.01
    )
    assert first["source"] == {"name": "random", "sha256": pack.manifest["files"]["probes.safetensors"]["sha256"]}
    assert second["source"]["sha256"] == once.manifest["files"]["probes.safetensors"]["sha256"] and set(
        second["versions"]
    ) == {"probemon", "torch", "numpy"}
    stated = twice.manifest["quality"]["alerts"]["ema(0.3)"]
    assert set(stated["concepts"]) == {"c3", "c7", "c8"} and stated["concepts"]["c7"]["threshold"] == 0.75
    assert stated["concepts"]["c7"]["tokens"] == {
        "count": 0,
        "n": 500,
        "rate": 0.0,
        "low": 0.0,
        "high": upper_bound(0, 500, 0.99),
    }
    assert "2 concepts for `ema(0.3)`" in (twice.directory / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"are for single tokens, ema\(0.3\), not for mean"):
        twice.thresholds_for(Mean())
    ProbePack.open(twice.directory, verify=True)


def test_expand_thresholds_calibrated_for_other_alerts_are_cleared(model, tmp_path):
    quality = {
        "auroc_median": 0.9,
        "false_positive_rate": 0.3,
        "per_level": {"0": {"auroc_median": 0.8, "recall_at_threshold": 0.5}},
    }
    pack = make_pack(tmp_path / "a", model, rule="independent", quality=quality)
    both = write_calibrated(
        pack, tmp_path / "b", watched=[3], alerts=made_alerts(Each(), [0.5]), expansion=made_expansion(pack)
    )
    assert (
        both.alert_threshold[3] == 0.5
        and both.recommended["load_threshold"] == "calibrated"
        and torch.equal(both.alert_threshold[4:], pack.alert_threshold[4:])
    )
    assert (
        both.manifest["quality"]["expansion"]["recall"] == 0.9
        and "reached to 0.9" in (both.directory / "README.md").read_text()
    )
    assert {k: v for k, v in both.manifest["quality"].items() if k not in ("alerts", "expansion")} == {
        "auroc_median": 0.9,
        "per_level": {"0": {"auroc_median": 0.8}},
    }
    config = {"strategy": "descent", "impl": "cpu"}
    assert DynamicProbeManager(both, load_threshold="calibrated", **config).plan.expand_threshold[0] == np.float32(0.2)
    assert DynamicProbeManager(both, **config).plan.expand_threshold[0] == np.float32(0.2)
    kept = write_calibrated(both, tmp_path / "c", watched=[3], alerts=made_alerts(Mean(), [0.5]))
    assert (
        torch.equal(kept.expand_threshold.isnan(), both.expand_threshold.isnan())
        and not kept.manifest["provenance"]["calibrations"][-1]["expand_thresholds_cleared"]
    )
    cleared = write_calibrated(both, tmp_path / "d", watched=[3], alerts=made_alerts(Each(), [0.6]))
    assert (
        cleared.expand_threshold.isnan().all()
        and "load_threshold" not in cleared.recommended
        and "expansion" not in cleared.manifest["quality"]
    )
    assert (
        cleared.manifest["provenance"]["calibrations"][-1]["expand_thresholds_cleared"]
        and "are cleared" in (cleared.directory / "README.md").read_text()
    )
    with pytest.raises(ConfigError, match="have no expand threshold: calibrate the pack"):
        DynamicProbeManager(cleared, load_threshold="calibrated", **config)


def test_calibrated_expansion_is_not_the_default_of_an_exact_pack(pack, tmp_path):
    made = write_calibrated(pack, tmp_path / "a", expansion=made_expansion(pack))
    assert "load_threshold" not in made.recommended and made.manifest["provenance"]["calibrations"][0]["watched"] == []
    exact = DynamicProbeManager(made, strategy="descent", impl="cpu").plan.expand_threshold
    assert np.array_equal(exact, pack.tree.min_over_descendants(pack.alert_threshold.numpy()))
    assert DynamicProbeManager(made, load_threshold="calibrated", strategy="descent", impl="cpu").plan.expand_threshold[
        0
    ] == np.float32(0.2)


def test_thresholds_for_an_aggregate_alone_keep_the_descent_exact(model, tmp_path):
    alert = torch.full((40,), 0.3)
    alert[7] = torch.nan
    pack = make_pack(tmp_path / "pack", model, alert_threshold=alert, aggregated={"max": torch.full((40,), 0.2)})
    made = write_calibrated(pack, tmp_path / "a", expansion=made_expansion(pack))
    assert "load_threshold" not in made.recommended
    neither = make_pack(tmp_path / "neither", model, alert_threshold=alert)
    made = write_calibrated(neither, tmp_path / "b", expansion=made_expansion(neither))
    assert made.recommended["load_threshold"] == "calibrated"


def test_writing_refuses_existing_packs_and_empty_calibrations(pack, tmp_path):
    with pytest.raises(PackError, match="exists"):
        write_calibrated(pack, pack.directory, watched=[3], alerts=made_alerts(Mean(), [0.5]))
    with pytest.raises(ConfigError, match="nothing to write"):
        write_calibrated(pack, tmp_path / "a")
    with pytest.raises(ConfigError, match="2 probes are watched, the thresholds are of 1"):
        write_calibrated(pack, tmp_path / "a", watched=[1, 2], alerts=made_alerts(Mean(), [0.5]))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("", torch.zeros(40), "expected an aggregator's name"),
        ("each", torch.zeros(40), "expected an aggregator's name"),
        ("mean", torch.zeros(39), r"\(39,\), expected .* torch.float32 \(40,\)"),
        ("mean", torch.zeros(40, 1), r"\(40, 1\)"),
        ("mean", torch.zeros(40, dtype=torch.float64), "float64"),
    ],
)
def test_forged_aggregator_thresholds_are_named(pack, tmp_path, name, tensor, words):
    forged = forge(pack, tmp_path / "forged", lambda tensors: tensors.update({f"alert_threshold:{name}": tensor}))
    with pytest.raises(PackCorrupt, match=words):
        ProbePack.open(forged)


# -- rules ---------------------------------------------------------------------------------------


def watched_by(pack, model, *, above, aggregate):
    events = []
    with DynamicProbeManager(pack, strategy="descent", impl="cpu").attach(model) as run:
        run.on("c9", above=above, aggregate=aggregate, action=events.append)
        out = model.generate(PROMPT, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return events, run.result(out).aggregate("c9", aggregate).values


@pytest.mark.filterwarnings("ignore:.*ran nothing while it was watched:UserWarning")
@pytest.mark.parametrize("aggregate", [None, Ema(0.3), "mean"], ids=str)
def test_rule_uses_the_threshold_calibrated_for_its_aggregate(model, pack, tmp_path, aggregate):
    aggregator = Each() if aggregate is None else Mean() if aggregate == "mean" else aggregate
    _, values = watched_by(pack, model, above=0.9, aggregate=aggregate)
    threshold = float(np.float32(np.median(values[:-1])))
    made = write_calibrated(
        pack,
        tmp_path / "a",
        watched=pack.find_all(["c9", "c10", "c11"]),
        alerts=made_alerts(aggregator, [threshold, 1.0, 0.5]),
    )
    events, again = watched_by(made, model, above=None, aggregate=aggregate)
    assert np.array_equal(values, again) and {event.above for event in events} == {threshold}
    over_it = values > threshold
    assert [event.value for event in events] == [
        v for v, now, before in zip(values, over_it, [False, *over_it], strict=False) if now and not before
    ]
    with DynamicProbeManager(made, strategy="descent", impl="cpu").attach(model) as run:
        with pytest.raises(
            ConfigError,
            match=(
                r"c10 has no alert threshold in random-calibrated for .* that a score can exceed \(1.0\): give above="
            ),
        ):
            run.on(["c9", "c10"], aggregate=aggregate)
        if aggregate is not None:
            with pytest.raises(ConfigError, match=r"c12 has no alert threshold .* \(nan\): give above="):
                run.on("c12", aggregate=aggregate)
        with pytest.raises(ConfigError, match=r"not for max: give above= or calibrate the pack"):
            run.on("c9", aggregate="max")
        run.on("c9", above=0.5, aggregate="max")


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(model, pack, tmp_path_factory):
    """A host with a tokenizer of characters in a folder, benign and positive documents (random texts)."""
    folder = tmp_path_factory.mktemp("calibrate")
    model.save_pretrained(folder / "host")
    make_tokenizer().save_pretrained(folder / "host")
    rows = [{"id": f"b{i}", "text": text} for i, text in enumerate(random_texts(60, longest=40))]
    (folder / "benign.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"id": "bad", "text": ""}]))
    rows = [
        {"id": f"p{i}", "text": text, "concepts": ["c5"] if i % 2 else ["c5", "c6", "c20"]}
        for i, text in enumerate(random_texts(8, seed=1))
    ]
    (folder / "positive.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_command(*arguments):
    app = typer.Typer()
    app.command()(calibrate)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def exhaustive(pack, model, texts):
    """Scores of every probe at the tokens of each text, by one plain forward each."""
    tokenizer, manager = make_tokenizer(), DynamicProbeManager(pack, strategy="descent", impl="cpu")
    for text in texts:
        hidden = states(model, pack, [1, *tokenizer(text)["input_ids"]])
        yield manager.score_all({site: h[1:] for site, h in hidden.items()}).numpy()


def test_threshold_far_below_the_packs_own_is_reported(pack):
    own = pack.alert_threshold.numpy()
    rng = np.random.default_rng(0)
    for scale, words in (
        (0.5, ""),
        (0.05, f"'concept 6' at .*, the pack's is {own[4]:.2g}, and 1 more likewise."),
    ):
        scores = [scale * own[None, [4, 5]] * rng.random((10, 2)) for _ in range(60)]
        told = _far_below(pack, [4, 5], calibrate_alerts(scores, fpr=0.05, aggregate=Ema(0.5)))
        assert bool(told) == bool(words) and re.search(words, told)


def test_command_calibrates_and_reports_the_reached_rates(workplace, model, pack, tmp_path):
    arguments = [
        pack.directory,
        "--model",
        workplace / "host",
        "--benign",
        workplace / "benign.jsonl",
        "--positive",
        workplace / "positive.jsonl",
        "--fpr",
        0.05,
        "--aggregate",
        "ema:0.5",
    ]
    done = run_command(*arguments, "--watch", "c5", "--watch", "c6", "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    told, made = json.loads(done.stdout), ProbePack.open(tmp_path / "out", verify=True)
    scores, watched = list(exhaustive(pack, model, random_texts(60, longest=40))), pack.find_all(["c5", "c6"])
    expected = calibrate_alerts([s[:, watched] for s in scores], fpr=0.05, aggregate=Ema(0.5))
    assert np.abs(made.thresholds_for(Ema(0.5))[watched].numpy() - expected.threshold).max() < 2e-5
    assert (
        told["n_tokens"] == expected.n_tokens
        and told["concepts"]["c5"]["tokens"]["n"] == expected.n_tokens
        and told["aggregator"] == "ema(0.5)"
    )
    assert (
        told["inputs"]["benign"]["n_documents"] == 60
        and told["inputs"]["benign"]["n_bad"] == 1
        and told["inputs"]["benign"]["source"] == "benign.jsonl"
    )
    assert (
        told["concepts"]["c5"]["positive_documents"]["n"] == 8
        and told["concepts"]["c6"]["positive_documents"]["n"] == 4
    )
    assert (
        made.manifest["provenance"]["calibrations"][0]["inputs"] == told["inputs"]
        and told["inputs"]["window"].keys() == {"n_tokens", "overlap"}
        and made.manifest["quality"]["alerts"]["ema(0.5)"]["concepts"]["c5"]["threshold"]
        == told["concepts"]["c5"]["threshold"]
    )
    shown = run_command(*arguments, "--watch", "c5", "--out", tmp_path / "again")
    assert (
        shown.exit_code == 0
        and "concept 5" in shown.stdout
        and "from 60 benign documents of" in shown.stdout
        and "1 bad one left out (first: bad: empty)" in shown.stdout
        and "true-positive rate" in shown.stdout
    )
    alone = calibrate_alerts([s[:, watched[:1]] for s in scores], fpr=0.05, aggregate=Ema(0.5))
    n_tokens, n_documents = int(alone.any_token.count[0]), int(alone.any_document.count[0])
    assert 0 < n_documents <= n_tokens
    assert (
        f"in these documents {n_tokens} of {alone.n_tokens} tokens exceed the threshold of one concept or more; such"
        f" tokens are in {n_documents} of 60 documents\n" in shown.stdout
    )
    assert "alerts on ema(0.5), 1 concept: at most 0.05 of benign tokens exceed each threshold" in shown.stdout


@pytest.mark.parametrize("options", [["--statistics"], ["--fpr", "0.05"]], ids=["alone", "with alerts"])
def test_command_stores_score_statistics(workplace, model, pack, tmp_path, options):
    arguments = [pack.directory, "--model", workplace / "host", "--benign", workplace / "benign.jsonl"]
    options = [
        *options,
        "--aggregate",
        "ema:0.5",
        "--watch",
        "c5",
        "--watch",
        "c6",
        "--out",
        tmp_path / "out",
        "--json",
    ]
    done = run_command(*arguments, *options)
    assert done.exit_code == 0, done.output
    told, made = json.loads(done.stdout), ProbePack.open(tmp_path / "out", verify=True)
    scores, watched = list(exhaustive(pack, model, random_texts(60, longest=40))), pack.find_all(["c5", "c6"])
    for name, aggregator in (("each", Each()), ("ema(0.5)", Ema(0.5))):
        expected = sum_of([ScoreCounts.of(over(aggregator, one[:, watched])) for one in scores])
        counts = made.score_counts(name).numpy()
        # A plain forward has other last bits, so that a score at the edge of a bin may be in the next one.
        assert np.abs(counts[watched] - expected).sum() <= 4 and counts.sum() == counts[watched].sum() == expected.sum()
    assert told["statistics"]["n_tokens"] == sum(map(len, scores)) and told["statistics"]["n_documents"] == 60
    assert torch.equal(made.alert_threshold, pack.alert_threshold)  # --fpr is of ema(0.5)


def sum_of(counts):
    return sum(one.counts for one in counts)


def test_command_refuses_options_that_calibrate_nothing(workplace, pack, tmp_path):
    common = [pack.directory, "--benign", workplace / "benign.jsonl", "--out", tmp_path / "out"]
    for options, words in (
        (["--fpr", "0.1", "--aggregate", "z:pack"], "--aggregate z:pack: nothing is calibrated"),
        ([], "or --statistics to count scores alone"),
        (["--watch", "c5"], "nothing to calibrate"),
        (["--statistics", "--family"], "apply to alert thresholds"),
    ):
        done = run_command(*common, *options)
        assert isinstance(done.exception, ConfigError) and words in str(done.exception), done.exception


def test_command_stores_a_drift_reference_of_its_documents(workplace, model, pack, tmp_path):
    """Its documents, as requests: by the thresholds of the new version, and of all concepts, watched or not."""
    shared = [pack.directory, "--model", workplace / "host", "--benign", workplace / "benign.jsonl"]
    done = run_command(*shared, "--fpr", 0.1, "--watch", "c5", "--watch", "c9", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    made, tokenizer, traits = ProbePack.open(tmp_path / "out", verify=True), make_tokenizer(), []
    frozen, texts = made.drift_reference, random_texts(60, longest=40)
    for text, scores in zip(texts, exhaustive(pack, model, texts), strict=True):
        hidden = states(model, pack, [1, *tokenizer(text)["input_ids"]])
        norms = np.stack([h[1:].norm(dim=-1).numpy() for h in hidden.values()], axis=1)
        traits.append(RequestTraits.of(scores, norms, made.alert_threshold.numpy()))
    expected = RequestCounts.of(traits)
    assert frozen.counts.n == 60 and frozen.host == model_identity(model, tokenizer) and frozen.alert_set is None
    assert frozen.ids == tuple(concept["id"] for concept in made.concepts) and frozen.sites == ("resid_post.1",)
    # A document whose highest score is the threshold itself is over it or not, by the last bit.
    assert np.abs(frozen.counts.fired - expected.fired).max() <= 1 and expected.fired.max() > 0
    for name in ("low", "high", "flat", "highest", "norms"):
        assert np.abs(getattr(frozen.counts, name) - getattr(expected, name)).sum() <= 2, name
    assert pack.drift_reference is None
    with pytest.raises(ConfigError, match="the reference is of 60 requests, and fewer than 100"):
        DriftMonitor(DynamicProbeManager(made))
    assert np.array_equal(frozen.alert, made.alert_threshold.numpy(), equal_nan=True) and frozen.alert[0] > 0
    made.alert_threshold[:] = 0.05
    with pytest.raises(ConfigError, match=r"the reference's alert threshold of .* and 0\.05 is in force"):
        DriftMonitor(DynamicProbeManager(made))
    # What cuts a pack down, or names it anew, knows nothing of requests; a copy is the same pack.
    assert rename(made, tmp_path / "renamed", name="other").drift_reference is None
    copy = ProbePack.open(tmp_path / "out").save_pretrained(tmp_path / "copy")
    assert (copy.drift_reference.counts.highest == frozen.counts.highest).all()


def test_calibration_completes_missing_model_details_of_a_pack(model, tmp_path):
    whole = manifest_host(model, "org/name")

    def said(host):
        pack = make_pack(tmp_path / "pack", model, host=host, overwrite=True)
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        return write_calibrated(pack, out, expansion=made_expansion(pack), stated=whole).manifest["host"]

    assert said({"model_id": "my/name", "n_layers": None}) == {**whole, "model_id": "my/name"}  # imported, say
    assert said({"fingerprint": whole["fingerprint"]}) == {key: whole[key] for key in ("fingerprint", "settings")}
    assert said({"fingerprint": "of another"}) == {"fingerprint": "of another"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda manifest: manifest.pop("drift"), "and drift in the manifest"),
        (lambda manifest: manifest["drift"].pop("host"), "drift has no host"),
        (lambda manifest: manifest["drift"].update(n_requests="60"), "drift.n_requests is '60': expected a number"),
        (lambda manifest: manifest["drift"].update(n_requests=59), "are not counts of 59 requests"),
    ],
)
def test_forged_drift_reference_is_refused(workplace, pack, tmp_path, change, words):
    counts = RequestCounts.none(pack.n_probes, pack.n_probes, 1)
    counts.highest[:, 3] = 60
    frozen = replace(counts, n=60)
    made = write_calibrated(
        pack, tmp_path / "out", watched=[3], alerts=made_alerts(Each(), [0.5]), drift=lambda alert: frozen, host={}
    )
    assert made.drift_reference.counts.highest[0, 3] == 60
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(PackCorrupt, match=words):
        ProbePack.open(tmp_path / "out").drift_reference  # noqa: B018


def test_command_calibrates_expansion_on_documents_not_used_for_alerts(workplace, model, pack, tmp_path):
    from probemon.lab.calibration.expansion import Reach, calibrate_expansion, split

    done = run_command(
        pack.directory,
        "--model",
        workplace / "host",
        "--benign",
        workplace / "benign.jsonl",
        "--fpr",
        0.1,
        "--expand-recall",
        0.9,
        "--out",
        tmp_path / "out",
        "--json",
    )
    assert done.exit_code == 0, done.output
    told, made = json.loads(done.stdout), ProbePack.open(tmp_path / "out", verify=True)
    scores = list(exhaustive(pack, model, random_texts(60, longest=40)))
    alerts = calibrate_alerts([scores[i] for i in split(60)[0]], fpr=0.1)
    assert told["n_documents"] == 30 and np.abs(made.alert_threshold.numpy() - alerts.threshold).max() < 2e-5
    found = calibrate_expansion(Reach(pack.tree, pack.score_rule, made.alert_threshold.numpy()), scores, recall=0.9)
    assert told["expansion"]["n_calibration"] == 30 and told["expansion"]["slack"] == pytest.approx(
        found.slack, abs=0.02
    )
    inner = pack.tree.has_children
    assert not made.expand_threshold[inner].isnan().any() and made.expand_threshold[~inner].isnan().all()
    assert (
        DynamicProbeManager(made, load_threshold="calibrated", strategy="descent", impl="cpu").plan.expand_threshold
        is not None
    )


@pytest.mark.parametrize("level", [0, 1])
def test_recall_is_measured_from_the_packs_starting_levels(workplace, model, tmp_path, level):
    """The levels begin at 0 or at 1, and descents at the second of them, or at c0 too."""
    from probemon.lab.calibration.expansion import Reach, measure_expansion, split

    n = 40
    levels = [level + (i >= 4) + (i >= 9) for i in range(n)]
    concepts = [
        {
            "id": f"c{i}",
            "name": f"c{i}",
            "parents": [f"c{i % 4 if i < 9 else 4 + i % 5}"] if i >= 4 else [],
            "level": at,
        }
        for i, at in enumerate(levels)
    ]
    recommended = {"base_layers": [level + 1], "always_on": ["c0"]}
    pack = make_pack(
        tmp_path / "pack", model, n=n, concepts=concepts, rule="independent", recommended=recommended,
        alert_threshold=torch.full((n,), 0.7),
    )  # fmt: skip
    done = run_command(
        pack.directory,
        "--model",
        workplace / "host",
        "--benign",
        workplace / "benign.jsonl",
        "--expand-recall",
        0.5,
        "--out",
        tmp_path / "out",
        "--json",
    )
    assert done.exit_code == 0, done.output
    told, (_, last) = json.loads(done.stdout)["expansion"], split(60)
    scores = list(exhaustive(pack, model, random_texts(60, longest=40)))
    reach = Reach(pack.tree, pack.score_rule, pack.alert_threshold.numpy(), (level + 1,), (pack.find("c0"),))
    made = ProbePack.open(tmp_path / "out")
    measured = measure_expansion(reach, made.expand_threshold.numpy(), [scores[i] for i in last])
    assert told["base_layers"] == [level + 1] and 1 - told["loss"] == pytest.approx(measured.recall, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to calibrate"),
        (["--fpr", "0.001"], "tokens are needed"),
        (["--fpr", "0.001", "--unit", "document"], "documents are needed"),
        (["--fpr", "2"], "fpr is 2.0"),
        (["--fpr", "0.1", "--aggregate", "ema"], "ema:W"),
        (["--fpr", "0.1", "--watch", "cat"], "no concept 'cat'"),
        (["--fpr", "0.1", "--positive", "nowhere.jsonl"], "nowhere.jsonl is neither a file nor a folder"),
        (["--expand-recall", "1"], "recall is 1.0"),
        (["--expand-recall", "0.999"], "too few for a recall of 0.999: 999 are needed"),
        (["--expand-recall", "0.9", "--family"], "give --fpr too"),
    ],
)
def test_invalid_input_is_reported_before_anything_is_written(workplace, pack, tmp_path, arguments, words):
    done = run_command(
        pack.directory,
        "--model",
        workplace / "host",
        "--benign",
        workplace / "benign.jsonl",
        "--out",
        tmp_path / "out",
        *arguments,
    )
    assert done.exit_code != 0 and words in str(done.exception) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stated", "words"),
    [("c5", "document odd: 'concepts' is 'c5': give a list of concept ids"), (["c77"], "no concept 'c77'")],
)
def test_positive_documents_must_list_known_concepts(workplace, pack, tmp_path, stated, words):
    """And before the model is loaded: there is none here."""
    (tmp_path / "odd.jsonl").write_text(json.dumps({"id": "odd", "text": "abc", "concepts": stated}))
    done = run_command(
        pack.directory,
        "--model",
        tmp_path / "no-model",
        "--benign",
        workplace / "benign.jsonl",
        "--fpr",
        0.1,
        "--positive",
        tmp_path / "odd.jsonl",
        "--out",
        tmp_path / "out",
    )
    assert words in str(done.exception) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("out", "words"), [("taken", "taken exists: choose another"), ("taken/below", "taken is a file; choose another")]
)
def test_unwritable_output_is_reported_before_the_model_is_loaded(workplace, pack, tmp_path, out, words):
    (tmp_path / "taken").write_text("mine")
    done = run_command(
        pack.directory,
        "--model",
        tmp_path / "no-model",
        "--benign",
        workplace / "benign.jsonl",
        "--fpr",
        0.1,
        "--out",
        tmp_path / out,
    )
    assert words in str(done.exception) and (tmp_path / "taken").read_text() == "mine"


def test_command_options_set_field_names_length_and_window(workplace, model, pack, tmp_path):
    rows = [{"name": f"b{i}", "body": text} for i, text in enumerate([*random_texts(60, longest=40), "a" * 500])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = ["--text-field", "body", "--id-field", "name", "--max-chars", 400, "--window", 16, "--overlap", 4]
    done = run_command(
        pack.directory,
        "--model",
        workplace / "host",
        "--benign",
        tmp_path / "rows.jsonl",
        "--fpr",
        0.1,
        "--watch",
        "c5",
        "--out",
        tmp_path / "out",
        "--json",
        *fields,
    )
    assert done.exit_code == 0, done.output
    told, manager = (
        json.loads(done.stdout),
        DynamicProbeManager(pack, strategy="descent", impl="cpu", max_loaded_probes=pack.n_probes),
    )
    assert told["inputs"]["benign"]["n_documents"] == 60 and told["inputs"]["benign"]["n_bad"] == 1
    scored = score_documents(
        manager,
        model,
        make_tokenizer(),
        read_documents(random_texts(60, longest=40)),
        reading=Reading(Window(16, 4)),
        exhaustive=True,
    )
    expected = calibrate_alerts([one.everything.numpy()[:, [pack.find("c5")]] for one in scored], fpr=0.1)
    whole = calibrate_alerts(
        [s[:, [pack.find("c5")]] for s in exhaustive(pack, model, random_texts(60, longest=40))], fpr=0.1
    )
    assert (
        told["concepts"]["c5"]["threshold"] == pytest.approx(expected.threshold[0], abs=2e-5)
        and abs(whole.threshold[0] - expected.threshold[0]) > 1e-4
    )


def test_calibrated_pack_is_written_next_to_the_old_one(workplace, model, tmp_path):
    small = make_pack(tmp_path / "mine", model, n=6)
    arguments = [small.directory, "--model", workplace / "host", "--benign", workplace / "benign.jsonl", "--fpr", 0.1]
    assert (
        run_command(*arguments).exit_code == 0
        and ProbePack.open(tmp_path / "mine-calibrated").name == "random-calibrated"
    )
    done = run_command(*arguments)
    assert "mine-calibrated exists: choose another folder with --out" in str(done.exception)


def test_inspect_says_what_a_pack_was_calibrated_for(model, tmp_path, capsys):
    from probemon.cli.inspect_pack import inspect

    pack = make_pack(tmp_path / "a", model)
    made = write_calibrated(
        pack, tmp_path / "b", watched=[3, 5], alerts=made_alerts(Ema(0.3), [0.5, 0.6]), expansion=made_expansion(pack)
    )
    inspect(str(made.directory))
    text = capsys.readouterr().out
    assert "calibrated from random: alerts on ema(0.3) of 2 concepts to" in text and "expansion to a recall of" in text
    inspect(str(made.directory), as_json=True)
    about = json.loads(capsys.readouterr().out)
    assert about["aggregated_thresholds"] == {"ema(0.3)": 2} and len(about["calibrations"]) == 1


@pytest.mark.parametrize(
    ("positives", "words"),
    [
        ((np.full((5, 2), 0.5), np.array([True])), "which of the 2 concepts"),
        ((np.full((5, 3), 0.5), None), r"give scores \[T, 2\]"),
        ((np.full((5, 2), 0.5), np.array([0, 1])), "as booleans"),
    ],
)
def test_positives_of_other_concepts_are_refused(positives, words):
    benign = [np.random.default_rng(0).random((200, 2))]
    with pytest.raises(ConfigError, match=words):
        calibrate_alerts(benign, fpr=0.1, positives=[positives])


@pytest.mark.parametrize("bad", [7.0, -0.1, np.inf])
def test_scores_outside_0_to_1_are_refused(bad):
    scores = np.full((400, 1), 0.5)
    scores[17] = bad
    with pytest.raises(ConfigError, match="scores are not between 0 and 1"):
        calibrate_alerts([scores], fpr=0.1)


def test_duplicate_documents_are_reported(workplace, pack, tmp_path):
    lines = (workplace / "benign.jsonl").read_text().splitlines()[:60]
    (tmp_path / "copies.jsonl").write_text("\n".join([*lines, *lines[:7]]) + "\n")
    arguments = [
        pack.directory,
        "--model",
        workplace / "host",
        "--benign",
        tmp_path / "copies.jsonl",
        "--fpr",
        0.1,
        "--watch",
        "c5",
    ]
    done = run_command(*arguments, "--out", tmp_path / "a")
    assert done.exit_code == 0 and "7 of 67 benign documents are copies of others" in done.stdout
    assert (
        json.loads(run_command(*arguments, "--out", tmp_path / "b", "--json").stdout)["inputs"]["benign"]["n_copies"]
        == 7
    )


def test_unscored_positives_are_reported_like_benign_documents(workplace, pack, tmp_path):
    """Of 8 positives one alone is short enough."""
    lines = [json.loads(line) for line in (workplace / "positive.jsonl").read_text().splitlines()]
    rows = [lines[0], *({**line, "text": "abc" * 100} for line in lines[1:])]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [pack.directory, "--model", workplace / "host", "--benign", workplace / "benign.jsonl", "--fpr", 0.1]
    arguments += ["--unit", "document", "--watch", "c5", "--positive", tmp_path / "long.jsonl", "--max-chars", 200]
    shown = run_command(*arguments, "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    n_tokens = len(make_tokenizer()(lines[0]["text"])["input_ids"])
    why = "longer than 200 characters (300)"
    assert (
        f"true-positive rates: 1 positive document of {n_tokens} tokens, 7 bad ones left out (first: p1: {why})\n"
        in (shown.stdout)
    )
    assert re.search(r"concept 5 .* [01]\.0000 \(0\.\d{4} to [01]\.\d{4}\) of 1\n", shown.stdout), shown.stdout
    assert "Left out, since they could not be scored: 1 benign document and 7 positive documents." in (
        ProbePack.open(tmp_path / "out").card_text()
    )
    told = json.loads(run_command(*arguments, "--out", tmp_path / "again", "--json").stdout)
    assert told["concepts"]["c5"]["positive_documents"]["n"] == told["inputs"]["positive"]["n_documents"] == 1
    assert told["left_out"] == {
        "benign": {"n_bad": 1, "n_unseen": 0, "n_partly_seen": 0, "first_reasons": [{"id": "bad", "reason": "empty"}]},
        "positive": {
            "n_bad": 7,
            "n_unseen": 0,
            "n_partly_seen": 0,
            "first_reasons": [{"id": f"p{i}", "reason": why} for i in range(1, 8)],
        },
    }


def test_documents_with_unseen_tokens_are_reported(pack):
    """The states at the letter "b" are no numbers: a text of two letters has one or two that are seen, or none."""
    host, tokenizer, ids = make_model(), make_tokenizer(), []
    broken = tokenizer("b")["input_ids"][-1]
    host.model.embed_tokens.register_forward_pre_hook(lambda module, args: ids.append(args[0]))

    def break_states(module, args, output):
        return output.masked_fill((ids[-1] == broken)[..., None], math.nan)

    host.model.layers[1].register_forward_hook(break_states)
    documents = ScoredDocuments.of(
        DynamicProbeManager(pack),
        host,
        tokenizer,
        "-",
        np.arange(2),
        "positive",
        reading=Reading(),
        read=lambda source: read_documents(["ac", "ab", "bb", "bb", ""]),
    )
    assert documents.sentences("positive") == [
        "2 positive documents of 3 tokens, 1 bad one left out (first: 4: empty), 2 left out without a seen token",
        "1 of 4 positive documents is a copy of another: the bounds count them as independent, so they are too narrow",
    ]
    reasons = [{"id": "4", "reason": "empty"}]
    assert documents.left_out() == {"n_bad": 1, "n_unseen": 2, "n_partly_seen": 1, "first_reasons": reasons}
    assert documents.not_in_drift().startswith("the pack's drift reference has 1 of 4 documents")
    assert documents.stated()["n_unseen"] == 2

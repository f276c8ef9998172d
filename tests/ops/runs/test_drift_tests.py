"""Drift's statistical tests agree with scipy and plain Python, and raise and clear alarms at the right time."""

import numpy as np
import pytest
from scipy import stats

from drift_simulation import without_drift
from probemon.core.request_counts import (
    SCORE_EDGES,
    RequestCounts,
    RequestTraits,
    norm_bins,
    norm_of_bin,
)
from probemon.ops.drift.drift_tests import BLOCK, DriftTests, fisher, ks_chance, ks_distance


def test_fisher_test_equals_scipy_with_the_smaller_tail_doubled():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, n0 = rng.integers(1, 3000, size=2).tolist()
        rate = rng.random() ** 3
        k, k0 = int(rng.binomial(n, rate)), int(rng.binomial(n0, rate * rng.random()))
        table = [[k, n - k], [k0, n0 - k0]]
        tails = [stats.fisher_exact(table, alternative=side)[1] for side in ("less", "greater")]
        [p] = fisher(np.array([k]), n, np.array([k0]), n0)
        assert p == pytest.approx(min(1, 2 * min(tails)), rel=1e-9, abs=1e-290)


def test_ks_distance_equals_scipy_and_its_p_value_is_no_smaller():
    rng = np.random.default_rng(1)
    for n, m in [(30, 30), (200, 50), (1000, 1000), (1000, 137)]:
        one, other = rng.integers(0, 6, n), rng.integers(0, 7, m)
        counts = [np.bincount(sample, minlength=7)[None] for sample in (one, other)]
        expected = stats.ks_2samp(one, other, method="exact")
        distance = ks_distance(*counts)
        assert distance[0] == pytest.approx(expected.statistic)
        assert ks_chance(distance, np.array([n]), np.array([m]))[0] >= min(1, expected.pvalue)
    assert ks_distance(np.zeros((1, 7), int), counts[0])[0] == 0


def test_request_counts_equal_a_plain_loop():
    rng = np.random.default_rng(2)
    alert, traits, expected = np.array([0.3, 0.8, np.nan], np.float32), [], RequestCounts.none(3, 3, 2)
    for t in (1, 5, 300):
        scores = rng.random((t, 3)).astype(np.float32) ** 4
        scores[:, 2] = 0.0001  # at 0, and flat
        norms = np.exp(rng.normal(3, 2, (t, 2)))
        traits.append(RequestTraits.of(scores, norms, alert))
        for concept in range(3):
            values = scores[:, concept].tolist()
            expected.fired[concept] += any(value > alert[concept] for value in values)
            expected.low[concept] += sum(value <= np.float32(0.001) for value in values) >= 0.99 * t
            expected.high[concept] += sum(value >= np.float32(0.999) for value in values) >= 0.99 * t
            expected.flat[concept] += max(values) - min(values) <= 1e-6
            expected.highest[concept, sum(edge <= max(values) for edge in SCORE_EDGES)] += 1
        for site in range(2):
            expected.norms[site, norm_bins(np.array(sorted(norms[:, site])[(t - 1) // 2]))] += 1
    counts = RequestCounts.of(traits[:1]) + RequestCounts.of(traits[1:])
    assert counts.n == 3 and counts.low[2] == counts.flat[2] == 3
    for name in ("fired", "low", "high", "flat", "highest", "norms"):
        assert (getattr(counts, name) == getattr(expected, name)).all(), name
    assert all(abs(norm_of_bin(int(place)) / norm - 1) < 0.03 for norm in norms[:, 0] for place in [norm_bins(norm)])


def requests(n, fired=(), low=(), highest=(), norms=()):
    """Counts of which every scored concept and site has all requests in one bin, but for what is given."""
    counts = RequestCounts.none(len(fired), len(highest), len(norms))
    counts.fired[:], counts.low[:] = fired, low
    for concept, place in enumerate(highest):
        counts.highest[concept, place] = n
    for site, place in enumerate(norms):
        counts.norms[site, place] = n
    return RequestCounts(n, counts.fired, counts.low, counts.high, counts.flat, counts.highest, counts.norms)


def test_drift_is_raised_once_and_ends_after_a_thousand_normal_requests():
    tests = DriftTests(requests(1000, [100, 500], [0], [3], [200]))
    same = requests(BLOCK, [10, 50], [0], [3], [200])
    other = requests(BLOCK, [90, 50], [BLOCK], [9], [200])
    assert all(not tests.add(same) for _ in range(20))
    raised = [(block, one.kind, one.place) for block in range(12) for one in tests.add(other)]
    assert sorted(what[1:] for what in raised) == [("base_rate", 0), ("saturated", 0), ("scores", 0)]
    assert min(block for block, kind, _ in raised if kind == "base_rate") < 2
    whole = {one.kind: one for one in tests.held}
    assert (whole["saturated"].observed, whole["saturated"].reference, whole["saturated"].n) == (1, 0, 1000)
    assert (whole["scores"].reference, whole["scores"].observed, whole["scores"].distance) == (3, 9, 1)
    n_held = [len(tests.held) for _ in range(150) if not tests.add(same)]
    assert n_held[0] == 3 and n_held[-1] == 0


def test_small_difference_is_no_drift_even_if_significant():
    tests = DriftTests(requests(10**6, [100_000]))
    assert not any(tests.add(requests(BLOCK, [14])) for _ in range(100))
    assert fisher(np.array([1400]), 10_000, np.array([100_000]), 10**6)[0] < 1e-15


def test_large_difference_is_no_drift_if_chance_explains_it():
    tests = DriftTests(requests(1000, [10]))
    assert not tests.add(requests(BLOCK, [4]))


def test_days_without_drift_raise_no_alarm():
    assert not without_drift(days=20)

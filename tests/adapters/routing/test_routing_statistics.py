"""Routing metrics equal known values however a stream is split; quantiles stay within their stated error."""

import dataclasses
import math

import numpy as np
import pytest

from probemon.adapters.routing.decisions import Decisions, History, entropy
from probemon.adapters.routing.sketch import RELATIVE_ERROR, LogSketch
from probemon.adapters.routing.statistics import METRICS, RoutingStatistics
from probemon.errors import ConfigError
from streams import CHUNK, EXPERTS, NAMES, STREAMS, TABLE, codes_of, decisions_of, feed, logits_of, plain_metrics


def stats(k=1, e=EXPERTS, streams=1, **more):
    return RoutingStatistics(streams, e, k, **more)


@pytest.mark.parametrize("kind", STREAMS)
def test_the_four_streams_have_the_values_of_the_table(kind):
    found = feed(stats(), decisions_of(logits_of(kind)))
    for name, written in zip(NAMES, TABLE[kind], strict=True):
        digits = len(written.partition(".")[2])
        assert round(float(found.metric(name)[0]), digits) == float(written), name


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", STREAMS)
def test_metrics_equal_plain_python(kind, k):
    logits = logits_of(kind, seed=7, n=997)
    found = feed(stats(k), decisions_of(logits, k), sizes=[1, 30, 1000])
    for name, value in plain_metrics(logits, k).items():
        assert abs(float(found.metric(name)[0]) - value) < 1e-8, name


@pytest.mark.parametrize("seed", range(4))
def test_splitting_and_merging_a_stream_changes_no_bit(seed):
    rng = np.random.default_rng(seed)
    logits = np.stack([logits_of(kind, seed=seed, n=500) for kind in STREAMS])
    decisions = decisions_of(logits, 2)
    whole, cuts = feed(stats(2, streams=4), decisions), rng.multinomial(500, np.ones(9) / 9).tolist()
    cut, merged, history, at = feed(stats(2, streams=4), decisions, sizes=cuts), stats(2, streams=4), History(1, 4), 0
    for size in cuts:
        part = decisions.take(np.arange(at, at + size))
        if size:
            one = stats(2, streams=4)
            one.add(part, history.compare(np.zeros(size, np.int64), part))
            other = one.empty()
            other.merge(merged)
            one.merge(other)  # the later one takes in the earlier: the order does not matter
            merged = one
        at += size
    assert whole.as_dicts() == cut.as_dicts() == merged.as_dicts()
    codes = codes_of(rng.normal(size=(300, 5)), rng.random(300) < 0.1)
    assert (
        feed(stats(e=5, codes=True), codes).as_dicts()
        == feed(stats(e=5, codes=True), codes, sizes=[1, 7, 292]).as_dicts()
    )


def test_routers_are_kept_separate():
    logits = np.stack([logits_of(kind, n=800) for kind in STREAMS])
    together = feed(stats(streams=4), decisions_of(logits)).as_dicts()
    assert together == [feed(stats(), decisions_of(one)).as_dicts()[0] for one in logits]


def test_flips_are_counted_within_sequences():
    first = np.array([0, 1, 1, 2, 2, 2, 0, 0])
    rows = np.array([0, 0, 0, 1, 1, 1, 0, 1])  # a prompt of two rows, then a token of each
    found = feed(stats(), decisions_of(5 * np.eye(EXPERTS)[first]), sizes=[6, 2], rows=rows)
    assert found.metric("flip_rate")[0] == 3 / 6  # 0-1, 1-1; 2-2, 2-2; then 1-0 and 2-0


def test_nonfinite_decisions_are_left_out_and_counted():
    logits = logits_of("by token", n=100)
    bad = np.insert(logits, 40, np.nan, axis=0)
    bad[70, 2] = np.inf
    with np.errstate(invalid="ignore"):
        found = feed(stats(), decisions_of(bad))
    kept = np.delete(logits, 69, axis=0)
    assert int(found.n[0]) == 99 and int(found.n_bad[0]) == 2 and found.n_tokens == 101
    expected = plain_metrics(kept)
    for name in ("decision_entropy", "marginal_entropy", "max_vio", "gini"):
        assert abs(float(found.metric(name)[0]) - expected[name]) < 1e-8
    codes = np.ones((4, 3))
    codes[1] = 1e4  # no code is as large: its square would not fit the sums
    assert feed(stats(e=3, codes=True), codes_of(codes)).n_bad.tolist() == [1]


def test_flips_compare_only_finite_neighbours():
    first = np.array([0, 0, 5, 1, 1, 2])
    decisions = decisions_of(5 * np.eye(EXPERTS)[first])
    raw = decisions.raw.copy()
    raw[0, 2] = np.nan
    broken = dataclasses.replace(decisions, raw=raw)
    for sizes in ([6], [1] * 6, [2, 1, 3], [3, 3]):
        found = feed(stats(), broken, sizes=sizes)
        assert (found.n_pairs.tolist(), found.n_flips.tolist()) == ([3], [1]), sizes  # 0-0, 1-1, 1-2
    assert History(1, 1).compare(np.zeros(6, np.int64), broken).flips.tolist() == [[-1, 0, -1, -1, 0, 1]]
    codes = np.eye(6)
    codes[2] *= 1e4  # a code beyond what limits allow is left out as well
    assert feed(stats(e=6, codes=True), codes_of(codes)).n_pairs.tolist() == [3]


def test_entropy_is_never_negative_and_nan_for_nonfinite_input():
    found = entropy(np.array([[1.0, 0.0], [np.nan, 0.5], [np.nan, np.nan], [0.5, 0.5]]))
    assert (
        found[0] == 0
        and not np.signbit(found[0])
        and np.isnan(found[1:3]).all()
        and found[3] == pytest.approx(math.log(2))
    )


def test_empty_statistics_have_no_metrics():
    for one in (stats(), stats(codes=True)):
        assert all(math.isnan(one.metric(name)[0]) for name in METRICS if name != "kv_invalidations")
        assert one.as_dicts()[0]["n_tokens"] == 0


def plain_codes(codes):
    """Variances, variation and effective rank, in loops and by numpy's eigenvalues of the covariance."""
    n, r = codes.shape
    mean = [math.fsum(codes[:, i]) / n for i in range(r)]
    covariance = [
        [math.fsum((codes[t, i] - mean[i]) * (codes[t, j] - mean[j]) for t in range(n)) / n for j in range(r)]
        for i in range(r)
    ]
    variances = [covariance[i][i] for i in range(r)]
    shares = [max(x, 0.0) / sum(variances) for x in np.linalg.eigvalsh(np.array(covariance))]
    return (
        variances,
        sum(variances) / (math.fsum((codes**2).ravel()) / n),
        math.exp(-math.fsum(p * math.log(p) for p in shares if p > 0)),
    )


@pytest.mark.parametrize("seed", range(3))
def test_code_metrics_equal_their_covariance(seed):
    rng = np.random.default_rng(seed)
    codes = (
        (rng.normal(size=(400, 3)) @ rng.normal(size=(3, 6)) / 3 + rng.normal(size=6))
        .astype(np.float32)
        .astype(np.float64)
    )
    found = feed(stats(e=6, codes=True), codes_of(codes), sizes=[1, 100, 299])
    variances, variation, rank = plain_codes(codes)
    assert np.abs(found.variances()[0] - variances).max() < 1e-6
    assert abs(found.variation()[0] - variation) < 1e-6 and abs(found.effective_rank()[0] - rank) < 1e-4
    assert abs(found.code_norm()[0] - np.mean(np.sqrt((codes**2).sum(axis=1)))) < 1e-6
    assert found.code_norm_max()[0] == pytest.approx(np.sqrt((codes**2).sum(axis=1)).max(), rel=1e-6)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-5])
def test_tiny_codes_are_measured_as_accurately_as_large_ones(size):
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(400, 3)) @ rng.normal(size=(3, 6)) / 3 + rng.normal(size=6)
    codes = (size * codes / np.linalg.norm(codes, axis=1).max()).astype(np.float32).astype(np.float64)
    found, cut = (
        feed(stats(e=6, codes=True), codes_of(codes)),
        feed(stats(e=6, codes=True), codes_of(codes), sizes=[1, 100, 299]),
    )
    variances, variation, rank = plain_codes(codes)
    assert (
        np.abs(found.variances()[0] / variances - 1).max() < 1e-3
        and abs(found.variation()[0] - variation) < 1e-3
        and abs(found.effective_rank()[0] - rank) < 1e-2
    )
    assert abs(found.code_norm()[0] / np.mean(np.sqrt((codes**2).sum(axis=1))) - 1) < 1e-6
    assert found.as_dicts() == cut.as_dicts()
    same = feed(stats(e=6, codes=True), codes_of(np.repeat(codes[:1], 400, axis=0)))
    assert same.variation()[0] < 1e-3 and (size < 1e-4 or same.effective_rank()[0] == 0)


@pytest.mark.parametrize("rank", [1, 2, 5, 8])
def test_effective_rank_equals_the_known_rank(rank):
    """Codes that go to both sides of a mean along `rank` axes, equally: exactly that rank."""
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0][:rank]
    codes = 0.5 + np.concatenate([axes, -axes]).repeat(3, axis=0)
    assert abs(feed(stats(codes=True), codes_of(codes)).effective_rank()[0] - rank) < 1e-3


def test_constant_codes_have_no_rank():
    found = feed(stats(codes=True), codes_of(np.full((1000, 8), 0.7)))
    assert found.effective_rank()[0] == 0 and found.variation()[0] < 1e-6 and found.rank_entropy()[0] == 0


@pytest.mark.parametrize("codes", [False, True], ids=["weights", "codes"])
def test_sums_of_very_long_streams_do_not_overflow(codes):
    """A stream that is doubled 26 times, past 2e11 tokens, has the shares of its first 4,096."""
    large = np.zeros((4096, 4))
    large[:, 0] = 255
    large[::2, 1] = -20
    decisions = codes_of(large) if codes else decisions_of(np.minimum(large, 1))
    once = one = feed(stats(e=4, codes=codes), decisions)
    for _ in range(26):
        before = one
        one = before.empty()
        one.merge(before)
        one.merge(before)
    assert one.n_tokens == 4096 << 26
    assert once.metric("variation" if codes else "mutual_information")[0] > 1e-3
    for name in METRICS:
        if name not in ("kv_invalidations", "latency_p95_us"):
            np.testing.assert_allclose(one.metric(name), once.metric(name), rtol=1e-9, err_msg=name)
    parts, merged = [before, once], []
    for order in (parts, parts[::-1]):
        merged.append(before.empty())
        for part in order:
            merged[-1].merge(part)
    assert merged[0].as_dicts() == merged[1].as_dicts()


def test_softmax_entropy_cannot_detect_collapse_of_clamped_codes():
    """Why codes have a covariance and no entropy: of norm 3 in 8 dimensions, even the most peaked leaves half of it."""
    codes = np.eye(8) - 1 / 8
    codes *= 3 / np.linalg.norm(codes, axis=1, keepdims=True)
    assert feed(stats(), decisions_of(codes)).metric("decision_entropy")[0] > 0.45
    rng = np.random.default_rng(0)
    random = rng.normal(size=(2000, 8))
    random *= 3 / np.linalg.norm(random, axis=1, keepdims=True)
    assert min(feed(stats(), decisions_of(line[None])).metric("decision_entropy")[0] for line in random) > 0.45


def test_code_reuse_rate_and_kv_invalidations_have_known_values():
    n = 40 * CHUNK
    boundary = np.arange(n) % CHUNK == 0
    codes = np.random.default_rng(0).normal(size=(40, 8)).repeat(CHUNK, axis=0)
    found = feed(stats(codes=True), codes_of(codes, boundary), sizes=[5, n])
    assert found.code_reuse_rate()[0] == 1 - 1 / CHUNK and found.kv_invalidations()[0] == 0
    codes[3 * CHUNK + 9 : 4 * CHUNK] += 0.5  # within a chunk, with nothing decided
    assert feed(stats(codes=True), codes_of(codes, boundary), sizes=[5, n]).kv_invalidations()[0] == 1


def test_confidence_and_fallback_are_shares_of_tokens():
    more = {
        "confidence": np.array([0.5, np.nan, 1.0, 0.9], np.float32),
        "fallback": np.array([True, False, False, False]),
    }
    found = feed(stats(e=3, codes=True), codes_of(np.eye(4, 3), **more))
    assert found.confidence()[0] == pytest.approx(0.8, abs=1e-7) and found.fallback_rate()[0] == 0.25


def test_split_and_joined_decisions_equal_the_original():
    decisions = codes_of(np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 3 == 0)
    again = Decisions.join([decisions.take(np.arange(2)), decisions.take(np.arange(2, 9))])
    for name in ("raw", "top_idx", "top_w", "decided", "chunk", "fallback"):
        assert np.array_equal(getattr(again, name), getattr(decisions, name))


# -- the sketch ----------------------------------------------------------------------------------


def border(gamma):
    """Numbers on the borders of buckets, and just beside them."""
    powers = gamma ** np.arange(-300.0, 300.0)
    return np.concatenate([powers, np.nextafter(powers, 0), np.nextafter(powers, np.inf)])


ADVERSARIAL = {
    "one": np.array([3.7]), "all alike": np.full(1000, 0.001), "powers of ten": 10.0 ** np.arange(-8, 300),
    "borders": border(1.01 / 0.99),
    "two far apart": np.array([1e-8] * 99 + [1e12]), "pareto": np.random.default_rng(0).pareto(0.5, 5000) + 1e-6,
    "growing": np.linspace(1, 1e6, 4001),
    "falling": np.geomspace(1e9, 1e-6, 3001), "largest": np.array([1.7e308, 1e308, 1.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_quantiles_are_within_the_stated_error(name):
    values, sketch = ADVERSARIAL[name], LogSketch()
    for value in values.tolist():
        sketch.add(value)
    ordered = np.sort(values)
    for q in (0.0, 0.001, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0):
        exact = ordered[math.floor(q * (len(values) - 1))]
        assert abs(sketch.quantile(q) - exact) <= RELATIVE_ERROR * (1 + 1e-9) * exact


def test_sketches_merge_in_any_order():
    values = np.random.default_rng(1).lognormal(3, 2, 3000)
    whole, one, other = LogSketch(), LogSketch(), LogSketch()
    for i, value in enumerate(values.tolist()):
        whole.add(value)
        (one if i % 3 else other).add(value)
    other.merge(one)
    assert [whole.quantile(q) for q in np.linspace(0, 1, 101)] == [other.quantile(q) for q in np.linspace(0, 1, 101)]
    repeated = LogSketch()
    repeated.add(5.0, count=7)
    assert repeated.n == 7 and repeated.quantile(0.9) == pytest.approx(5, rel=0.01)
    assert len(whole._counts) < 900


def test_sketch_accepts_zero_and_refuses_invalid_latencies():
    sketch = LogSketch()
    assert math.isnan(sketch.quantile(0.5))
    for value in (0.0, 0.0, 1.0):
        sketch.add(value)
    assert sketch.quantile(0.5) == 0 and sketch.quantile(1) == pytest.approx(1, rel=0.01)
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="finite numbers"):
            sketch.add(wrong)

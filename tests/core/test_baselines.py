"""Z-scores and ranks equal plain Python in fp64, and resist an attacker who writes part of the baseline."""

import math
import statistics

import numpy as np
import pytest

from probemon.core.aggregate import Each, Ema, Mean, over, parse
from probemon.core.baselines import LEAST_TOKENS, Rank, ZScore, ceiling, is_z_score
from probemon.core.score_counts import EDGES, LEAST_SPREAD, MOST_LOG_ODDS, N_BINS, WIDTH, ScoreCounts, log_odds
from probemon.errors import ConfigError


def scores_of(t, k=3, seed=0):
    """Random scores [t, k], spread over the log odds, with ties, zeros and ones among them."""
    rng = np.random.default_rng(seed)
    scores = 1 / (1 + np.exp(-rng.normal(-4, 2, (t, k))))
    scores[rng.random((t, k)) < 0.2] = 0.25
    scores[rng.random((t, k)) < 0.05] = 0.0
    scores[rng.random((t, k)) < 0.05] = 1.0
    return scores.astype(np.float32)


def odds_of(score):
    score = min(max(float(score), 2**-24), 1 - 2**-24)
    return math.log(score / (1 - score))


def z_of(odds, before):
    if len(before) < LEAST_TOKENS:
        return math.nan
    median = statistics.median(before)
    deviation = statistics.median(abs(one - median) for one in before) / statistics.NormalDist().inv_cdf(0.75)
    return (odds - median) / max(deviation, LEAST_SPREAD)


def rank_of(odds, before):
    return sum(one < odds for one in before) / (len(before) + 1)


@pytest.mark.parametrize("last", [16, 17, 50, 1000])
@pytest.mark.parametrize("of", [Each(), Ema(0.3), Mean()], ids=str)
@pytest.mark.parametrize(("measure", "oracle"), [(ZScore, z_of), (Rank, rank_of)], ids=["z", "rank"])
def test_values_against_the_last_tokens_equal_plain_python(measure, oracle, of, last):
    scores = scores_of(90)
    values, running = over(measure(last, of), scores), over(of, scores)
    for k in range(3):
        odds = log_odds(running[:, k])
        np.testing.assert_allclose(odds, [odds_of(one) for one in running[:, k]], rtol=1e-12, atol=1e-12)
        expected = [oracle(odds[t], odds[max(0, t - last) : t].tolist()) for t in range(90)]
        np.testing.assert_allclose(values[:, k], expected, rtol=1e-9, atol=1e-9)
    assert np.isnan(values).sum() == (3 * LEAST_TOKENS if measure is ZScore else 0)


@pytest.mark.parametrize(("measure", "name"), [(ZScore, "z"), (Rank, "rank")])
def test_values_against_a_pack_follow_from_its_counts(measure, name):
    counts = ScoreCounts.of(scores_of(5000, seed=1))
    known, scores = measure(counts=counts), scores_of(40)
    assert str(known) == f"{name}:pack" and known == measure()
    values = over(known, scores)
    for t, k in np.ndindex(40, 3):
        odds = odds_of(scores[t, k])
        place = min(max(math.floor(odds / WIDTH) + N_BINS // 2, 0), N_BINS - 1)
        expected = sum(counts.counts[k, :place].tolist()) / 5001
        if measure is ZScore:
            expected = (odds - counts.median[k]) / counts.spread[k]
        assert values[t, k] == pytest.approx(expected, abs=1e-12)


def test_median_and_spread_of_counts_are_exact_within_a_bin():
    odds = np.random.default_rng(2).normal([-6, 0, 3], [0.5, 2, 1.2], (20_001, 3))
    counts = ScoreCounts.of(1 / (1 + np.exp(-odds)))
    for k in range(3):
        median = statistics.median(odds[:, k])
        deviation = 1.482602218505602 * statistics.median(np.abs(odds[:, k] - median).tolist())
        assert counts.median[k] == pytest.approx(median, abs=0.02)
        assert counts.spread[k] == pytest.approx(deviation, abs=0.03)
    steady = ScoreCounts.of(np.full((100, 1), 0.3))  # all in one bin: off by less than its width
    assert abs(steady.median[0] - odds_of(0.3)) < WIDTH and steady.spread[0] == LEAST_SPREAD
    ends = ScoreCounts.of(np.array([[0.0], [1.0], [0.0]]))
    assert ends.counts[0, [0, -1]].tolist() == [2, 1] and EDGES[0] == -16 and EDGES[-1] == 16


def test_score_counts_add_up_and_leave_out_nan():
    scores = scores_of(60)
    whole, parts = ScoreCounts.of(scores), ScoreCounts.of(scores[:20]) + ScoreCounts.of(scores[20:])
    assert np.array_equal(whole.counts, parts.counts) and whole.n.tolist() == [60] * 3
    scores[3, 1] = np.nan
    assert ScoreCounts.of(scores).n.tolist() == [60, 59, 60]
    with pytest.raises(ConfigError, match="not logits"):
        ScoreCounts.of(np.array([[1.5]]))
    with pytest.raises(ConfigError, match="none of them negative"):
        ScoreCounts(np.full((1, N_BINS), -1))
    assert np.isnan(ScoreCounts(np.zeros((1, N_BINS))).spread[0])


@pytest.mark.parametrize("aggregator", [ZScore(32), Rank(32), ZScore(20, Ema(0.5)), Rank(20, Mean())], ids=str)
def test_sequences_beams_and_drafts_equal_each_sequence_alone_bit_for_bit(aggregator):
    past, one, other = scores_of(40, seed=1), scores_of(30, seed=2), scores_of(30, seed=3)
    state = aggregator.begin()
    for token in past:
        state, _ = aggregator.add(state, token)
    a = b = state
    values = []
    for x, y in zip(one, other, strict=True):
        aggregator.add(a, np.ones(3))  # a draft that is rejected
        a, of_a = aggregator.add(a, x)
        b, of_b = aggregator.add(b, y)
        values.append((of_a, of_b))
        assert not of_a.flags.writeable and not a[1].flags.writeable and len(a[1]) <= aggregator.last
    for row, end in enumerate((one, other)):
        alone = over(aggregator, np.concatenate([past, end]))[40:]
        assert np.array([both[row] for both in values]).tobytes() == alone.tobytes()
    whole = np.concatenate([past, one])
    assert over(aggregator, whole[:, 1:2]).tobytes() == over(aggregator, whole)[:, 1:2].copy().tobytes()


def poisoned(n, m, value, seed):
    """Log odds of n tokens, m of which an attacker chose, in any order; and the others."""
    rng = np.random.default_rng(seed)
    clean = rng.normal(-6, 1, n - m)
    return rng.permutation(np.concatenate([clean, np.full(m, value) + rng.normal(0, 0.1, m)])), clean


@pytest.mark.parametrize("n", [16, 31, 64])
@pytest.mark.parametrize("value", [-1.0, 4.0, 16.0, -16.0])
def test_minority_of_poisoned_tokens_cannot_hide_a_high_score(n, value):
    """Whatever they are, the z-score of a high score is at least what the other tokens alone allow."""
    for seed in range(40):
        for m in (1, n // 4, (n - 1) // 2):
            window, clean = poisoned(n, m, value, seed)
            z = over(ZScore(n), 1 / (1 + np.exp(-np.append(window, 12.0)[:, None])))[-1, 0]
            spread = max(1.482602218505602 * (clean.max() - clean.min()), LEAST_SPREAD)
            assert z >= (12.0 - clean.max()) / spread - 1e-6 > 1.0


def test_breakdown_point_is_one_half():
    """From half of the tokens on there is no such bound: this is what the baseline bears, and no more."""
    for m, is_unusual in ((31, True), (33, False)):
        window, _ = poisoned(64, m, 6.0, seed=0)
        z = over(ZScore(64), 1 / (1 + np.exp(-np.append(window, 6.0)[:, None])))[-1, 0]
        assert (z > 1.0) == is_unusual


def test_sudden_poisoning_of_a_baseline_is_itself_unusual():
    """The tokens that fill it with high scores have high z-scores themselves, until they are half of it."""
    rng = np.random.default_rng(0)
    odds = np.concatenate([rng.normal(-6, 1, 64), np.full(64, 4.0)])
    z = over(ZScore(64), 1 / (1 + np.exp(-odds[:, None])))[64:, 0]
    assert (z[:16] > 3.5).all() and (z[:31] > 1).all() and z[40] < 1


def test_rank_tolerates_the_stated_share_of_higher_tokens():
    rng = np.random.default_rng(0)
    for m, reached in ((9, True), (11, False)):
        window = rng.permutation(np.concatenate([rng.normal(-6, 1, 100 - m), np.full(m, 9.0)]))
        value = over(Rank(100), 1 / (1 + np.exp(-np.append(window, 8.0)[:, None])))[-1, 0]
        assert (value > 0.89) == reached


def test_rank_threshold_has_its_stated_false_positive_rate():
    values = over(Rank(99), 1 / (1 + np.exp(-np.random.default_rng(5).normal(0, 1, (20_000, 1)))))[99:, 0]
    for r in (0.5, 0.9, 0.98):
        assert np.mean(values > r) <= 1 - r + 0.005
        assert np.mean(values >= r - 0.005) >= 1 - r - 0.005


def test_no_value_exceeds_the_ceiling():
    counts = ScoreCounts.of(scores_of(300, 1))
    high = np.concatenate([np.full((20, 1), 1e-30), np.ones((1, 1))])
    for aggregator in (ZScore(16), Rank(16), ZScore(counts=counts), Rank(counts=counts)):
        top = over(aggregator, high)[-1, 0]
        assert top == pytest.approx(ceiling(aggregator), rel=1e-12), aggregator
    assert ceiling(Rank(16)) == 16 / 17 and ceiling(Mean()) == 1 and pytest.approx(16.6355, abs=1e-3) == MOST_LOG_ODDS


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("z:pack", ZScore()),
        ("rank:pack", Rank()),
        (" z:last:64 ", ZScore(64)),
        ("rank:last:256:ema:0.3", Rank(256, Ema(0.3))),
        ("z:pack:rolling_mean(8)", parse("z:pack:rolling_mean:8")),
        ("z:pack:none", ZScore()),
    ],
)
def test_baseline_text_parses_and_reads_back(text, meant):
    assert parse(text) == meant and parse(str(meant)) == meant
    assert is_z_score(text) == isinstance(meant, ZScore) and not is_z_score(None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("z", "give z:pack"),
        ("rank:", "give z:pack"),
        ("z:last", "give z:pack"),
        ("z:last:x", "'x' is not a whole number"),
        ("z:last:2.5", "'2.5' is not a whole number"),
        ("rank:last:15", "it counts tokens, so give 16 or more"),
        ("z:pack:rank:pack", "give an aggregator of scores"),
        ("z:pack:meen", "did you mean 'mean'"),
    ],
)
def test_text_that_names_no_baseline_is_explained(text, words):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_baseline_of_a_pack_needs_its_counts():
    with pytest.raises(ConfigError, match=r"with_counts\(z:pack, pack, probes\)"):
        over(ZScore(), scores_of(3))
    with pytest.raises(ConfigError, match="3 scores, and rank:pack knows of 2 concepts"):
        over(Rank(counts=ScoreCounts.of(scores_of(20, 2))), scores_of(3))

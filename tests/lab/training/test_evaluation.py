"""Areas and their intervals: by their definition, and with the right coverage by groups."""

import numpy as np
import pytest

from probemon.lab.training.evaluation import area_interval, difference, judge, share

GRID = np.linspace(0, 1, 200_001)


def within(auroc, n_positive, n_negative):
    """The areas of a fine table from which `auroc` is no more than 1.96 standard errors, as the docstring says."""
    middle = (n_positive + n_negative) / 2
    spread = 1 + (middle - 1) * ((1 - GRID) / (2 - GRID) + GRID / (1 + GRID))
    error = np.sqrt(GRID * (1 - GRID) * spread / (n_positive * n_negative))
    return GRID[np.abs(auroc - GRID) <= 1.959964 * error]


@pytest.mark.parametrize("auroc", [0.0, 0.02, 0.3, 0.5, 0.81, 0.97, 1.0])
@pytest.mark.parametrize(("n_positive", "n_negative"), [(1, 1), (2, 30), (12, 12), (60, 45), (500, 3)])
def test_interval_of_an_area_equals_a_table_of_its_inequality(auroc, n_positive, n_negative):
    found, table = area_interval(auroc, n_positive, n_negative), within(auroc, n_positive, n_negative)
    assert found == pytest.approx((table.min(), table.max()), abs=2e-5)
    assert found[0] <= auroc <= found[1] and found[1] - found[0] > 1e-3


def test_interval_of_a_perfect_area_is_not_empty_and_narrows_with_texts():
    few, many = (area_interval(1.0, n, n) for n in (8, 80))
    assert few[1] == many[1] == 1 and 0.5 < few[0] < many[0] < 1
    assert area_interval(0.0, 8, 8) == pytest.approx((0, 1 - few[0]), abs=1e-9)
    judged = judge(np.r_[np.ones(8), np.zeros(8)], np.repeat([1, 0], 8).astype(np.int8), np.arange(16))
    assert (judged.auroc, judged.low, judged.high) == (1, *few) and not judged.under_chance
    assert judge(np.r_[np.zeros(8), np.ones(8)], np.repeat([1, 0], 8).astype(np.int8), np.arange(16)).under_chance


def test_interval_holds_the_true_area_as_often_as_it_says():
    """Normal scores one apart: the true area is 0.76."""
    rng, held, n = np.random.default_rng(0), 0, 400
    for _ in range(n):
        scores = np.r_[rng.normal(1, 1, 20), rng.normal(0, 1, 30)]
        found = judge(scores, np.repeat([1, 0], [20, 30]).astype(np.int8), np.arange(50))
        held += found.low <= 0.7602 <= found.high
    assert 0.93 < held / n < 0.99


def test_copies_of_a_text_do_not_narrow_intervals():
    rng = np.random.default_rng(0)
    known = (np.arange(60) % 2).astype(np.int8)
    scores, words = rng.random(60) + 0.3 * known, rng.random(60)
    times = np.repeat(np.arange(60), 20)
    few = judge(scores, known, np.arange(60))
    many, alone = (judge(scores[times], known[times], group) for group in (times, np.arange(1200)))
    assert few.auroc == pytest.approx(many.auroc) == pytest.approx(alone.auroc)
    assert many.high - many.low == pytest.approx(few.high - few.low) and few.high - few.low > 3 * (
        alone.high - alone.low
    )
    for value in (few, many):
        assert (value.n_positive, value.n_negative) in ((30, 30), (600, 600))
    gains = [
        difference(scores[rows], words[rows], known[rows], group, seed=0)
        for rows, group in ((np.arange(60), np.arange(60)), (times, times), (times, np.arange(1200)))
    ]
    assert gains[0][0] == pytest.approx(gains[1][0])
    assert gains[1][2] - gains[1][1] > 0.8 * (gains[0][2] - gains[0][1]) > 2 * (gains[2][2] - gains[2][1])
    shares = [
        share(scores[rows] > 0.6, group)
        for rows, group in ((np.arange(60), np.arange(60)), (times, times), (times, np.arange(1200)))
    ]
    assert shares[0]["rate"] == pytest.approx(shares[1]["rate"]) and shares[1]["count"] == 20 * shares[0]["count"]
    widths = [one["high"] - one["low"] for one in shares]
    assert widths[1] == pytest.approx(widths[0], rel=0.1) and widths[0] > 3 * widths[2]


def test_unknown_labels_and_missing_scores_are_left_out():
    scores = np.array([0.9, np.nan, 0.2, 0.1, 0.8])
    found = judge(scores, np.array([1, 1, 0, -1, 0], dtype=np.int8), np.arange(5))
    assert (found.n_positive, found.n_negative, found.auroc) == (1, 2, 1)
    one_side = judge(scores, np.array([1, 1, -1, -1, -1], dtype=np.int8), np.arange(5))
    assert one_side.auroc is None and not one_side.under_chance
    value, low, high = difference(scores, scores, np.array([1, 1, -1, -1, -1], dtype=np.int8), np.arange(5), seed=0)
    assert np.isnan(value) and low is high is None
    assert share(np.zeros(0, dtype=bool), np.zeros(0, dtype=int))["rate"] is None

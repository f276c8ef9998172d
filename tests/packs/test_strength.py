"""Strengths equal differences of logits in fp64."""

import math

import numpy as np

from probemon.packs.strength import in_short, strength_of, strength_or_score


def test_strength_is_score_logit_minus_threshold_logit_even_near_0_and_1():
    numbers = [1e-38, 1e-20, 1e-9, 1.1e-6, 0.25, 0.5, 0.999998, 1 - 2e-7, 1 - 2**-24]
    for score in np.float32(numbers):
        for threshold in np.float32(numbers):
            s, t = float(score), float(threshold)
            exact = math.log(s) - math.log1p(-s) - (math.log(t) - math.log1p(-t))
            assert math.isclose(float(strength_of(score, threshold)), exact, rel_tol=1e-12, abs_tol=1e-12)


def test_certain_score_is_infinitely_strong_unless_it_equals_its_threshold():
    score, threshold = np.float32([1, 1, 0, 0.5, 0.5]), np.float32([0.5, 1, 0, 0, 1])
    assert strength_of(score, threshold).tolist() == [math.inf, 0, 0, math.inf, -math.inf]


def test_concept_without_a_threshold_has_no_strength_and_ranks_by_score():
    score, threshold = np.float32([0.25, 0.75]), np.float32([np.nan, 0.5])
    assert np.isnan(strength_of(score, threshold)).tolist() == [True, False]
    assert strength_or_score(score, threshold)[0] == 0.25 and math.isclose(
        strength_or_score(score, threshold)[1], math.log(3), rel_tol=1e-12
    )


def test_score_strictly_between_0_and_1_never_prints_as_0_or_1():
    told = {
        (0.3, ".3f"): "0.300",
        (0.00046, ".3f"): "0.00046",
        (0.9998, ".3f"): "0.99980",
        (0.99996, ".3g"): "0.999960",
    }
    told |= {
        (1.0, ".3f"): "1.000",
        (1.0, ".3g"): "1",
        (0.0, ".3f"): "0.000",
        (133.08, ".3g"): "133",
        (1e-9, ".4f"): "1e-09",
    }
    assert {given: in_short(*given) for given in told} == told
    for score in (1e-30, 1e-5, 0.004, 0.5, 0.998, 0.9999994, 1 - 2**-24):
        for form in (".3f", ".3g", ".4g", ".4f"):
            assert 0 < float(in_short(score, form)) < 1

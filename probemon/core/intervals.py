"""Exact intervals: of a rate, from a count; of a mean, from numbers between 0 and 1.

    low, high = clopper_pearson(3, 1000)  # a rate, from 3 of 1,000 independent trials; 95 % confidence
    lows, highs = clopper_pearson(counts, n, 0.99)          # counts [K], n [K] or a number: each rate by itself
    low, high = clustered(30, 10_000, 12.5)  # of trials that are alike: as many as 10,000 / 12.5 independent ones
    high = upper_bound(0, 300, 0.95)  # one side: the rate is above it with probability 0.05 at most
    low, high = mean_interval(0.98, 120)  # a mean, from that of 120 independent numbers between 0 and 1

Every function takes numbers or arrays that broadcast, and gives float64 of their shape. Raises `ConfigError` for what
is no count or share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError
from probemon.util.checks import check_share

Doubles = npt.NDArray[np.float64]
_FEWEST_GROUPS = 20
_lgamma = np.frompyfunc(math.lgamma, 1, 1)


def clopper_pearson(k: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95) -> tuple[Any, Any]:
    """`(low, high)` of a rate, k of n trials: each side is passed with probability (1 - confidence) / 2 at most.

    Clopper & Pearson 1934, "The use of confidence or fiducial limits illustrated in the case of the binomial"
    (Biometrika 26). Without trials it is (0, 1).
    """
    side = 1 - (1 - _confident(confidence)) / 2
    return lower_bound(k, n, side), upper_bound(k, n, side)


def clustered(k: npt.ArrayLike, n: npt.ArrayLike, effect: npt.ArrayLike, confidence: float = 0.95) -> tuple[Any, Any]:
    """`(low, high)` as `clopper_pearson`, of k of n trials that come in groups of like ones: as many as n / `effect`
    independent trials, of which the same share succeeded.

    Korn & Graubard 1998, "Confidence intervals for proportions with small expected number of positive counts estimated
    from survey data" (Survey Methodology 24), without their correction for few groups. `effect`: see `design_effect`.
    """
    side = (1 - _confident(confidence)) / 2
    some, trials = (values / np.asarray(effect) for values in _counts(k, n))
    return _lower(some, trials, side), _upper(some, trials, side)


def design_effect(successes: npt.ArrayLike, sizes: npt.ArrayLike) -> float:
    """How many trials that come in groups count as one independent one, 1 or more: of so many `successes [G]` in groups
    of these `sizes [G]`.

    The variance of the share over groups, over that of as many independent trials (Kish 1965, "Survey Sampling", ch.
    5). Where all succeeded, or none, or there are fewer than 20 groups, it cannot be told: then a group counts as one.
    """
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    k, n = k[n > 0], n[n > 0]
    total, share = n.sum(), k.sum() / max(1.0, n.sum())
    if not 0 < share < 1 or len(n) < _FEWEST_GROUPS:
        return float(max(1.0, (n**2).sum() / max(1.0, total)))
    variance = ((k - share * n) ** 2).sum() / total**2
    return float(max(1.0, variance * total / (share * (1 - share))))


def upper_bound(k: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95) -> Any:
    """The rate p at which k or fewer of n trials have probability 1 - confidence: the true one is above it no more
    often. 1 where k is n.
    """
    return _upper(*_counts(k, n), 1 - _confident(confidence))


def _upper(a: Doubles, b: Doubles, risk: float) -> Any:
    inner = a < b
    some_a, some_b = np.where(inner, a, 0), np.where(inner, b, 1)
    _, high = _edge(lambda p: _at_most(some_a, some_b, p) > risk, np.zeros(a.shape), np.ones(a.shape))
    return np.where(inner, high, 1.0)[()]


def lower_bound(k: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95) -> Any:
    """The rate p at which k or more of n trials have probability 1 - confidence: the true one is below it no more
    often. 0 where k is 0.
    """
    return _lower(*_counts(k, n), 1 - _confident(confidence))


def _lower(a: Doubles, b: Doubles, risk: float) -> Any:
    inner = a > 0
    some_a, some_b = np.where(inner, a, 1), np.where(inner, b, 1)
    low, _ = _edge(lambda p: _beta(p, 1 - p, some_a, some_b - some_a + 1) <= risk, np.zeros(a.shape), np.ones(a.shape))
    return np.where(inner, low, 0.0)[()]


def at_most(k: npt.ArrayLike, n: npt.ArrayLike, p: float) -> Any:
    """Probability of k or fewer successes in n independent trials of probability p, 0 < p < 1."""
    if not 0 < p < 1:
        raise ConfigError(f"p is {p!r}: a probability over 0 and under 1")
    a, b = _counts(k, n)
    inner = a < b
    return np.where(inner, _at_most(np.where(inner, a, 0), np.where(inner, b, 1), np.full(a.shape, p)), 1.0)[()]


def mean_interval(mean: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95) -> tuple[Any, Any]:
    """`(low, high)` of the mean of a number between 0 and 1, given the mean of n independent ones: each side is passed
    with probability (1 - confidence) / 2 at most.

    The means q with n * KL(mean, q) <= log(2 / (1 - confidence)), KL of two coins: Hoeffding 1963, "Probability
    inequalities for sums of bounded random variables" (JASA 58), theorem 1. It holds for every n; where all n were 0
    (or 1) it is the interval of a count.
    """
    most = math.log(2 / (1 - _confident(confidence)))
    m, trials = np.broadcast_arrays(np.asarray(mean, dtype=np.float64), np.asarray(n, dtype=np.float64))
    if not ((m >= 0) & (m <= 1) & (trials >= 0)).all():
        raise ConfigError(f"mean {mean!r} of {n!r}: give the mean of so many numbers between 0 and 1")

    def far(q: Doubles) -> npt.NDArray[np.bool_]:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # 0 log 0 is 0
            terms = np.where(m > 0, m * np.log(m / q), 0.0) + np.where(m < 1, (1 - m) * np.log((1 - m) / (1 - q)), 0.0)
            return np.asarray(trials * terms > most)

    low = np.where(far(np.zeros(m.shape)), _edge(far, np.zeros(m.shape), m)[0], 0.0)
    high = np.where(far(np.ones(m.shape)), _edge(lambda q: ~far(q), m, np.ones(m.shape))[1], 1.0)
    return low[()], high[()]


def _confident(confidence: float) -> float:
    return check_share("confidence", confidence, "a probability over 0 and under 1, such as 0.95")


def _counts(k: npt.ArrayLike, n: npt.ArrayLike) -> tuple[Doubles, Doubles]:
    a, b = np.broadcast_arrays(np.asarray(k, dtype=np.float64), np.asarray(n, dtype=np.float64))
    if not ((a >= 0) & (a <= b) & (a == np.floor(a)) & (b == np.floor(b))).all():
        raise ConfigError(f"{k!r} of {n!r}: whole numbers, 0 or more, and no more successes than trials")
    return a, b


def _edge(holds: Callable[[Doubles], Any], low: Doubles, high: Doubles) -> tuple[Doubles, Doubles]:
    """Neighbouring doubles between which `holds`, true at `low`, turns false, by halving."""
    while True:
        middle = (low + high) / 2
        if ((middle == low) | (middle == high)).all():
            return low, high
        true = holds(middle)
        low, high = np.where(true, middle, low), np.where(true, high, middle)


def _at_most(k: Doubles, n: Doubles, p: Doubles) -> Doubles:
    return _beta(1 - p, p, n - k, k + 1)


def _beta(x: Doubles, y: Doubles, a: Doubles, b: Doubles) -> Doubles:
    """Regularised incomplete beta function I_x(a, b), y = 1 - x: by its continued fraction (DLMF 8.17.22), evaluated by
    Lentz's method.
    """
    turn = x > (a + 1) / (a + b + 2)  # beyond it the fraction of the complement converges, and faster
    x, y, a, b = np.where(turn, y, x), np.where(turn, x, y), np.where(turn, b, a), np.where(turn, a, b)
    log_beta = np.asarray(_lgamma(a) + _lgamma(b) - _lgamma(a + b), dtype=np.float64)
    with np.errstate(divide="ignore"):  # of x and y the smaller one is exact, the other is rounded
        powers = np.where(x < y, a * np.log(x) + b * np.log1p(-x), a * np.log1p(-y) + b * np.log(y))
    front = np.exp(powers - log_beta) / a
    fraction, c, d = np.ones(a.shape), np.ones(a.shape), np.zeros(a.shape)
    m, live = 0, np.ones(a.shape, dtype=bool)
    while live.any():
        for term in (
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
            (m + 1) * (b - m - 1) * x / ((a + 2 * m + 1) * (a + 2 * m + 2)),
        ):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            # One that has converged is left alone: no value depends on those beside it.
            fraction = np.where(live, fraction * c * d, fraction)
        live &= np.abs(c * d - 1) > 1e-15
        m += 1
    part = front / fraction
    return np.where(turn, 1 - part, part)

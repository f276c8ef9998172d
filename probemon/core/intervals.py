"""Exact confidence intervals of rates, and of means of numbers between 0 and 1.

    low, high = clopper_pearson(3, 1000)  # 3 of 1,000 independent trials; 95 %

Arguments broadcast; results are float64. Raises `ConfigError` for invalid counts or shares.
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
    """`(low, high)` of a rate, k of n trials; each side is passed with probability at most (1 - confidence) / 2.

    Clopper & Pearson 1934, "The use of confidence or fiducial limits illustrated in the case of the binomial"
    (Biometrika 26). (0, 1) without trials.
    """
    side = 1 - (1 - _confident(confidence)) / 2
    return lower_bound(k, n, side), upper_bound(k, n, side)


def clustered(k: npt.ArrayLike, n: npt.ArrayLike, effect: npt.ArrayLike, confidence: float = 0.95) -> tuple[Any, Any]:
    """`clopper_pearson` for grouped trials, as n / `effect` independent ones (see `design_effect`).

    Korn & Graubard 1998, "Confidence intervals for proportions with small expected number of positive counts estimated
    from survey data" (Survey Methodology 24), without their correction for few groups.
    """
    side = (1 - _confident(confidence)) / 2
    successes, trials = (values / np.asarray(effect) for values in _counts(k, n))
    return _lower(successes, trials, side), _upper(successes, trials, side)


def is_over(
    k: npt.ArrayLike, n: npt.ArrayLike, effect: npt.ArrayLike, rate: float, confidence: float = 0.95
) -> npt.NDArray[np.bool_]:
    """Whether the lower end of `clustered` is over a rate, 0 < rate < 1; much faster than that end."""
    side = (1 - _confident(confidence)) / 2
    a, b = np.broadcast_arrays(*(values / np.asarray(effect) for values in _counts(k, n)))
    inner = a > 0
    some_a, some_b = np.where(inner, a, 1), np.where(inner, b, 1)
    at = np.full(a.shape, check_share("rate", rate, "a rate over 0 and under 1"))
    found: npt.NDArray[np.bool_] = inner & (_beta(at, 1 - at, some_a, some_b - some_a + 1) <= side)
    return found


def design_effect(successes: npt.ArrayLike, sizes: npt.ArrayLike) -> float:
    """Grouped trials worth one independent trial, at least 1, from `successes [G]` and `sizes [G]`.

    Variance of the share relative to independent trials (Kish 1965, "Survey Sampling", ch. 5). If all or none
    succeeded, or with under 20 groups, a group counts as one trial.
    """
    k, n = np.asarray(successes, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    k, n = k[n > 0], n[n > 0]
    total, share = n.sum(), k.sum() / max(1.0, n.sum())
    if not 0 < share < 1 or len(n) < _FEWEST_GROUPS:
        return float(max(1.0, (n**2).sum() / max(1.0, total)))
    variance = ((k - share * n) ** 2).sum() / total**2
    return float(max(1.0, variance * total / (share * (1 - share))))


def upper_bound(k: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95) -> Any:
    """Rate at which k or fewer of n trials have probability 1 - confidence; 1 if k is n."""
    return _upper(*_counts(k, n), 1 - _confident(confidence))


def _upper(a: Doubles, b: Doubles, risk: float) -> Any:
    inner = a < b
    some_a, some_b = np.where(inner, a, 0), np.where(inner, b, 1)
    _, high = _edge(lambda p: _at_most(some_a, some_b, p) > risk, np.zeros(a.shape), np.ones(a.shape))
    return np.where(inner, high, 1.0)[()]


def lower_bound(k: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95) -> Any:
    """Rate at which k or more of n trials have probability 1 - confidence; 0 if k is 0."""
    return _lower(*_counts(k, n), 1 - _confident(confidence))


def _lower(a: Doubles, b: Doubles, risk: float) -> Any:
    inner = a > 0
    some_a, some_b = np.where(inner, a, 1), np.where(inner, b, 1)
    low, _ = _edge(lambda p: _beta(p, 1 - p, some_a, some_b - some_a + 1) <= risk, np.zeros(a.shape), np.ones(a.shape))
    return np.where(inner, low, 0.0)[()]


def at_most(k: npt.ArrayLike, n: npt.ArrayLike, p: float) -> Any:
    """Probability of at most k successes in n trials of probability p, 0 < p < 1."""
    if not 0 < p < 1:
        raise ConfigError(f"p is {p!r}: a probability over 0 and under 1")
    a, b = _counts(k, n)
    inner = a < b
    return np.where(inner, _at_most(np.where(inner, a, 0), np.where(inner, b, 1), np.full(a.shape, p)), 1.0)[()]


def mean_interval(mean: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95) -> tuple[Any, Any]:
    """`(low, high)` of a mean, given the mean of n independent numbers between 0 and 1.

    Means q with n * KL(mean, q) <= log(2 / (1 - confidence)): Hoeffding 1963, "Probability inequalities for sums of
    bounded random variables" (JASA 58), theorem 1.
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
    """Neighbouring doubles between which `holds` turns false, by bisection."""
    while True:
        middle = (low + high) / 2
        if ((middle == low) | (middle == high)).all():
            return low, high
        true = holds(middle)
        low, high = np.where(true, middle, low), np.where(true, high, middle)


def _at_most(k: Doubles, n: Doubles, p: Doubles) -> Doubles:
    return _beta(1 - p, p, n - k, k + 1)


def _beta(x: Doubles, y: Doubles, a: Doubles, b: Doubles) -> Doubles:
    """Regularised incomplete beta function I_x(a, b), y = 1 - x (DLMF 8.17.22, Lentz's method)."""
    turn = x > (a + 1) / (a + b + 2)  # the complement converges faster
    x, y, a, b = np.where(turn, y, x), np.where(turn, x, y), np.where(turn, b, a), np.where(turn, a, b)
    log_beta = np.asarray(_lgamma(a) + _lgamma(b) - _lgamma(a + b), dtype=np.float64)
    with np.errstate(divide="ignore"):  # the smaller of x and y is exact
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
            # Freeze converged values.
            fraction = np.where(live, fraction * c * d, fraction)
        live &= np.abs(c * d - 1) > 1e-15
        m += 1
    part = front / fraction
    return np.where(turn, 1 - part, part)

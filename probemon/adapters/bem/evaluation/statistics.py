"""Paired comparisons of two models: what a difference of means can be trusted with.

    compared = compare([0.02, 0.01, 0.03, 0.0, 0.02])          # one difference for each seed
    compared.mean, compared.low, compared.high, compared.p
    document_interval(sums, counts)                             # one sum and one count for each document
    adjusted([0.04, 0.08, 0.0547, 0.2])                         # p values of a family (Benjamini and Hochberg 1995)

With few seeds bootstrap intervals are too narrow, so seeds are judged by an exact sign-flip test and shown with a t
interval; documents, of which there are many, by a bias-corrected bootstrap (BCa) that draws whole documents, since
tokens of one document are not independent.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError, MissingExtra
from probemon.util.checks import check_share

Doubles = npt.NDArray[np.float64]

MOST_FLIPPED = 20  # differences whose sign flips are all counted: a million
_N_BOOTSTRAP = 9_999
_N_DRAWN = 100_000  # sign flips where there are more differences


@dataclass(frozen=True)
class Compared:
    """Paired differences: their `mean`, the t interval `low` to `high` of it (None for a single one), and the one-sided
    `p` of the sign-flip test that the mean is over 0. `exact`: all flips were counted.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float
    exact: bool

    @property
    def smallest_p(self) -> float:
        """The smallest p that so many differences can give: of three it is 0.125, so three decide nothing."""
        return 2.0**-self.n


def compare(differences: Sequence[float] | Doubles, *, confidence: float = 0.95) -> Compared:
    """Compare by paired differences, one for each seed: better minus worse where more is better.

    Raises `ConfigError` for none, or for one that is not finite; `MissingExtra` without SciPy.
    """
    check_share("confidence", confidence)
    d = _finite("differences", differences)
    p, exact = sign_flip(d)
    low = high = None
    if len(d) > 1:
        half = float(_scipy().t.ppf(0.5 + confidence / 2, len(d) - 1)) * float(d.std(ddof=1)) / math.sqrt(len(d))
        low, high = float(d.mean()) - half, float(d.mean()) + half
    return Compared(len(d), float(d.mean()), low, high, p, exact)


def sign_flip(differences: Sequence[float] | Doubles) -> tuple[float, bool]:
    """Return the one-sided p that the mean is over 0, by the flips of all signs (Fisher 1935), and whether all flips
    were counted: of over 20 differences 100,000 are drawn, always the same.
    """
    d = _finite("differences", differences)
    # A sum that differs by rounding alone is as large as what was seen.
    seen = float(d.sum()) - 1e-12 * float(np.abs(d).sum())
    if len(d) <= MOST_FLIPPED:
        sums = np.zeros(1)
        for value in d:
            sums = np.concatenate([sums + value, sums - value])
        return float((sums >= seen).mean()), True
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(_N_DRAWN, len(d)))
    return (1 + int((signs @ d >= seen).sum())) / (1 + _N_DRAWN), False


def document_interval(
    sums: Sequence[float] | Doubles, counts: Sequence[float] | Doubles, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the BCa interval of `sum(sums) / sum(counts)` (Efron 1987) over documents, each drawn whole.

    `sums [N]`: of each document, the sum of what was measured at its tokens, such as a paired difference of losses;
    `counts [N]`: its tokens. Where all documents have one mean the interval is that point. Raises `ConfigError`,
    `MissingExtra`.
    """
    check_share("confidence", confidence)
    of_documents, n = _finite("sums", sums), _finite("counts", counts)
    if len(of_documents) != len(n) or len(n) < 2 or not (n > 0).all():
        raise ConfigError("a sum and a count over 0 are needed for each document, and two documents at least")
    means = of_documents / n
    if np.ptp(means) == 0:
        return float(means[0]), float(means[0])
    found = (
        _scipy()
        .bootstrap(
            (of_documents, n),
            lambda s, c, axis=-1: s.sum(axis=axis) / c.sum(axis=axis),
            paired=True,
            vectorized=True,
            n_resamples=_N_BOOTSTRAP,
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(0),
        )
        .confidence_interval
    )
    return float(found.low), float(found.high)


def adjusted(p: Sequence[float] | Doubles) -> list[float]:
    """Return the p values of a family, adjusted for its false discovery rate. Raises `ConfigError`, `MissingExtra`."""
    values = _finite("p", p)
    if not ((values >= 0) & (values <= 1)).all():
        raise ConfigError("p has values outside 0 to 1")
    return [float(value) for value in _scipy().false_discovery_control(values)]


def pareto(points: Sequence[Sequence[float]] | Doubles) -> list[int]:
    """Return the indices of points that no other one dominates: `points [N, K + 1]`, K costs and then the quality.

    A point is dominated by one that is no worse in anything and better in something; equal points all stay.
    """
    values = _points(points)
    better = np.concatenate([-values[:, :-1], values[:, -1:]], axis=1)  # more is better
    no_worse = (better[:, None] >= better[None]).all(axis=2)
    dominates = no_worse & (better[:, None] > better[None]).any(axis=2)
    return np.flatnonzero(~dominates.any(axis=0)).tolist()


def pareto_shares(
    costs: Doubles, qualities: Doubles, *, latencies: Doubles | None = None, n_drawn: int = 2_000
) -> list[float]:
    """Return, for each of N variants, the share of drawn sets of seeds in whose means it is on the frontier.

    `costs [N, K]`; `qualities [N, S]`, the same S seeds of each; `latencies [N, R]`, of the same R rounds of each: one
    more cost, the median of drawn rounds. A frontier of single means is noise: "robust" is a share of 0.9 or more.
    """
    qualities, fixed = _numbers("qualities", qualities), _numbers("costs", costs)
    rounds = np.empty((len(qualities), 0)) if latencies is None else _numbers("latencies", latencies)
    if not fixed.ndim == rounds.ndim == qualities.ndim == 2 or not qualities.shape[1]:
        raise ConfigError("costs, qualities and latencies are tables with a row for each variant: give [N, K] of each")
    if not len(fixed) == len(rounds) == len(qualities):
        raise ConfigError(
            f"{len(fixed)} costs, {len(rounds)} latencies, {len(qualities)} qualities: give each variant's"
        )
    rng, on = np.random.default_rng(0), np.zeros(len(qualities))
    for _ in itertools.repeat(None, n_drawn):
        seeds = rng.integers(0, qualities.shape[1], qualities.shape[1])
        columns = [fixed, qualities[:, seeds].mean(axis=1)[:, None]]
        if rounds.shape[1]:
            turns = rng.integers(0, rounds.shape[1], rounds.shape[1])
            columns.insert(1, np.median(rounds[:, turns], axis=1)[:, None])
        on[pareto(np.concatenate(columns, axis=1))] += 1
    return (on / n_drawn).tolist()


def quantile_interval(
    values: Sequence[float] | Doubles, q: float, *, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the bootstrap interval of a quantile (percentiles of 9,999 draws). None where so few values show nothing
    of that tail: under five beyond the quantile, of a p99 under 500.
    """
    check_share("q", q)
    check_share("confidence", confidence)
    x = _finite("values", values)
    if len(x) * min(q, 1 - q) < 5 - 1e-9:
        return None
    rng = np.random.default_rng(0)
    drawn = np.concatenate([np.quantile(x[rng.integers(0, len(x), (101, len(x)))], q, axis=1) for _ in range(99)])
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def median_interval(values: Sequence[float] | Doubles, *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of the median by order statistics, which holds for any distribution. None where there are
    too few values for it, or one is not finite.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n, tail = len(ordered), (1 - confidence) / 2
    # The k-th smallest of n is over the median with the probability that fewer than k of n fair coins show heads.
    below, k = 0.0, 0
    while k < n and below < 1 - tail:
        below += math.comb(n, k) / 2**n
        k += 1
    if below < 1 - tail or not np.isfinite(ordered).all():
        return None
    return float(ordered[n - k]), float(ordered[k - 1])


def _points(points: Sequence[Sequence[float]] | Doubles) -> Doubles:
    values = _numbers("points", points)
    if values.ndim != 2 or values.shape[1] < 2 or not np.isfinite(values).all():
        raise ConfigError("points are costs and a quality each, all of them finite numbers")
    return values


def _finite(name: str, values: Sequence[float] | Doubles) -> Doubles:
    found = _numbers(name, values)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise ConfigError(f"{name} are a list of finite numbers, one at least")
    return found


def _numbers(name: str, values: object) -> Doubles:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} are no table of numbers: give numbers, as many in each row") from None


def _scipy() -> Any:
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtra("comparing adapters needs SciPy: pip install scipy") from error

"""Paired comparisons of two models: what a difference of means can be trusted with; frontiers of cost and quality.

    compared = compare([0.02, 0.01, 0.03, 0.0, 0.02])          # one difference for each seed
    compared.mean, compared.low, compared.high, compared.p
    adjusted([0.04, 0.08, 0.0547, 0.2])                         # p values of a family (Benjamini and Hochberg 1995)

With few seeds bootstrap intervals are too narrow, so seeds are judged by an exact sign-flip test and shown with a t
interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probemon.adapters.bem.evaluation.statistics import Doubles, finite_numbers, numbers, scipy_stats
from probemon.errors import ConfigError
from probemon.util.checks import check_share

MOST_FLIPPED = 20  # differences whose sign flips are all counted: a million
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
    d = finite_numbers("differences", differences)
    p, exact = sign_flip(d)
    low = high = None
    if len(d) > 1:
        half = float(scipy_stats().t.ppf(0.5 + confidence / 2, len(d) - 1)) * float(d.std(ddof=1)) / math.sqrt(len(d))
        low, high = float(d.mean()) - half, float(d.mean()) + half
    return Compared(len(d), float(d.mean()), low, high, p, exact)


def sign_flip(differences: Sequence[float] | Doubles) -> tuple[float, bool]:
    """Return the one-sided p that the mean is over 0, by the flips of all signs (Fisher 1935), and whether all flips
    were counted: of over 20 differences 100,000 are drawn, always the same.
    """
    d = finite_numbers("differences", differences)
    # A sum that differs by rounding alone is as large as what was seen.
    seen = float(d.sum()) - 1e-12 * float(np.abs(d).sum())
    if len(d) <= MOST_FLIPPED:
        sums = np.zeros(1)
        for value in d:
            sums = np.concatenate([sums + value, sums - value])
        return float((sums >= seen).mean()), True
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(_N_DRAWN, len(d)))
    return (1 + int((signs @ d >= seen).sum())) / (1 + _N_DRAWN), False


def adjusted(p: Sequence[float] | Doubles) -> list[float]:
    """Return the p values of a family, adjusted for its false discovery rate. Raises `ConfigError`, `MissingExtra`."""
    values = finite_numbers("p", p)
    if not ((values >= 0) & (values <= 1)).all():
        raise ConfigError("p has values outside 0 to 1")
    return [float(value) for value in scipy_stats().false_discovery_control(values)]


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
    qualities, fixed = numbers("qualities", qualities), numbers("costs", costs)
    rounds = np.empty((len(qualities), 0)) if latencies is None else numbers("latencies", latencies)
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


def _points(points: Sequence[Sequence[float]] | Doubles) -> Doubles:
    values = numbers("points", points)
    if values.ndim != 2 or values.shape[1] < 2 or not np.isfinite(values).all():
        raise ConfigError("points are costs and a quality each, all of them finite numbers")
    return values

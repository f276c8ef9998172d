"""Alert thresholds for a false-alarm rate on ordinary text, and the rate to state, by kind.

    rates = at_rate(values, kind, text, kinds, fpr=0.01)       # one of each concept: values [M, P]
    rates[0].threshold, rates[0].new_kind_high

`values` must come from probes that saw no text of the same kind. A threshold is the lowest at which at most `fpr` of
the units exceed it, as a mean over kinds, and no kind is shown to break the rate (its one-sided 95 % lower bound is
over it). What is stated of a kind is at a threshold that was set without it: what happens on a kind that is new.

- `rate`: the mean over kinds; with 95 % confidence it is under `high` (Clopper & Pearson 1934; kinds are clusters,
  Kish 1965)
- `new_kind_high`: 95 % of the rates on a new kind are lower, by a beta-binomial model of the kinds (Williams 1975)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probemon.core.hierarchy import Ints
from probemon.core.intervals import clustered, design_effect, is_over

CONFIDENCE = 0.95
_TWO_SIDED = 2 * CONFIDENCE - 1  # of an interval with that confidence on one side
_APART = 2e-5  # in log odds
_GRID = 400
_MEANS, _DISPERSIONS = np.geomspace(1e-4, 0.5, 60), np.geomspace(1e-4, 0.2, 40)


@dataclass(frozen=True)
class KindRate:
    """`alarms` of `n` units of a kind, with a 95 % interval."""

    alarms: int
    n: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        return self.alarms / max(1, self.n)

    def as_dict(self) -> dict[str, Any]:
        return {"alarms": self.alarms, "n": self.n, "rate": self.rate, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Rate:
    """A threshold and what is stated with it; NaN without ordinary text.

    - `rate`: mean over kinds; `high`, `new_kind_high`: see the module
    - `by_kind`, `worst`: the kind with the highest rate
    - `raised`: kinds for which the threshold had to rise above that of the mean rate
    """

    threshold: float
    fpr: float
    n: int
    rate: float
    high: float
    new_kind_high: float
    by_kind: Mapping[str, KindRate]
    raised: Sequence[str] = ()

    @property
    def worst(self) -> str | None:
        worst = max(self.by_kind, key=lambda kind: (self.by_kind[kind].rate, self.by_kind[kind].low), default=None)
        return worst if worst is not None and self.by_kind[worst].alarms else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "threshold": None if math.isnan(self.threshold) else self.threshold,
            "fpr": self.fpr,
            "n": self.n,
            "rate": self.rate,
            "high": self.high,
            "new_kind_high": self.new_kind_high,
            "worst": self.worst,
            "raised": list(self.raised),
            "by_kind": {kind: rate.as_dict() for kind, rate in self.by_kind.items()},
        }


def at_rate(values: np.ndarray, kind: Ints, text: Ints, kinds: Sequence[str], *, fpr: float) -> list[Rate]:
    """Return each concept's threshold for `values [M, P]` of units of ordinary texts; NaN values are left out.

    `kind [M]`, `text [M]`: of each unit; units of one text depend on each other.
    """
    return [_at_rate(values[:, p], kind, text, kinds, fpr) for p in range(values.shape[1])]


def thresholds_at_rate(values: np.ndarray, kind: Ints, text: Ints, kinds: Sequence[str], *, fpr: float) -> np.ndarray:
    """Return the thresholds of `at_rate` alone `[P]`, which takes a small part of its time."""
    found = np.full(values.shape[1], np.nan)
    for p in range(values.shape[1]):
        use = ~np.isnan(values[:, p])
        if use.any():
            units = _Units.of(values[use, p], kind[use], text[use], len(kinds))
            found[p] = _chosen(units, units.held, fpr)[0]
    return found


def _at_rate(values: np.ndarray, kind: Ints, text: Ints, kinds: Sequence[str], fpr: float) -> Rate:
    use = ~np.isnan(values)
    if not use.any():
        return Rate(np.nan, fpr, 0, 1.0, 1.0, 1.0, {})
    units = _Units.of(values[use], kind[use], text[use], len(kinds))
    threshold, raised = _chosen(units, units.held, fpr)
    if len(units.held) > 1:
        # What a threshold without this kind lets through is what happens on a new kind.
        alone = {k: _chosen(units, units.held[units.held != k], fpr)[0] for k in units.held.tolist()}
    else:
        alone = {k: threshold for k in units.held.tolist()}
    alarms = {k: units.alarms(k, limit) for k, limit in alone.items()}
    effects = {k: units.effect(k, limit) for k, limit in alone.items()}
    counts, sizes = (np.asarray([of(k) for k in alarms], dtype=np.float64) for of in (alarms.__getitem__, units.n))
    lows, highs = clustered(counts, sizes, list(effects.values()), CONFIDENCE)
    by_kind = {
        kinds[k]: KindRate(alarms[k], units.n(k), float(low), float(high))
        for k, low, high in zip(alarms, lows, highs, strict=True)
    }
    between = max(1.0, design_effect(counts, sizes) if len(counts) > 1 else 1.0, min(effects.values()))
    high = float(clustered(int(counts.sum()), int(sizes.sum()), between, _TWO_SIDED)[1])
    # Units of a text count together: as many independent ones.
    shrink = np.asarray([effects[k] for k in alarms])
    rate = float((counts / sizes).mean())
    new = max(_of_new_kind(counts / shrink, sizes / shrink), rate) if len(counts) > 1 else high
    return Rate(threshold, fpr, int(sizes.sum()), rate, high, new, by_kind, [kinds[k] for k in raised])


def _chosen(units: _Units, among: Ints, fpr: float) -> tuple[float, list[int]]:
    """Return the threshold by these kinds, and those for which it had to rise."""
    order = units.of_kinds(among)

    def lowest(holds: Callable[[float], bool]) -> int:
        """Return the last place in `order` at which `holds`, which is true up to there."""
        good, bad = 0, len(order)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(float(order[middle])) else (good, middle)
        return good

    by_mean = lowest(lambda t: bool(np.mean([units.alarms(k, t) / units.n(k) for k in among.tolist()]) <= fpr))
    at, raised = by_mean, list[int]()
    if broken := units.broken(among, float(order[by_mean]), fpr):
        at, raised = lowest(lambda t: not units.broken(among, t, fpr)), broken
        at = min(at, by_mean)
    return over(float(order[at]), below=float(order[at - 1]) if at else np.inf), raised


@dataclass(frozen=True)
class _Units:
    """Units by kind: their values, sorted, and with the text of each."""

    sorted: Sequence[np.ndarray]
    values: Sequence[np.ndarray]
    text: Sequence[Ints]
    held: Ints
    falling: tuple[np.ndarray, Ints]  # all values, and the kind of each

    @classmethod
    def of(cls, values: np.ndarray, kind: Ints, text: Ints, n_kinds: int) -> _Units:
        places = [np.flatnonzero(kind == k) for k in range(n_kinds)]
        held = np.flatnonzero([len(own) for own in places])
        texts = [np.unique(text[own], return_inverse=True)[1] for own in places]
        falling = np.argsort(-values, kind="stable")
        return cls(
            [np.sort(values[own]) for own in places],
            [values[own] for own in places],
            texts,
            held,
            (values[falling], kind[falling]),
        )

    def of_kinds(self, among: Ints) -> np.ndarray:
        """Return the values of these kinds, each once, the highest first."""
        values, kind = self.falling
        some = np.zeros(len(self.values), dtype=bool)
        some[among] = True
        values = values[some[kind]]
        return values[np.concatenate([[True], values[1:] != values[:-1]])]

    def n(self, k: int) -> int:
        return len(self.values[k])

    def alarms(self, k: int, threshold: float) -> int:
        """Return how many units of a kind are over a threshold."""
        return self.n(k) - int(np.searchsorted(self.sorted[k], self.sorted[k].dtype.type(threshold), side="right"))

    def effect(self, k: int, threshold: float) -> float:
        """Return the design effect of a kind's texts."""
        over_it = self.values[k] > self.values[k].dtype.type(threshold)
        return design_effect(np.bincount(self.text[k], over_it), np.bincount(self.text[k]))

    def broken(self, among: Ints, threshold: float, fpr: float) -> list[int]:
        """Return the kinds that are shown to break the rate."""
        some = [k for k in among.tolist() if self.alarms(k, threshold) > fpr * self.n(k)]
        if not some:
            return []
        alarms, sizes = [self.alarms(k, threshold) for k in some], [self.n(k) for k in some]
        effects = [self.effect(k, threshold) for k in some]
        return [k for k, breaks in zip(some, is_over(alarms, sizes, effects, fpr, _TWO_SIDED), strict=True) if breaks]


def _of_new_kind(alarms: np.ndarray, n: np.ndarray) -> float:
    """Return the rate that 95 % of new kinds stay under, by a beta-binomial model, over its mean and dispersion."""
    mean, dispersion = (grid.ravel() for grid in np.meshgrid(_MEANS, _DISPERSIONS, indexing="ij"))
    size = 1 / dispersion - 1
    a, b = mean * size, (1 - mean) * size
    k, m = alarms[:, None], n[:, None]
    log_likelihood = (_lbeta(k + a, m - k + b) - _lbeta(a, b)).sum(axis=0)
    weight = np.exp(log_likelihood - log_likelihood.max())
    likely = np.flatnonzero(weight > 1e-4)
    # A uniform grid of the root: fine near 0, where a density may be infinite, so by its distribution.
    rate = (np.arange(1, _GRID + 1) / _GRID) ** 2
    middle, width = (rate + np.r_[0, rate[:-1]]) / 2, np.diff(np.r_[0, rate])
    log_density = (a[likely, None] - 1) * np.log(middle) + (b[likely, None] - 1) * np.log1p(
        -np.minimum(middle, 1 - 1e-9)
    )
    density = np.exp(log_density - log_density.max(axis=1, keepdims=True)) * width
    density /= density.sum(axis=1, keepdims=True)
    cumulative = np.cumsum(weight[likely] @ density)
    return float(rate[np.searchsorted(cumulative / cumulative[-1], CONFIDENCE)])


def _lbeta(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (torch.from_numpy(np.asarray(values, dtype=np.float64)) for values in (a, b))
    log_beta: np.ndarray = (torch.lgamma(x) + torch.lgamma(y) - torch.lgamma(x + y)).numpy()
    return log_beta


def over(value: float, below: float = np.inf) -> float:
    """Return an fp32 threshold, at most 1, that a score of `value` does not exceed, with a margin for rounding.

    Many texts that begin alike have equal scores. Without space under `below` there is no margin.
    """
    least = np.float32(value)
    least = least if least >= value else np.nextafter(least, np.float32(np.inf))
    if not 0 < value < 1:
        return float(least)
    exact = np.float64(value)
    raised = np.float32(1 / (1 + np.exp(np.log1p(-exact) - np.log(exact) - _APART)))
    raised = min(max(raised, np.nextafter(least, np.float32(np.inf))), np.float32(1))
    return float(raised if raised < below else least)

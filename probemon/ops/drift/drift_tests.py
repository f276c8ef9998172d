"""Tests whether the newest requests are like those of a reference.

    raised = DriftTests(reference).add(counts)                   # of the next 100 requests: new differences

It looks every 100 requests at the newest 1,000, and every 1,000 at the newest 10,000. A difference must be large and
beyond chance:

- `base_rate`: share of requests in which a concept fires. Fisher's exact test (two-sided, the smaller tail doubled),
  and odds changed by a factor of 1.5 or more.
- `saturated`, `constant`: a score at 0 (or 1) at nearly all tokens, or the same at all, in 95 % of requests or more.
  The same test, for increases.
- `scores`, `norms`: a request's highest score, its median norm. Kolmogorov-Smirnov distance over fixed bins, 0.15 or
  more.

By the union bound, at most `FALSE_ALARMS` are expected in a million independent requests of one distribution.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.core.request_counts import RequestCounts, median_bins

Doubles = npt.NDArray[np.float64]
KINDS = ("base_rate", "scores", "norms", "saturated", "constant")
BLOCK = 100  # requests between looks
_BLOCKS = 10  # per window, and per block of the next, longer window
WINDOWS = (BLOCK * _BLOCKS, BLOCK * _BLOCKS**2)
FALSE_ALARMS, IN_REQUESTS = 1.0, 1_000_000
N_LOOKS = sum(IN_REQUESTS * _BLOCKS // window for window in WINDOWS)
LEAST_ODDS, LEAST_SHARE, LEAST_DISTANCE = 1.5, 0.95, 0.15
_lgamma = np.frompyfunc(math.lgamma, 1, 1)


@dataclass(frozen=True)
class Difference:
    """A difference.

    - `place`: index of the concept or site
    - `reference`, `observed`: shares of requests, or bins of the median (`scores`, `norms`)
    - `n`: requests looked at
    - `p`: probability by chance, of this comparison alone
    """

    kind: str
    place: int
    what: str
    reference: float
    observed: float
    n: int
    p: float
    distance: float = 0.0


class DriftTests:
    """`reference`: counts of the concepts and sites to compare."""

    def __init__(self, reference: RequestCounts) -> None:
        self._reference = reference
        self._blocks: list[deque[RequestCounts]] = [deque(maxlen=_BLOCKS) for _ in WINDOWS]
        self._n_blocks = 0
        test_counts = {
            "base_rate": len(reference.fired),
            "saturated": 2 * len(reference.low),
            "constant": len(reference.low),
            "scores": len(reference.low),
            "norms": len(reference.norms),
        }
        self._level = {
            kind: FALSE_ALARMS / len(KINDS) / N_LOOKS / max(1, n_tests) for kind, n_tests in test_counts.items()
        }
        self._held: dict[tuple[str, int, str], tuple[Difference, int]] = {}  # and the block at which it was last seen

    @property
    def held(self) -> list[Difference]:
        """Present differences, as last seen."""
        return [difference for difference, _ in self._held.values()]

    def add(self, counts: RequestCounts) -> list[Difference]:
        """Add the counts of the next `BLOCK` requests; return new differences."""
        self._n_blocks += 1
        self._blocks[0].append(counts)
        differences = self._look(self._blocks[0])
        if self._n_blocks % _BLOCKS == 0:
            self._blocks[1].append(_sum(self._blocks[0]))
            differences += self._look(self._blocks[1])
        raised = []
        for difference in differences:
            key = (difference.kind, difference.place, difference.what)
            if key not in self._held:
                raised.append(difference)
            self._held[key] = (difference, self._n_blocks)
        for key, (_, seen) in list(self._held.items()):
            if self._n_blocks - seen >= _BLOCKS:
                del self._held[key]
        return raised

    def _look(self, blocks: deque[RequestCounts]) -> list[Difference]:
        now, then = _sum(blocks), self._reference
        differences = self._shares("base_rate", "fires", now.n, now.fired, then.fired, least=0.0)
        for kind, what, name in (
            ("saturated", "at 0", "low"),
            ("saturated", "at 1", "high"),
            ("constant", "the same at all tokens", "flat"),
        ):
            differences += self._shares(kind, what, now.n, getattr(now, name), getattr(then, name), least=LEAST_SHARE)
        differences += self._distributions("scores", "highest scores", now.highest, then.highest)
        return differences + self._distributions("norms", "norms", now.norms, then.norms)

    def _shares(self, kind: str, what: str, n: int, k: Ints, k0: Ints, *, least: float) -> list[Difference]:
        n0 = self._reference.n
        odds = odds_ratio(k, n, k0, n0)
        large = odds >= LEAST_ODDS if least else np.maximum(odds, 1 / odds) >= LEAST_ODDS
        places = np.flatnonzero(large & (k >= least * n))
        p = fisher(k[places], n, k0[places], n0)
        return [
            Difference(kind, place, what, float(k0[place] / n0), float(k[place] / n), n, float(chance))
            for place, chance in zip(places.tolist(), p, strict=True)
            if chance <= self._level[kind]
        ]

    def _distributions(self, kind: str, what: str, now: Ints, then: Ints) -> list[Difference]:
        n, m = now.sum(axis=1), then.sum(axis=1)
        distances = ks_distance(now, then)
        p, medians = ks_chance(distances, n, m), (median_bins(then), median_bins(now))
        return [
            Difference(
                kind,
                place,
                what,
                float(medians[0][place]),
                float(medians[1][place]),
                int(n[place]),
                float(p[place]),
                float(distances[place]),
            )
            for place in np.flatnonzero((distances >= LEAST_DISTANCE) & (p <= self._level[kind])).tolist()
        ]


def fisher(k: Ints, n: int, k0: Ints, n0: int) -> Doubles:
    """Return two-sided p-values `[K]` of k of n and k0 of n0 requests having one rate.

    Fisher 1935, "The logic of inductive inference" (JRSS 98).
    """
    fewer = np.asarray(k) * n0 < np.asarray(k0) * n  # then the others are more: the upper tail is always summed
    some: Doubles = np.where(fewer, n - k, k).astype(np.float64)
    before: Doubles = np.where(fewer, n0 - k0, k0).astype(np.float64)
    total = some + before
    term = np.exp(_log_choose(n, some) + _log_choose(n0, before) - _log_choose(n + n0, total))
    tail, j = term.copy(), some.copy()
    # Above the mean, terms only fall; past the last possible one they are zero.
    while (term > 1e-17 * tail).any():
        term = term * (total - j) * (n - j) / ((j + 1) * (n0 - total + j + 1))
        j += 1
        tail += term
    return np.minimum(1.0, 2 * tail)


def odds_ratio(k: Ints, n: int, k0: Ints, n0: int) -> Doubles:
    """Return the odds of k of n over those of k0 of n0, with 0.5 added to each count (Haldane 1956, Anscombe 1956)."""
    return (k + 0.5) / (n - k + 0.5) * (n0 - k0 + 0.5) / (k0 + 0.5)


def ks_distance(now: Ints, then: Ints) -> Doubles:
    """Return the largest distance of the cumulated shares of counts `[K, bins]`; 0 if one is empty."""
    shares = [np.cumsum(counts, axis=1) / np.maximum(1, counts.sum(axis=1))[:, None] for counts in (now, then)]
    nonempty = (now.sum(axis=1) > 0) & (then.sum(axis=1) > 0)
    return np.where(nonempty, np.abs(shares[0] - shares[1]).max(axis=1, initial=0), 0.0)


def ks_chance(distance: Doubles, n: Ints, m: Ints) -> Doubles:
    """Return an upper bound of the probability of such a distance between samples of one distribution.

    Wei and Dudley 2012, "Two-sample Dvoretzky-Kiefer-Wolfowitz inequalities" (Statistics & Probability Letters 82),
    with the constant e: proven for equal sizes, computed for others.
    """
    return np.minimum(1.0, math.e * np.exp(-2 * distance**2 * (n * m / np.maximum(1, n + m))))


def _sum(blocks: deque[RequestCounts]) -> RequestCounts:
    whole = blocks[0]
    for block in list(blocks)[1:]:
        whole = whole + block
    return whole


def _log_choose(n: float, k: Doubles) -> Doubles:
    whole, part, rest = (np.asarray(_lgamma(np.asarray(x) + 1.0), dtype=np.float64) for x in (n, k, n - k))
    return whole - part - rest

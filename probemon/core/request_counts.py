"""RequestCounts: per-request statistics, to compare two sets of requests.

Counting is per request because a request's tokens depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints, Mask
from probemon.core.scores import Floats

_LOGITS = np.arange(-9.0, 10.0)
SCORE_EDGES = (1 / (1 + np.exp(-_LOGITS))).astype(np.float32)  # finer towards 0 and 1
N_SCORE_BINS = len(SCORE_EDGES) + 1
PER_OCTAVE, _LEAST_OCTAVE, _OCTAVES = 16, -10, 30
N_NORM_BINS = PER_OCTAVE * _OCTAVES
NEAR_END = np.float32(0.001)  # distance from 0 or 1
SAME = np.float32(1e-6)  # equal scores
MOSTLY = 0.99  # of a request's tokens


@dataclass(frozen=True)
class RequestTraits:
    """Statistics of one request: A concepts scored at every token, S sites.

    - `highest [A]`: largest scores; `fired [P]`: over the alert threshold anywhere.
    - `low`, `high` `[A]`: near 0 or 1 at nearly all tokens; `flat [A]`: all equal.
    - `norm_bins [S]`: bin of the median norm, -1 if unknown.
    """

    fired: Mask
    highest: Floats
    low: Mask
    high: Mask
    flat: Mask
    norm_bins: Ints

    @classmethod
    def of(cls, scores: Floats, norms: npt.NDArray[np.floating], alert: Floats) -> RequestTraits:
        """Return the traits of `scores [T, P]` and `norms [T, S]`, T >= 1 seen tokens; `alert [P]`."""
        highest, lowest = scores.max(axis=0), scores.min(axis=0)
        return cls(
            fired=highest > alert,
            highest=highest,
            low=(scores <= NEAR_END).mean(axis=0) >= MOSTLY,
            high=(scores >= 1 - NEAR_END).mean(axis=0) >= MOSTLY,
            flat=highest - lowest <= SAME,
            norm_bins=median_bins(np.stack([np.bincount(site, minlength=N_NORM_BINS) for site in norm_bins(norms).T])),
        )


@dataclass(frozen=True)
class RequestCounts:
    """Counts of `n` requests by trait: `fired [P]`; `low`, `high`, `flat` `[A]`.

    `highest [A, N_SCORE_BINS]`: by highest score; `norms [S, N_NORM_BINS]`: by median norm.
    """

    n: int
    fired: Ints
    low: Ints
    high: Ints
    flat: Ints
    highest: Ints
    norms: Ints

    @classmethod
    def none(cls, n_probes: int, n_scored: int, n_sites: int) -> RequestCounts:
        """Return empty counts."""

        def zeros(*shape: int) -> Ints:
            return np.zeros(shape, dtype=np.int64)

        low, high, flat = (zeros(n_scored) for _ in range(3))
        return cls(0, zeros(n_probes), low, high, flat, zeros(n_scored, N_SCORE_BINS), zeros(n_sites, N_NORM_BINS))

    @classmethod
    def of(cls, traits: Sequence[RequestTraits]) -> RequestCounts:
        """Return the counts of one request or more."""
        first = traits[0]
        counts = cls.none(len(first.fired), len(first.highest), len(first.norm_bins))
        scored, sites = np.arange(len(first.highest)), np.arange(len(first.norm_bins))
        for request in traits:
            counts.highest[scored, np.searchsorted(SCORE_EDGES, request.highest, side="right")] += 1
            is_known = request.norm_bins >= 0
            counts.norms[sites[is_known], request.norm_bins[is_known]] += 1
        sums = {
            name: np.sum([getattr(request, name) for request in traits], axis=0)
            for name in ("fired", "low", "high", "flat")
        }
        return cls(n=len(traits), highest=counts.highest, norms=counts.norms, **sums)

    def __add__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def take(self, probes: Ints, scored: Ints, sites: Ints) -> RequestCounts:
        """Return the counts of some probes, scored concepts and sites, by position."""
        ends = (self.low[scored], self.high[scored], self.flat[scored])
        return RequestCounts(self.n, self.fired[probes], *ends, self.highest[scored], self.norms[sites])


def norm_bins(norms: npt.NDArray[np.floating]) -> Ints:
    """Return the bins of norms, a sixteenth of an octave wide, clipped."""
    with np.errstate(divide="ignore"):
        places = np.floor(PER_OCTAVE * (np.log2(np.asarray(norms, dtype=np.float64)) - _LEAST_OCTAVE))
    return np.clip(places, 0, N_NORM_BINS - 1).astype(np.int64)


def median_bins(histograms: Ints) -> Ints:
    """Return the bins of the (lower) medians of counts `[S, bins]`, -1 if empty."""
    sums = np.cumsum(histograms, axis=-1)
    reached = sums >= (sums[..., -1:] + 1) // 2
    return np.where(sums[..., -1] > 0, reached.argmax(axis=-1), -1)


def score_of_bin(place: int) -> float:
    """Score at a bin's middle logit."""
    return float(1 / (1 + np.exp(0.5 - place - _LOGITS[0])))


def norm_of_bin(place: int) -> float:
    """Norm in the middle of a bin."""
    return float(2.0 ** ((place + 0.5) / PER_OCTAVE + _LEAST_OCTAVE))

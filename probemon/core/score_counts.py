"""ScoreCounts: how often concepts scored how high on some text, counted in fixed bins of the log odds.

    counts = ScoreCounts.of(scores)        # scores [N, K] in 0..1 -> counts [K, 128]
    counts = counts + ScoreCounts.of(more)
    counts.n, counts.median, counts.spread # [K] each
    counts.below(log_odds(score))          # [K]: how many of the counted lie in lower bins

Scores crowd at 0 and at 1; their log odds spread out what lies there, and what probes add up is one. So bins are
equally wide in log odds, everywhere the same: counts of any two texts can be added and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError

Doubles = npt.NDArray[np.float64]

N_BINS = 128
WIDTH = 0.25
EDGES = WIDTH * (np.arange(N_BINS + 1) - N_BINS / 2)  # -16 to 16; what lies beyond is in the first or the last bin
LEAST_SCORE = 2.0**-24  # fp32 has no number between 1 - 2**-24 and 1
MOST_LOG_ODDS = float(np.log1p(-LEAST_SCORE) - np.log(LEAST_SCORE))  # 16.6
TO_DEVIATIONS = 1.482602218505602  # the median deviation of a normal distribution, times this, is its standard one
LEAST_SPREAD = WIDTH  # a concept whose score hardly moves would else be surprised by the last bits of it
_HALVINGS = 60


def log_odds(scores: npt.ArrayLike) -> Doubles:
    """Return log(s / (1 - s)) of scores, those nearer to 0 or 1 than 2**-24 as if at that distance."""
    x = np.clip(np.asarray(scores, dtype=np.float64), LEAST_SCORE, 1 - LEAST_SCORE)
    values: Doubles = np.log(x) - np.log1p(-x)
    return values


@dataclass(frozen=True)
class ScoreCounts:
    """Counts `[K, 128]` of the scores of K concepts. Raises `ConfigError` for other shapes, and negative counts."""

    counts: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        counts: Any = np.array(self.counts, dtype=np.int64)
        if counts.ndim != 2 or counts.shape[1] != N_BINS or (counts < 0).any():
            raise ConfigError(f"counts have shape {counts.shape}: give [K, {N_BINS}], none of them negative")
        counts.flags.writeable = False
        object.__setattr__(self, "counts", counts)

    @classmethod
    def of(cls, scores: npt.NDArray[np.floating[Any]]) -> ScoreCounts:
        """Count scores `[N, K]`, NaN left out. Raises `ConfigError` for what is no score."""
        if np.ndim(scores) != 2:
            raise ConfigError(f"scores have shape {np.shape(scores)}: give [N, K], tokens by concepts")
        if ((scores < 0) | (scores > 1)).any():
            raise ConfigError("scores are not between 0 and 1: give what probes score, no logits")
        known = ~np.isnan(scores)
        bins = bins_of(log_odds(np.where(known, scores, 0.5)))
        counts = [np.bincount(bins[known[:, k], k], minlength=N_BINS) for k in range(scores.shape[1])]
        return cls(np.array(counts, dtype=np.int64).reshape(-1, N_BINS))

    def __add__(self, other: ScoreCounts) -> ScoreCounts:
        return ScoreCounts(self.counts + other.counts)

    @property
    def n(self) -> npt.NDArray[np.int64]:
        """How many scores of each concept were counted `[K]`."""
        return self.counts.sum(axis=1)

    @cached_property
    def median(self) -> Doubles:
        """Medians `[K]` of the log odds, with a bin's scores evenly spread in it; NaN where nothing was counted."""
        return np.array([np.interp(own[-1] / 2, own, EDGES) if own[-1] else np.nan for own in self._up_to_edges])

    @cached_property
    def spread(self) -> Doubles:
        """Median distances `[K]` from the median, as standard deviations of a normal distribution; `LEAST_SPREAD` at
        least, NaN where nothing was counted.
        """
        spreads = [_half_within(own, middle) for own, middle in zip(self._up_to_edges, self.median, strict=True)]
        return np.maximum(TO_DEVIATIONS * np.array(spreads, dtype=np.float64), LEAST_SPREAD)

    def below(self, values: Doubles) -> npt.NDArray[np.int64]:
        """Return how many of each concept `[K]` lie in lower bins than values `[K]` of the log odds."""
        return self._up_to_edges[np.arange(len(self.counts)), bins_of(values)]

    @cached_property
    def _up_to_edges(self) -> npt.NDArray[np.int64]:
        """How many lie below each edge `[K, 129]`."""
        return np.concatenate([np.zeros((len(self.counts), 1), np.int64), self.counts.cumsum(axis=1)], axis=1)


def bins_of(values: Doubles) -> npt.NDArray[np.int64]:
    """Return the numbers of the bins in which values of the log odds lie, each from its lower edge on."""
    return np.clip(np.floor(values / WIDTH).astype(np.int64) + N_BINS // 2, 0, N_BINS - 1)


def _half_within(up_to_edges: npt.NDArray[np.int64], middle: float) -> float:
    """Return the distance from `middle` within which half of what was counted lies, NaN where nothing was."""
    if not up_to_edges[-1]:
        return float("nan")
    low, high = 0.0, float(EDGES[-1] - EDGES[0])
    for _ in range(_HALVINGS):
        distance = (low + high) / 2
        first, last = np.interp([middle - distance, middle + distance], EDGES, up_to_edges)
        low, high = (low, distance) if last - first >= up_to_edges[-1] / 2 else (distance, high)
    return high

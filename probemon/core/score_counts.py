"""ScoreCounts: histograms of concept scores in fixed bins of log odds, which spread out scores near 0 and 1."""

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
EDGES = WIDTH * (np.arange(N_BINS + 1) - N_BINS / 2)  # -16 to 16; outliers are in the end bins
LEAST_SCORE = 2.0**-24  # fp32 resolution below 1
MOST_LOG_ODDS = float(np.log1p(-LEAST_SCORE) - np.log(LEAST_SCORE))  # 16.6
TO_DEVIATIONS = 1.482602218505602  # from a normal distribution's median deviation
LEAST_SPREAD = WIDTH  # else rounding of constant scores counts
_HALVINGS = 60


def log_odds(scores: npt.ArrayLike) -> Doubles:
    """log(s / (1 - s)) of scores, clipped to 2**-24 from 0 and 1."""
    x = np.clip(np.asarray(scores, dtype=np.float64), LEAST_SCORE, 1 - LEAST_SCORE)
    values: Doubles = np.log(x) - np.log1p(-x)
    return values


@dataclass(frozen=True)
class ScoreCounts:
    """Counts `[K, 128]` of K concepts' scores. Raises `ConfigError` for other shapes or negative counts."""

    counts: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        counts: Any = np.array(self.counts, dtype=np.int64)
        if counts.ndim != 2 or counts.shape[1] != N_BINS or (counts < 0).any():
            raise ConfigError(f"counts have shape {counts.shape}: give [K, {N_BINS}], none of them negative")
        counts.flags.writeable = False
        object.__setattr__(self, "counts", counts)

    @classmethod
    def of(cls, scores: npt.NDArray[np.floating[Any]]) -> ScoreCounts:
        """Count scores `[N, K]`, skipping NaN. Raises `ConfigError` outside 0..1."""
        if np.ndim(scores) != 2:
            raise ConfigError(f"scores have shape {np.shape(scores)}: give [N, K], tokens by concepts")
        if ((scores < 0) | (scores > 1)).any():
            raise ConfigError("scores are not between 0 and 1: give probe scores, not logits")
        is_score = ~np.isnan(scores)
        bins = bins_of(log_odds(np.where(is_score, scores, 0.5)))
        counts = [np.bincount(bins[is_score[:, k], k], minlength=N_BINS) for k in range(scores.shape[1])]
        return cls(np.array(counts, dtype=np.int64).reshape(-1, N_BINS))

    def __add__(self, other: ScoreCounts) -> ScoreCounts:
        return ScoreCounts(self.counts + other.counts)

    @property
    def n(self) -> npt.NDArray[np.int64]:
        """Scores counted per concept `[K]`."""
        return self.counts.sum(axis=1)

    @cached_property
    def median(self) -> Doubles:
        """Median log odds `[K]`, interpolated within a bin; NaN if empty."""
        return np.array(
            [
                np.interp(cumulative[-1] / 2, cumulative, EDGES) if cumulative[-1] else np.nan
                for cumulative in self._up_to_edges
            ]
        )

    @cached_property
    def spread(self) -> Doubles:
        """Median deviations `[K]` as normal standard deviations, at least `LEAST_SPREAD`; NaN if empty."""
        spreads = [
            _half_within(cumulative, middle) for cumulative, middle in zip(self._up_to_edges, self.median, strict=True)
        ]
        return np.maximum(TO_DEVIATIONS * np.array(spreads, dtype=np.float64), LEAST_SPREAD)

    def below(self, values: Doubles) -> npt.NDArray[np.int64]:
        """Return counts `[K]` in lower bins than `values [K]` of log odds."""
        return self._up_to_edges[np.arange(len(self.counts)), bins_of(values)]

    @cached_property
    def _up_to_edges(self) -> npt.NDArray[np.int64]:
        """Counts below each edge `[K, 129]`."""
        return np.concatenate([np.zeros((len(self.counts), 1), np.int64), self.counts.cumsum(axis=1)], axis=1)


def bins_of(values: Doubles) -> npt.NDArray[np.int64]:
    """Return bin numbers of log odds; lower edges are inclusive."""
    return np.clip(np.floor(values / WIDTH).astype(np.int64) + N_BINS // 2, 0, N_BINS - 1)


def _half_within(up_to_edges: npt.NDArray[np.int64], middle: float) -> float:
    """Distance from `middle` within which half of the counts are, NaN if empty."""
    if not up_to_edges[-1]:
        return float("nan")
    low, high = 0.0, float(EDGES[-1] - EDGES[0])
    for _ in range(_HALVINGS):
        distance = (low + high) / 2
        first, last = np.interp([middle - distance, middle + distance], EDGES, up_to_edges)
        low, high = (low, distance) if last - first >= up_to_edges[-1] / 2 else (distance, high)
    return high

"""LogSketch: quantiles of non-negative numbers within a relative error.

Buckets grow by a constant factor (Masson, Rim and Lee, "DDSketch", VLDB 2019).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError

LEAST = 1e-9  # smaller numbers count as 0
RELATIVE_ERROR = 0.01
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_ZERO = -(1 << 62)  # bucket of 0, below all others


class LogSketch:
    """A sketch whose `quantile(q)` is within `RELATIVE_ERROR` of x[floor(q (n - 1))], x the sorted numbers."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self.n = 0
        self.least, self.most = math.inf, -math.inf

    def add(self, value: float, count: int = 1) -> None:
        """Add a number `count` times. Raises `ConfigError` if it is negative or not finite."""
        if not 0 <= value < math.inf:
            raise ConfigError(f"value is {value!r}: a sketch takes finite numbers that are not negative")
        self.n += count
        self.least, self.most = min(self.least, value), max(self.most, value)
        self._counts[math.ceil(math.log(value) / _LOG_GAMMA) if value >= LEAST else _ZERO] += count

    def add_all(self, values: npt.NDArray[np.floating[Any]]) -> None:
        """Add numbers `[n]`. Raises `ConfigError` if one is negative or not finite."""
        if not ((values >= 0) & (values < math.inf)).all():
            raise ConfigError("a sketch takes finite numbers that are not negative")
        self.n += len(values)
        self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))
        large = values[values >= LEAST].astype(np.float64)
        buckets, counts = np.unique(np.ceil(np.log(large) / _LOG_GAMMA).astype(np.int64), return_counts=True)
        self._counts.update(dict(zip(buckets.tolist(), counts.tolist(), strict=True)))
        self._counts[_ZERO] += len(values) - len(large)

    def share_over(self, value: float) -> float:
        """Approximate share of numbers over `value`, to one bucket's width; NaN if empty."""
        if not self.n:
            return math.nan
        first = math.ceil(math.log(max(value, LEAST)) / _LOG_GAMMA)
        return sum(count for bucket, count in self._counts.items() if bucket > first) / self.n

    def merge(self, other: LogSketch) -> None:
        """Add another sketch."""
        self._counts.update(other._counts)
        self.n += other.n
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    def quantile(self, q: float) -> float:
        """Approximate number of rank floor(q (n - 1)); NaN if empty."""
        if not self.n:
            return math.nan
        rank, before = math.floor(q * (self.n - 1)), 0
        for bucket in sorted(self._counts):
            before += self._counts[bucket]
            if rank < before:
                if bucket == _ZERO:
                    return 0.0
                # From the bucket's lower end, which does not overflow.
                middle = math.exp((bucket - 1) * _LOG_GAMMA) * (2 * _GAMMA / (_GAMMA + 1))
                return min(max(middle, self.least), self.most)
        raise AssertionError("counts do not add up")

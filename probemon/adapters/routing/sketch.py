"""LogSketch: quantiles of non-negative numbers within a relative error.

Buckets grow by a constant factor (Masson, Rim and Lee, "DDSketch", VLDB 2019).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError
from probemon.util.checks import check_count, check_number, check_share

LEAST = 1e-9  # smaller numbers count as 0


class LogSketch:
    """A sketch whose `quantile(q)` is within `relative_error` of x[floor(q (n - 1))], x the sorted numbers.

    Raises `ConfigError`.
    """

    def __init__(self, relative_error: float = 0.01) -> None:
        self.relative_error = check_share("relative_error", relative_error)
        self._gamma = (1 + relative_error) / (1 - relative_error)
        self._log_gamma = math.log(self._gamma)
        self._counts: dict[int, int] = {}
        self._n_zero = 0
        self.n = 0
        self.least, self.most = math.inf, -math.inf

    def add(self, value: float, count: int = 1) -> None:
        """Add a number `count` times."""
        if not 0 <= value < math.inf:
            raise ConfigError(f"value is {value!r}: a sketch takes finite numbers that are not negative")
        self.n += check_count("count", count, least=1, remedy="give 1 or more")
        self.least, self.most = min(self.least, value), max(self.most, value)
        if value < LEAST:
            self._n_zero += count
            return
        bucket = math.ceil(math.log(value) / self._log_gamma)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def add_all(self, values: npt.NDArray[np.floating[Any]]) -> None:
        """Add numbers `[n]`. Raises `ConfigError` if one is negative or not finite."""
        if not ((values >= 0) & (values < math.inf)).all():
            raise ConfigError("a sketch takes finite numbers that are not negative")
        if not len(values):
            return
        self.n += len(values)
        self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))
        large = values[values >= LEAST].astype(np.float64)
        self._n_zero += len(values) - len(large)
        buckets, counts = np.unique(np.ceil(np.log(large) / self._log_gamma).astype(np.int64), return_counts=True)
        for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    def share_over(self, value: float) -> float:
        """Approximate share of numbers over `value`, to one bucket's width; NaN if empty."""
        if not self.n:
            return math.nan
        first = math.ceil(math.log(max(value, LEAST)) / self._log_gamma)
        return sum(count for bucket, count in self._counts.items() if bucket > first) / self.n

    def merge(self, other: LogSketch) -> None:
        """Add another sketch. Raises `ConfigError` if its relative error differs."""
        if other.relative_error != self.relative_error:
            raise ConfigError(
                f"a sketch of error {other.relative_error} into one of {self.relative_error}: their buckets differ,"
                " make both with one error"
            )
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.n += other.n
        self._n_zero += other._n_zero
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    def quantile(self, q: float) -> float:
        """Approximate number of rank floor(q (n - 1)); NaN if empty."""
        check_number("q", q, low=0, high=1, remedy="give a share from 0 to 1")
        if not self.n:
            return math.nan
        rank, before = math.floor(q * (self.n - 1)), self._n_zero
        if rank < before:
            return 0.0
        for bucket in sorted(self._counts):
            before += self._counts[bucket]
            if rank < before:
                # From the bucket's lower end, which does not overflow.
                middle = math.exp((bucket - 1) * self._log_gamma) * (2 * self._gamma / (self._gamma + 1))
                return min(max(middle, self.least), self.most)
        raise AssertionError("counts do not add up")

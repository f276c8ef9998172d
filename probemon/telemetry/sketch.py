"""LogSketch: quantiles of numbers that are not negative, within a stated relative error, in little memory.

    sketch = LogSketch(relative_error=0.01)
    sketch.add(12.5)
    sketch.add(13.0, count=40)
    sketch.quantile(0.99)                  # within 1 % of the number of that rank
    sketch.merge(other)                    # as if all had been added to one

Buckets are wider by a constant factor each (Masson, Rim and Lee, "DDSketch", VLDB 2019), so counts alone are kept, and
what is merged or added in any order gives the same.
"""

from __future__ import annotations

import math

from probemon.errors import ConfigError

LEAST = 1e-9  # what is less counts as 0


class LogSketch:
    """`quantile(q)` is within `relative_error` of x[floor(q (n - 1))], x sorted; numbers under 1e-9 count as 0. Raises
    `ConfigError`.
    """

    def __init__(self, relative_error: float = 0.01) -> None:
        if not 0 < relative_error < 1:
            raise ConfigError(f"relative_error is {relative_error!r}: give more than 0 and less than 1")
        self.relative_error = relative_error
        self._gamma = (1 + relative_error) / (1 - relative_error)
        self._log_gamma = math.log(self._gamma)
        self._counts: dict[int, int] = {}
        self._n_zero = 0
        self.n = 0
        self.least, self.most = math.inf, -math.inf

    def add(self, value: float, count: int = 1) -> None:
        """A number that occurred `count` times."""
        if not 0 <= value < math.inf:
            raise ConfigError(f"value is {value!r}: a sketch takes finite numbers that are not negative")
        if count < 1:
            raise ConfigError(f"count is {count!r}: give 1 or more")
        self.n += count
        self.least, self.most = min(self.least, value), max(self.most, value)
        if value < LEAST:
            self._n_zero += count
            return
        bucket = math.ceil(math.log(value) / self._log_gamma)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def merge(self, other: LogSketch) -> None:
        """Take in what another one has seen. Raises `ConfigError` where its error is another."""
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
        """The number of rank floor(q (n - 1)), nearly; NaN where there is none."""
        if not 0 <= q <= 1:
            raise ConfigError(f"q is {q!r}: give a share from 0 to 1")
        if not self.n:
            return math.nan
        rank, before = math.floor(q * (self.n - 1)), self._n_zero
        if rank < before:
            return 0.0
        for bucket in sorted(self._counts):
            before += self._counts[bucket]
            if rank < before:
                # Twice the bucket's upper end over (gamma + 1) is as far from both its ends; made from the lower one,
                # which does not overflow.
                middle = math.exp((bucket - 1) * self._log_gamma) * (2 * self._gamma / (self._gamma + 1))
                return min(max(middle, self.least), self.most)
        raise AssertionError("counts do not add up")

    @property
    def n_buckets(self) -> int:
        """In use: what it keeps in memory."""
        return len(self._counts)

"""Breaker: pauses scoring after repeated errors, which would otherwise end the generation.

    with manager.attach(model, tokenizer, breaker=Breaker(errors=3, within=60.0, retry_after=5.0)) as run:
        model.generate(**inputs)
    run.breaker.state                      # "closed": scoring; "open": paused; "half-open": trying again

Tokens are then unseen; errors are in `run.failures`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from probemon.monitor.check import FAILED, OK, Check
from probemon.util.checks import check_count, check_number

CLOSED, HALF_OPEN, OPEN = "closed", "half-open", "open"
SCORING_FAILED = "scoring failed"
PAUSED = "the breaker is open: scoring failed and is paused"
JITTER = 0.1  # random share of a pause: processes should not retry together
LONGEST = 16  # limit of a pause, in first pauses


@dataclass(frozen=True)
class Breaker:
    """Pauses scoring for `retry_after` seconds after `errors` errors within `within` seconds; a failed retry doubles
    the pause. Raises `ConfigError`.
    """

    errors: int = 3
    within: float = 60.0
    retry_after: float = 5.0

    def __post_init__(self) -> None:
        check_count("errors", self.errors, least=1, remedy="it counts errors, so give 1 or more")
        for name in ("within", "retry_after"):
            check_number(name, getattr(self, name), low=0, open_low=True, remedy="give seconds, over 0")


class Circuit:
    """The state of a breaker. `clock()`: seconds; `draw()`: from 0 to 1."""

    def __init__(
        self,
        breaker: Breaker,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.breaker, self.state, self.n_errors, self.n_opened = breaker, CLOSED, 0, 0
        self._clock, self._draw, self._lock = clock, draw, threading.Lock()
        self._errors: deque[float] = deque(maxlen=breaker.errors)
        self._pause, self._until = breaker.retry_after, 0.0

    def pauses(self) -> bool:
        """Return whether to skip scoring. After a pause, one caller may try."""
        if self.state == CLOSED:
            return False
        with self._lock:
            if self.state == OPEN and self._clock() >= self._until:
                self.state = HALF_OPEN
                return False
            return self.state != CLOSED

    @property
    def pausing(self) -> bool:
        """True during a pause."""
        with self._lock:
            return self.state == OPEN and self._clock() < self._until

    def succeeded(self) -> None:
        """Report success, which ends a pause."""
        if self.state == HALF_OPEN:
            with self._lock:
                self.state, self._pause = CLOSED, self.breaker.retry_after
                self._errors.clear()

    def untold(self) -> None:
        """Report that a try was discarded, so its outcome is unknown: the next caller may try."""
        if self.state == HALF_OPEN:
            with self._lock:
                self.state, self._until = OPEN, self._clock()

    def failed(self) -> None:
        """Report an error."""
        with self._lock:
            now = self._clock()
            self.n_errors += 1
            self._errors.append(now)
            many = len(self._errors) == self.breaker.errors and now - self._errors[0] <= self.breaker.within
            if self.state == HALF_OPEN:
                self._pause = min(2 * self._pause, LONGEST * self.breaker.retry_after)
            if self.state == HALF_OPEN or (self.state == CLOSED and many):
                self.state = OPEN
                self.n_opened += 1
                self._until = now + self._pause * (1 + JITTER * self._draw())

    def check(self) -> Check:
        """Return the check for the run's health."""
        if self.state == CLOSED:
            past = f", after {self.n_errors:,} errors and {self.n_opened:,} pauses" if self.n_errors else ""
            return Check("breaker", OK, f"scoring is on{past}")
        remedy = "See run.failures for the errors; tokens are not watched meanwhile."
        return Check("breaker", FAILED, f"scoring pauses ({self.state}), after {self.n_errors:,} errors", remedy)


def unscored(error: Exception) -> str:
    """Return the reason of unscored tokens; messages may vary by token."""
    return f"{SCORING_FAILED}: {type(error).__name__}"

"""Limits the time of a generation step that watching takes, by leaving things out.

    budget = Budget(ms=1.0, share=0.05)
    with manager.attach(model, tokenizer, followers=[budget]) as run: ...

Off by default, since results then depend on timing. Concepts with a rule are never left out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probemon.core.scores import Scores
from probemon.errors import ConfigError
from probemon.monitor.check import OK, WARNING, Check
from probemon.monitor.degradations import ALL, NAMES
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.watches import Watches
from probemon.tracking.source_reports import ForwardTime
from probemon.util.checks import check_number

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

WEIGHT = 0.25  # of the newest step in the running mean
DOWN_AFTER, UP_AFTER = 8, 32  # steps at a degradation before the next
RESUME = 0.7  # of the budget, below which degradation is undone
_REMEDY = "Watch less (include, depth, fewer rules), give a larger budget, or see what else the machine does."


class Budget(Follower):
    """A step may take `ms` milliseconds in our hooks, or `share` of the model's forward without them, whichever is
    more. Runs may share a budget. Raises `ConfigError`.

    The running mean of generation steps decides.

    - `degradation`: the present one (`probemon.monitor.degradations.NAMES`)
    - `mean`: share of the budget that steps take at it
    - `tokens`: counts by name of the degradation
    """

    def __init__(self, ms: float | None = None, share: float | None = None) -> None:
        if ms is None and share is None:
            raise ConfigError("a budget has neither ms nor share: give one of them, or both")
        for name, value in (("ms", ms), ("share", share)):
            if value is not None:
                check_number(name, value, low=0, open_low=True, remedy="give what a step may take, over 0")
        self.ms, self.share, self.degradation, self.mean = ms, share, ALL, 0.0
        self.tokens = Counter[str]()
        self._n_steps, self._lock = 0, threading.Lock()  # at this degradation

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ms={self.ms}, share={self.share})"

    def began(self, run: MonitorRun) -> None:
        """Add a run."""
        run.follow(_Shedding(self, run.watching))

    def used(self, time: ForwardTime) -> float:
        """Return the share of the budget that a forward took."""
        allowed = max((self.ms or 0.0) / 1e3, (self.share or 0.0) * (time.whole - time.inside))
        return time.inside / allowed if allowed > 0 else float("inf")

    def count(self, degradation: int, n_tokens: int) -> None:
        """Count tokens at a degradation."""
        with self._lock:
            self.tokens[NAMES[degradation]] += n_tokens

    def judge(self, time: ForwardTime, now: int, degradations: Sequence[int]) -> int:
        """Judge a forward of a run at the degradation `now`; return the new one."""
        with self._lock:
            if time.n_prompt or not time.n_generated:
                return self.degradation
            used = self.used(time)
            self.mean = used if not self._n_steps else self.mean + WEIGHT * (used - self.mean)
            self._n_steps += 1
            if self.mean > 1 and self._n_steps >= DOWN_AFTER:
                self._go(
                    min((degradation for degradation in degradations if degradation > now), default=self.degradation)
                )
            elif self.mean < RESUME and self._n_steps >= UP_AFTER:
                self._go(max((degradation for degradation in degradations if degradation < now), default=ALL))
            return self.degradation

    def _go(self, degradation: int) -> None:
        if degradation != self.degradation:
            self.degradation, self.mean, self._n_steps = degradation, 0.0, 0


class HeldSeconds(threading.local):
    """Seconds that each thread's generation was held since its last forward."""

    seconds = 0.0


class _Shedding(Follower):
    """Applies the budget to one run."""

    def __init__(self, budget: Budget, watches: Watches) -> None:
        self._budget, self._watches, self._held = budget, watches, HeldSeconds()
        self._watches.shed_to(budget.degradation)

    def scored(self, batch: Batch, scores: Scores) -> None:
        self._budget.count(batch.watch.degradation, len(batch.placed))

    def held(self, seconds: float) -> None:
        """Subtract the wait for judges: shedding would not shorten it."""
        self._held.seconds += seconds

    def forward(self, time: ForwardTime) -> None:
        held, self._held.seconds = self._held.seconds, 0.0
        time = time._replace(inside=time.inside - held, whole=time.whole - held)
        degradation = self._budget.judge(time, self._watches.now.degradation, self._watches.degradations)
        if degradation != self._watches.asked_degradation:
            self._watches.shed_to(degradation)

    def check(self) -> Check:
        """Return a health check of what is left out."""
        tokens, degradation = self._budget.tokens, self._watches.now.degradation
        n_less, n = tokens.total() - tokens[NAMES[ALL]], tokens.total()
        shed = "" if not n_less else f"; less was scored than is watched at {n_less:,} of {n:,} tokens"
        if self._budget.mean > 1 and degradation == max(self._watches.degradations, default=ALL):
            what, remedy = "steps take more than their budget, and nothing more may be left out", _REMEDY
            return Check("budget", WARNING, f"{what}{shed}", remedy)
        if degradation != ALL:
            return Check("budget", WARNING, f"it is held on the degradation {NAMES[degradation]!r}{shed}", _REMEDY)
        return Check("budget", OK, f"nothing is left out now{shed}")

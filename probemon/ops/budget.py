"""Budget: how much of a step of generation watching may take, and a ladder that sheds what is over it.

    budget = Budget(ms=1.0, share=0.05)
    with manager.attach(model, tokenizer, followers=[budget]) as run:
        model.generate(**inputs)
    run.watching.rung_name, budget.tokens      # "all", {"all": 380, "audit": 24, ...}: tokens by the rung of each
    result.watches, run.watches[number].rung   # from which position on which rung held

Runs that share a machine are given the same one, and are held to it together.

Off unless it is asked for, since what is left out then depends on the time that things took: it is in the coverage of
every token (`shed`, or why the token is unseen) and in the result. What has a rule is never left out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probemon.core.scores import Scores
from probemon.errors import ConfigError
from probemon.monitor.check import OK, WARNING, Check
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.rungs import ALL, NAMES
from probemon.monitor.watches import Watches
from probemon.tracking.source_reports import ForwardTime
from probemon.util.checks import check_number

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

WEIGHT = 0.25  # of the newest step in the running mean
DOWN_AFTER, UP_AFTER = 8, 32  # steps on a rung before the next, so that its cost is known
RESUME = 0.7  # the share of the budget under which what was left out comes back
_REMEDY = "Watch less (include, depth, fewer rules), give a larger budget, or see what else the machine does."


class Budget(Follower):
    """A step of generation may take `ms` milliseconds in our hooks, or `share` of what the model's forward takes
    without them, whichever is more. It follows any number of runs. Raises `ConfigError`.

    It goes down a rung where the running mean of steps is over the budget, and up where it is well under it. Prompts
    are not judged, since they are as long as they are.

    - `rung`: the number of the one that holds for all runs that share it (`probemon.monitor.rungs.NAMES`)
    - `mean`: what steps take of the budget on it
    - `tokens`: how many, scored or not, on which rung, by its name
    """

    def __init__(self, ms: float | None = None, share: float | None = None) -> None:
        if ms is None and share is None:
            raise ConfigError("a budget has neither ms nor share: give one of them, or both")
        for name, value in (("ms", ms), ("share", share)):
            if value is not None:
                check_number(name, value, low=0, open_low=True, remedy="give what a step may take, over 0")
        self.ms, self.share, self.rung, self.mean = ms, share, ALL, 0.0
        self.tokens = Counter[str]()
        self._n_steps, self._lock = 0, threading.Lock()  # steps on this rung

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ms={self.ms}, share={self.share})"

    def began(self, run: MonitorRun) -> None:
        """Hold one more run to it."""
        run.follow(_Shedding(self, run.watching))

    def used(self, time: ForwardTime) -> float:
        """Return how much of the budget a forward took; over 1 is too much."""
        allowed = max((self.ms or 0.0) / 1e3, (self.share or 0.0) * (time.whole - time.inside))
        return time.inside / allowed if allowed > 0 else float("inf")

    def count(self, rung: int, n_tokens: int) -> None:
        """Count tokens on a rung."""
        with self._lock:
            self.tokens[NAMES[rung]] += n_tokens

    def judge(self, time: ForwardTime, now: int, rungs: Sequence[int]) -> int:
        """Judge a forward of a run that was on the rung `now` of its `rungs`; return the rung that holds then."""
        with self._lock:
            if time.n_prompt or not time.n_generated:
                return self.rung
            used = self.used(time)
            self.mean = used if not self._n_steps else self.mean + WEIGHT * (used - self.mean)
            self._n_steps += 1
            if self.mean > 1 and self._n_steps >= DOWN_AFTER:
                self._go(min((rung for rung in rungs if rung > now), default=self.rung))
            elif self.mean < RESUME and self._n_steps >= UP_AFTER:
                self._go(max((rung for rung in rungs if rung < now), default=ALL))
            return self.rung

    def _go(self, rung: int) -> None:
        if rung != self.rung:
            self.rung, self.mean, self._n_steps = rung, 0.0, 0


class _Held(threading.local):
    """Seconds that the generation of each thread was held since its last forward."""

    seconds = 0.0


class _Shedding(Follower):
    """Keeps what one run watches on the rung of its budget."""

    def __init__(self, budget: Budget, watches: Watches) -> None:
        self._budget, self._watches, self._held = budget, watches, _Held()
        self._watches.shed_to(budget.rung)

    def scored(self, batch: Batch, scores: Scores) -> None:
        self._budget.count(batch.watch.rung, len(batch.placed))

    def held(self, seconds: float) -> None:
        """Take what judges were waited for as no work of ours: nothing that is left out would make them quicker."""
        self._held.seconds += seconds

    def forward(self, time: ForwardTime) -> None:
        held, self._held.seconds = self._held.seconds, 0.0
        time = time._replace(inside=time.inside - held, whole=time.whole - held)
        rung = self._budget.judge(time, self._watches.now.rung, self._watches.rungs)
        if rung != self._watches.asked_rung:
            self._watches.shed_to(rung)

    def check(self) -> Check:
        """Say what is left out, as a check of the run's health."""
        tokens, rung = self._budget.tokens, self._watches.now.rung
        n_less, n = tokens.total() - tokens[NAMES[ALL]], tokens.total()
        shed = "" if not n_less else f"; less was scored than is watched at {n_less:,} of {n:,} tokens"
        if self._budget.mean > 1 and rung == max(self._watches.rungs, default=ALL):
            what, remedy = "steps take more than their budget, and nothing more may be left out", _REMEDY
            return Check("budget", WARNING, f"{what}{shed}", remedy)
        if rung != ALL:
            return Check("budget", WARNING, f"it is held on the rung {NAMES[rung]!r}{shed}", _REMEDY)
        return Check("budget", OK, f"nothing is left out now{shed}")

"""Budget: how much of a step of generation watching may take, and a ladder that sheds what is over it.

    with manager.attach(model, tokenizer, budget=Budget(ms=1.0, share=0.05)) as run:
        model.generate(**inputs)
    run.budget.rung, run.budget.tokens         # "all", {"all": 380, "audit": 24, ...}: tokens by the rung of each
    result.watches, run.watches[number].rung   # from which position on which rung held

Runs that share a machine may share a ladder: `ladder = Ladder(Budget(ms=1.0))`, then `attach(..., budget=ladder)`.

Off unless it is asked for, since what is left out then depends on the time that things took: it is in the coverage of
every token (`shed`, or why the token is unseen) and in the result. What has a rule is never left out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from probemon.core.scores import Scores
from probemon.errors import ConfigError
from probemon.monitor.followers import Follower
from probemon.monitor.health import OK, WARNING, Check
from probemon.monitor.rungs import ALL, NAMES
from probemon.monitor.token_scorer import Publish
from probemon.monitor.watches import Watch, Watches
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import Generation
from probemon.tracking.observer import ForwardTime
from probemon.tracking.recording import Recording
from probemon.util.checks import check_number

WEIGHT = 0.25  # of the newest step in the running mean
DOWN_AFTER, UP_AFTER = 8, 32  # steps on a rung before the next, so that its cost is known
RESUME = 0.7  # the share of the budget under which what was left out comes back
_REMEDY = "Watch less (include, depth, fewer rules), give a larger budget, or see what else the machine does."


@dataclass(frozen=True)
class Budget:
    """A step of generation may take `ms` milliseconds in our hooks, or `share` of what the host's forward takes without
    them, whichever is more. Raises `ConfigError`.
    """

    ms: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if self.ms is None and self.share is None:
            raise ConfigError("a budget has neither ms nor share: give one of them, or both")
        for name in ("ms", "share"):
            if getattr(self, name) is not None:
                remedy = "give what a step may take, over 0"
                check_number(name, getattr(self, name), low=0, open_low=True, remedy=remedy)

    def used(self, time: ForwardTime) -> float:
        """Return how much of the budget a forward took; over 1 is too much."""
        allowed = max((self.ms or 0.0) / 1e3, (self.share or 0.0) * (time.whole - time.inside))
        return time.inside / allowed if allowed > 0 else float("inf")


class Ladder:
    """Goes down a rung where the running mean of steps is over the budget, and up where it is well under it.

    `rung` is the one that holds for all runs that share it, `mean` what steps take of the budget on it. Prompts are not
    judged, since they are as long as they are.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget, self.rung, self.mean = budget, ALL, 0.0
        self._n_steps, self._lock = 0, threading.Lock()  # steps on this rung

    def judge(self, time: ForwardTime, now: int, rungs: Sequence[int]) -> int:
        """Judge a forward of a run that was on the rung `now` of its `rungs`; return the rung that holds then."""
        with self._lock:
            if time.n_prompt or not time.n_generated:
                return self.rung
            used = self.budget.used(time)
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


class Shedding(Follower):
    """Keeps the watches of one run on the rung of its ladder. `tokens`: how many, scored or not, on which rung."""

    def __init__(self, budget: Budget | Ladder, watches: Watches) -> None:
        if not isinstance(budget, (Budget, Ladder)):
            raise ConfigError(f"budget is {type(budget).__name__}: give Budget(ms=...), or a Ladder that runs share")
        self.ladder = Ladder(budget) if isinstance(budget, Budget) else budget
        self.tokens = Counter[str]()
        self._watches, self._lock = watches, threading.Lock()
        self._held = _Held()
        self._watches.shed_to(self.ladder.rung)

    @property
    def rung(self) -> str:
        """Return the name of the rung that holds now."""
        return NAMES[self._watches.now.rung]

    @property
    def at_its_end(self) -> bool:
        """Whether nothing more could be left out."""
        return self._watches.now.rung == max(self._watches.rungs, default=ALL)

    def held(self, seconds: float) -> None:
        """Take what judges were waited for as no work of ours: nothing that is left out would make them quicker."""
        self._held.seconds += seconds

    def forward(self, time: ForwardTime) -> None:
        """Judge a step."""
        held, self._held.seconds = self._held.seconds, 0.0
        time = time._replace(inside=time.inside - held, whole=time.whole - held)
        rung = self.ladder.judge(time, self._watches.now.rung, self._watches.rungs)
        if rung != self._watches.asked_rung:
            self._watches.shed_to(rung)

    def counting(self, publish: Publish) -> Publish:
        """Return `publish` that counts tokens by their rung, too."""

        def both(
            watch: Watch, generation: Generation | None, recording: Recording, placed: PlacedTokens, scores: Scores
        ) -> None:
            with self._lock:
                self.tokens[NAMES[watch.rung]] += len(placed)
            publish(watch, generation, recording, placed, scores)

        return both

    def check(self) -> Check:
        """Say what is left out, as a check of the run's health."""
        n_less, n = self.tokens.total() - self.tokens[NAMES[ALL]], self.tokens.total()
        shed = "" if not n_less else f"; less was scored than is watched at {n_less:,} of {n:,} tokens"
        if self.ladder.mean > 1 and self.at_its_end:
            what, remedy = "steps take more than their budget, and nothing more may be left out", _REMEDY
            return Check("budget", WARNING, f"{what}{shed}", remedy)
        if self.rung != NAMES[ALL]:
            return Check("budget", WARNING, f"it is held on the rung {self.rung!r}{shed}", _REMEDY)
        return Check("budget", OK, f"nothing is left out now{shed}")

"""Follower: hears all that a run does, from its first forward to its end. Metrics and traces are followers.

    class Teller(Follower):
        def event(self, event, action): print(event.name, action)

    with manager.attach(model, tokenizer) as run:
        run.follow(Teller())

All of it but `verdict` is called in the thread that generates, in the order in which it happens; what a follower raises
is kept in `run.failures`, and ends no generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from probemon.core.scores import Gap, Scores
from probemon.monitor.failures import Failures
from probemon.monitor.rules import Event
from probemon.tracking.align import PlacedTokens
from probemon.tracking.observer import ForwardTime, Observer
from probemon.tracking.recording import Recording

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun


class Follower(Observer):
    """Does nothing; override what is of interest, here and of `Observer`. One follower may follow several runs."""

    def began(self, run: MonitorRun) -> None:
        """It follows `run` from now on."""

    def scored(self, placed: PlacedTokens, scores: Scores) -> None:
        """Tokens were scored, or are unseen (`scores.coverage`)."""

    def event(self, event: Event, action: str) -> None:
        """A rule was met; `action`: "record", "stop", "raise", "escalate", or "call" for a callable."""

    def stopped(self, event: Event) -> None:
        """The row of an event was stopped for it, by the action "stop" or by a judge."""

    def verdict(self, event: Event) -> None:
        """A judge was asked of an event, and `event.verdict` is known now. This may come in another thread."""

    def held(self, seconds: float) -> None:
        """The generation of this thread waited so long for judges, which the next `forward` counts as time inside."""

    def closed(self, run: MonitorRun) -> None:
        """The block of `run` has ended."""


class Followers(Observer):
    """Those of one run. `began` is called at once, and raises what it raises."""

    def __init__(self, failures: Failures) -> None:
        self._failures, self._all = failures, list[Follower]()

    def add(self, run: MonitorRun, follower: Follower) -> None:
        """Let one more follow."""
        follower.began(run)
        self._all.append(follower)

    def scored(self, placed: PlacedTokens, scores: Scores) -> None:
        """Tell that tokens were scored."""
        self._tell(lambda one: one.scored, placed, scores)

    def event(self, event: Event, action: str) -> None:
        """Tell that a rule was met."""
        self._tell(lambda one: one.event, event, action)

    def stopped(self, event: Event) -> None:
        """Tell what stopped a row."""
        self._tell(lambda one: one.stopped, event)

    def verdict(self, event: Event) -> None:
        """Tell what a judge ruled."""
        self._tell(lambda one: one.verdict, event)

    def held(self, seconds: float) -> None:
        """Tell how long judges were waited for."""
        self._tell(lambda one: one.held, seconds)

    def forward(self, time: ForwardTime) -> None:
        """Tell how long a forward took."""
        self._tell(lambda one: one.forward, time)

    def gap(self, gap: Gap) -> None:
        """Tell what was not seen."""
        self._tell(lambda one: one.gap, gap)

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Tell what ended."""
        self._tell(lambda one: one.ended, recording, error)

    def closed(self, run: MonitorRun) -> None:
        """Tell that the run has ended."""
        self._tell(lambda one: one.closed, run)

    def _tell(self, method: Callable[[Follower], Callable[..., None]], *arguments: Any) -> None:
        for one in self._all:
            self._failures.call("a follower", method(one), *arguments)

"""Follower: the one way to hear a run, from its first forward to its end.

    class Printer(Follower):
        def event(self, event, action): print(event.name, action)

    with manager.attach(model, tokenizer, followers=[Printer(), JsonLinesSink("scores.jsonl"), print]) as run: ...

Order, for each batch of tokens: `states`; the tokens are scored and recorded; the rules are asked (`event`); `scored`.
Each of these goes to what decides for rules (judges), then to the followers in the order in which they were given, then
to the sinks. All but `verdict` is called in the thread that generates. What a follower raises ends no generation: it is
kept in `run.failures`.

A sink (`open`, `write`, `close`) becomes a follower by `Delivery`; a callable is called with `(placed, scores)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probemon.core.hierarchy import Ints
from probemon.core.memory_reads import MemoryReads
from probemon.core.scores import Gap, Scores, TokenBatch
from probemon.host.site import Site
from probemon.monitor.check import Check
from probemon.monitor.failures import Failures
from probemon.monitor.rules import Event
from probemon.monitor.watches import Watch
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording
from probemon.tracking.source_reports import ForwardTime

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun


@dataclass(eq=False, slots=True, weakref_slot=True)
class Batch:
    """Tokens of one recording that are scored together, in order.

    - `placed`: which tokens they are, `recording`: whose; `generation`: the `generate()` they belong to, None for a
      document of plain forwards
    - `watch`: what is watched at these tokens; `origin`: the rows whose retained sets they start from
    - `reads`: what memories of the model read at them, once they are scored; None without a memory
    """

    watch: Watch
    generation: Generation | None
    recording: Recording
    placed: PlacedTokens
    origin: Ints
    reads: MemoryReads | None = None

    def as_tokens(self, scores: Scores) -> TokenBatch:
        """Return what a sink is given of them."""
        placed, recording = self.placed, self.recording
        return TokenBatch(
            recording.number,
            placed.rows,
            placed.columns - recording.offset,
            placed.ids,
            placed.phase,
            placed.provisional,
            scores,
            recording.request,
            self.watch.deployment or "",
        )


class Follower:
    """Does nothing; override what is of interest. One follower may follow several runs, where its class says so."""

    kind = "a follower"  # how a failure of it is reported

    def attaching(self, run: MonitorRun) -> Sequence[str | Site]:
        """A run on `run.model` is being made, and nothing is watched yet: return further sites whose hidden states are
        wanted. What this raises, `attach` raises.
        """
        return ()

    def began(self, run: MonitorRun) -> None:
        """The block of `run` has begun, or was open when it was told to follow. What this raises, the block raises."""

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Tokens are about to be scored: `hidden` are their states `[N, D]` by site, or the reason why there are none.

        Where the states turn out not to be theirs, no `scored` follows.
        """

    def reads(self, batch: Batch) -> MemoryReads | None:
        """Return what the model's memories read at tokens whose `states` came before, for results and events."""
        return None

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Tokens were scored, or are unseen (`scores.coverage`), and the rules were asked."""

    def event(self, event: Event, action: str) -> None:
        """A rule was met; `action`: "record", "stop", "raise", "escalate", or "call" for a callable."""

    def stopped(self, event: Event) -> None:
        """The row of an event was stopped for it, by the action "stop" or by a judge."""

    def verdict(self, event: Event) -> None:
        """A judge was asked of an event, and `event.verdict` is known now. This may come in another thread."""

    def held(self, seconds: float) -> None:
        """The generation of this thread waited so long for judges, which the next `forward` counts as time inside."""

    def gap(self, gap: Gap) -> None:
        """Columns were run that our hooks did not see, whether that is reported or raised."""

    def forward(self, time: ForwardTime) -> None:
        """A forward of the model ended, and its tokens are scored."""

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """A generation ended: a `generate()`, a loop by hand or a request, by `error` or as it should."""

    def finish(self, failed: bool) -> None:
        """The block ends, and the model is not watched any more: complete what is under way. `failed`: by an error, so
        wait for nothing. Also called, in another thread, where a run is dropped.
        """

    def closed(self, run: MonitorRun) -> None:
        """The block of `run` has ended, and all that it has is complete."""

    def check(self) -> Check | None:
        """Return its line in `run.health()`, if it has one."""
        return None

    def sums(self) -> type | None:
        """Return the class that adds up what followers of this kind say for Prometheus, if there is one: it has
        `begin(follower)`, `end(follower)` and `collect()`.
        """
        return None


class Decider(Follower):
    """Decides for rules whose action asks somebody: see `probemon.monitor.rules.AskedAction`. Hears before all
    followers.
    """

    def ask(self, action: Any, event: Event, generation: Generation) -> None:
        """Put the event of a rule with this action to whoever decides; `event.verdict` is pending."""
        raise NotImplementedError


class Listener(Follower):
    """Calls `listener(placed, scores)` with each batch of tokens, once it is scored."""

    kind = "a listener"

    def __init__(self, listener: Callable[[PlacedTokens, Scores], object]) -> None:
        self._listener = listener

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Call it."""
        self._listener(batch.placed, scores)


_HEARD = tuple(
    name for name, method in vars(Follower).items() if callable(method) and name not in ("attaching", "began", "sums")
)


class Followers:
    """Those of one run, in order; each is called for what it overrides. Errors are kept in `failures`."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self._first: list[Follower] = []
        self._own: list[Follower] = []
        self.sinks: list[Follower] = []
        self._heard: dict[str, list[tuple[Follower, Callable[..., Any]]]] = {name: [] for name in _HEARD}

    def __iter__(self) -> Iterator[Follower]:
        return iter([*self._first, *self._own, *self.sinks])

    def add(self, follower: Follower, *, first: bool = False, sink: bool = False) -> None:
        """Add one: among the others, or before all of these, or as what delivers to a sink after them."""
        (self._first if first else self.sinks if sink else self._own).append(follower)
        self._heard = {
            name: [
                (one, getattr(one, name))
                for one in [*self._first, *self._own, *self.sinks]
                if getattr(type(one), name) is not getattr(Follower, name)
            ]
            for name in _HEARD
        }

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Tell that tokens are about to be scored."""
        self._tell("states", batch, hidden)

    def reads(self, batch: Batch) -> MemoryReads | None:
        """Return what memories read at tokens: of the first follower that knows."""
        for one, method in self._heard["reads"]:
            try:
                reads: MemoryReads | None = method(batch)
            except Exception as error:
                self.failures.add(one.kind, error)
                continue
            if reads is not None:
                return reads
        return None

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Tell that tokens were scored."""
        self._tell("scored", batch, scores)

    def event(self, event: Event, action: str) -> None:
        """Tell that a rule was met."""
        self._tell("event", event, action)

    def stopped(self, event: Event) -> None:
        """Tell what stopped a row."""
        self._tell("stopped", event)

    def verdict(self, event: Event) -> None:
        """Tell what a judge ruled."""
        self._tell("verdict", event)

    def held(self, seconds: float) -> None:
        """Tell how long judges were waited for."""
        self._tell("held", seconds)

    def gap(self, gap: Gap) -> None:
        """Tell what was not seen."""
        self._tell("gap", gap)

    def forward(self, time: ForwardTime) -> None:
        """Tell how long a forward took."""
        self._tell("forward", time)

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Tell what ended."""
        self._tell("ended", recording, error)

    def finish(self, failed: bool) -> None:
        """Have them complete what is under way."""
        self._tell("finish", failed)

    def closed(self, run: MonitorRun) -> None:
        """Tell that the run has ended."""
        self._tell("closed", run)

    def checks(self) -> list[Check]:
        """Return their lines in the health of a run."""
        return [check for _, method in self._heard["check"] if (check := method()) is not None]

    def _tell(self, name: str, *arguments: Any) -> None:
        for one, method in self._heard[name]:
            try:
                method(*arguments)
            except Exception as error:
                self.failures.add(one.kind, error)

"""Follower: receives what a run does.

    class Printer(Follower):
        def event(self, event, action): print(event.name, action)

    with manager.attach(model, tokenizer, followers=[Printer(), JsonLinesSink("scores.jsonl"), print]) as run: ...

Per batch: `states`, scoring, `event` for rules that are met, `scored`. Deciders come first, then followers as given,
then sinks; all in the generating thread, except `verdict`. Errors are kept in `run.failures`.

Sinks are wrapped in `Delivery`; a callable is called with `(placed, scores)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from probemon.core.function_scores import NOT_ASKED, FunctionScores, beside
from probemon.core.hierarchy import Ints
from probemon.core.memory_reads import MemoryReads
from probemon.core.scores import Gap, Scores, TokenBatch
from probemon.host.site import Site
from probemon.monitor.check import FAILED, Check
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
    """Tokens of one recording that are scored together.

    - `generation`: None for a document of plain forwards
    - `origin`: the rows whose retained sets they start from
    - `reads`: of the model's memories, once scored
    - `functions`: by name of a function probe, before scoring
    """

    watch: Watch
    generation: Generation | None
    recording: Recording
    placed: PlacedTokens
    origin: Ints
    reads: MemoryReads | None = None
    functions: dict[str, FunctionScores] = field(default_factory=dict)

    def keep_reads(self, reads: MemoryReads | None) -> MemoryReads | None:
        """Keep and return the memory reads."""
        self.reads = reads
        return reads

    def keep_function(self, name: str, scores: FunctionScores) -> None:
        """Keep the numbers of a function probe."""
        self.functions[name] = scores

    def as_tokens(self, scores: Scores, functions: Sequence[str] = ()) -> TokenBatch:
        """Return the tokens as sinks receive them, with the scores of function probes behind those of the pack."""
        placed, recording = self.placed, self.recording
        n = len(placed)
        if functions:
            own = [self.functions.get(name) or FunctionScores.nothing(n, NOT_ASKED) for name in functions]
            scores = beside(scores, own)
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
    """Override methods as needed. Follows one run, unless its class says otherwise."""

    kind = "a follower"  # in reports of failures

    def attaching(self, run: MonitorRun) -> Sequence[str | Site]:
        """A run on `run.model` is being made: return further sites to read. Errors propagate."""
        return ()

    def began(self, run: MonitorRun) -> None:
        """The block of `run` began, or was open already. Errors propagate."""

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Tokens will be scored; `hidden`: states `[N, D]` by site, or why there are none.

        No `scored` follows if these prove to be other tokens' states.
        """

    def reads(self, batch: Batch) -> MemoryReads | None:
        """Return the memory reads at these tokens."""
        return None

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Tokens were scored, or are unseen (`scores.coverage`); rules were evaluated."""

    def event(self, event: Event, action: str) -> None:
        """A rule was met; `action`: "record", "stop", "raise", "escalate" or "call"."""

    def stopped(self, event: Event) -> None:
        """The row of an event was stopped."""

    def verdict(self, event: Event) -> None:
        """`event.verdict` is known; possibly in another thread."""

    def held(self, seconds: float) -> None:
        """This thread waited for judges."""

    def gap(self, gap: Gap) -> None:
        """Positions ran past our hooks."""

    def forward(self, time: ForwardTime) -> None:
        """A forward ended and its tokens are scored."""

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """A `generate()`, a loop by hand or a request ended."""

    def finish(self, failed: bool) -> None:
        """Watching has ended: complete pending work, without waiting if `failed`. Another thread may call it."""

    def closed(self, run: MonitorRun) -> None:
        """The block of `run` ended; its data is complete."""

    def check(self) -> Check | None:
        """Return its line of `run.health()`."""
        return None

    def sums(self) -> type | None:
        """Return the class with `begin(follower)`, `end(follower)` and `collect()` for Prometheus."""
        return None


class Decider(Follower):
    """Decides an `AskedAction`; called before followers."""

    def ask(self, action: Any, event: Event, generation: Generation) -> None:
        """Start deciding a pending event."""
        raise NotImplementedError


class Listener(Follower):
    """Calls `listener(placed, scores)` with each scored batch."""

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
    """The followers of one run."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self._first: list[Follower] = []
        self._own: list[Follower] = []
        self.sinks: list[Follower] = []
        self._heard: dict[str, list[tuple[Follower, Callable[..., Any]]]] = {name: [] for name in _HEARD}

    def __iter__(self) -> Iterator[Follower]:
        return iter([*self._first, *self._own, *self.sinks])

    def add(
        self, follower: Follower, *, first: bool = False, sink: bool = False, after: Follower | None = None
    ) -> None:
        """Add a follower, by default before sinks; directly `after` another one if both are of one group."""
        group = self._first if first else self.sinks if sink else self._own
        group.insert(group.index(after) + 1 if after in group else len(group), follower)  # type: ignore[arg-type]
        self._look_up()

    def remove(self, followers: Sequence[Follower]) -> None:
        """Remove followers."""
        for group in (self._first, self._own, self.sinks):
            group[:] = [one for one in group if one not in followers]
        self._look_up()

    def _look_up(self) -> None:
        self._heard = {
            name: [
                (one, getattr(one, name))
                for one in [*self._first, *self._own, *self.sinks]
                if getattr(type(one), name) is not getattr(Follower, name)
            ]
            for name in _HEARD
        }

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Call `states`."""
        self._tell("states", batch, hidden)

    def reads(self, batch: Batch) -> MemoryReads | None:
        """Return the first reads that are not None."""
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
        """Call `scored`."""
        self._tell("scored", batch, scores)

    def event(self, event: Event, action: str) -> None:
        """Call `event`."""
        self._tell("event", event, action)

    def stopped(self, event: Event) -> None:
        """Call `stopped`."""
        self._tell("stopped", event)

    def verdict(self, event: Event) -> None:
        """Call `verdict`."""
        self._tell("verdict", event)

    def held(self, seconds: float) -> None:
        """Call `held`."""
        self._tell("held", seconds)

    def gap(self, gap: Gap) -> None:
        """Call `gap`."""
        self._tell("gap", gap)

    def forward(self, time: ForwardTime) -> None:
        """Call `forward`."""
        self._tell("forward", time)

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Call `ended`."""
        self._tell("ended", recording, error)

    def finish(self, failed: bool) -> None:
        """Call `finish`."""
        self._tell("finish", failed)

    def closed(self, run: MonitorRun) -> None:
        """Call `closed`."""
        self._tell("closed", run)

    def checks(self) -> list[Check]:
        """Return their lines of a run's health."""
        checks = []
        for one, method in self._heard["check"]:
            try:
                check = method()
            except Exception as error:
                self.failures.add(one.kind, error)
                what = f"{type(one).__name__}.check() raised {type(error).__name__}"
                check = Check("followers", FAILED, what, "see run.failures")
            if check is not None:
                checks.append(check)
        return checks

    def _tell(self, name: str, *arguments: Any) -> None:
        for one, method in self._heard[name]:
            try:
                method(*arguments)
            except Exception as error:
                self.failures.add(one.kind, error)

"""Publisher: where the scores of a run go: its recordings, rules, listeners and sinks.

publisher = Publisher(pack, tokenizer, watches, failures, followers, recordings, reads, keep_tokens=None)
publisher.add_sink(JsonLinesSink("scores.jsonl"), max_batches=1024)
publisher.publish(watch, generation, recording, placed, scores)          # in the thread that generates
publisher.close()
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from probemon.core.memory_reads import MemoryReads
from probemon.core.scores import GENERATED, Scores, TokenBatch
from probemon.errors import ConceptRaised, ConfigError, NotSupportedDecoding
from probemon.host.changes import HostMark
from probemon.monitor.delivery import Delivery, SinkStats
from probemon.monitor.escalation import Escalate
from probemon.monitor.escalations import Escalations
from probemon.monitor.failures import MAX_KEPT, Failures
from probemon.monitor.followers import Followers
from probemon.monitor.judge_desk import PENDING
from probemon.monitor.rules import NO_STOP_IN_BEAMS, PASS, Action, Event, Rule, check_beams, named_action
from probemon.monitor.sinks import Sink
from probemon.monitor.watches import Watch, Watches
from probemon.packs.group import AnyPack
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generate_call import GenerateCall
from probemon.tracking.generation import Generation
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import keep_newest
from probemon.tracking.watched_threads import WatchedThreads
from probemon.util.counted import counted

Listener = Callable[[PlacedTokens, Scores, MemoryReads | None], None]
LOG = logging.getLogger("probemon")


def changed_within(recordings: Iterable[Recording]) -> list[str]:
    """Return in what the host changed within the first of these in which it did; nothing where it did in none."""
    for recording in recordings:
        if recording.host_changed:
            texts, turn = dict[str, None](), recording
            while turn.earlier is not None and recording.mark is not None:
                turn = turn.earlier
                marks = [mark for mark in (turn.mark, turn.mark_after) if mark is not None]
                texts |= dict.fromkeys(text for mark in marks for text in recording.mark.changes(mark))
            if recording.mark is not None and recording.mark_after is not None:
                texts |= dict.fromkeys(recording.mark_after.changes(recording.mark))
            return list(texts) or ["other adapters were on, or an earlier turn was of another host"]
    return []


class Publisher:
    """The rules of `watches` are asked of generated tokens, `listeners` called with all. What they raise is kept in
    `failures`.

    `recordings()`: those of the run.
    `reads(recording, first, n)`: what memories read at entries `first` to `first + n`, None where none is watched.
    """

    def __init__(
        self,
        pack: AnyPack,
        tokenizer: Any,
        watches: Watches,
        failures: Failures,
        followers: Followers,
        recordings: Callable[[], list[Recording]],
        reads: Callable[[Recording, int, int], MemoryReads | None],
        keep_tokens: int | None,
    ) -> None:
        self.listeners: list[Listener] = []
        self._watches, self._followers = watches, followers
        self._pack, self._failures, self._recordings, self._keep_tokens = pack, failures, recordings, keep_tokens
        self._reads = reads
        self.events: deque[Event] = deque(maxlen=MAX_KEPT)
        self._changing = threading.Lock()  # events come, and are replaced once a judge has ruled, in several threads
        self._escalations = Escalations(tokenizer, self._follow, self._join, followers)
        self._sinks: list[Sink] = []
        self._deliveries: list[Delivery] = []
        # Generated tokens, why some have no scores that a rule passes over, and these rules.
        self._n_generated, self._unjudged, self._passing = 0, Counter[str](), dict[int, Rule]()
        self.tokens = Counter[str]()  # every token so far, by why it has no scores: "" for those that have
        # In what the host changed within a generation, or a document, of which nothing is kept any more.
        self.changed_within: list[str] = []
        self.n_host_changes = 0  # when one began, the host was another than when the one before did, or at the attach
        self.changed_between: list[str] = []  # in what, the last time
        self.newest_mark: HostMark | None = None
        self._keeping = threading.Lock()  # recordings are added to and cut by every thread that generates

    @property
    def rules(self) -> list[Rule]:
        """Return the rules that hold now."""
        return self._watches.rules

    @property
    def verdicts(self) -> Counter[str]:
        """Return how many verdicts there are, by why there was none of a judge, "" where there was one."""
        return Counter(self._escalations.verdicts)

    @property
    def acts(self) -> bool:
        """Whether rules or sinks wait for generated tokens."""
        return bool(self.rules or self._sinks)

    def sinks(self) -> list[SinkStats]:
        """Return what became of the tokens that each sink was sent."""
        return [delivery.stats() for delivery in self._deliveries]

    def add_sink(self, sink: Sink, max_batches: int) -> Delivery:
        """Send every batch from now on to `sink`, in a thread of its own."""
        if not all(callable(getattr(sink, name, None)) for name in ("open", "write", "close")):
            raise ConfigError(f"a sink has open, write and close, {sink!r} has not: see probemon.monitor.sinks")
        if any(known is sink for known in self._sinks):
            raise ConfigError(f"this {type(sink).__name__} was added before: a sink receives one run, once")
        self._sinks.append(sink)
        delivery = Delivery(sink, [concept["id"] for concept in self._pack.concepts], max_batches=max_batches)
        self._deliveries.append(delivery)
        return delivery

    def check_call(self, prompt: GenerateCall) -> None:
        """Raise `NotSupportedDecoding` for a call of `generate()` in which a rule could not do what it is for."""
        if prompt.n_beams > 1:
            check_beams(self.rules)

    def publish(
        self,
        watch: Watch,
        generation: Generation | None,
        recording: Recording,
        placed: PlacedTokens,
        scores: Scores,
    ) -> None:
        """Record the scores of tokens that were scored by `watch`, ask its rules, call the listeners and send a batch
        to the sinks.
        """
        reads = self._reads(recording, recording.n_entries, len(placed))
        with self._keeping:
            self.tokens.update(scores.coverage.unseen)
            if recording.mark is not None and not recording.n_entries:  # it begins; an engine of its own has no marks
                last, self.newest_mark = self.newest_mark, recording.mark
                if last is not None and recording.mark.differs(last):
                    self.n_host_changes += 1
                    self.changed_between = recording.mark.changes(last)
            recording.add(placed, scores, reads, watch.number)
            if self._keep_tokens is not None:
                forgotten = keep_newest(self._recordings(), self._keep_tokens)
                self.changed_within = self.changed_within or changed_within(forgotten)
        if generation is not None:
            all_seen = scores.coverage.all_seen
            generation.mark_scored(placed, all_seen=all_seen)
            if placed.phase == GENERATED:
                self._n_generated += len(placed)
                passing = () if all_seen else [rule for _, rule in watch.rules if rule.on_blind == PASS]
                if passing:
                    self._unjudged.update(filter(None, scores.coverage.unseen))
                    self._passing.update((id(rule), rule) for rule in passing)
                if watch.rules:
                    self._ask_rules(watch, generation, placed, scores, reads)
                self._escalations.settle(generation)
        self._followers.scored(placed, scores)
        for listener in self.listeners:
            self._failures.call("a listener", listener, placed, scores, reads)
        if self._deliveries:
            batch = TokenBatch(
                recording.number,
                placed.rows,
                placed.columns - recording.offset,
                placed.ids,
                placed.phase,
                placed.provisional,
                scores,
                recording.request,
                watch.deployment or "",
            )
            for delivery in self._deliveries:
                delivery.put(batch)

    def close(self, failed: bool) -> None:
        """Have every verdict, deliver what is queued and close the sinks; an error of theirs becomes a failure, a loss
        a warning. `failed`: the run ends by an error, and waits for no judge.
        """
        self._escalations.close(wait=not failed)
        for delivery in self._deliveries:
            delivery.close()
            stats = delivery.stats()
            if stats.error is not None:
                self._failures.add("a sink", stats.error)
            elif stats.n_dropped:
                n_tokens = stats.n_written + stats.n_dropped
                LOG.warning("a sink was too slow: %d of %d tokens were dropped", stats.n_dropped, n_tokens)

    def warn_of_silence(self, model: object, called: bool, threads: WatchedThreads) -> None:
        """Warn where rules and sinks were quiet for another reason than that nothing was wrong.

        `called`: whether `model` ran in those `threads` that are watched. The warning names the line that called the
        caller.
        """
        if self.acts and not called:
            what, remedy = threads.silence
            warnings.warn(
                f"{counted(len(self.rules), 'rule')} and {counted(len(self._sinks), 'sink')} set, but this"
                f" {type(model).__name__} {what}. {remedy}",
                UserWarning,
                stacklevel=3,
            )
        elif self.acts and threads.n_unwatched:
            warnings.warn(
                f"{counted(len(self.rules), 'rule')} and {counted(len(self._sinks), 'sink')} heard nothing of"
                f" {counted(threads.n_unwatched, 'forward')} of a generate() that began before probemon was attached,"
                " or was looked up before. Attach before anything generates",
                UserWarning,
                stacklevel=3,
            )
        if self._unjudged:
            [(reason, n)] = self._unjudged.most_common(1)
            warnings.warn(
                f"{self._unjudged.total()} of {self._n_generated} generated tokens have no scores, so"
                f" {counted(len(self._passing), 'rule')} could not be asked of them ({reason}: {n})",
                UserWarning,
                stacklevel=3,
            )
        passing = self._escalations.passing.most_common(1)
        if passing:
            n_passing, n_asked = self._escalations.passing.total(), self._escalations.verdicts.total()
            warnings.warn(
                f"{n_passing} of {counted(n_asked, 'question')} to judges had no answer that counts, and their rows"
                f" went on ({passing[0][0]}: {passing[0][1]}): event.verdict has the reasons",
                UserWarning,
                stacklevel=3,
            )

    def _ask_rules(
        self, watch: Watch, generation: Generation, placed: PlacedTokens, scores: Scores, reads: MemoryReads | None
    ) -> None:
        for rule, i, known in watch.panel.ask(placed, scores, generation.states_of_rule):
            if "blind" in known:
                self._act(rule.on_blind, self._event(rule, generation.recording, placed, i, **known), generation)
            else:
                reading = () if reads is None else tuple(reads.of(i))
                event = self._event(rule, generation.recording, placed, i, **known, reading=reading)
                self._act(rule.action, event, generation)

    def _event(self, rule: Rule, recording: Recording, placed: PlacedTokens, i: int, **known: Any) -> Event:
        """Return the event of a rule at a token; `known`: of its scores, or why there are none."""
        concept = self._pack.concepts[rule.probe]
        return Event(
            concept=concept["id"],
            name=concept["name"],
            path=tuple(self._pack.path(rule.probe)),
            row=int(placed.rows[i]),
            column=int(placed.columns[i]),
            token_id=int(placed.ids[i]),
            above=rule.above,
            for_tokens=rule.for_tokens,
            provisional=placed.provisional,
            aggregate=str(rule.aggregator),
            generation=recording.number,
            request=recording.request,
            alert_set=rule.alert_set,
            **{"score": 0.0, **known},
        )

    def _act(self, action: Action, event: Event, generation: Generation) -> None:
        """Do what a rule asks for."""
        if isinstance(action, Escalate):
            event = replace(event, verdict=PENDING)
        with self._changing:
            self.events.append(event)
        self._followers.event(event, named_action(action))
        if isinstance(action, Escalate):
            self._escalations.ask(action, event, generation)
        elif isinstance(action, str):
            self._do(action, event, generation)
        else:
            self._failures.call("an action", action, event)
            if generation.row_stops(event.row):  # it stopped what it saw: a held streamer hides that too
                generation.hide_from(event.column)

    def _do(self, action: str, event: Event, generation: Generation) -> None:
        """Stop a row, or raise, for an event; to record it is nothing more."""
        if action == "stop" and generation.prompt.n_beams > 1:  # the rule came while these beams began
            generation.raise_later(NotSupportedDecoding(NO_STOP_IN_BEAMS), event.column)
        elif action == "stop":
            generation.stop_row(event.row, event.column)
            self._followers.stopped(event)
        elif action == "raise":
            where = f"row {event.row}, column {event.column}"
            said = (
                f"{event.name} ({event.concept}) is not known at {where}: {event.blind}"
                if event.blind
                else f"{event.name} ({event.concept}) was over {event.above} at {event.for_tokens} tokens in a row,"
                f" the last at {where}"
            )
            generation.raise_later(ConceptRaised(said, event), event.column)

    def _follow(self, escalate: Escalate, ruling: str, event: Event, generation: Generation | None) -> None:
        """Do what was ruled of an event, or is done meanwhile; nothing where the generation is complete."""
        if ruling != PASS and generation is not None:
            self._do(ruling, event, generation)
        if escalate.told is not None:
            self._failures.call("who is told of verdicts", escalate.told, event, ruling)

    def _join(self, before: Event, after: Event) -> None:
        """Put an event with its verdict into the place of the one without, in any thread."""
        with self._changing:
            for i in reversed(range(len(self.events))):
                if self.events[i] is before:
                    self.events[i] = after
                    break

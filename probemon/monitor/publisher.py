"""Publisher: passes scores to a run's recordings, rules and followers.

publisher = Publisher(pack, tokenizer, watches, followers, recordings, keep_tokens=None)
publisher.publish(batch, scores)                    # in the generating thread
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from probemon.core.scores import GENERATED, PROMPT, Scores
from probemon.errors import ConceptRaised, UnsupportedDecoding
from probemon.host.changes import ModelMark
from probemon.host.reasoning_marks import ReasoningMarks, marks_of
from probemon.monitor.delivery import Delivery, SinkStats
from probemon.monitor.failures import MAX_KEPT
from probemon.monitor.followers import Batch, Decider, Followers
from probemon.monitor.rule_panel import RulePanel
from probemon.monitor.rule_spec import Rule
from probemon.monitor.rules import (
    NO_STOP_IN_BEAMS,
    PASS,
    PENDING,
    Action,
    AskedAction,
    Event,
    check_beams,
    named_action,
)
from probemon.monitor.watches import Watches
from probemon.packs.group import AnyPack
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generate_call import GenerateCall
from probemon.tracking.generation import Generation
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import keep_newest
from probemon.tracking.watched_threads import WatchedThreads
from probemon.util.counted import counted

LOG = logging.getLogger("probemon")


def changed_within(recordings: Iterable[Recording]) -> list[str]:
    """Return how the model changed within the first recording that it changed in."""
    for recording in recordings:
        if recording.model_changed:
            texts, turn = dict[str, None](), recording
            while turn.earlier is not None and recording.mark is not None:
                turn = turn.earlier
                marks = [mark for mark in (turn.mark, turn.mark_after) if mark is not None]
                texts |= dict.fromkeys(text for mark in marks for text in recording.mark.changes(mark))
            if recording.mark is not None and recording.mark_after is not None:
                texts |= dict.fromkeys(recording.mark_after.changes(recording.mark))
            return list(texts) or ["other adapters were active, or an earlier turn used another model"]
    return []


class _FunctionRules:
    """The rules of one function probe, which is their pack of one concept."""

    def __init__(self, pack: AnyPack, rules: Sequence[Rule]) -> None:
        self.pack, self.rules, self.panel = pack, tuple(rules), RulePanel(list(enumerate(rules)))


class Publisher:
    """Evaluates rules and calls followers."""

    def __init__(
        self,
        pack: AnyPack,
        tokenizer: Any,
        watches: Watches,
        followers: Followers,
        recordings: Callable[[], list[Recording]],
        keep_tokens: int | None,
    ) -> None:
        self.tokenizer, self.followers, self.failures = tokenizer, followers, followers.failures
        self._watches, self._pack, self._recordings, self._keep_tokens = watches, pack, recordings, keep_tokens
        self.events: deque[Event] = deque(maxlen=MAX_KEPT)
        self._changing = threading.Lock()  # events change in several threads
        self._deciders: dict[type, Decider] = {}
        self._function_rules: dict[str, _FunctionRules] = {}
        self._asked = "generated tokens"
        # Tokens under rules; why some have no scores; the rules that ignore these.
        self._n_asked, self._unjudged, self._passing = 0, Counter[str](), dict[int, Rule]()
        self.tokens = Counter[str]()  # by why they have no scores; "": scored
        # Of a recording that is not kept any more.
        self.changed_within: list[str] = []
        self.n_model_changes = 0  # between generations
        self.changed_between: list[str] = []  # at the last one
        self.newest_mark: ModelMark | None = None
        self._keeping = threading.Lock()  # recordings are changed by several threads

    @cached_property
    def _marks(self) -> ReasoningMarks | None:
        return marks_of(self.tokenizer)

    @property
    def rules(self) -> list[Rule]:
        """Return the rules in force, those of function probes last."""
        return [*self._watches.rules, *(rule for one in self._function_rules.values() for rule in one.rules)]

    @property
    def acts(self) -> bool:
        """True if a rule or sink needs generated tokens."""
        return bool(self.rules or self.followers.sinks)

    def sinks(self) -> list[SinkStats]:
        """Return each sink's statistics."""
        return [one.stats() for one in self.followers.sinks if isinstance(one, Delivery)]

    @contextmanager
    def preparing(self, rules: Iterable[Rule]) -> Iterator[None]:
        """Add the rules' deciders as followers; an error in the block removes them again."""
        kinds: dict[type, Decider] = {}
        for action in [action for rule in rules for action in rule.actions if isinstance(action, AskedAction)]:
            if type(action) not in self._deciders:
                kinds[type(action)] = self._deciders[type(action)] = action.decider(self)
                self.followers.add(kinds[type(action)], first=True)
        try:
            yield
        except BaseException:
            for kind in kinds:
                del self._deciders[kind]
            self.followers.remove(list(kinds.values()))
            raise

    def add_function_rules(self, name: str, pack: AnyPack, rules: Sequence[Rule]) -> None:
        """Add rules of the function probe `name`, for tokens from now on; `pack`: it as a pack."""
        earlier = self._function_rules.get(name)
        self._function_rules[name] = _FunctionRules(pack, [*(earlier.rules if earlier else ()), *rules])

    def check_call(self, prompt: GenerateCall) -> None:
        """Raise `UnsupportedDecoding` if a rule cannot work in this call."""
        if prompt.n_beams > 1:
            check_beams(self.rules)

    def publish(self, batch: Batch, scores: Scores) -> None:
        """Record scores, evaluate rules, call followers."""
        watch, generation, recording, placed = batch.watch, batch.generation, batch.recording, batch.placed
        reads = batch.keep_reads(self.followers.reads(batch))
        with self._keeping:
            self.tokens.update(scores.coverage.unseen)
            if recording.mark is not None and not recording.n_entries:  # it begins; external engines have no marks
                last, self.newest_mark = self.newest_mark, recording.mark
                if last is not None and recording.mark.differs(last):
                    self.n_model_changes += 1
                    self.changed_between = recording.mark.changes(last)
            recording.add(placed, scores, reads, watch.number, batch.functions)
            if self._keep_tokens is not None:
                forgotten = keep_newest(self._recordings(), self._keep_tokens)
                self.changed_within = self.changed_within or changed_within(forgotten)
        if generation is not None:
            all_seen = scores.coverage.all_seen
            generation.mark_scored(placed, all_seen=all_seen)
            if placed.phase == GENERATED or watch.panel.asks(placed.phase):
                self._ask(batch, generation, scores, all_seen)
            for name, ruled in self._function_rules.items():
                self._ask_function(batch, generation, name, ruled)
        self.followers.scored(batch, scores)

    def warn_of_silence(self, model: object, called: bool, threads: WatchedThreads) -> None:
        """Warn if rules and sinks were silent because tokens were not watched.

        `called`: `model` ran in watched threads
        """
        if self.acts and not called:
            what, remedy = threads.silence
            warnings.warn(
                f"{counted(len(self.rules), 'rule')} and {counted(len(self.followers.sinks), 'sink')} set, but this"
                f" {type(model).__name__} {what}. {remedy}",
                UserWarning,
                stacklevel=3,
            )
        elif self.acts and threads.n_unwatched:
            warnings.warn(
                f"{counted(len(self.rules), 'rule')} and {counted(len(self.followers.sinks), 'sink')} missed"
                f" {counted(threads.n_unwatched, 'forward')} of a generate() that began before probemon was attached,"
                " or was looked up before. Attach before anything generates",
                UserWarning,
                stacklevel=3,
            )
        if self._unjudged:
            [(reason, n)] = self._unjudged.most_common(1)
            warnings.warn(
                f"{self._unjudged.total()} of {self._n_asked} {self._asked} have no scores, so"
                f" {counted(len(self._passing), 'rule')} could not be asked of them ({reason}: {n})",
                UserWarning,
                stacklevel=3,
            )

    def _ask(self, batch: Batch, generation: Generation, scores: Scores, all_seen: bool) -> None:
        watch, placed, reads = batch.watch, batch.placed, batch.reads
        self._n_asked += len(placed)
        if placed.phase == PROMPT:
            self._asked = "tokens that rules are asked of"
        unseen = Counter(filter(None, scores.coverage.unseen)) if not all_seen else Counter[str]()
        # Tokens from a cache count once.
        if placed.phase == PROMPT and generation.asks_of_prompt() and (n_before := batch.recording.n_before()):
            unseen[batch.recording.before] += n_before
            self._n_asked += n_before
        # Tokens from a cache have no event.
        self._count_unjudged((rule for _, rule in watch.rules), batch, unseen)
        if not watch.rules:
            return
        asked = watch.panel.ask(placed, scores, generation.states_of_rule, self._marks, generation.ids_before)
        for rule, i, fields in asked:
            if "blind" not in fields and reads is not None:
                fields["reading"] = tuple(reads.of(i))
            self._meet(self._pack, rule, batch, generation, i, fields)

    def _ask_function(self, batch: Batch, generation: Generation, name: str, ruled: _FunctionRules) -> None:
        scores = batch.functions.get(name)
        if scores is None or not ruled.panel.asks(batch.placed.phase):
            return
        self._count_unjudged(ruled.rules, batch, Counter(filter(None, scores.unseen)))
        met = ruled.panel.ask(
            batch.placed,
            scores.as_scores(),
            lambda number: generation.states_of_rule(f"{name} {number}"),
            self._marks,
            generation.ids_before,
        )
        for rule, i, fields in met:
            self._meet(ruled.pack, rule, batch, generation, i, fields)

    def _count_unjudged(self, rules: Iterable[Rule], batch: Batch, unseen: Counter[str]) -> None:
        """Count the tokens without scores that rules ignore; seen tokens cost nothing here."""
        if unseen and (passing := [rule for rule in rules if self._passes(rule, batch, unseen)]):
            self._unjudged.update(unseen)
            self._passing.update((id(rule), rule) for rule in passing)

    def _meet(
        self, pack: AnyPack, rule: Rule, batch: Batch, generation: Generation, i: int, fields: dict[str, Any]
    ) -> None:
        event = self._event(pack, rule, generation.recording, batch.placed, i, **fields)
        self._act(rule.on_blind if "blind" in fields else rule.action, event, generation)

    @staticmethod
    def _passes(rule: Rule, batch: Batch, unseen: Counter[str]) -> bool:
        """True if a rule ignores unseen tokens."""
        return rule.asks(batch.placed.phase) and (rule.on_blind == PASS or batch.recording.before in unseen)

    @staticmethod
    def _event(pack: AnyPack, rule: Rule, recording: Recording, placed: PlacedTokens, i: int, **fields: Any) -> Event:
        concept = pack.concepts[rule.probe]
        return Event(
            concept=concept["id"],
            name=concept["name"],
            path=tuple(pack.path(rule.probe)),
            row=int(placed.rows[i]),
            column=int(placed.columns[i]),
            token_id=int(placed.ids[i]),
            provisional=placed.provisional,
            generation=recording.number,
            request=recording.request,
            **rule.event_fields(pack),
            **{"score": 0.0, **fields},
        )

    def _act(self, action: Action, event: Event, generation: Generation) -> None:
        if isinstance(action, AskedAction):
            event = replace(event, verdict=PENDING)
        with self._changing:
            self.events.append(event)
        self.followers.event(event, named_action(action))
        if isinstance(action, AskedAction):
            self.failures.call("a judge", self._deciders[type(action)].ask, action, event, generation)
        elif isinstance(action, str):
            self.do(action, event, generation)
        else:
            self.failures.call("an action", action, event)
            if generation.row_stops(event.row):  # a held streamer hides the token too
                generation.hide_from(event.column)

    def do(self, action: str, event: Event, generation: Generation) -> None:
        """Stop a row or raise, for an event."""
        if action == "stop" and generation.prompt.n_beams > 1:  # the rule was added while these beams ran
            generation.raise_later(UnsupportedDecoding(NO_STOP_IN_BEAMS), event.column)
        elif action == "stop":
            generation.stop_row(event.row, event.column)
            self.followers.stopped(event)
        elif action == "raise":
            generation.raise_later(ConceptRaised(event.in_words(), event), event.column)

    def replace_event(self, before: Event, after: Event) -> None:
        """Replace an event by its copy with a verdict, in any thread."""
        with self._changing:
            for i in reversed(range(len(self.events))):
                if self.events[i] is before:
                    self.events[i] = after
                    break

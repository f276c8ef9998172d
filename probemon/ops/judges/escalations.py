"""The questions of one run to its judges, and what follows."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.scores import Scores
from probemon.monitor.check import FAILED, OK, WARNING, Check
from probemon.monitor.followers import Batch, Decider
from probemon.monitor.rules import Event, Verdict
from probemon.ops.judges.escalation import HOLD, PASS, RAISE, STOP, Escalate, Question
from probemon.ops.judges.judge_desk import ABANDONED, ERROR, LATE, NOT_ASKED, Asked
from probemon.tracking.align import NO_ID
from probemon.tracking.generation import Generation
from probemon.tracking.recording import Recording
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.monitor.publisher import Publisher
    from probemon.monitor.run import MonitorRun

_TELL_SECONDS = 1.0  # wait for followers to receive verdicts


class _Open:
    """A question. `event`: with its verdict once there is one; `followed`: the ruling was applied."""

    def __init__(
        self, escalate: Escalate, event: Event, ids: tuple[int, ...], n_missing: int, run: Escalations
    ) -> None:
        self.escalate, self.event, self._ids, self._n_missing, self._run = escalate, event, ids, n_missing, run
        self.followed = escalate.meanwhile == STOP
        self.asked = Asked(
            self._ask,
            within=escalate.within,
            on_failure=escalate.on_failure,
            join=self._join,
            tell=lambda: run.publisher.followers.verdict(self.event),
        )

    @property
    def is_over(self) -> bool:
        """True if its verdict was delivered."""
        return self.asked.told.is_set() and (self.followed or self.escalate.told is None)

    def _ask(self) -> Any:
        tokenizer = self._run.publisher.tokenizer
        known = [token for token in self._ids if token != NO_ID]
        text, plain_text = (
            "" if tokenizer is None else tokenizer.decode(known, skip_special_tokens=plain) for plain in (False, True)
        )
        within, n_missing = self.escalate.within, self._n_missing
        return self.escalate.judge(Question(self.event, self._ids, text, within, n_missing, plain_text))

    def _join(self, verdict: Verdict) -> None:
        before, self.event = self.event, replace(self.event, verdict=verdict)
        self._run.join(before, self.event)


@dataclass
class _OfGeneration:
    """`in_vain`: seconds of holding without a verdict, by id of the action."""

    open: list[_Open] = field(default_factory=list)
    in_vain: dict[int, float] = field(default_factory=dict)


class Escalations(Decider):
    """Asks the judges of one run. A failing judge holds a generation for `within` seconds in all.

    - `verdicts`: counts by failure, "" for answers
    - `passing`: failures that changed nothing
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self._lock = threading.Lock()  # guards the fields below
        self._own: weakref.WeakKeyDictionary[Generation, _OfGeneration] = weakref.WeakKeyDictionary()
        self._asked: list[_Open] = []
        self.verdicts, self.passing = Counter[str](), Counter[str]()

    def ask(self, escalate: Escalate, event: Event, generation: Generation) -> None:
        """Ask an action's judge about an event."""
        ids, n_missing = last_ids(generation.recording, event.row, event.column, escalate.last_tokens)
        question = _Open(escalate, event, ids, n_missing, self)
        asked = question.asked
        with self._lock:
            state = self._own.setdefault(generation, _OfGeneration())
            self._asked = [one for one in self._asked if not one.is_over] + [question]
        state.open.append(question)
        if escalate.meanwhile == STOP:
            self._follow(escalate, STOP, event, generation)
        if escalate.meanwhile == HOLD and state.in_vain.get(id(escalate), 0.0) >= escalate.within:
            asked.fail(NOT_ASKED, f"this generation was held for {escalate.within:g} seconds without a verdict before")
        elif not escalate.desk.put(asked):
            asked.fail(NOT_ASKED, f"{escalate.max_waiting} questions wait, as many as may")

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Wait for verdicts that hold this generation, and apply all that came."""
        generation = batch.generation
        state = None if generation is None else self._own.get(generation)
        if state is None or not state.open:
            return
        self._hold(state)
        still_open = []
        for question in state.open:
            asked, escalate = question.asked, question.escalate
            if time.monotonic() >= asked.deadline:
                asked.fail(LATE, f"no answer within {escalate.within:g} seconds")
            if asked.verdict is None:
                still_open.append(question)
            elif not question.followed:
                question.followed = True
                self._follow(escalate, asked.verdict.ruling, question.event, generation)
        state.open = still_open

    def join(self, before: Event, after: Event) -> None:
        """Replace the event `before` by `after`, which has a verdict. Any thread."""
        self.publisher.replace_event(before, after)
        verdict = after.verdict
        assert verdict is not None
        with self._lock:
            self.verdicts[verdict.failure] += 1
            if verdict.failure and verdict.failure != ABANDONED and verdict.ruling == PASS:
                self.passing[verdict.failure] += 1

    def finish(self, failed: bool) -> None:
        """Give every question a verdict; wait for them, unless the run `failed`."""
        wait = not failed
        with self._lock:
            every, self._asked = self._asked, []
        for asked in [question.asked for question in every]:
            if wait:
                asked.wait(asked.deadline)
            asked.fail(LATE, f"no answer within {asked.within:g} seconds" if wait else "the run has ended before")
        until = time.monotonic() + _TELL_SECONDS
        for question in every:
            question.asked.told.wait(max(0.0, until - time.monotonic()))
            verdict = question.event.verdict
            if not wait or question.followed or verdict is None:
                continue
            # The answer was complete: only report.
            question.followed = True
            self._follow(question.escalate, PASS, question.event, None)
            if verdict.failure and verdict.ruling == RAISE:
                self.passing[verdict.failure] += 1

    def closed(self, run: MonitorRun) -> None:
        """Warn if rows went on without a ruling."""
        if self.passing:
            [(failure, n)] = self.passing.most_common(1)
            warnings.warn(
                f"{self.passing.total()} of {counted(self.verdicts.total(), 'question')} to judges had no answer that"
                f" counts, and their rows went on ({failure}: {n}): event.verdict has the reasons",
                UserWarning,
                stacklevel=4,  # the end of the block
            )

    def check(self) -> Check:
        """Return a health check of unanswered questions."""
        verdicts = Counter(self.verdicts)
        failures = verdicts - Counter({"": verdicts[""]})
        if not failures:
            answered = f"{counted(verdicts[''], 'question')} had an answer" if verdicts else "none was asked"
            return Check("judges", OK, answered)
        reasons = ", ".join(f"{failure}: {n:,}" for failure, n in failures.most_common())
        return Check(
            "judges",
            FAILED if failures[ERROR] else WARNING,
            f"{failures.total():,} of {counted(verdicts.total(), 'question')} had no answer that counts ({reasons})",
            "on_failure decided instead of a judge; event.verdict has the reasons.",
        )

    def _follow(self, escalate: Escalate, ruling: str, event: Event, generation: Generation | None) -> None:
        """Apply and report a ruling; without a generation (it is complete) only report."""
        if ruling != PASS and generation is not None:
            self.publisher.do(ruling, event, generation)
        if escalate.told is not None:
            self.publisher.failures.call("a listener of verdicts", escalate.told, event, ruling)

    def _hold(self, state: _OfGeneration) -> None:
        begin, before = time.monotonic(), dict(state.in_vain)
        holding = [question for question in state.open if question.escalate.meanwhile == HOLD]
        for question in holding:
            asked, within = question.asked, question.escalate.within
            left = within - before.get(id(question.escalate), 0.0)
            if not asked.wait(min(asked.deadline, begin + left), question.escalate.abandoned):
                asked.fail(LATE, f"no answer while the generation was held, {within:g} seconds in all")
        waited = time.monotonic() - begin
        if holding:
            self.publisher.followers.held(waited)
        for question in holding:
            escalate, verdict = question.escalate, question.asked.verdict
            if verdict is not None and verdict.failure:
                used = escalate.within if verdict.failure == LATE else before.get(id(escalate), 0.0) + waited
                state.in_vain[id(escalate)] = max(used, state.in_vain.get(id(escalate), 0.0))


def last_ids(recording: Recording, row: int, column: int, n: int) -> tuple[tuple[int, ...], int]:
    """Return the last `n` ids of a sequence up to a column, also from earlier turns and caches, and how many before
    them are unknown.
    """
    ids: list[int] = []
    end = column + 1
    # Another thread may forget tokens: read a turn before the place that they move to.
    for turn in recording.turns():
        if len(ids) >= n:
            break
        end, at = min(end, turn.end), row if turn.origin is None else int(turn.origin[row])
        newest = [(placed.rows, placed.columns, placed.ids) for placed in list(turn.recording.placed)]
        for rows, columns, piece_ids in reversed([*turn.recording.forgotten_ids.pieces(), *newest]):
            matches = np.flatnonzero((rows == at) & (columns < end))
            ids = [*piece_ids[matches].tolist(), *ids]
            end = int(columns[matches].min(initial=end))
            if len(ids) >= n:
                break
    n_missing = 0
    if len(ids) < n and end > recording.offset:
        before = recording.ids_before(row, end)
        n_missing = 0 if before is not None else min(n - len(ids), end - recording.offset)
        ids = [*([] if before is None else before.tolist()), *ids]
    return tuple(ids[-n:]), n_missing

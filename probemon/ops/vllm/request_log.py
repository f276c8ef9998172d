"""The messages about one request, and its final tokens.

The newest scores of a column count. Columns after the output (of drafts, of a step ahead, after an abort) are dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.scores import GENERATED, PROMPT, Scores
from probemon.errors import AlignmentError
from probemon.monitor.rules import Event
from probemon.ops.vllm.messages import Ended, RequestHead, RequestScores, StepTokens
from probemon.tracking.recording import GAP, LAST, RecordedTokens

LOST = "a message with its scores was dropped: the client did not read in time (high_water_mark)"
LATE = "its scores had not come when they were asked for: they are under way, or a message was dropped"
END_SECONDS = 0.25  # wait for the ends of requests, which say how much was run
_MOST_EVENTS = 10_000
_PIECES = 256  # then joined: small arrays have overhead


def is_cut_short(finish_reason: str | None, stop_reason: int | str | None) -> bool:
    """True if an answer was ended from outside the engine: by an abort, or at a stop string."""
    return finish_reason in ("abort", "error") or isinstance(stop_reason, str)


def is_same(one: Event, other: Event) -> bool:
    """True for the same event, apart from its verdict."""
    return replace(one, verdict=None) == replace(other, verdict=None)


@dataclass(frozen=True)
class _Piece:
    columns: Ints
    ids: Ints
    watches: Ints
    scores: Scores

    def take(self, which: Ints) -> _Piece:
        return _Piece(self.columns[which], self.ids[which], self.watches[which], self.scores.take(which))


class RequestLog:
    """`request`: vLLM's id. `n_columns`: told of without a hole. `n_ahead`: tokens that may be run past its end."""

    def __init__(self, head: RequestHead, n_probes: int, n_ahead: int = 0) -> None:
        self.request, self.number = head.request, head.number
        self.n_prompt, self.n_cached = head.n_prompt, head.n_cached
        self.n_columns = 0
        self.n_ahead = n_ahead
        self.ended: Ended | None = None
        self.under_way = True
        self.deployments: dict[int, str | None] = {}
        self.stop_column: int | None = None
        self.stop_event: Event | None = None
        self.events: list[tuple[Event, str]] = []  # with the action; the first 10,000
        self.n_events = 0
        self.n_lost = 0
        self._n_lost_before: int | None = None
        self._blind_column: int | None = None  # first generated token without scores
        self._n_probes, self._pieces = n_probes, list[_Piece]()
        self._ids = array("q")  # by column, -1 if missing

    @classmethod
    def of(cls, kept: RequestScores, n_probes: int) -> RequestLog:
        """Return the log of another process."""
        log = cls(kept.tokens.requests[0], n_probes, kept.n_ahead)
        if len(kept.tokens.columns):
            log.add(kept.tokens, np.arange(len(kept.tokens.columns)))
        if kept.ended is not None:
            log.end(kept.ended)
        return log

    def is_whole(self, n_run: int, *, with_end: bool) -> bool:
        """True if nothing more comes of an answer with `n_run` tokens run. `with_end`: only its end counts."""
        return not self.under_way or (self.n_columns >= n_run and not with_end)

    @property
    def n_tokens(self) -> int:
        """Number of entries."""
        return sum(len(piece.columns) for piece in self._pieces)

    @property
    def n_showable(self) -> int:
        """Number of columns that may be shown: up to a stop, or a token without scores."""
        ends = [self.n_columns, self.stop_column, self._blind_column]
        return min(end for end in ends if end is not None)

    def add(self, message: StepTokens, which: Ints, n_lost: int = 0, n_lost_before: int = 0) -> None:
        """Add entries of a step, in the order of columns. `n_lost`: messages so far; `n_lost_before`: before this
        one.
        """
        piece = _Piece(message.columns, message.ids, message.watches.astype(np.int64), message.scores).take(which)
        self._pieces.append(piece)
        if len(self._pieces) == _PIECES:
            self._pieces = [self._joined(self._pieces)]
        self.deployments.update(message.deployments)
        for i in np.flatnonzero((piece.columns >= self.n_prompt) & ~piece.scores.coverage.seen).tolist()[:1]:
            self._blind_column = min(int(piece.columns[i]), self._blind_column or self.n_prompt + (1 << 40))
        begin, end = int(piece.columns[0]), int(piece.columns[-1]) + 1
        if self._n_lost_before is None:  # a missing beginning was lost
            self._n_lost_before = n_lost if begin == 0 else 0
            self.n_lost = n_lost_before
        if n_lost > self.n_lost:  # an event of these tokens may be lost
            self._blind_column = min(max(begin, self.n_prompt), self._blind_column or self.n_prompt + (1 << 40))
        self.n_lost = n_lost
        self._ids.extend([-1] * (end - len(self._ids)))
        for column, token_id in zip(piece.columns.tolist(), piece.ids.tolist(), strict=True):
            self._ids[column] = token_id
        if begin <= self.n_columns and end - begin == len(piece.columns):
            self.n_columns = max(self.n_columns, end)

    def meet(self, event: Event, action: str, *, ends: bool) -> None:
        """Take an event, or its verdict. `ends`: it ends the sequence; the first such event counts."""
        if ends and self.stop_event is None:
            self.stop_event, self.stop_column = event, event.column
        for i, (one, _) in enumerate(self.events if event.verdict is not None else ()):
            if is_same(one, event):
                self.events[i] = event, action
                return
        self.n_events += 1
        if len(self.events) < _MOST_EVENTS:
            self.events.append((event, action))

    def end(self, message: Ended | None, n_lost: int = 0) -> None:
        """End it; without a message if its engine is gone."""
        self.ended, self.under_way, self.n_lost = message, False, n_lost
        if message is not None and message.stop_column >= 0 and self.stop_column is None:
            self.stop_column = message.stop_column  # the event was dropped

    def lost(self, n_lost: int) -> bool:
        """True if messages, perhaps its own, were dropped while it ran."""
        return (n_lost if self.under_way else self.n_lost) > (self._n_lost_before or 0)

    def first_difference(self, ids: Sequence[int], since: int = 0) -> int | None:
        """Return the first column from `since` on that was run with another token than in `ids`."""
        for column, (token_id, run_id) in enumerate(zip(ids[since:], self._ids[since : len(ids)], strict=False), since):
            if run_id not in (-1, token_id):
                return column
        return None

    def tokens(self, ids: Ints, n_prompt: int, *, lost: bool, cut_short: bool = False) -> RecordedTokens:
        """Return every token of `ids [L]`, prompt and output.

        - `lost`: messages were dropped while it ran
        - `cut_short`: ended from outside, so the engine may have run more

        Raises `AlignmentError` if the engine ran other tokens, or more.
        """
        if n_prompt != self.n_prompt:
            raise AlignmentError(
                f"request {self.request!r} was run with a prompt of {self.n_prompt} tokens, this one has {n_prompt}"
            )
        length = len(ids)
        at = self.first_difference(ids.tolist())
        if at is not None:
            raise AlignmentError(
                f"request {self.request!r}, position {at}: the output has token {ids[at]}, the engine ran"
                f" {self._ids[at]}: this is not its output, or it was edited, or is not all of it"
                " (RequestOutputKind.DELTA)"
            )
        n_run = length - (length > n_prompt)
        n_ended = 0 if self.ended is None else self.ended.n_columns
        if n_ended > n_run + self.n_ahead and (not cut_short or length == n_prompt):
            raise AlignmentError(
                f"request {self.request!r}: the engine ran {n_ended} tokens, the output has {n_run} that can have been"
                " run: give the whole of it. Ask for RequestOutputKind.FINAL_ONLY or CUMULATIVE; of DELTA, join the"
                " token_ids of all its pieces"
            )
        piece = self._newest(n_run)
        entry = np.full(length, -1, dtype=np.int64)
        entry[piece.columns] = np.arange(len(piece.columns))
        reasons = {}
        for at in np.flatnonzero(entry < 0).tolist():
            if at == length - 1 and at >= n_prompt:
                reasons[at] = LAST
            else:
                reasons[at] = LOST if lost else LATE if self.under_way else GAP
        return self._recorded(ids, n_prompt, piece.scores.take(entry, reasons))

    def ran(self, *, lost: bool) -> RecordedTokens:
        """Return every token that the engine is known to have run, without the output: also of an aborted answer."""
        piece, n = self._newest(None), len(self._ids)
        entry = np.full(n, -1, dtype=np.int64)
        entry[piece.columns] = np.arange(len(piece.columns))
        reason = LOST if lost else LATE if self.under_way else GAP
        reasons = dict.fromkeys(np.flatnonzero(entry < 0).tolist(), reason)
        return self._recorded(np.array(self._ids, dtype=np.int64), self.n_prompt, piece.scores.take(entry, reasons))

    def watched_from(self) -> list[tuple[int, int]]:
        """Return (first column, number) of each watch."""
        piece, spans = self._newest(None), list[tuple[int, int]]()
        for at, number in zip(piece.columns.tolist(), piece.watches.tolist(), strict=True):
            if not spans or spans[-1][1] != number:
                spans.append((at, number))
        return spans

    def since(self, column: int) -> tuple[Ints, Ints, Scores]:
        """Return columns, ids and scores from `column` on, in the order of columns: what is new while it runs."""
        pieces = list(self._pieces)  # another thread adds
        first = len(pieces)
        while first and int(pieces[first - 1].columns[-1]) >= column:
            first -= 1
        piece = self._joined(pieces[first:])
        last = {at: i for i, at in enumerate(piece.columns.tolist()) if at >= column}
        piece = piece.take(np.array([last[at] for at in sorted(last)], dtype=np.int64))
        return piece.columns, piece.ids, piece.scores

    def seen_scores(self) -> tuple[Ints, Ints, Scores]:
        """Return columns, ids and scores so far, in the order of columns."""
        piece = self._newest(None)
        return piece.columns, piece.ids, piece.scores

    def as_message(self, n_lost: int = 0) -> RequestScores:
        """Return all of it. `n_lost`: messages so far."""
        return RequestScores(0, self._all_tokens(), self.ended, self.lost(n_lost), self.n_ahead)

    # -- inside ----------------------------------------------------------------------------------

    @staticmethod
    def _recorded(ids: Ints, n_prompt: int, scores: Scores) -> RecordedTokens:
        positions = np.arange(len(ids))
        phases = np.where(positions < n_prompt, PROMPT, GENERATED)
        return RecordedTokens(np.zeros(len(ids), dtype=np.int64), positions, ids, phases, scores)

    def _all_tokens(self) -> StepTokens:
        piece = self._newest(None)
        n = len(piece.columns)
        return StepTokens(
            sequence=0,
            step=0,
            began_seconds=0.0,
            seconds=0.0,
            requests=(RequestHead(self.request, self.number, self.n_prompt, self.n_cached),),
            of_request=np.zeros(n, dtype=np.int32),
            columns=piece.columns,
            ids=piece.ids,
            phases=(piece.columns >= self.n_prompt).astype(np.int8),
            watches=piece.watches.astype(np.int32),
            deployments={number: name or "" for number, name in self.deployments.items()},
            scores=piece.scores,
        )

    def _joined(self, pieces: Sequence[_Piece]) -> _Piece:
        none: Ints = np.zeros(0, dtype=np.int64)
        columns, ids, watches = (
            np.concatenate([none, *(getattr(piece, name) for piece in pieces)])
            for name in ("columns", "ids", "watches")
        )
        top_k = pieces[0].scores.report_top_k if pieces else 10
        return _Piece(columns, ids, watches, Scores.join([piece.scores for piece in pieces], self._n_probes, top_k))

    def _newest(self, before: int | None) -> _Piece:
        """Return the newest entry of each column, in order."""
        piece = self._joined(self._pieces)
        last = {column: i for i, column in enumerate(piece.columns.tolist()) if before is None or column < before}
        return piece.take(np.array([last[column] for column in sorted(last)], dtype=np.int64))

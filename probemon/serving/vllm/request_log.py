"""RequestLog: what came from the worker of one request, and the tokens that it makes of its final ids.

log = RequestLog(head, n_probes)                    # head: RequestHead of its first message
log.add(message, which)                             # which entries of a StepTokens are its own
tokens = log.tokens(ids, n_prompt, lost=False)      # every token of prompt and output, seen or not

A column may come more than once: run again after a preemption, or a draft that was rejected. The last one counts. What
comes of columns after the last token that the host ran is of drafts, and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.scores import GENERATED, PROMPT, Scores
from probemon.errors import AlignmentError
from probemon.serving.vllm.messages import Ended, RequestHead, StepTokens
from probemon.serving.vllm.rows import CACHED
from probemon.tracking.recording import GAP, LAST, Tokens

LOST = "a message with its scores was dropped: the client did not read in time (high_water_mark)"
_PIECES = 256  # are joined once there are so many: small arrays weigh more than what is in them


@dataclass(frozen=True)
class _Piece:
    columns: Ints
    ids: Ints
    watches: Ints
    scores: Scores

    def take(self, which: Ints) -> _Piece:
        return _Piece(self.columns[which], self.ids[which], self.watches[which], self.scores.take(which))


class RequestLog:
    """`request`: vLLM's own id. `n_columns`: columns before it were seen or came from the cache, with none missing."""

    def __init__(self, head: RequestHead, n_probes: int) -> None:
        self.request, self.number = head.request, head.number
        self.n_prompt, self.first_column = head.n_prompt, head.first_column
        self.n_columns = head.first_column
        self.ended: Ended | None = None
        self.deployments: dict[int, str | None] = {}
        self.stop_column: int | None = None  # at which a rule stopped it
        self._blind_column: int | None = None  # of the first generated token that could not be scored
        self._n_probes, self._pieces = n_probes, list[_Piece]()

    @property
    def n_tokens(self) -> int:
        """Return how many entries are kept."""
        return sum(len(piece.columns) for piece in self._pieces)

    @property
    def n_showable(self) -> int:
        """Return how many columns may be shown to whoever waits for their scores: none from where a rule stopped on."""
        ends = [self.n_columns, self.stop_column, self._blind_column]
        return min(end for end in ends if end is not None)

    def add(self, message: StepTokens, which: Ints) -> None:
        """Add entries of a step, in the order of their columns."""
        piece = _Piece(message.columns, message.ids, message.watches.astype(np.int64), message.scores).take(which)
        self._pieces.append(piece)
        if len(self._pieces) == _PIECES:
            self._pieces = [self._joined()]
        self.deployments.update(message.deployments)
        for i in np.flatnonzero((piece.columns >= self.n_prompt) & ~piece.scores.coverage.seen).tolist()[:1]:
            self._blind_column = min(int(piece.columns[i]), self._blind_column or self.n_prompt + (1 << 40))
        begin, end = int(piece.columns[0]), int(piece.columns[-1]) + 1
        if begin <= self.n_columns and end - begin == len(piece.columns):
            self.n_columns = max(self.n_columns, end)

    def tokens(self, ids: Ints, n_prompt: int, *, lost: bool) -> Tokens:
        """Return every token of `ids [L]`, prompt and output. `lost`: messages were dropped while it ran.

        Raises `AlignmentError` where another token was run than stands in `ids`.
        """
        length, piece = len(ids), self._newest(len(ids) if len(ids) == n_prompt else len(ids) - 1)
        if n_prompt != self.n_prompt:
            raise AlignmentError(
                f"request {self.request!r} was run with a prompt of {self.n_prompt} tokens, this one has {n_prompt}"
            )
        wrong = np.flatnonzero(ids[piece.columns] != piece.ids)
        if len(wrong):
            at = int(piece.columns[wrong[0]])
            raise AlignmentError(
                f"request {self.request!r}, position {at}: the output has token {ids[at]}, the engine ran"
                f" {piece.ids[wrong[0]]}: this is not its output, or it was edited"
            )
        entry = np.full(length, -1, dtype=np.int64)
        entry[piece.columns] = np.arange(len(piece.columns))
        reasons = {}
        for at in np.flatnonzero(entry < 0).tolist():
            if at < self.first_column:
                reasons[at] = CACHED
            elif at == length - 1 and at >= n_prompt:
                reasons[at] = LAST
            else:
                reasons[at] = LOST if lost else GAP
        positions = np.arange(length)
        return Tokens(
            np.zeros(length, dtype=np.int64),
            positions,
            ids,
            np.where(positions < n_prompt, PROMPT, GENERATED),
            piece.scores.take(entry, reasons),
        )

    def watched_from(self) -> list[tuple[int, int]]:
        """Return from which column which state of what is watched held."""
        piece, held = self._newest(None), list[tuple[int, int]]()
        for at, number in zip(piece.columns.tolist(), piece.watches.tolist(), strict=True):
            if not held or held[-1][1] != number:
                held.append((at, number))
        return held

    def seen_scores(self) -> tuple[Ints, Ints, Scores]:
        """Return columns, ids and scores of the tokens that have come, in the order of their columns."""
        piece = self._newest(None)
        return piece.columns, piece.ids, piece.scores

    def as_message(self) -> StepTokens:
        """Return all that has come of it, as one message of its worker's."""
        piece = self._newest(None)
        n = len(piece.columns)
        return StepTokens(
            sequence=0,
            step=0,
            began_seconds=0.0,
            seconds=0.0,
            requests=(RequestHead(self.request, self.number, self.n_prompt, self.first_column),),
            of_request=np.zeros(n, dtype=np.int32),
            columns=piece.columns,
            ids=piece.ids,
            phases=(piece.columns >= self.n_prompt).astype(np.int8),
            watches=piece.watches.astype(np.int32),
            deployments={number: name or "" for number, name in self.deployments.items()},
            scores=piece.scores,
        )

    # -- inside ----------------------------------------------------------------------------------

    def _joined(self) -> _Piece:
        none: Ints = np.zeros(0, dtype=np.int64)
        columns, ids, watches = (
            np.concatenate([none, *(getattr(piece, name) for piece in self._pieces)])
            for name in ("columns", "ids", "watches")
        )
        top_k = self._pieces[0].scores.report_top_k if self._pieces else 10
        return _Piece(
            columns, ids, watches, Scores.join([piece.scores for piece in self._pieces], self._n_probes, top_k)
        )

    def _newest(self, before: int | None) -> _Piece:
        """Return what came last of each column before one, in the order of the columns."""
        piece = self._joined()
        last = {column: i for i, column in enumerate(piece.columns.tolist()) if before is None or column < before}
        return piece.take(np.array([last[column] for column in sorted(last)], dtype=np.int64))

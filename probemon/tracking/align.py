"""Assigns hidden states to rows and tokens.

    columns = SequenceColumns(prompt_columns=12)
    placed = columns.place(DecoderForward(start=0, ids=ids, mask=mask))     # the new tokens
    placed.rows, placed.columns, placed.offsets, placed.phase
    columns.ended(done)

A column is a position of the padded sequence. Only new columns are placed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.scores import GENERATED, PROMPT
from probemon.errors import AlignmentError

NEVER = np.iinfo(np.int64).max
NO_ID = -1  # of embeddings


@dataclass(frozen=True)
class DecoderForward:
    """ids [B, T] after `start` cached columns; mask [B, >= start + T] or None; `starts [B, T]` if rows are packed."""

    start: int
    ids: Ints
    mask: Ints | None
    starts: Mask | None = None


@dataclass(frozen=True)
class PlacedTokens:
    """Real tokens of one phase: `ids[i]` at (`rows[i]`, `columns[i]`), offset `offsets[i]` in the forward.

    - `draft`: may be rejected
    - `provisional`: of beams, whose rows are not the output's
    - `begins [n]`: first token of a packed sequence, or None
    """

    rows: Ints
    columns: Ints
    offsets: Ints
    ids: Ints
    phase: int
    draft: bool = False
    provisional: bool = False
    begins: Mask | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: Ints) -> PlacedTokens:
        """Return the entries `which`."""
        return dataclasses.replace(
            self,
            rows=self.rows[which],
            columns=self.columns[which],
            offsets=self.offsets[which],
            ids=self.ids[which],
            begins=None if self.begins is None else self.begins[which],
        )

    def moved(self, by: int) -> PlacedTokens:
        """Return the tokens with moved offsets."""
        return dataclasses.replace(self, offsets=self.offsets + by)


@dataclass
class SequenceColumns:
    """Columns of a `generate`, or of a document (`prompt_columns=None`).

    - `speculative`: one row, with drafts
    - `frontier`: end of the columns seen, from `first_column` on
    - `mask`: the newest forward's
    - `last_column [B]`: `NEVER` until a row ends
    """

    prompt_columns: int | None
    speculative: bool = False
    frontier: int = 0
    first_column: int = -1
    n_rows: int = 0
    mask: Ints | None = None
    last_column: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _n_sampled: int = 0

    def ended(self, done: Collection[bool]) -> None:
        """Mark rows that end with the sampled token; all rows or none."""
        column = (self.prompt_columns or 0) + self._n_sampled
        self._n_sampled += 1
        if self.speculative or not any(done):  # several may have been accepted
            return
        self.last_column[np.array(list(done)) & (self.last_column == NEVER)] = column

    def take_back(self, column: int) -> None:
        """Take back rejected drafts from `column` on."""
        self.frontier = min(self.frontier, column)

    def begin(self, column: int, n_rows: int) -> None:
        """Begin at `column`, once."""
        if self.first_column < 0:
            self.first_column = self.frontier = column
            self.n_rows, self.last_column = n_rows, np.full(n_rows, NEVER)

    def missed(self, ids: Ints, ids_begin: int, column: int, mask: Ints | None) -> list[PlacedTokens]:
        """Return unseen tokens before `column`, and continue there; ids `[B, L]` begin at `ids_begin`."""
        self.begin(0, len(ids))
        first, placed = self.frontier, []
        prompt = column if self.prompt_columns is None else self.prompt_columns
        self.frontier, self._n_sampled = column, max(self._n_sampled, column - prompt)
        for phase, begin, end in ((PROMPT, first, min(column, prompt)), (GENERATED, max(first, prompt), column)):
            if begin >= end:
                continue
            real = np.arange(begin, end) <= self.last_column[:, None]
            if mask is not None and mask.shape[0] == len(ids) and mask.shape[1] >= end:
                real &= mask[:, begin:end] != 0
                self.mask = mask
            rows, at = np.nonzero(real)
            at_ids = at + begin - ids_begin
            placed.append(
                PlacedTokens(rows, at + begin, at, np.where(at_ids < 0, NO_ID, ids[rows, np.maximum(at_ids, 0)]), phase)
            )
        return placed

    def place(self, forward: DecoderForward) -> list[PlacedTokens]:
        """Return a forward's new tokens, prompt first. Raises `AlignmentError`."""
        n_rows, width = forward.ids.shape
        self.begin(forward.start, n_rows)
        if n_rows != self.n_rows:
            raise AlignmentError(
                f"a forward has {n_rows} rows, this generation began with {self.n_rows}: rows cannot be matched"
            )
        end = forward.start + width
        if forward.start > self.frontier or end <= self.frontier:
            raise AlignmentError(
                f"a forward covers columns {forward.start}..{end - 1}, expected one that goes on at {self.frontier}"
            )
        if forward.mask is not None and (
            forward.mask.ndim != 2 or forward.mask.shape[0] != n_rows or forward.mask.shape[1] < end
        ):
            raise AlignmentError(
                f"attention mask of shape {forward.mask.shape} for {n_rows} rows that end at column {end}: padding"
                " cannot be identified"
            )
        self._check_run_again(forward)
        limit = end if self.prompt_columns is None else max(self.frontier, min(end, self.prompt_columns))
        placed = []
        for phase, first, stop in ((PROMPT, self.frontier, limit), (GENERATED, limit, end)):
            if first == stop:
                continue
            if phase == GENERATED and not self.speculative:
                placed.append(self._generated(forward, first, stop))
                continue
            real = (
                np.ones((n_rows, stop - first), dtype=bool)
                if forward.mask is None
                else forward.mask[:, first:stop] != 0
            )
            if phase == GENERATED:
                rows, at = np.zeros(stop - first, dtype=np.int64), np.arange(stop - first)
                offsets = at + (first - forward.start)
                placed.append(PlacedTokens(rows, at + first, offsets, forward.ids[0, offsets], phase, draft=True))
                continue
            rows, at = np.nonzero(real)
            offsets = at + (first - forward.start)
            begins = None if forward.starts is None else forward.starts[rows, offsets]
            placed.append(PlacedTokens(rows, at + first, offsets, forward.ids[rows, offsets], phase, begins=begins))
        self.frontier = end
        self.mask = forward.mask
        return placed

    def _generated(self, forward: DecoderForward, column: int, stop: int) -> PlacedTokens:
        """Tokens of one generated column; runs at every step."""
        if stop - column > 1:
            raise AlignmentError(
                f"{stop - column} generated columns in one forward: this decoding mode is not understood"
            )
        if self._n_sampled <= column - (self.prompt_columns or 0):
            raise AlignmentError(
                f"column {column} was forwarded before the stopping criteria saw it: rows that ended are unknown"
            )
        at = column - forward.start
        if self.n_rows == 1:
            n = int(self.last_column[0] >= column and (forward.mask is None or forward.mask[0, column] != 0))
            rows, columns, offsets = (np.array([number][:n], np.int64) for number in (0, column, at))
            return PlacedTokens(rows, columns, offsets, forward.ids[0, at : at + n].copy(), GENERATED)
        real = self.last_column >= column
        if forward.mask is not None:
            real &= forward.mask[:, column] != 0
        rows = np.flatnonzero(real)
        return PlacedTokens(rows, np.full(len(rows), column), np.full(len(rows), at), forward.ids[rows, at], GENERATED)

    def _check_run_again(self, forward: DecoderForward) -> None:
        """Raise if columns run again under another mask, with other hidden states."""
        seen = slice(max(self.first_column, 0), self.frontier)
        if forward.start >= self.frontier or seen.start >= seen.stop:
            return
        before, now = (
            np.ones((self.n_rows, 1), dtype=bool) if mask is None else mask[:, seen] != 0
            for mask in (self.mask, forward.mask)
        )
        if not (before == now).all():
            raise AlignmentError(
                f"columns {forward.start}..{self.frontier - 1} are run again, and the attention mask hides other"
                f" columns before {self.frontier} than when they were first run: which of their states are the tokens'"
                " is unknown. Give the same mask each time, or start again"
            )

"""Which row and token each hidden state belongs to.

    columns = SequenceColumns(prompt_columns=12)
    placed = columns.place(Forward(start=0, ids=ids, mask=mask))     # the new tokens of this forward
    placed.rows, placed.columns, placed.offsets, placed.phase
    columns.ended(done)  # what the stopping criteria said of the token just sampled

A column is a position of the padded sequence: cache length before the forward plus offset in it. Only
columns not seen before are placed (without a cache every forward repeats the old ones).
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
NO_ID = -1  # of a token that was given as an embedding


@dataclass(frozen=True)
class DecoderForward:
    """A forward of the host: ids [B, T] after `start` cached columns; mask [B, >= start + T], None for no padding.

    `starts [B, T]`: where a sequence begins of those packed in a row; None where each row is one.
    """

    start: int
    ids: Ints
    mask: Ints | None
    starts: Mask | None = None


@dataclass(frozen=True)
class PlacedTokens:
    """Real tokens of a forward and phase: entry i is `ids[i]` at (`rows[i]`, `columns[i]`), offset `offsets[i]` in it.

    `draft`: they were proposed and may be rejected yet. `provisional`: of beams, of which few will be returned, and
    none by its row here. `begins [n]`: the token is the first of its sequence, where several are packed in a row, so
    that the column before it is no neighbour; None where each row is one sequence.
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
        """Return the same tokens, their states `by` places further in the forward."""
        return dataclasses.replace(self, offsets=self.offsets + by)


@dataclass
class SequenceColumns:
    """One `generate` (or one document of plain forwards: `prompt_columns=None`, all prompt).

    `speculative`: a forward may hold several generated columns, drafts until they are accepted (one row).
    `frontier`: columns seen so far, from `first_column` on; `mask`: the newest forward's, None for no padding;
    `last_column [B]`: where a row that ended early has its last token, `NEVER` before that.
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
        """Mark rows whose token just sampled is their last, of all B or of none: what follows in them is padding."""
        column = (self.prompt_columns or 0) + self._n_sampled
        self._n_sampled += 1
        if self.speculative or not any(done):  # of drafts, several tokens may have been accepted at once
            return
        self.last_column[np.array(list(done)) & (self.last_column == NEVER)] = column

    def take_back(self, column: int) -> None:
        """Columns from `column` on were drafts that were rejected, and may be shown again."""
        self.frontier = min(self.frontier, column)

    def begin(self, column: int, n_rows: int) -> None:
        """Begin at `column`, in `n_rows` rows, unless it was said before where to begin."""
        if self.first_column < 0:
            self.first_column = self.frontier = column
            self.n_rows, self.last_column = n_rows, np.full(n_rows, NEVER)

    def missed(self, ids: Ints, ids_begin: int, column: int, mask: Ints | None) -> list[PlacedTokens]:
        """Return the tokens before `column` that were run without being shown here, and go on after them.

        The ids `[B, L]` begin at column `ids_begin`.
        """
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
        """Return the tokens of this forward that no earlier one had, prompt before generated.

        Raises `AlignmentError` where they would be a guess.
        """
        n_rows, width = forward.ids.shape
        self.begin(forward.start, n_rows)
        if n_rows != self.n_rows:
            raise AlignmentError(
                f"a forward has {n_rows} rows, this generation began with {self.n_rows}: rows cannot be told apart"
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
                " cannot be told apart"
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
        """Return the tokens of a generated column, of the rows that have not ended: a step, so in few operations."""
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
        """Raise where columns that were seen are run again under another mask: by now they have other states."""
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
                " is unknown. Give the same mask each time, or begin anew"
            )

"""Which row and token each hidden state belongs to.

    call = Call(prompt_columns=12, eos=frozenset({2}), pad=0)
    placed = call.place(Forward(start=0, ids=ids, mask=mask))     # the new tokens of this forward
    placed.rows, placed.columns, placed.offsets, placed.phase

A column is a position of the padded sequence: cache length before the forward plus offset in it. Only
columns not seen before are placed (without a cache every forward repeats the old ones).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from probemon.errors import AlignmentError
from probemon.types import GENERATED, PROMPT

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Forward:
    """One forward of the host: ids [B, T]; `start` columns are in the cache; mask [B, >= start + T] or None (no padding)."""

    start: int
    ids: Ints
    mask: Ints | None


@dataclass(frozen=True)
class Placed:
    """Real tokens of one forward and phase: entry i is `ids[i]` at (`rows[i]`, `columns[i]`), offset `offsets[i]` in it."""

    rows: Ints
    columns: Ints
    offsets: Ints
    ids: Ints
    phase: int

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Call:
    """One `generate` (or one plain forward, all prompt). `frontier`: columns seen so far; `done [B]`: rows past their end."""

    prompt_columns: int | None
    eos: frozenset[int] = frozenset()
    frontier: int = 0
    first_column: int = -1
    n_rows: int = 0
    done: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    def place(self, forward: Forward) -> list[Placed]:
        """The tokens of this forward that no earlier one had, prompt before generated. Raises `AlignmentError`."""
        n_rows, width = forward.ids.shape
        if self.first_column < 0:
            self.first_column = self.frontier = forward.start
            self.n_rows, self.done = n_rows, np.zeros(n_rows, dtype=bool)
        if n_rows != self.n_rows:
            raise AlignmentError(f"a forward has {n_rows} rows, this generation began with {self.n_rows}: rows cannot be told apart")
        end = forward.start + width
        if forward.start > self.frontier or end <= self.frontier:
            raise AlignmentError(
                f"a forward covers columns {forward.start}..{end - 1}, expected one that goes on at {self.frontier}"
            )
        columns = np.arange(self.frontier, end)
        limit = end if self.prompt_columns is None else self.prompt_columns
        found = []
        for phase, part in ((PROMPT, columns[columns < limit]), (GENERATED, columns[columns >= limit])):
            if len(part) and phase == GENERATED and len(part) > 1:
                raise AlignmentError(f"{len(part)} generated columns in one forward: this decoding mode is not understood")
            if not len(part):
                continue
            real = np.ones((n_rows, len(part)), dtype=bool)
            if forward.mask is not None:
                if forward.mask.shape[1] < end:
                    raise AlignmentError(f"attention mask of {forward.mask.shape[1]} columns for a forward that ends at {end}")
                real = forward.mask[:, part] != 0
            ids = forward.ids[:, part - forward.start]
            if phase == GENERATED:
                real = real & ~self.done[:, None]
                self.done = self.done | (real[:, 0] & np.isin(ids[:, 0], list(self.eos)))
            rows, at = np.nonzero(real)
            found.append(Placed(rows, part[at], part[at] - forward.start, ids[rows, at], phase))
        self.frontier = end
        return found

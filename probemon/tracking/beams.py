"""Beams: follows beams while they are copied, reordered and dropped.

    beams = Beams(n_beams=4, begin=12)                  # generation begins at output column 12
    origin = beams.advance(ids, first_entry=24)         # before each forward
    beams.ended(ids, done)
    entries, n = beams.follow(b, generated_ids)         # of a returned sequence

A hypothesis is identified by its ids, without `beam_indices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.core.scores import PROMPT
from probemon.errors import AlignmentError
from probemon.tracking.align import PlacedTokens

Key = tuple[int, bytes]


@dataclass
class Beams:
    """`running`: entry and row of each hypothesis. `children`: entries by parent and token."""

    n_beams: int
    begin: int
    running: dict[Key, tuple[int, int]] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    finished: set[Key] = field(default_factory=set)

    def advance(self, ids: Ints, first_entry: int) -> Ints:
        """Return the parent rows of `ids [B * n_beams, L]`, whose last column runs next as entries `first_entry + i`.

        Raises `AlignmentError` without a parent.
        """
        new: dict[Key, tuple[int, int]] = {}
        origin = np.zeros(len(ids), dtype=np.int64)
        for row, line in enumerate(ids):
            b = row // self.n_beams
            generated = np.ascontiguousarray(line[self.begin :])
            if len(generated) == 1:
                parent, origin[row] = root(b), b * self.n_beams
            else:
                running_parent = self.running.get((b, generated[:-1].tobytes()))
                if running_parent is None:
                    raise AlignmentError(f"beam {row} continues a sequence that no beam had: its history is unknown")
                parent, origin[row] = running_parent
            new[b, generated.tobytes()] = (first_entry + row, row)
            self.children[parent, int(generated[-1])] = first_entry + row
        self.running = new
        return origin

    def ended(self, ids: Ints, done: npt.NDArray[np.bool_], n_prompts: int) -> None:
        """Mark candidates `[B * k, L]` that met a stopping criterion."""
        each = len(ids) // n_prompts
        for i in np.flatnonzero(done).tolist():
            self.finished.add((i // each, np.ascontiguousarray(ids[i, self.begin :]).tobytes()))

    def follow(self, b: int, generated: Ints) -> tuple[list[int], int]:
        """Return a returned sequence's entries, and its length without padding."""
        generated = np.ascontiguousarray(generated)
        n = next(
            (i for i in range(1, len(generated) + 1) if (b, generated[:i].tobytes()) in self.finished), len(generated)
        )
        entries, entry = [], root(b)
        for token in generated[:n].tolist():
            if (entry, token) not in self.children:
                break
            entry = self.children[entry, token]
            entries.append(entry)
        return entries, n

    def paths(
        self, sequences: Ints, n_rows: int, batches: Sequence[PlacedTokens], entries: Sequence[Ints]
    ) -> Iterator[tuple[Ints, bool]]:
        """Yield each returned sequence's indices into the joined batches, and whether they are complete.

        `n_rows` ran per forward; `entries`: by batch. Prompts are the first beam's.
        """
        rows = np.concatenate([batch.rows for batch in batches])
        prompt = np.concatenate([np.full(len(batch), batch.phase == PROMPT) for batch in batches])
        index_of = {entry: i for i, entry in enumerate(np.concatenate(entries).tolist())}
        n_returned = len(sequences) // (n_rows // self.n_beams)
        for number, sequence in enumerate(sequences):
            b = number // n_returned
            followed, _ = self.follow(b, sequence[self.begin :])
            generated = [index_of[entry] for entry in followed if entry in index_of]  # others were unseen
            begun = np.flatnonzero(prompt & (rows == b * self.n_beams))
            yield np.concatenate([begun, generated]).astype(np.int64), len(generated) == len(followed)


def root(b: int) -> int:
    """The entry of prompt `b`."""
    return -1 - b

"""Beams: which token each hidden state belongs to while beams are copied, reordered and dropped.

    beams = Beams(n_beams=4, begin=12)                  # generated tokens begin at column 12 of the output
    origin = beams.advance(ids, first_entry=24)         # before each forward: rows [B * n_beams] it comes from
    beams.ended(ids, done)                              # what the stopping criteria said of the candidates
    entries, n = beams.follow(b, generated_ids)         # afterwards: the entries of one returned sequence
    beams.paths(sequences, n_rows, batches, entries)    # where all returned sequences stand in what was kept

A hypothesis is known by its tokens: whatever row it was computed in, a sequence of ids has one history. That needs
no `beam_indices`, and holds without a cache too.
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
    """`running`: entry and row of each hypothesis of the newest forward. `children`: entries by parent and token."""

    n_beams: int
    begin: int
    running: dict[Key, tuple[int, int]] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    finished: set[Key] = field(default_factory=set)

    def advance(self, ids: Ints, first_entry: int) -> Ints:
        """Return the row that each one's parent ran in, for `ids [B * n_beams, L]` whose last column is about to run.

        Row i's new token becomes entry `first_entry + i`. Raises `AlignmentError` for a hypothesis without a parent.
        """
        new: dict[Key, tuple[int, int]] = {}
        origin = np.zeros(len(ids), dtype=np.int64)
        for row, line in enumerate(ids):
            b = row // self.n_beams
            generated = np.ascontiguousarray(line[self.begin :])
            if len(generated) == 1:
                parent, origin[row] = root(b), b * self.n_beams
            else:
                known = self.running.get((b, generated[:-1].tobytes()))
                if known is None:
                    raise AlignmentError(f"beam {row} continues a sequence that no beam had: its history is unknown")
                parent, origin[row] = known
            new[b, generated.tobytes()] = (first_entry + row, row)
            self.children[parent, int(generated[-1])] = first_entry + row
        self.running = new
        return origin

    def ended(self, ids: Ints, done: npt.NDArray[np.bool_], n_prompts: int) -> None:
        """Mark candidates `[B * k, L]` that met a stopping criterion: what follows them in the output is padding."""
        each = len(ids) // n_prompts
        for i in np.flatnonzero(done).tolist():
            self.finished.add((i // each, np.ascontiguousarray(ids[i, self.begin :]).tobytes()))

    def follow(self, b: int, generated: Ints) -> tuple[list[int], int]:
        """Return the entries of a returned sequence's tokens that ran, and how many of its tokens are no padding."""
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
        """Yield of each returned sequence where its tokens stand in the batches that ran, in order, and whether all do.

        `n_rows` ran in every forward; `entries`: those of each batch's tokens. Of a prompt, the first beam's are taken.
        """
        rows = np.concatenate([batch.rows for batch in batches])
        prompt = np.concatenate([np.full(len(batch), batch.phase == PROMPT) for batch in batches])
        index_of = {entry: i for i, entry in enumerate(np.concatenate(entries).tolist())}
        n_returned = len(sequences) // (n_rows // self.n_beams)
        for number, sequence in enumerate(sequences):
            b = number // n_returned
            followed, _ = self.follow(b, sequence[self.begin :])
            generated = [index_of[entry] for entry in followed if entry in index_of]  # one that is missing was unseen
            begun = np.flatnonzero(prompt & (rows == b * self.n_beams))
            yield np.concatenate([begun, generated]).astype(np.int64), len(generated) == len(followed)


def root(b: int) -> int:
    """The entry that stands for prompt `b`."""
    return -1 - b

"""What memories read at tokens: which slot, and the token that it was written at.

    reads.of(3)                                     # of the fourth token: a Reading of each memory
    reads.of(3, k=2)                                # of each memory its two most read
    reads.take(entries)                             # of some tokens; -1 for one of which nothing is known
    MemoryReads.join([reads, more])                 # batch after batch

Shapes: N tokens, S memories, k slots of each, most read first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NULL, UNKNOWN = -1, -2  # instead of the number of a slot: the null slot; nothing is known of the token


@dataclass(frozen=True)
class Reading:
    """What a memory read at a token: `weight` of all that it read is of one slot.

    - `site`, `layer`: which memory.
    - `slot`: its number; None for the null slot, which is read where nothing is asked.
    - `position`: where the token stands that the slot was written at, counted as the one that reads is: a column of
      the output in results, of the padded sequence in events. None for the null slot and an empty one, and where it
      stands before the first column (it came in an earlier turn).
    - `token_id`, `token`: that token, its text where a tokenizer is known; -1 and "" for no token.
    """

    site: str
    layer: int
    slot: int | None
    weight: float
    position: int | None
    token_id: int
    token: str = ""


@dataclass(frozen=True)
class MemoryReads:
    """What S memories read at N tokens.

    `slot`, `column`, `token_id` `[N, S, k]` int64, `weight [N, S, k]` fp32: see `Reading`; `column` is -1 for no token,
    or one that stands before the first column.
    """

    sites: tuple[str, ...]
    layers: tuple[int, ...]
    slot: Ints
    column: Ints
    token_id: Ints
    weight: npt.NDArray[np.float32]

    @classmethod
    def unknown(cls, sites: tuple[str, ...], layers: tuple[int, ...], n: int, k: int) -> MemoryReads:
        """Return those of `n` tokens of which nothing is known."""
        whole = np.full((n, len(sites), k), UNKNOWN, dtype=np.int64)
        none = np.full_like(whole, -1)
        return cls(sites, layers, whole, none, none.copy(), np.zeros(whole.shape, dtype=np.float32))

    def __len__(self) -> int:
        return len(self.slot)

    def take(self, entries: Ints, begin: int = 0) -> MemoryReads:
        """Return those of the tokens of these numbers, of -1 nothing, with columns counted from `begin`."""
        known = entries >= 0
        at = np.where(known, entries, 0)
        if not len(self):
            return self.unknown(self.sites, self.layers, len(entries), self.slot.shape[2])
        slot = np.where(known[:, None, None], self.slot[at], UNKNOWN)
        column = np.maximum(self.column[at] - begin, -1)
        return replace(self, slot=slot, column=column, token_id=self.token_id[at], weight=self.weight[at])

    @staticmethod
    def join(parts: Sequence[MemoryReads]) -> MemoryReads:
        """Return those of several batches of the same memories, one after another."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("slot", "column", "token_id", "weight")
        }
        return replace(parts[0], **arrays)

    def of(self, i: int, k: int = 1) -> list[Reading]:
        """Return the `k` most read slots of each memory at token `i`, memory by memory; none where nothing is known."""
        readings = []
        for number, (site, layer) in enumerate(zip(self.sites, self.layers, strict=True)):
            columns = (array[i, number, :k].tolist() for array in (self.slot, self.weight, self.column, self.token_id))
            for slot, weight, column, token_id in zip(*columns, strict=True):
                if slot != UNKNOWN:
                    where = None if column < 0 else column
                    readings.append(Reading(site, layer, None if slot == NULL else slot, weight, where, token_id))
        return readings


def with_texts(readings: Sequence[Reading], tokenizer: Any) -> list[Reading]:
    """Return what was read with the texts of its tokens."""
    if tokenizer is None:
        return list(readings)
    return [r if r.token_id < 0 else replace(r, token=tokenizer.decode([r.token_id])) for r in readings]

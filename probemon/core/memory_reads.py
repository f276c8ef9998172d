"""Memory reads at tokens: which slot, and the token it was written at.

N tokens, S memories, k slots each, most read first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NULL, UNKNOWN = -1, -2  # in place of a slot's number


@dataclass(frozen=True)
class Reading:
    """One slot that a memory read at a token, with its `weight` in the read.

    - `site`, `layer`: the memory.
    - `slot`: number, None for the null slot.
    - `position`: of the token the slot was written at: a column of the output in results, of the padded sequence in
      events; None for none, or before the first column.
    - `token_id`, `token`: that token, with text if a tokenizer is known; -1 and "" for none.
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
    """Reads of S memories at N tokens.

    `slot`, `column` (-1 for none), `token_id` `[N, S, k]` int64, `weight [N, S, k]` fp32: see `Reading`.
    """

    sites: tuple[str, ...]
    layers: tuple[int, ...]
    slot: Ints
    column: Ints
    token_id: Ints
    weight: npt.NDArray[np.float32]

    @classmethod
    def unknown(cls, sites: tuple[str, ...], layers: tuple[int, ...], n: int, k: int) -> MemoryReads:
        """Return unknown reads of `n` tokens."""
        slots = np.full((n, len(sites), k), UNKNOWN, dtype=np.int64)
        none = np.full_like(slots, -1)
        return cls(sites, layers, slots, none, none.copy(), np.zeros(slots.shape, dtype=np.float32))

    def __len__(self) -> int:
        return len(self.slot)

    def take(self, entries: Ints, begin: int = 0) -> MemoryReads:
        """Return the reads of these tokens (-1: unknown), with columns counted from `begin`."""
        is_token = entries >= 0
        at = np.where(is_token, entries, 0)
        if not len(self):
            return self.unknown(self.sites, self.layers, len(entries), self.slot.shape[2])
        slot = np.where(is_token[:, None, None], self.slot[at], UNKNOWN)
        column = np.maximum(self.column[at] - begin, -1)
        return replace(self, slot=slot, column=column, token_id=self.token_id[at], weight=self.weight[at])

    @staticmethod
    def join(parts: Sequence[MemoryReads]) -> MemoryReads:
        """Concatenate batches of the same memories."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("slot", "column", "token_id", "weight")
        }
        return replace(parts[0], **arrays)

    def of(self, i: int, k: int = 1) -> list[Reading]:
        """Return `k` readings of each memory at token `i`; none if unknown."""
        readings = []
        for number, (site, layer) in enumerate(zip(self.sites, self.layers, strict=True)):
            columns = (array[i, number, :k].tolist() for array in (self.slot, self.weight, self.column, self.token_id))
            for slot, weight, column, token_id in zip(*columns, strict=True):
                if slot != UNKNOWN:
                    position = None if column < 0 else column
                    readings.append(Reading(site, layer, None if slot == NULL else slot, weight, position, token_id))
        return readings


def with_texts(readings: Sequence[Reading], tokenizer: Any) -> list[Reading]:
    """Return the readings with token texts."""
    if tokenizer is None:
        return list(readings)
    return [r if r.token_id < 0 else replace(r, token=tokenizer.decode([r.token_id])) for r in readings]

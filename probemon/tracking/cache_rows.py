"""Which row of an earlier cache each row of a cache goes on from, by what the two hold, bit for bit.

    held = CacheRows.of(cache)                     # after a forward: references, nothing is copied
    CacheRows.of(cache).rows_of(held, 12)          # [B]: row i's first 12 columns are those of that row of `held`

Between two turns rows of a cache may be moved, repeated or dropped, and a cache may be copied, while ids and masks stay
the same (of two pictures with one question, of adapters by row). Only the cache shows it. The deepest layer's keys and
values are compared: they are computed from everything that its row read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.host.internals import (
    cache_layers,
    cross_attention_cache,
    decoder_cache,
    keeps_every_column,
    keys_and_values,
    tensors_of,
    write_marks,
)


@dataclass(frozen=True, eq=False)
class CacheRows:
    """What tells the rows of a cache apart, as it was at one time.

    - `tensors`: keys and values `[B, H, columns, D]` of the deepest layer, from column `first` on; in an
      encoder-decoder also those of what its deepest layer reads of the encoder; where recurrent layers lie deeper, the
      states `[B, ...]` of the deepest.
    - `places`: where each of them comes from, so that only the same ones are compared.
    - `writes`: how often each had been written in place. Torch counts no writes in inference mode.
    """

    tensors: tuple[Tensor, ...]
    places: tuple[str, ...]
    first: int
    writes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cache: Any) -> CacheRows | None:
        """Return what tells the rows of `cache` apart now; None if it does not show its keys and values."""
        own = _deepest(decoder_cache(cache))
        if own is None:
            return None
        name, layer, tensors = own
        first = 0
        if not keeps_every_column(layer):  # of a sliding window the newest columns are left
            first = max(0, int(layer.get_seq_length()) - tensors[0].shape[2])
        places = [f"{name}.keys", f"{name}.values"]
        if (encoded := _deepest(cross_attention_cache(cache))) is not None:
            places += [f"encoder.{encoded[0]}.keys", f"encoder.{encoded[0]}.values"]
            tensors = (*tensors, *encoded[2])
        last = cache_layers(decoder_cache(cache))[-1]
        if keys_and_values(last) is None:
            recurrent = [one for one in tensors_of(last) if one.dim() > 2 and len(one) == len(tensors[0])]
            places += [f"recurrent.{i}" for i in range(len(recurrent))]
            tensors = (*tensors, *recurrent)
        return cls(tensors, tuple(places), first, tuple(write_marks(tensors)))

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self.tensors[0].shape[0])

    def rows_of(self, other: CacheRows, n_columns: int, *, same_length: bool = True) -> Ints | None:
        """Return the row of `other` that each row `[B]` equals in the first `n_columns`; None if some row equals none.

        `same_length`: both hold just these columns; recurrent states are of all of them, and are not compared else.
        Columns that one of the two does not hold are left out, and there must be one that both hold. A row that equals
        several is the one with its own number, else the first.
        """
        if self.places != other.places or tuple(write_marks(other.tensors)) != other.writes:
            return None
        if self.n_rows == other.n_rows and all(map(_is_same_memory, self.tensors, other.tensors)):
            return np.arange(self.n_rows)
        first = max(self.first, other.first)
        pairs = []
        for place, ours, theirs in zip(self.places, self.tensors, other.tensors, strict=True):
            if place.startswith("recurrent.") and not same_length:
                continue
            if not place.startswith(("encoder.", "recurrent.")):
                end = min(n_columns, self.first + ours.shape[2], other.first + theirs.shape[2])
                ours, theirs = (
                    tensor[:, :, first - begin : end - begin]
                    for tensor, begin in ((ours, self.first), (theirs, other.first))
                )
            if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype or not ours.shape[2]:
                return None
            pairs.append((ours, theirs.to(ours.device)))
        return _equal_rows(pairs)


def _equal_rows(pairs: list[tuple[Tensor, Tensor]]) -> Ints | None:
    """Return for each row of the first tensors the row of the second ones that equals it in all pairs."""
    n_ours, n_theirs = len(pairs[0][0]), len(pairs[0][1])
    # The newest column is almost always enough to tell rows apart, so all of two rows is compared seldom.
    alike = np.ones((n_ours, n_theirs), dtype=bool)
    for ours, theirs in pairs:
        newest = ours[:, None, :, -1] == theirs[None, :, :, -1]
        alike &= newest.flatten(2).all(dim=2).cpu().numpy()
    rows = np.zeros(n_ours, dtype=np.int64)
    for row in range(n_ours):
        candidates = sorted(np.flatnonzero(alike[row]).tolist(), key=lambda other: (other != row, other))
        equal = (other for other in candidates if all(torch.equal(ours[row], theirs[other]) for ours, theirs in pairs))
        rows[row] = next(equal, -1)
        if rows[row] < 0:
            return None
    return rows


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin in one place and have the same strides: one may be a crop of the other."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype


def _deepest(cache: Any) -> tuple[str, Any, tuple[Tensor, ...]] | None:
    """Number, layer, and its keys and values, of the last layer that keeps every column, else of the last at all."""
    found = None
    for number, layer in reversed(list(enumerate(cache_layers(cache)))):
        kept = keys_and_values(layer)
        if kept is None:
            continue
        if keeps_every_column(layer):
            return str(number), layer, kept
        found = found or (str(number), layer, kept)
    return found

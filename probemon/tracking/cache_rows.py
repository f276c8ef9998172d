"""Which row of an earlier cache each row of a cache goes on from, by what the two hold, bit for bit.

    held = CacheRows.of(cache)                     # after a forward: references, nothing is copied
    CacheRows.of(cache).rows_of(held, 12, alike)   # [B]: row i's first 12 columns are those of that row of `held`

Between two turns rows of a cache may be moved, repeated or dropped, and a cache may be copied, while ids and masks stay
the same (of two pictures with one question, of adapters by row). Only the cache shows it. The deepest keys and values
are compared: they are computed from what their row read, and in windows from the newest of it. Rows that are equal
there and have other scores (of adapters in the last layer alone) cannot be told apart once they were moved, and are not
known. A recurrent state shows nothing to compare: it has to be untouched (`CacheState`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
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
class _Part:
    """A tensor of a cache, with the place that it has there.

    - `first`: the first column that keys and values `[B, H, columns, D]` hold; None for a tensor `[B, ...]` that is
      compared whole.
    - `of_length`: whether it changes with every column, as recurrent states do.
    """

    place: str
    tensor: Tensor
    first: int | None = None
    of_length: bool = False


@dataclass(frozen=True, eq=False)
class CacheRows:
    """What tells the rows of a cache apart, as it was at one time.

    - `parts`: keys and values of the deepest layer that keeps every column; where windows or recurrent layers lie
      deeper, also those of the deepest; in an encoder-decoder also what its deepest layer reads of the encoder.
    - `writes`: how often each had been written in place. Torch counts no writes in inference mode.
    """

    parts: tuple[_Part, ...]
    writes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cache: Any) -> CacheRows | None:
        """Return what tells the rows of `cache` apart now; None if it does not show its keys and values."""
        layers = cache_layers(decoder_cache(cache))
        parts = [part for at in _telling(layers) for part in _parts(layers[at], str(at))]
        if not parts:
            return None
        encoded = cache_layers(cross_attention_cache(cache))
        if encoded and (kept := keys_and_values(encoded[-1])) is not None:
            parts += [_Part(f"encoder {i}", tensor) for i, tensor in enumerate(kept)]
        n_rows = len(parts[0].tensor)
        if layers and keys_and_values(layers[-1]) is None:
            recurrent = [one for one in tensors_of(layers[-1]) if one.dim() > 2 and len(one) == n_rows]
            parts += [_Part(f"recurrent {i}", tensor, of_length=True) for i, tensor in enumerate(recurrent)]
        return cls(tuple(parts), tuple(write_marks([part.tensor for part in parts])))

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.parts[0].tensor)

    def is_in_place(self, other: CacheRows) -> bool:
        """Whether this is the memory of `other`, row by row: all of it, or a crop."""
        same_parts = len(self.parts) == len(other.parts) and self.n_rows == other.n_rows
        return same_parts and all(map(_is_same_memory, self.parts, other.parts))

    def rows_of(
        self, other: CacheRows, n_columns: int, alike: Callable[[int, int], bool], *, same_length: bool = True
    ) -> Ints | None:
        """Return the row of `other` that each row `[B]` equals in the first `n_columns`; None if that is not known.

        - `alike`: whether what was scored of two rows of `other` is the same. A row that equals several is the one with
          its own number, else the first, and it is not known which if they are not alike.
        - `same_length`: both hold just these columns; recurrent states are of all of them, and are compared only then.

        Columns that one of the two does not hold are left out.
        """
        places, theirs = ([part.place for part in one.parts] for one in (self, other))
        if places != theirs or tuple(write_marks([part.tensor for part in other.parts])) != other.writes:
            return None
        if self.is_in_place(other):
            return np.arange(self.n_rows)
        pairs = list[tuple[Tensor, Tensor]]()
        for mine, its in zip(self.parts, other.parts, strict=True):
            if mine.of_length and not same_length:
                continue
            one, two = mine.tensor, its.tensor
            if mine.first is not None and its.first is not None:
                first = max(mine.first, its.first)
                end = min(n_columns, mine.first + one.shape[2], its.first + two.shape[2])
                if end <= first and pairs:  # two windows that hold no column in common say nothing
                    continue
                one = one[:, :, first - mine.first : max(first, end) - mine.first]
                two = two[:, :, first - its.first : max(first, end) - its.first]
            if one.shape[1:] != two.shape[1:] or one.dtype != two.dtype or not one.shape[2]:
                return None
            pairs.append((one, two.to(one.device)))
        return _equal_rows(pairs, alike)


@dataclass(frozen=True, eq=False)
class CacheState:
    """All tensors of a cache that shows no keys and values (of recurrent layers, of quantised ones), and how often each
    had been written in place: nothing of it can be compared later, but that it is untouched.
    """

    tensors: tuple[Tensor, ...]
    writes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cache: Any) -> CacheState:
        """Return what a cache holds now, by reference."""
        tensors = tuple(tensor for layer in cache_layers(decoder_cache(cache)) for tensor in tensors_of(layer))
        return cls(tensors, tuple(write_marks(tensors)))

    @property
    def counts_writes(self) -> bool:
        """Whether torch counts writes to all of its tensors: it does not in inference mode."""
        return bool(self.tensors) and not any(tensor.is_inference() for tensor in self.tensors)

    def is_untouched(self, cache: Any) -> bool:
        """Whether a cache holds these tensors still, and none was written since, as far as torch counts."""
        now = CacheState.of(cache)
        same = len(now.tensors) == len(self.tensors) and all(map(operator.is_, now.tensors, self.tensors))
        return same and now.writes == self.writes


def _telling(layers: Sequence[Any]) -> list[int]:
    """Return the numbers of the layers whose keys and values tell rows apart: the last that keeps every column, and the
    last at all where that is deeper.
    """
    deepest = list[int]()
    for at in reversed(range(len(layers))):  # asked at every forward: it ends at the first that keeps every column
        if keys_and_values(layers[at]) is None:
            continue
        if keeps_every_column(layers[at]):
            return [at, *deepest]
        deepest = deepest or [at]
    return deepest


def _parts(layer: Any, name: str) -> list[_Part]:
    kept = keys_and_values(layer)
    if kept is None:
        return []
    keys, values = kept
    first = 0
    if not keeps_every_column(layer):  # of a sliding window the newest columns are left
        first = max(0, int(layer.get_seq_length()) - keys.shape[2])
    return [_Part(f"{name} keys", keys, first), _Part(f"{name} values", values, first)]


def _equal_rows(pairs: list[tuple[Tensor, Tensor]], alike: Callable[[int, int], bool]) -> Ints | None:
    """Return for each row of the first tensors the row of the second ones that equals it in all pairs."""
    # The newest column is almost always enough to tell rows apart, so all of two rows is compared seldom.
    newest = np.ones((len(pairs[0][0]), len(pairs[0][1])), dtype=bool)
    for ours, theirs in pairs:
        newest &= (ours[:, None, :, -1] == theirs[None, :, :, -1]).flatten(2).all(dim=2).cpu().numpy()
    rows = np.zeros(len(newest), dtype=np.int64)
    for row, candidates in enumerate(newest):
        equal = [
            other
            for other in np.flatnonzero(candidates).tolist()
            if all(torch.equal(ours[row], theirs[other]) for ours, theirs in pairs)
        ]
        if not equal:
            return None
        rows[row] = row if row in equal else equal[0]
        if not all(alike(int(rows[row]), other) for other in equal if other != rows[row]):
            return None
    return rows


def _is_same_memory(one: _Part, other: _Part) -> bool:
    """Whether two tensors begin in one place and have the same strides: one may be a crop of the other."""
    a, b = one.tensor, other.tensor
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype

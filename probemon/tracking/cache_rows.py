"""Matches the rows of a cache to an earlier one, bit for bit.

    held = CacheRows.of(cache)                     # references only
    CacheRows.of(cache).rows_of(held, 12, alike)   # [B]: the row of `held` with the same 12 columns

Users may move, repeat, drop or copy rows between turns without a trace in ids and masks. The deepest keys and values
depend on all that a row read. Equal rows with different scores are ambiguous. Recurrent states must be untouched.
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
    """A tensor of a cache.

    - `first`: first column of keys and values `[B, H, columns, D]`; None to compare `[B, ...]` whole
    - `of_length`: changes with every column
    """

    place: str
    tensor: Tensor
    first: int | None = None
    of_length: bool = False


@dataclass(frozen=True, eq=False)
class CacheRows:
    """The tensors that distinguish rows, at one time.

    - `parts`: of the deepest complete layer, deeper windows or recurrent states, and the encoder
    - `writes`: in-place writes; not counted in inference mode
    """

    parts: tuple[_Part, ...]
    writes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cache: Any) -> CacheRows | None:
        """Return the current tensors; None without accessible keys and values."""
        layers = cache_layers(decoder_cache(cache))
        parts = [part for at in _telling(layers) for part in _parts(layers[at], str(at))]
        if not parts:
            return None
        encoded = cache_layers(cross_attention_cache(cache))
        if encoded and (encoded_tensors := keys_and_values(encoded[-1])) is not None:
            parts += [_Part(f"encoder {i}", tensor) for i, tensor in enumerate(encoded_tensors)]
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
        """True for the memory of `other`, or a crop of it."""
        same_parts = len(self.parts) == len(other.parts) and self.n_rows == other.n_rows
        return same_parts and all(map(_is_same_memory, self.parts, other.parts))

    def rows_of(
        self, other: CacheRows, n_columns: int, alike: Callable[[int, int], bool], *, same_length: bool = True
    ) -> Ints | None:
        """Return the row of `other` that each row `[B]` equals in the first `n_columns`; None if unknown.

        - `alike`: True if two rows of `other` have the same scores, as equal rows must
        - `same_length`: both hold exactly these columns; needed for recurrent states

        Columns missing in either are ignored.
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
                if end <= first and pairs:  # disjoint windows
                    continue
                one = one[:, :, first - mine.first : max(first, end) - mine.first]
                two = two[:, :, first - its.first : max(first, end) - its.first]
            if one.shape[1:] != two.shape[1:] or one.dtype != two.dtype or not one.shape[2]:
                return None
            pairs.append((one, two.to(one.device)))
        return _equal_rows(pairs, alike)


@dataclass(frozen=True, eq=False)
class CacheState:
    """All tensors of a cache without accessible keys and values (of recurrent or quantised layers), and their write
    counts. They show only whether the cache is untouched: its content cannot be compared later.
    """

    tensors: tuple[Tensor, ...]
    writes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cache: Any) -> CacheState:
        """Return the current tensors, by reference."""
        tensors = tuple(tensor for layer in cache_layers(decoder_cache(cache)) for tensor in tensors_of(layer))
        return cls(tensors, tuple(write_marks(tensors)))

    @property
    def counts_writes(self) -> bool:
        """True if torch counts all writes; not in inference mode."""
        return bool(self.tensors) and not any(tensor.is_inference() for tensor in self.tensors)

    def is_untouched(self, cache: Any) -> bool:
        """True if no write was counted and no tensor replaced."""
        now = CacheState.of(cache)
        same = len(now.tensors) == len(self.tensors) and all(map(operator.is_, now.tensors, self.tensors))
        return same and now.writes == self.writes


def _telling(layers: Sequence[Any]) -> list[int]:
    """The last complete layer, and a deeper last one."""
    deepest = list[int]()
    for at in reversed(range(len(layers))):  # every forward
        if keys_and_values(layers[at]) is None:
            continue
        if keeps_every_column(layers[at]):
            return [at, *deepest]
        deepest = deepest or [at]
    return deepest


def _parts(layer: Any, name: str) -> list[_Part]:
    tensors = keys_and_values(layer)
    if tensors is None:
        return []
    keys, values = tensors
    first = 0
    if not keeps_every_column(layer):  # the newest columns remain
        first = max(0, int(layer.get_seq_length()) - keys.shape[2])
    return [_Part(f"{name} keys", keys, first), _Part(f"{name} values", values, first)]


def _equal_rows(pairs: list[tuple[Tensor, Tensor]], alike: Callable[[int, int], bool]) -> Ints | None:
    # The newest column usually suffices.
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
    """True for equal address and strides: one may be a crop."""
    a, b = one.tensor, other.tensor
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype

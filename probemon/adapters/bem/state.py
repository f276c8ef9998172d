"""The controller's state of the sequences in one cache, and how it follows that cache.

    states = States()
    states.put(cache, ControllerState(n_rows=2))      # follows reorder, repeat, select, reset and deepcopy
    states.get(cache)
    states.clear()

A state keeps features of every column, which the controller can read again after `truncate`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.packing import Packing
from probemon.errors import BemStateError


@dataclass(frozen=True, eq=False)
class Carry:
    """Passed from one forward to the next, by row. Nothing writes to it.

    `n [B]` int64: real tokens so far.
    `open [B, N, w]`: features of the incomplete chunk, zeros beyond.
    `code [B, r]`: that chunk's, after the moving average.
    `summary [B, w]`: of the prefix.
    `log_mass [B]`: log of its denominator, -inf before the first complete chunk.
    `confidence [B]`: that chunk's.
    `energy [B]`: spread of the last complete chunk, for level="energy".
    """

    n: Tensor
    open: Tensor
    code: Tensor
    summary: Tensor
    log_mass: Tensor
    confidence: Tensor
    energy: Tensor | None = None

    def select(self, rows: Tensor) -> Carry:
        return self._each(lambda tensor: tensor[rows])

    def detach(self) -> Carry:
        return self._each(Tensor.detach)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Carry:
        changed: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name: None if tensor is None else change(tensor) for name, tensor in changed.items()}
        return Carry(**changed)


class ControllerState:
    """State of `n_rows` sequences and `n_columns` so far; `level [B]` int64 if decided once.

    `packing`: how columns hold sequences, each a row here.
    `carry`: None before the first read, and after columns were cut off or only fed.
    """

    def __init__(self, n_rows: int, level: Tensor | None = None, packing: Packing | None = None) -> None:
        self.n_rows, self.level, self.packing = n_rows, level, packing
        self.carry: Carry | None = None
        self.inside = False  # the last forward surely completed no chunk
        # Tokens that every row can take before one completes a chunk.
        self.room = 0
        self.n_columns = 0
        self._pieces: list[tuple[Tensor, Tensor]] = []

    def append(self, z: Tensor, real: Tensor, carry: Carry) -> None:
        """Add features z `[B, T, w]` and real `[B, T]`, without gradients."""
        self._pieces.append((z.detach(), real))
        self.n_columns += z.shape[1]
        self.carry = carry.detach()

    def feed(self, z: Tensor, real: Tensor) -> None:
        """Add columns of features alone, NaN if unknown."""
        self._pieces.append((z.detach(), real))
        self.n_columns += z.shape[1]
        self.carry, self.room = None, 0

    def history(self) -> tuple[Tensor, Tensor]:
        """Return features `[B, L, w]` and real `[B, L]`. Raises `BemStateError` if there are none."""
        if not self._pieces:
            raise BemStateError("this state has read nothing yet: run a forward first")
        if len(self._pieces) > 1:
            z, real = (torch.cat(pieces, dim=1) for pieces in zip(*self._pieces, strict=True))
            self._pieces = [(z, real)]
        return self._pieces[0]

    def truncate(self, n_columns: int) -> tuple[Tensor, Tensor]:
        """Forget columns from `n_columns` on. Return the history, to be read again."""
        z, real = self.history()
        self._pieces = [(z[:, :n_columns], real[:, :n_columns])]
        self.n_columns, self.carry, self.room = n_columns, None, 0
        return self._pieces[0]

    def mask(self, real: Tensor) -> None:
        """Make columns padding by `real [B, L]`. Raises `BemStateError` if padding became tokens."""
        z, before = self.history()
        if torch.equal(real, before):
            return
        if bool((real & ~before).any()):
            raise BemStateError(
                "the attention mask says that cached columns are tokens which were padding when they were read: begin"
                " with an empty cache"
            )
        self._pieces = [(z, real)]
        self.carry, self.room, self.inside = None, 0, False

    def select(self, rows: Tensor) -> None:
        """Make row i the former row `rows[i]`."""
        if not self._pieces:
            self.n_rows = len(rows)
            return
        z, real = self.history()
        rows = rows.to(z.device)
        self.n_rows, self._pieces = len(rows), [(z[rows], real[rows])]
        self.carry = None if self.carry is None else self.carry.select(rows)
        self.level = None if self.level is None else self.level[rows]

    def copy(self) -> ControllerState:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied._pieces = list(self._pieces)
        return copied

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors by name, for `from_tensors`."""
        z, real = self.history()
        level = {} if self.level is None else {"level": self.level}
        return {"z": z.contiguous(), "real": real.contiguous(), **level}

    @classmethod
    def from_tensors(cls, saved: Mapping[str, Tensor]) -> ControllerState:
        """Make a state of the result of `tensors`. Raises `BemStateError`."""
        z, real, level = saved.get("z"), saved.get("real"), saved.get("level")
        if z is None or real is None or not _is_state(z, real, level):
            shapes = {name: (tuple(x.shape), str(x.dtype)) for name, x in saved.items()}
            raise BemStateError(
                f"tensors {shapes} are not a controller's state: expected z [B, L, w], real [B, L] bool and, if decided"
                f" by row, level [B] int64 of 0 to {len(LEVELS) - 1}, as state.tensors() gives them"
            )
        state = cls(len(z), level)
        state._pieces, state.n_columns = [(z, real)], z.shape[1]
        return state


def _is_state(z: Tensor, real: Tensor, level: Tensor | None) -> bool:
    if z.dim() != 3 or real.shape != z.shape[:2] or real.dtype != torch.bool:
        return False
    if level is None:
        return True
    fits = level.shape == z.shape[:1] and level.dtype == torch.int64
    return fits and bool(((level >= 0) & (level < len(LEVELS))).all())


_FOLLOWED = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "reset")


class States:
    """States by cache, each kept as long as its cache."""

    def __init__(self) -> None:
        self._by_cache: weakref.WeakKeyDictionary[Cache, ControllerState] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._by_cache)

    def get(self, cache: Cache) -> ControllerState | None:
        """Return a cache's state, or None."""
        return self._by_cache.get(cache)

    def put(self, cache: Cache, state: ControllerState) -> None:
        """Set a cache's state, and follow the cache."""
        if cache not in self._by_cache:
            for name in _FOLLOWED:
                vars(cache)[name] = _Follower(self, cache, name)
        self._by_cache[cache] = state

    def clear(self) -> None:
        """Forget every cache."""
        for cache in list(self._by_cache):
            self.forget(cache)

    def forget(self, cache: Any) -> None:
        """Forget a cache's state and stop following it."""
        if not isinstance(cache, Cache) or self._by_cache.pop(cache, None) is None:
            return
        for name in _FOLLOWED:
            follower = vars(cache).get(name)
            if isinstance(follower, _Follower) and follower.states is self:
                del vars(cache)[name]

    def follow_call(self, cache: Cache, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Move the state's rows as the cache's method `name` moved its own."""
        state = self._by_cache.get(cache)
        if state is None:
            return
        if name == "reset":
            self._by_cache[cache] = ControllerState(state.n_rows)
            return
        [rows] = (*args, *kwargs.values())
        if name == "batch_repeat_interleave":
            rows = torch.arange(state.n_rows, device="cpu").repeat_interleave(int(rows))
        elif isinstance(rows, Tensor) and rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        state.select(torch.as_tensor(rows))

    def follow_copy(self, cache: Cache, copied: Cache) -> None:
        """Give a copied cache a copy of the state."""
        state = self._by_cache.get(cache)
        if state is not None and copied not in self._by_cache:
            self._by_cache[copied] = state.copy()


class _Follower:
    """Wraps one method of one cache, to move its state too. Held weakly: a cycle would keep keys and values alive."""

    def __init__(self, states: States, cache: Cache, name: str) -> None:
        self.states, self._cache, self._name = states, weakref.ref(cache), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = self._cache()
        if cache is None:
            raise BemStateError(f"{self._name} of a cache that is gone: copy a cache by copy.deepcopy")
        result = getattr(type(cache), self._name)(cache, *args, **kwargs)
        self.states.follow_call(cache, self._name, args, kwargs)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BemStateError(
            "a cache that an adapter follows cannot be pickled: detach first, and keep bem.state(cache).tensors()"
            " alongside it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Follower:
        """Copy the state with the cache."""
        cache = self._cache()
        copied = memo.get(id(cache))  # deepcopy makes the object first
        if cache is None or copied is None:
            return self
        self.states.follow_copy(cache, copied)
        return _Follower(self.states, copied, self._name)

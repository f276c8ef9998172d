"""Records hold all tensors of one probe in adjacent bytes, so that a run of siblings is one copy.

slab = Slab(Layout.of(pack.weights), 400, register=True)     # registered with the GPU: asynchronous copies
first, *others = slab.take(20)                               # rows, adjacent if possible
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from probemon.errors import ConfigError

_ALIGNED = 256


@dataclass(frozen=True)
class Layout:
    """Places of a probe's tensors in a record: `parts` are (name, shape, dtype, first byte)."""

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype, int], ...]
    n_bytes: int

    @classmethod
    def of(cls, stacked: Mapping[str, Tensor]) -> Layout:
        """Lay out one probe of stacked weights `[P, ...]`."""
        parts, at = [], 0
        for name, tensor in stacked.items():
            parts.append((name, tuple(tensor.shape[1:]), tensor.dtype, at))
            at += -(-tensor[0].numel() * tensor.element_size() // 16) * 16
        return cls(tuple(parts), -(-at // _ALIGNED) * _ALIGNED)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """View the tensors of records `[n_bytes]` or `[n, n_bytes]` (stacked)."""
        tensors = {}
        for name, shape, dtype, at in self.parts:
            n = dtype.itemsize * torch.Size(shape).numel()
            values = memory[..., at : at + n].view(dtype)
            tensors[name] = values.unflatten(-1, shape) if shape else values[..., 0]
        return tensors


class SlabRecord(dict[str, Tensor]):
    """A state dict of views of `memory [n_bytes]`."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        super().__init__(layout.views(memory))
        self.memory = memory

    @classmethod
    def of(cls, layout: Layout, state: Mapping[str, Tensor], memory: Tensor | None = None) -> SlabRecord:
        """Copy a state dict into `memory`, by default new."""
        record = cls(layout, torch.empty(layout.n_bytes, dtype=torch.uint8, device="cpu") if memory is None else memory)
        for name, tensor in record.items():
            tensor.copy_(state[name])
        return record


class Slab:
    """Allocates rows for records. `register`: pin for a GPU (pin_memory rounds up to a power of two)."""

    def __init__(self, layout: Layout, n_records: int, *, register: bool) -> None:
        with torch.inference_mode(False):
            self._memory = torch.empty(n_records, layout.n_bytes, dtype=torch.uint8, device="cpu")
        self._free = list(range(n_records))
        self._lock = threading.RLock()
        if register and n_records:
            error = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)  # type: ignore[no-untyped-call,unused-ignore]
            if int(error) != 0:
                raise ConfigError(
                    f"{self._memory.numel()} bytes of RAM could not be registered with the GPU (CUDA error"
                    f" {int(error)}): lower cache_bytes"
                )
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._memory.data_ptr())  # type: ignore[no-untyped-call,unused-ignore]

    def take(self, n: int) -> list[Tensor]:
        """Return at most `n` rows: the first long enough run or the lowest. A row lives as long as its tensor."""
        with self._lock:
            free = self._free
            run = next((i for i in range(len(free) - n + 1) if n and free[i + n - 1] - free[i] == n - 1), 0)
            taken, free[run : run + n] = free[run : run + n], []
        rows = [self._memory[at] for at in taken]
        for at, row in zip(taken, rows, strict=True):
            weakref.finalize(row, self._give_back, at)
        return rows

    def _give_back(self, at: int) -> None:
        with self._lock:
            bisect.insort(self._free, at)

    @property
    def n_free(self) -> int:
        """Free rows."""
        return len(self._free)


def runs_of(records: list[Tensor]) -> list[tuple[int, int]]:
    """Return ranges `[begin, end)` of records adjacent in memory."""
    breaks = [
        i
        for i, (a, b) in enumerate(itertools.pairwise(records), start=1)
        if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or b.data_ptr() - a.data_ptr() != a.numel()
    ]
    return list(itertools.pairwise([0, *breaks, len(records)]))

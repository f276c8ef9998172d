"""Uploads copy probes from RAM into slots of an arena.

    upload = upload_to(weights, device)
    upload(states, slots)          # for later work on the calling thread's stream
    upload.wait()                  # for any stream

On a GPU, each run of neighbours in RAM is one asynchronous copy to a staging area on another stream; one kernel per
parameter scatters them. The reading stream waits on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from probemon.engine.memory.slab import Layout, SlabRecord, runs_of

StateDict = Mapping[str, Tensor]


class Upload(Protocol):
    """Puts probes into slots."""

    def __call__(self, states: Sequence[StateDict], slots: Sequence[int]) -> None:
        """Enqueue `states[i]` into slot `slots[i]`."""

    def wait(self) -> None:
        """Block the CPU until everything has arrived."""

    def on_background_stream(self) -> AbstractContextManager[Any]:
        """Upload without waiting for the reading stream, nor the reverse. For a background thread, which waits itself
        and holds the arena's lock.
        """


def upload_to(weights: Mapping[str, Tensor], device: torch.device) -> Upload:
    """Return the upload for a device."""
    return Staged(weights) if device.type == "cuda" else Direct(weights)


class Direct:
    """Copies tensor by tensor, synchronously."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __call__(self, states: Sequence[StateDict], slots: Sequence[int]) -> None:
        for state, slot in zip(states, slots, strict=True):
            for name, tensor in state.items():
                self._weights[name][slot].copy_(tensor)

    def wait(self) -> None:
        """Do nothing."""

    def on_background_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Staged:
    """Copies each run of neighbours, then runs one kernel per parameter. On a CPU (tests) without streams."""

    def __init__(self, weights: Mapping[str, Tensor], n_staged: int = 64) -> None:
        self._weights, self._layout = weights, Layout.of(weights)
        device = weights["w1"].device
        with torch.inference_mode(False):
            self._staging = torch.empty(
                min(n_staged, len(weights["w1"])), self._layout.n_bytes, dtype=torch.uint8, device=device
            )
        self._side, self._background = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._pending: deque[tuple[Any, object]] = deque()  # events, and the RAM that they guard
        self.n_copies = 0

    def __call__(self, states: Sequence[StateDict], slots: Sequence[int]) -> None:
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()
        most = len(self._staging)
        for at in range(0, len(states), most):
            self._upload_staged(states[at : at + most], slots[at : at + most])

    def _upload_staged(self, states: Sequence[StateDict], slots: Sequence[int]) -> None:
        records = [state if isinstance(state, SlabRecord) else SlabRecord.of(self._layout, state) for state in states]
        order = sorted(range(len(records)), key=lambda i: records[i].memory.data_ptr())
        memory = [records[i].memory for i in order]
        slot_index = torch.tensor([slots[i] for i in order], device="cpu")
        if self._side is None:
            self._enqueue(memory, slot_index)
            return
        reading = torch.cuda.current_stream(self._side.device)
        self._side.wait_stream(reading)  # has read the old contents
        slot_index = slot_index.pin_memory()
        with torch.cuda.stream(self._side):
            self._enqueue(memory, slot_index)
            copied = torch.cuda.Event()
            copied.record()
        reading.wait_event(copied)
        self._pending.append((copied, (records, slot_index)))

    def _enqueue(self, memory: list[Tensor], slot_index: Tensor) -> None:
        for begin, end in runs_of(memory):
            rows = torch.as_strided(memory[begin], (end - begin, len(memory[begin])), (len(memory[begin]), 1))
            self._staging[begin:end].copy_(rows, non_blocking=True)
            self.n_copies += 1
        at = slot_index.to(self._staging.device, non_blocking=True)
        for name, tensor in self._layout.views(self._staging[: len(memory)]).items():
            self._weights[name].index_copy_(0, at, tensor)

    def on_background_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._background is None else torch.cuda.stream(self._background)

    def wait(self) -> None:
        while self._pending:
            self._pending.popleft()[0].synchronize()

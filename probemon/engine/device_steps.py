"""DeviceSteps runs steps of a few sequences on a GPU alongside the model.

    steps = DeviceSteps(cascade, n_probes)
    with steps.beside(hidden):                      # on our stream
        pending = steps.enqueue(x, retained)        # x [I * N, D], retained [N, P] bool; does not wait
    results = pending.wait()                        # numpy arrays

After some steps of one size the descent is captured as a CUDA graph.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import largest_values
from probemon.core.scores import Floats
from probemon.engine.kernels.triton_cascade import DeviceCascade, DeviceDescent
from probemon.util.first_sentence import first_sentence

LOG = logging.getLogger("probemon")
_WARM = 3  # steps before capture: Triton compiles in the first
# Held while enqueueing: a process can do one capture at a time, and it records other threads' work.
_ENQUEUEING = threading.RLock()


@dataclass(frozen=True)
class StepResults:
    """Results in host memory: active probes (`ptr [N+1]`, `probes`, `values`), `kept [N, P]`, `overflowed [N]`,
    `largest [I * N]`.
    """

    ptr: Ints
    probes: Any
    values: Floats
    kept: Mask
    overflowed: Mask
    largest: Floats


class DeviceSteps:
    """Runs steps of one plan in reused buffers. `side`: a stream to share with other plans."""

    def __init__(self, cascade: DeviceCascade, n_probes: int, side: Any = None) -> None:
        self.cascade, self._n_probes = cascade, n_probes
        self._free: dict[tuple[int, int, torch.dtype], list[_Buffers]] = {}
        self._lock = threading.Lock()
        self._side = torch.cuda.Stream(cascade.device) if side is None and cascade.device.type == "cuda" else side
        self.n_captured = self.n_uploaded = 0
        self.captures = self._side is not None

    @contextmanager
    def beside(self, *hidden: Tensor) -> Iterator[None]:
        """Run the block on our stream, after the work that computes `hidden`."""
        if self._side is None:
            yield
            return
        with _ENQUEUEING:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
            try:
                with torch.cuda.stream(self._side):
                    yield
            finally:
                for x in hidden:
                    if x.device == self._side.device:
                        x.record_stream(self._side)  # keeps its memory until we have read it

    def enqueue(self, x: Tensor, retained: Mask) -> PendingResults:
        """Begin a step of x `[I * N, D]` with retained sets `[N, P]`."""
        n = len(retained)
        key = (n, len(x), x.dtype)
        with self._lock:
            free = self._free.setdefault(key, [])
            # Last used first: it may hold these retained sets.
            at = next((i for i in reversed(range(len(free))) if np.array_equal(free[i].kept, retained)), len(free) - 1)
            buffers = free.pop(at) if free else _Buffers(self.cascade, x, n, self._n_probes)
        buffers.run(self, x, retained)
        return PendingResults(self, key, buffers)

    def _give_back(self, key: tuple[int, int, torch.dtype], buffers: _Buffers) -> None:
        with self._lock:
            self._free[key].append(buffers)


class PendingResults:
    """A step in progress."""

    def __init__(self, steps: DeviceSteps, key: tuple[int, int, torch.dtype], buffers: _Buffers) -> None:
        self._steps, self._key, self._buffers = steps, key, buffers

    def wait(self) -> StepResults:
        """Return the results when ready; call it once."""
        results = self._buffers.results()
        self._steps._give_back(self._key, self._buffers)
        return results


class _Buffers:
    """Inputs and results at fixed addresses, for graphs."""

    def __init__(self, cascade: DeviceCascade, x: Tensor, n: int, n_probes: int) -> None:
        device = cascade.device
        on_gpu, sizes = device.type == "cuda", (n, cascade.cap, cascade.n_kept, len(x) // n)
        with torch.inference_mode(False):  # else not writable outside inference mode
            self._cascade, self._x = cascade, torch.zeros(x.shape, dtype=x.dtype, device=device)
            self._before = torch.full((n, cascade.n_kept), -1, dtype=torch.int32, device=device)
            memory = torch.empty(DeviceDescent.size(*sizes), dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._found = DeviceDescent.of(*sizes, memory)
        self._graph: Any = None
        self._done: Any = torch.cuda.Event() if on_gpu else None
        self._n_runs = 0
        self.kept = np.zeros((n, n_probes), dtype=bool)

    def run(self, steps: DeviceSteps, x: Tensor, retained: Mask) -> None:
        self._x.copy_(x)
        self._take(steps, retained)
        if self._graph is None and steps.captures and self._n_runs >= _WARM:
            self._capture(steps)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._descend()
        self._n_runs += 1
        if self._done is not None:
            self._done.record()

    def _descend(self) -> None:
        descent = self._cascade.descend(self._x, len(self._before), self._before)
        descent.largest.copy_(largest_values(self._x))
        self._before.copy_(descent.kept)
        self._found.memory.copy_(descent.memory, non_blocking=self._done is not None)

    def _capture(self, steps: DeviceSteps) -> None:
        # Not torch.cuda.graph: it synchronises the device in the middle of the model's forward.
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.inference_mode(False):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._descend()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            why = first_sentence(error)
            LOG.warning("the descent could not be captured as a graph (%s): it is launched kernel by kernel", why)
            steps.captures = False
            return
        self._graph = graph
        steps.n_captured += 1

    def _take(self, steps: DeviceSteps, retained: Mask) -> None:
        if np.array_equal(self.kept, retained):
            return
        steps.n_uploaded += 1
        rows, probes = np.nonzero(retained)
        before = np.full(tuple(self._before.shape), -1, dtype=np.int32)
        before[rows, np.arange(len(rows)) - np.searchsorted(rows, rows)] = probes
        self._before.copy_(torch.from_numpy(before))

    def results(self) -> StepResults:
        if self._done is not None:
            self._done.synchronize()
        descent = self._found
        count, ids, scores, kept = (t.numpy() for t in (descent.count, descent.ids, descent.scores, descent.kept))
        filled = np.arange(ids.shape[1]) < count[:, None]
        rows = np.nonzero(filled)[0]
        order = np.lexsort((ids[filled], rows))
        self.kept = np.zeros_like(self.kept)  # the caller has the old array
        keeps = kept >= 0
        self.kept[np.nonzero(keeps)[0], kept[keeps]] = True
        ptr = np.concatenate([[0], np.cumsum(count)])
        overflowed, largest = descent.overflowed.numpy() != 0, descent.largest.numpy().copy()
        return StepResults(ptr, ids[filled][order], scores[filled][order], self.kept, overflowed, largest)

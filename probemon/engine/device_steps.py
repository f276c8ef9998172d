"""DeviceSteps runs steps of a few rows on a GPU, beside the host model.

    steps = DeviceSteps(cascade, n_probes)
    with steps.beside(hidden):                      # a stream of our own, from the tapped layer on
        pending = steps.enqueue(x, retained)        # x [I * N, D], retained [N, P] bool; waits for nothing
    results = pending.wait()                        # numpy arrays

After a few steps of one size the descent is captured as a graph, which is replayed from then on. Results are copied to
pinned memory. Retained sets stay on the device for the next step, which uploads them only where it is given others.
Without a GPU (Triton's interpreter) the same code runs in order, without streams and graphs.
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
_WARM = 3  # steps of one size before it is captured: Triton compiles in the first
# Held while anything is put on our streams: only one capture may be under way in a process, and what others enqueue
# meanwhile on its stream would be captured.
_ENQUEUEING = threading.RLock()


@dataclass(frozen=True)
class StepResults:
    """Holds, of N states and on the host, active probes and scores state by state, `ptr [N+1]`; `kept [N, P]`;
    `overflowed [N]`; `largest [I * N]`, as `Inputs.largest`.
    """

    ptr: Ints
    probes: Any
    values: Floats
    kept: Mask
    overflowed: Mask
    largest: Floats


class DeviceSteps:
    """Runs steps of one plan, any number at once, each in buffers that are used again.

    `side`: a stream to share with the steps of other plans.
    """

    def __init__(self, cascade: DeviceCascade, n_probes: int, side: Any = None) -> None:
        self.cascade, self._n_probes = cascade, n_probes
        self._free: dict[tuple[int, int, torch.dtype], list[_Buffers]] = {}
        self._lock = threading.Lock()
        self._side = torch.cuda.Stream(cascade.device) if side is None and cascade.device.type == "cuda" else side
        self.n_captured = self.n_uploaded = 0  # graphs made, and steps whose retained sets were not those on the device
        self.captures = self._side is not None

    @contextmanager
    def beside(self, *hidden: Tensor) -> Iterator[None]:
        """Run what the block enqueues on our stream, after what computes `hidden`."""
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
                        x.record_stream(self._side)  # its memory is not given to others before we have read it

    def enqueue(self, x: Tensor, retained: Mask) -> PendingResults:
        """Begin a step of states x `[I * N, D]` from retained sets `[N, P]`."""
        n = len(retained)
        key = (n, len(x), x.dtype)
        with self._lock:
            free = self._free.setdefault(key, [])
            # The buffers that were used last come first: in one generation they have the retained sets.
            at = next((i for i in reversed(range(len(free))) if np.array_equal(free[i].kept, retained)), len(free) - 1)
            buffers = free.pop(at) if free else _Buffers(self.cascade, x, n, self._n_probes)
        buffers.run(self, x, retained)
        return PendingResults(self, key, buffers)

    def _give_back(self, key: tuple[int, int, torch.dtype], buffers: _Buffers) -> None:
        with self._lock:
            self._free[key].append(buffers)


class PendingResults:
    """Waits for the results of a step."""

    def __init__(self, steps: DeviceSteps, key: tuple[int, int, torch.dtype], buffers: _Buffers) -> None:
        self._steps, self._key, self._buffers = steps, key, buffers

    def wait(self) -> StepResults:
        """Return the results, once they are there; call it once."""
        results = self._buffers.results()
        self._steps._give_back(self._key, self._buffers)
        return results


class _Buffers:
    """Holds inputs and results of steps of N states, at addresses that a captured graph can rely on."""

    def __init__(self, cascade: DeviceCascade, x: Tensor, n: int, n_probes: int) -> None:
        device = cascade.device
        on_gpu, sizes = device.type == "cuda", (n, cascade.cap, cascade.n_kept, len(x) // n)
        with torch.inference_mode(False):  # else they could not be written outside of that mode
            self._cascade, self._x = cascade, torch.zeros(x.shape, dtype=x.dtype, device=device)
            self._before = torch.full((n, cascade.n_kept), -1, dtype=torch.int32, device=device)
            memory = torch.empty(DeviceDescent.size(*sizes), dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._found = DeviceDescent.of(*sizes, memory)  # on the host
        self._graph: Any = None
        self._done: Any = torch.cuda.Event() if on_gpu else None
        self._n_runs = 0
        self.kept = np.zeros((n, n_probes), dtype=bool)  # what the last step retained, here and on the device

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
        """Enqueue a descent, bring its results to the host, and what it retained to where the next one begins."""
        found = self._cascade.descend(self._x, len(self._before), self._before)
        found.largest.copy_(largest_values(self._x))
        self._before.copy_(found.kept)
        self._found.memory.copy_(found.memory, non_blocking=self._done is not None)

    def _capture(self, steps: DeviceSteps) -> None:
        # Not torch.cuda.graph, which waits for the whole device and empties its cache: the host model is in the middle
        # of a forward.
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
        if np.array_equal(self.kept, retained):  # the device has them already
            return
        steps.n_uploaded += 1
        rows, probes = np.nonzero(retained)
        before = np.full(tuple(self._before.shape), -1, dtype=np.int32)
        before[rows, np.arange(len(rows)) - np.searchsorted(rows, rows)] = probes
        self._before.copy_(torch.from_numpy(before))

    def results(self) -> StepResults:
        if self._done is not None:
            self._done.synchronize()
        found = self._found
        count, ids, scores, kept = (t.numpy() for t in (found.count, found.ids, found.scores, found.kept))
        filled = np.arange(ids.shape[1]) < count[:, None]
        rows = np.nonzero(filled)[0]
        order = np.lexsort((ids[filled], rows))
        self.kept = np.zeros_like(self.kept)  # a new one: the last is with the caller
        keeps = kept >= 0
        self.kept[np.nonzero(keeps)[0], kept[keeps]] = True
        ptr = np.concatenate([[0], np.cumsum(count)])
        overflowed, largest = found.overflowed.numpy() != 0, found.largest.numpy().copy()
        return StepResults(ptr, ids[filled][order], scores[filled][order], self.kept, overflowed, largest)

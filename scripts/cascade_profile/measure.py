"""What is measured of ours alone, and where: the counterpart of a load, what bounds a step, a start from nothing.

where_ours_goes(manager, states)        # what a step costs beside the weights it reads
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon import DynamicProbeManager, ProbePack
from probemon.core.scores import RowState, Scores
from probemon.engine.kernels import score_probes
from probemon.engine.memory.store import PackSource, ProbeStore

CACHE_SWEEP_BYTES = 64 << 20  # larger than a last-level cache's share: what a host model's forward does to it


def paged_load(pack: ProbePack, seed: int) -> dict[str, Any]:
    """Milliseconds a probe to copy weights out of our pack, as a paged arena does: one by one, or twenty neighbours at
    once.
    """
    starts = np.random.default_rng(seed).integers(pack.n_probes - 20, size=10).tolist()
    taken = {}
    for name, size in (("one_by_one_ms", 1), ("twenty_at_once_ms", 20)):
        store = ProbeStore(PackSource(pack), max_bytes=0)
        begin = time.perf_counter()
        for start in starts:
            for at in range(start, start + 20, size):
                store.get_many(range(at, at + size))
        taken[name] = round((time.perf_counter() - begin) * 1e3 / (20 * len(starts)), 4)
    return taken


def where_ours_goes(manager: DynamicProbeManager, states: Tensor) -> dict[str, float]:
    """Means over the stream, caches swept before each: our step; one kernel call over all it evaluated; one over one
    probe.

    The difference of the two calls is `reading_ms`: what more weights cost. The rest of the step is `fixed_ms`.
    """
    sweep = torch.ones(CACHE_SWEEP_BYTES // 4)

    def cold(call: Callable[[], Any]) -> tuple[float, Any]:
        sweep.sum()
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result

    state: RowState | None = None
    step_s: list[float] = []
    all_s: list[float] = []
    one_s: list[float] = []
    n_scored: list[int] = []
    for hidden in states.split(1):
        seconds, (state, scores) = cold(partial(manager.step, state, hidden))
        step_s.append(seconds)
        slots = torch.from_numpy(scores.active(0).astype(np.int64))
        for some, taken in ((slots, all_s), (slots[:1], one_s)):
            rows = torch.zeros_like(some)
            taken.append(cold(partial(score_probes, hidden, manager.pack.weights, rows, some, impl=manager.impl))[0])
        n_scored.append(len(slots))
    step, every, one, n = (float(np.mean(values)) for values in (step_s, all_s, one_s, n_scored))
    one_bytes = manager.pack.weight_bytes() / manager.pack.n_probes
    return {
        "step_ms": round(step * 1e3, 4),
        "kernel_ms": round(every * 1e3, 4),
        "kernel_one_probe_ms": round(one * 1e3, 4),
        "reading_ms": round((every - one) * 1e3, 4),
        "fixed_ms": round((step - every + one) * 1e3, 4),
        "scored_mean": round(n, 1),
        "weights_read_mb": round(n * one_bytes / 1e6, 2),
        "read_gb_per_s": round((n - 1) * one_bytes / (every - one) / 1e9, 2),
    }


def from_nothing(folder: Path, states: Tensor, make: Callable[[ProbePack], DynamicProbeManager]) -> dict[str, float]:
    """Milliseconds of ours with nothing prepared: open the pack, make a manager, step through the stream."""
    t0 = time.perf_counter()
    pack = ProbePack.open(folder)
    t1 = time.perf_counter()
    manager = make(pack)
    t2 = time.perf_counter()
    state: RowState | None = None
    scores: list[Scores] = []
    for hidden in states.split(1):
        state, found = manager.step(state, hidden)
        scores.append(found)
    t3 = time.perf_counter()
    return {
        "open_ms": round((t1 - t0) * 1e3, 2),
        "manager_ms": round((t2 - t1) * 1e3, 2),
        "tokens_ms": round((t3 - t2) * 1e3, 2),
    }

"""Measure what watching costs: generation watched and bare, alternating in one process.

cost = overhead(manager, model, inputs, n_tokens=6, n_pairs=16)
cost.host_ms, cost.monitor_ms, cost.overhead_pct
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from probemon.engine.scorer import Scorer
from probemon.monitor.run import MonitorRun


@dataclass(frozen=True)
class Overhead:
    """Medians over the decode steps of all generations, milliseconds. `monitor_ms`: the part inside our hooks."""

    host_ms: float
    watched_ms: float
    monitor_ms: float
    n_steps: int

    @property
    def overhead_pct(self) -> float:
        """Return by how many per cent the median watched step is above the bare one; noise can make it negative."""
        return 100 * (self.watched_ms / self.host_ms - 1)


class _Clock(StoppingCriteria):
    """Asked after every step of `generate`, bare and watched alike: notes the time, stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def overhead(
    manager: Scorer,
    model: Any,
    inputs: Mapping[str, Any],
    *,
    n_tokens: int = 6,
    n_pairs: int = 16,
    progress: Callable[[str], None] = lambda line: None,
) -> Overhead:
    """Time greedy decoding of `n_tokens` tokens, `n_pairs` times bare and watched, the order turned each time.

    Turns are short, so that what else runs on the machine falls on both alike.
    """
    steps: dict[bool, list[float]] = {False: [], True: []}
    inside: list[float] = []

    def once(watched: bool, keep: bool = True) -> None:
        clock = _Clock()
        options = {
            "max_new_tokens": n_tokens,
            "min_new_tokens": n_tokens,
            "do_sample": False,
            "stopping_criteria": StoppingCriteriaList([clock]),
        }
        if watched:
            with MonitorRun(manager, model) as run:
                model.generate(**inputs, **options)
            if keep:
                inside.extend(list(run.forward_seconds)[1:])
        else:
            model.generate(**inputs, **options)
        if keep:
            steps[watched].extend(b - a for a, b in zip(clock.times, clock.times[1:], strict=False))

    once(True, keep=False)
    for pair in range(n_pairs):
        progress(f"measuring the overhead, pair {pair + 1} of {n_pairs}")
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            once(watched)
    bare, watched_seconds = statistics.median(steps[False]), statistics.median(steps[True])
    return Overhead(bare * 1e3, watched_seconds * 1e3, statistics.median(inside) * 1e3, len(steps[False]))

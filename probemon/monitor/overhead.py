"""Measure what watching costs: generation watched and bare, alternating in one process.

cost = overhead(manager, model, inputs, n_tokens=6, n_pairs=16)
cost.host_ms, cost.monitor_ms, cost.overhead_pct, cost.interval_pct
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from probemon.engine.scorer import Scorer
from probemon.monitor.run import MonitorRun

_RESAMPLES = 2000


@dataclass(frozen=True)
class Overhead:
    """Medians over the decode steps of all generations, milliseconds. `monitor_ms`: the part inside our hooks.
    `interval_pct`: 95 % of what `overhead_pct` might have been (`ratio_interval_pct`).
    """

    host_ms: float
    watched_ms: float
    monitor_ms: float
    n_steps: int
    interval_pct: tuple[float, float]

    @property
    def overhead_pct(self) -> float:
        """Return by how many per cent the median watched step is above the bare one; noise can make it negative."""
        return 100 * (self.watched_ms / self.host_ms - 1)


def ratio_interval_pct(bare: npt.ArrayLike, watched: npt.ArrayLike) -> tuple[float, float]:
    """Return `(low, high)`: 95 % of the per cent by which the median of all watched times is above that of all bare
    ones, had other turns been measured.

    `bare`, `watched` `[turns, times]`. Turns are drawn with replacement, a pair of both at a time, 2,000 times: the
    percentile bootstrap (Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13).
    """
    sides = [np.asarray(times, dtype=np.float64) for times in (bare, watched)]
    drawn = np.random.default_rng(0).integers(len(sides[0]), size=(_RESAMPLES, len(sides[0])))
    medians = [np.median(times[drawn].reshape(_RESAMPLES, -1), axis=1) for times in sides]
    low, high = np.percentile(100 * (medians[1] / medians[0] - 1), (2.5, 97.5))
    return float(low), float(high)


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
    turns: dict[bool, list[list[float]]] = {False: [], True: []}
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
            turns[watched].append([b - a for a, b in pairwise(clock.times)])

    once(True, keep=False)
    for pair in range(n_pairs):
        progress(f"measuring the overhead, pair {pair + 1} of {n_pairs}")
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            once(watched)
    bare, watched_ms = (1e3 * float(np.median(turns[side])) for side in (False, True))
    interval = ratio_interval_pct(turns[False], turns[True])
    return Overhead(bare, watched_ms, statistics.median(inside) * 1e3, np.size(turns[False]), interval)

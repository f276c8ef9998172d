"""Measures what watching costs.

cost = overhead(manager, model, inputs)
cost.host_ms, cost.overhead_pct, cost.interval_pct, cost.is_resolved
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.engine.scorer import Scorer
from probemon.monitor.lockstep import Side, in_lockstep, shared_copy
from probemon.monitor.run import MonitorRun

WIDTH_PCT = 0.5  # stop once the interval is this narrow
_FEWEST_TURNS = 8  # for an interval
_RESAMPLES = 2000


@dataclass(frozen=True)
class Overhead:
    """Times of decode steps.

    `host_ms`: median bare step
    `added_ms`: median added to it
    `monitor_ms`: median inside our hooks
    `interval_pct`: 95 % interval of `overhead_pct`
    """

    host_ms: float
    added_ms: float
    monitor_ms: float
    n_steps: int
    interval_pct: tuple[float, float]
    is_resolved: bool

    @property
    def overhead_pct(self) -> float:
        """Return the added time in per cent; noise can make it negative."""
        return 100 * self.added_ms / self.host_ms


def added_pct(bare: npt.ArrayLike, watched: npt.ArrayLike) -> tuple[float, float, float]:
    """Return `(value, low, high)`: the median added time in per cent, and its 95 % interval.

    `bare`, `watched`: `[turns, times]`, paired. Percentile bootstrap (Efron & Tibshirani 1993, "An Introduction to the
    Bootstrap", chapter 13), clustered by turn.
    """
    base = np.asarray(bare, dtype=np.float64)
    added = np.asarray(watched, dtype=np.float64) - base
    samples = np.random.default_rng(0).integers(len(base), size=(_RESAMPLES, len(base)))
    values = [np.median(added[turns]) / np.median(base[turns]) for turns in samples]
    low, high = np.percentile(values, (2.5, 97.5))
    return float(100 * np.median(added) / np.median(base)), float(100 * low), float(100 * high)


def overhead(
    manager: Scorer,
    model: Any,
    inputs: Mapping[str, Any],
    *,
    n_tokens: int = 12,
    width_pct: float = WIDTH_PCT,
    most_seconds: float = 60.0,
    progress: Callable[[str], None] = lambda line: None,
) -> Overhead:
    """Time greedy decoding of `n_tokens` tokens, bare and watched in lockstep, until the interval is at most
    `width_pct` wide or `most_seconds` have passed. Raises `ConfigError` if the model cannot be copied.
    """
    models, inside = (model, shared_copy(model)), list[float]()
    options = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False}

    def bare(side_model: Any) -> Side:
        return lambda criteria, n: side_model.generate(**inputs, **options, stopping_criteria=criteria)

    def watched(side_model: Any) -> Side:
        def side(criteria: Any, n: int) -> None:
            with MonitorRun(manager, side_model) as run:
                side_model.generate(**inputs, **options, stopping_criteria=criteria)
            inside.extend(list(run.forward_seconds)[1:])

        return side

    pairs = [(bare(models[1 - i]), watched(models[i])) for i in range(2)]
    progress("measuring what watching adds")
    for pair in pairs:  # warm up: first use is not timed
        in_lockstep(*pair, n_tokens)
    inside.clear()

    def say(value: float, low: float, high: float) -> None:
        progress(f"measuring what watching adds: {value:+.1f} % ({low:+.1f} to {high:+.1f})")

    times, (value, low, high) = compared(pairs, n_tokens, width_pct, most_seconds, say)
    host_ms = float(np.median(times[..., 0])) * 1e3
    is_resolved = high - low <= width_pct and len(times) >= _FEWEST_TURNS
    inside_ms = statistics.median(inside) * 1e3
    return Overhead(host_ms, value * host_ms / 100, inside_ms, times[..., 0].size, (low, high), is_resolved)


def compared(
    pairs: Sequence[tuple[Side, Side]],
    n_tokens: int,
    width_pct: float,
    most_seconds: float,
    say: Callable[[float, float, float], None] = lambda value, low, high: None,
) -> tuple[npt.NDArray[np.float64], tuple[float, float, float]]:
    """Return the seconds of steps `[turns, n_tokens - 1, 2]`, and what the second sides add (`added_pct`).

    `pairs`: also with models exchanged: copies differ in speed by more than the effect
    """
    turns: list[npt.NDArray[np.float64]] = []
    begin, narrow, added = time.monotonic(), False, (0.0, 0.0, 0.0)
    while not narrow and (len(turns) < 2 or time.monotonic() - begin < most_seconds):
        round_, i = divmod(len(turns), len(pairs))
        turns.append(in_lockstep(*pairs[i], n_tokens, first=round_ % 2))
        seconds = np.array(turns)
        added = added_pct(seconds[..., 0], seconds[..., 1])
        narrow = len(turns) >= _FEWEST_TURNS and added[2] - added[1] <= width_pct
        say(*added)
    return np.array(turns), added

"""Measure what watching costs: a watched generation and a bare one in lockstep, in one process.

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

WIDTH_PCT = 0.5  # of the interval: what is measured until it is no wider
_FEWEST_TURNS = 8  # that an interval is drawn from
_RESAMPLES = 2000


@dataclass(frozen=True)
class Overhead:
    """Of the decode steps of all turns, milliseconds. `host_ms`: the median bare one. `added_ms`: the median of what a
    watched one took more than the bare one beside it. `monitor_ms`: the part inside our hooks. `interval_pct`: 95 % of
    what `overhead_pct` might have been. `is_resolved`: the interval is as narrow as was asked for.
    """

    host_ms: float
    added_ms: float
    monitor_ms: float
    n_steps: int
    interval_pct: tuple[float, float]
    is_resolved: bool

    @property
    def overhead_pct(self) -> float:
        """Return how many per cent of a bare step watching adds; noise can make it negative."""
        return 100 * self.added_ms / self.host_ms


def added_pct(bare: npt.ArrayLike, watched: npt.ArrayLike) -> tuple[float, float, float]:
    """Return `(value, low, high)`: the median of what watched times are above the bare ones beside them, in per cent of
    the median bare time, and 95 % of what that might have been.

    `bare`, `watched` `[turns, times]`. Turns are drawn with replacement, 2,000 times: the percentile bootstrap (Efron &
    Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13), by cluster, since times of one turn are alike.
    """
    base = np.asarray(bare, dtype=np.float64)
    more = np.asarray(watched, dtype=np.float64) - base
    drawn = np.random.default_rng(0).integers(len(base), size=(_RESAMPLES, len(base)))
    values = [np.median(more[turns]) / np.median(base[turns]) for turns in drawn]
    low, high = np.percentile(values, (2.5, 97.5))
    return float(100 * np.median(more) / np.median(base)), float(100 * low), float(100 * high)


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
    """Time greedy decoding of `n_tokens` tokens, bare and watched in lockstep, turn by turn, until the 95 % interval of
    what is added is no wider than `width_pct` or `most_seconds` are over.

    Raises `ConfigError` where the host cannot be copied, to run bare.
    """
    hosts, inside = (model, shared_copy(model)), list[float]()
    options = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False}

    def bare(host: Any) -> Side:
        return lambda criteria, n: host.generate(**inputs, **options, stopping_criteria=criteria)

    def watched(host: Any) -> Side:
        def side(criteria: Any, n: int) -> None:
            with MonitorRun(manager, host) as run:
                host.generate(**inputs, **options, stopping_criteria=criteria)
            inside.extend(list(run.forward_seconds)[1:])

        return side

    pairs = [(bare(hosts[1 - i]), watched(hosts[i])) for i in range(2)]
    progress("measuring what watching adds")
    for pair in pairs:  # what is made at first use does not count
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
    """Return the seconds of steps `[turns, n_tokens - 1, 2]` and what the second sides add (`added_pct`), from as many
    turns as it takes.

    `pairs`: the same two things with their hosts exchanged, each pair in its turn: no two copies of a host are equally
    fast, and what is to be found is less than that.
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

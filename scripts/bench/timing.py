"""Timing many methods side by side: in turns, each round in another order, medians and 99th percentiles.

taken = interleaved({"ours": run, "floor": read}, n_rounds=40)     # run(round): what is timed; seconds by method
rows_of(taken, where, ours="ours", floor="floor")
ratio(taken["ours"], taken["floor"])                               # with a 95 % interval
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

_DRAWS = 1000


def wall_clock(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleaved(
    methods: Mapping[str, Callable[[int], object]],
    n_rounds: int,
    *,
    timer: Callable[[Callable[[], object]], float] = wall_clock,
    n_warm: int = 1,
) -> dict[str, list[float]]:
    """Seconds of `method(round)` by `timer`, one entry a round; `n_warm` rounds more come first, numbered below 0, and
    are not counted.
    """
    names = list(methods)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for at in range(-n_warm, n_rounds):
        turn = at % len(names)
        for name in (*names[turn:], *names[:turn]):
            seconds = timer(partial(methods[name], at))
            if at >= 0:
                taken[name].append(seconds)
    return taken


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and 99th percentile in microseconds."""
    return {
        "median_us": round(statistics.median(seconds) * 1e6, 1),
        "p99_us": round(float(np.percentile(seconds, 99)) * 1e6, 1),
        "n": len(seconds),
    }


def ratio(part: Sequence[float], whole: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two medians of one interleaved run, and its 95 % interval: rounds are drawn anew, both of a round
    together, as what else the machine did fell on both.
    """
    both = np.array([part, whole])
    drawn = np.random.default_rng(0).integers(both.shape[1], size=(_DRAWS, both.shape[1]))
    ratios = np.divide(*np.median(both[:, drawn], axis=-1))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return statistics.median(part) / statistics.median(whole), float(low), float(high)


def rows_of(
    taken: Mapping[str, Sequence[float]], where: Mapping[str, Any], *, ours: str, floor: str | None
) -> list[dict[str, Any]]:
    """One row a method: what, how long, and its ratio to ours and to the floor with intervals."""
    found = []
    for name, seconds in taken.items():
        row = {**where, "method": name, **summary(seconds)}
        for other, key in ((ours, "ratio_to_ours"), (floor, "ratio_to_floor")):
            row[key] = None
            if other is not None:
                row[key], *row[f"{key}_interval"] = (round(end, 3) for end in ratio(seconds, taken[other]))
        found.append(row)
    return found

"""Latency of calls that take turns in one process, in quantiles and paired ratios.

    timed = take_turns({"lora": lambda: a(ids), "bem": lambda: b(ids)}, n_rounds=100)
    timed["bem"].quantile(0.95)                     # Quantile: value, low, high, in seconds
    timed["bem"].ratios(timed["lora"])              # one for each round
    median_ratio(timed["bem"], timed["lora"])

Compare within a round: on a shared machine, minutes differ more than adapters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from probemon.adapters.bem.evaluation.statistics import Doubles, finite_numbers
from probemon.errors import ConfigError
from probemon.util.checks import check_callable, check_count, check_share, shown


@dataclass(frozen=True)
class Quantile:
    """A quantile and its 95 % interval; None with too few rounds."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Timed:
    """A call's wall-clock and CPU seconds in each round."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    def quantile(self, q: float) -> Quantile:
        """Return a quantile of wall-clock seconds."""
        low, high = quantile_interval(self.wall, q) or (None, None)
        return Quantile(float(np.quantile(self.wall, q)), low, high)

    def ratios(self, other: Timed) -> list[float]:
        """Return this call's seconds over another's, by round. Raises `ConfigError` if they took no turns."""
        if len(self.wall) != len(other.wall):
            raise ConfigError(f"{len(self.wall)} rounds and {len(other.wall)}: these calls did not take turns")
        return [a / b for a, b in zip(self.wall, other.wall, strict=True)]


def take_turns(
    calls: Mapping[str, Callable[[], object]], n_rounds: int, *, n_warm_up: int = 3, seed: int = 0
) -> dict[str, Timed]:
    """Time calls, once a round in random order by `seed`, after `n_warm_up` rounds. Waits for a GPU in use. Raises
    `ConfigError`.
    """
    check_count("n_rounds", n_rounds, least=1, remedy="give 1 or more")
    check_count("n_warm_up", n_warm_up, remedy="give 0 or more")
    if not isinstance(calls, Mapping):
        raise ConfigError(f"calls is {shown(calls)}: give functions to call, by name")
    if not calls:
        raise ConfigError("there is no call to time: give one or more by name")
    for name, call in calls.items():
        check_callable(f"calls[{name!r}]", call)
    rng, names = np.random.default_rng(seed), list(calls)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for at in range(-n_warm_up, n_rounds):
        for i in rng.permutation(len(names)):
            _wait()
            clock, processor = time.perf_counter(), time.process_time()
            calls[names[i]]()
            _wait()
            if at >= 0:
                seconds[names[i]].append((time.perf_counter() - clock, time.process_time() - processor))
    return {name: Timed(*zip(*pairs, strict=True)) for name, pairs in seconds.items()}


def median_ratio(timed: Timed, other: Timed) -> Quantile:
    """Return the median ratio of one call's seconds to another's."""
    ratios = timed.ratios(other)
    low, high = median_interval(ratios) or (None, None)
    return Quantile(float(np.median(ratios)), low, high)


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def quantile_interval(
    values: Sequence[float] | Doubles, q: float, *, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the bootstrap interval of a quantile (9,999 draws); None with fewer than five values beyond it. Raises
    `ConfigError`.
    """
    check_share("q", q)
    check_share("confidence", confidence)
    x = finite_numbers("values", values)
    if len(x) * min(q, 1 - q) < 5 - 1e-9:
        return None
    rng = np.random.default_rng(0)
    drawn = np.concatenate([np.quantile(x[rng.integers(0, len(x), (101, len(x)))], q, axis=1) for _ in range(99)])
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def median_interval(values: Sequence[float] | Doubles, *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of the median by order statistics. None for too few values, or if one is not finite."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n, tail = len(ordered), (1 - confidence) / 2
    # P(k-th smallest > median) = P(fewer than k heads).
    below, k = 0.0, 0
    while k < n and below < 1 - tail:
        below += math.comb(n, k) / 2**n
        k += 1
    if below < 1 - tail or not np.isfinite(ordered).all():
        return None
    return float(ordered[n - k]), float(ordered[k - 1])

"""Durations of forwards, controllers and tokens, with alerts on latency limits and memory spikes.

Measured in the generating thread; only `token` waits for the GPU:

- `forward`: a forward of the model, hooks included
- `controller`: a BEM controller, per forward
- `token`: between generated tokens; accepted drafts share it

Forwards in compiled code are not measured.
"""

from __future__ import annotations

import bisect
import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from probemon.adapters.routing.alerts import Alert, Memory
from probemon.adapters.routing.sketch import LogSketch
from probemon.adapters.routing.statistics import QUANTILES
from probemon.errors import ConfigError
from probemon.tracking.watched_threads import WatchedThreads
from probemon.util.checks import LARGEST, check_choice, check_count, check_number, check_share

KINDS = ("forward", "controller", "token")
SPIKE = "memory spike"
# Upper ends, 50 us to 105 s.
BUCKETS = tuple(5e-5 * 2**i for i in range(22))


@dataclass(frozen=True)
class LatencyLimit:
    """Alert if a quantile of durations of `kind` exceeds `seconds` in `in_a_row` windows of `window` durations.

    Cleared after as many windows below `clear_seconds` (default: 80 % of `seconds`). Raises `ConfigError`.
    """

    kind: str
    seconds: float
    quantile: float = 0.95
    clear_seconds: float | None = None
    window: int = 50
    in_a_row: int = 2

    def __post_init__(self) -> None:
        check_choice("a latency limit's kind", self.kind, KINDS)
        check_number("seconds", self.seconds, low=0, high=LARGEST, open_low=True, remedy="give a number over 0")
        check_share("quantile", self.quantile, remedy="give 0.95, say")
        clear = self.seconds * 0.8 if self.clear_seconds is None else self.clear_seconds
        remedy = f"give a number over 0 and under seconds ({self.seconds}), else it flaps"
        check_number("clear_seconds", clear, low=0, high=self.seconds, open_low=True, open_high=True, remedy=remedy)
        object.__setattr__(self, "clear_seconds", clear)
        for name in ("window", "in_a_row"):
            check_count(name, getattr(self, name), least=1, remedy="give 1 or more")

    @property
    def alert(self) -> str:
        """Name of its alerts."""
        return f"slow {self.kind}"


@dataclass(frozen=True, kw_only=True)
class MemorySpike:
    """Alert if memory in use exceeds the median of the last `window` looks `rise` times and by `least_bytes`.

    Cleared below `clear` times the median. Looks are taken every `every` forwards. Raises `ConfigError`.
    """

    rise: float = 1.5
    clear: float = 1.25
    least_bytes: int = 64 << 20
    window: int = 32
    every: int = 16

    def __post_init__(self) -> None:
        check_number("rise", self.rise, low=1, high=LARGEST, open_low=True, remedy="give a number over 1")
        remedy = f"give 1 or more, and less than rise ({self.rise}), else it flaps"
        check_number("clear", self.clear, low=1, high=self.rise, open_high=True, remedy=remedy)
        check_count("least_bytes", self.least_bytes, remedy="give 0 or more")
        check_count("window", self.window, least=3, remedy="give 3 or more")
        check_count("every", self.every, least=1, remedy="give 1 or more")


class Durations:
    """Durations of one kind: quantiles, bucket counts and limits."""

    def __init__(self, kind: str, limits: Sequence[LatencyLimit]) -> None:
        self.kind, self.sketch = kind, LogSketch()
        self.counts, self.total = [0] * (len(BUCKETS) + 1), 0.0
        self.limits = [_Limited(limit) for limit in limits if limit.kind == kind]

    def add(self, seconds: float, count: int = 1) -> list[Alert]:
        """Add a duration `count` times; return the alerts raised or cleared."""
        seconds = max(0.0, seconds)
        self.sketch.add(seconds, count)
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += count
        self.total += seconds * count
        return [alert for held in self.limits for _ in range(count) for alert in held.add(seconds, self.sketch.n)]

    def report(self) -> dict[str, Any]:
        """Return count and quantiles (None without any)."""
        n = self.sketch.n
        return {"n": n, **{name: self.sketch.quantile(q) if n else None for name, q in QUANTILES.items()}}


class _Held:
    """An alert that is raised, or cleared, after `in_a_row` values past a threshold."""

    def __init__(self, kind: str, metric: str, in_a_row: int = 1) -> None:
        self.kind, self.metric, self.in_a_row = kind, metric, in_a_row
        self.raised: Alert | None = None
        self._streak = 0

    def judge(self, value: float, raise_at: float, clear_at: float, at: int, *, matters: bool = True) -> list[Alert]:
        """Take a value, which raises the alert over `raise_at` if it `matters`, and clears it under `clear_at`."""
        threshold = raise_at if self.raised is None else clear_at
        past = value > threshold and matters if self.raised is None else value < threshold
        self._streak = self._streak + 1 if past else 0
        if self._streak < self.in_a_row:
            return []
        self._streak = 0
        alert = Alert(self.raised is None, self.kind, self.metric, None, value, threshold, at)
        self.raised = alert if alert.raised else None
        return [alert]


class _Limited(_Held):
    def __init__(self, limit: LatencyLimit) -> None:
        super().__init__(limit.alert, f"{limit.kind}_p{100 * limit.quantile:g}_seconds", limit.in_a_row)
        self.limit = limit
        self._window: list[float] = []

    def add(self, seconds: float, at: int) -> list[Alert]:
        limit = self.limit
        self._window.append(seconds)
        if len(self._window) < limit.window:
            return []
        value = float(np.quantile(self._window, limit.quantile, method="higher"))
        self._window = []
        assert limit.clear_seconds is not None
        return self.judge(value, limit.seconds, limit.clear_seconds, at)


class Spikes(_Held):
    """Memory in use against its running median."""

    def __init__(self, rule: MemorySpike) -> None:
        super().__init__(SPIKE, "memory_bytes")
        self.rule = rule
        self._looks: deque[int] = deque(maxlen=rule.window)

    def add(self, used: int, at: int) -> list[Alert]:
        """Add a look; return alerts raised or cleared."""
        rule, median = self.rule, statistics.median(self._looks) if self._looks else math.nan
        enough = len(self._looks) >= max(3, rule.window // 4)
        self._looks.append(used)
        if not enough:
            return []
        matters = used - median >= rule.least_bytes
        return self.judge(float(used), rule.rise * median, rule.clear * median, at, matters=matters)


class Latencies:
    """Durations and memory of a model while attached; calls `report(alerts)` on changes."""

    def __init__(
        self,
        host: nn.Module,
        controller: nn.Module | None,
        limits: Sequence[LatencyLimit],
        spike: MemorySpike | None,
        memory: Memory,
        report: Callable[[list[Alert]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._modules = {"forward": host, "controller": controller}
        self.kinds = {kind: Durations(kind, limits) for kind in KINDS if kind != "controller" or controller is not None}
        for limit in limits:
            if limit.kind not in self.kinds:
                raise ConfigError("a latency limit is for the controller, and no BEM adapter is watched: give bem=")
        self.spikes = None if spike is None else Spikes(spike)
        self._held: list[_Held] = [held for durations in self.kinds.values() for held in durations.limits]
        self._held += [] if self.spikes is None else [self.spikes]
        self._memory, self._report, self._clock = memory, report, clock
        self._begun, self._lock, self._stack = threading.local(), threading.Lock(), ExitStack()
        self._n_forwards, self._threads = 0, WatchedThreads(one_thread=False)
        self._last: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def attach(self, *, one_thread: bool = False) -> None:
        """Hook the modules. `one_thread`: measure the calling thread only."""
        self._threads = WatchedThreads(one_thread)
        self._threads.attach()
        with ExitStack() as stack:
            for kind, module in self._modules.items():
                if module is not None:
                    stack.callback(module.register_forward_pre_hook(_hook(self._begin, kind)).remove)
                    stack.callback(module.register_forward_hook(_hook(self._end, kind)).remove)
            self._stack = stack.pop_all()

    def detach(self) -> None:
        """Remove the hooks."""
        self._stack.close()

    def tokens(self, recording: Any, n: int) -> None:
        """Note that a generation advanced by `n` tokens per row (0: prompt)."""
        now, last = self._clock(), self._last.get(recording)
        self._last[recording] = now
        if n and last is not None:
            self._add("token", (now - last) / n, n)

    @property
    def raised(self) -> list[Alert]:
        """Alerts in force."""
        with self._lock:
            return [held.raised for held in self._held if held.raised is not None]

    @property
    def alert_kinds(self) -> set[str]:
        """Possible alert kinds."""
        return {held.kind for held in self._held}

    def as_dict(self) -> dict[str, Any]:
        """Return each kind's count and quantiles."""
        with self._lock:
            return {kind: durations.report() for kind, durations in self.kinds.items()}

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        """Return by kind the counts of `BUCKETS` (and one beyond), and the sum."""
        with self._lock:
            return {kind: (list(durations.counts), durations.total) for kind, durations in self.kinds.items()}

    def _begin(self, kind: str) -> None:
        if not self._threads.in_other:
            setattr(self._begun, kind, self._clock())

    def _end(self, kind: str) -> None:
        begun = getattr(self._begun, kind, None)
        if begun is None:
            return
        setattr(self._begun, kind, None)
        self._add(kind, self._clock() - begun, 1)
        if kind == "forward" and self.spikes is not None:
            with self._lock:
                self._n_forwards += 1
                n = self._n_forwards
            if n % self.spikes.rule.every == 0:
                used, _ = self._memory()
                with self._lock:
                    alerts = self.spikes.add(used, n)
                self._report(alerts)

    def _add(self, kind: str, seconds: float, n: int) -> None:
        with self._lock:
            alerts = self.kinds[kind].add(seconds, n)
        self._report(alerts)


def _hook(function: Callable[[str], None], kind: str) -> Callable[..., None]:
    def run(module: nn.Module, *rest: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            function(kind)

    return run

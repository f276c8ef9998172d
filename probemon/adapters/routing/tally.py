"""Tally: running statistics and alerts for one kind of router."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from probemon.adapters.bem.memory import gpu_memory
from probemon.adapters.routing.alerts import DEFAULT_RULES, Alert, AlertRule, Alerts, Baseline
from probemon.adapters.routing.decisions import Changes, Decisions, Stream
from probemon.adapters.routing.statistics import RoutingStatistics
from probemon.util.host_memory import process_memory

WINDOW = 256  # tokens; rule windows are multiples of it
Memory = Callable[[], tuple[int, int]]  # bytes in use, total bytes


class Tally:
    """Statistics and alerts of S streams that decide about the same tokens.

    - `codes`: streams give codes, not distributions.
    - `memory`: called once a window.
    - `baseline`: reference for drifts.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        n_experts: int,
        n_chosen: int = 1,
        *,
        codes: bool = False,
        rules: Sequence[AlertRule] = DEFAULT_RULES,
        window: int = WINDOW,
        memory: Memory = lambda: (0, 0),
        baseline: Baseline | None = None,
    ) -> None:
        self.streams = list(streams)
        self.alerts = Alerts(rules, self.streams, n_experts, n_chosen, window, baseline)
        self.memory_watermark_bytes = 0
        self._memory, self._size = memory, window
        self._past = RoutingStatistics(len(self.streams), n_experts, n_chosen, codes=codes)
        self._window = self._past.empty()

    def add(self, decisions: Decisions, changes: Changes, latency_us: float) -> list[Alert]:
        """Add decisions about n tokens, each made in `latency_us`; return the alerts raised or cleared."""
        alerts: list[Alert] = []
        begin, n = 0, len(decisions)
        while begin < n:
            end = min(n, begin + self._size - self._window.n_tokens)
            if begin == 0 and end == n:
                self._window.add(decisions, changes)
            else:
                self._window.add(decisions.take(np.arange(begin, end)), changes.take(slice(begin, end)))
            self._window.latency.add(latency_us, (end - begin) * len(self.streams))
            begin = end
            alerts += self.alerts.add_partial(self._window)
            if self._window.n_tokens == self._size:
                used, most = self._memory()
                self.memory_watermark_bytes = max(self.memory_watermark_bytes, used)
                alerts += self.alerts.add(self._window, used / most if most else float("nan"))
                self._past.merge(self._window)
                self._window = self._window.empty()
        return alerts

    def total(self) -> RoutingStatistics:
        """Return the statistics so far."""
        total = self._past.empty()
        total.merge(self._past)
        total.merge(self._window)
        return total


def memory_of(device: torch.device) -> Memory:
    """Return a function that gives bytes in use and total bytes, of a GPU or this process."""
    return gpu_memory(device) if device.type == "cuda" else process_memory

"""RoutingSettings: how routing is watched, and the baseline of its drifts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from probemon.adapters.routing.alerts import DEFAULT_RULES, AlertRule
from probemon.adapters.routing.latency import LatencyLimit, MemorySpike
from probemon.adapters.routing.tally import WINDOW, Memory
from probemon.errors import ConfigError
from probemon.util.checks import check_bool, check_count, check_settings


@dataclass(frozen=True)
class RoutingSettings:
    """How routing is watched.

    - `rules`: for alerts.
    - `window`: tokens of their smallest windows.
    - `bem`: what `attach_bem` returned, or its controller.
    - `states`: whether the states of recurrent layers are followed (norm, growth, what is new), not their steps alone:
      it costs about as much as the host's own recurrence.
    - `run_id`: stands in every record; else one is made.
    - `memory`: a function that returns bytes in use and bytes there are; else the GPU's or the process's.
    - `baseline`: what drifts are measured from: the report of an earlier run, or the file that `save_baseline` wrote.
      A drift without one, or after `reset_baseline`, is measured from the first windows without alerts.
    - `limits`: how long forwards, the controller and tokens may take, before that is an alert.
    - `spike`: when a rise of memory is one; None for never.
    - `clock`: returns seconds.
    """

    rules: tuple[AlertRule, ...] = DEFAULT_RULES
    window: int = WINDOW
    bem: Any = None
    states: bool = False
    run_id: str = ""
    memory: Memory | None = None
    baseline: Any = None
    limits: tuple[LatencyLimit, ...] = ()
    spike: MemorySpike | None = MemorySpike()
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "window", check_count("window", self.window, least=1, remedy="it counts tokens, so give 1 or more")
        )
        check_bool("states", self.states)
        if self.memory is not None and not callable(self.memory):
            raise ConfigError(f"memory is {self.memory!r}: give what returns bytes in use and bytes there are")
        if not isinstance(self.rules, (tuple, list)):
            raise ConfigError(f"rules is {self.rules!r}: give a tuple of rules")
        if not isinstance(self.limits, (tuple, list)) or not all(isinstance(x, LatencyLimit) for x in self.limits):
            raise ConfigError(
                f"limits is {self.limits!r}: give a tuple of LatencyLimit(...) of probemon.adapters.routing.latency"
            )
        if self.spike is not None and not isinstance(self.spike, MemorySpike):
            raise ConfigError(
                f"spike is {self.spike!r}: give MemorySpike(...) of probemon.adapters.routing.latency, or None"
            )
        if not callable(self.clock):
            raise ConfigError(f"clock is {self.clock!r}: give what returns seconds, such as time.perf_counter")
        for rule in self.rules:
            if not isinstance(rule, AlertRule):
                raise ConfigError(
                    f"{rule!r} is no rule: give AlertRule(...) of probemon.adapters.routing.alerts, or leave rules out"
                )

    @classmethod
    def by_name(cls, **settings: Any) -> RoutingSettings:
        """Return settings by keyword. Raises `UnknownSetting`, which names all that there are."""
        check_settings(cls, settings, "routing")
        return cls(**settings)

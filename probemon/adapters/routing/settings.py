"""Settings of routing telemetry."""

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
    """Settings of routing telemetry.

    - `rules`: alert rules; `window`: tokens of their smallest windows.
    - `bem`: the result of `attach_bem`, or its controller.
    - `states`: follow states of recurrent layers; costs about as much as their own recurrence.
    - `run_id`: written to every record.
    - `memory`: returns bytes in use and total bytes; default: of the GPU or process.
    - `baseline`: reference for drifts: a report, or a file of `save_baseline`; default: the first windows without
      alerts.
    - `limits`, `spike`: latency and memory rules.
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
            raise ConfigError(f"memory is {self.memory!r}: give a function that returns bytes in use and total bytes")
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
            raise ConfigError(
                f"clock is {self.clock!r}: give a function that returns seconds, such as time.perf_counter"
            )
        for rule in self.rules:
            if not isinstance(rule, AlertRule):
                raise ConfigError(
                    f"{rule!r} is not a rule: give AlertRule(...) of probemon.adapters.routing.alerts, or leave"
                    " rules out"
                )

    @classmethod
    def by_name(cls, **settings: Any) -> RoutingSettings:
        """Return settings by keyword. Raises `UnknownSetting` for a typo."""
        check_settings(cls, settings, "routing")
        return cls(**settings)

"""Settings of routing telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from probemon.adapters.routing.alerts import DEFAULT_RULES, WINDOW, AlertRule
from probemon.adapters.routing.latency import LatencyLimit, MemorySpike
from probemon.errors import ConfigError
from probemon.util.checks import check_bool, check_count


@dataclass(frozen=True)
class RoutingSettings:
    """Settings of routing telemetry.

    - `rules`: alert rules; `window`: tokens of their smallest windows.
    - `bem`: the result of `attach_bem`, or its controller.
    - `states`: follow states of recurrent layers; costs about as much as their own recurrence.
    - `run_id`: written to every record.
    - `baseline`: reference for drifts: a report, or a file of `save_baseline`; default: the first windows without
      alerts.
    - `limits`, `spike`: latency and memory rules.
    """

    rules: tuple[AlertRule, ...] = DEFAULT_RULES
    window: int = WINDOW
    bem: Any = None
    states: bool = False
    run_id: str = ""
    baseline: Any = None
    limits: tuple[LatencyLimit, ...] = ()
    spike: MemorySpike | None = MemorySpike()

    def __post_init__(self) -> None:
        window = check_count("window", self.window, least=1, remedy="it counts tokens, so give 1 or more")
        object.__setattr__(self, "window", window)
        check_bool("states", self.states)
        for name, values, kind in (("rules", self.rules, AlertRule), ("limits", self.limits, LatencyLimit)):
            if not isinstance(values, (tuple, list)) or not all(isinstance(one, kind) for one in values):
                raise ConfigError(f"{name} is {values!r}: give a tuple of {kind.__name__}(...) of {kind.__module__}")
        if self.spike is not None and not isinstance(self.spike, MemorySpike):
            raise ConfigError(f"spike is {self.spike!r}: give MemorySpike(...) of {MemorySpike.__module__}, or None")

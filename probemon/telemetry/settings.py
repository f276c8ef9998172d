"""RoutingSettings: how routing is watched, and the baseline of its drifts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from probemon.core.checks import check_count, check_settings
from probemon.errors import ConfigError
from probemon.telemetry.alerts import DEFAULT_RULES, Rule
from probemon.telemetry.tally import WINDOW, Memory


@dataclass(frozen=True)
class RoutingSettings:
    """How routing is watched.

    - `rules`: for alerts.
    - `window`: tokens of their smallest windows.
    - `bem`: what `attach_bem` returned, or its controller.
    - `run_id`: stands in every record; else one is made.
    - `memory`: a function that returns bytes in use and bytes there are; else the GPU's or the process's.
    - `baseline`: what drifts are measured from: the report of an earlier run, or the file that `save_baseline` wrote.
      A drift without one, or after `reset_baseline`, is measured from the first windows without alerts.
    """

    rules: tuple[Rule, ...] = DEFAULT_RULES
    window: int = WINDOW
    bem: Any = None
    run_id: str = ""
    memory: Memory | None = None
    baseline: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "window", check_count("window", self.window, least=1, remedy="it counts tokens, so give 1 or more")
        )
        if self.memory is not None and not callable(self.memory):
            raise ConfigError(f"memory is {self.memory!r}: give what returns bytes in use and bytes there are")
        if not isinstance(self.rules, (tuple, list)):
            raise ConfigError(f"rules is {self.rules!r}: give a tuple of rules")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ConfigError(
                    f"{rule!r} is no rule: give Rule(...) of probemon.telemetry.alerts, or leave rules out"
                )

    @classmethod
    def by_name(cls, **settings: Any) -> RoutingSettings:
        """Return settings by keyword. Raises `UnknownSetting`, which names all that there are."""
        check_settings(cls, settings, "routing")
        return cls(**settings)

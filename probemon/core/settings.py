"""How a hierarchy is descended: the settings, each with its default.

CascadeConfig.of({"keep_top_k": 20})          # an unknown one is an UnknownSetting that names the nearest
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from probemon.errors import ConfigError
from probemon.util.checks import check_bool, check_count, check_mapping, check_number, check_settings, is_int, shown

_LISTS = ("base_layers", "always_on", "include", "exclude")


@dataclass(frozen=True)
class CascadeConfig:
    """How the hierarchy is descended. What is not given is what the pack recommends, else the default.

    `base_layers`: levels whose probes are scored at every token.
    `load_threshold`: the score over which a concept opens, so that its children are scored: a number; "exact", below
    which nothing can fire (packs of the path rule); "calibrated", the pack's own; or "auto", what the pack recommends,
    else "exact" where it can be had, else 0.3.
    `keep_top_k`: concepts besides the base that a generated token takes over from the one before it, the best first.
    `aggressive_pruning`: False takes over all that were active.
    `max_loaded_probes`: probes active at a token at most; what does not fit is dropped, and counted.
    `unload_threshold`: where probes were dropped, those that score under it are not taken over.
    `always_on`: concepts, by name, id or number, that are scored at every token. Those of rules need not be named.
    `include`, `exclude`: concepts, also by patterns with `*`: only these branches are watched (with what is above
    them), and without those (with what is below them). `depth`: of these branches so many levels below at most.
    `report_top_k`: how many concepts `scores.top(t)` lists where it is not told.
    `max_rounds`: how often a token may open concepts; None goes on until nothing more opens.
    """

    base_layers: tuple[int, ...] = (0,)
    load_threshold: float | str = "auto"
    keep_top_k: int = 30
    aggressive_pruning: bool = True
    max_loaded_probes: int = 500
    unload_threshold: float = 0.1
    always_on: tuple[str | int, ...] = ()
    include: tuple[str | int, ...] = ()
    exclude: tuple[str | int, ...] = ()
    depth: Mapping[str, int] = field(default_factory=dict)
    report_top_k: int = 10
    max_rounds: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CascadeConfig:
        """From keywords; an unknown one is an `UnknownSetting` that names the nearest."""
        check_settings(cls, settings)
        for key in _LISTS:
            if key in settings and (isinstance(settings[key], str) or not hasattr(settings[key], "__iter__")):
                raise ConfigError(f"{key} is {settings[key]!r}: give a list, even of one")
        tuples = {key: tuple(settings[key]) for key in _LISTS if key in settings}
        return cls(**{**settings, **tuples})

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            name: check_count(name, getattr(self, name), remedy="it counts probes, so give 0 or more")
            for name in ("keep_top_k", "report_top_k")
        }
        checked |= {
            "max_loaded_probes": check_count(
                "max_loaded_probes", self.max_loaded_probes, least=1, remedy="it counts probes, so give 1 or more"
            ),
            "aggressive_pruning": check_bool("aggressive_pruning", self.aggressive_pruning),
            "unload_threshold": check_number("unload_threshold", self.unload_threshold, infinite=True),
            "load_threshold": check_load_threshold(self.load_threshold),
        }
        if self.max_rounds is not None:
            checked["max_rounds"] = check_count(
                "max_rounds", self.max_rounds, remedy="give 0 or more, or None for no limit"
            )
        depth = check_mapping("depth", self.depth)
        remedy = "it counts levels below the concept, so give 0 or more"
        checked["depth"] = {name: check_count(f"depth of {name!r:.80}", n, remedy=remedy) for name, n in depth.items()}
        if not all(is_int(level) and level >= 0 for level in self.base_layers):
            raise ConfigError(
                f"base_layers is {shown(self.base_layers)}: give levels of the concept hierarchy, 0 or more"
            )
        for name, value in {**checked, "base_layers": tuple(map(int, self.base_layers))}.items():
            object.__setattr__(self, name, value)


def check_load_threshold(value: object) -> float | str:
    """`load_threshold` as a number or one of its words; as a setting, and as what a pack recommends."""
    if isinstance(value, str) and value in ("auto", "exact", "calibrated"):
        return value
    return check_number("load_threshold", value, infinite=True, remedy="give a number, 'auto', 'exact' or 'calibrated'")

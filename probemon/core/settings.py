"""CascadeConfig: settings of a descent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from probemon.errors import ConfigError
from probemon.util.checks import check_bool, check_count, check_mapping, check_number, check_settings, is_int, shown

_LISTS = ("base_layers", "always_on", "include", "exclude")


Concepts = Sequence[str | int | re.Pattern[str]]


class CascadeSettings(TypedDict, total=False):
    """The fields of a `CascadeConfig`, for `DynamicProbeManager(pack, **settings)`; each is optional."""

    base_layers: Sequence[int]
    load_threshold: float | str
    keep_top_k: int
    aggressive_pruning: bool
    max_loaded_probes: int
    unload_threshold: float
    always_on: Sequence[str | int]
    include: Concepts
    exclude: Concepts
    depth: Mapping[str, int]
    report_top_k: int
    max_rounds: int | None


@dataclass(frozen=True)
class CascadeConfig:
    """How the hierarchy is descended. Packs may recommend other defaults.

    - `base_layers`: levels scored at every token.
    - `load_threshold`: score above which a concept's children are scored: a number; "exact", below which nothing can
      fire (path rule only); "calibrated", the pack's own; "auto", recommended, else "exact" if possible, else 0.3.
    - `keep_top_k`: best non-base concepts that a generated token takes over from the previous one.
    - `aggressive_pruning`: if False, all active ones are taken over.
    - `max_loaded_probes`: maximum active probes per token; the rest is dropped and counted.
    - `unload_threshold`: after a drop, lower scores are not taken over.
    - `always_on`: concepts (name, id or number) scored at every token, besides those of rules.
    - `include`, `exclude`: branches, may be patterns with `*`; `depth`: maximum levels below a concept.
    - `report_top_k`: default length of `scores.top(t)`.
    - `max_rounds`: how often a token may open concepts; None for no limit.
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
        """From keywords. Raises `UnknownSetting` for a typo."""
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
    """Return a `load_threshold` if it is a number, "auto", "exact" or "calibrated". Raises `ConfigError`."""
    if isinstance(value, str) and value in ("auto", "exact", "calibrated"):
        return value
    return check_number("load_threshold", value, infinite=True, remedy="give a number, 'auto', 'exact' or 'calibrated'")

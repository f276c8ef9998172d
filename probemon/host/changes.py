"""Detects changes of a watched model: adapters, settings, weights.

marks = ModelMarks(model)
mark = marks.now()                   # the first call takes milliseconds
mark.switched()                      # adapters only; microseconds, for every forward
marks.now().differs(mark)
marks.now().changes(mark)            # ["model.norm.variance_epsilon was 1e-05, is 0.1"]
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from probemon.core.scores import ModelState
from probemon.host.adapters import memories_in, memories_on, own_of
from probemon.host.internals import (
    Members,
    adapter_scales,
    adapter_switches,
    adapters_in_force,
    switches_adapters,
    write_marks,
)
from probemon.host.model import model_state
from probemon.host.module_settings import ModuleSettings, Settings, differing


@dataclass(frozen=True)
class ModelMark:
    """A model's state at one time.

    - `writes`: hash of addresses and write counts of weights, attached adapters and memories
    - `adapters`: those that PEFT's layers ran, and their scales
    - `switches`: active adapters of the PEFT layers `tuners`
    """

    state: ModelState
    writes: int
    settings: Settings
    adapters: Settings
    tuners: tuple[nn.Module, ...]
    switches: list[Any]

    def switched(self) -> bool:
        """True if other adapters are on now."""
        return bool(self.tuners) and adapter_switches(self.tuners) != self.switches

    def differs(self, other: ModelMark) -> bool:
        """True if state, settings or weights differ."""
        return self.state != other.state or self.writes != other.writes or bool(self._set_otherwise(other))

    def changes(self, before: ModelMark) -> list[str]:
        """Return a text for each change since `before`."""
        states = [(field.name, getattr(before.state, field.name), getattr(self.state, field.name)) for field in _STATE]
        return [
            *(f"{name} was {was}, is {value}" for name, was, value in states if was != value),
            *(["weights were written to or replaced"] if self.writes != before.writes else []),
            *self._set_otherwise(before),
        ]

    def _set_otherwise(self, before: ModelMark) -> list[str]:
        return [*differing(before.adapters, self.adapters), *differing(before.settings, self.settings)]


_STATE = fields(ModelState)


class ModelMarks:
    """Current marks of a model. Thread-safe."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: tuple[Members, ModelMark, list[Any], ModuleSettings, dict[str, nn.Module]] | None = None

    def now(self) -> ModelMark:
        """Return the current mark; the same object if nothing changed and PEFT is not used."""
        last, roots = self._last, [self._model, *_beside(self._model)]
        if last is not None and not last[0].same(roots):
            last = None
        members = Members(roots) if last is None else last[0]
        memories = memories_in(members.modules) if last is None else last[2]
        modules = ModuleSettings(self._model) if last is None else last[3]
        settings = modules.now()
        writes = hash((*write_marks(members.weights), *(memory.closed for memory in memories)))
        if last is not None and last[1].writes == writes and last[1].settings is settings and not last[1].tuners:
            return last[1]
        tuners = _tuners_of(self._model) if last is None else last[4]
        layers = tuple(tuners.values())
        mark = ModelMark(
            model_state(self._model), writes, settings, _adapters_of(tuners), layers, adapter_switches(layers)
        )
        self._last = members, mark, memories, modules, tuners
        return mark


def _tuners_of(model: Any) -> dict[str, nn.Module]:
    """Return PEFT's layers by place."""
    return {place: module for place, module in model.named_modules() if switches_adapters(module)}


def _adapters_of(tuners: dict[str, nn.Module]) -> Settings:
    """Return each PEFT layer's adapters, for any row, and scales."""
    adapters: dict[tuple[str, str], Any] = {}
    for place, layer in tuners.items():
        enabled: Any = not layer.disable_adapters
        adapters[place, "adapters"] = tuple(adapters_in_force(layer)) if enabled else ()
        adapters[place, "merged_adapters"] = tuple(getattr(layer, "merged_adapters", ())) if enabled else ()
        scales = adapter_scales(layer) if enabled else {}
        adapters |= {(place, f"scaling[{name!r}]"): scale for name, scale in scales.items()}
    return adapters


def _beside(model: Any) -> list[Any]:
    """Return attached objects that are not modules: adapter, memories."""
    adapter, memories = own_of(model), [one.memory for one in memories_on(model)]
    return memories if adapter is None else [*memories, adapter]

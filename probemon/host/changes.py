"""Whether a host became another while it was watched: other adapters or settings, or weights that were written to.

marks = HostMarks(model)
mark = marks.now()                   # what it is now; the first time a walk over all modules, which takes milliseconds
mark.switched()                      # in every forward: whether its adapters were switched, in microseconds
marks.now().differs(mark)            # whether it is another than it was; a fraction of the first time where it is not
marks.now().changes(mark)            # ["model.norm.variance_epsilon was 1e-05, is 0.1"]
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from probemon.core.scores import HostState
from probemon.host.adapters import memories_in, memories_on, own_of
from probemon.host.internals import (
    Members,
    adapter_scales,
    adapter_switches,
    adapters_in_force,
    switches_adapters,
    write_marks,
)
from probemon.host.model import host_state
from probemon.host.module_settings import ModuleSettings, Settings, differing


@dataclass(frozen=True)
class HostMark:
    """What a host was. `writes`: where its parameters and the buffers of its checkpoint lie, and those of what is put
    on it without being a module of it (an adapter of `probemon.adapters.bem` that steers, memories), how often each was
    written to in place, and which memories of its own are closed.

    `settings`: what its modules were set to beside. `adapters`: what each of PEFT's layers ran, and by what it scales
    all that it has. `switches`: which adapters each of these layers, `tuners`, had switched on.
    """

    state: HostState
    writes: int
    settings: Settings
    adapters: Settings
    tuners: tuple[nn.Module, ...]
    switches: list[Any]

    def switched(self) -> bool:
        """Whether other adapters are on now, in layers that there were already."""
        return bool(self.tuners) and adapter_switches(self.tuners) != self.switches

    def differs(self, other: HostMark) -> bool:
        """Whether the host was another then: its state, its settings, or what its weights are."""
        return self.state != other.state or self.writes != other.writes or bool(self._set_otherwise(other))

    def changes(self, before: HostMark) -> list[str]:
        """Say in what the host is another than `before`; nothing where it is the same."""
        states = [(field.name, getattr(before.state, field.name), getattr(self.state, field.name)) for field in _STATE]
        return [
            *(f"{name} was {was}, is {value}" for name, was, value in states if was != value),
            *(["weights were written to or replaced"] if self.writes != before.writes else []),
            *self._set_otherwise(before),
        ]

    def _set_otherwise(self, before: HostMark) -> list[str]:
        return [*differing(before.adapters, self.adapters), *differing(before.settings, self.settings)]


_STATE = fields(HostState)


class HostMarks:
    """What a host is, asked again and again. Any thread may ask."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: tuple[Members, HostMark, list[Any], ModuleSettings, dict[str, nn.Module]] | None = None

    def now(self) -> HostMark:
        """Return what the host is now: the mark of last time where nothing was written to, and no adapters of PEFT are
        on it. All else that a state says comes with other modules or parameters.
        """
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
        mark = HostMark(
            host_state(self._model), writes, settings, _adapters_of(tuners), layers, adapter_switches(layers)
        )
        self._last = members, mark, memories, modules, tuners
        return mark


def _tuners_of(model: Any) -> dict[str, nn.Module]:
    """Return PEFT's layers by their places."""
    return {place: module for place, module in model.named_modules() if switches_adapters(module)}


def _adapters_of(tuners: dict[str, nn.Module]) -> Settings:
    """Return what each of PEFT's layers runs, and its scales: also of adapters that only some rows of a call run."""
    adapters: dict[tuple[str, str], Any] = {}
    for place, layer in tuners.items():
        on: Any = not layer.disable_adapters
        adapters[place, "adapters"] = tuple(adapters_in_force(layer)) if on else ()
        adapters[place, "merged_adapters"] = tuple(getattr(layer, "merged_adapters", ())) if on else ()
        scales = adapter_scales(layer) if on else {}
        adapters |= {(place, f"scaling[{name!r}]"): scale for name, scale in scales.items()}
    return adapters


def _beside(model: Any) -> list[Any]:
    """Return what is put on a host without being a module of it: the adapter that steers, and memories."""
    own, memories = own_of(model), [one.memory for one in memories_on(model)]
    return memories if own is None else [*memories, own]

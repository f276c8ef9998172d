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
from probemon.host.internals import Members, adapter_switches, switches_adapters, write_marks
from probemon.host.model import host_state
from probemon.host.module_settings import ModuleSettings, Settings, differing


@dataclass(frozen=True)
class HostMark:
    """What a host was. `writes`: where its parameters and the buffers of its checkpoint lie, and those of what is put
    on it without being a module of it (an adapter of `probemon.bem` that steers, memories), how often each was written
    to in place, and which memories of its own are closed.

    `settings`: what its modules were set to beside. `switches`: which adapters each of `tuners`, PEFT's layers, had
    switched on.
    """

    state: HostState
    writes: int
    settings: Settings
    tuners: tuple[nn.Module, ...]
    switches: list[Any]

    def switched(self) -> bool:
        """Whether other adapters are on now, in layers that there were already."""
        return bool(self.tuners) and adapter_switches(self.tuners) != self.switches

    def differs(self, other: HostMark) -> bool:
        """Whether the host was another then: its state, its settings, or what its weights are."""
        return (
            self.state != other.state or self.writes != other.writes or bool(differing(other.settings, self.settings))
        )

    def changes(self, before: HostMark) -> list[str]:
        """Say in what the host is another than `before`; nothing where it is the same."""
        states = [(field.name, getattr(before.state, field.name), getattr(self.state, field.name)) for field in _STATE]
        return [
            *(f"{name} was {was}, is {value}" for name, was, value in states if was != value),
            *(["weights were written to or replaced"] if self.writes != before.writes else []),
            *differing(before.settings, self.settings),
        ]


_STATE = fields(HostState)


class HostMarks:
    """What a host is, asked again and again. Any thread may ask."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: tuple[Members, HostMark, list[Any], ModuleSettings] | None = None

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
        tuners = tuple(module for module in members.modules if switches_adapters(module))
        mark = HostMark(host_state(self._model), writes, settings, tuners, adapter_switches(tuners))
        self._last = members, mark, memories, modules
        return mark


def _beside(model: Any) -> list[Any]:
    """Return what is put on a host without being a module of it: the adapter that steers, and memories."""
    own, memories = own_of(model), [one.memory for one in memories_on(model)]
    return memories if own is None else [*memories, own]

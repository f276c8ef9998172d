"""Whether a host became another while it was watched: other adapters, or weights that were written to.

mark = HostMark.of(model)                # what it is now; a walk over all modules, which takes milliseconds
mark.switched()                          # in every forward: whether its adapters were switched, in microseconds
HostMark.of(model, mark).differs(mark)   # whether it is another than it was; in less than half the time where it is not
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from probemon.core.scores import HostState
from probemon.host.adapters import own_of
from probemon.host.internals import adapter_switches, all_modules, switches_adapters, write_marks
from probemon.host.model import host_state


@dataclass(frozen=True)
class HostMark:
    """What a host was. `writes`: where its parameters lie, and those of what is put on it without being a module of it
    (an adapter of `probemon.bem` that steers, memories), and how often each was written to in place.

    `switches`: which adapters each of `tuners`, PEFT's layers, had switched on.
    """

    state: HostState
    writes: int
    tuners: tuple[nn.Module, ...]
    switches: list[Any]

    @staticmethod
    def of(model: Any, before: HostMark | None = None) -> HostMark:
        """Return what a host is now: `before` itself where nothing was written to and no adapters of PEFT are on it.

        All else that a state says comes with other parameters: modules that take the place of others, another dtype.
        """
        modules = all_modules(model)
        written = [*modules, *(part for one in _beside(model) for part in all_modules(one))]
        writes = hash(tuple(write_marks(module._parameters for module in written if module._parameters)))
        if before is not None and before.writes == writes and not before.tuners:
            return before
        tuners = tuple(module for module in modules if switches_adapters(module))
        return HostMark(host_state(model), writes, tuners, adapter_switches(tuners))

    def switched(self) -> bool:
        """Whether other adapters are on now, in layers that there were already."""
        return bool(self.tuners) and adapter_switches(self.tuners) != self.switches

    def differs(self, other: HostMark) -> bool:
        """Whether the host was another then: its state, or what its weights are."""
        return self.state != other.state or self.writes != other.writes


def _beside(model: Any) -> list[Any]:
    """Return what is put on a host without being a module of it: the adapter that steers, and memories."""
    own, memories = own_of(model), sys.modules.get("probemon.models.ltm.attached")
    # Where that was never imported, there are none; importing it would make its host known to transformers.
    attached = [] if memories is None else [one.memory for one in memories.attached_memories(model)]
    return attached if own is None else [*attached, own]

"""SlotMemories: the reads of a host's memory slots, as a source of routing: which slots, how much, and what is in them.

sources = slot_memories(model)                  # of its own layers and of `attach_memory`, by number of slots
sources[0].decisions({site: states})            # top_idx: slots; top_position, top_token: what each was written at
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.errors import NotSupportedHost
from probemon.host.model import find_layers
from probemon.host.site import Site
from probemon.telemetry.decisions import SLOTS, Decisions, Singles, Stream


def slot_memories(model: Any) -> list[SlotMemories]:
    """Return the memories of an unwrapped host's layers, and those that are attached to it, by number of slots."""
    from probemon.models.ltm.attached import attached_memories
    from probemon.models.ltm.memory import SlotMemory

    memories: list[tuple[str, int, Any]] = []
    for number, layer in enumerate(find_layers(model)[1]):
        own = (module for module in layer.modules() if isinstance(module, SlotMemory))
        memories += ((f"memory.{number}", number, module) for module in own)
    memories += ((f"memory.{one.number}", one.number, one.memory) for one in attached_memories(model))
    by_slots: dict[int, list[tuple[str, int, Any]]] = {}
    for site, number, module in memories:
        by_slots.setdefault(module.shape.slots, []).append((site, number, module))
    return [SlotMemories(alike) for alike in by_slots.values()]


class SlotMemories:
    """Memories of M slots each. A token's read is a distribution over them and the null slot, which is number M.

    Of the slots that are read most, and the null slot, `top_idx` and `top_w` hold the number and p, `top_position` and
    `top_token` which token the slot was written at: its place among the real tokens of its row, from 0, and its id; -1
    for a slot that holds nothing, and the null slot.
    """

    kind, codes, n_chosen = SLOTS, False, 1

    def __init__(self, memories: Sequence[tuple[str, int, Any]]) -> None:
        self._n_slots = memories[0][2].shape.slots
        self.n_experts = self._n_slots + 1
        self.sites = [Site(site, module, self._read) for site, _, module in memories]
        self.streams = [Stream(SLOTS, site, layer) for site, layer, _ in memories]

    def _read(self, output: Any) -> Tensor:
        if output.top_slot is None:
            raise NotSupportedHost(
                "the memory is in training mode, in which it does not say what it reads: call model.eval()"
            )
        n_slots = output.reads.shape[-1] - 1
        if n_slots != self._n_slots:
            raise NotSupportedHost(
                f"the memory has {n_slots} slots, and had {self._n_slots} when its watching began: reduce_slots and"
                " grow_slots are for before the block"
            )
        parts = (output.reads, output.top_slot, output.top_position, output.top_token, output.top_p)
        return torch.cat([part.float() for part in parts], dim=-1)

    def decisions(self, states: Mapping[str, Singles]) -> Decisions:
        """Return what n tokens read, a stream for each memory."""
        packed, m = np.stack([states[site.name] for site in self.sites]), self._n_slots
        raw = np.concatenate([packed[:, :, 1 : m + 1], packed[:, :, :1]], axis=-1)
        slot, position, token, p = np.split(packed[:, :, m + 1 :], 4, axis=-1)
        null = np.full_like(slot[:, :, :1], m)
        top_w = np.concatenate([p, packed[:, :, :1]], axis=-1)
        order = np.argsort(-top_w, axis=-1, kind="stable")  # of equal ones the lower slot, and the null slot last

        def ordered(values: Singles, of_null: Singles) -> Any:
            whole = np.concatenate([values, of_null], axis=-1)
            with np.errstate(invalid="ignore"):
                return np.take_along_axis(whole, order, axis=-1).astype(np.int64)

        wide = raw.astype(np.float64)
        return Decisions.of(
            raw,
            wide / wide.sum(axis=-1, keepdims=True),
            ordered(slot, null),
            np.take_along_axis(top_w, order, axis=-1),
            top_position=ordered(position, np.full_like(null, -1)),
            top_token=ordered(token, np.full_like(null, -1)),
        )

"""SlotMemories: the reads of a host's memory slots, as a source of routing: which slots, how much, and what is in them.

sources = slot_memories(model)                  # of its own layers and of `attach_memory`, by number of slots
sources[0].decisions({site: states})            # top_idx: slots; top_position, top_token: what each was written at
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.adapters.routing.decisions import SLOTS, Decisions, Singles, Stream
from probemon.core.hierarchy import Ints
from probemon.core.memory_reads import NULL, MemoryReads
from probemon.errors import NotSupportedHost
from probemon.host.model import find_layers
from probemon.host.site import Site
from probemon.tracking.align import PlacedTokens
from probemon.tracking.recording import Recording


def slot_memories(model: Any) -> list[SlotMemories]:
    """Return the memories of an unwrapped host's layers, and those that are attached to it, by number of slots."""
    from probemon.adapters.ltm.attached import attached_memories
    from probemon.adapters.ltm.memory import SlotMemory

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
        self.n_slots = memories[0][2].shape.slots
        self.n_experts = self.n_slots + 1
        self.sites = [Site(site, module, self._read, layer=layer) for site, layer, module in memories]
        self.streams = [Stream(SLOTS, site, layer) for site, layer, _ in memories]

    def _read(self, output: Any) -> Tensor:
        if output.top_slot is None:
            raise NotSupportedHost(
                "the memory is in training mode, in which it does not say what it reads: call model.eval()"
            )
        n_slots = output.reads.shape[-1] - 1
        if n_slots != self.n_slots:
            raise NotSupportedHost(
                f"the memory has {n_slots} slots, and had {self.n_slots} when its watching began: reduce_slots and"
                " grow_slots are for before the block"
            )
        parts = (output.reads, output.top_slot, output.top_position, output.top_token, output.top_p)
        return torch.cat([part.float() for part in parts], dim=-1)

    def decisions(self, states: Mapping[str, Singles]) -> Decisions:
        """Return what n tokens read, a stream for each memory."""
        packed, m = np.stack([states[site.name] for site in self.sites]), self.n_slots
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


class NewestReads:
    """What memories read at the newest batch of each recording, for whoever records its scores.

    newest = NewestReads(sources)                   # those of `find_sources`, of any kind
    newest.begin(recording, first, n)               # a batch of n tokens, whose entries begin at `first`
    newest.keep(recording, number, part, placed, decisions)     # of source `number`, about the tokens `part` of it
    newest.of(recording, first, n)                  # MemoryReads; None where no source is a memory
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self._memories = {number: source for number, source in enumerate(sources) if source.kind == SLOTS}
        streams = [stream for source in self._memories.values() for stream in source.streams]
        self._streams = sorted(streams, key=lambda stream: stream.layer)
        self._batches: weakref.WeakKeyDictionary[Recording, _Batch] = weakref.WeakKeyDictionary()

    def begin(self, recording: Recording, first: int, n: int) -> None:
        """Forget the batch before: what was read at it has been recorded, or never will be."""
        if self._memories:
            self._batches[recording] = _Batch(first, n)

    def keep(self, recording: Recording, number: int, part: Ints, placed: PlacedTokens, decisions: Decisions) -> None:
        """Keep what one source decided about the tokens `placed`, those of numbers `part` of the batch."""
        if number not in self._memories:
            return
        top = (decisions.top_idx, decisions.top_w, decisions.top_position, decisions.top_token)
        for i, stream in enumerate(self._memories[number].streams):
            own = [values[i] for values in top if values is not None]
            self._batches[recording].parts.append((stream, part, placed.rows, self._memories[number].n_slots, own))

    def of(self, recording: Recording, first: int, n: int) -> MemoryReads | None:
        """Return what was read at the `n` entries from `first` on; nothing is known of those that are no such batch."""
        if not self._memories:
            return None
        sites, layers = zip(*((stream.site, stream.layer) for stream in self._streams), strict=True)
        batch = self._batches.get(recording)
        if batch is None or (batch.first, batch.n) != (first, n):
            return MemoryReads.unknown(sites, layers, n, 1)
        reads = MemoryReads.unknown(sites, layers, n, max(own[0].shape[1] for *_, own in batch.parts))
        mask = recording.call.mask
        for stream, part, rows, n_slots, (slot, weight, position, token_id) in batch.parts:
            # Real tokens are counted from the first that is no padding.
            padding = np.zeros(len(rows), np.int64) if mask is None else (mask[rows] != 0).argmax(axis=1)
            at = (part, self._streams.index(stream), slice(slot.shape[1]))
            reads.slot[at] = np.where(slot == n_slots, NULL, slot)
            reads.column[at] = np.where(position < 0, -1, position + padding[:, None])
            reads.token_id[at] = token_id
            reads.weight[at] = weight
        return reads


@dataclass
class _Batch:
    """Tokens whose entries in a recording are `first` to `first + n`; by memory what was read at parts of them."""

    first: int
    n: int
    parts: list[tuple[Stream, Ints, Ints, int, list[Any]]] = field(default_factory=list)

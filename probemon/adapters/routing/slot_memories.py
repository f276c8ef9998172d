"""SlotMemories: reads of a model's memory slots, as a source of routing."""

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
from probemon.errors import UnsupportedModel
from probemon.host.model import find_layers
from probemon.host.site import Site
from probemon.tracking.align import PlacedTokens
from probemon.tracking.recording import Recording


def slot_memories(model: Any) -> list[SlotMemories]:
    """Return an unwrapped model's memories, own and attached, grouped by number of slots."""
    from probemon.adapters.ltm.attached import attached_memories
    from probemon.adapters.ltm.memory import SlotMemory

    memories: list[tuple[str, int, Any]] = []
    for number, layer in enumerate(find_layers(model)[1]):
        layer_memories = (module for module in layer.modules() if isinstance(module, SlotMemory))
        memories += ((f"memory.{number}", number, module) for module in layer_memories)
    memories += ((f"memory.{one.number}", one.number, one.memory) for one in attached_memories(model))
    by_slots: dict[int, list[tuple[str, int, Any]]] = {}
    for site, number, module in memories:
        by_slots.setdefault(module.shape.slots, []).append((site, number, module))
    return [SlotMemories(alike) for alike in by_slots.values()]


class SlotMemories:
    """Memories of M slots each. A read is a distribution over the slots and the null slot, number M.

    `top_idx`, `top_w`: the slots read most and the null slot, with their weights. `top_position`, `top_token`: see
    `Decisions`.
    """

    kind, codes, n_chosen = SLOTS, False, 1

    def __init__(self, memories: Sequence[tuple[str, int, Any]]) -> None:
        self.n_slots = memories[0][2].shape.slots
        self.n_experts = self.n_slots + 1
        self.sites = [Site(site, module, self._read, layer=layer) for site, layer, module in memories]
        self.streams = [Stream(SLOTS, site, layer) for site, layer, _ in memories]

    def _read(self, output: Any) -> Tensor:
        if output.top_slot is None:
            raise UnsupportedModel(
                "the memory is in training mode, in which it does not say what it reads: call model.eval()"
            )
        n_slots = output.reads.shape[-1] - 1
        if n_slots != self.n_slots:
            raise UnsupportedModel(
                f"the memory has {n_slots} slots, and had {self.n_slots} when its watching began: call reduce_slots"
                " or grow_slots before the block"
            )
        parts = (output.reads, output.top_slot, output.top_position, output.top_token, output.top_p)
        return torch.cat([part.float() for part in parts], dim=-1)

    def decisions(self, states: Mapping[str, Singles]) -> Decisions:
        """Return the decisions about n tokens from each site's output `[n, K]`."""
        packed, m = np.stack([states[site.name] for site in self.sites]), self.n_slots
        raw = np.concatenate([packed[:, :, 1 : m + 1], packed[:, :, :1]], axis=-1)
        slot, position, token, p = np.split(packed[:, :, m + 1 :], 4, axis=-1)
        null = np.full_like(slot[:, :, :1], m)
        top_w = np.concatenate([p, packed[:, :, :1]], axis=-1)
        order = np.argsort(-top_w, axis=-1, kind="stable")  # ties: lower slot first, null slot last

        def ordered(values: Singles, null_value: Singles) -> Any:
            whole = np.concatenate([values, null_value], axis=-1)
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
    """Memory reads at the newest batch of each recording, for code that records its scores.

    newest = NewestReads(sources)                   # of `find_sources`; only memories count
    newest.begin(recording, first, n)               # a batch of n tokens, whose entries begin at `first`
    newest.keep(recording, number, part, placed, decisions)     # of source `number`, about its tokens `part`
    newest.of(recording, first, n)                  # MemoryReads; None if no source is a memory
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self._memories = {number: source for number, source in enumerate(sources) if source.kind == SLOTS}
        streams = [stream for source in self._memories.values() for stream in source.streams]
        self._streams = sorted(streams, key=lambda stream: stream.layer)
        self._batches: weakref.WeakKeyDictionary[Recording, _Batch] = weakref.WeakKeyDictionary()

    def begin(self, recording: Recording, first: int, n: int) -> None:
        """Start a batch and forget the previous one."""
        if self._memories:
            self._batches[recording] = _Batch(first, n)

    def keep(self, recording: Recording, number: int, part: Ints, placed: PlacedTokens, decisions: Decisions) -> None:
        """Keep the decisions of source `number` about the tokens `part` of the batch, `placed`."""
        if number not in self._memories:
            return
        top = (decisions.top_idx, decisions.top_w, decisions.top_position, decisions.top_token)
        for i, stream in enumerate(self._memories[number].streams):
            stream_top = [values[i] for values in top if values is not None]
            self._batches[recording].parts.append(
                (stream, part, placed.rows, self._memories[number].n_slots, stream_top)
            )

    def of(self, recording: Recording, first: int, n: int) -> MemoryReads | None:
        """Return the reads at `n` entries from `first`: unknown unless the newest batch, None without a memory."""
        if not self._memories:
            return None
        sites, layers = zip(*((stream.site, stream.layer) for stream in self._streams), strict=True)
        batch = self._batches.get(recording)
        if batch is None or (batch.first, batch.n) != (first, n):
            return MemoryReads.unknown(sites, layers, n, 1)
        reads = MemoryReads.unknown(sites, layers, n, max(top[0].shape[1] for *_, top in batch.parts))
        mask = recording.call.mask
        for stream, part, rows, n_slots, (slot, weight, position, token_id) in batch.parts:
            # Positions count from the first token after padding.
            padding = np.zeros(len(rows), np.int64) if mask is None else (mask[rows] != 0).argmax(axis=1)
            at = (part, self._streams.index(stream), slice(slot.shape[1]))
            reads.slot[at] = np.where(slot == n_slots, NULL, slot)
            reads.column[at] = np.where(position < 0, -1, position + padding[:, None])
            reads.token_id[at] = token_id
            reads.weight[at] = weight
        return reads


@dataclass
class _Batch:
    first: int
    n: int
    parts: list[tuple[Stream, Ints, Ints, int, list[Any]]] = field(default_factory=list)

"""Cache layers of transformers that keep a memory alongside their keys, and move both with their rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from probemon.adapters.ltm.state import MemoryState
from probemon.errors import UnsupportedDecoding

_CANNOT = (
    "tokens cannot be removed from a memory: overwritten slots are lost. Generate without an assistant and without"
    " prompt lookup, or begin with a new cache"
)
PACKED = (
    "position_ids are not 0, 1, 2, ... over the real tokens of each row: packed rows would share one memory. Give every"
    " text its own row, padded on the left"
)
NO_BATCHES = (
    "continuous batching packs several requests into one row, and a row has one memory: call generate() with a row for"
    " each text, padded on the left"
)


class KeepsMemory(CacheLayerMixin):
    """Cache layer mixin that keeps its rows' memory."""

    __slots__ = ()  # lets a layer's `__class__` be set
    memory: MemoryState | None = None
    whose = ""  # id of the attached memory
    padding: Tensor | None = None  # columns before each row, [B] int64
    is_croppable = False

    def _move(self, indices: Tensor) -> None:
        if self.memory is not None:
            self.memory = self.memory.rows(indices)
        if self.padding is not None:
            self.padding = self.padding[indices.to(self.padding.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._move(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._move(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        if self.padding is not None:
            rows = torch.arange(len(self.padding), device=self.padding.device)
            self._move(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # type: ignore[misc]
        self.memory = self.padding = None

    def offload(self) -> None:
        """Move everything to the CPU."""
        super().offload()  # type: ignore[misc]
        if self.memory is not None:
            self.memory = self.memory.each(lambda tensor: tensor.to("cpu"))

    def prefetch(self) -> None:
        """Move everything back."""
        super().prefetch()  # type: ignore[misc]
        device = getattr(self, "device", None)
        if self.memory is not None and device is not None:
            self.memory = self.memory.each(lambda tensor: tensor.to(device))

    def crop(self, *arguments: Any) -> NoReturn:
        """Raises `UnsupportedDecoding`."""
        raise UnsupportedDecoding(_CANNOT)

    activate_past_recording = crop


@functools.cache
def _with_memory(kind: type) -> type:
    return type(f"Memory{kind.__name__}", (KeepsMemory, kind), {})


def memory_layer(cache: Any, number: int, *, n_new: int = 0) -> Any:
    """Return a layer of a cache, made to keep a memory; it may hold `n_new` tokens of this forward.

    Raises `UnsupportedDecoding` unless it is a DynamicCache's, and not used without a memory.
    """
    layers = getattr(cache, "layers", [])
    if len(layers) <= number and getattr(cache, "layer_class_to_replicate", None) is not None:
        layers += [cache.layer_class_to_replicate() for _ in range(number + 1 - len(layers))]
    layer = layers[number] if number < len(layers) else None
    if isinstance(layer, KeepsMemory):
        return layer
    if not isinstance(layer, DynamicLayer) or type(layer).__name__.startswith(("Quantized", "Quanto", "HQQ", "Fp8")):
        raise UnsupportedDecoding(
            f"layer {number} of a {type(cache).__name__} is {type(layer).__name__}: a memory lies in the layers of a"
            " DynamicCache that keep keys. Leave cache_implementation out; if the model keeps a state instead, name"
            " another layer or give use_cache=False"
        )
    check_known(layer, layer.get_seq_length() - n_new)
    layer.__class__ = _with_memory(type(layer))
    return layer


def check_known(layer: Any, n_past: int, whose: str = "") -> None:
    """Raises `UnsupportedDecoding` unless the layer's memory read `n_past` columns and belongs to `whose`."""
    memory = getattr(layer, "memory", None)
    if n_past > 0 if memory is None else bool((memory.n + layer.padding != n_past).any()):
        raise UnsupportedDecoding(
            f"the cache holds {n_past} tokens, but this memory has not read all of them: begin with a new cache"
        )
    if n_past > 0 and memory is not None and layer.whose != whose:
        raise UnsupportedDecoding(
            "the cache was written by another memory, whose slots mean nothing to this one: begin with a new cache, or"
            " keep the memory attached between the turns"
        )


def cache_among(values: Iterable[Any]) -> Any:
    """Return the cache among `values`, or None."""
    return next((value for value in values if isinstance(value, Cache)), None)


def gives_cache(output: Any) -> bool:
    """True if a decoder's output has more than tensors, thus a cache."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    values = [one for part in parts for one in (part if isinstance(part, (tuple, list)) else [part])]
    return not all(one is None or isinstance(one, Tensor) for one in values)


def memory_of(cache: Any) -> dict[int, MemoryState]:
    """Return the memories in a cache, by layer."""
    layers = enumerate(getattr(cache, "layers", []))
    return {number: layer.memory for number, layer in layers if getattr(layer, "memory", None) is not None}


def padding_before(
    mask: Any, before: Tensor | None, n_rows: int, n_past: int, n_tokens: int, device: torch.device
) -> Tensor:
    """Return the padding columns before each row `[B]`; `before [B]`: those in the past.

    Raises `UnsupportedDecoding` if the mask `[B, past + T]` hides anything else.
    """
    if before is None:
        before = torch.zeros(n_rows, dtype=torch.int64, device=device)
    if mask is None:
        return before
    if not isinstance(mask, Tensor) or mask.dim() != 2 or tuple(mask.shape) != (n_rows, n_past + n_tokens):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedDecoding(
            f"an attention mask {shape} is not supported by a memory: give [{n_rows}, {n_past + n_tokens}], one column"
            " for each of the cached and the new tokens, 0 for padding before a row"
        )
    real = mask.to(device) != 0
    padding = (~real).sum(1)
    ordered = bool((real[:, 1:] >= real[:, :-1]).all())
    if not ordered or not bool((padding.clamp_max(n_past) == before).all()):
        raise UnsupportedDecoding(
            "the attention mask leaves out tokens that are not padding before a row, or other ones than in the forward"
            " before: a memory counts real tokens. Pad on the left (tokenizer.padding_side = 'left')"
        )
    return padding

"""Memory on a decoder layer of an existing model.

    with attach_memory(model, layer=1) as attached:
        model.generate(...)                         # bit-identical until the memory has learnt
        attached.memory.parameters()                # trainable
        attached.get_memory_stats()

The model's modules and weights do not change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NoReturn
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from probemon.adapters.ltm.cache import (
    NO_BATCHES,
    PACKED,
    cache_among,
    check_known,
    gives_cache,
    memory_layer,
    padding_before,
)
from probemon.adapters.ltm.config import MemoryShape
from probemon.adapters.ltm.memory import SlotMemory
from probemon.adapters.ltm.model import LtmModel
from probemon.adapters.ltm.state import MemoryState
from probemon.adapters.ltm.stats import stats_of
from probemon.errors import ConfigError, UnsupportedDecoding, UnsupportedModel
from probemon.util.checks import check_count
from probemon.util.shadow import shadow

_PACKED_BY = ("cu_seq_lens_q", "seq_idx")  # for packed rows
_MOST_AGAIN = 64  # training forwards to be run again


@dataclass
class _Forward:
    ids: Tensor | None = None
    mask: Tensor | None = None
    shape: tuple[int, ...] | None = None
    positions: Tensor | None = None
    without_cache: bool = False
    input_storage: StorageWeakRef | None = None  # of the layer's input


def attached_memories(model: Any) -> list[AttachedMemory]:
    """Return a model's memories in running order."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    # From hooks: a registry could outlive the model. A list: other threads may attach meanwhile.
    owners = (getattr(hook, "__self__", None) for hook in list(decoder._forward_pre_hooks.values()))
    return sorted((owner for owner in owners if isinstance(owner, AttachedMemory)), key=lambda owner: owner.number)


class AttachedMemory:
    """The trainable `memory` on layer `number`, until `detach()` or the end of a `with` block."""

    def __init__(self, model: Any, number: int, shape: MemoryShape) -> None:
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise UnsupportedModel(
                f"{type(decoder).__name__} has no list `layers`: a memory needs a decoder like llama's"
            )
        if isinstance(decoder, LtmModel):
            raise UnsupportedModel("LtmForCausalLM has its own memories: name their layers in memory_layers")
        self.number = check_count("layer", number, most=len(layers) - 1, remedy="name a layer of the model, from 0")
        if any(attached.number == self.number for attached in attached_memories(model)):
            raise ConfigError(f"layer {number} has a memory already, and a layer keeps one: name another layer")
        weight = next(layers[self.number].parameters())
        self.memory = SlotMemory(shape, zero=True).to(weight.device, weight.dtype).eval()
        self._state: MemoryState | None = None
        self._thread = threading.local()  # `forward`: the one that runs
        self._again: dict[tuple[int, ...], _Forward] = {}  # by the input's address and shape
        self._stack, self.open = ExitStack(), False
        self._whose = uuid4().hex  # survives copying of a cache
        self._lock, self._n_generating = threading.Lock(), 0
        with ExitStack() as stack:
            stack.callback(decoder.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.callback(layers[self.number].register_forward_hook(self._after, with_kwargs=True).remove)
            stack.callback(decoder.register_forward_hook(self._end, with_kwargs=True, always_call=True).remove)
            if hasattr(model, "generate"):
                shadow(stack, self, model, "generate", self._count)
            if hasattr(model, "init_continuous_batching"):  # its thread would hide errors
                shadow(stack, self, model, "init_continuous_batching", _refuse_batches)
            self._stack = stack.pop_all()
            self.open = True

    def detach(self) -> None:
        """Remove the memory. Raises `UnsupportedDecoding` while any thread runs generate()."""
        if self._n_generating:
            raise UnsupportedDecoding(
                f"{self._n_generating} generate() of this model is under way: detach when it has returned, else only"
                " part of its output uses the memory"
            )
        self.open = False
        self._stack.close()
        self._state, self._again, self._thread = None, {}, threading.local()

    def __enter__(self) -> AttachedMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def get_memory_stats(self) -> dict[str, Any]:
        """Return `LtmForCausalLM.get_memory_stats` of the newest forward with a cache."""
        return stats_of({} if self._state is None else {self.number: self._state}, {self.number: self.memory})

    def settings(self) -> dict[str, Any]:
        """Return the settings that hidden states depend on, besides tensors, as JSON values."""
        return {"layer": self.number, **asdict(self.memory.shape)}

    def _count(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._n_generating += 1
        try:
            return original(*args, **kwargs)
        finally:
            with self._lock:
                self._n_generating -= 1

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise UnsupportedDecoding(
                f"an attention mask {type(mask).__name__} that is not 2D is not supported by a memory: give"
                " [rows, columns], 0 for padding before a row"
            )
        if any(kwargs.get(name) is not None for name in _PACKED_BY):
            raise UnsupportedDecoding(PACKED)
        inputs = ids if ids is not None else kwargs.get("inputs_embeds")
        shape = None if inputs is None else tuple(inputs.shape[:2])
        self._thread.forward = _Forward(ids, mask, shape, kwargs.get("position_ids"))

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        forward = self._forward_of(module, args)
        self._check_stream(module, hidden, forward.shape)
        b, t, _ = hidden.shape
        layer = self._layer_of_cache(module, forward, cache_among([*args, *kwargs.values()]), t)
        n_past = 0 if layer is None else layer.get_seq_length() - t
        padding = padding_before(forward.mask, None if layer is None else layer.padding, b, n_past, t, hidden.device)
        valid = n_past + torch.arange(t, device=hidden.device) >= padding[:, None]
        _check_one_sequence(forward.positions, valid, n_past - padding)
        remembered = self.memory(hidden, None if layer is None else layer.memory, valid, forward.ids)
        if layer is not None:
            layer.padding, layer.memory, layer.whose = padding, remembered.state, self._whose
            if not self.memory.training:
                self._state = remembered.state
        changed = hidden + remembered.update
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Raise if the decoder has a cache but the layer got none."""
        forward: _Forward | None = getattr(self._thread, "forward", None)
        self._thread.forward = None
        if forward is None or output is None or not forward.without_cache:  # no output: an error was raised
            return
        if cache_among([*args, *kwargs.values()]) is not None or gives_cache(output):
            raise UnsupportedModel(
                f"{type(module).__name__} keeps a cache but does not pass it to layer {self.number}: a memory there"
                " would start again at every forward. Give use_cache=False, or use another model"
            )

    def _forward_of(self, module: nn.Module, args: tuple[Any, ...]) -> _Forward:
        """Return the layer's forward; by its input's address if a backward pass runs it again."""
        forward: _Forward | None = getattr(self._thread, "forward", None)
        layer_input = next((one for one in args if isinstance(one, Tensor)), None)
        address = () if layer_input is None else (layer_input.data_ptr(), *layer_input.shape)
        if forward is None:
            earlier = self._again.get(address)
            # A freed address may belong to another tensor.
            if earlier is None or earlier.input_storage is None or earlier.input_storage.expired():
                raise UnsupportedDecoding(
                    f"layer {self.number} runs outside of a forward of its decoder, so its padding is unknown: a"
                    " checkpoint has to keep the layer's input where it was, and at most"
                    f" {_MOST_AGAIN} forwards may wait for their backward pass"
                )
            return earlier
        if module.training and layer_input is not None:
            self._again.pop(address, None)
            forward.input_storage, self._again[address] = StorageWeakRef(layer_input.untyped_storage()), forward
            while len(self._again) > _MOST_AGAIN:
                self._again.pop(next(iter(self._again)), None)
        return forward

    def _check_stream(self, module: nn.Module, hidden: Any, expected: tuple[int, ...] | None) -> None:
        width = self.memory.shape.hidden_size
        shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else ()
        if len(shape) != 3 or shape[2] != width or (expected is not None and shape[:2] != expected):
            axes = "rows, tokens" if expected is None else ", ".join(map(str, expected))
            raise UnsupportedModel(
                f"{type(module).__name__} returns {list(shape) or type(hidden).__name__}, expected [{axes}, {width}]:"
                " a memory needs a layer that returns one stream of hidden states"
            )

    def _layer_of_cache(self, module: nn.Module, forward: _Forward, cache: Any, n_new: int) -> Any:
        if module.training and getattr(module, "gradient_checkpointing", False):
            return None  # layers that run again would write again
        if cache is None:
            forward.without_cache = True
            return None
        layer = memory_layer(cache, self.number, n_new=n_new)
        if layer.get_seq_length() < n_new:
            raise UnsupportedModel(
                f"{type(module).__name__} keeps nothing of its tokens at layer {self.number} of the cache, which"
                " would hold the memory. Name another layer, or give use_cache=False"
            )
        check_known(layer, layer.get_seq_length() - n_new, self._whose)
        return layer


def _check_one_sequence(positions: Any, valid: Tensor, n_before: Tensor) -> None:
    """Raise if positions of real tokens go back, or restart after `n_before [B]` tokens."""
    if not isinstance(positions, Tensor) or positions.shape[-1] != valid.shape[1]:
        return
    is_text = positions.dim() < 3
    positions = (positions if is_text else positions[0]).to(valid.device).expand(valid.shape)
    steps = positions[:, 1:] - positions[:, :-1]
    # Vision models: the first of several axes is constant within an image.
    if bool(((steps < (1 if is_text else 0)) & valid[:, :-1]).any() | ((positions[:, 0] == 0) & (n_before > 0)).any()):
        raise UnsupportedDecoding(PACKED)


def _refuse_batches(original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedDecoding(NO_BATCHES)


def attach_memory(model: Any, layer: int, **sizes: Any) -> AttachedMemory:
    """Attach a memory after a decoder layer; `sizes`: of `MemoryShape`, except `hidden_size`.

    The output starts bit-identical. Raises `UnsupportedModel`, `ConfigError`.
    """
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
    if not isinstance(width, int):
        raise UnsupportedModel(
            f"{type(model).__name__} has no hidden_size in its config, so a memory for it has no size"
        )
    if "hidden_size" in sizes:
        raise ConfigError("hidden_size is that of the model: leave it out")
    return AttachedMemory(model, layer, MemoryShape(width, **sizes))

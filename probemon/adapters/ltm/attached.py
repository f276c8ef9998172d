"""A memory on a decoder layer of an existing host, which begins by changing nothing.

    with attach_memory(model, layer=1) as attached:
        model.generate(...)                         # bit-identical until the memory has learnt
        attached_memories(model)                    # [attached]
        attached.memory.parameters()                # what may be trained
        attached.get_memory_stats()

The memory is no part of the host: its modules, its state dict and its weights stay what they were, and once the block
ends no trace is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType
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
from probemon.errors import ConfigError, NotSupportedDecoding, NotSupportedHost
from probemon.util.checks import check_count
from probemon.util.shadow import shadow

_PACKED_BY = ("cu_seq_lens_q", "seq_idx")  # arguments by which a host is told that a row is of several sequences
_MOST_AGAIN = 64  # forwards of a training whose layers may be run again


@dataclass
class _Forward:
    """What a forward of the decoder was given: `ids [B, T]` (None where embeddings are), `mask [B, columns]` or None,
    `shape` (B, T), `positions` of its tokens. `without_cache`: so the layer ran. `given`: where the memory of its
    input is, which keeps nothing of it.
    """

    ids: Tensor | None = None
    mask: Tensor | None = None
    shape: tuple[int, ...] | None = None
    positions: Tensor | None = None
    without_cache: bool = False
    given: StorageWeakRef | None = None


class _ThreadState(threading.local):
    """What a thread has under way."""

    forward: _Forward | None = None


def attached_memories(model: Any) -> list[AttachedMemory]:
    """Return the memories that are on a host now, in the order in which they run."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    # Their hooks say it themselves, so that nothing outlives the host or has to be kept up to date.
    owners = (getattr(hook, "__self__", None) for hook in decoder._forward_pre_hooks.values())
    return sorted((owner for owner in owners if isinstance(owner, AttachedMemory)), key=lambda owner: owner.number)


class AttachedMemory:
    """What `attach_memory` returns: a `with` block, or on until `detach()`.

    `memory`: the module with what may be trained. `number`: the layer that it is on.
    """

    def __init__(self, model: Any, number: int, shape: MemoryShape) -> None:
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise NotSupportedHost(
                f"{type(decoder).__name__} has no list `layers`: a memory is put on decoders of the kind of llama"
            )
        if isinstance(decoder, LtmModel):
            raise NotSupportedHost("LtmForCausalLM has memories of its own: name their layers in memory_layers")
        self.number = check_count("layer", number, most=len(layers) - 1, remedy="name a layer of the host, from 0")
        if any(attached.number == self.number for attached in attached_memories(model)):
            raise ConfigError(f"layer {number} has a memory already, and a layer keeps one: name another layer")
        weight = next(layers[self.number].parameters())
        self.memory = SlotMemory(shape, zero=True).to(weight.device, weight.dtype).eval()
        self._state: MemoryState | None = None
        self._thread = _ThreadState()
        self._again: dict[tuple[int, ...], _Forward] = {}  # by where the layer's input lies
        self._stack, self.open = ExitStack(), False
        self._whose = uuid4().hex  # a text, which a copied or a saved cache keeps
        self._lock, self._n_generating = threading.Lock(), 0
        with ExitStack() as stack:
            stack.callback(decoder.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.callback(layers[self.number].register_forward_hook(self._after, with_kwargs=True).remove)
            stack.callback(decoder.register_forward_hook(self._end, with_kwargs=True, always_call=True).remove)
            if hasattr(model, "generate"):
                shadow(stack, self, model, "generate", self._count)
            if hasattr(model, "init_continuous_batching"):  # whose own thread would keep our errors to itself
                shadow(stack, self, model, "init_continuous_batching", _refuse_batches)
            self._stack = stack.pop_all()
            self.open = True

    def detach(self) -> None:
        """Take the memory off. Caches that have one keep it, unused.

        Raises `NotSupportedDecoding` while a generate() runs, in whatever thread: it would go on without its memory.
        """
        if self._n_generating:
            raise NotSupportedDecoding(
                f"{self._n_generating} generate() of this host is under way: detach when it has returned, else part of"
                " its output is with the memory and part is not"
            )
        self.open = False
        self._stack.close()
        self._state, self._again, self._thread = None, {}, _ThreadState()

    def __enter__(self) -> AttachedMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def get_memory_stats(self) -> dict[str, Any]:
        """Return what the memory holds and how it is read, after the newest forward with a cache, by row of it: see
        `LtmForCausalLM.get_memory_stats`.
        """
        return stats_of({} if self._state is None else {self.number: self._state}, {self.number: self.memory})

    def settings(self) -> dict[str, Any]:
        """What the host's states depend on beside the memory's tensors, in values that JSON has."""
        return {"layer": self.number, **asdict(self.memory.shape)}

    def _count(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._n_generating += 1
        try:
            return original(*args, **kwargs)
        finally:
            with self._lock:
                self._n_generating -= 1

    # -- hooks -----------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise NotSupportedDecoding(
                f"an attention mask {type(mask).__name__} of no two dimensions is not supported by a memory: give"
                " [rows, columns], 0 for padding before a row"
            )
        if any(kwargs.get(name) is not None for name in _PACKED_BY):
            raise NotSupportedDecoding(PACKED)
        given = ids if ids is not None else kwargs.get("inputs_embeds")
        shape = None if given is None else tuple(given.shape[:2])
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
        """Refuse a forward whose cache did not come to the layer: the memory would begin anew in the next one."""
        forward, self._thread.forward = self._thread.forward, None
        if forward is None or output is None or not forward.without_cache:  # no output: an error is on its way
            return
        if cache_among([*args, *kwargs.values()]) is not None or gives_cache(output):
            raise NotSupportedHost(
                f"{type(module).__name__} keeps a cache, and gives layer {self.number} none: a memory there would begin"
                " anew in every forward. Give use_cache=False, or put it on another host"
            )

    def _forward_of(self, module: nn.Module, args: tuple[Any, ...]) -> _Forward:
        """Return the forward that the layer runs in: the thread's own, or, in a backward pass that runs the layer
        again, in whatever thread, that in which its input lay at the same place.
        """
        forward = self._thread.forward
        given = next((one for one in args if isinstance(one, Tensor)), None)
        place = () if given is None else (given.data_ptr(), *given.shape)
        if forward is None:
            known = self._again.get(place)
            # Once the memory of an input was given up, another one may lie there.
            if known is None or known.given is None or known.given.expired():
                raise NotSupportedDecoding(
                    f"layer {self.number} runs outside of a forward of its decoder, so what is padding is unknown: a"
                    " checkpoint has to keep the layer's input where it was, and at most"
                    f" {_MOST_AGAIN} forwards may wait for their backward pass"
                )
            return known
        if module.training and given is not None:
            self._again.pop(place, None)
            forward.given, self._again[place] = StorageWeakRef(given.untyped_storage()), forward
            while len(self._again) > _MOST_AGAIN:
                self._again.pop(next(iter(self._again)), None)
        return forward

    def _check_stream(self, module: nn.Module, hidden: Any, expected: tuple[int, ...] | None) -> None:
        width = self.memory.shape.hidden_size
        shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else ()
        if len(shape) != 3 or shape[2] != width or (expected is not None and shape[:2] != expected):
            rows = "rows, tokens" if expected is None else ", ".join(map(str, expected))
            raise NotSupportedHost(
                f"{type(module).__name__} gives {list(shape) or type(hidden).__name__}, expected [{rows}, {width}]: a"
                " memory is put on layers that hand on one stream of hidden states"
            )

    def _layer_of_cache(self, module: nn.Module, forward: _Forward, cache: Any, n_new: int) -> Any:
        """The layer of the cache that keeps the memory, which holds `n_new` tokens of this forward; None without."""
        if module.training and getattr(module, "gradient_checkpointing", False):
            return None  # it leaves the cache alone: a layer that runs again would write again
        if cache is None:
            forward.without_cache = True
            return None
        layer = memory_layer(cache, self.number, n_new=n_new)
        if layer.get_seq_length() < n_new:
            raise NotSupportedHost(
                f"{type(module).__name__} keeps nothing of its tokens at layer {self.number} of the cache, where a"
                " memory lies. Name another layer, or give use_cache=False"
            )
        check_known(layer, layer.get_seq_length() - n_new, self._whose)
        return layer


def _check_one_sequence(positions: Any, valid: Tensor, n_before: Tensor) -> None:
    """Raise `NotSupportedDecoding` where the positions of a row's real tokens go back, so that a sequence begins, or
    are 0 after the `n_before [B]` tokens of earlier forwards.
    """
    if not isinstance(positions, Tensor) or positions.shape[-1] != valid.shape[1]:
        return
    of_text = positions.dim() < 3
    positions = (positions if of_text else positions[0]).to(valid.device).expand(valid.shape)
    steps = positions[:, 1:] - positions[:, :-1]
    # Hosts of images have positions of several dimensions, of which the first stands still within an image.
    if bool(((steps < (1 if of_text else 0)) & valid[:, :-1]).any() | ((positions[:, 0] == 0) & (n_before > 0)).any()):
        raise NotSupportedDecoding(PACKED)


def _refuse_batches(original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotSupportedDecoding(NO_BATCHES)


def attach_memory(model: Any, layer: int, **sizes: Any) -> AttachedMemory:
    """Put a memory behind a decoder layer of a host; `sizes` are those of `MemoryShape`, without the host's width.

    Its output projection begins at zero, so the host begins bit-identical. Raises `NotSupportedHost`, `ConfigError`.
    """
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
    if not isinstance(width, int):
        raise NotSupportedHost(f"{type(model).__name__} names no hidden_size, so a memory for it has no size")
    if "hidden_size" in sizes:
        raise ConfigError("hidden_size is that of the host: leave it out")
    return AttachedMemory(model, layer, MemoryShape(width, **sizes))

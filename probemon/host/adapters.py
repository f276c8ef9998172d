"""Adapters on a model that change its hidden states.

needs_its_wrapper(model, host)
OWN[decoder]                       # of probemon.adapters.bem
memories_on(host)                  # of attach_memory
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import nn

from probemon.errors import UnsupportedModel
from probemon.host.internals import uncompiled, xlora_behind, xlora_rehearses


class Own(Protocol):
    """An adapter of `probemon.adapters.bem`; it steers if `enabled`."""

    enabled: bool

    def settings(self) -> Mapping[str, Any]:
        """Settings other than tensors, as JSON values."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors by name."""


OWN_NAME, MEMORY_NAME, CLOSED_NAME = "bem", "memory", "closed memory"
KNOWN: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # attached or not
# By the model's decoder; at most one of them steers.
OWN: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def own_of(host: Any) -> Own | None:
    """Return the BEM adapter that steers a model, or None."""
    if not OWN:
        return None
    adapters = (adapter for module in host.modules() for adapter in OWN.get(module, ()))
    return next((adapter for adapter in adapters if adapter.enabled), None)


def memories_on(model: Any) -> list[Any]:
    """Return the open memories on a model, in running order."""
    ltm = sys.modules.get("probemon.adapters.ltm.attached")
    # Not imported: that would register its model class with transformers.
    return [] if ltm is None else [memory for memory in ltm.attached_memories(model) if not memory.memory.closed]


def memories_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the built-in memories among modules."""
    ltm = sys.modules.get("probemon.adapters.ltm.memory")
    return [] if ltm is None else [module for module in modules if type(module) is ltm.SlotMemory]


def needs_its_wrapper(model: Any, host: Any) -> bool:
    """True if the wrapper's forward sets up an adapter (X-LoRA, aLoRA). Raises `UnsupportedModel` without a wrapper."""
    wrapper = uncompiled(model)
    activated = any(
        getattr(config, "alora_invocation_tokens", None) is not None
        for config in getattr(wrapper, "peft_config", {}).values()
    )
    mixed = xlora_of(host) is not None
    if mixed and wrapper is host:
        raise UnsupportedModel(
            f"X-LoRA mixes adapters in {type(host).__name__}, and its own forward does not decide how: give the"
            " PeftModel that it is in"
        )
    if activated and wrapper is host:
        raise UnsupportedModel(
            f"an activated LoRA (aLoRA) is on {type(host).__name__}, whose own forward does not look for its tokens, so"
            " that it would never act: give the PeftModel that it is in (PeftModel.from_pretrained)"
        )
    return activated or mixed


def xlora_of(model: Any) -> tuple[Any, Any] | None:
    """Return PEFT's X-LoRA around a model and one of its layers, or None."""
    for module in model.modules():
        xlora = xlora_behind(module)
        if xlora is not None:
            return xlora, module
    return None


def rehearsal(model: Any) -> Callable[[], bool] | None:
    """Return whether a forward runs only for X-LoRA's decision, as a function; None without X-LoRA."""
    mixer = xlora_of(model)
    return None if mixer is None else partial(xlora_rehearses, *mixer)

"""Adapters: what is on a host beside its own weights, by which the same tokens come to other states.

needs_its_wrapper(model, host)     # whether its decoder alone would run without an adapter that is on
OWN[decoder]                       # the adapters of probemon.adapters.bem that are on it
memories_on(host)                  # the memories that attach_memory put on it
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import nn

from probemon.errors import NotSupportedHost
from probemon.host.internals import uncompiled, xlora_behind, xlora_rehearses


class Own(Protocol):
    """An adapter of `probemon.adapters.bem`; `enabled`: whether it steers."""

    enabled: bool

    def settings(self) -> Mapping[str, Any]:
        """What its host's states depend on beside its tensors, as JSON takes it."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its tensors by name."""


OWN_NAME, MEMORY_NAME, CLOSED_NAME = "bem", "memory", "closed memory"
KNOWN: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all of them, on a host or off
# Those on a host, by its decoder. Several may be, of which one steers.
OWN: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def own_of(host: Any) -> Own | None:
    """The adapter of `probemon.adapters.bem` that steers a host."""
    if not OWN:
        return None
    adapters = (own for module in host.modules() for own in OWN.get(module, ()))
    return next((own for own in adapters if own.enabled), None)


def memories_on(model: Any) -> list[Any]:
    """The memories that were attached to a host and may add to its states, in the order in which they run."""
    ltm = sys.modules.get("probemon.adapters.ltm.attached")
    # Where that was never imported, there are none; importing it would make its host known to transformers.
    return [] if ltm is None else [one for one in ltm.attached_memories(model) if not one.memory.closed]


def memories_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Those of some modules that are memories which a host has of its own, one of `probemon.adapters.ltm`."""
    ltm = sys.modules.get("probemon.adapters.ltm.memory")
    return [] if ltm is None else [module for module in modules if type(module) is ltm.SlotMemory]


def needs_its_wrapper(model: Any, host: Any) -> bool:
    """Whether an adapter on `host` is set up in the forward of `model` around it.

    X-LoRA decides there, and an activated LoRA looks for its tokens. Raises `NotSupportedHost` for the host of such a
    one without its wrapper: it would run as if there were no adapter.
    """
    wrapper = uncompiled(model)
    activated = any(
        getattr(config, "alora_invocation_tokens", None) is not None
        for config in getattr(wrapper, "peft_config", {}).values()
    )
    mixed = xlora_of(host) is not None
    if mixed and wrapper is host:
        raise NotSupportedHost(
            f"X-LoRA mixes adapters in {type(host).__name__}, and its own forward does not decide how: give the"
            " PeftModel that it is in"
        )
    if activated and wrapper is host:
        raise NotSupportedHost(
            f"an activated LoRA (aLoRA) is on {type(host).__name__}, whose own forward does not look for its tokens, so"
            " that it would never act: give the PeftModel that it is in (PeftModel.from_pretrained)"
        )
    return activated or mixed


def xlora_of(model: Any) -> tuple[Any, Any] | None:
    """Return PEFT's X-LoRA around a host, and one of the layers it mixes adapters in; None where there is none."""
    for module in model.modules():
        xlora = xlora_behind(module)
        if xlora is not None:
            return xlora, module
    return None


def rehearsal(model: Any) -> Callable[[], bool] | None:
    """Return what says whether the decoder runs only so that X-LoRA may decide, as those tokens are run again; None for
    a model without it.
    """
    mixer = xlora_of(model)
    return None if mixer is None else partial(xlora_rehearses, *mixer)

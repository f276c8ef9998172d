"""Faults of installed hooks, found without running the model.

faults = find_faults(owner, model, decoder, placed)
faults.lost        # no longer seen
faults.doubts      # may differ from the model's values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from probemon.host.model import find_layers, site_module
from probemon.host.placed_hooks import PlacedHook
from probemon.util.shadow import Owner, is_shadowed_by

_OF_A_LAYER = ("resid_post", "attn_out", "mlp_out")


@dataclass(frozen=True)
class HookFaults:
    """`n_hooks` checked; each text is one fault."""

    n_hooks: int = 0
    lost: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def find_faults(owner: Owner, model: Any, decoder: nn.Module, placed: Sequence[PlacedHook]) -> HookFaults:
    """Check hooks of `owner`, their modules, and `generate`."""
    lost = [text for hook in placed if (text := hook.lost())]
    doubts = [text for hook in placed if (text := hook.doubt())]
    lost += _moved(model, decoder, [hook for hook in placed if hook.reads]) if placed else []
    if hasattr(model, "generate") and not is_shadowed_by(owner, model, "generate"):
        if "generate" in vars(model):
            doubts.append("generate of the model was replaced, and whether it calls what we watch is unknown")
        else:
            lost.append("generate of the model is no longer ours, so that prompts and ends of rows are unknown")
    return HookFaults(len(placed), tuple(lost), tuple(doubts))


def _moved(model: Any, decoder: nn.Module, taps: Sequence[PlacedHook]) -> list[str]:
    """Return taps on modules that left their sites."""
    try:
        decoder_now, layers = find_layers(model)
        if decoder_now is not decoder:
            return [f"another {type(decoder_now).__name__} was put into the model than the one with our hooks"]
        return [
            f"another module was put at {tap.what} than the one with our hook"
            for tap in taps
            if tap.what.split(".")[0] in _OF_A_LAYER and site_module(layers, tap.what) is not tap.module
        ]
    except Exception as error:  # the model was taken apart
        return [f"the layers are no longer where our hooks are: {error}"]

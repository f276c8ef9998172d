"""Settings of a host on which its states depend, as packs and adapters state them.

host_settings(model)       # {"rms_norm_eps": 1e-06, "hidden_act": "silu", ...}, as JSON has it
host_config(model)         # the configuration that they are of
"""

from __future__ import annotations

from typing import Any

from torch import nn

from probemon.core.state_settings import state_settings
from probemon.host.internals import masks_padding
from probemon.host.model import is_encoder_decoder, text_config, unwrap


def host_config(model: Any) -> Any:
    """The configuration of all that a decoder's states depend on: of its text part, and of an encoder."""
    return unwrap(model).config if is_encoder_decoder(model) else text_config(model)


def host_settings(model: Any) -> dict[str, Any]:
    """Return those of a host's settings on which its states depend, in values that JSON has.

    `padding_idx`: of a host that counts positions from it, or has none there (roberta, esm, xglm), whatever its
    configuration says now. `pad_token_id`: of one that looks for it itself.
    """
    host, config = unwrap(model), host_config(model)
    settings = state_settings(config.to_dict())
    if masks_padding(host):
        settings["pad_token_id"] = config.pad_token_id
    modules = list(host.modules())
    counting = {kind for kind in {type(module) for module in modules} if _counts_positions(kind)}
    of_them = [getattr(module, "padding_idx", None) for module in modules if type(module) in counting]
    counted_from = [number for number in of_them if number is not None]
    return settings | ({"padding_idx": counted_from} if counted_from else {})


def _counts_positions(kind: type[nn.Module]) -> bool:
    return "Position" in kind.__name__ or any(name.startswith("create_position_ids") for name in dir(kind))

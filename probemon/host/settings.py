"""Settings of a host on which its states depend, as packs and adapters state them.

host_settings(model)       # {"rms_norm_eps": 1e-06, "hidden_act": "silu", ...}, as JSON has it
host_config(model)         # the configuration that they are of
"""

from __future__ import annotations

from typing import Any

from torch import nn

from probemon.core.host_settings import state_settings
from probemon.host.model import is_encoder_decoder, text_config, unwrap

# They are called like those of training and of what is returned, and states depend on them.
_OF_STATES = {
    "drop_vision_last_layer",
    "moe_token_dropout",
    "normalize_router_prob_before_dropping",
    "output_gate_type",
    "output_multiplier",
    "token_dropout",
}


def host_config(model: Any) -> Any:
    """The configuration of all that a decoder's states depend on: of its text part, and of an encoder."""
    return unwrap(model).config if is_encoder_decoder(model) else text_config(model)


def host_settings(model: Any) -> dict[str, Any]:
    """Return those of a host's settings on which its states depend, in values that JSON has.

    `padding_idx`: of a host that counts positions from it (roberta, esm, m2m_100), whatever its configuration says now.
    """
    config = host_config(model).to_dict()
    settings = state_settings(config) | {name: config[name] for name in _OF_STATES & config.keys()}
    modules = list(unwrap(model).modules())
    counting = {kind for kind in {type(module) for module in modules} if _counts_positions(kind)}
    counted_from = [getattr(module, "padding_idx", None) for module in modules if type(module) in counting]
    return settings | ({"padding_idx": counted_from} if counted_from else {})


def _counts_positions(kind: type[nn.Module]) -> bool:
    return any(name.startswith("create_position_ids") for name in dir(kind))

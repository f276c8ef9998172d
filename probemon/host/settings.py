"""Settings of a model that its hidden states depend on.

model_settings(model)       # {"rms_norm_eps": 1e-06, "hidden_act": "silu", ...}
"""

from __future__ import annotations

from typing import Any

from torch import nn

from probemon.core.state_settings import state_settings
from probemon.host.internals import masks_padding
from probemon.host.model import is_encoder_decoder, text_config, unwrap


def config_of(model: Any) -> Any:
    """The configuration of the text part, including an encoder."""
    return unwrap(model).config if is_encoder_decoder(model) else text_config(model)


def model_settings(model: Any) -> dict[str, Any]:
    """Return the settings that hidden states depend on, as JSON values.

    - `padding_idx`: if positions count from it (roberta, esm, xglm)
    - `pad_token_id`: if the model masks padding itself
    """
    base, config = unwrap(model), config_of(model)
    settings = state_settings(config.to_dict())
    if masks_padding(base):
        settings["pad_token_id"] = config.pad_token_id
    modules = list(base.modules())
    counting = {kind for kind in {type(module) for module in modules} if _counts_positions(kind)}
    paddings = [getattr(module, "padding_idx", None) for module in modules if type(module) in counting]
    counted_from = [number for number in paddings if number is not None]
    return settings | ({"padding_idx": counted_from} if counted_from else {})


def _counts_positions(kind: type[nn.Module]) -> bool:
    return "Position" in kind.__name__ or any(name.startswith("create_position_ids") for name in dir(kind))

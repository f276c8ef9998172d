"""What a host is, in texts that can be compared: its weights, settings, number format, adapters, and its tokenizer.

identity = host_identity(model, tokenizer)
changed(before, now)                   # ["its dtype was float32, now bfloat16"]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from probemon.host.fingerprint import (
    active_adapters_fingerprint,
    config_fingerprint,
    fingerprint,
    tokenizer_fingerprint,
)
from probemon.host.model import host_state

_WORDS = {
    "weights": "its weights were {}, now {}",
    "config": "its settings were {}, now {}",
    "dtype": "its dtype was {}, now {}",
    "quantisation": "its quantisation was {}, now {}",
    "adapters": "its adapters were {}, now {}",
    "adapter_weights": "the weights of its adapters were {}, now {}",
    "tokenizer": "the tokenizer was {}, now {}",
    "chat_template": "the chat template was {}, now {}",
}


def host_identity(model: Any, tokenizer: Any = None) -> dict[str, str]:
    """Return what a host is, by what may change of it. Without a tokenizer nothing is said of one, and without adapters
    nothing of their weights.

    Milliseconds: weights are named by samples of them, as in `fingerprint`. Where they lie, and on how many devices, is
    not of it.
    """
    state = host_state(model)
    scales = ", ".join(f"{name} x {scale:g}" for name, scale in state.adapter_scales)
    adapters = "; ".join(filter(None, (", ".join(state.adapters), scales, ", ".join(state.adapters_merged))))
    identity = {
        "weights": fingerprint(model),
        "config": config_fingerprint(model),
        "dtype": state.dtype,
        "quantisation": state.quantisation,
        "adapters": adapters,
    }
    if adapter_weights := active_adapters_fingerprint(model, state.adapters):
        identity["adapter_weights"] = adapter_weights
    if tokenizer is not None:
        template = str(getattr(tokenizer, "chat_template", None) or "")
        identity["tokenizer"] = tokenizer_fingerprint(tokenizer)
        identity["chat_template"] = hashlib.sha256(template.encode()).hexdigest()[:32] if template else ""
    return identity


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say what differs of what both state."""
    return [
        words.format(before[name] or "none", now[name] or "none")
        for name, words in _WORDS.items()
        if name in before and name in now and before[name] != now[name]
    ]

"""Identity of a model as comparable texts: weights, settings, dtype, adapters, tokenizer.

identity = model_identity(model, tokenizer)
changed(before, now)                   # ["its dtype was float32, now bfloat16"]
manifest_host(model, "org/name")         # for a pack's manifest

identities = ModelIdentities()
identities.of(model, tokenizer, mark)  # cached
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

from probemon.host.changes import ModelMark
from probemon.host.fingerprint import (
    active_adapters_fingerprint,
    config_fingerprint,
    fingerprint,
    tokenizer_fingerprint,
    tokenizer_mark,
)
from probemon.host.model import find_layers, hidden_size, model_state, unwrap
from probemon.host.settings import model_settings

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


def model_identity(model: Any, tokenizer: Any = None) -> dict[str, str]:
    """Return a model's identity; absent parts (tokenizer, adapters) are left out.

    Reads the weights. Devices do not count.
    """
    return {**_of_model(model), **_of_tokenizer(tokenizer)}


def _of_model(model: Any) -> dict[str, str]:
    state = model_state(model)
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
    return identity


def _of_tokenizer(tokenizer: Any) -> dict[str, str]:
    if tokenizer is None:
        return {}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:32] if template else "",
    }


class ModelIdentities:
    """A cache of identities. Not thread-safe.

    Settings are read each time; weights, adapters and tokenizer only if their marks changed.
    """

    def __init__(self) -> None:
        self._of_models: weakref.WeakKeyDictionary[Any, tuple[ModelMark, dict[str, str]]] = weakref.WeakKeyDictionary()
        self._of_tokenizers: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, str]]] = weakref.WeakKeyDictionary()

    def of(self, model: Any, tokenizer: Any, mark: ModelMark | None) -> dict[str, str]:
        """Return `model_identity(model, tokenizer)`; a `mark` of None always reads the model."""
        cached = self._of_models.get(model)
        if cached is None or mark is None or mark.differs(cached[0]):
            identity = _of_model(model)
            if mark is not None:
                self._of_models[model] = (mark, identity)
        else:
            identity = {**cached[1], "config": config_fingerprint(model)}
        return {**identity, **self._of(tokenizer)}

    def _of(self, tokenizer: Any) -> dict[str, str]:
        if tokenizer is None:
            return {}
        mark, cached = tokenizer_mark(tokenizer), self._of_tokenizers.get(tokenizer)
        if cached is None or cached[0] != mark:
            cached = self._of_tokenizers[tokenizer] = (mark, _of_tokenizer(tokenizer))
        return cached[1]


def manifest_host(model: Any, model_id: str | None) -> dict[str, Any]:
    """Return the manifest's section `host`, which `check_host` compares."""
    base, active = unwrap(model), model_state(model).adapters
    return {
        "model_id": model_id,
        "hidden_size": hidden_size(base),
        "n_layers": len(find_layers(base)[1]),
        "fingerprint": fingerprint(base),
        "settings": model_settings(base),
        **({"adapters": list(active), "adapter_weights": active_adapters_fingerprint(base, active)} if active else {}),
    }


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return texts for the parts that both have and that differ."""
    return [
        words.format(before[name] or "none", now[name] or "none")
        for name, words in _WORDS.items()
        if name in before and name in now and before[name] != now[name]
    ]

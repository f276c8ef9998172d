"""What a host is, in texts that can be compared: its weights, settings, number format, adapters, and its tokenizer.

identity = host_identity(model, tokenizer)
changed(before, now)                   # ["its dtype was float32, now bfloat16"]
stated_host(model, "org/name")         # the same as a pack's manifest has it, without a tokenizer

identities = HostIdentities()
identities.of(model, tokenizer, mark)  # the same, asked again and again: microseconds where nothing changed
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

from probemon.host.changes import HostMark
from probemon.host.fingerprint import (
    active_adapters_fingerprint,
    config_fingerprint,
    fingerprint,
    tokenizer_fingerprint,
    tokenizer_mark,
)
from probemon.host.model import find_layers, hidden_size, host_state, unwrap
from probemon.host.settings import host_settings

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

    Weights are read, as in `fingerprint`. Where they lie, and on how many devices, is not of it.
    """
    return {**_of_model(model), **_of_tokenizer(tokenizer)}


def _of_model(model: Any) -> dict[str, str]:
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
    return identity


def _of_tokenizer(tokenizer: Any) -> dict[str, str]:
    if tokenizer is None:
        return {}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:32] if template else "",
    }


class HostIdentities:
    """What hosts are, each as it was when it was last looked at; what is cheap to compare says whether to look anew.

    Settings are read each time. Weights and adapters are looked at anew where a host's `HostMark` is another, a
    tokenizer where it is another one or its `tokenizer_mark` is. One caller at a time.
    """

    def __init__(self) -> None:
        self._of_models: weakref.WeakKeyDictionary[Any, tuple[HostMark, dict[str, str]]] = weakref.WeakKeyDictionary()
        self._of_tokenizers: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, str]]] = weakref.WeakKeyDictionary()

    def of(self, model: Any, tokenizer: Any, mark: HostMark | None) -> dict[str, str]:
        """Return `host_identity(model, tokenizer)` of a host with this mark; None: it has none, and is looked at."""
        known = self._of_models.get(model)
        if known is None or mark is None or mark.differs(known[0]):
            of_model = _of_model(model)
            if mark is not None:
                self._of_models[model] = (mark, of_model)
        else:
            of_model = {**known[1], "config": config_fingerprint(model)}
        return {**of_model, **self._of(tokenizer)}

    def _of(self, tokenizer: Any) -> dict[str, str]:
        if tokenizer is None:
            return {}
        mark, known = tokenizer_mark(tokenizer), self._of_tokenizers.get(tokenizer)
        if known is None or known[0] != mark:
            known = self._of_tokenizers[tokenizer] = (mark, _of_tokenizer(tokenizer))
        return known[1]


def stated_host(model: Any, model_id: str | None) -> dict[str, Any]:
    """Return what a manifest says of the host that a pack was made on, which `check_host` compares."""
    host, active = unwrap(model), host_state(model).adapters
    return {
        "model_id": model_id,
        "hidden_size": hidden_size(host),
        "n_layers": len(find_layers(host)[1]),
        "fingerprint": fingerprint(host),
        "settings": host_settings(host),
        **({"adapters": list(active), "adapter_weights": active_adapters_fingerprint(host, active)} if active else {}),
    }


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say what differs of what both state."""
    return [
        words.format(before[name] or "none", now[name] or "none")
        for name, words in _WORDS.items()
        if name in before and name in now and before[name] != now[name]
    ]

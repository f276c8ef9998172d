"""Model settings that affect hidden states.

settings = state_settings(config.to_dict())     # {"rms_norm_eps": 1e-06, "hidden_act": "silu", ...}
differing(settings, others)                     # ["rms_norm_eps is 0.1 and was 1e-06"]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Settings without effect on states: outputs, training, execution order, names, special tokens. Weight formats are in
# `quantisation`.
_NO_STATE = re.compile(
    r"_\w*|transformers_version|architectures|(torch_)?dtype|return_dict|use_cache|\w+_implementation"
    r"|((\w+_)?(bos|eos|pad|sep|cls|unk|start|end)_)?token_ids?|id2label|label2id|num_labels|problem_type"
    r"|tie_word_embeddings|quantization_config|task_specific_params|initializer_\w+|init_\w+|\w+_init_\w+|\w*_loss_\w+"
    r"|classifier_\w+|summary_\w+|num_logits_to_keep|chunk_size_feed_forward|pretraining_tp"
    r"|use_mambapy|use_mamba_kernels|use_associative_scan|use_mem_eff_path|slow_but_exact|deterministic_flash_attn"
)
# Dropout rates (except one that rescales experts) and returned outputs. The same names with other types of value
# (`token_dropout`, `output_gate_type`) affect states.
_RATE, _RETURNED = re.compile(r"(?!moe_token_dropout)\w*drop\w*"), re.compile(r"output_\w+")
_SHOWN = 60  # characters


def state_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect states, as JSON values; nested configurations likewise."""
    return {
        str(name): state_settings(value) if _is_config(value) else _plain(value)
        for name, value in config.items()
        if sets_states(str(name), value)
    }


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe differences in the settings present in both; transformers releases add and rename some.

    A missing part of a nested setting (`rope_parameters`) is None.
    """
    return list(_differing(before, now, "", [name for name in before if name in now]))


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], above: str, names: list[str]) -> Iterator[str]:
    for name in names:
        was, value = before.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(value, Mapping) and (_is_config(was) or _is_config(value)):
            yield from _differing(was, value, f"{above}{name}.", [part for part in was if part in value])
        elif isinstance(was, Mapping | None) and isinstance(value, Mapping | None):
            was, value = was or {}, value or {}
            yield from _differing(was, value, f"{above}{name}.", list({**was, **value}))
        elif not _same(was, value):
            yield f"{above}{name} is {_short(value)} and was {_short(was)}"


def _is_config(value: Any) -> bool:
    """True if a value is a nested configuration."""
    return isinstance(value, Mapping) and "model_type" in value


def sets_states(name: str, value: Any) -> bool:
    """Return True if states depend on this setting."""
    if _RATE.fullmatch(name):
        return isinstance(value, bool)
    if _RETURNED.fullmatch(name):
        return not isinstance(value, bool)
    return _NO_STATE.fullmatch(name) is None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, float) or isinstance(other, float):  # equal up to fp32 rounding
        numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
        try:
            return numbers and math.isclose(value, other, rel_tol=1e-6)
        except OverflowError:  # an int beyond every float
            return False
    return bool(value == other)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

"""Settings of a host on which its states depend: which of a configuration they are, and in what two differ.

settings = state_settings(config.to_dict())     # {"rms_norm_eps": 1e-06, "hidden_act": "silu", ...}, as JSON has it
differing(settings, others)                     # ["rms_norm_eps is 0.1 and was 1e-06"]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# On these no state of a token depends: what is done with states afterwards, in training, or in what order; names, and
# which tokens begin and end a text. How weights are kept is told by `quantisation`.
_NO_STATE = re.compile(
    r"_\w*|transformers_version|architectures|(torch_)?dtype|return_dict|use_cache|output_\w+|\w+_implementation"
    r"|(\w+_)?token_ids?|id2label|label2id|num_labels|problem_type|tie_word_embeddings|quantization_config"
    r"|\w*drop\w*|initializer_\w+|init_\w+|\w+_init_\w+|\w*_loss_\w+|router_jitter_noise"
    r"|classifier_\w+|summary_\w+|num_logits_to_keep|chunk_size_feed_forward|pretraining_tp"
    r"|use_mambapy|use_mamba_kernels|use_associative_scan|use_mem_eff_path|slow_but_exact|deterministic_flash_attn"
)
_SHOWN = 60  # characters of a value


def state_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a configuration's settings on which states depend, in values that JSON has."""
    return {str(name): _plain(value) for name, value in config.items() if not _NO_STATE.fullmatch(str(name))}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what differs of the settings that both state: releases of transformers add some, and rename others."""
    then, flat = dict(_flat(before)), dict(_flat(now))
    return [
        f"{name} is {_short(flat[name])} and was {_short(value)}"
        for name, value in then.items()
        if name in flat and not _same(value, flat[name])
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, float) or isinstance(other, float):  # what fp32 made of a number is that number
        numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
        try:
            return numbers and math.isclose(value, other, rel_tol=1e-6)
        except OverflowError:  # a whole number beyond every float
            return False
    return bool(value == other)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

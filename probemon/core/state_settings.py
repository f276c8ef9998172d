"""Settings of a host on which its states depend: which of a configuration they are, and in what two differ.

settings = state_settings(config.to_dict())     # {"rms_norm_eps": 1e-06, "hidden_act": "silu", ...}, as JSON has it
differing(settings, others)                     # ["rms_norm_eps is 0.1 and was 1e-06"]
sets_states("use_cache", True)                  # False: no state depends on it
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# On these no state of a token depends: what is done with states afterwards, in training, or in what order; names, and
# which tokens begin and end a text. How weights are kept is told by `quantisation`.
_NO_STATE = re.compile(
    r"_\w*|transformers_version|architectures|(torch_)?dtype|return_dict|use_cache|\w+_implementation"
    r"|((\w+_)?(bos|eos|pad|sep|cls|unk|start|end)_)?token_ids?|id2label|label2id|num_labels|problem_type"
    r"|tie_word_embeddings|quantization_config|task_specific_params|initializer_\w+|init_\w+|\w+_init_\w+|\w*_loss_\w+"
    r"|classifier_\w+|summary_\w+|num_logits_to_keep|chunk_size_feed_forward|pretraining_tp"
    r"|use_mambapy|use_mamba_kernels|use_associative_scan|use_mem_eff_path|slow_but_exact|deterministic_flash_attn"
)
# Rates at which training drops something, but for one by which experts are made smaller afterwards; and what is
# returned. What is called so and is of another kind (`token_dropout`, `output_gate_type`) is of states.
_RATE, _RETURNED = re.compile(r"(?!moe_token_dropout)\w*drop\w*"), re.compile(r"output_\w+")
_SHOWN = 60  # characters of a value


def state_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a configuration's settings on which states depend, in values that JSON has; likewise of the
    configurations in it.
    """
    return {
        str(name): state_settings(value) if _is_config(value) else _plain(value)
        for name, value in config.items()
        if sets_states(str(name), value)
    }


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what differs of the settings that both state: releases of transformers add some, and rename others.

    Of a setting that has parts (`rope_parameters`) one that is not stated is None: it means a default that is another
    where it is stated.
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
    """Whether a value is a configuration in another one, of a host's encoder or attention."""
    return isinstance(value, Mapping) and "model_type" in value


def sets_states(name: str, value: Any) -> bool:
    """Return whether states depend on a setting of this name that has this value."""
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

"""Memory of a cache on disk, to be continued in another process.

    export_memory(model, cache, "memory.safetensors")
    cache = import_memory(model, "memory.safetensors")
    model.generate(ids, past_key_values=cache)

The safetensors file also has the attention window, and a hash of the model's configuration and weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import DynamicCache

from probemon.adapters.ltm.cache import KeepsMemory, memory_layer
from probemon.adapters.ltm.state import MemoryState
from probemon.errors import ConfigError, ModelMismatch
from probemon.host.fingerprint import active_adapters_fingerprint
from probemon.host.model import model_state
from probemon.util.checks import check_path
from probemon.util.files import replacing, save_tensors

_FORMAT = "probemon-memory-1"
_FIELDS = tuple(MemoryState.__dataclass_fields__)


def model_hash(model: Any) -> str:
    """Return a hash of a model's configuration, weights, and active adapters with their settings."""
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in ("transformers_version", "_name_or_path", "memory_slots", "use_cache", "architectures", "dtype")
    }
    state = model_state(model)
    adapters = [state.adapters, state.adapters_merged, active_adapters_fingerprint(model, state.adapters)]
    digest = hashlib.sha256(json.dumps([config, adapters], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def export_memory(model: Any, past_key_values: Any, path: str | os.PathLike[str]) -> Path:
    """Write the memory of a cache, atomically. Raises `ConfigError` unless every layer of the cache keeps one."""
    target = check_path("path", path)
    tensors: dict[str, torch.Tensor] = {}
    n_columns = 0
    layers: list[Any] = getattr(past_key_values, "layers", [])
    for number, layer in enumerate(layers):
        if not isinstance(layer, KeepsMemory) or layer.padding is None or layer.keys is None or layer.values is None:
            continue
        n_columns = layer.get_seq_length()
        tensors[f"{number}.window_keys"] = layer.keys
        tensors[f"{number}.window_values"] = layer.values
        tensors[f"{number}.padding"] = layer.padding
        if layer.memory is not None:
            tensors |= {f"{number}.{name}": getattr(layer.memory, name) for name in _FIELDS}
    missing = [number for number in range(len(layers)) if tensors and f"{number}.padding" not in tensors]
    if missing:
        raise ConfigError(
            f"layer {missing[0]} of this cache keeps no memory, and a file of memories would lose what it holds: keep"
            " the cache itself, or use a model with memory slots in every layer"
        )
    if not tensors:
        raise ConfigError("this cache holds no memory: give the past_key_values of a model with memory slots")
    metadata = {"format": _FORMAT, "host": model_hash(model), "columns": str(n_columns)}
    copies = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    with replacing(target) as temporary:
        save_tensors(temporary, copies, metadata)
    return target


def import_memory(model: Any, path: str | os.PathLike[str]) -> DynamicCache:
    """Return a cache with the memory of a file.

    Raises `ModelMismatch` for the memory of another model, `ConfigError` for an unreadable file.
    """
    source = check_path("path", path)
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in list(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source} cannot be read as the memory of a model: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ConfigError(f"{source} is not a memory that this probemon wrote ({_FORMAT}): export_memory writes one")
    if metadata.get("host") != model_hash(model):
        raise ModelMismatch(
            f"{source} is the memory of another model (its configuration or weights differ): load the one that wrote it"
        )
    cache = DynamicCache(config=model.config)
    try:
        n_columns = int(metadata["columns"])
        for number in range(len(cache.layers)):
            _restore(memory_layer(cache, number), number, tensors, n_columns, model.device)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is truncated or was edited: {error}. Export the memory again") from error
    return cache


def _restore(layer: Any, number: int, tensors: dict[str, torch.Tensor], n_columns: int, device: Any) -> None:
    keys, values = (tensors[f"{number}.window_{name}"].to(device) for name in ("keys", "values"))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.padding = keys, values, tensors[f"{number}.padding"].to(device)
    layer.cumulative_length = n_columns
    if f"{number}.n" in tensors:
        layer.memory = MemoryState(**{name: tensors[f"{number}.{name}"].to(device) for name in _FIELDS})

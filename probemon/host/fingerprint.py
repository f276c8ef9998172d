"""Fingerprints of a model's weights, adapters, configuration and tokenizer.

fingerprint(model)                 # 'bf16-sums:3f1c...', as bf16, without adapters
adapters_fingerprint(model, host)  # 'adapters:5d0b...'
active_adapters_fingerprint(model, model_state(model).adapters)   # 'adapter-sums:c81e...'
weights_fingerprint(model)         # 'weights:90c2...', exact
config_fingerprint(model)          # 'config:08aa...'
tokenizer_fingerprint(tokenizer)   # '7be1...'
tokenizer_mark(tokenizer)          # changes, in microseconds
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from probemon.host.adapters import KNOWN, MEMORY_NAME, OWN_NAME, memories_on, own_of, xlora_of
from probemon.host.internals import (
    is_wrapping_tensor,
    uncompiled,
    without_wrappers,
    wrapped_by_adapter,
    xlora_classifier,
)
from probemon.host.model import is_encoder_decoder, unwrap, weights_in_memory
from probemon.host.settings import config_of

_WIDTH = 512  # columns of eight bytes
_PART = 1 << 24  # values summed at once
# PEFT settings that do not change hidden states: origin, placement (tensor names show it), initialisation, training.
_NOT_OF_STATES = re.compile(
    r"_.*|base_model_name_or_path|revision|task_type|auto_mapping|peft_version|inference_mode|init_lora_weights|adapters"
    r"|\w*dropout\w*|(corda|eva|loftq|lora_ga|runtime|target_svd|velora)_config|target_\w+|exclude_modules"
    r"|modules_to_save|layers_\w+|megatron_\w+"
)
# Entries about origin, loading and outputs.
_NOT_SETTINGS = {
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
}


def fingerprint(model: Any) -> str:
    """Return a name for the weights: sums over every value of decoder and encoder as bf16, without adapters.

    fp32 and bf16 loads agree. Takes about a second for a few GB on a CPU. Sums can be forged: no proof of integrity.
    """
    digest = hashlib.sha256()
    for name, sums in sorted(_of_weights(model)):
        digest.update(f"{name}:".encode() + sums)
    return f"bf16-sums:{digest.hexdigest()[:32]}"


def weights_fingerprint(model: Any) -> str:
    """Return a name for the exact parameters and buffers, without adapters.

    Takes about a second for a few GB.
    """
    digest, adapters = hashlib.sha256(), _of_adapters(model)
    for prefix, module in model.named_modules():
        if module in adapters:
            continue
        with weights_in_memory(module):
            for name, tensor in _own_tensors(module):
                digest.update(without_wrappers(f"{prefix}.{name}").encode())
                digest.update(_bytes(tensor))
    return f"weights:{digest.hexdigest()[:32]}"


def _of_weights(model: Any) -> Iterator[tuple[str, bytes]]:
    if is_encoder_decoder(model):  # its heads may be inside its base model
        base = unwrap(model)
        part, head = base.base_model, base.get_output_embeddings()
    else:
        part, head = model.get_decoder() if hasattr(model, "get_decoder") else model, None
    left_out = _of_adapters(part) | {head}
    for prefix, module in part.named_modules():
        if module in left_out:
            continue
        with weights_in_memory(module):
            for name, tensor in _own_tensors(module):
                if name not in module._non_persistent_buffers_set:  # others follow from the settings
                    yield without_wrappers(f"{prefix}.{name}"), _sums(tensor)


def _sums(tensor: Tensor) -> bytes:
    """Return the shape, and row and column sums of the bits as a table of 64-bit integers.

    Sums modulo 2 ** 64 do not depend on a device's order. Only floats are rounded to bf16.
    """
    flat = _flat(tensor)
    columns = torch.zeros(_WIDTH, dtype=torch.int64, device=flat.device)
    rows = []
    for part in flat.split(_PART):
        values = part.to(torch.bfloat16) if part.is_floating_point() else part
        bits = values.contiguous().view(torch.uint8)
        for table in _tables(bits):
            columns += table.sum(dim=0)
            rows.append(table.sum(dim=1))
    return f"{tuple(tensor.shape)} ".encode() + torch.cat([columns, *rows]).cpu().numpy().tobytes()


def _tables(bits: Tensor) -> Iterator[Tensor]:
    """Yield whole rows as a view, then the padded rest. Copying all would fragment memory."""
    row = 8 * _WIDTH
    if bits.storage_offset() % 8:  # an unaligned view
        bits = bits.clone()
    n_whole = len(bits) // row * row
    if n_whole:
        yield bits[:n_whole].view(torch.int64).view(-1, _WIDTH)
    if n_whole < len(bits):
        yield functional.pad(bits[n_whole:], (0, n_whole + row - len(bits))).view(torch.int64).view(1, _WIDTH)


def _of_adapters(model: nn.Module) -> set[nn.Module]:
    """Return the modules that PEFT added. Not tensors: offloading replaces these."""
    adapters = set[nn.Module]()
    for module in model.modules():
        inner = wrapped_by_adapter(module)
        if inner is not None:
            adapters |= set(module.modules()) - set(inner.modules())
    return adapters


def _flat(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    if is_wrapping_tensor(whole):  # quantised or sharded, with few operations
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole.dequantize()
    return whole.reshape(-1)


def config_fingerprint(model: Any) -> str:
    """Return a name for the settings of text part and encoder."""
    settings = {
        name: value
        for name, value in config_of(model).to_dict().items()
        if name not in _NOT_SETTINGS and not name.startswith("_")
    }
    return f"config:{hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]}"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a name for all that a text's tokens depend on; not truncation and padding."""
    return hashlib.sha256(_of_tokens(tokenizer).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def tokenizer_mark(tokenizer: Any) -> tuple[Any, ...]:
    """Return values that show quickly whether a tokenizer changed: size, added tokens, rules, chat template.

    Misses a vocabulary exchanged for one of the same size.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: tuple[Any, ...] = ()
    if backend is not None:
        added = backend.get_added_tokens_decoder()
        rules = (id(backend), backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder, added)
    return (len(tokenizer), str(getattr(tokenizer, "chat_template", None)), *map(repr, rules))


def _of_tokens(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return repr(sorted(tokenizer.get_vocab().items()))
    text = str(backend.to_str())
    if backend.truncation is None and backend.padding is None:
        return text
    copy = type(backend).from_str(text)
    copy.no_truncation()
    copy.no_padding()
    return str(copy.to_str())


def adapters_fingerprint(model: Any, host: Any) -> str:
    """Return a name for every bit of all adapters on `host`, inside `model`; "" without any."""
    return _name_of_adapters("adapters", _parts(model, host, _bytes))


def active_adapters_fingerprint(model: Any, active: Collection[str]) -> str:
    """Return a name for the `active` adapters (names as in `ModelState`), as bf16; "" without any."""
    if not active:
        return ""
    base = unwrap(model)
    parts = [(without_wrappers(name), part) for name, part in _parts(base, base, _sums, active)]
    xlora = xlora_of(base)
    if xlora is not None:  # outside of the base model
        classifier = xlora_classifier(xlora[0]).named_parameters()
        parts += [(f"xlora {name}", _sums(tensor)) for name, tensor in classifier]
    return _name_of_adapters("adapter-sums", parts)


def _name_of_adapters(kind: str, parts: Iterable[tuple[str, bytes]]) -> str:
    hashed = sorted({name: hashlib.sha256(content).hexdigest() for name, content in parts}.items())
    return f"{kind}:{hashlib.sha256(json.dumps(hashed).encode()).hexdigest()[:32]}" if hashed else ""


def _parts(
    model: Any, base: Any, read: Callable[[Tensor], bytes], active: Collection[str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of all or the `active` adapters, by name."""
    own, inside, adapters = own_of(base), set(base.modules()), _of_adapters(base)
    steers = active is None or OWN_NAME in active
    # X-LoRA's classifier is outside; a routed adapter counts on the model that it steers.
    inside |= {part for module in model.modules() if module in KNOWN for part in module.modules()}
    around = [(name, module) for name, module in model.named_modules() if module not in inside]
    others = set[tuple[nn.Module, str]]() if active is None else _of_others(adapters, active)
    for prefix, module in [*base.named_modules(), *around]:
        with weights_in_memory(module):
            if module not in inside or module in adapters:
                tensors_here = (own for own in _own_tensors(module) if (module, own[0]) not in others)
                for name, tensor in tensors_here:
                    yield f"{prefix}.{name}", read(tensor)
        if isinstance(getattr(module, "scaling", None), Mapping):  # a PEFT layer
            names = (adapter for adapter in module.scaling if active is None or adapter in active)
            scales = {str(adapter): float(module.scaling[adapter]) for adapter in names}
            if scales:
                yield f"{prefix}.scaling", json.dumps(scales, sort_keys=True).encode()
    for adapter, config in getattr(uncompiled(model), "peft_config", {}).items():
        routed = type(config).__module__.startswith("probemon.")  # its settings follow below
        if not routed and (active is None or adapter in active):
            yield f"{adapter} settings", _settings_of_adapter(config)
    own_parts = {} if own is None or not steers else {OWN_NAME: (own.settings(), own.state_dict())}
    own_parts |= {f"{MEMORY_NAME} {one.number}": (one.settings(), one.memory.state_dict()) for one in memories_on(base)}
    for name, (settings, tensors) in own_parts.items():
        yield f"{name} settings", json.dumps(settings, sort_keys=True).encode()
        for part, tensor in tensors.items():
            yield f"{name} {part}", read(tensor)


def _settings_of_adapter(config: Any) -> bytes:
    """Return a PEFT adapter's settings that may change hidden states."""
    settings = {
        name: sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value
        for name, value in vars(config).items()
        if not _NOT_OF_STATES.fullmatch(name)
    }
    return json.dumps(settings, sort_keys=True, default=_of_part).encode()


def _of_part(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _of_others(adapters: Collection[nn.Module], active: Collection[str]) -> set[tuple[nn.Module, str]]:
    """Return the tensors of inactive adapters."""
    others = set[tuple[nn.Module, str]]()
    for layer in (module for module in adapters if wrapped_by_adapter(module) is not None):
        for container in layer.children():
            if container in adapters and isinstance(container, nn.ModuleDict):
                off = (module for name, module in container.items() if name not in active)
                parts = (part for module in off for part in module.modules())
                others |= {(part, name) for part in parts for name, _ in _own_tensors(part)}
            elif container in adapters and hasattr(
                type(container), "keys"
            ):  # torch's dict of parameters, PEFT's of buffers
                others |= {(container, name) for name, _ in _own_tensors(container) if name not in active}
    return others


def _bytes(tensor: Tensor) -> bytes:
    flat = _flat(tensor).contiguous().view(torch.uint8).cpu()
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + flat.numpy().tobytes()

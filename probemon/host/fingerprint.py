"""Fingerprints: names for the weights of a host, and for those of the adapters on it.

fingerprint(model)                 # 'bf16-sums:3f1c...', for an fp32 and a bf16 load; adapters do not count
adapters_fingerprint(model, host)  # 'adapters:5d0b...', of every value; "" without any
active_adapters_fingerprint(model, host_state(model).adapters)   # 'adapter-sums:c81e...', "" without any
weights_fingerprint(model)         # 'weights:90c2...', of every value
config_fingerprint(model)          # 'config:08aa...', of what its text part, and its encoder, are set to
tokenizer_fingerprint(tokenizer)   # '7be1...', of all that a text's tokens depend on
tokenizer_mark(tokenizer)          # what to compare first: microseconds
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
from probemon.host.settings import host_config

_WIDTH = 512  # columns of eight bytes
_PART = 1 << 24  # values that are summed at once
# Of the settings of PEFT's adapters: of whom they are, where they were put and how they began, which tensors and their
# names tell, and what training does.
_NOT_OF_STATES = re.compile(
    r"_.*|base_model_name_or_path|revision|task_type|auto_mapping|peft_version|inference_mode|init_lora_weights|adapters"
    r"|\w*dropout\w*|(corda|eva|loftq|lora_ga|runtime|target_svd|velora)_config|target_\w+|exclude_modules"
    r"|modules_to_save|layers_\w+|megatron_\w+"
)
# What a configuration says besides: who wrote it, how it is loaded, and what is returned.
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
    """A name for the host's weights: of sums over every value of its decoder, and of an encoder, as bf16.

    Values are rounded to bf16 first, so the same checkpoint loaded as fp32 or bf16 has one fingerprint; adapters do
    not count. Every value is read, a second for each few GB on a CPU: a head that was ablated or an embedding that was
    edited makes another one. It tells models apart and proves no integrity: sums can be made to agree.
    """
    digest = hashlib.sha256()
    for name, sums in sorted(_of_weights(model)):
        digest.update(f"{name}:".encode() + sums)
    return f"bf16-sums:{digest.hexdigest()[:32]}"


def weights_fingerprint(model: Any) -> str:
    """A name for all values of a host's parameters and buffers, as they are kept; adapters do not count.

    It reads them all, a second for each few GB: for what is kept on disk as a function of these very weights.
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
    if is_encoder_decoder(model):  # whose heads are beside its base model, or in it
        host = unwrap(model)
        part, head = host.base_model, host.get_output_embeddings()
    else:
        part, head = model.get_decoder() if hasattr(model, "get_decoder") else model, None
    left_out = _of_adapters(part) | {head}
    for prefix, module in part.named_modules():
        if module in left_out:
            continue
        with weights_in_memory(module):
            for name, tensor in _own_tensors(module):
                if name not in module._non_persistent_buffers_set:  # what is computed anew from the settings
                    yield without_wrappers(f"{prefix}.{name}"), _sums(tensor)


def _sums(tensor: Tensor) -> bytes:
    """The shape of a tensor, and sums over rows and columns of a table of its bits, eight bytes as one whole number.

    Sums of whole numbers modulo 2 ** 64 are the same in whatever order a device adds; one value that is another changes
    a row's and a column's. What is no float, such as packed codes, is taken as it is.
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
    """The whole rows, which are not copied: every attach would leave a gap as large as that in the C library's memory.
    Then what is left, filled up to a row.
    """
    row = 8 * _WIDTH
    if bits.storage_offset() % 8:  # a view of a larger tensor, which cannot be read eight bytes at a time
        bits = bits.clone()
    n_whole = len(bits) // row * row
    if n_whole:
        yield bits[:n_whole].view(torch.int64).view(-1, _WIDTH)
    if n_whole < len(bits):
        yield functional.pad(bits[n_whole:], (0, n_whole + row - len(bits))).view(torch.int64).view(1, _WIDTH)


def _of_adapters(model: nn.Module) -> set[nn.Module]:
    """Return the modules that PEFT put beside a model's own: all of its layers but what they are around.

    They are modules, since tensors are others while they are brought into memory.
    """
    adapters = set[nn.Module]()
    for module in model.modules():
        inner = wrapped_by_adapter(module)
        if inner is not None:
            adapters |= set(module.modules()) - set(inner.modules())
    return adapters


def _flat(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    if is_wrapping_tensor(whole):  # a quantised or sharded tensor of a class of its own has few operations
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole.dequantize()
    return whole.reshape(-1)


def config_fingerprint(model: Any) -> str:
    """A name for the settings of a host's text part and of its encoder, such as rotary positions.

    With the same weights, other settings are another host.
    """
    settings = {
        name: value
        for name, value in host_config(model).to_dict().items()
        if name not in _NOT_SETTINGS and not name.startswith("_")
    }
    return f"config:{hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]}"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A name for all that a text's tokens depend on.

    How the tokenizer was last told to cut and pad is not of it: texts are neither cut nor padded, and reading one
    changes that.
    """
    return hashlib.sha256(_of_tokens(tokenizer).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def tokenizer_mark(tokenizer: Any) -> tuple[Any, ...]:
    """What tells in microseconds that a tokenizer is to be looked at anew: how many tokens it has, those that were
    added, its rules and its chat template. A vocabulary that was exchanged for one of as many tokens does not show.
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
    """A name for the weights and settings of all adapters on `host`, which is in `model`; "" without any.

    Every bit counts, unlike in a fingerprint: an adapter that was trained a little longer is another one.
    """
    return _name_of_adapters("adapters", _parts(model, host, _bytes))


def active_adapters_fingerprint(model: Any, active: Collection[str]) -> str:
    """A name for the weights and settings of the adapters on a host that are `active`, as its `HostState` names them.

    Sums of them as bf16, as in `fingerprint`: it is the same in whatever dtype they are loaded, and whatever else is
    switched off beside them.
    """
    if not active:
        return ""
    host = unwrap(model)
    parts = [(without_wrappers(name), part) for name, part in _parts(host, host, _sums, active)]
    mixed = xlora_of(host)
    if mixed is not None:  # it decides outside of the host
        decides = xlora_classifier(mixed[0]).named_parameters()
        parts += [(f"xlora {name}", _sums(tensor)) for name, tensor in decides]
    return _name_of_adapters("adapter-sums", parts)


def _name_of_adapters(kind: str, parts: Iterable[tuple[str, bytes]]) -> str:
    hashed = sorted({name: hashlib.sha256(what).hexdigest() for name, what in parts}.items())
    return f"{kind}:{hashlib.sha256(json.dumps(hashed).encode()).hexdigest()[:32]}" if hashed else ""


def _parts(
    model: Any, host: Any, read: Callable[[Tensor], bytes], active: Collection[str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """All that adapters are, or those of PEFT's and the routed one that are `active`, by name."""
    own, inside, adapters = own_of(host), set(host.modules()), _of_adapters(host)
    steers = active is None or OWN_NAME in active
    # X-LoRA decides outside of its host; a routed adapter counts where it steers, in whatever it is kept.
    inside |= {part for module in model.modules() if module in KNOWN for part in module.modules()}
    around = [(name, module) for name, module in model.named_modules() if module not in inside]
    others = set[tuple[nn.Module, str]]() if active is None else _of_others(adapters, active)
    for prefix, module in [*host.named_modules(), *around]:
        with weights_in_memory(module):
            if module not in inside or module in adapters:
                kept = (own for own in _own_tensors(module) if (module, own[0]) not in others)
                for name, tensor in kept:
                    yield f"{prefix}.{name}", read(tensor)
        if isinstance(getattr(module, "scaling", None), Mapping):  # a layer of PEFT's
            known = (adapter for adapter in module.scaling if active is None or adapter in active)
            scales = {str(adapter): float(module.scaling[adapter]) for adapter in known}
            if scales:
                yield f"{prefix}.scaling", json.dumps(scales, sort_keys=True).encode()
    for adapter, config in getattr(uncompiled(model), "peft_config", {}).items():
        routed = type(config).__module__.startswith("probemon.")  # whose settings are said below, where it is on
        if not routed and (active is None or adapter in active):
            yield f"{adapter} settings", _settings_of_adapter(config)
    ours = {} if own is None or not steers else {OWN_NAME: (own.settings(), own.state_dict())}
    ours |= {f"{MEMORY_NAME} {one.number}": (one.settings(), one.memory.state_dict()) for one in memories_on(host)}
    for name, (settings, tensors) in ours.items():
        yield f"{name} settings", json.dumps(settings, sort_keys=True).encode()
        for part, tensor in tensors.items():
            yield f"{name} {part}", read(tensor)


def _settings_of_adapter(config: Any) -> bytes:
    """All settings of one of PEFT's adapters on which states may depend: how it is scaled, the seeds by which it
    chooses its places, what its kind does with its tensors.
    """
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
    """Return the tensors of adapters that are not active: PEFT's layers keep each adapter's under its name."""
    others = set[tuple[nn.Module, str]]()
    for layer in (module for module in adapters if wrapped_by_adapter(module) is not None):
        for kept in layer.children():
            if kept in adapters and isinstance(kept, nn.ModuleDict):
                off = (module for name, module in kept.items() if name not in active)
                parts = (part for module in off for part in module.modules())
                others |= {(part, name) for part in parts for name, _ in _own_tensors(part)}
            elif kept in adapters and hasattr(type(kept), "keys"):  # torch's dict of parameters, PEFT's of buffers
                others |= {(kept, name) for name, _ in _own_tensors(kept) if name not in active}
    return others


def _bytes(tensor: Tensor) -> bytes:
    flat = _flat(tensor).contiguous().view(torch.uint8).cpu()
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + flat.numpy().tobytes()

"""Inspection of a model: its decoder, its layers, its state.

model = unwrap(model)                  # without the wrappers of torch.compile and PEFT
decoder, layers = find_layers(model)
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from probemon.core.probes import parse_site
from probemon.core.scores import ModelState
from probemon.errors import ConfigError, UnsupportedModel
from probemon.host.adapters import CLOSED_NAME, MEMORY_NAME, OWN_NAME, memories_in, memories_on, own_of
from probemon.host.internals import (
    adapter_scales,
    adapters_by_row,
    adapters_in_force,
    all_modules,
    compiled_attributes,
    forget_generates_graph,
    has_accelerate_hook,
    has_generates_graph,
    is_adaption_prompt_class,
    is_dropout,
    is_tuner_class,
    switches_adapters,
    tensor_parallel_size,
    uncompiled,
)

# Names of a layer's attention and feed-forward blocks.
_BLOCKS = {"attn_out": ("self_attn", "attn", "attention", "self_attention"), "mlp_out": ("mlp", "feed_forward")}


def text_config(model: Any) -> Any:
    """Return the text decoder's configuration. Raises `UnsupportedModel`."""
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModel(
            f"{type(model).__name__} has no .config: probemon watches Hugging Face transformers models"
        )
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def hidden_size(model: Any) -> int:
    """Width D of the residual stream."""
    return int(text_config(model).hidden_size)


def drops_at_random(model: Any) -> str | None:
    """Return the name of a module that drops values at random now, or None."""
    for name, module in model.named_modules():
        if module.training and drop_rates(module):
            return name or type(module).__name__
    return None


def drop_rates(module: nn.Module) -> dict[str, float]:
    """Return a module's dropout rates above 0, by attribute name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and ("drop" in name or (name == "p" and is_dropout(module)))
    }


def longest_input(model: Any) -> int | None:
    """Return the number of positions, in tokens; None without a limit."""
    n_positions = getattr(text_config(model), "max_position_embeddings", None)
    if not isinstance(n_positions, int) or n_positions <= 0:
        return None
    for name, module in model.named_modules():  # RoBERTa counts from padding_idx + 1
        if (
            "position" in name.rsplit(".", 1)[-1]
            and len(getattr(module, "weight", ())) == n_positions
            and getattr(module, "padding_idx", None) is not None
        ):
            return n_positions - int(module.padding_idx) - 1
    return n_positions


def unwrap(model: Any) -> Any:
    """Return the model without wrappers of torch.compile and PEFT. Raises `UnsupportedModel`."""
    model = uncompiled(model)
    while hasattr(model, "get_base_model"):
        for name, config in getattr(model, "peft_config", {}).items():
            if getattr(config, "is_prompt_learning", False):
                raise UnsupportedModel(
                    f"adapter {name!r} learns a prompt: its virtual tokens have no position in the sequence. Use"
                    " a LoRA-like adapter"
                )
        model = uncompiled(model.get_base_model())
    return model


def is_encoder_decoder(model: Any) -> bool:
    """True for t5, bart: only the decoder is watched."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def find_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module whose forward runs the layers, and the layers (0-based).

    Raises `UnsupportedModel` unless exactly one shallowest list has the configured length.
    """
    names = [(text_config(model), "num_hidden_layers")]
    if is_encoder_decoder(model):
        names = [(model.config, "num_decoder_layers"), (model.config, "decoder_layers"), *names]
    lengths = (getattr(config, name, None) for config, name in names)
    n_layers = next((int(length) for length in lengths if length is not None), 0)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for base in (decoder, getattr(model, "base_model", decoder)):
        lists = [
            (name.count("."), module)
            for name, module in base.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == n_layers
        ]
        shallowest = [module for depth, module in lists if depth == min(depth for depth, _ in lists)]
        if len(shallowest) == 1:
            return base, shallowest[0]
    raise UnsupportedModel(
        f"expected one list of {n_layers} layers in {type(decoder).__name__}, found {len(shallowest)}: which of its"
        " modules are the layers is unknown"
    )


def site_module(layers: nn.ModuleList, site: str) -> nn.Module:
    """Return the module whose output is the site. Raises `ConfigError`, `UnsupportedModel`."""
    kind, at = parse_site(site)
    if at >= len(layers):
        raise ConfigError(f"site {site!r}: the model has layers 0..{len(layers) - 1}")
    layer = layers[at]
    if kind == "resid_post":
        return layer
    children = dict(layer.named_children())
    for name in _BLOCKS[kind]:
        if name in children:
            if "residual" in inspect.signature(children[name].forward).parameters:
                raise UnsupportedModel(adds_stream(site, children[name]))
            return children[name]
    raise UnsupportedModel(
        f"site {site!r}: {type(layer).__name__} has none of {', '.join(_BLOCKS[kind])}; it has {', '.join(children)}"
    )


def adds_stream(site: str, block: nn.Module) -> str:
    """Error text for a block whose output includes the residual stream."""
    return (
        f"site {site!r}: {type(block).__name__} adds the residual stream to its output, so its own part"
        f" cannot be read. Read resid_post.{parse_site(site)[1]}"
    )


def check_one_feed_forward(layers: nn.ModuleList, site: str) -> None:
    """Raise `UnsupportedModel` if the layer adds up several feed-forward parts."""
    kind, at = parse_site(site)
    if kind != "mlp_out" or at >= len(layers):
        return
    layer, block = layers[at], site_module(layers, site)
    others = [name for name, part in layer.named_children() if part is not block and _feeds_forward(name, part, block)]
    if others:
        name = next(name for name, part in layer.named_children() if part is block)
        raise UnsupportedModel(
            f"site {site!r}: {type(layer).__name__} has {', '.join(others)} besides {name} and adds up what these"
            f" feed-forward parts give: no module outputs the sum. Read resid_post.{at}"
        )


def _feeds_forward(name: str, part: nn.Module, block: nn.Module) -> bool:
    if name in _BLOCKS["attn_out"]:  # attention may have experts too
        return False
    inner = [(name, part), *part.named_modules()]
    return name in _BLOCKS["mlp_out"] or any(
        path.rpartition(".")[2] == "experts" or type(module) is type(block) for path, module in inner
    )


def model_state(model: Any) -> ModelState:
    """Return the current `ModelState`."""
    adapters: set[str] = set()
    merged: set[str] = set()
    scales: set[tuple[str, float]] = set()
    off: set[str] = set()
    by_row: tuple[str, ...] = ()
    kinds: set[str] = set()
    # Cached by class: missing attributes of hundreds of modules take milliseconds to look up.
    tuned: dict[type, bool] = {}
    modules: list[Any] = all_modules(model)
    for module in modules:
        kind = type(module)
        if kind not in tuned:
            tuned[kind] = is_tuner_class(kind)
            if is_adaption_prompt_class(kind):  # has no adapter name, and is removed while off
                adapters.add("adaption_prompt")
            # Their weights are not parameters.
            if kind.__module__.startswith("torch.ao.nn.quantized") and "Quantized" in module._get_name():
                kinds.add(module._get_name())
        if tuned[kind] and switches_adapters(module):  # a PEFT layer
            active, is_off = adapters_in_force(module), bool(module.disable_adapters)
            (off if is_off else adapters).update(active)
            if not is_off:
                merged |= set(getattr(module, "merged_adapters", ()))
                by_row = adapters_by_row(module) or by_row
                scaling, ran = adapter_scales(module), adapters_by_row(module) or active
                scales |= {(name, scaling[name]) for name in ran if name in scaling}
    closed = any(memory.closed for memory in memories_in(modules))
    is_on = {OWN_NAME: own_of(model) is not None, MEMORY_NAME: bool(memories_on(model)), CLOSED_NAME: closed}
    own_names = tuple(name for name, active in is_on.items() if active)
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    # torchao uses tensor subclasses; other quantisers, the configuration.
    kinds |= {type(p.data).__name__ for p in parameters} - {"Tensor", "Parameter", "DTensor"}
    quantiser = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantiser is not None:
        kinds.add(str(getattr(quantiser, "quant_method", quantiser)))
    return ModelState(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        adapters=(by_row or tuple(sorted(adapters))) + own_names,
        adapters_disabled=tuple(sorted(off - adapters)),
        adapters_merged=tuple(sorted(merged)),
        adapter_scales=tuple(sorted(scales)),
        quantisation=", ".join(sorted(kinds)),
        devices=tuple(
            sorted({"offloaded" if device.type == "meta" else str(device) for device in {p.device for p in parameters}})
        ),
        n_ranks=tensor_parallel_size(model),
    )


def weights_in_memory(module: nn.Module) -> Any:
    """Context manager that loads the parameters that accelerate offloads."""
    elsewhere = any(p.device.type == "meta" for p in module.parameters(recurse=False))
    if not elsewhere or not has_accelerate_hook(module):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module, execution_device="cpu")


def compiled_parts(model: Any) -> list[tuple[nn.Module, str]]:
    """Return the compiled modules of a model, each with the compiled attribute."""
    return [(module, name) for module in model.modules() for name in compiled_attributes(module)]


def is_compiled(model: Any) -> bool:
    """True if the model or a part was compiled."""
    return has_generates_graph(model) or bool(compiled_parts(model))


def forget_compiled(model: Any) -> None:
    """Force recompilation: graphs do not notice added or removed hooks."""
    if forget_generates_graph(model) or compiled_parts(model):
        torch.compiler.reset()

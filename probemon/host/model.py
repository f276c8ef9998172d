"""What probemon needs to know about a host model: its decoder, its layers, its state.

model = unwrap(model)                  # the transformers model inside torch.compile's or PEFT's wrapper
decoder, layers = find_layers(model)   # the module that runs the layers, and the layers
host_state(model)                      # what changes scores without changing the model: adapters, devices
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from probemon.core.probes import parse_site
from probemon.core.scores import HostState
from probemon.errors import ConfigError, NotSupportedHost
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

# What a layer calls its attention and its feed-forward block, whose outputs are added to the residual stream.
_BLOCKS = {"attn_out": ("self_attn", "attn", "attention", "self_attention"), "mlp_out": ("mlp", "feed_forward")}


def text_config(model: Any) -> Any:
    """The configuration of the text decoder (a multimodal host nests it)."""
    config = getattr(model, "config", None)
    if config is None:
        raise NotSupportedHost(
            f"{type(model).__name__} has no .config: probemon watches Hugging Face transformers models"
        )
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def hidden_size(model: Any) -> int:
    """Width D of the residual stream."""
    return int(text_config(model).hidden_size)


def drops_at_random(model: Any) -> str | None:
    """Return the name of a part that drops values at random when it is run, or None.

    Every part is asked: adapters that are put on later may train where the host does not.
    """
    for name, module in model.named_modules():
        if module.training and drop_rates(module):
            return name or type(module).__name__
    return None


def drop_rates(module: nn.Module) -> dict[str, float]:
    """Return the rates above 0 at which a module drops values in training, by the names of its attributes."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and ("drop" in name or (name == "p" and is_dropout(module)))
    }


def longest_input(model: Any) -> int | None:
    """The most tokens of one input that the host has positions for; None where there is no limit."""
    n_positions = getattr(text_config(model), "max_position_embeddings", None)
    if not isinstance(n_positions, int) or n_positions <= 0:
        return None
    for name, module in model.named_modules():  # RoBERTa and its kin begin to count after the position of padding
        if (
            "position" in name.rsplit(".", 1)[-1]
            and len(getattr(module, "weight", ())) == n_positions
            and getattr(module, "padding_idx", None) is not None
        ):
            return n_positions - int(module.padding_idx) - 1
    return n_positions


def unwrap(model: Any) -> Any:
    """The transformers model inside the wrappers of torch.compile and PEFT. Raises `NotSupportedHost`."""
    model = uncompiled(model)
    while hasattr(model, "get_base_model"):
        for name, config in getattr(model, "peft_config", {}).items():
            if getattr(config, "is_prompt_learning", False):
                raise NotSupportedHost(
                    f"adapter {name!r} learns a prompt: its virtual tokens stand at no column of the sequence. Use"
                    " a LoRA-like adapter"
                )
        model = uncompiled(model.get_base_model())
    return model


def is_encoder_decoder(model: Any) -> bool:
    """Whether the host has an encoder beside its decoder (t5, bart): the decoder is what is watched."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def find_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """Return the base module whose forward runs the layers, and the list of them (0-based).

    Of an encoder-decoder they are the decoder's. The list is the shallowest of the right length. Raises
    `NotSupportedHost`.
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
    raise NotSupportedHost(
        f"expected one list of {n_layers} layers in {type(decoder).__name__}, found {len(shallowest)}: which of its"
        " modules are the layers is unknown"
    )


def site_module(layers: nn.ModuleList, site: str) -> nn.Module:
    """Return the module whose output is the site: the layer, or its attention or feed-forward block.

    Raises `ConfigError`, `NotSupportedHost`.
    """
    kind, at = parse_site(site)
    if at >= len(layers):
        raise ConfigError(f"site {site!r}: the host has layers 0..{len(layers) - 1}")
    layer = layers[at]
    if kind == "resid_post":
        return layer
    children = dict(layer.named_children())
    for name in _BLOCKS[kind]:
        if name in children:
            if "residual" in inspect.signature(children[name].forward).parameters:
                raise NotSupportedHost(adds_stream(site, children[name]))
            return children[name]
    raise NotSupportedHost(
        f"site {site!r}: {type(layer).__name__} has none of {', '.join(_BLOCKS[kind])}; it has {', '.join(children)}"
    )


def adds_stream(site: str, block: nn.Module) -> str:
    """Return what an error says of a block that gives the stream beside what is its own."""
    return (
        f"site {site!r}: {type(block).__name__} adds the residual stream to what it gives, so that what it gives itself"
        f" has no place of its own. Read resid_post.{parse_site(site)[1]}"
    )


def check_one_feed_forward(layers: nn.ModuleList, site: str) -> None:
    """Raise `NotSupportedHost` where `mlp_out` would be one feed-forward part of several: the layer adds them up, and
    what they give together is no module's.
    """
    kind, at = parse_site(site)
    if kind != "mlp_out" or at >= len(layers):
        return
    layer, block = layers[at], site_module(layers, site)
    beside = [name for name, part in layer.named_children() if part is not block and _feeds_forward(name, part, block)]
    if beside:
        name = next(name for name, part in layer.named_children() if part is block)
        raise NotSupportedHost(
            f"site {site!r}: {type(layer).__name__} has {', '.join(beside)} beside {name}, and adds up what these"
            f" feed-forward parts give, which is the output of no module. Read resid_post.{at}"
        )


def _feeds_forward(name: str, part: nn.Module, block: nn.Module) -> bool:
    """Whether a part of a layer is a feed-forward part, as `block` is: by its name, by experts, or by its class."""
    if name in _BLOCKS["attn_out"]:  # attention may have experts, too
        return False
    inner = [(name, part), *part.named_modules()]
    return name in _BLOCKS["mlp_out"] or any(
        path.rpartition(".")[2] == "experts" or type(module) is type(block) for path, module in inner
    )


def host_state(model: Any) -> HostState:
    """What changes a host's hidden states without its being another model, as it is now."""
    adapters: set[str] = set()
    merged: set[str] = set()
    scales: set[tuple[str, float]] = set()
    off: set[str] = set()
    by_row: tuple[str, ...] = ()
    kinds: set[str] = set()
    # By class: to ask hundreds of modules for what they have not takes milliseconds, in every generate().
    tuned: dict[type, bool] = {}
    modules: list[Any] = all_modules(model)
    for module in modules:
        kind = type(module)
        if kind not in tuned:
            tuned[kind] = is_tuner_class(kind)
            if is_adaption_prompt_class(kind):  # it bears no adapter's name, and is taken out where it is off
                adapters.add("adaption_prompt")
            # The weights of these are no parameters.
            if kind.__module__.startswith("torch.ao.nn.quantized") and "Quantized" in module._get_name():
                kinds.add(module._get_name())
        if tuned[kind] and switches_adapters(module):  # a layer of PEFT's
            on, is_off = adapters_in_force(module), bool(module.disable_adapters)
            (off if is_off else adapters).update(on)
            if not is_off:
                merged |= set(getattr(module, "merged_adapters", ()))
                by_row = adapters_by_row(module) or by_row
                scaling, ran = adapter_scales(module), adapters_by_row(module) or on
                scales |= {(name, scaling[name]) for name in ran if name in scaling}
    closed = any(memory.closed for memory in memories_in(modules))
    ours = {OWN_NAME: own_of(model) is not None, MEMORY_NAME: bool(memories_on(model)), CLOSED_NAME: closed}
    own = tuple(name for name, on in ours.items() if on)
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    # torchao's tensors are subclasses; other quantisers say so in the configuration.
    kinds |= {type(p.data).__name__ for p in parameters} - {"Tensor", "Parameter", "DTensor"}
    quantiser = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantiser is not None:
        kinds.add(str(getattr(quantiser, "quant_method", quantiser)))
    return HostState(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        adapters=(by_row or tuple(sorted(adapters))) + own,
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
    """For the time of the block, a module's own parameters that accelerate keeps elsewhere are here."""
    elsewhere = any(p.device.type == "meta" for p in module.parameters(recurse=False))
    if not elsewhere or not has_accelerate_hook(module):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module, execution_device="cpu")


def compiled_parts(model: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules of a model that were compiled, each with the attribute that was."""
    return [(module, name) for module in model.modules() for name in compiled_attributes(module)]


def is_compiled(model: Any) -> bool:
    """Whether it, or a part of it, was compiled, by its user or by its `generate()`."""
    return has_generates_graph(model) or bool(compiled_parts(model))


def forget_compiled(model: Any) -> None:
    """Make a compiled host compile again: a graph does not notice that hooks came or went."""
    if forget_generates_graph(model) or compiled_parts(model):
        torch.compiler.reset()

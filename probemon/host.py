"""What probemon needs to know about a host model: its decoder, its layers, its fingerprint.

    decoder, layers = find_layers(model)       # the module that runs the layers, and the layers
    fingerprint(model)                         # 'bf16-samples:3f1c...', the same for an fp32 and a bf16 load
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import nn

from probemon.errors import ConfigError, NotSupportedHost

SITE = re.compile(r"^(resid_post|attn_out|mlp_out)\.(\d+)$")
# What a layer calls its attention and its feed-forward block, whose outputs are added to the residual stream.
_BLOCKS = {"attn_out": ("self_attn", "attn", "attention", "self_attention"), "mlp_out": ("mlp", "feed_forward")}
_SAMPLES = 16


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


def find_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The base module whose forward runs the decoder, and its list of layers (0-based)."""
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise NotSupportedHost(f"{type(model).__name__} is an encoder-decoder: only decoder-only hosts are supported")
    n_layers = int(config.num_hidden_layers)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers and "." not in name
    ]
    if len(found) != 1:
        raise NotSupportedHost(
            f"expected one list of {n_layers} layers directly under {type(decoder).__name__}, "
            f"found {[name for name, _ in found]}"
        )
    layers = found[0][1]
    assert isinstance(layers, nn.ModuleList)
    return decoder, layers


def parse_site(site: str) -> tuple[str, int]:
    """`'resid_post.15'` -> `('resid_post', 15)`."""
    match = SITE.match(site)
    if match is None:
        raise ConfigError(
            f"site {site!r} is not supported: expected resid_post.N, attn_out.N or mlp_out.N, N a 0-based layer of the host"
        )
    return match.group(1), int(match.group(2))


def site_module(layers: nn.ModuleList, site: str) -> nn.Module:
    """The module whose output is the site: the layer, or its attention or feed-forward block. Raises `ConfigError`, `NotSupportedHost`."""
    kind, at = parse_site(site)
    if at >= len(layers):
        raise ConfigError(f"site {site!r}: the host has layers 0..{len(layers) - 1}")
    layer = layers[at]
    if kind == "resid_post":
        return layer
    if type(layer).__name__ == "BloomBlock":
        raise NotSupportedHost(f"site {site!r}: {type(layer).__name__} adds the residual stream inside its blocks, so this output has no place of its own")
    children = dict(layer.named_children())
    for name in _BLOCKS[kind]:
        if name in children:
            return children[name]
    raise NotSupportedHost(f"site {site!r}: {type(layer).__name__} has none of {', '.join(_BLOCKS[kind])}; it has {', '.join(children)}")


def fingerprint(model: Any) -> str:
    """A name for the host's weights: sha256 over 16 spread samples of every decoder parameter, as bf16.

    Values are rounded to bf16 first, so the same checkpoint loaded as fp32 or bf16 has one fingerprint.
    Milliseconds, not seconds: it tells one checkpoint from another, it does not prove integrity.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    digest = hashlib.sha256()
    for name, parameter in sorted(decoder.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        sample = flat[::step][:_SAMPLES].to(device="cpu", dtype=torch.bfloat16).contiguous()
        digest.update(f"{name}:{tuple(parameter.shape)}:".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return f"bf16-samples:{digest.hexdigest()[:32]}"

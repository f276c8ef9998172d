"""Sites: the modules of a model that an adapter updates, and their parameters.

    sites = find_sites(model, config)            # [Site(name="down.3", kind="down", layer=3, module=...), ...]
    updates = make_updates(sites, config)        # nn.ModuleDict: "down_3" -> SiteUpdate, or another `Form`

In a mixture of experts, "down" is the whole block, which cannot be merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from probemon.adapters.bem.config import CHUNK_KINDS, BemConfig
from probemon.adapters.bem.forms.make import make_form
from probemon.adapters.bem.sharded import Shard, shard_of
from probemon.errors import ConfigError, UnsupportedModel
from probemon.host.internals import tensor_parallel_size
from probemon.host.model import find_layers, hidden_size, site_module, unwrap

# Names of linear layers, by kind.
_NAMES = {
    "q": ("q_proj", "query"), "k": ("k_proj", "key"), "v": ("v_proj", "value"),
    "o": ("o_proj", "out_proj", "dense"), "down": ("down_proj", "fc2", "dense_4h_to_h"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Site:
    """One updated module, `[.., n_in]` to `[.., n_out]`.

    `mergeable`: it is a plain linear layer.
    `shard`: this process's part; None for the whole.
    """

    kind: str
    layer: int
    module: nn.Module
    n_in: int
    n_out: int
    mergeable: bool
    shard: Shard | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.layer}"

    @property
    def key(self) -> str:
        """The name, without dots."""
        return f"{self.kind}_{self.layer}"

    @property
    def sizes_here(self) -> tuple[int, int]:
        """Sizes of input and output in this process."""
        if self.shard is None:
            return self.n_in, self.n_out
        n = self.shard.end - self.shard.begin
        return (n, self.n_out) if self.shard.rows else (self.n_in, n)

    @property
    def chunked(self) -> bool:
        """Whether it always takes chunk codes."""
        return self.kind in CHUNK_KINDS


class SiteUpdate(nn.Module):
    """One site's V `[in, r]` and U `[out, r]`. U starts at zero: the model is unchanged."""

    def __init__(self, site: Site, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = site.n_in**-0.5  # as PEFT initialises a LoRA's first factor
        v = torch.empty(site.n_in, rank, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        self.V = nn.Parameter(v)
        self.U = nn.Parameter(torch.zeros(site.n_out, rank, dtype=torch.float32))


def find_sites(model: Any, config: BemConfig) -> list[Site]:
    """Return the sites of `config`, by layer. Raises `ConfigError`, `UnsupportedModel`."""
    _, layers = find_layers(model)
    if config.read_layer >= len(layers):
        raise ConfigError(f"read_layer is {config.read_layer}: the model has layers 0..{len(layers) - 1}")
    chosen = range(config.read_layer, len(layers)) if config.layers is None else sorted(config.layers)
    if max(chosen) >= len(layers):
        raise ConfigError(f"layers has {max(chosen)}: the model has layers 0..{len(layers) - 1}")
    width, n_ranks = hidden_size(model), tensor_parallel_size(unwrap(model))
    return [find_site(layers, kind, layer, width, n_ranks) for layer in chosen for kind in config.sites]


def find_site(layers: nn.ModuleList, kind: str, layer: int, width: int, n_ranks: int = 1) -> Site:
    """Return one site of layers of `width`. Raises `UnsupportedModel`."""
    block = site_module(layers, f"{'mlp_out' if kind == 'down' else 'attn_out'}.{layer}")
    children = dict(block.named_children())
    for name in _NAMES[kind]:
        # PEFT's layers wrap the model's.
        linear = getattr(children.get(name), "base_layer", children.get(name))
        if isinstance(linear, nn.Linear):
            shard = shard_of(linear, f"{kind}.{layer}", n_ranks)
            mergeable = linear is children[name]
            return Site(
                kind=kind,
                layer=layer,
                module=children[name],
                n_in=linear.in_features,
                n_out=linear.out_features,
                mergeable=mergeable,
                shard=shard,
            )
    if kind == "down" and "experts" in children:
        return Site(kind, layer, block, width, width, False)
    raise UnsupportedModel(
        f"site '{kind}.{layer}': {type(block).__name__} has no linear layer named {' or '.join(_NAMES[kind])}; it has "
        f"{', '.join(children) or 'none'}. Leave {kind!r} out of sites"
    )


def value_module(layers: nn.ModuleList, layer: int, n_in: int) -> nn.Module:
    """Return the layer that makes values for an attention output of `n_in` inputs. Raises `UnsupportedModel`."""
    try:
        site = find_site(layers, "v", layer, n_in)
    except UnsupportedModel:
        raise UnsupportedModel(
            f"gate_inputs has 'retrieval', which reads the values of layer {layer}, and its attention has no linear"
            f" layer named {' or '.join(_NAMES['v'])}: leave 'retrieval' out"
        ) from None
    return site.module


def make_updates(sites: Sequence[Site], config: BemConfig, n_heads: int | None = None) -> nn.ModuleDict:
    """Make parameters on the sites' devices, by `config.seed`. Raises `ConfigError` if a form does not fit."""
    generator = torch.Generator().manual_seed(config.seed)
    updates = {site: make_update(site, config, n_heads, generator) for site in sites}
    return nn.ModuleDict({site.key: update.to(device_of(site.module)) for site, update in updates.items()})


def make_update(site: Site, config: BemConfig, n_heads: int | None, generator: torch.Generator) -> nn.Module:
    """Make the parameters of one site. Raises as `make_updates`."""
    if config.form == "low_rank":
        return SiteUpdate(site, config.rank, generator)
    return make_form(config, site.n_in, site.n_out, n_heads, generator)


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module computes on; the CPU if offloaded."""
    return next((p.device for p in module.parameters() if p.device.type != "meta"), torch.device("cpu"))

"""Fits an adapter to a budget of trainable numbers.

solved = solve(model, BemConfig(form="kronecker", terms=1), budget=3_072)
solved.config, solved.n_trainable, solved.off
n_trainable(model, config)                           # without making it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.controller import Controller
from probemon.adapters.bem.levels import LearnedLevels
from probemon.adapters.bem.sites import Site, find_sites, make_update
from probemon.errors import ConfigError
from probemon.host.model import hidden_size, text_config, unwrap
from probemon.util.checks import check_count

_MOST_SIZE, _MOST_WIDTH = 4096, 8192  # limits of `BemConfig`


@dataclass(frozen=True)
class Solved:
    """A config near a budget, and its trainable numbers."""

    config: BemConfig
    n_trainable: int
    budget: int

    @property
    def off(self) -> float:
        """Share over the budget: -0.01 is one per cent under."""
        return self.n_trainable / self.budget - 1


def solve(model: Any, config: BemConfig, budget: int) -> Solved:
    """Return `config` with the largest rank (kronecker: terms) that fits the budget, then the nearest controller
    width.

    The controller is narrowed if rank 1 does not fit. Raises `ConfigError` for too small a budget, and as `BemConfig`
    and `find_sites`.
    """
    check_count("budget", budget, least=1)
    if not isinstance(config, BemConfig):
        raise ConfigError(f"config is a {type(config).__name__}: give a BemConfig, which BemConfig.from_dict makes")
    model = unwrap(model)
    sites = find_sites(model, config)

    def fits(candidate: BemConfig) -> bool:
        return _count(model, sites, candidate) <= budget

    least = config.active or 1
    every = [1 << k for k in range(13)] if config.hadamard else range(1, _MOST_SIZE + 1)
    sizes = [size for size in every if size >= least]
    smallest = _sized(config, sizes[0])
    if not fits(smallest):
        smallest = _widest(smallest, range(1, config.width), fits)
    best = sizes[_last(sizes, lambda size: fits(_sized(smallest, size)))]
    under = _widest(_sized(smallest, best), range(smallest.width, _MOST_WIDTH + 1), fits)
    both = [under, replace(under, width=min(under.width + 1, _MOST_WIDTH))]
    counts = [_count(model, sites, candidate) for candidate in both]
    nearest = min((0, 1), key=lambda i: abs(counts[i] - budget))
    return Solved(both[nearest], counts[nearest], budget)


def n_trainable(model: Any, config: BemConfig) -> int:
    """Return how many numbers an adapter of this config trains. Raises `ConfigError` or `UnsupportedModel`."""
    model = unwrap(model)
    return _count(model, find_sites(model, config), config)


def _sized(config: BemConfig, size: int) -> BemConfig:
    return replace(config, terms=size) if config.form == "kronecker" else replace(config, rank=size)


def _widest(config: BemConfig, widths: range, fits: Callable[[BemConfig], bool]) -> BemConfig:
    """The widest controller that fits. Raises `ConfigError` if none does."""
    if not widths or not fits(replace(config, width=widths[0])):
        least = replace(config, width=1)
        raise ConfigError(f"the budget is too small for an adapter of form {least.form!r}, whatever its size")
    return replace(config, width=widths[_last(widths, lambda width: fits(replace(config, width=width)))])


def _last(values: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Index of the last of ascending values that fits; the first does."""
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(values[middle]) else (low, middle - 1)
    return low


def _count(model: Any, sites: Sequence[Site], config: BemConfig) -> int:
    n_heads = getattr(text_config(model), "num_attention_heads", None)
    with torch.device("meta"):
        generator = torch.Generator("cpu")
        updates = nn.ModuleDict({site.key: make_update(site, config, n_heads, generator) for site in sites})
        parts = [Controller(hidden_size(model), config), updates]
        if config.level == "learned":
            parts.append(LearnedLevels(config, sites, updates))
    return sum(parameter.numel() for part in parts for parameter in part.parameters())

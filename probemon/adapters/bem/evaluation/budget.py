"""Fits an adapter to a budget of trainable numbers, counts costs, and compares them with a LoRA's.

solved = solve(model, BemConfig(form="kronecker", terms=1), budget=3_072)
solved.config, solved.n_trainable, solved.off
n_trainable(model, config)                           # without making it
flops(lambda: model(ids))
gates = budget_gates({"parameters": 62_004, "operations": 3_049_237}, {"parameters": 62_016, "operations": 126_334})
[gate.verdict for gate in gates]                     # ["passed", "failed"]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.forms.head_groups import N_READ
from probemon.adapters.bem.forms.kronecker import closest_shapes
from probemon.adapters.bem.sites import Site, find_sites
from probemon.errors import ConfigError
from probemon.host.model import hidden_size
from probemon.util.checks import check_count, check_mapping, check_number

TOLERANCE = 0.05  # of a LoRA's costs
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
    sites = find_sites(model, config)

    def fits(candidate: BemConfig) -> bool:
        return _count(hidden_size(model), sites, candidate) <= budget

    least = config.active or 1
    every = [1 << k for k in range(13)] if config.hadamard else range(1, _MOST_SIZE + 1)
    sizes = [size for size in every if size >= least]
    smallest = _sized(config, sizes[0])
    if not fits(smallest):
        smallest = _widest(smallest, range(1, config.width), fits)
    best = sizes[_last(sizes, lambda size: fits(_sized(smallest, size)))]
    under = _widest(_sized(smallest, best), range(smallest.width, _MOST_WIDTH + 1), fits)
    both = [under, replace(under, width=min(under.width + 1, _MOST_WIDTH))]
    counts = [_count(hidden_size(model), sites, candidate) for candidate in both]
    nearest = min((0, 1), key=lambda i: abs(counts[i] - budget))
    return Solved(both[nearest], counts[nearest], budget)


def n_trainable(model: Any, config: BemConfig) -> int:
    """Return how many numbers an adapter of this config trains. Raises `ConfigError` or `UnsupportedModel`."""
    return _count(hidden_size(model), find_sites(model, config), config)


def flops(call: Callable[[], object]) -> int:
    """Return a call's operations: two for a multiply-add, one for each pointwise result."""
    pointwise = _Pointwise()
    with FlopCounterMode(display=False) as products, pointwise:
        call()
    return int(products.get_total_flops()) + pointwise.n


@dataclass(frozen=True)
class BudgetGate:
    """One cost of an adapter, compared with a LoRA's. `passed` is None without a LoRA's cost."""

    name: str
    ours: float
    lora: float
    passed: bool | None

    @property
    def verdict(self) -> str:
        """ "passed", "failed" or "not judged"."""
        return {True: "passed", False: "failed", None: "not judged"}[self.passed]

    @property
    def why(self) -> str:
        """The numbers, as in "62,004 beside 62,016: -0.02%"."""
        if self.passed is None:
            return f"the LoRA's {self.name} are {self.lora:,.0f}: nothing to compare {self.ours:,.0f} with"
        return f"{self.ours:,.0f} beside {self.lora:,.0f}: {self.ours / self.lora - 1:+.2%}"


def budget_gates(
    ours: Mapping[str, float], lora: Mapping[str, float], *, tolerance: float = TOLERANCE
) -> tuple[BudgetGate, ...]:
    """Judge each cost by name: "parameters" must be within `tolerance` of the LoRA's, others (operations, bytes of
    memory) at most so much over them.

    Raises `ConfigError` for negative or non-numeric costs, or if the LoRA lacks one.
    """
    check_number("tolerance", tolerance, low=0, remedy="give a share, as 0.05")
    check_mapping("ours", ours)
    if missing := sorted(ours.keys() - check_mapping("lora", lora).keys()):
        raise ConfigError(f"the LoRA's {missing[0]} are missing: give the same costs of both")
    gates = []
    for name, cost in ours.items():
        beside = lora[name]
        for value in (cost, beside):
            check_number(name, value, low=0, remedy="give a number from 0")
        off = cost / beside - 1 if beside else math.nan
        size = abs(off) if name == "parameters" else off
        gates.append(BudgetGate(name, cost, beside, size <= tolerance + 1e-12 if beside else None))
    return tuple(gates)


class _Pointwise(TorchDispatchMode):
    """Counts results of pointwise operations."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags:
            self.n += sum(x.numel() for x in (made if isinstance(made, tuple) else (made,)))
        return made


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


def _count(hidden: int, sites: Sequence[Site], config: BemConfig) -> int:
    width, n = config.width, config.code_size
    total = hidden * (width + 2) + 9 * width + 3
    if "chunk" in config.levels:
        total += n + 2 * width**2 + 5 * width + width * n + n
    if "token" in config.levels:
        total += 2 * width**2 + 5 * width + width * n + n
    if "prefix" in config.levels:
        total += width**2 + 3 * width + width * n + n
    if config.level == "learned":
        total += 3 * sum(not site.chunked for site in sites)
    return total + sum(_of_site(site.n_in, site.n_out, config) for site in sites)


def _of_site(n_in: int, n_out: int, config: BemConfig) -> int:
    if config.form == "head_groups":
        n_read = sum(N_READ[kind] for kind in config.gate_inputs)
        return config.rank * (n_in + config.code_size * n_out) + config.code_size * (n_read + bool(n_read))
    if config.form == "kronecker":
        (a1, a2), (b1, b2) = closest_shapes(n_in, n_out)
        return config.code_size * (a1 * a2 + b1 * b2)
    if config.form == "film":
        return 2 * n_out * (config.rank + 1)
    return config.rank * (n_in + n_out)

"""Sites that tensor parallelism spreads over ranks.

    shard = shard_of(linear, "o.3", n_ranks=2)            # None if this process has the whole layer
    shard.update(x, V, U, codes, scale, base)             # V, U and codes are whole

A layer split by rows (attention outputs, MLP down projections) has some inputs: parts of `x V` are summed over ranks.
One split by columns (queries, keys, values) has some outputs, and takes those rows of U. Gradients are summed too, so
that every rank makes the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from probemon.adapters.bem.config import BemConfig
from probemon.errors import ConfigError, UnsupportedModel


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's inputs `begin` to `end` of a layer if `rows`, else its outputs."""

    rows: bool
    begin: int
    end: int
    group: Any

    def update(self, x: Tensor, V: Tensor, U: Tensor, codes: Tensor, scale: float, base: Tensor) -> Tensor:
        """Return base plus the updates of x, in base's dtype: computed in fp32 or wider, rounded once."""
        wide = torch.promote_types(torch.promote_types(x.dtype, V.dtype), torch.float32)
        narrow = base.dtype
        x, V, U, codes, base = (tensor.to(wide) for tensor in (x, V, U, codes, base))
        if self.rows:
            weighted = _Sum.apply(x @ _Rows.apply(V, self), self.group) * codes  # type: ignore[no-untyped-call]
        else:
            weighted = _SumGradients.apply(x @ V * codes, self.group)  # type: ignore[no-untyped-call]
            U = _Rows.apply(U, self)  # type: ignore[no-untyped-call]
        return torch.addmm(base, weighted, U.T, alpha=scale).to(narrow)


def shard_of(linear: nn.Linear, name: str, n_ranks: int) -> Shard | None:
    """Return this process's part of a layer; None for the whole. Raises `UnsupportedModel` for another split."""
    weight: Any = linear.weight
    placements = getattr(weight, "placements", None)
    if n_ranks == 1 or placements is None or all(placement.is_replicate() for placement in placements):
        return None
    dim = getattr(placements[0], "dim", None)
    # The exact class: its subclasses interleave ranks.
    if len(placements) > 1 or type(placements[0]).__name__ != "Shard" or dim is None:
        raise UnsupportedModel(
            f"site {name} is spread over ranks as {placements}; an adapter supports one shard of rows or columns"
            " alone: leave it out of sites, or load the model whole, without tp_plan"
        )
    rows, rank = dim % 2 == 1, weight.device_mesh.get_local_rank()
    size = -(-weight.shape[dim % 2] // n_ranks)
    begin, end = (min(i * size, weight.shape[dim % 2]) for i in (rank, rank + 1))
    return Shard(rows, begin, end, weight.device_mesh.get_group())


def check_spread(config: BemConfig, fallback: object, impl: str, n_ranks: int) -> None:
    """Raise `UnsupportedModel` or `ConfigError` for features that need one rank."""
    if n_ranks == 1:
        return
    on_ranks = f"on a model that is spread over {n_ranks} ranks (tensor parallel)"
    if config.form != "low_rank":
        raise UnsupportedModel(
            f"form {config.form!r} {on_ranks} is not supported, only 'low_rank': load the model whole, without tp_plan"
            " (device_map= spreads whole layers over devices)"
        )
    if config.start != "random":
        raise ConfigError(f"start is {config.start!r} {on_ranks}, where no rank has a whole weight: give 'random'")
    if config.dropout:
        raise ConfigError(
            f"dropout is {config.dropout} {on_ranks}, and each would draw for its own part: give dropout=0"
        )
    if fallback is not None:
        raise ConfigError(
            f"a FallbackPolicy {on_ranks} would decide by each rank's own clock, and ranks would differ:"
            " attach without fallback="
        )
    if impl == "triton":
        raise ConfigError(f"impl='triton' {on_ranks} is not supported: use impl='reference' or 'auto'")


class _Sum(torch.autograd.Function):
    """Sum over ranks. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumGradients(torch.autograd.Function):
    """Identity. Gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Rows(torch.autograd.Function):
    """This rank's rows; the gradient has all."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, shard: Shard) -> Tensor:
        ctx.shard, ctx.shape = shard, matrix.shape
        return matrix[shard.begin : shard.end]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.shard.begin : ctx.shard.end] = gradient
        dist.all_reduce(whole, group=ctx.shard.group)
        return whole, None

"""Sites of a host that tensor parallelism spreads over ranks: each has a part of the inputs, or of the outputs.

    shard = shard_of(linear, "o.3", n_ranks=2)            # None where this process has the whole of the layer
    shard.update(x, V, U, codes, scale, base)             # x or base as this rank has it; V, U and codes are whole

Of a layer that is split by rows (attention outputs, MLP down projections) a rank has some of the inputs, and the whole
output, summed. There it computes its part of `x V`, which is summed over the ranks: r numbers a token. Of one that is
split by columns (queries, keys, values) it has all inputs and some of the outputs, whose rows of U it takes. Every rank
has the whole adapter, and its gradients: what backward knows in parts is summed, so that the same optimiser on every
rank makes the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from probemon.adapters.bem.config import BemConfig
from probemon.errors import ConfigError, NotSupportedHost


@dataclass(frozen=True, eq=False)
class Shard:
    """What this rank has of a layer: numbers `begin` to `end` of its inputs (`rows`), or else of its outputs."""

    rows: bool
    begin: int
    end: int
    group: Any

    def update(self, x: Tensor, V: Tensor, U: Tensor, codes: Tensor, scale: float, base: Tensor) -> Tensor:
        """Return base with the updates of x, as this rank has both, in the dtype of base: computed in fp32 or wider,
        rounded once.
        """
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
    """Return what this process has of a layer of a host over `n_ranks`; None for the whole. Raises `NotSupportedHost`
    for a layer that is split in another way.
    """
    weight: Any = linear.weight
    placements = getattr(weight, "placements", None)
    if n_ranks == 1 or placements is None or all(placement.is_replicate() for placement in placements):
        return None
    dim = getattr(placements[0], "dim", None)
    # By the exact class: what derives from it interleaves what the ranks have.
    if len(placements) > 1 or type(placements[0]).__name__ != "Shard" or dim is None:
        raise NotSupportedHost(
            f"site {name} is spread over ranks as {placements}, of which an adapter knows one shard of rows or columns"
            " alone: leave it out of sites, or load the host whole, without tp_plan"
        )
    rows, rank = dim % 2 == 1, weight.device_mesh.get_local_rank()
    size = -(-weight.shape[dim % 2] // n_ranks)
    begin, end = (min(i * size, weight.shape[dim % 2]) for i in (rank, rank + 1))
    return Shard(rows, begin, end, weight.device_mesh.get_group())


def check_spread(config: BemConfig, fallback: object, impl: str, n_ranks: int) -> None:
    """Raise `NotSupportedHost` or `ConfigError` for what an adapter cannot do on a host over several ranks."""
    if n_ranks == 1:
        return
    of_ranks = f"on a host that is spread over {n_ranks} ranks (tensor parallel)"
    if config.form != "low_rank":
        raise NotSupportedHost(
            f"form {config.form!r} {of_ranks} is not supported, only 'low_rank': load the host whole, without tp_plan"
            " (device_map= spreads whole layers over devices)"
        )
    if config.dropout:
        raise ConfigError(
            f"dropout is {config.dropout} {of_ranks}, where each would draw for its own part: give dropout=0"
        )
    if fallback is not None:
        raise ConfigError(
            f"a FallbackPolicy {of_ranks} would decide by each rank's own clock, and they would say different things:"
            " attach without fallback="
        )
    if impl == "triton":
        raise ConfigError(f"impl='triton' {of_ranks} is not supported: use impl='reference' or 'auto'")


class _Sum(torch.autograd.Function):
    """The sum over ranks. All go on with it, so each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumGradients(torch.autograd.Function):
    """The same numbers on all ranks, each of which goes on with a part: their gradients add up."""

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
    """This rank's rows of a matrix that all have. The gradient is of all rows, each from the rank that has it."""

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

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
        here = slice(self.begin, self.end)
        if self.rows:
            V = _SumGradients.apply(V, self.group)[here]  # type: ignore[no-untyped-call]
            weighted = _Sum.apply(x @ V, self.group) * codes  # type: ignore[no-untyped-call]
        else:
            weighted = _SumGradients.apply(x @ V * codes, self.group)  # type: ignore[no-untyped-call]
            U = _SumGradients.apply(U, self.group)[here]  # type: ignore[no-untyped-call]
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
    """Raise `ConfigError` for features that need one rank: a whole weight, one draw of dropout, one clock."""
    asked = {
        f"form {config.form!r}": config.form != "low_rank",
        f"start={config.start!r}": config.start != "random",
        f"dropout={config.dropout}": config.dropout > 0,
        "a FallbackPolicy": fallback is not None,
        "impl='triton'": impl == "triton",
    }
    if n_ranks > 1 and (unsupported := [name for name, is_asked in asked.items() if is_asked]):
        raise ConfigError(
            f"{' and '.join(unsupported)} on a model that is spread over {n_ranks} ranks (tensor parallel): leave this"
            " out, or load the model whole, without tp_plan (device_map= spreads whole layers over devices)"
        )


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

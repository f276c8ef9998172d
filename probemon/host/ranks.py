"""Ranks: a tensor-parallel model is scored on rank 0 and stops on all ranks together.

    ranks = Ranks.of(model)                    # None for a single process
    verdict = ranks.agree(verdict)             # at every token

A row that stopped on one rank would block the others. Every rank attaches with the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from probemon.errors import UnsupportedModel
from probemon.host.internals import tensor_parallel_size


@dataclass(frozen=True)
class Ranks:
    """This process among the model's."""

    rank: int
    n_ranks: int

    @staticmethod
    def of(model: Any) -> Ranks | None:
        """Return a model's ranks, or None. Raises `UnsupportedModel` for several groups."""
        n_ranks = tensor_parallel_size(model)
        if n_ranks == 1:
            return None
        if dist.get_world_size() != n_ranks:
            raise UnsupportedModel(
                f"the model is spread over {n_ranks} of {dist.get_world_size()} processes: only tensor parallel over"
                " all of them is supported"
            )
        return Ranks(dist.get_rank(), n_ranks)

    @property
    def scores(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def agree(self, verdict: Tensor) -> Tensor:
        """Return rank 0's verdict `[B]` on every rank."""
        dist.broadcast(verdict, src=0)
        return verdict

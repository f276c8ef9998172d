"""Ranks: a host whose layers are spread over processes is scored once, on rank 0, and stops on all of them together.

    ranks = Ranks.of(model)                    # None where one process runs the model
    ranks.scores                               # whether it is this process that scores
    verdict = ranks.agree(verdict)             # at every token: what rank 0 decided

The residual stream is whole on every rank. A row that stopped on one rank alone would leave the others waiting for it
for ever, so what an action decides is sent from rank 0. Every rank attaches, with the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from probemon.errors import NotSupportedHost
from probemon.host.internals import tensor_parallel_size


@dataclass(frozen=True)
class Ranks:
    """This process among those that run the model."""

    rank: int
    n_ranks: int

    @staticmethod
    def of(model: Any) -> Ranks | None:
        """The ranks of a tensor-parallel model. Raises `NotSupportedHost` where the processes form several groups."""
        n_ranks = tensor_parallel_size(model)
        if n_ranks == 1:
            return None
        if dist.get_world_size() != n_ranks:
            raise NotSupportedHost(
                f"the model is spread over {n_ranks} of {dist.get_world_size()} processes: only tensor parallel over"
                " all of them is supported"
            )
        return Ranks(dist.get_rank(), n_ranks)

    @property
    def scores(self) -> bool:
        """Rank 0 does."""
        return self.rank == 0

    def agree(self, verdict: Tensor) -> Tensor:
        """The verdict `[B]` of rank 0, on every rank."""
        dist.broadcast(verdict, src=0)
        return verdict

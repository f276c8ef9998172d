"""Form: the interface of every form of an update."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn


class Form(nn.Module):
    """Update of one site, from `n_in` to `n_out` numbers, by codes of `n_codes`."""

    def __init__(self, n_in: int, n_out: int, n_codes: int) -> None:
        super().__init__()
        self.n_in, self.n_out, self.n_codes = n_in, n_out, n_codes

    @abstractmethod
    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """Return base `[M, out]` plus updates of x `[M, in]` by codes `[M, n]`.

        `share [M, 1]`: of each update, by the limits.
        """

    @abstractmethod
    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest singular values, or bounds, and Frobenius norms of updates, `[M]` each."""

    @abstractmethod
    def frobenius(self, codes: Tensor) -> Tensor:
        """Return only the Frobenius norms `[M]`, differentiably."""


def first_factor(*shape: int, n_in: int, generator: torch.Generator) -> nn.Parameter:
    """Return a factor initialised like a linear layer of `n_in` inputs."""
    bound = 1 / math.sqrt(n_in)
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


def last_factor(*shape: int) -> nn.Parameter:
    """Return a factor of zeros."""
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float32))


def root(squares: Tensor) -> Tensor:
    """Return square roots, also of sums rounded below 0, with a finite gradient at 0."""
    return (squares.clamp(min=0) + torch.finfo(torch.float32).tiny).sqrt()


def norms_of(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return largest singular values and Frobenius norms of `[M, a, b]`; NaN if not finite."""
    finite = matrices.isfinite().all(dim=-1).all(dim=-1)
    values = torch.linalg.svdvals(matrices.where(finite[:, None, None], 0.0))
    both = values[..., 0], values.square().sum(dim=-1).sqrt()
    return both[0].where(finite, math.nan), both[1].where(finite, math.nan)

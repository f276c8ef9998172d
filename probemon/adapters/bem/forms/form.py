"""Form: what every form of an update can be asked for."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn


class Form(nn.Module):
    """The update of one site, from `n_in` to `n_out` numbers, by codes of `n_codes`.

    Usage: `output = form(x, codes, base)`.
    """

    def __init__(self, n_in: int, n_out: int, n_codes: int) -> None:
        super().__init__()
        self.n_in, self.n_out, self.n_codes = n_in, n_out, n_codes

    @abstractmethod
    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """Return base `[M, out]` with the updates of x `[M, in]` by codes `[M, n]`, each times its `share [M, 1]`: what
        the limits of an adapter leave of it. None for all of it.
        """

    @abstractmethod
    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the limits of an adapter are set on, for codes `[M, n]`: two sizes `[M]` of each update, its
        largest singular value and its Frobenius norm. Where a form says so, the first is an upper bound.
        """

    @abstractmethod
    def frobenius(self, codes: Tensor) -> Tensor:
        """Return the second of `sizes` `[M]` alone, which is cheap and has gradients."""

    @abstractmethod
    def flops(self, n_tokens: int) -> int:
        """Return the operations of an update of so many tokens, as the code computes it: a multiply-add is two, and
        what is done element by element counts.
        """

    def dense(self, code: Tensor) -> Tensor | None:
        """Return the update of one code `[n]` as a matrix `[out, in]`; None for a form that is no matrix."""
        return None

    @property
    def n_params(self) -> int:
        """How many numbers it learns."""
        return sum(parameter.numel() for parameter in self.parameters())


def first_factor(*shape: int, n_in: int, generator: torch.Generator) -> nn.Parameter:
    """Return a factor that is not zero at the start, as torch initialises a linear layer of `n_in` inputs."""
    bound = 1 / math.sqrt(n_in)
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


def last_factor(*shape: int) -> nn.Parameter:
    """Return a factor of zeros: the update is nothing at the start."""
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float32))


def root(squares: Tensor) -> Tensor:
    """Return roots of sums of squares, which rounding may have left under 0. Of 0 it has a gradient, too."""
    return (squares.clamp(min=0) + torch.finfo(torch.float32).tiny).sqrt()


def norms_of(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest singular values `[M]` and Frobenius norms `[M]` of matrices `[M, a, b]`, NaN for one that is
    not finite: it has no decomposition, and torch raises.
    """
    finite = matrices.isfinite().all(dim=-1).all(dim=-1)
    values = torch.linalg.svdvals(matrices.where(finite[:, None, None], 0.0))
    both = values[..., 0], values.square().sum(dim=-1).sqrt()
    return both[0].where(finite, math.nan), both[1].where(finite, math.nan)

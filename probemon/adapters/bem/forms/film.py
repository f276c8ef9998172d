"""Film: bounded scale and shift of each output."""

from __future__ import annotations

import torch
from torch import Tensor

from probemon.adapters.bem.forms.form import Form, last_factor, root


class Film(Form):
    """`gamma * h + beta`, with `gamma = 1 + bound tanh(Wg c + g0)` and `beta = bound tanh(Wb c + b0)` (Perez et al.
    2018).

    Both heads start at zero. Tokens with non-finite codes keep their output; `n_not_finite` counts them. It is not a
    matrix, so it cannot be merged into weights.
    """

    def __init__(self, n_in: int, n_out: int, *, n_codes: int, bound: float = 0.1) -> None:
        super().__init__(n_in, n_out, n_codes)
        self.bound = bound
        self.W = last_factor(2 * n_out, n_codes)
        self.bias = last_factor(2 * n_out)
        self.register_buffer("n_not_finite", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """See `Form`; x is not read."""
        finite = codes.isfinite().all(dim=-1, keepdim=True)
        gamma, beta = self.gamma_beta(codes.where(finite, 0.0))
        if share is not None:
            gamma, beta = gamma * share, beta * share
        self.n_not_finite += (~finite).sum()  # type: ignore[operator]
        # Added: zeros then round nothing.
        return torch.where(finite, base + (gamma * base + beta), base)

    def gamma_beta(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return `gamma - 1` and `beta`, `[M, out]` each."""
        heads = self.bound * torch.tanh(torch.addmm(self.bias, codes, self.W.T))
        gamma, beta = heads.chunk(2, dim=-1)
        return gamma, beta

    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """See `Form`: largest `|gamma - 1|`, and the norm of `[diag(gamma - 1), beta]`."""
        gamma, _ = self.gamma_beta(codes)
        return gamma.abs().amax(dim=-1), self.frobenius(codes)

    def frobenius(self, codes: Tensor) -> Tensor:
        """See `Form`."""
        gamma, beta = self.gamma_beta(codes)
        return root(gamma.square().sum(dim=-1) + beta.square().sum(dim=-1))

    def saturation(self, gamma: Tensor) -> Tensor:
        """Return the share `[M]` of `gamma - 1` over 0.7 of its bound."""
        return (gamma.abs() > 0.7 * self.bound).to(gamma.dtype).mean(dim=-1)

"""Film: each number of an output is stretched and moved a little, as the code says (feature-wise linear modulation).

form = Film(n_in=1536, n_out=576, n_codes=8, bound=0.1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from probemon.adapters.bem.forms.form import Form, last_factor, root


class Film(Form):
    """`gamma * h + beta`, with `gamma = 1 + bound tanh(Wg c + g0)` and `beta = bound tanh(Wb c + b0)` (Perez et al.
    2018): gamma lies within `bound` of 1, and no number moves by more than `bound`, whatever the code.

    Both heads are zero at the start. Where a token's code is not finite, its output stays as it is; `n_not_finite`
    counts those tokens. It is no matrix, so it cannot be merged into weights.
    """

    def __init__(self, n_in: int, n_out: int, *, n_codes: int, bound: float = 0.1) -> None:
        super().__init__(n_in, n_out, n_codes)
        self.bound = bound
        self.W = last_factor(2 * n_out, n_codes)
        self.bias = last_factor(2 * n_out)
        self.register_buffer("n_not_finite", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """As of `Form`; x is not read."""
        finite = codes.isfinite().all(dim=-1, keepdim=True)
        gamma, beta = self.gamma_beta(codes.where(finite, 0.0))
        if share is not None:
            gamma, beta = gamma * share, beta * share
        self.n_not_finite += (~finite).sum()  # type: ignore[operator]
        # Added to the output, not multiplied into it: of zeros nothing is rounded.
        return torch.where(finite, base + (gamma * base + beta), base)

    def gamma_beta(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return `gamma - 1` and `beta`, `[M, out]` each, of codes `[M, n]`."""
        both = self.bound * torch.tanh(torch.addmm(self.bias, codes, self.W.T))
        gamma, beta = both.chunk(2, dim=-1)
        return gamma, beta

    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Form`: the most that an output is stretched, which the cap is set on, and the norm of
        `[diag(gamma - 1), beta]`, which maps the output and a 1 to what is added.
        """
        gamma, _ = self.gamma_beta(codes)
        return gamma.abs().amax(dim=-1), self.frobenius(codes)

    def frobenius(self, codes: Tensor) -> Tensor:
        """As of `Form`."""
        gamma, beta = self.gamma_beta(codes)
        return root(gamma.square().sum(dim=-1) + beta.square().sum(dim=-1))

    def flops(self, n_tokens: int) -> int:
        """As of `Form`: the head, its biases and tanh, then a product and two sums for each output."""
        return n_tokens * (2 * self.n_out * (2 * self.n_codes + 3) + 3 * self.n_out)

    def saturation(self, gamma: Tensor) -> Tensor:
        """Return the share `[M]` of outputs whose `gamma - 1`, as in `gamma_beta`, is past 0.7 of its bound."""
        return (gamma.abs() > 0.7 * self.bound).to(gamma.dtype).mean(dim=-1)

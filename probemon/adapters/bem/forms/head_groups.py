"""HeadGroups: a gated low-rank update per group of attention heads."""

from __future__ import annotations

import torch
from torch import Tensor

from probemon.adapters.bem.forms.form import Form, first_factor, last_factor, norms_of, root
from probemon.errors import ConfigError


class HeadGroups(Form):
    """`scale * sum_g gate_g U_g V_g^T x_g`: x_g is the input from head group g, `gate = 2 sigmoid(code)`.

    V `[G, in / G, r]`, U `[G, out, r]`. Raises `ConfigError` if G does not divide the input.
    """

    def __init__(
        self, n_in: int, n_out: int, *, groups: int, rank: int, scale: float = 1.0, generator: torch.Generator
    ) -> None:
        super().__init__(n_in, n_out, groups)
        if n_in % groups:
            raise ConfigError(f"{groups} groups of a site with {n_in} inputs: give a number of groups that divides it")
        self.rank, self.scale = rank, scale
        self.V = first_factor(groups, n_in // groups, rank, n_in=n_in // groups, generator=generator)
        self.U = last_factor(groups, n_out, rank)

    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """See `Form`."""
        parts = x.unflatten(-1, (self.n_codes, -1)).transpose(0, 1)  # [G, M, in / G]
        gate = gates(codes) if share is None else gates(codes) * share
        weighted = (parts @ self.V) * gate.T[..., None]  # [G, M, r]
        # Sums over the groups, too.
        flat = weighted.transpose(0, 1).flatten(1)
        return torch.addmm(base, flat, self.U.permute(0, 2, 1).flatten(0, 1), alpha=self.scale)

    def dense(self, code: Tensor) -> Tensor:
        """See `Form`."""
        blocks = self.scale * gates(code)[:, None, None] * (self.U @ self.V.mT)  # [G, out, in / G]
        return blocks.transpose(0, 1).flatten(1)

    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """See `Form`; both exact, as the stacked U is a rotation times `R_U`."""
        stacked = self.U.permute(1, 0, 2).flatten(1)  # [out, G r]
        r_u = torch.linalg.qr(stacked, mode="r").R  # [.., G r]
        r_v = torch.linalg.qr(self.V, mode="r").R  # [G, .., r]
        small = r_u * self.scale * gates(codes).repeat_interleave(self.rank, dim=1)[:, None, :]  # [M, .., G r]
        updates = small @ torch.block_diag(*r_v.unbind()).T
        return norms_of(updates)

    def frobenius(self, codes: Tensor) -> Tensor:
        """See `Form`. Groups have separate columns, so squares add up."""
        squares = ((self.U.mT @ self.U) * (self.V.mT @ self.V)).sum(dim=(1, 2))  # [G]
        return self.scale * root(gates(codes).square() @ squares)

    def flops(self, n_tokens: int) -> int:
        """See `Form`."""
        products = 2 * self.rank * (self.n_in + self.n_codes * self.n_out)
        return n_tokens * (products + self.n_codes * self.rank + self.n_out)


def gates(codes: Tensor) -> Tensor:
    """Return independent gates from 0 to 2, unlike a softmax."""
    return 2 * torch.sigmoid(codes)


def group_energy(x: Tensor, groups: int) -> Tensor:
    """Return the log mean square of each group `[M, G]` of inputs `[M, in]`."""
    return x.unflatten(-1, (groups, -1)).square().mean(dim=-1).log()


def gate_correlation(gates: Tensor) -> Tensor:
    """Return correlations `[G, G]` of gates `[M, G]`; NaN for a constant gate."""
    centred = gates - gates.mean(dim=0)
    norms = centred.norm(dim=0)
    return (centred.T @ centred) / (norms[:, None] * norms)

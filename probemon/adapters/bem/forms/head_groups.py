"""HeadGroups: the input of an attention output, taken by groups of heads, each with a gate of its own.

form = HeadGroups(n_in=576, n_out=576, groups=9, rank=4, scale=1.0, generator=generator)
"""

from __future__ import annotations

import torch
from torch import Tensor

from probemon.adapters.bem.forms.form import Form, first_factor, last_factor, norms_of, root
from probemon.errors import ConfigError


class HeadGroups(Form):
    """`scale * sum_g gate_g U_g V_g^T x_g`: x_g is the part of the input that group g of the heads wrote, and
    `gate = 2 sigmoid(code)` lies between 0 and 2, each for itself.

    V `[G, in / G, r]`, U `[G, out, r]`; a code has G numbers. Raises `ConfigError` where G does not divide the input.
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
        """As of `Form`."""
        parts = x.unflatten(-1, (self.n_codes, -1)).transpose(0, 1)  # [G, M, in / G]
        gate = gates(codes) if share is None else gates(codes) * share
        weighted = (parts @ self.V) * gate.T[..., None]  # [G, M, r]
        # One product over groups and ranks at once, which adds up what each group gives.
        flat = weighted.transpose(0, 1).flatten(1)
        return torch.addmm(base, flat, self.U.permute(0, 2, 1).flatten(0, 1), alpha=self.scale)

    def dense(self, code: Tensor) -> Tensor:
        """As of `Form`."""
        blocks = self.scale * gates(code)[:, None, None] * (self.U @ self.V.mT)  # [G, out, in / G]
        return blocks.transpose(0, 1).flatten(1)

    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Form`, both exact: the factors are small once U, over all groups, is a rotation times `R_U`."""
        stacked = self.U.permute(1, 0, 2).flatten(1)  # [out, G r]
        r_u = torch.linalg.qr(stacked, mode="r").R  # [.., G r]
        r_v = torch.linalg.qr(self.V, mode="r").R  # [G, .., r]
        small = r_u * self.scale * gates(codes).repeat_interleave(self.rank, dim=1)[:, None, :]  # [M, .., G r]
        updates = small @ torch.block_diag(*r_v.unbind()).T
        return norms_of(updates)

    def frobenius(self, codes: Tensor) -> Tensor:
        """As of `Form`: groups write to columns of their own, so their squares add up."""
        squares = ((self.U.mT @ self.U) * (self.V.mT @ self.V)).sum(dim=(1, 2))  # [G]
        return self.scale * root(gates(codes).square() @ squares)

    def flops(self, n_tokens: int) -> int:
        """As of `Form`."""
        products = 2 * self.rank * (self.n_in + self.n_codes * self.n_out)
        return n_tokens * (products + self.n_codes * self.rank + self.n_out)


def gates(codes: Tensor) -> Tensor:
    """Return gates from 0 to 2, of the shape of codes. Not a softmax: gates that share a whole are not independent."""
    return 2 * torch.sigmoid(codes)


def group_energy(x: Tensor, groups: int) -> Tensor:
    """Return the logarithm of each group's mean square `[M, G]` of inputs `[M, in]`: what a group says of attention
    where no attention weights are to be had.
    """
    return x.unflatten(-1, (groups, -1)).square().mean(dim=-1).log()


def gate_correlation(gates: Tensor) -> Tensor:
    """Return the correlations `[G, G]` between gates `[M, G]` over tokens; NaN for a gate that does not vary."""
    centred = gates - gates.mean(dim=0)
    norms = centred.norm(dim=0)
    return (centred.T @ centred) / (norms[:, None] * norms)


def gate_correlation_penalty(gates: Tensor) -> Tensor:
    """Return the mean squared correlation between different gates `[M, G]`, 0 for fewer than three tokens. A gate that
    does not vary correlates with none.
    """
    n_groups = gates.shape[1]
    if len(gates) < 3 or n_groups < 2:
        return gates.new_zeros(())
    centred = gates - gates.mean(dim=0)
    norms = centred.norm(dim=0)
    varies = norms > 1e-6 * gates.shape[0] ** 0.5
    unit = centred[:, varies] / norms[varies]
    if unit.shape[1] < 2:
        return gates.new_zeros(())
    correlation = unit.T @ unit
    others = ~torch.eye(len(correlation), dtype=torch.bool, device=gates.device)
    return correlation[others].square().mean()

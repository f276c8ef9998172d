"""HeadGroups: a gated low-rank update per group of attention heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from probemon.adapters.bem.forms.form import Form, first_factor, last_factor, norms_of, root
from probemon.errors import ConfigError, UnsupportedModel

N_READ = {"statistics": 3, "retrieval": 1}  # numbers a group
_OPEN = 3.0  # sigmoid(3) is 0.95
_TINY, _FLOOR = 1e-12, 1e-6


class HeadGroups(Form):
    """`scale * sum_g gate_g U_g V_g^T x_g`: x_g is the input from head group g, `gate = 2 sigmoid(code)`.

    V `[G, in / G, r]`, U `[G, out, r]`. Raises `ConfigError` if G does not divide the input.

    `reads`: of "statistics" and "retrieval", for `attenuation`, which needs `n_heads`.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        groups: int,
        rank: int,
        scale: float = 1.0,
        reads: tuple[str, ...] = (),
        n_heads: int | None = None,
        generator: torch.Generator,
    ) -> None:
        super().__init__(n_in, n_out, groups)
        if n_in % groups:
            raise ConfigError(f"{groups} groups of a site with {n_in} inputs: give a number of groups that divides it")
        self.rank, self.scale = rank, scale
        self.V = first_factor(groups, n_in // groups, rank, n_in=n_in // groups, generator=generator)
        self.U = last_factor(groups, n_out, rank)
        self.reads, self.n_heads = reads, n_heads or groups
        if reads:
            self.W = last_factor(groups, sum(N_READ[kind] for kind in reads))
            self.bias = nn.Parameter(torch.full((groups,), _OPEN, dtype=torch.float32))

    def attenuation(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        """Return factors `[M, G]` from 0 to 1 of the gates, `sigmoid(bias + W s)` of what was read at each token.

        "statistics": of x `[M, in]`, what attention put out, by `head_statistics`. "retrieval": how far x is from the
        token's own values `[M, ..]`, by `retrieval`. Both are of the token alone. Weights of attention are not read:
        fused attention gives none. Limits hold, as a factor of at most 1 makes no update larger; reported sizes are
        those before it. Raises `UnsupportedModel` without values.
        """
        parts = []
        if "statistics" in self.reads:
            parts.append(head_statistics(x, self.n_codes, self.n_heads))
        if "retrieval" in self.reads:
            if values is None:
                raise UnsupportedModel(
                    "gates read 'retrieval', and a layer computed no values of its own (it may share another layer's):"
                    " leave 'retrieval' out of gate_inputs, or choose other layers"
                )
            parts.append(retrieval(x, values, self.n_codes, self.n_heads)[..., None])
        read = torch.cat(parts, dim=-1)
        return torch.sigmoid(self.bias.to(read) + (self.W.to(read) * read).sum(dim=-1))

    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """See `Form`."""
        parts = x.unflatten(-1, (self.n_codes, -1)).transpose(0, 1)  # [G, M, in / G]
        gate = gates(codes) if share is None else gates(codes) * share
        weighted = (parts @ self.V) * gate.T[..., None]  # [G, M, r]
        # Sums over the groups, too.
        flat = weighted.transpose(0, 1).flatten(1)
        return torch.addmm(base, flat, self.U.permute(0, 2, 1).flatten(0, 1), alpha=self.scale)

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


def gates(codes: Tensor) -> Tensor:
    """Return independent gates from 0 to 2, unlike a softmax."""
    return 2 * torch.sigmoid(codes)


def head_statistics(x: Tensor, groups: int, n_heads: int) -> Tensor:
    """Return what heads put out, in numbers `[M, G, 3]`, from outputs of attention `[M, in]`: log of a group's energy
    (mean square) over the mean of all groups; entropy of its heads' shares of energy, over its largest, log of the
    number of heads (0 for one head); variance of its heads' energies over their squared mean.
    """
    energies = x.unflatten(-1, (groups, n_heads // groups, -1)).square().mean(dim=-1)  # [M, G, heads]
    mean = energies.mean(dim=-1)
    overall = mean.mean(dim=-1, keepdim=True) + _TINY
    n = energies.shape[-1]
    shares = (energies + _TINY) / (energies + _TINY).sum(dim=-1, keepdim=True)
    entropy = -(shares * shares.log()).sum(dim=-1) / math.log(max(n, 2))
    spread = (shares * n - 1).square().mean(dim=-1)
    return torch.stack([(mean / overall + _FLOOR).log(), entropy, spread], dim=-1)


def retrieval(x: Tensor, values: Tensor, groups: int, n_heads: int) -> Tensor:
    """Return how far outputs of attention `[M, in]` are from the token's own values `[M, ..]` of all key-value heads,
    `|x_g - v_g|^2 / (|x_g|^2 + |v_g|^2)` by group `[M, G]`: 0 if a token attends to itself alone, 2 at most.
    """
    heads = values.unflatten(-1, (-1, x.shape[-1] // n_heads))
    own = heads.repeat_interleave(n_heads // heads.shape[-2], dim=-2).flatten(-2)
    x_g, v_g = (states.unflatten(-1, (groups, -1)) for states in (x, own))
    size = x_g.square().sum(dim=-1) + v_g.square().sum(dim=-1)
    return (x_g - v_g).square().sum(dim=-1) / (size + _TINY)


def group_energy(x: Tensor, groups: int) -> Tensor:
    """Return the log mean square of each group `[M, G]` of inputs `[M, in]`."""
    return x.unflatten(-1, (groups, -1)).square().mean(dim=-1).log()


def gate_correlation(gates: Tensor) -> Tensor:
    """Return correlations `[G, G]` of gates `[M, G]`; NaN for a constant gate."""
    centred = gates - gates.mean(dim=0)
    norms = centred.norm(dim=0)
    return (centred.T @ centred) / (norms[:, None] * norms)

"""RankMask: a low-rank update with exactly k components per code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from probemon.adapters.bem.forms.form import Form, first_factor, last_factor, norms_of, root
from probemon.errors import ConfigError


class RankMask(Form):
    """`scale * U (m * V^T x)`; m has ones at the code's `active` largest numbers. V `[in, R]`, U `[out, R]`.

    `hadamard`: rotate the masked components; R must be a power of two. U can learn this too.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        rank: int,
        active: int,
        scale: float = 1.0,
        hadamard: bool = False,
        generator: torch.Generator,
    ) -> None:
        super().__init__(n_in, n_out, rank)
        if not 1 <= active <= rank:
            raise ConfigError(f"{active} active components of {rank}: give 1 to {rank}")
        if hadamard and rank & (rank - 1):
            raise ConfigError(f"hadamard with a rank of {rank}: give a power of two")
        self.rank, self.active, self.scale, self.hadamard = rank, active, scale, hadamard
        self.V = first_factor(n_in, rank, n_in=n_in, generator=generator)
        self.U = last_factor(n_out, rank)

    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """See `Form`. Without gradients, one mask for all rows computes its components only."""
        masks = straight_through(codes, self.active)
        if not torch.is_grad_enabled() and len(masks) and bool((masks == masks[0]).all()):
            return self._gathered(x, masks[0], base, share)
        masked = (x @ self.V) * masks
        masked = masked if share is None else masked * share
        return torch.addmm(base, self.rotated(masked), self.U.T, alpha=self.scale)

    def _gathered(self, x: Tensor, mask: Tensor, base: Tensor, share: Tensor | None) -> Tensor:
        indices = mask.nonzero()[:, 0]
        masked = x @ self.V[:, indices] if share is None else (x @ self.V[:, indices]) * share
        if not self.hadamard:
            return torch.addmm(base, masked, self.U[:, indices].T, alpha=self.scale)
        full = masked.new_zeros(len(x), self.rank).index_copy(1, indices, masked)
        return torch.addmm(base, self.rotated(full), self.U.T, alpha=self.scale)

    def rotated(self, components: Tensor) -> Tensor:
        return hadamard_transform(components) if self.hadamard else components

    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """See `Form`; both exact."""
        u = self.rotated(self.U)  # the transform is its own transpose
        r_u, r_v = (torch.linalg.qr(factor, mode="r").R for factor in (u, self.V))
        masks = straight_through(codes, self.active)
        return norms_of((self.scale * r_u * masks[:, None, :]) @ r_v.T)

    def frobenius(self, codes: Tensor) -> Tensor:
        """See `Form`."""
        u, masks = self.rotated(self.U), straight_through(codes, self.active)
        square = ((masks @ ((u.T @ u) * (self.V.T @ self.V))) * masks).sum(dim=-1)
        return self.scale * root(square)


def top_mask(codes: Tensor, active: int) -> Tensor:
    """Return masks `[M, R]`: 1 at the `active` largest codes, lowest index first."""
    order = codes.argsort(dim=-1, descending=True, stable=True)[:, :active]
    return torch.zeros_like(codes).scatter(1, order, 1.0)


def straight_through(codes: Tensor, active: int) -> Tensor:
    """Return `top_mask` with the gradient of `sigmoid(code - border)`, the border being the smallest active code
    (Bengio et al. 2013). NaN for non-finite codes.
    """
    mask = top_mask(codes, active).where(codes.isfinite().all(dim=-1, keepdim=True), math.nan)
    if not codes.requires_grad:
        return mask
    ordered = codes.detach().sort(dim=-1, descending=True).values
    border = ordered[:, active - 1 : active]
    soft = torch.sigmoid(codes - border)
    return mask + soft - soft.detach()


def hadamard_transform(components: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of the last dimension."""
    length = components.shape[-1]
    out, half = components, 1
    while half < length:
        pairs = out.unflatten(-1, (length // (2 * half), 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return out / math.sqrt(length)

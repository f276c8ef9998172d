"""Kronecker: a sum of Kronecker products, weighted by the code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from probemon.adapters.bem.forms.form import Form, first_factor, last_factor, root
from probemon.errors import ConfigError


class Kronecker(Form):
    """`scale * sum_k c_k (A_k (x) B_k) x`, by `(A (x) B) x = vec(A X B^T)` with X the input as rows `[a2, b2]`.

    `shapes`: `(a1, a2)` and `(b1, b2)`, with a1 b1 outputs and a2 b2 inputs, else `ConfigError`. A starts at zero.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        shapes: tuple[tuple[int, int], tuple[int, int]],
        terms: int,
        scale: float = 1.0,
        generator: torch.Generator,
    ) -> None:
        super().__init__(n_in, n_out, terms)
        (a1, a2), (b1, b2) = shapes
        if a1 * b1 != n_out or a2 * b2 != n_in:
            raise ConfigError(
                f"Kronecker factors of {a1} by {a2} and {b1} by {b2} make {a1 * b1} by {a2 * b2}, and the site is"
                f" {n_out} by {n_in}"
            )
        self.shapes, self.scale = shapes, scale
        self.A = last_factor(terms, a1, a2)
        self.B = first_factor(terms, b1, b2, n_in=b2, generator=generator)

    def forward(self, x: Tensor, codes: Tensor, base: Tensor, share: Tensor | None = None) -> Tensor:
        """See `Form`; the cheaper side goes first."""
        codes = codes if share is None else codes * share
        (_, a2), (_, b2) = self.shapes
        matrix = x.unflatten(-1, (a2, b2))  # [M, a2, b2]
        if self._a_first:
            half = torch.einsum("kpa,mab->mkpb", self.A, matrix) * codes[:, :, None, None]
            out = torch.einsum("mkpb,kqb->mpq", half, self.B)
        else:
            half = torch.einsum("mab,kqb->mkaq", matrix, self.B) * codes[:, :, None, None]
            out = torch.einsum("kpa,mkaq->mpq", self.A, half)
        return base + self.scale * out.flatten(1)

    @property
    def _a_first(self) -> bool:
        (a1, a2), (b1, b2) = self.shapes
        return a1 * b2 * (a2 + b1) <= a2 * b1 * (b2 + a1)

    def sizes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """See `Form`. Exact for one term, else `scale sum |c_k| sigma1(A_k) sigma1(B_k)`, at most the norm."""
        norms = torch.linalg.matrix_norm(self.A, 2) * torch.linalg.matrix_norm(self.B, 2)
        frobenius = self.frobenius(codes)
        return torch.minimum(self.scale * codes.abs() @ norms, frobenius), frobenius

    def frobenius(self, codes: Tensor) -> Tensor:
        """See `Form`."""
        grams = [torch.einsum("kpa,lpa->kl", factor, factor) for factor in (self.A, self.B)]
        square = ((codes @ (grams[0] * grams[1])) * codes).sum(dim=-1)
        return self.scale * root(square)


def closest_shapes(n_in: int, n_out: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return shapes of A and B nearest to the roots of the site's."""
    a1, a2 = (max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0) for n in (n_out, n_in))
    return (a1, a2), (n_out // a1, n_in // a2)

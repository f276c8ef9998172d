"""Reduced-rank regression (Izenman 1975): the LoRA of a rank whose outputs are nearest to a site's.

    sums = Sums.of_sizes(rank, n_in)
    sums.add(codes * p, x, p)                                   # [M, r], [M, in], p = x V [M, r]
    fit = best_fit(U, sums.own(V), sums, ridge=0.0)
    a, b = fit.cut(4)                                           # [4, in], [out, 4]
    fit.lost(4), fit.total

For y = c o p it minimises `sum_t |U y_t - B A x_t|^2` over all A `[rank, in]` and B `[out, rank]`: W `[r, in]` is the
regression of y on x, and B A the part of `U W` with the most variance on these inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_RIDGES = torch.logspace(-8, 4, 49, dtype=torch.float64)
_ALIKE = 2.0  # neighbouring tokens are: each degree of freedom counts so often
_MOST_FREEDOM = 0.9  # of the tokens


@dataclass(eq=False)
class Sums:
    """Sums over tokens, fp64: `outputs [r, r]` of y y^T, `cross [r, in]` of y x^T, `inputs [in, in]` of x x^T,
    `own_cross [r, r]` of y p^T, `own_inputs [r, r]` of p p^T.
    """

    n: int
    outputs: Tensor
    cross: Tensor
    inputs: Tensor
    own_cross: Tensor
    own_inputs: Tensor

    @classmethod
    def of_sizes(cls, rank: int, n_in: int) -> Sums:
        sizes = (rank, rank), (rank, n_in), (n_in, n_in), (rank, rank), (rank, rank)
        return cls(0, *(torch.zeros(size, dtype=torch.float64) for size in sizes))

    def add(self, y: Tensor, x: Tensor, p: Tensor) -> None:
        self.n += len(y)
        self.outputs.addmm_(y.T, y)
        self.cross.addmm_(y.T, x)
        self.inputs.addmm_(x.T, x)
        self.own_cross += y.T @ p
        self.own_inputs += p.T @ p

    def own(self, v: Tensor) -> Tensor:
        """Return the regression of y on p, as a matrix `[r, in]` of x, for V `[in, r]`."""
        # Inputs may span fewer than r directions.
        return self.own_cross @ torch.linalg.pinv(self.own_inputs, hermitian=True) @ v.T


@dataclass(frozen=True, eq=False)
class Fit:
    """Factors A `[k, in]` and B `[out, k]`, the most important direction first.

    `gains [k]`: of the squared update, what each direction explains.
    `total`: the squared update.
    `rank`: the numerical one.
    """

    a: Tensor
    b: Tensor
    gains: Tensor
    total: float
    rank: int

    def cut(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the best factors of a rank, with zeros if fewer directions are needed."""
        missing = max(0, rank - len(self.a))
        return nn.functional.pad(self.a[:rank], (0, 0, 0, missing)), nn.functional.pad(self.b[:, :rank], (0, missing))

    def lost(self, rank: int) -> float:
        """Return the squared distance to the update that is left at a rank."""
        return max(0.0, self.total - float(self.gains[:rank].sum()))


def best_fit(u: Tensor, own: Tensor, sums: Sums, ridge: float | None) -> Fit:
    """Return the fit for U `[out, r]`.

    `own [r, in]`: of all equally good W, the one nearest to this is taken.
    `ridge`: pulls W towards `own`, in units of the mean eigenvalue of `inputs`. 0 is best on these tokens. None
    chooses by generalised cross-validation (Golub, Heath and Wahba 1979), which expects tokens that were not seen.
    """
    q_u, r_u = torch.linalg.qr(u)
    values, vectors = torch.linalg.eigh(sums.inputs)
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    values, vectors = values[kept], vectors[:, kept]
    unexplained = (sums.cross - own @ sums.inputs) @ vectors  # [r, k]
    unit = values.mean() if len(values) else values.new_zeros(())
    strength = unit * ridge if ridge is not None else _chosen(r_u, own, sums, unexplained, values)
    w = own + unexplained / (values + strength) @ vectors.T
    fitted = r_u @ w
    directions, strengths, _ = torch.linalg.svd(fitted @ vectors * values.sqrt(), full_matrices=False)
    a = directions.T @ fitted
    gains = 2 * (a * (directions.T @ r_u @ sums.cross)).sum(dim=1) - (a @ sums.inputs * a).sum(dim=1)
    rank = int((strengths > 1e-9 * strengths.amax()).sum()) if len(strengths) else 0
    return Fit(a, q_u @ directions, gains, float((r_u @ sums.outputs * r_u).sum()), rank)


def _chosen(r_u: Tensor, own: Tensor, sums: Sums, unexplained: Tensor, values: Tensor) -> Tensor:
    """The ridge of the least generalised cross-validation score; infinite if that of `own` alone is less."""
    by_own = own @ sums.cross.T
    residual = sums.outputs - by_own - by_own.T + own @ sums.inputs @ own.T
    base = (r_u @ residual * r_u).sum()
    ridges = _RIDGES * values.mean()
    shrunk = values + ridges[:, None]
    explained = (r_u @ unexplained).square().sum(dim=0) * (values + 2 * ridges[:, None]) / shrunk.square()
    freedom = _ALIKE * (values / shrunk).sum(dim=1) / sums.n
    scores = (base - explained.sum(dim=1)).clamp(min=0) / (1 - freedom).square()
    scores = scores.where(freedom < _MOST_FREEDOM, torch.inf)
    best = int(scores.argmin())
    return ridges[best] if bool(scores[best] < base) else ridges.new_tensor(torch.inf)

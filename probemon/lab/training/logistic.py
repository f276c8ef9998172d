"""Logistic regressions of many concepts over the same rows, fitted together.

    features = Dense(x)                                        # [N, D] fp32, standardised; or Sparse(...)
    w, b = fit_logistic(features, Targets(part, known), l2)      # [P, D], [P]

Loss: weighted mean cross-entropy over known rows, both sides and all parts weighing the same, plus
l2[p] / 2 * |w[p]|^2. Each concept takes separate L-BFGS steps (Liu & Nocedal 1989), from the curvature at zero weights;
matrix products are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

_HISTORY, _MOST_STEPS, _MOST_HALVINGS = 10, 300, 25
_CHUNK = 1 << 11  # fits the cache
_ARMIJO = 1e-4
_SEEN = 8192  # rows for the curvature


class Features(Protocol):
    """Rows of features `[N, D]`."""

    shape: tuple[int, int]

    def times(self, start: int, stop: int, w: Tensor) -> Tensor:
        """Return rows `start` to `stop` times `w.T`: `[n, P]` for w `[P, D]`."""

    def transposed_times(self, start: int, stop: int, r: Tensor) -> Tensor:
        """Return `r.T` times these rows: `[P, D]` for r `[n, P]`."""

    def rows(self, use: Tensor) -> Features:
        """Return the rows `use [N]` bool."""

    def second_moments(self, weight: Tensor) -> Tensor:
        """Return weighted second moments of features and a constant 1, `[D + 1, D + 1]` fp64, or their diagonal."""


class Dense:
    """Features as a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape = x, (x.shape[0], x.shape[1])

    def times(self, start: int, stop: int, w: Tensor) -> Tensor:
        return self.x[start:stop] @ w.T

    def transposed_times(self, start: int, stop: int, r: Tensor) -> Tensor:
        return r.T @ self.x[start:stop]

    def rows(self, use: Tensor) -> Dense:
        return Dense(self.x[use])

    def second_moments(self, weight: Tensor) -> Tensor:
        chosen = weight.nonzero().flatten()
        if len(chosen) > _SEEN:  # a sample suffices
            chosen = chosen[torch.linspace(0, len(chosen) - 1, _SEEN).long()]
        scaled_weight = weight[chosen] * (weight.sum() / weight[chosen].sum().clamp(min=1e-300))
        x = torch.nn.functional.pad(self.x[chosen], (0, 1), value=1.0)
        return ((x * scaled_weight[:, None].to(x.dtype)).T @ x).double()


class Sparse:
    """Sparse features: `value` at (row, column), rows ascending."""

    def __init__(self, row: Tensor, column: Tensor, value: Tensor, shape: tuple[int, int]) -> None:
        self.row, self.column, self.value, self.shape = row, column, value, shape

    def _part(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        a, b = torch.searchsorted(self.row, torch.tensor([start, stop])).tolist()
        return self.row[a:b] - start, self.column[a:b], self.value[a:b]

    def times(self, start: int, stop: int, w: Tensor) -> Tensor:
        row, column, value = self._part(start, stop)
        return torch.zeros(stop - start, len(w), dtype=w.dtype).index_add_(0, row, w.T[column] * value[:, None])

    def transposed_times(self, start: int, stop: int, r: Tensor) -> Tensor:
        row, column, value = self._part(start, stop)
        return torch.zeros(self.shape[1], r.shape[1], dtype=r.dtype).index_add_(0, column, r[row] * value[:, None]).T

    def rows(self, use: Tensor) -> Sparse:
        selected, number = use[self.row], torch.cumsum(use, 0) - 1
        shape = (int(use.sum()), self.shape[1])
        return Sparse(number[self.row[selected]], self.column[selected], self.value[selected], shape)

    def second_moments(self, weight: Tensor) -> Tensor:
        squares = weight[self.row] * self.value.double().square()
        diagonal = torch.zeros(self.shape[1], dtype=torch.float64).index_add_(0, self.column, squares)
        return torch.cat([diagonal, weight.sum()[None]])


@dataclass(frozen=True)
class Targets:
    """`part [N]` of each row, and labels of parts `known [S, P]` int8: 1, 0, -1 for unknown."""

    part: Tensor
    known: Tensor

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Weights of a row by part `[S, P]`, of positives and negatives, each summing to one half; 0 with one side."""
        n_rows = torch.bincount(self.part, minlength=len(self.known)).double()
        size = torch.where(n_rows > 0, 1.0, 0.0)
        sides = []
        for side in (1, 0):
            side_weights = (self.known == side) * size[:, None]
            sides.append(side_weights / side_weights.sum(0).clamp(min=1e-300) / 2 / n_rows.clamp(min=1)[:, None])
        has_both = (sides[0].sum(0) > 0) & (sides[1].sum(0) > 0)
        return (sides[0] * has_both).float(), (sides[1] * has_both).float()


@dataclass(frozen=True)
class RowTargets:
    """Weights of each row as a positive, and as a negative `[N, P]`, of which one is 0; used as they are."""

    present: Tensor
    absent: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Both weights."""
        return self.present, self.absent

    @cached_property
    def part(self) -> Tensor:
        """Each row is a part."""
        return torch.arange(len(self.present))


def fit_logistic(
    features: Features,
    targets: Targets | RowTargets,
    l2: Tensor,
    *,
    start: tuple[Tensor, Tensor] | None = None,
    tolerance: float = 1e-6,
    most_steps: int = _MOST_STEPS,
) -> tuple[Tensor, Tensor]:
    """Return weights `[P, D]` and biases `[P]`, zeros with one side.

    `l2 [P]` must be positive; `tolerance`: on the largest gradient entry.
    """
    present, absent = targets.weights
    n, width = features.shape
    dtype = present.dtype if not isinstance(features, Dense) else features.x.dtype
    signed, l2 = (absent - present).to(dtype), l2.to(dtype)

    def evaluate(theta: Tensor, use: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss `[U]` and gradient `[U, D + 1]` of concepts `use`, at theta `[U, D + 1]`."""
        w, b = theta[:, :-1], theta[:, -1]
        loss = (l2[use] / 2 * w.double().square().sum(1)).double()
        grad = torch.cat([l2[use, None] * w, torch.zeros(len(w), 1, dtype=dtype)], dim=1)
        selected = signed[:, use]
        for begin in range(0, n, _CHUNK):
            end = min(begin + _CHUNK, n)
            z = features.times(begin, end, w) + b
            parts = targets.part[begin:end]
            # -log sigmoid(z) for positives, else -log sigmoid(-z). In place: passes over [N, U] dominate.
            weight = selected[parts]
            sign = weight.sign()
            soft = torch.nn.functional.softplus(z.mul_(sign))
            loss += soft.mul_(weight).mul_(sign).sum(0, dtype=torch.float64)
            r = z.sigmoid_().mul_(weight)
            grad[:, :-1] += features.transposed_times(begin, end, r)
            grad[:, -1] += r.sum(0)
        return loss, grad

    n_concepts = present.shape[1]
    theta = torch.zeros(n_concepts, width + 1, dtype=dtype)
    if start is not None:
        theta = torch.cat([start[0], start[1][:, None]], dim=1).to(dtype)
    has_both = (present.sum(0) > 0).nonzero().flatten()
    theta[present.sum(0) == 0] = 0
    if len(has_both):
        weight = (present + absent)[:, has_both].mean(1).double()[targets.part]
        solve = _at_zero(features.second_moments(weight), l2)
        theta[has_both] = _minimise(evaluate, solve, theta[has_both], has_both, tolerance, most_steps)
    return theta[:, :-1].contiguous(), theta[:, -1].contiguous()


def _at_zero(moments: Tensor, l2: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a solver for the curvature at zero weights, for vectors `[U, D + 1]` of concepts `use [U]`."""
    if moments.ndim == 1:
        return lambda q, use: (q / (moments / 4 + l2[use, None].double())).to(q.dtype)
    parts = {
        value: torch.linalg.cholesky(moments / 4 + value * torch.eye(len(moments), dtype=torch.float64))
        for value in l2.double().unique().tolist()
    }

    def solve(q: Tensor, use: Tensor) -> Tensor:
        solution, penalties = torch.empty_like(q), l2[use].double()
        for value, part in parts.items():
            rows = penalties == value
            if bool(rows.any()):
                solution[rows] = torch.cholesky_solve(q[rows].double().T, part).T.to(q.dtype)
        return solution

    return solve


def _minimise(
    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    solve: Callable[[Tensor, Tensor], Tensor],
    theta: Tensor,
    use: Tensor,
    tolerance: float,
    most_steps: int,
) -> Tensor:
    """Minimise U problems by L-BFGS with backtracking; finished ones are removed."""
    result, at, rounding = theta.clone(), torch.arange(len(use)), 2 * torch.finfo(theta.dtype).eps
    loss, grad = evaluate(theta, use)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(most_steps):
        going = grad.abs().amax(1) > tolerance
        if not bool(going.all()):
            result[at] = theta
            at, use, theta, loss, grad = at[going], use[going], theta[going], loss[going], grad[going]
            steps = [(s[going], y[going], rho[going]) for s, y, rho in steps]
        if not len(use):
            return result
        direction = _direction(grad, steps, solve, use)
        slope = (direction * grad).double().sum(1)
        size = torch.ones(len(use), dtype=theta.dtype)
        trial, trial_loss, trial_grad = theta, loss, grad
        open_ = torch.arange(len(use))
        new, new_loss, new_grad = theta.clone(), loss.clone(), grad.clone()
        for _ in range(_MOST_HALVINGS):
            trial = theta[open_] + size[open_, None] * direction[open_]
            trial_loss, trial_grad = evaluate(trial, use[open_])
            # Near the optimum losses differ only by rounding.
            good = trial_loss <= loss[open_] + _ARMIJO * size[open_] * slope[open_] + rounding * loss[open_].abs()
            places = open_[good]
            new[places], new_loss[places], new_grad[places] = trial[good], trial_loss[good], trial_grad[good]
            open_ = open_[~good]
            if not len(open_):
                break
            size[open_] *= 0.5
        s, y = new - theta, new_grad - grad
        curvature = (s * y).double().sum(1)
        moved = curvature > 1e-12
        rho = torch.where(moved, 1 / curvature.clamp(min=1e-12), 0.0).to(theta.dtype)
        steps = [*steps, (s, y, rho)][-_HISTORY:]
        stuck = (s == 0).all(1)
        theta, loss, grad = new, new_loss, new_grad
        grad = torch.where(stuck[:, None], torch.zeros_like(grad), grad)  # no step lowers its loss
    result[at] = theta
    return result


def _direction(
    grad: Tensor,
    steps: list[tuple[Tensor, Tensor, Tensor]],
    solve: Callable[[Tensor, Tensor], Tensor],
    use: Tensor,
) -> Tensor:
    """Two-loop recursion of L-BFGS for each problem; pairs with rho 0 are skipped."""
    q, alphas = grad.clone(), []
    for s, y, rho in reversed(steps):
        alpha = rho * (s * q).sum(1)
        alphas.append(alpha)
        q -= alpha[:, None] * y
    q = solve(q, use)
    if steps:
        scale, newest = torch.ones(len(grad), dtype=grad.dtype), torch.zeros_like(grad)
        for s, y, rho in steps:  # scale by the newest pair with curvature
            newest = torch.where(rho[:, None] > 0, y, newest)
            scale = torch.where(rho > 0, (s * y).sum(1), scale)
        length = (newest * solve(newest, use)).sum(1)
        q *= torch.where(length > 0, scale / length.clamp(min=1e-30), 1.0)[:, None]
    for (s, y, rho), alpha in zip(steps, reversed(alphas), strict=True):
        beta = rho * (y * q).sum(1)
        q += (alpha - beta)[:, None] * s
    return -q


def logits(features: Features, w: Tensor, b: Tensor) -> Tensor:
    """Return `[N, P]`."""
    return features.times(0, features.shape[0], w) + b

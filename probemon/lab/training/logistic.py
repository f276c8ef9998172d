"""Logistic regressions of many concepts over the same rows, trained together.

    features = Dense(x)                                        # [N, D] fp32, standardised; or Sparse(...)
    w, b = fit_logistic(features, Targets(row, labels, size), l2)      # [P, D], [P]

The loss of concept p is the weighted mean over its known rows of the cross-entropy, both sides of it weighing the same
and each part of a text as much as any other, plus l2[p] / 2 * |w[p]|^2. All concepts take their own steps of L-BFGS
(Liu & Nocedal 1989, "On the limited memory BFGS method for large scale optimization") with their own line search, in
products that are shared: the result of one does not depend on those beside it, but for rounding. They begin at the
curvature that the loss has where all weights are 0, which all share, so that they take few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_HISTORY, _MOST_STEPS, _MOST_HALVINGS = 10, 300, 25
# Where areas are compared: they no longer move by then, though weights may.
TO_COMPARE: Any = {"tolerance": 1e-4, "most_steps": 60}
_CHUNK = 1 << 11  # rows at once: they stay in the cache between the product with weights and that with residuals
_ARMIJO = 1e-4
_SEEN = 8192  # rows, of which the curvature is taken


class Features(Protocol):
    """Rows of features `[N, D]`, by the two products that are needed."""

    shape: tuple[int, int]

    def times(self, start: int, stop: int, w: Tensor) -> Tensor:
        """Return rows `start` to `stop` times `w.T`: `[n, P]` for w `[P, D]`."""

    def transposed_times(self, start: int, stop: int, r: Tensor) -> Tensor:
        """Return `r.T` times those rows: `[P, D]` for r `[n, P]`."""

    def rows(self, use: Tensor) -> Features:
        """Return some of the rows, `use [N]` bool."""

    def second_moments(self, weight: Tensor) -> Tensor:
        """Return the weighted sum of products of the features, and of a last one that is 1, `[D + 1, D + 1]` fp64; or
        its diagonal `[D + 1]`. `weight [N]` fp64.
        """


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
        if len(chosen) > _SEEN:  # so many tell enough of it
            chosen = chosen[torch.linspace(0, len(chosen) - 1, _SEEN).long()]
        own = weight[chosen] * (weight.sum() / weight[chosen].sum().clamp(min=1e-300))
        x = torch.nn.functional.pad(self.x[chosen], (0, 1), value=1.0)
        return ((x * own[:, None].to(x.dtype)).T @ x).double()


class Sparse:
    """Features most of which are 0: `value` at (row, column), rows ascending."""

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
        kept, number = use[self.row], torch.cumsum(use, 0) - 1
        shape = (int(use.sum()), self.shape[1])
        return Sparse(number[self.row[kept]], self.column[kept], self.value[kept], shape)

    def second_moments(self, weight: Tensor) -> Tensor:
        squares = weight[self.row] * self.value.double().square()
        diagonal = torch.zeros(self.shape[1], dtype=torch.float64).index_add_(0, self.column, squares)
        return torch.cat([diagonal, weight.sum()[None]])


@dataclass(frozen=True)
class Targets:
    """What rows are of: `part [N]` of each row, and by part `known [S, P]` int8, 1, 0 and -1 for unknown.

    - `weight [S]`: how much a part counts beside others; its rows share that. None for one each.
    """

    part: Tensor
    known: Tensor
    weight: Tensor | None = None

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The weight of a row of each part `[S, P]` where it is there, and where it is absent: they sum to one half
        each; of a concept with one side alone, all are 0.
        """
        n_rows = torch.bincount(self.part, minlength=len(self.known)).double()
        size = torch.where(n_rows > 0, 1.0, 0.0) if self.weight is None else self.weight.double() * (n_rows > 0)
        sides = []
        for side in (1, 0):
            of_side = (self.known == side) * size[:, None]
            sides.append(of_side / of_side.sum(0).clamp(min=1e-300) / 2 / n_rows.clamp(min=1)[:, None])
        has_both = (sides[0].sum(0) > 0) & (sides[1].sum(0) > 0)
        return (sides[0] * has_both).float(), (sides[1] * has_both).float()


def fit_logistic(
    features: Features,
    targets: Targets,
    l2: Tensor,
    *,
    start: tuple[Tensor, Tensor] | None = None,
    tolerance: float = 1e-6,
    most_steps: int = _MOST_STEPS,
) -> tuple[Tensor, Tensor]:
    """Return weights `[P, D]` and biases `[P]`; `l2 [P]` over 0, `start` another solution to begin at.

    A concept with one side alone has zeros. `tolerance`: of the largest entry of the gradient.
    """
    there, absent = targets.weights
    n, width = features.shape
    dtype = there.dtype if not isinstance(features, Dense) else features.x.dtype
    signed, l2 = (absent - there).to(dtype), l2.to(dtype)

    def evaluate(theta: Tensor, use: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss `[U]` and gradient `[U, D + 1]` of the concepts `use`, at theta `[U, D + 1]`."""
        w, b = theta[:, :-1], theta[:, -1]
        loss = (l2[use] / 2 * w.double().square().sum(1)).double()
        grad = torch.cat([l2[use, None] * w, torch.zeros(len(w), 1, dtype=dtype)], dim=1)
        own = signed[:, use]
        for begin in range(0, n, _CHUNK):
            end = min(begin + _CHUNK, n)
            z = features.times(begin, end, w) + b
            parts = targets.part[begin:end]
            # -log sigmoid(z) where it is there, -log sigmoid(-z) where it is absent: one sign apart. In place, since
            # with many concepts more time goes into passing over [N, U] than into products.
            weight = own[parts]
            sign = weight.sign()
            soft = torch.nn.functional.softplus(z.mul_(sign))
            loss += soft.mul_(weight).mul_(sign).sum(0, dtype=torch.float64)
            r = z.sigmoid_().mul_(weight)
            grad[:, :-1] += features.transposed_times(begin, end, r)
            grad[:, -1] += r.sum(0)
        return loss, grad

    n_concepts = targets.known.shape[1]
    theta = torch.zeros(n_concepts, width + 1, dtype=dtype)
    if start is not None:
        theta = torch.cat([start[0], start[1][:, None]], dim=1).to(dtype)
    has_both = (there.sum(0) > 0).nonzero().flatten()
    theta[there.sum(0) == 0] = 0
    if len(has_both):
        weight = (there + absent)[:, has_both].mean(1).double()[targets.part]
        solve = _at_zero(features.second_moments(weight), l2)
        theta[has_both] = _minimise(evaluate, solve, theta[has_both], has_both, tolerance, most_steps)
    return theta[:, :-1].contiguous(), theta[:, -1].contiguous()


def _at_zero(moments: Tensor, l2: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what solves for the curvature of the loss at weights of 0, a quarter of the second moments and l2: of
    vectors `[U, D + 1]` of concepts `use [U]`. It holds of every concept nearly, which is enough for where to begin.
    """
    if moments.ndim == 1:
        return lambda q, use: (q / (moments / 4 + l2[use, None].double())).to(q.dtype)
    parts = {
        value: torch.linalg.cholesky(moments / 4 + value * torch.eye(len(moments), dtype=torch.float64))
        for value in l2.double().unique().tolist()
    }

    def solve(q: Tensor, use: Tensor) -> Tensor:
        found, own = torch.empty_like(q), l2[use].double()
        for value, part in parts.items():
            rows = own == value
            if bool(rows.any()):
                found[rows] = torch.cholesky_solve(q[rows].double().T, part).T.to(q.dtype)
        return found

    return solve


def _minimise(
    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    solve: Callable[[Tensor, Tensor], Tensor],
    theta: Tensor,
    use: Tensor,
    tolerance: float,
    most_steps: int,
) -> Tensor:
    """Minimise losses of U separate problems by L-BFGS with backtracking, those that are done left out of the rest."""
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
        tried, tried_loss, tried_grad = theta, loss, grad
        open_ = torch.arange(len(use))
        new, new_loss, new_grad = theta.clone(), loss.clone(), grad.clone()
        for _ in range(_MOST_HALVINGS):
            tried = theta[open_] + size[open_, None] * direction[open_]
            tried_loss, tried_grad = evaluate(tried, use[open_])
            # Near the end losses differ by their rounding alone, and gradients still tell where it goes down.
            good = tried_loss <= loss[open_] + _ARMIJO * size[open_] * slope[open_] + rounding * loss[open_].abs()
            places = open_[good]
            new[places], new_loss[places], new_grad[places] = tried[good], tried_loss[good], tried_grad[good]
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
        grad = torch.where(stuck[:, None], torch.zeros_like(grad), grad)  # no step lowers its loss: it is done
    result[at] = theta
    return result


def _direction(
    grad: Tensor,
    steps: list[tuple[Tensor, Tensor, Tensor]],
    solve: Callable[[Tensor, Tensor], Tensor],
    use: Tensor,
) -> Tensor:
    """Two-loop recursion of L-BFGS for each problem, begun at a curvature that is known; a pair with rho 0 is left out
    of its own problem alone.
    """
    q, alphas = grad.clone(), []
    for s, y, rho in reversed(steps):
        alpha = rho * (s * q).sum(1)
        alphas.append(alpha)
        q -= alpha[:, None] * y
    q = solve(q, use)
    if steps:
        scale, newest = torch.ones(len(grad), dtype=grad.dtype), torch.zeros_like(grad)
        for s, y, rho in steps:  # the newest that has curvature says how long a step is
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


def row_weights(targets: Targets, concept: int) -> np.ndarray:
    """Return the weight of each row `[N]` in the loss of a concept, as another trainer would be given it."""
    there, absent = targets.weights
    known = targets.known[:, concept]
    by_part = torch.where(known == 1, there[:, concept], torch.where(known == 0, absent[:, concept], 0.0))
    return by_part[targets.part].numpy()

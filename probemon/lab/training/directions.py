"""Two probes without settings: difference of means, and linear discriminant analysis.

    w = mean_difference(x, targets)                # [P, D]
    w, b = scaled(x, targets, w)                   # sigmoid(x @ w.T + b) is a score

Mass-mean probes: Marks & Tegmark 2023 (arXiv:2310.06824). Discriminants: Fisher 1936; shrinkage: Chen, Wiesel, Eldar &
Hero 2010 (OAS).
"""

from __future__ import annotations

import torch
from torch import Tensor

from probemon.lab.training.logistic import Dense, Targets, fit_logistic

_SCALE_L2 = 1e-6
_CHUNK = 1 << 14


def mean_difference(x: Tensor, targets: Targets) -> Tensor:
    """Return `[P, D]` for x `[N, D]`; parts weigh the same, and both sides."""
    present, absent = (2 * weights for weights in targets.weights)
    n_parts = len(targets.known)
    sums = torch.zeros(n_parts, x.shape[1], dtype=x.dtype).index_add_(0, targets.part, x)
    return (present - absent).to(x.dtype).T @ sums


def discriminant(x: Tensor, targets: Targets) -> Tensor:
    """Return `[P, D]`, by the covariance of all rows: same direction as within classes."""
    n, width = x.shape
    mean, covariance = x.mean(0), torch.zeros(width, width, dtype=torch.float64)
    for chunk in x.split(_CHUNK):
        centred = (chunk - mean).double()
        covariance += centred.T @ centred / n
    trace, square = covariance.trace(), covariance.square().sum()
    shrinkage = (1 - 2 / width) * square + trace**2
    shrinkage = (shrinkage / ((n + 1 - 2 / width) * (square - trace**2 / width)).clamp(min=1e-30)).clamp(0, 1)
    if not trace > 0:  # all states are the same
        return torch.zeros(targets.known.shape[1], width, dtype=x.dtype)
    shrunken = (1 - shrinkage) * covariance + shrinkage * trace / width * torch.eye(width, dtype=torch.float64)
    return torch.linalg.solve(shrunken, mean_difference(x, targets).double().T).T.to(x.dtype)


def scaled(x: Tensor, targets: Targets, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return directions `[P, D]` and biases `[P]` whose scores fit best (Platt 1999)."""
    w = w / w.norm(dim=1, keepdim=True).clamp(min=1e-12)
    lengths, biases = [], []
    for p in range(len(w)):
        target = Targets(targets.part, targets.known[:, p : p + 1], targets.weight)
        length, bias = fit_logistic(Dense((x @ w[p])[:, None]), target, torch.tensor([_SCALE_L2]))
        lengths.append(length[0, 0])
        biases.append(bias[0])
    return w * torch.stack(lengths)[:, None], torch.stack(biases)

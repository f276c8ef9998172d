"""Linear probes trained on the watched score: the highest running score of a text.

    weights = fit_watched(Ema(0.3), x, targets, l2, start)       # start: a solution for single tokens

Aggregators are repeated in torch for gradients; a test compares them with `probemon.core.aggregate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probemon.core.aggregate import Aggregator, Attention, Each, Ema, Max, Mean, RollingMax, RollingMean
from probemon.errors import ConfigError
from probemon.lab.training.logistic import Targets
from probemon.lab.training.standard import Weights

_STEPS, _RATE = 60, 0.02
_LEAST = 1e-6


def is_known(aggregator: Aggregator) -> bool:
    """Whether an aggregator has gradients here."""
    return isinstance(aggregator, (Attention, Each, Ema, Max, Mean, RollingMax, RollingMean))


def highest_of(aggregator: Aggregator, scores: Tensor, length: Tensor) -> Tensor:
    """Return the highest running score `[S, P]` of scores `[S, T, P]`, of the first `length [S]` tokens."""
    n_tokens = scores.shape[1]
    counts = torch.arange(n_tokens)[None, :] < length[:, None]
    if isinstance(aggregator, Ema):
        state = scores[:, 0]
        running = [state]
        for t in range(1, n_tokens):
            state = aggregator.weight * scores[:, t] + (1 - aggregator.weight) * state
            running.append(state)
        values = torch.stack(running, dim=1)
    elif isinstance(aggregator, Mean):
        values = scores.cumsum(1) / torch.arange(1, n_tokens + 1)[None, :, None]
    elif isinstance(aggregator, RollingMean):
        total = torch.nn.functional.pad(scores.cumsum(1), (0, 0, aggregator.n, 0))
        size = torch.arange(1, n_tokens + 1).clamp(max=aggregator.n)
        values = (total[:, aggregator.n :] - total[:, :n_tokens]) / size[None, :, None]
    elif isinstance(aggregator, Attention):
        weight = torch.exp((scores - 1) / aggregator.temperature)
        values = (weight * scores).cumsum(1) / weight.cumsum(1).clamp(min=1e-30)
    elif isinstance(aggregator, (Each, Max, RollingMax)):  # rolling maxima have the same maximum
        values = scores
    else:
        raise ConfigError(f"there are no gradients of {aggregator}: add its steps to lab/training/watched_loss.py")
    return values.masked_fill(~counts[:, :, None], -torch.inf).amax(1)


def fit_watched(aggregator: Aggregator, x: Tensor, targets: Targets, l2: Tensor, start: Weights) -> Weights:
    """Return linear probes for standardised x `[N, D]`, tokens of a part in order."""
    parts, row = torch.unique(targets.part, return_inverse=True)
    order = torch.argsort(row, stable=True)
    length = torch.bincount(row)
    place = torch.arange(len(row)) - (length.cumsum(0) - length)[row[order]]
    known = targets.known[parts]
    size = torch.ones(len(parts)) if targets.weight is None else targets.weight[parts].float()
    weights = []
    for side in (1, 0):
        side_weights = (known == side) * size[:, None]
        weights.append(side_weights / side_weights.sum(0).clamp(min=1e-12) / 2)
    w, b = start["w1"][:, 0].clone().requires_grad_(), start["b1"][:, 0].clone().requires_grad_()
    optimiser = torch.optim.Adam([w, b], lr=_RATE * float(w.detach().abs().mean().clamp(min=1e-3)))
    rows = x[order]
    for _ in range(_STEPS):
        padded = torch.zeros(len(parts), int(length.max()), len(b))
        padded = padded.index_put((row[order], place), torch.sigmoid(rows @ w.T + b))
        score = highest_of(aggregator, padded, length).clamp(_LEAST, 1 - _LEAST)
        loss = -(weights[0] * score.log() + weights[1] * torch.log1p(-score)).sum()
        loss = loss + (l2 / 2 * w.square().sum(1)).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {"w1": w.detach()[:, None], "b1": b.detach()[:, None]}

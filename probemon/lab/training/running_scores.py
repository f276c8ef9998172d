"""The score of a text as in a rule: the highest running score over its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Aggregator, Each, Max
from probemon.core.scores import Floats
from probemon.lab.training.evaluation import Doubles

_VALUES = 1 << 22  # scores, with padding


def highest_running(aggregator: Aggregator, scores: Tensor, part: Tensor, n_parts: int) -> Doubles:
    """Return `[S, P]` for scores `[N, P]`, rows in order; NaN for a part without rows."""
    n_concepts = scores.shape[1]
    if isinstance(aggregator, (Each, Max)):
        highest = torch.full((n_parts, n_concepts), -torch.inf)
        highest.scatter_reduce_(0, part[:, None].expand_as(scores), scores.float(), "amax")
        return np.where(np.isinf(highest.numpy()), np.nan, highest.numpy()).astype(np.float64)
    lengths = torch.bincount(part, minlength=n_parts).numpy()
    order = torch.argsort(part, stable=True)
    first = np.cumsum(lengths) - lengths
    highest_by_part = np.full((n_parts, n_concepts), np.nan)
    # Parts of like length run in parallel, as more concepts.
    by_length = np.argsort(-lengths, kind="stable")
    by_length = by_length[lengths[by_length] > 0]
    while len(by_length):
        longest = int(lengths[by_length[0]])
        batch, by_length = np.split(by_length, [max(1, _VALUES // (longest * n_concepts))])
        state, best = aggregator.begin(), np.full((len(batch), n_concepts), -np.inf)
        for t in range(longest):
            going = lengths[batch] > t
            rows = order[torch.from_numpy(first[batch] + np.minimum(t, lengths[batch] - 1))]
            state, values = aggregator.add(state, scores[rows].numpy().reshape(-1))
            best = np.where(going[:, None], np.maximum(best, values.reshape(best.shape)), best)
        highest_by_part[batch] = best
    return highest_by_part


def by_path(scores: Floats, parents: Sequence[Sequence[int]]) -> None:
    """Turn scores `[N, P]` into path scores in place."""
    done: set[int] = set()

    def multiply(p: int) -> None:
        if p not in done:
            done.add(p)
            for parent in parents[p]:
                multiply(parent)
            if parents[p]:
                scores[:, p] *= scores[:, list(parents[p])].max(axis=1)

    for p in range(scores.shape[1]):
        multiply(p)

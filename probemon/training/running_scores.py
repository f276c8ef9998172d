"""The score of a text as a rule sees it: the highest of an aggregator's running scores over its tokens.

highest = highest_running(Ema(0.3), scores, part, n_parts)         # [S, P] of scores [N, P], rows in order
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from probemon.aggregate import Aggregator, Each, Max
from probemon.training.crossvalidation import Doubles

_VALUES = 1 << 22  # scores of a batch of parts, with padding


def highest_running(aggregator: Aggregator, scores: Tensor, part: Tensor, n_parts: int) -> Doubles:
    """Return `[S, P]`; NaN for a part without rows."""
    n_concepts = scores.shape[1]
    if isinstance(aggregator, (Each, Max)):
        highest = torch.full((n_parts, n_concepts), -torch.inf)
        highest.scatter_reduce_(0, part[:, None].expand_as(scores), scores.float(), "amax")
        return np.where(np.isinf(highest.numpy()), np.nan, highest.numpy()).astype(np.float64)
    lengths = torch.bincount(part, minlength=n_parts).numpy()
    order = torch.argsort(part, stable=True)
    first = np.cumsum(lengths) - lengths
    found = np.full((n_parts, n_concepts), np.nan)
    # Parts of like length run side by side: to an aggregator they are so many more concepts.
    by_length = np.argsort(-lengths, kind="stable")
    by_length = by_length[lengths[by_length] > 0]
    while len(by_length):
        longest = int(lengths[by_length[0]])
        together, by_length = np.split(by_length, [max(1, _VALUES // (longest * n_concepts))])
        state, best = aggregator.begin(), np.full((len(together), n_concepts), -np.inf)
        for t in range(longest):
            going = lengths[together] > t
            rows = order[torch.from_numpy(first[together] + np.minimum(t, lengths[together] - 1))]
            state, values = aggregator.add(state, scores[rows].numpy().reshape(-1))
            best = np.where(going[:, None], np.maximum(best, values.reshape(best.shape)), best)
        found[together] = best
    return found

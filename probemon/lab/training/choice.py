"""Which site probes read, and how strongly their weights are held back.

    choice = Choice.of(sites, tables, alone=True, seen=(n, n))   # tables [K, L, P] of cross-validation, a site each
    choice.site_of[3], choice.l2[3]                      # those of concept 3

One site for all concepts, the earliest within a standard error of the best; a concept of a flat pack has another where
that is clearly better, over the folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probemon.lab.training.crossvalidation import (
    Doubles,
    at_best,
    best_penalties,
    curve,
    earliest_within_one_error,
    means,
)

_LEAST_GAIN = 0.01  # in AUROC, for which a concept has a site of its own


@dataclass(frozen=True)
class LayerChoice:
    """What cross-validation chose: the site of each concept, and its penalty `l2 [P]`; `curve`: (AUROC, standard error)
    of each site, over the concepts, and `areas [I, P]` of each concept.

    `seen`: how many tokens it saw, and of how many.
    """

    sites: tuple[str, ...]
    site_of: tuple[str, ...]
    l2: Tensor
    curve: tuple[tuple[float, float], ...]
    areas: Doubles
    seen: tuple[int, int]

    @classmethod
    def of(cls, sites: Sequence[str], tables: Sequence[Doubles], *, alone: bool, seen: tuple[int, int]) -> LayerChoice:
        """Choose from tables `[K, L, P]` of each site. `alone`: a concept may have another site than the others."""
        points = curve(tables)
        shared = earliest_within_one_error(points)
        chosen = [shared] * tables[0].shape[2]
        if alone:
            best = [at_best(table) for table in tables]
            for p in range(len(chosen)):
                for i in range(len(sites)):
                    gain = best[i][:, p] - best[chosen[p]][:, p]
                    gain = gain[~np.isnan(gain)]
                    if len(gain) > 1 and gain.mean() > 2 * gain.std(ddof=1) / np.sqrt(len(gain)) + _LEAST_GAIN:
                        chosen[p] = i
        penalties = torch.stack([best_penalties(table) for table in tables])
        return cls(
            tuple(sites),
            tuple(sites[i] for i in chosen),
            penalties[torch.tensor(chosen), torch.arange(len(chosen))],
            tuple(points),
            np.stack([means(table).max(axis=0) for table in tables]),
            seen,
        )

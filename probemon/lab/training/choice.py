"""Choice of layers and penalties from cross-validation.

    choice = LayerChoice.of(sites, tables, alone=True, seen=(n, n))   # tables [K, L, P], one for each site

The shared site is the earliest within a standard error of the best.
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

_LEAST_GAIN = 0.01  # in AUROC, for a separate site


@dataclass(frozen=True)
class LayerChoice:
    """Site and penalty `l2 [P]` of each concept. `curve`: (AUROC, standard error) by site; `areas [I, P]`.

    `seen`: tokens used, and available.
    """

    sites: tuple[str, ...]
    site_of: tuple[str, ...]
    l2: Tensor
    curve: tuple[tuple[float, float], ...]
    areas: Doubles
    seen: tuple[int, int]

    @classmethod
    def of(cls, sites: Sequence[str], tables: Sequence[Doubles], *, alone: bool, seen: tuple[int, int]) -> LayerChoice:
        """Choose from tables `[K, L, P]` of each site. `alone`: concepts may have separate, clearly better sites."""
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

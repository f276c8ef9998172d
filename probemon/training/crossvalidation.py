"""How well logistic regressions do on parts of texts that did not train them, for every penalty.

    folds = deal(group, known, seed=0)                         # [S] int64: the fold of each part, by whole groups
    table = cross_validated(features, targets, folds)          # [K, L, P]: AUROC by fold, penalty and concept
    l2 = best_penalties(table)                                 # [P]
    site = earliest_within_one_error([table of each site, the earliest first])

A part's score is the mean logit of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.training.groups import split_groups
from probemon.training.logistic import Features, Targets, fit_logistic, logits
from probemon.training.metrics import auroc

PENALTIES = (0.1, 0.01, 1e-3, 1e-4)  # the strongest first: each solution begins at the one before
N_FOLDS = 5
_MOST_STEPS = 60  # areas no longer move by then, though weights may
_CHUNK = 1 << 14
Doubles = npt.NDArray[np.float64]


def deal(group: Ints, known: npt.NDArray[np.int8], *, seed: int, n_folds: int = N_FOLDS) -> Ints:
    """Return the fold of each part `[S]`: whole groups, labels spread evenly."""
    masks = split_groups(group, known, {str(k): 1.0 for k in range(n_folds)}, seed=seed)
    return np.argmax(np.stack(list(masks.values())), axis=0).astype(np.int64)


def part_means(values: Tensor, part: Tensor, n_parts: int) -> Tensor:
    """Return the mean of rows `[N, P]` by part `[S, P]`; NaN for a part without rows."""
    sums = torch.zeros(n_parts, values.shape[1], dtype=torch.float64)
    for begin in range(0, len(values), _CHUNK):  # doubles of all rows at once would be twice what they are
        sums.index_add_(0, part[begin : begin + _CHUNK], values[begin : begin + _CHUNK].double())
    return sums / torch.bincount(part, minlength=n_parts)[:, None]


def cross_validated(
    features: Features, targets: Targets, folds: Ints, penalties: Sequence[float] = PENALTIES
) -> Doubles:
    """Return AUROC `[K, L, P]`; NaN where a fold lacks a side of a concept. Parts of fold -1 train and test nothing."""
    n_parts, n_concepts = targets.known.shape
    of_part = torch.from_numpy(folds)
    tables = []
    for fold in range(int(folds.max()) + 1):
        of_row = of_part[targets.part]
        trains, tests = (of_row != fold) & (of_row >= 0), of_row == fold
        own = Targets(targets.part[trains], targets.known, targets.weight)
        trained, held, rows = features.rows(trains), features.rows(tests), targets.part[tests]
        start, areas = None, []
        for penalty in penalties:
            start = fit_logistic(
                trained, own, torch.full((n_concepts,), penalty), start=start, tolerance=1e-4, most_steps=_MOST_STEPS
            )
            scores = part_means(logits(held, *start), rows, n_parts)
            tested = (of_part == fold) & ~scores[:, 0].isnan()
            areas.append(auroc(scores[tested], targets.known[tested]).numpy())
        tables.append(np.stack(areas))
    return np.stack(tables)


def means(table: Doubles) -> Doubles:
    """Return the mean over folds `[L, P]`, of the folds that have both sides; .5 where none has."""
    known = ~np.isnan(table)
    return np.where(known.any(0), np.where(known, table, 0).sum(0) / known.sum(0).clip(1), 0.5)


def best_penalties(table: Doubles, penalties: Sequence[float] = PENALTIES) -> Tensor:
    """Return each concept's penalty `[P]`: the strongest of those whose AUROC is the highest."""
    return torch.tensor(penalties)[torch.from_numpy(np.argmax(means(table), axis=0))]


def at_best(table: Doubles) -> Doubles:
    """Return AUROC by fold and concept `[K, P]`, each concept at its best penalty."""
    best = np.argmax(means(table), axis=0)
    chosen: Doubles = np.take_along_axis(table, best[None, None], axis=1)[:, 0]
    return chosen


def curve(tables: Sequence[Doubles]) -> list[tuple[float, float]]:
    """Return for each site the mean AUROC over concepts, and its standard error over folds."""
    found = []
    for table in tables:
        chosen = at_best(table)
        folds = np.asarray([row[~np.isnan(row)].mean() for row in chosen if (~np.isnan(row)).any()])
        error = folds.std(ddof=1) / np.sqrt(len(folds)) if len(folds) > 1 else 0.0
        found.append((float(folds.mean()) if len(folds) else 0.5, float(error)))
    return found


def earliest_within_one_error(points: Sequence[tuple[float, float]]) -> int:
    """Return the first of the sites whose AUROC is within one standard error of the best one's (Breiman, Friedman,
    Olshen & Stone 1984, the one-standard-error rule). An earlier layer costs a corpus less.
    """
    best = max(range(len(points)), key=lambda i: points[i][0])
    floor = points[best][0] - points[best][1]
    return next(i for i, (value, _) in enumerate(points) if value >= floor)

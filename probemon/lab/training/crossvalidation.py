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
from probemon.lab.training.groups import split_groups
from probemon.lab.training.logistic import TO_COMPARE, Features, Targets, fit_logistic, logits
from probemon.lab.training.metrics import auroc

PENALTIES = (0.1, 0.01, 1e-3, 1e-4)  # the strongest first: each solution begins at the one before
N_FOLDS = 5
_CHUNK = 1 << 14
_COLUMNS = 64  # concepts, of several folds, that are fitted at once
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
    """Return AUROC `[K, L, P]`; NaN where a fold lacks a side of a concept. Parts of fold -1 train and test nothing.

    Of few concepts several folds are fitted at once, each as more concepts, to which the rows that it holds out are
    unknown: the time goes into reading rows from memory.
    """
    n_concepts = targets.known.shape[1]
    of_part = torch.from_numpy(folds)
    used = of_part[targets.part] >= 0
    features, part = features.rows(used), targets.part[used]
    n_folds, together = int(folds.max()) + 1, max(1, _COLUMNS // n_concepts)
    tables = []
    for first in range(0, n_folds, together):
        own = torch.arange(first, min(first + together, n_folds))
        trains = torch.ones(len(part), dtype=torch.bool) if len(own) > 1 else of_part[part] != first
        known = torch.cat([targets.known.where(of_part[:, None] != fold, -1) for fold in own], dim=1)
        fitted = Targets(part[trains], known, targets.weight)
        rows, start, areas = features.rows(trains), None, []
        for penalty in penalties:
            l2 = torch.full((known.shape[1],), penalty)
            start = fit_logistic(rows, fitted, l2, start=start, **TO_COMPARE)
            areas.append([_held_out(features, part, targets.known, of_part, int(fold), start, first) for fold in own])
        tables.append(np.stack([np.stack(of_folds) for of_folds in areas], axis=1))
    return np.concatenate(tables).reshape(n_folds, len(penalties), n_concepts)


def _held_out(
    features: Features,
    part: Tensor,
    known: Tensor,
    of_part: Tensor,
    fold: int,
    fitted: tuple[Tensor, Tensor],
    first: int,
) -> Doubles:
    """AUROC `[P]` of the parts of a fold, by its own columns of what was fitted, those of fold `first` before them."""
    n_concepts, is_held = known.shape[1], of_part[part] == fold
    own = slice((fold - first) * n_concepts, (fold - first + 1) * n_concepts)
    held = logits(features.rows(is_held), fitted[0][own], fitted[1][own])
    scores = part_means(held, part[is_held], len(known))
    tested = (of_part == fold) & ~scores[:, 0].isnan()
    areas: Doubles = auroc(scores[tested], known[tested]).numpy()
    return areas


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

"""Cross-validates logistic regressions for every penalty. A part's score is the mean logit of its tokens.

table = cross_validated(features, targets, deal(group, known, seed=0))          # [K, L, P]
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

PENALTIES = (0.1, 0.01, 1e-3, 1e-4)  # strongest first: each solution starts the next
N_FOLDS = 5
_CHUNK = 1 << 14
_COLUMNS = 64  # (concept, fold) pairs fitted at once
Doubles = npt.NDArray[np.float64]


def deal(group: Ints, known: npt.NDArray[np.int8], *, seed: int, n_folds: int = N_FOLDS) -> Ints:
    """Return the fold of each part `[S]`: whole groups, labels spread evenly."""
    masks = split_groups(group, known, {str(k): 1.0 for k in range(n_folds)}, seed=seed)
    return np.argmax(np.stack(list(masks.values())), axis=0).astype(np.int64)


def part_means(values: Tensor, part: Tensor, n_parts: int) -> Tensor:
    """Return the mean of rows `[N, P]` by part `[S, P]`, or NaN."""
    sums = torch.zeros(n_parts, values.shape[1], dtype=torch.float64)
    for begin in range(0, len(values), _CHUNK):
        sums.index_add_(0, part[begin : begin + _CHUNK], values[begin : begin + _CHUNK].double())
    return sums / torch.bincount(part, minlength=n_parts)[:, None]


def cross_validated(
    features: Features, targets: Targets, folds: Ints, penalties: Sequence[float] = PENALTIES
) -> Doubles:
    """Return AUROC `[K, L, P]` by fold, penalty and concept; NaN if a fold lacks a side. Parts of fold -1 are not used.

    Several folds are fitted at once, as more concepts: reading rows takes most time.
    """
    n_concepts = targets.known.shape[1]
    fold_of = torch.from_numpy(folds)
    used = fold_of[targets.part] >= 0
    features, part = features.rows(used), targets.part[used]
    n_folds, n_at_once = int(folds.max()) + 1, max(1, _COLUMNS // n_concepts)
    tables = []
    for first in range(0, n_folds, n_at_once):
        current = torch.arange(first, min(first + n_at_once, n_folds))
        trains = torch.ones(len(part), dtype=torch.bool) if len(current) > 1 else fold_of[part] != first
        known = torch.cat([targets.known.where(fold_of[:, None] != fold, -1) for fold in current], dim=1)
        fitted = Targets(part[trains], known, targets.weight)
        rows, start, areas = features.rows(trains), None, []
        for penalty in penalties:
            l2 = torch.full((known.shape[1],), penalty)
            start = fit_logistic(rows, fitted, l2, start=start, **TO_COMPARE)
            areas.append(
                [_held_out(features, part, targets.known, fold_of, int(fold), start, first) for fold in current]
            )
        tables.append(np.stack([np.stack(by_fold) for by_fold in areas], axis=1))
    return np.concatenate(tables).reshape(n_folds, len(penalties), n_concepts)


def _held_out(
    features: Features,
    part: Tensor,
    known: Tensor,
    fold_of: Tensor,
    fold: int,
    fitted: tuple[Tensor, Tensor],
    first: int,
) -> Doubles:
    """AUROC `[P]` of a fold, by its columns of `fitted`, which begin with fold `first`."""
    n_concepts, is_held = known.shape[1], fold_of[part] == fold
    columns = slice((fold - first) * n_concepts, (fold - first + 1) * n_concepts)
    held = logits(features.rows(is_held), fitted[0][columns], fitted[1][columns])
    scores = part_means(held, part[is_held], len(known))
    tested = (fold_of == fold) & ~scores[:, 0].isnan()
    areas: Doubles = auroc(scores[tested], known[tested]).numpy()
    return areas


def means(table: Doubles) -> Doubles:
    """Return the mean over folds `[L, P]`, without NaN; .5 if all are."""
    known = ~np.isnan(table)
    return np.where(known.any(0), np.where(known, table, 0).sum(0) / known.sum(0).clip(1), 0.5)


def best_penalties(table: Doubles, penalties: Sequence[float] = PENALTIES) -> Tensor:
    """Return each concept's penalty `[P]`: the strongest with the highest AUROC."""
    return torch.tensor(penalties)[torch.from_numpy(np.argmax(means(table), axis=0))]


def at_best(table: Doubles) -> Doubles:
    """Return AUROC `[K, P]` at the best penalty."""
    best = np.argmax(means(table), axis=0)
    chosen: Doubles = np.take_along_axis(table, best[None, None], axis=1)[:, 0]
    return chosen


def curve(tables: Sequence[Doubles]) -> list[tuple[float, float]]:
    """Return mean AUROC and its standard error over folds, for each site."""
    points = []
    for table in tables:
        chosen = at_best(table)
        folds = np.asarray([row[~np.isnan(row)].mean() for row in chosen if (~np.isnan(row)).any()])
        error = folds.std(ddof=1) / np.sqrt(len(folds)) if len(folds) > 1 else 0.0
        points.append((float(folds.mean()) if len(folds) else 0.5, float(error)))
    return points


def earliest_within_one_error(points: Sequence[tuple[float, float]]) -> int:
    """Return the first site within one standard error of the best (Breiman, Friedman, Olshen & Stone 1984)."""
    best = max(range(len(points)), key=lambda i: points[i][0])
    floor = points[best][0] - points[best][1]
    return next(i for i, (value, _) in enumerate(points) if value >= floor)

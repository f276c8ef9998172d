"""Areas and rates of scores of parts, with intervals by groups.

judged = judge(scores, known, group, seed=0)       # scores [S, P] of the test parts
judged[0].auroc, judged[0].tpr                     # tpr: {0.01: (.71, .62, .80), 0.001: None}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.intervals import clopper_pearson
from probemon.lab.training.crossvalidation import Doubles
from probemon.lab.training.labels import Known
from probemon.lab.training.metrics import auroc_of

RATES = (0.01, 0.001)
_RESAMPLED = 200
_FEWEST = 2  # groups of a side


@dataclass(frozen=True)
class Judged:
    """One concept on the test parts: counts, AUROC with a 95 % bootstrap interval.

    `tpr`: (rate, low, high) by false-positive rate (Clopper-Pearson), None if there are too few negatives.
    """

    n_positive: int
    n_negative: int
    n_groups: int
    auroc: float | None
    low: float | None
    high: float | None
    tpr: dict[float, tuple[float, float, float] | None]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        rates = {
            f"{rate:g}": None if interval is None else dict(zip(("rate", "low", "high"), interval, strict=True))
            for rate, interval in self.tpr.items()
        }
        numbers = {"n_positive": self.n_positive, "n_negative": self.n_negative, "n_groups": self.n_groups}
        return {**numbers, "auroc": self.auroc, "low": self.low, "high": self.high, "tpr_at_fpr": rates}


def judge(scores: Doubles, known: Known, group: Ints, *, seed: int) -> list[Judged]:
    """Judge each concept on parts `[S, P]`; NaN scores and unknown labels are left out."""
    return [_judged(scores[:, p], known[:, p], group, np.random.default_rng([seed, p])) for p in range(scores.shape[1])]


def _judged(scores: Doubles, known: Known, group: Ints, generator: np.random.Generator) -> Judged:
    use = (known >= 0) & ~np.isnan(scores)
    scores, positive = scores[use], known[use] == 1
    _, group_index = np.unique(group[use], return_inverse=True)
    n_groups = int(group_index.max()) + 1 if len(group_index) else 0
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        return Judged(n_positive, n_negative, n_groups, None, None, None, dict.fromkeys(RATES))
    areas = [auroc_of(scores[rows], positive[rows]) for rows in _resampled(group_index, positive, generator)]
    low, high = _middle(areas)
    tpr = {rate: _found_at(scores, positive, rate) for rate in RATES}
    return Judged(n_positive, n_negative, n_groups, auroc_of(scores, positive), low, high, tpr)


def difference(
    a: Doubles, b: Doubles, known: Known, group: Ints, *, seed: int
) -> tuple[float, float | None, float | None]:
    """Return AUROC of scores a `[S]` minus that of b, with a 95 % bootstrap interval; NaN without both sides."""
    use = (known >= 0) & ~np.isnan(a) & ~np.isnan(b)
    a, b, positive = a[use], b[use], known[use] == 1
    if positive.all() or not positive.any():
        return float("nan"), None, None
    _, group_index = np.unique(group[use], return_inverse=True)
    differences = []
    for rows in _resampled(group_index, positive, np.random.default_rng(seed)):
        differences.append(auroc_of(a[rows], positive[rows]) - auroc_of(b[rows], positive[rows]))
    value = auroc_of(a, positive) - auroc_of(b, positive)
    return (value, *_middle(differences))


def _resampled(group: Ints, positive: np.ndarray, generator: np.random.Generator) -> Iterator[Ints]:
    """Yield rows of resampled groups; none if a side has too few."""
    n_groups = int(group.max()) + 1
    if min(len(np.unique(group[positive])), len(np.unique(group[~positive]))) < _FEWEST:
        return
    for _ in range(_RESAMPLED):
        times = np.bincount(generator.integers(0, n_groups, n_groups), minlength=n_groups)[group]
        yield np.repeat(np.arange(len(group)), times)


def _middle(values: Sequence[float]) -> tuple[float | None, float | None]:
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[~np.isnan(finite)]
    if not len(finite):
        return None, None
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)


def _found_at(scores: Doubles, positive: np.ndarray, rate: float) -> tuple[float, float, float] | None:
    negatives = np.sort(scores[~positive])[::-1]
    allowed = int(rate * len(negatives))
    if not allowed:  # too few negatives for this rate
        return None
    n_detected, n = int((scores[positive] > negatives[allowed]).sum()), int(positive.sum())
    low, high = clopper_pearson(n_detected, n)
    return n_detected / n, float(low), float(high)

"""Areas and shares of texts, with intervals by groups.

judged = judge(scores, known, group)                      # scores [N]
judged.auroc, judged.low, judged.high
difference(a, b, known, group, seed=0)                    # AUROC of a minus that of b, with an interval
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.core.intervals import clustered, design_effect
from probemon.lab.training.labels import Known
from probemon.lab.training.metrics import auroc_of

Doubles = npt.NDArray[np.float64]
_RESAMPLED = 200
_FEWEST = 2  # groups of a side
_NORMAL = 1.959963984540054


@dataclass(frozen=True)
class Area:
    """AUROC with a 95 % interval, from `n_positive`, `n_negative` texts in groups; None without both sides."""

    n_positive: int
    n_negative: int
    auroc: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def under_chance(self) -> bool:
        """Whether the whole interval is under a half, a sign of twins that were parted."""
        return self.high is not None and self.high < 0.5

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "n_positive": self.n_positive,
            "n_negative": self.n_negative,
            "auroc": self.auroc,
            "low": self.low,
            "high": self.high,
        }


def judge(scores: Doubles, known: Known, group: Ints) -> Area:
    """Judge scores of texts `[N]`; NaN scores and unknown labels are left out."""
    use = (known >= 0) & ~np.isnan(scores)
    scores, positive, group = scores[use], known[use] == 1, group[use]
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        return Area(n_positive, n_negative)
    auroc = auroc_of(scores, positive)
    low, high = area_interval(auroc, len(np.unique(group[positive])), len(np.unique(group[~positive])))
    return Area(n_positive, n_negative, auroc, low, high)


def area_interval(auroc: float, n_positive: int, n_negative: int) -> tuple[float, float]:
    """Return the 95 % interval of an AUROC from so many independent units; not empty at 0 and 1.

    Newcombe 2006, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic. Part 2"
    (Statistics in Medicine 25), method 5: the areas from which it is within 1.96 of their standard errors.
    """
    middle = (n_positive + n_negative) / 2

    def is_far(area: float) -> bool:
        spread = 1 + (middle - 1) * ((1 - area) / (2 - area) + area / (1 + area))
        variance = area * (1 - area) * spread / (n_positive * n_negative)
        return abs(auroc - area) > _NORMAL * variance**0.5

    ends = []
    for end in (0.0, 1.0):
        near, far = auroc, end
        if not is_far(far):
            ends.append(far)
            continue
        for _ in range(50):
            trial = (near + far) / 2
            near, far = (near, trial) if is_far(trial) else (trial, far)
        ends.append(near)
    return ends[0], ends[1]


def share(hits: npt.NDArray[np.bool_], group: Ints) -> dict[str, Any]:
    """Return the share of hits as JSON, with a 95 % interval by groups."""
    n = len(hits)
    if not n:
        return {"count": 0, "n": 0, "rate": None, "low": None, "high": None}
    index = np.unique(group, return_inverse=True)[1]
    low, high = clustered(int(hits.sum()), n, design_effect(np.bincount(index, hits), np.bincount(index)))
    return {"count": int(hits.sum()), "n": n, "rate": float(hits.mean()), "low": float(low), "high": float(high)}


def difference(
    a: Doubles, b: Doubles, known: Known, group: Ints, *, seed: int
) -> tuple[float, float | None, float | None]:
    """Return AUROC of scores a `[N]` minus that of b, with a 95 % bootstrap interval; NaN without both sides."""
    use = (known >= 0) & ~np.isnan(a) & ~np.isnan(b)
    a, b, positive = a[use], b[use], known[use] == 1
    if positive.all() or not positive.any():
        return float("nan"), None, None
    _, group_index = np.unique(group[use], return_inverse=True)
    differences = []
    for rows in _resampled(group_index, positive, np.random.default_rng(seed)):
        differences.append(auroc_of(a[rows], positive[rows]) - auroc_of(b[rows], positive[rows]))
    value = auroc_of(a, positive) - auroc_of(b, positive)
    finite = np.asarray(differences)[~np.isnan(differences)] if differences else np.zeros(0)
    if not len(finite):
        return value, None, None
    low, high = np.quantile(finite, [0.025, 0.975])
    return value, float(low), float(high)


def _resampled(group: Ints, positive: np.ndarray, generator: np.random.Generator) -> Iterator[Ints]:
    """Yield rows of resampled groups; none if a side has too few."""
    n_groups = int(group.max()) + 1
    if min(len(np.unique(group[positive])), len(np.unique(group[~positive]))) < _FEWEST:
        return
    for _ in range(_RESAMPLED):
        times = np.bincount(generator.integers(0, n_groups, n_groups), minlength=n_groups)[group]
        yield np.repeat(np.arange(len(group)), times)

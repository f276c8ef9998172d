"""Alert thresholds of newly trained probes, from parts used for neither training nor tests.

    alerts = thresholds(scores, part, benign, group, fpr=0.01)    # of single tokens, one for each concept
    precise = precision_thresholds(scores, part, known, use, group, precision=0.9)

Like `probemon.lab.calibration.calibrate`, but n dependent units count as n / `design_effect`. If these are too few, no
benign unit exceeds the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import clustered, design_effect, upper_bound
from probemon.core.scores import Floats
from probemon.lab.calibration.calibrate import most_allowed, units_needed
from probemon.lab.training.labels import Known

_TRIED = 8  # thresholds for a precision
_STEP = 1.5  # least ratio of numbers of fires
_LOOKED = 64  # candidates, log-spaced
_APART = 2e-5  # in log odds
CONFIDENCE = 0.95
PRECISION = "precision_"  # prefix of a set's name


@dataclass(frozen=True)
class Threshold:
    """A concept's alert threshold: `allowed` of `n` benign units exceed it. NaN without units.

    - `effective`: number of independent units
    - `rate`: claimed rate, with confidence for all concepts
    - `needed`: independent units for the requested rate
    """

    value: float
    n: int
    effective: int
    allowed: int
    rate: float
    needed: int

    @property
    def holds(self) -> bool:
        """Whether the units suffice for the requested rate."""
        return self.effective >= self.needed

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        counts = {"n": self.n, "effective": self.effective, "allowed": self.allowed, "rate": self.rate}
        return {"threshold": number(self.value), **counts, "holds": self.holds, "needed": self.needed}


def thresholds(
    values: np.ndarray | Tensor, part: Ints, benign: Mask, group: Ints, *, fpr: float, confidence: float = CONFIDENCE
) -> list[Threshold]:
    """Return each concept's threshold for values `[N, P]` of units of parts `[N]`, without NaN.

    `benign [S, P]`: parts without the concept; `group [S]`: dependent parts.
    """
    array = np.asarray(values)
    risk = (1 - confidence) / array.shape[1]
    needed = units_needed(fpr, risk)
    outcomes = []
    for p in range(array.shape[1]):
        use = np.flatnonzero(benign[part, p] & ~np.isnan(array[:, p]))
        if not len(use):
            outcomes.append(Threshold(np.nan, 0, 0, 0, 1.0, needed))
            continue
        use = use[np.argsort(-array[use, p], kind="stable")]
        effect = _effect_of_highest(group[part[use]], fpr)
        effective = max(1, int(len(use) / effect))
        allowed = max(0, most_allowed(effective, fpr, risk))
        rate = float(upper_bound(allowed, effective, 1 - risk))
        allowed = int(allowed * (len(use) / effective))
        outcomes.append(Threshold(_over(array[use[allowed], p]), len(use), effective, allowed, rate, needed))
    return outcomes


def _effect_of_highest(group: Ints, fpr: float) -> float:
    """Largest design effect of thresholds that about `fpr` of the sorted units exceed."""
    n, (_, group_index) = len(group), np.unique(group, return_inverse=True)
    sizes = np.bincount(group_index)
    counts = {min(n, max(1, round(share * fpr * n))) for share in (0.5, 1, 2)}
    return max(design_effect(np.bincount(group_index[:k], minlength=len(sizes)), sizes) for k in counts)


@dataclass(frozen=True)
class Precise:
    """A threshold for a precision: `right` of `fired` tokens are correct, lower bound `low`. NaN if not reached."""

    value: float
    fired: int
    right: int
    low: float

    @property
    def reached(self) -> bool:
        """Whether there is such a threshold."""
        return not np.isnan(self.value)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"threshold": number(self.value), "fired": self.fired, "right": self.right, "low": self.low}


_NOT_REACHED = Precise(np.nan, 0, 0, 0.0)


def precision_thresholds(
    values: np.ndarray | Tensor, part: Ints, known: Known, use: Mask, group: Ints, *, precision: float
) -> list[Precise]:
    """Return each concept's lowest tried threshold over which, with confidence, a share `precision` of tokens is
    correct.

    Values `[N, P]` are of tokens of parts `[N]`, restricted to `use [S]`; a `group [S]` is dependent. The thresholds,
    highest first, share the risk; one that passes leaves its part to the next (fallback procedure: Wiens 2003,
    Pharmaceutical Statistics 2).
    """
    array, outcomes = np.asarray(values), []
    for p in range(array.shape[1]):
        chosen = np.flatnonzero(use[part] & (known[part, p] >= 0) & ~np.isnan(array[:, p]))
        chosen = chosen[np.argsort(-array[chosen, p], kind="stable")]
        scores, is_right = array[chosen, p], known[part[chosen], p] == 1
        group_index = np.unique(group[part[chosen]], return_inverse=True)[1]
        # Thresholds need a lower next score.
        candidates = _tried(np.flatnonzero(scores[1:] < scores[:-1]), group_index, precision)
        passed, risk = _NOT_REACHED, 0.0
        for last in candidates.tolist():
            risk += (1 - CONFIDENCE) / len(candidates)
            fired, right = last + 1, int(is_right[: last + 1].sum())
            low = 0.0
            if right >= precision * fired:  # bounds are lower still, and slow
                effect = design_effect(
                    np.bincount(group_index[:fired], is_right[:fired]), np.bincount(group_index[:fired])
                )
                low = float(clustered(right, fired, effect, 1 - 2 * risk)[0])
            if low >= precision:
                passed = Precise(_over(scores[last + 1], below=scores[last]), fired, right, low)
            else:
                risk = 0.0
        outcomes.append(passed)
    return outcomes


def _tried(ends: Ints, group_index: Ints, precision: float) -> Ints:
    """Return the places in `ends`, of tokens in the order of their scores, after which a threshold is tried.

    They are chosen without the labels: as many as possible, if each would pass with every token over it right.
    """
    if not len(ends):
        return ends
    fires = np.geomspace(1, ends[-1] + 1, _LOOKED).round().astype(np.int64)
    places = np.unique(ends[np.searchsorted(ends, np.minimum(fires - 1, ends[-1]))])
    sizes = [np.bincount(group_index[: last + 1]) for last in places.tolist()]
    independent = (places + 1) / np.asarray([design_effect(size, size) for size in sizes])
    for n in range(_TRIED, 0, -1):
        feasible = places[precision**independent <= (1 - CONFIDENCE) / n]
        if len(feasible) >= n and feasible[-1] + 1 >= _STEP ** (n - 1) * (feasible[0] + 1):
            return feasible[np.linspace(0, len(feasible) - 1, n).round().astype(np.int64)]
    return ends[:0]


def number(value: float) -> float | None:
    """The value for JSON: None for NaN."""
    return None if np.isnan(value) else float(value)


def _over(value: float, below: float = np.inf) -> float:
    """Return an fp32 threshold, at most 1, that a score of `value` does not exceed, with a margin for rounding.

    Many texts that begin alike have equal scores. Without space under `below` there is no margin.
    """
    least = np.float32(value)
    least = least if least >= value else np.nextafter(least, np.float32(np.inf))
    if not 0 < value < 1:
        return float(least)
    exact = np.float64(value)
    raised = np.float32(1 / (1 + np.exp(np.log1p(-exact) - np.log(exact) - _APART)))
    raised = min(max(raised, np.nextafter(least, np.float32(np.inf))), np.float32(1))
    return float(raised if raised < below else least)


def as_floats(found: Sequence[Threshold | Precise]) -> Floats:
    """Return the thresholds `[P]` fp32."""
    return np.asarray([threshold.value for threshold in found], dtype=np.float32)

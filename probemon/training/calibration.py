"""Alert thresholds of newly trained probes, from parts that neither trained nor test them.

    alerts = thresholds(scores, part, benign, group, fpr=0.01)    # of single tokens: [P], and what can be said of each
    of_texts = thresholds(highest, np.arange(S), benign, group, fpr=...)    # of the highest running score of each part
    precise = precision_thresholds(scores, part, known, use, group, precision=0.9)

By the rule of `probemon.offline.calibrate`: of n benign units at most k may exceed a threshold, where k is the largest
number whose upper bound is within the rate, for all concepts together. Tokens of one text, and texts of one group, are
alike: n of them count as n / `design_effect` independent ones. Where these are too few for any k, no benign unit
exceeds the threshold, and the rate that it can claim is stated.
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
from probemon.offline.calibrate import most_allowed, units_needed
from probemon.training.labels import Known

_TRIED = 64  # thresholds that a precision is looked for at
CONFIDENCE = 0.95
PRECISION = "precision_"  # and the share, as a set of thresholds is named


@dataclass(frozen=True)
class Threshold:
    """One concept's alert threshold: `n` benign units, of which `allowed` exceed it; NaN without any.

    - `effective`: as how many independent units they count
    - `rate`: what it can claim, with the confidence that all concepts share
    - `needed`: independent units for the rate asked for
    """

    value: float
    n: int
    effective: int
    allowed: int
    rate: float
    needed: int

    @property
    def holds(self) -> bool:
        """Whether the units are enough for the rate that was asked for."""
        return self.effective >= self.needed

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        counts = {"n": self.n, "effective": self.effective, "allowed": self.allowed, "rate": self.rate}
        return {"threshold": number(self.value), **counts, "holds": self.holds, "needed": self.needed}


def thresholds(
    values: np.ndarray | Tensor, part: Ints, benign: Mask, group: Ints, *, fpr: float, confidence: float = CONFIDENCE
) -> list[Threshold]:
    """Return each concept's threshold for values `[N, P]` of units of parts `[N]`; `benign [S, P]` says which of the
    parts are without it, `group [S]` which are alike. NaN are left out.
    """
    array = np.asarray(values)
    risk = (1 - confidence) / array.shape[1]
    needed = units_needed(fpr, risk)
    found = []
    for p in range(array.shape[1]):
        use = np.flatnonzero(benign[part, p] & ~np.isnan(array[:, p]))
        if not len(use):
            found.append(Threshold(np.nan, 0, 0, 0, 1.0, needed))
            continue
        use = use[np.argsort(-array[use, p], kind="stable")]
        effect = _effect_of_highest(group[part[use]], fpr)
        effective = max(1, int(len(use) / effect))
        allowed = max(0, most_allowed(effective, fpr, risk))
        rate = float(upper_bound(allowed, effective, 1 - risk))
        allowed = int(allowed * (len(use) / effective))
        found.append(Threshold(_up(array[use[allowed], p]), len(use), effective, allowed, rate, needed))
    return found


def _effect_of_highest(group: Ints, fpr: float) -> float:
    """The design effect of exceeding a threshold, of units in order, the highest first: the largest of a few that about
    `fpr` of them exceed.
    """
    n, (_, of_group) = len(group), np.unique(group, return_inverse=True)
    sizes = np.bincount(of_group)
    counts = {min(n, max(1, round(share * fpr * n))) for share in (0.5, 1, 2)}
    return max(design_effect(np.bincount(of_group[:k], minlength=len(sizes)), sizes) for k in counts)


@dataclass(frozen=True)
class Precise:
    """A concept's threshold to a precision: of `fired` tokens over it `right` are of the concept, and with confidence a
    share `low` or more; NaN where none is shown to reach it.
    """

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
    """Return each concept's lowest threshold over which with confidence a share `precision` of the tokens is of it, for
    values `[N, P]` of tokens of parts `[N]`, those in `use [S]`, alike within a `group [S]`: in the mix of texts that
    these are.
    """
    array, found = np.asarray(values), []
    for p in range(array.shape[1]):
        chosen = np.flatnonzero(use[part] & (known[part, p] >= 0) & ~np.isnan(array[:, p]))
        chosen = chosen[np.argsort(-array[chosen, p], kind="stable")]
        scores, is_right = array[chosen, p], known[part[chosen], p] == 1
        right, fired = np.cumsum(is_right), np.arange(1, len(chosen) + 1)
        # Only where the next score is lower can a threshold lie, and it is that score.
        ends = np.r_[scores[1:] < scores[:-1], False] if len(scores) else np.zeros(0, dtype=bool)
        good = np.flatnonzero(ends & (right >= precision * fired))
        good = good[np.unique(np.geomspace(1, len(good), _TRIED).round().astype(np.int64)) - 1] if len(good) else good
        if not len(good):
            found.append(_NOT_REACHED)
            continue
        of_group = np.unique(group[part[chosen]], return_inverse=True)[1]
        effects = [
            design_effect(np.bincount(of_group[:n], is_right[:n]), np.bincount(of_group[:n]))
            for n in (good + 1).tolist()
        ]
        low = clustered(right[good], good + 1, effects, 2 * CONFIDENCE - 1)[0]
        reached = good[low >= precision]
        if not len(reached):
            found.append(_NOT_REACHED)
            continue
        last = int(reached[-1])
        found.append(Precise(_up(scores[last + 1]), last + 1, int(right[last]), float(low[good == last][0])))
    return found


def number(value: float) -> float | None:
    """The value for JSON, which has no NaN."""
    return None if np.isnan(value) else float(value)


def _up(value: float) -> float:
    """The value as fp32, not below it: a pack keeps thresholds so."""
    rounded = np.float32(value)
    return float(rounded if rounded >= value else np.nextafter(rounded, np.float32(np.inf)))


def as_floats(found: Sequence[Threshold | Precise]) -> Floats:
    """Return the thresholds `[P]` fp32."""
    return np.asarray([threshold.value for threshold in found], dtype=np.float32)

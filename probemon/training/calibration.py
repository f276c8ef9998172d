"""Alert thresholds of newly trained probes, from parts that neither trained nor test them.

    alerts = thresholds(scores, part, benign, fpr=0.01)           # of single tokens: [P], and what can be said of each
    of_texts = thresholds(highest, np.arange(S), benign, fpr=...) # of the highest running score of each part

By the rule of `probemon.offline.calibrate`: of n benign units at most k may exceed a threshold, where k is the largest
number whose upper bound is within the rate, for all concepts together. Where n is too few for any k, no benign unit
exceeds the threshold, and the rate that it can claim is stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import upper_bound
from probemon.core.scores import Floats
from probemon.offline.calibrate import most_allowed, units_needed


@dataclass(frozen=True)
class Threshold:
    """One concept's alert threshold: `n` benign units, of which `allowed` exceed it.

    - `rate`: what it can claim, with the confidence that all concepts share; `needed`: units for the rate asked for.
    """

    value: float
    n: int
    allowed: int
    rate: float
    needed: int

    @property
    def holds(self) -> bool:
        """Whether the units are enough for the rate that was asked for."""
        return self.n >= self.needed

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        stated = {"threshold": self.value, "n": self.n, "allowed": self.allowed, "rate": self.rate}
        return {**stated, "holds": self.holds, "needed": self.needed}


def thresholds(
    values: np.ndarray | Tensor, part: Ints, benign: Mask, *, fpr: float, confidence: float = 0.95
) -> list[Threshold]:
    """Return each concept's threshold for values `[N, P]` of units of parts `[N]`; `benign [S, P]` says which of the
    parts are without it. NaN are left out; a concept without benign units has threshold 1, which nothing exceeds.
    """
    array = np.asarray(values)
    risk = (1 - confidence) / array.shape[1]
    needed = units_needed(fpr, risk)
    found = []
    for p in range(array.shape[1]):
        own = array[benign[part, p], p]
        own = np.sort(own[~np.isnan(own)])[::-1]
        allowed = max(0, most_allowed(len(own), fpr, risk)) if len(own) else 0
        value = _up(own[allowed]) if len(own) else 1.0
        rate = float(upper_bound(allowed, len(own), 1 - risk)) if len(own) else 1.0
        found.append(Threshold(value, len(own), allowed, rate, needed))
    return found


def _up(value: float) -> float:
    """The value as fp32, not below it: a pack keeps thresholds so."""
    rounded = np.float32(value)
    return float(rounded if rounded >= value else np.nextafter(rounded, np.float32(np.inf)))


def as_floats(found: list[Threshold]) -> Floats:
    """Return the thresholds `[P]` fp32."""
    return np.asarray([threshold.value for threshold in found], dtype=np.float32)

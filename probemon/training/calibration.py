"""Alert thresholds of newly trained probes, from parts that neither trained nor test them.

    alerts = thresholds(scores, part, benign, fpr=0.01)           # of single tokens: [P], and what can be said of each
    of_texts = thresholds(highest, np.arange(S), benign, fpr=...) # of the highest running score of each part
    precise = precision_thresholds(scores, part, known, use, precision=0.9)

By the rule of `probemon.offline.calibrate`: of n benign units at most k may exceed a threshold, where k is the largest
number whose upper bound is within the rate, for all concepts together. Where n is too few for any k, no benign unit
exceeds the threshold, and the rate that it can claim is stated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import upper_bound
from probemon.core.scores import Floats
from probemon.offline.calibrate import most_allowed, units_needed
from probemon.training.labels import Known

FEWEST_FIRED = 20  # tokens from which a precision is believed


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


@dataclass(frozen=True)
class Precise:
    """A concept's threshold to a precision: of `fired` tokens over it `right` are of the concept; 1 where none reaches
    it with enough tokens.
    """

    value: float
    fired: int
    right: int

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"threshold": self.value, "fired": self.fired, "right": self.right}


def precision_thresholds(
    values: np.ndarray | Tensor, part: Ints, known: Known, use: Mask, *, precision: float
) -> list[Precise]:
    """Return each concept's lowest threshold over which a share `precision` of the tokens is of it, for values `[N, P]`
    of tokens of parts `[N]`, those in `use [S]`: in the mix of texts that these are.
    """
    array, found = np.asarray(values), []
    for p in range(array.shape[1]):
        labels = np.where(use, known[:, p], -1)[part]
        chosen = labels >= 0
        order = np.argsort(-array[chosen, p], kind="stable")
        scores, right = array[chosen, p][order], np.cumsum(labels[chosen][order] == 1)
        fired = np.arange(1, len(scores) + 1)
        # Only where the next score is lower can a threshold lie, and it is that score.
        ends = np.r_[scores[1:] < scores[:-1], False] if len(scores) else np.zeros(0, dtype=bool)
        good = np.flatnonzero(ends & (right >= precision * fired) & (fired >= FEWEST_FIRED))
        if len(good):
            last = int(good[-1])
            found.append(Precise(_up(scores[last + 1]), last + 1, int(right[last])))
        else:
            found.append(Precise(1.0, 0, 0))
    return found


def _up(value: float) -> float:
    """The value as fp32, not below it: a pack keeps thresholds so."""
    rounded = np.float32(value)
    return float(rounded if rounded >= value else np.nextafter(rounded, np.float32(np.inf)))


def as_floats(found: Sequence[Threshold | Precise]) -> Floats:
    """Return the thresholds `[P]` fp32."""
    return np.asarray([threshold.value for threshold in found], dtype=np.float32)

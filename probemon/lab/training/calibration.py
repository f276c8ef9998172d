"""Alert thresholds of newly trained probes, from parts that neither trained nor test them.

    alerts = thresholds(scores, part, benign, group, fpr=0.01)    # of single tokens: [P], and what can be said of each
    of_texts = thresholds(highest, np.arange(S), benign, group, fpr=...)    # of the highest running score of each part
    precise = precision_thresholds(scores, part, known, use, group, precision=0.9)

By the rule of `probemon.lab.calibration.calibrate`: of n benign units at most k may exceed a threshold, where k is the
largest number whose upper bound is within the rate, for all concepts together. Tokens of one text, and texts of one
group, are alike: n of them count as n / `design_effect` independent ones. Where these are too few for any k, no benign
unit exceeds the threshold, and the rate that it can claim is stated.
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

_TRIED = 8  # thresholds, at most, that a precision is looked for at
_STEP = 1.5  # so many times the fires of the one before, or more
_LOOKED = 64  # places, about evenly spaced in the log of their fires, that those are taken from
_APART = 2e-5  # in log odds; at a score of a half 5e-6
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
        found.append(Threshold(_over(array[use[allowed], p]), len(use), effective, allowed, rate, needed))
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
    """A concept's threshold to a precision: of `fired` tokens over it `right` are of the concept, and the lower bound
    of their share that showed it is `low`; NaN where none is shown to reach it.
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
    """Return for each concept the lowest of a few thresholds over which with confidence, for the concept by itself, a
    share `precision` of the tokens is of it, for values `[N, P]` of tokens of parts `[N]`, those in `use [S]`, alike
    within a `group [S]`: in the mix of texts that these are.

    Up to 8 thresholds are tried, from the highest down. They share the risk that any of them passes by chance, and one
    that passes leaves its part to the next: the fallback procedure of Wiens 2003, "A fixed sequence Bonferroni
    procedure for testing multiple endpoints" (Pharmaceutical Statistics 2).
    """
    array, found = np.asarray(values), []
    for p in range(array.shape[1]):
        chosen = np.flatnonzero(use[part] & (known[part, p] >= 0) & ~np.isnan(array[:, p]))
        chosen = chosen[np.argsort(-array[chosen, p], kind="stable")]
        scores, is_right = array[chosen, p], known[part[chosen], p] == 1
        of_group = np.unique(group[part[chosen]], return_inverse=True)[1]
        # Only where the next score is lower can a threshold lie, and it is that score.
        tried = _tried(np.flatnonzero(scores[1:] < scores[:-1]), of_group, precision)
        passed, risk = _NOT_REACHED, 0.0
        for last in tried.tolist():
            risk += (1 - CONFIDENCE) / len(tried)
            fired, right = last + 1, int(is_right[: last + 1].sum())
            low = 0.0
            if right >= precision * fired:  # no bound is over the share itself, and bounds take long
                effect = design_effect(np.bincount(of_group[:fired], is_right[:fired]), np.bincount(of_group[:fired]))
                low = float(clustered(right, fired, effect, 1 - 2 * risk)[0])
            if low >= precision:
                passed = Precise(_over(scores[last + 1], below=scores[last]), fired, right, low)
            else:
                risk = 0.0
        found.append(passed)
    return found


def _tried(ends: Ints, of_group: Ints, precision: float) -> Ints:
    """Return the places in `ends`, of tokens in the order of their scores, after which a threshold is tried. They are
    chosen before it is seen who is right: the more the better, as long as each would pass if all over it were right.
    """
    if not len(ends):
        return ends
    fires = np.geomspace(1, ends[-1] + 1, _LOOKED).round().astype(np.int64)
    places = np.unique(ends[np.searchsorted(ends, np.minimum(fires - 1, ends[-1]))])
    sizes = [np.bincount(of_group[: last + 1]) for last in places.tolist()]
    independent = (places + 1) / np.asarray([design_effect(size, size) for size in sizes])
    for n in range(_TRIED, 0, -1):
        could = places[precision**independent <= (1 - CONFIDENCE) / n]
        if len(could) >= n and could[-1] + 1 >= _STEP ** (n - 1) * (could[0] + 1):
            return could[np.linspace(0, len(could) - 1, n).round().astype(np.int64)]
    return ends[:0]


def number(value: float) -> float | None:
    """The value for JSON, which has no NaN."""
    return None if np.isnan(value) else float(value)


def _over(value: float, below: float = np.inf) -> float:
    """A threshold in fp32 that a score of `value` does not exceed, whoever computes it: higher by a little more than
    what two ways to compute a score differ in. Texts that begin alike have the same states, so that many score alike.

    Where that would reach `below`, it is the first fp32 that is not under the value; it is never over 1.
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

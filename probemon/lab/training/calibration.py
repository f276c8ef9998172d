"""A second set of alert thresholds, for a share of what fires that must be right.

precise = precision_thresholds(scores, part, known, use, group, precision=0.9)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import clustered, design_effect
from probemon.core.scores import Floats
from probemon.lab.training.labels import Known
from probemon.lab.training.rates import CONFIDENCE, over

_TRIED = 8  # thresholds for a precision
_STEP = 1.5  # least ratio of numbers of fires
_LOOKED = 64  # candidates, log-spaced
PRECISION = "precision_"  # prefix of a set's name


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
                passed = Precise(over(scores[last + 1], below=scores[last]), fired, right, low)
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


def as_floats(found: Sequence[Precise]) -> Floats:
    """Return the thresholds `[P]` fp32."""
    return np.asarray([threshold.value for threshold in found], dtype=np.float32)

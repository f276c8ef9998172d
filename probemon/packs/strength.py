"""strength_of: by how much scores exceed their thresholds, in logits; strength_or_score: what lists are ordered by;
shortest: a score as text.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def strength_of(score: Any, threshold: Any) -> Any:
    """Return the logits of scores minus those of their thresholds in fp64, 0 where both are one number.

    NaN without a threshold (NaN); infinite where a score is 1 or its threshold is 0.
    """
    s, t = np.asarray(score, dtype=np.float64), np.asarray(threshold, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(s == t, 0.0, np.log(s) - np.log1p(-s) - np.log(t) + np.log1p(-t))


def strength_or_score(score: Any, threshold: Any) -> Any:
    """Return strengths, and the score itself where there is no threshold."""
    return np.where(np.isnan(threshold), np.asarray(score, dtype=np.float64), strength_of(score, threshold))


def shortest(value: Any) -> float:
    """Return the number of the fewest digits that is this one in fp32."""
    return float(str(np.float32(value)))

"""strength_of: by how much scores exceed their thresholds, in logits; strength_or_score: what lists are ordered by;
shortest, in_short: scores as texts.
"""

from __future__ import annotations

import math
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


def in_short(score: float, form: str) -> str:
    """Return a score or a threshold in a form such as ".3f", with two digits of what lies between where that would read
    as 0 or as 1: a threshold of 1 is one that nothing exceeds.
    """
    text = format(score, form)
    if 0 < score < 1 and float(text) in (0, 1):
        return f"{score:.2g}" if score < 0.5 else f"{score:.{1 - math.floor(math.log10(1 - score))}f}"
    return text

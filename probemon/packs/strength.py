"""Strengths of scores, and scores as texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def strength_of(score: Any, threshold: Any) -> Any:
    """Return logit(score) - logit(threshold) in fp64, 0 if they are equal.

    NaN without a threshold (NaN); infinite if a score is 1 or a threshold 0.
    """
    s, t = np.asarray(score, dtype=np.float64), np.asarray(threshold, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(s == t, 0.0, np.log(s) - np.log1p(-s) - np.log(t) + np.log1p(-t))


def strength_or_score(score: Any, threshold: Any) -> Any:
    """Return each strength, or the score itself if its threshold is NaN (none)."""
    return np.where(np.isnan(threshold), np.asarray(score, dtype=np.float64), strength_of(score, threshold))


def shortest(value: Any) -> float:
    """Return the shortest decimal that is `value` in fp32."""
    return float(str(np.float32(value)))


def in_short(score: float, form: str) -> str:
    """Return a score formatted as ".3f" or similar, with more digits if it would read as 0 or 1."""
    text = format(score, form)
    if 0 < score < 1 and float(text) in (0, 1):
        return f"{score:.2g}" if score < 0.5 else f"{score:.{1 - math.floor(math.log10(1 - score))}f}"
    return text

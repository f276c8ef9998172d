"""Areas under the ROC curve."""

from __future__ import annotations

import numpy as np


def auroc_of(scores: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive outscores a negative; ties count half."""
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if n_positive == 0 or n_negative == 0:
        return float("nan")
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    stops = np.r_[starts[1:], len(ordered)]
    # Ties share their mean rank.
    ranks = np.empty(len(scores))
    ranks[order] = np.repeat((starts + 1 + stops) / 2, stops - starts)
    rank_sum = float(ranks[positive].sum())
    return (rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)


def auroc_between(present: np.ndarray, absent: np.ndarray) -> float:
    """AUROC of scores with a concept against scores without it."""
    return auroc_of(np.r_[present, absent], np.r_[np.ones(len(present), bool), np.zeros(len(absent), bool)])


def auroc_labelled(scores: np.ndarray, labels: np.ndarray) -> float:
    """AUROC of scores [N], labels 1, 0 or -1; NaN scores and unknown labels are left out."""
    use = (labels >= 0) & ~np.isnan(scores)
    return auroc_of(scores[use], labels[use] == 1)

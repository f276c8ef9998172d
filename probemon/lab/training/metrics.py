"""Ranks and thresholds over score matrices."""

from __future__ import annotations

import numpy as np
import torch


def auroc(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """AUROC of each column, for scores and labels [N, P] (1, 0, -1: left out); NaN if a class is empty."""
    values, marks = scores.numpy(), labels.numpy()
    areas = np.full(values.shape[1], np.nan)
    for column in range(values.shape[1]):
        use = marks[:, column] >= 0
        areas[column] = auroc_of(values[use, column], marks[use, column] == 1)
    return torch.from_numpy(areas)


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


def thresholds_at(scores: torch.Tensor, negative: torch.Tensor, rate: float) -> torch.Tensor:
    """Lowest observed score [P] fp32 that at most a share `rate` of the negatives exceeds strictly."""
    thresholds = torch.full((scores.shape[1],), float("nan"))
    for column in range(scores.shape[1]):
        values = scores[negative[:, column], column].sort(descending=True).values
        if len(values):
            thresholds[column] = values[int(rate * len(values))]
    return thresholds


def path_scores(logits: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Scores [N, P] fp32 under the path rule; `parents` [P] is -1 for roots and precedes its children."""
    scores = torch.sigmoid(logits)
    for probe, parent in enumerate(parents.tolist()):
        if parent >= probe:
            raise ValueError(f"parent {parent} of probe {probe} does not come before it: order probes by level")
        if parent >= 0:
            scores[:, probe] *= scores[:, parent]
    return scores


def expand_above(thresholds: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Smallest alert threshold among strict descendants [P]; +inf for leaves."""
    smallest = torch.full_like(thresholds, float("inf"))
    for probe in range(len(parents) - 1, -1, -1):
        parent = int(parents[probe])
        if parent >= 0:
            below = torch.minimum(smallest[probe], thresholds[probe])
            smallest[parent] = torch.minimum(smallest[parent], below)
    return smallest


def exact_cascade(
    scores: torch.Tensor, thresholds: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (evaluated, fired) [N, P] bool. Children are evaluated if their parent was, and scored above
    `expand_above`.
    """
    expand = expand_above(thresholds, parents)
    evaluated = torch.zeros(scores.shape, dtype=torch.bool)
    for probe, parent in enumerate(parents.tolist()):
        evaluated[:, probe] = True if parent < 0 else evaluated[:, parent] & (scores[:, parent] > expand[parent])
    return evaluated, evaluated & (scores > thresholds)

"""Ranks and thresholds over score matrices, path scores, and standardised states.

standard = Standard.of(x)                               # prepared states [N, D]
folded = fold(fit(standard(x), ...), standard, torch.bfloat16)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probemon.lab.training.metrics import auroc_of

Weights = dict[str, Tensor]


def auroc(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """AUROC of each column, for scores and labels [N, P] (1, 0, -1: left out); NaN if a class is empty."""
    values, marks = scores.numpy(), labels.numpy()
    areas = np.full(values.shape[1], np.nan)
    for column in range(values.shape[1]):
        use = marks[:, column] >= 0
        areas[column] = auroc_of(values[use, column], marks[use, column] == 1)
    return torch.from_numpy(areas)


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


@dataclass(frozen=True)
class Standard:
    """(x - mean) / scale, [D] each."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Standard:
        """From prepared states `[N, D]`."""
        return cls(x.mean(0), x.std(0).clamp(min=1e-6))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def fold(weights: Weights, standard: Standard, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Return the probes for states that are not standardised.

    b1 uses the rounded w1, so outputs at the mean state are exact.
    """
    folded = {name: value.clone() if name[0] == "b" else value.to(dtype) for name, value in weights.items()}
    folded["w1"] = (weights["w1"] / standard.scale).to(dtype)
    folded["b1"] = (weights["b1"].double() - folded["w1"].double() @ standard.mean.double()).float()
    return folded


def as_fp32(weights: Weights) -> Weights:
    """Return weights as fp32."""
    return {name: value.float() for name, value in weights.items()}

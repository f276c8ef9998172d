"""Standardises states for training, and folds that into the weights.

standard = Standard.of(x)                               # prepared states [N, D]
folded = fold(fit(standard(x), ...), standard, torch.bfloat16)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


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


def rounded(w: Tensor, b: Tensor, mean: Tensor, dtype: torch.dtype) -> Weights:
    """Return linear probes of prepared states w `[P, D]`, b `[P]` as a pack has them.

    b1 makes up for the rounding of w1 at the state `mean [P, D]`.
    """
    w1 = w.to(dtype)
    b1 = (b.double() + ((w.double() - w1.double()) * mean.double()).sum(1)).float()
    return {"w1": w1[:, None], "b1": b1[:, None]}

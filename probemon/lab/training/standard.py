"""Standardises states before training, and puts that into the weights after it.

standard = Standard.of(x)                               # prepared states [N, D]
weights = fit(standard(x), ...)
folded = fold(weights, standard, torch.bfloat16)        # the same probes, for x itself
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Standard:
    """What standardises normalised states: (x - mean) / scale, [D] each."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Standard:
        """Take mean and deviation from prepared states `[N, D]`."""
        return cls(x.mean(0), x.std(0).clamp(min=1e-6))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def fold(weights: Weights, standard: Standard, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The same probes for states that are not standardised: scale into w1 before rounding, mean into b1 after.

    Because b1 uses the rounded w1, a probe's output at the mean state is exact however coarse the dtype.
    """
    folded = {name: value.clone() if name[0] == "b" else value.to(dtype) for name, value in weights.items()}
    folded["w1"] = (weights["w1"] / standard.scale).to(dtype)
    folded["b1"] = (weights["b1"].double() - folded["w1"].double() @ standard.mean.double()).float()
    return folded


def as_fp32(weights: Weights) -> Weights:
    """Return weights of any dtype as fp32."""
    return {name: value.float() for name, value in weights.items()}

"""The meaning of a score, in eager torch: gather each pair's weights and compute it in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from probemon.core.inputs import check_pairs


def score_reference(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]. Copies every weight it reads."""
    check_pairs(hidden, weights, rows, slots)
    x = hidden[rows].to(torch.float32)
    gathered = {name: tensor[slots].to(torch.float32) for name, tensor in weights.items()}

    def layer(i: int, x: Tensor) -> Tensor:
        sums = (gathered[f"w{i}"] * x).sum(dim=-1)
        return (sums * gathered[f"w{i}_scale"] if f"w{i}_scale" in gathered else sums) + gathered[f"b{i}"]

    h = layer(1, x[:, None, :])
    if "w2" in gathered:
        h = layer(2, h.relu()[:, None, :])
    return sigmoid(layer(3, h.relu()) if "w3" in gathered else h[:, 0])


def sigmoid(logits: Tensor) -> Tensor:
    """Sigmoid [M] fp32 that does not depend on an element's place: torch's vector body and scalar tail differ on a CPU."""
    if logits.device.type != "cpu":
        return torch.sigmoid(logits)
    with np.errstate(over="ignore"):
        return torch.from_numpy(1.0 / (1.0 + np.exp(-logits.contiguous().numpy().astype(np.float64)))).to(torch.float32)

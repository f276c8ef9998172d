"""The meaning of a score, in eager torch: gather each pair's weights and compute it in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def score_reference(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]. Copies every weight it reads."""
    x = hidden[rows].to(torch.float32)
    gathered = {name: tensor[slots].to(torch.float32) for name, tensor in weights.items()}
    h = (gathered["w1"] * x[:, None, :]).sum(dim=-1) + gathered["b1"]
    if "w2" in gathered:
        h = (gathered["w2"] * h.relu()[:, None, :]).sum(dim=-1) + gathered["b2"]
    logit = (gathered["w3"] * h.relu()).sum(dim=-1) + gathered["b3"] if "w3" in gathered else h[:, 0]
    return sigmoid(logit)


def sigmoid(logits: Tensor) -> Tensor:
    """Sigmoid [M] fp32 that does not depend on an element's place: torch's vector body and scalar tail differ on a CPU."""
    if logits.device.type != "cpu":
        return torch.sigmoid(logits)
    with np.errstate(over="ignore"):
        return torch.from_numpy(1.0 / (1.0 + np.exp(-logits.contiguous().numpy().astype(np.float64)))).to(torch.float32)

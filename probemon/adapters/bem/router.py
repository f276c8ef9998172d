"""What the controller's codes are made by: a router of one level, and how far the tokens of a chunk spread.

code = Router(n_in, width, rank)(features)                  # [.., rank]
spread(z)                                                   # [B, K] of chunks [B, K, N, w], from 0 to 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FP32: dict[str, Any] = {"dtype": torch.float32}  # whatever torch.set_default_dtype says


class Router(nn.Sequential):
    """`MLP(LayerNorm(.))` from n_in features to r; its code is ones at first, around which it varies."""

    def __init__(self, n_in: int, width: int, rank: int) -> None:
        super().__init__(
            nn.LayerNorm(n_in, **FP32), nn.Linear(n_in, width, **FP32), nn.SiLU(), nn.Linear(width, rank, **FP32)
        )
        last = self[-1]
        assert isinstance(last, nn.Linear)
        nn.init.ones_(last.bias)


def spread(z: Tensor) -> Tensor:
    """Return how far the tokens of chunks spread `[B, K]`, of their features `[B, K, N, w]`: 0 where all are alike."""
    square = z.square().mean(dim=(-2, -1))
    return 1 - z.mean(dim=-2).square().mean(dim=-1) / square.clamp(min=torch.finfo(z.dtype).tiny)

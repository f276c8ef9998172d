"""A router of one level, and the spread of a chunk's tokens.

code = Router(n_in, width, rank)(features)                  # [.., rank]
spread(z)                                                   # [B, K]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FP32: dict[str, Any] = {"dtype": torch.float32}  # whatever torch.set_default_dtype says


class Router(nn.Sequential):
    """`MLP(LayerNorm(.))`, n_in to r. Codes begin as ones."""

    def __init__(self, n_in: int, width: int, rank: int) -> None:
        super().__init__(
            nn.LayerNorm(n_in, **FP32), nn.Linear(n_in, width, **FP32), nn.SiLU(), nn.Linear(width, rank, **FP32)
        )
        last = self[-1]
        assert isinstance(last, nn.Linear)
        nn.init.ones_(last.bias)


def spread(z: Tensor) -> Tensor:
    """Return the spread `[B, K]` of chunks `[B, K, N, w]`: 0 if all tokens are alike, at most 1."""
    square = z.square().mean(dim=(-2, -1))
    return 1 - z.mean(dim=-2).square().mean(dim=-1) / square.clamp(min=torch.finfo(z.dtype).tiny)

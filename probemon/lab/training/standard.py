"""Rounds probes for a pack."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(w: Tensor, b: Tensor, mean: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return linear probes of prepared states w `[P, D]`, b `[P]` as a pack has them.

    b1 makes up for the rounding of w1 at the state `mean [P, D]`.
    """
    w1 = w.to(dtype)
    b1 = (b.double() + ((w.double() - w1.double()) * mean.double()).sum(1)).float()
    return {"w1": w1[:, None], "b1": b1[:, None]}

"""What a probe reads, from what the host wrote: normalise in fp32, then round to the pack's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from probemon.types import InputSpec


def prepare_input(hidden: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
    """hidden [N, D] of any float dtype -> [N, D] in `dtype`, normalised without affine part.

    Reductions run along D alone, so a row's result does not depend on the batch it came in.
    """
    x = hidden.to(torch.float32)
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    if spec.norm in ("layernorm", "rmsnorm"):
        mean = x.square().mean(dim=-1, keepdim=True)
        # inf - inf: a state too large to be squared becomes NaN, which is not seen, instead of zeros, which score 0.5.
        x = x * torch.rsqrt(mean + (mean - mean) + spec.eps)
    return x.to(dtype)

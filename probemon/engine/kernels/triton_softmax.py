"""Triton kernel for softmax groups. Sums run in fp64 over members in order, for the bits of `triton_cascade`."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from probemon.core.softmax_groups import Floats, Ints
from probemon.engine.kernels.triton_pairs import OPTIONS

_BLOCK = 64


@triton.jit
def share_of(z, z_ptr, members_idx, first, last, inside, MOST, BLOCK: tl.constexpr):
    """Return shares of `z [BLOCK]` among logits at `z_ptr + members_idx[first:last]`, at most `MOST`; 1 if empty."""
    grouped = inside & (first < last)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    for e in range(0, MOST):
        linked = grouped & (first + e < last)
        member = tl.load(members_idx + first + e, mask=linked, other=0)
        other = tl.load(z_ptr + member, mask=linked, other=float("-inf")).to(tl.float64)
        top = tl.where((other > top) | (other != other), other, top)
    top = tl.where(grouped, top, 0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for e in range(0, MOST):
        linked = grouped & (first + e < last)
        member = tl.load(members_idx + first + e, mask=linked, other=0)
        other = tl.load(z_ptr + member, mask=linked, other=0.0).to(tl.float64)
        total += tl.where(linked, tl.exp(tl.where(linked, other - top, 0.0)), 0.0)
    power = tl.exp(tl.where(grouped, z.to(tl.float64) - top, 0.0))
    return (power / tl.where(grouped, total, 1.0)).to(tl.float32)


@triton.jit
def _shares(z_ptr, members_idx, first_ptr, last_ptr, out_ptr, M, MOST, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < M
    z = tl.load(z_ptr + i, mask=inside, other=0.0)
    first, last = tl.load(first_ptr + i, mask=inside, other=0), tl.load(last_ptr + i, mask=inside, other=0)
    tl.store(out_ptr + i, share_of(z, z_ptr, members_idx, first, last, inside, MOST, BLOCK), mask=inside)


def softmax_triton(logits: Floats, starts: Ints, device: torch.device) -> Floats:
    """Return the softmax [M] fp32 of logits [M] in host memory over segments from `starts`."""
    sizes = np.diff(starts, append=len(logits))

    def put(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

    z, out = torch.from_numpy(logits).to(device), torch.empty(len(logits), dtype=torch.float32, device=device)
    with torch.cuda.device_of(z):
        _shares[(triton.cdiv(len(logits), _BLOCK),)](
            z, put(np.arange(len(logits))), put(np.repeat(starts, sizes)), put(np.repeat(starts + sizes, sizes)), out,
            len(logits), int(sizes.max(initial=0)), BLOCK=_BLOCK, **OPTIONS,
        )  # fmt: skip
    scores: Floats = out.cpu().numpy()
    return scores

"""One Triton kernel for a whole probe: all layers, the sigmoid, weights indexed in place by slot.

A program computes one pair in a fixed order, so scores are bitwise the same from run to run and
whatever else is active. bf16 weights are widened on loading; every product and sum is fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fused(  # type: ignore[no-untyped-def]
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, w3_ptr, b3_ptr, rows_ptr, slots_ptr, out_ptr,
    D, H1, H2, LAYERS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H1: tl.constexpr, BLOCK_H2: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row = tl.load(rows_ptr + pair).to(tl.int64)
    # int64: slot * H1 * D passes 2**31 at 6,554 slots of 128 x 2560.
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    j = tl.arange(0, BLOCK_H1)
    j_in = j < H1
    z = tl.zeros((BLOCK_H1,), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        d_in = d < D
        x = tl.load(x_ptr + row * D + d, mask=d_in, other=0.0).to(tl.float32)
        w = tl.load(
            w1_ptr + slot * H1 * D + j[:, None] * D + d[None, :], mask=j_in[:, None] & d_in[None, :], other=0.0
        ).to(tl.float32)
        z += tl.sum(w * x[None, :], axis=1)
    z += tl.load(b1_ptr + slot * H1 + j, mask=j_in, other=0.0)
    if LAYERS == 1:
        logit = tl.sum(z, axis=0)  # one unit; the masked others are zero
    else:
        z = tl.where(z < 0, 0.0, z)  # not maximum(): a NaN stays a NaN
        if LAYERS == 3:
            k = tl.arange(0, BLOCK_H2)
            k_in = k < H2
            w = tl.load(
                w2_ptr + slot * H2 * H1 + k[:, None] * H1 + j[None, :], mask=k_in[:, None] & j_in[None, :], other=0.0
            ).to(tl.float32)
            z2 = tl.sum(w * z[None, :], axis=1) + tl.load(b2_ptr + slot * H2 + k, mask=k_in, other=0.0)
            z2 = tl.where(z2 < 0, 0.0, z2)
            w3 = tl.load(w3_ptr + slot * H2 + k, mask=k_in, other=0.0).to(tl.float32)
            logit = tl.sum(w3 * z2, axis=0) + tl.load(b3_ptr + slot)
        else:
            w3 = tl.load(w3_ptr + slot * H1 + j, mask=j_in, other=0.0).to(tl.float32)
            logit = tl.sum(w3 * z, axis=0) + tl.load(b3_ptr + slot)
    tl.store(out_ptr + pair, 1.0 / (1.0 + tl.exp(-logit)))


def block_sizes(h1: int, h2: int, d: int) -> dict[str, int]:
    """Tile sizes: powers of two over the layers, and as much of D at once as keeps a tile at 8,192 values."""
    block_h1 = triton.next_power_of_2(h1)
    block_d = min(triton.next_power_of_2(d), max(16, 8192 // block_h1))
    return {"BLOCK_D": block_d, "BLOCK_H1": block_h1, "BLOCK_H2": triton.next_power_of_2(max(h2, 1))}


def score_triton(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M], all on one device."""
    _, h1, d = weights["w1"].shape
    h2 = weights["w2"].shape[1] if "w2" in weights else 1
    out = torch.empty(len(slots), dtype=torch.float32, device=hidden.device)
    if not len(slots):
        return out
    b1 = weights["b1"]
    arguments: list[Any] = [weights["w1"], b1] + [weights.get(name, b1) for name in ("w2", "b2", "w3", "b3")]
    _fused[(len(slots),)](
        hidden.contiguous(), *arguments, rows, slots, out, d, h1, h2,
        LAYERS=1 + ("w2" in weights) + ("w3" in weights), **block_sizes(h1, h2, d),
    )  # fmt: skip
    return out

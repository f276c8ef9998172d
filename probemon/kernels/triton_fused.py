"""Triton kernels for whole probes: all layers, the sigmoid, weights indexed in place by slot, one launch for all pairs.

    scores = score_triton(hidden, weights, rows, slots)

A probe with hidden layers is split by rows of its first layer: a program takes 16 of them over the full length D, so the ReLU
stays local, multiplies by its part of the second layer and stores that. The last program of a pair to arrive adds the parts up
in their fixed order and finishes. Every weight is read once, nothing is added by atomics, and a pair's arithmetic depends on
the pair alone: its score is bitwise the same from run to run and whatever else is active. bf16 is widened on loading; every
product and sum is fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a program: 44 probes of 128 rows are 352 programs, for 132 processors
PAIRS = 16  # linear probes of a program
_ARRIVED: dict[tuple[torch.device, int], Tensor] = {}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def part_of_probe(  # type: ignore[no-untyped-def]
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, w3_ptr, b3_ptr, row, slot, part, parts_ptr, arrived_ptr, out_ptr,
    D, H1, H2, N_PARTS, LAYERS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H2: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """One pair's `ROWS` rows of layer 1. Of this pair: `parts [N_PARTS, H2 or 1]`, `arrived` an int32 zero, zero again afterwards, `out`."""
    # int64: slot * H1 * D passes 2**31 at 6,554 slots of 128 x 2560.
    row, slot = row.to(tl.int64), slot.to(tl.int64)
    j = part * ROWS + tl.arange(0, ROWS)
    j_in = j < H1
    total = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    w1_row = w1_ptr + (slot * H1 + j[:, None]) * D
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        d_in = d < D
        x = tl.load(x_ptr + row * D + d, mask=d_in, other=0.0).to(tl.float32)
        w = tl.load(w1_row + d[None, :], mask=j_in[:, None] & d_in[None, :], other=0.0).to(tl.float32)
        total += w * x[None, :]
    z = tl.sum(total, axis=1) + tl.load(b1_ptr + slot * H1 + j, mask=j_in, other=0.0)
    z = tl.where(z < 0, 0.0, z)  # not maximum(): a NaN stays a NaN
    k = tl.arange(0, BLOCK_H2)
    k_in = k < H2
    if LAYERS == 3:
        w2 = tl.load(w2_ptr + (slot * H2 + k[:, None]) * H1 + j[None, :], mask=k_in[:, None] & j_in[None, :], other=0.0).to(tl.float32)
        tl.store(parts_ptr + part * H2 + k, tl.sum(w2 * z[None, :], axis=1), mask=k_in)
    else:
        w3 = tl.load(w3_ptr + slot * H1 + j, mask=j_in, other=0.0).to(tl.float32)
        tl.store(parts_ptr + part, tl.sum(w3 * z, axis=0))
    tl.debug_barrier()  # every thread's part is stored before one of them says so
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == N_PARTS - 1:
        p = tl.arange(0, BLOCK_PARTS)
        if LAYERS == 3:
            parts = tl.load(
                parts_ptr + p[:, None] * H2 + k[None, :], mask=(p < N_PARTS)[:, None] & k_in[None, :], other=0.0, cache_modifier=".cg"
            )
            z2 = tl.sum(parts, axis=0) + tl.load(b2_ptr + slot * H2 + k, mask=k_in, other=0.0)
            z2 = tl.where(z2 < 0, 0.0, z2)
            w3 = tl.load(w3_ptr + slot * H2 + k, mask=k_in, other=0.0).to(tl.float32)
            logit = tl.sum(w3 * z2, axis=0) + tl.load(b3_ptr + slot)
        else:
            parts = tl.load(parts_ptr + p, mask=p < N_PARTS, other=0.0, cache_modifier=".cg")
            logit = tl.sum(parts, axis=0) + tl.load(b3_ptr + slot)
        tl.store(out_ptr, 1.0 / (1.0 + tl.exp(-logit)))
        tl.store(arrived_ptr, 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _layered(  # type: ignore[no-untyped-def]
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, w3_ptr, b3_ptr, rows_ptr, slots_ptr, parts_ptr, arrived_ptr, out_ptr,
    D, H1, H2, N_PARTS, LAYERS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H2: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """`parts [M, N_PARTS, H2 or 1]`, `arrived [M]` zeros, `out [M]`."""
    pair = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part_of_probe(
        x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, w3_ptr, b3_ptr, tl.load(rows_ptr + pair), tl.load(slots_ptr + pair), tl.program_id(0) % N_PARTS,
        parts_ptr + pair * N_PARTS * H2, arrived_ptr + pair, out_ptr + pair, D, H1, H2, N_PARTS, LAYERS, BLOCK_D, ROWS, BLOCK_H2, BLOCK_PARTS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _linear(  # type: ignore[no-untyped-def]
    x_ptr, w1_ptr, b1_ptr, rows_ptr, slots_ptr, out_ptr, M, D, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """`PAIRS` pairs of linear probes."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < M
    row = tl.load(rows_ptr + pair, mask=inside, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + pair, mask=inside, other=0).to(tl.int64)
    total = tl.zeros((PAIRS, BLOCK_D), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        keep = inside[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * D + d[None, :], mask=keep, other=0.0).to(tl.float32)
        w = tl.load(w1_ptr + slot[:, None] * D + d[None, :], mask=keep, other=0.0).to(tl.float32)
        total += w * x
    logit = tl.sum(total, axis=1) + tl.load(b1_ptr + slot, mask=inside, other=0.0)
    tl.store(out_ptr + pair, 1.0 / (1.0 + tl.exp(-logit)), mask=inside)


def block_sizes(d: int) -> int:
    """How much of D a tile of 16 rows takes at once: 4,096 values, 32 registers of each of 128 threads."""
    return min(triton.next_power_of_2(d), 256)


def layered_meta(h1: int, h2: int, d: int, n_layers: int) -> dict[str, int]:
    """Compile-time sizes of `_layered`."""
    return {
        "LAYERS": n_layers, "BLOCK_D": block_sizes(d), "ROWS": ROWS, "BLOCK_H2": triton.next_power_of_2(max(h2, 1)),
        "BLOCK_PARTS": triton.next_power_of_2(triton.cdiv(h1, ROWS)),
    }  # fmt: skip


def score_triton(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M], all on one device.

    Pairs of one probe next to one another share what they read in the chip's cache.
    """
    _, h1, d = weights["w1"].shape
    n = len(slots)
    out = torch.empty(n, dtype=torch.float32, device=hidden.device)
    if not n:
        return out
    x, rows, slots = hidden.contiguous(), rows.contiguous(), slots.contiguous()  # np.nonzero gives strided ones
    if "w3" not in weights:
        _linear[(triton.cdiv(n, PAIRS),)](x, weights["w1"], weights["b1"], rows, slots, out, n, d, BLOCK_D=block_sizes(d), PAIRS=PAIRS)
        return out
    n_layers, h2 = 2 + ("w2" in weights), weights["w2"].shape[1] if "w2" in weights else 1
    n_parts = triton.cdiv(h1, ROWS)
    parts = torch.empty(n * n_parts * h2, dtype=torch.float32, device=hidden.device)
    b1 = weights["b1"]
    arguments: list[Any] = [weights["w1"], b1, *(weights.get(name, b1) for name in ("w2", "b2", "w3", "b3"))]
    _layered[(n * n_parts,)](
        x, *arguments, rows, slots, parts, _arrived(n, hidden.device), out, d, h1, h2, n_parts, **layered_meta(h1, h2, d, n_layers)
    )
    return out


def _arrived(n: int, device: torch.device) -> Tensor:
    """Zeros for `n` pairs. They are zeros again after every launch, so launches of one stream, which follow one another, share them."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    known = _ARRIVED.get((device, stream))
    if known is None or len(known) < n:
        known = _ARRIVED[device, stream] = torch.zeros(max(1024, triton.next_power_of_2(n)), dtype=torch.int32, device=device)
    return known

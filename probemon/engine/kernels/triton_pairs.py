"""Triton kernels that score whole probes, all layers and the sigmoid, in one launch.

A program computes 16 rows of a probe's first layer, which keeps the ReLU local, and their share of the second. A pair's
last program adds these in a fixed order. Weights are read once; no sum uses atomics: a score depends bitwise only on
its pair. With many pairs, a program takes four, which may share weights.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from probemon.core.inputs import TINY, check_norm, check_pairs, check_states
from probemon.engine.kernels.triton_matrix import (
    INTERPRETED,
    ROWS,
    WARPS,
    _states,
    launches,
    matrix_meta,
    scaled,
    score_of,
    uses_matrix_units,
)

PAIRS = 16  # linear probes per program
GROUP = 4  # pairs that share weights
MANY = 2048  # pairs from which they share; fewer would leave processors idle
# The compiler must not fuse products and sums: its choice differs between rows of a tile, so bits would depend on the
# place. `tl.fma` is explicit.
OPTIONS = {"enable_fp_fusion": False}
_MOST_PAIRS = 1 << 18  # per launch: bounds memory
_ARRIVED: dict[tuple[torch.device, int], Tensor] = {}
_SPARE: dict[torch.device, Tensor] = {}  # zeros for graphs
_SPARES = 1 << 18


@triton.jit
def part_of_probe(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, row, slot, part, parts_ptr,
    arrived_ptr, out_ptr,
    D, H1, H2, N_PARTS,
    LAYERS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H2: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of layer 1 of one pair: `parts [N_PARTS, H2 or 1]`, `out`; `arrived` int32, 0 before and after."""
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
        total = tl.fma(w, tl.broadcast_to(x[None, :], total.shape), total)
    _above(
        tl.sum(total, axis=1), s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, slot, part, parts_ptr,
        arrived_ptr, out_ptr,
        H1, H2, N_PARTS, LAYERS, SCALED, ROWS, BLOCK_H2, BLOCK_PARTS, LOGITS,
    )  # fmt: skip


@triton.jit
def _above(
    sums, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, slot, part, parts_ptr, arrived_ptr, out_ptr,
    H1, H2, N_PARTS, LAYERS: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK_H2: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Multiply `ROWS` sums of layer 1 by their part of the layer above; the last program stores the score."""
    j = part * ROWS + tl.arange(0, ROWS)
    j_in = j < H1
    z = scaled(sums, s1_ptr, slot * H1 + j, j_in, SCALED) + tl.load(b1_ptr + slot * H1 + j, mask=j_in, other=0.0)
    z = tl.where(z < 0, 0.0, z)  # not maximum(): NaN stays NaN
    k = tl.arange(0, BLOCK_H2)
    k_in = k < H2
    if LAYERS == 3:
        w2 = tl.load(
            w2_ptr + (slot * H2 + k[:, None]) * H1 + j[None, :], mask=k_in[:, None] & j_in[None, :], other=0.0
        ).to(tl.float32)
        tl.store(parts_ptr + part * H2 + k, tl.sum(w2 * z[None, :], axis=1), mask=k_in)
    else:
        w3 = tl.load(w3_ptr + slot * H1 + j, mask=j_in, other=0.0).to(tl.float32)
        tl.store(parts_ptr + part, tl.sum(w3 * z, axis=0))
    tl.debug_barrier()  # store all parts before counting
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == N_PARTS - 1:
        p = tl.arange(0, BLOCK_PARTS)
        if LAYERS == 3:
            parts = tl.load(
                parts_ptr + p[:, None] * H2 + k[None, :],
                mask=(p < N_PARTS)[:, None] & k_in[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            z2 = scaled(tl.sum(parts, axis=0), s2_ptr, slot * H2 + k, k_in, SCALED) + tl.load(
                b2_ptr + slot * H2 + k, mask=k_in, other=0.0
            )
            z2 = tl.where(z2 < 0, 0.0, z2)
            w3 = tl.load(w3_ptr + slot * H2 + k, mask=k_in, other=0.0).to(tl.float32)
            logit = scaled(tl.sum(w3 * z2, axis=0), s3_ptr, slot, True, SCALED) + tl.load(b3_ptr + slot)
        else:
            parts = tl.load(parts_ptr + p, mask=p < N_PARTS, other=0.0, cache_modifier=".cg")
            logit = scaled(tl.sum(parts, axis=0), s3_ptr, slot, True, SCALED) + tl.load(b3_ptr + slot)
        tl.store(out_ptr, score_of(logit, LOGITS))
        tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=["N", "P"])
def _layered(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, rows_ptr, slots_ptr, parts_ptr,
    arrived_ptr, out_ptr,
    N, P, D, H1, H2, N_PARTS,
    LAYERS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H2: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """One pair: `parts [M, N_PARTS, H2 or 1]`, `arrived [M]` zeros, `out [M]`; NaN if out of range."""
    pair = (tl.program_id(0) // N_PARTS).to(tl.int64)
    row, slot = tl.load(rows_ptr + pair), tl.load(slots_ptr + pair)
    if (row >= 0) & (row < N) & (slot >= 0) & (slot < P):
        part_of_probe(
            x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, row, slot,
            tl.program_id(0) % N_PARTS,
            parts_ptr + pair * N_PARTS * H2, arrived_ptr + pair, out_ptr + pair,
            D, H1, H2, N_PARTS, LAYERS, SCALED, BLOCK_D, ROWS, BLOCK_H2, BLOCK_PARTS, LOGITS,
        )  # fmt: skip
    else:
        tl.store(out_ptr + pair, float("nan"))


@triton.jit(do_not_specialize=["M", "N", "P"])
def _layered_groups(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, rows_ptr, slots_ptr, parts_ptr,
    arrived_ptr, out_ptr,
    M, N, P, D, H1, H2, N_PARTS,
    LAYERS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H2: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Score four pairs (`GROUP`), reading weights once if they are of one probe; tiles as in `part_of_probe`, for equal
    bits.
    """
    pair, part = (tl.program_id(0) // N_PARTS).to(tl.int64) * 4, tl.program_id(0) % N_PARTS
    last = tl.minimum(pair + 3, M - 1)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    group_rows = tl.load(rows_ptr + tl.minimum(pair + tl.arange(0, 4), last))
    sound = (tl.min(group_rows, axis=0) >= 0) & (tl.max(group_rows, axis=0) < N) & (slot >= 0) & (slot < P)
    if sound & (pair + 3 == last) & (slot == tl.load(slots_ptr + last)):  # sorted: those between are equal
        x0 = x_ptr + tl.load(rows_ptr + pair).to(tl.int64) * D
        x1 = x_ptr + tl.load(rows_ptr + pair + 1).to(tl.int64) * D
        x2 = x_ptr + tl.load(rows_ptr + pair + 2).to(tl.int64) * D
        x3 = x_ptr + tl.load(rows_ptr + pair + 3).to(tl.int64) * D
        j = part * ROWS + tl.arange(0, ROWS)
        w1_row = w1_ptr + (slot * H1 + j[:, None]) * D
        total0 = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
        total1 = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
        total2 = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
        total3 = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            d_in = d < D
            w = tl.load(w1_row + d[None, :], mask=(j < H1)[:, None] & d_in[None, :], other=0.0).to(tl.float32)
            v0 = tl.load(x0 + d, mask=d_in, other=0.0).to(tl.float32)[None, :]
            total0 = tl.fma(w, tl.broadcast_to(v0, total0.shape), total0)
            v1 = tl.load(x1 + d, mask=d_in, other=0.0).to(tl.float32)[None, :]
            total1 = tl.fma(w, tl.broadcast_to(v1, total1.shape), total1)
            v2 = tl.load(x2 + d, mask=d_in, other=0.0).to(tl.float32)[None, :]
            total2 = tl.fma(w, tl.broadcast_to(v2, total2.shape), total2)
            v3 = tl.load(x3 + d, mask=d_in, other=0.0).to(tl.float32)[None, :]
            total3 = tl.fma(w, tl.broadcast_to(v3, total3.shape), total3)
        sums = tl.sum(total0, axis=1), tl.sum(total1, axis=1), tl.sum(total2, axis=1), tl.sum(total3, axis=1)
        for i in tl.static_range(4):
            _above(
                sums[i], s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, slot, part,
                parts_ptr + (pair + i) * N_PARTS * H2, arrived_ptr + pair + i, out_ptr + pair + i,
                H1, H2, N_PARTS, LAYERS, SCALED, ROWS, BLOCK_H2, BLOCK_PARTS, LOGITS,
            )  # fmt: skip
    else:
        for at in range(pair, last + 1):
            row, slot_at = tl.load(rows_ptr + at), tl.load(slots_ptr + at)
            if (row >= 0) & (row < N) & (slot_at >= 0) & (slot_at < P):
                part_of_probe(
                    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, row, slot_at, part,
                    parts_ptr + at * N_PARTS * H2, arrived_ptr + at, out_ptr + at,
                    D, H1, H2, N_PARTS, LAYERS, SCALED, BLOCK_D, ROWS, BLOCK_H2, BLOCK_PARTS, LOGITS,
                )  # fmt: skip
            else:
                tl.store(out_ptr + at, float("nan"))


@triton.jit
def linear_scores(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, row, slot, inside, D, SCALED: tl.constexpr, BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Score pairs of linear probes."""
    row, slot = row.to(tl.int64), slot.to(tl.int64)
    total = tl.zeros((PAIRS, BLOCK_D), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        keep = inside[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * D + d[None, :], mask=keep, other=0.0).to(tl.float32)
        w = tl.load(w1_ptr + slot[:, None] * D + d[None, :], mask=keep, other=0.0).to(tl.float32)
        total = tl.fma(w, x, total)
    logit = scaled(tl.sum(total, axis=1), s1_ptr, slot, inside, SCALED) + tl.load(b1_ptr + slot, mask=inside, other=0.0)
    return score_of(logit, LOGITS)


@triton.jit(do_not_specialize=["M", "N", "P"])
def _linear(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, rows_ptr, slots_ptr, out_ptr, M, N, P, D, SCALED: tl.constexpr,
    BLOCK_D: tl.constexpr, PAIRS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Pairs of linear probes; NaN if out of range."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < M
    row, slot = tl.load(rows_ptr + pair, mask=inside, other=0), tl.load(slots_ptr + pair, mask=inside, other=0)
    sound = inside & (row >= 0) & (row < N) & (slot >= 0) & (slot < P)
    scores = linear_scores(x_ptr, w1_ptr, s1_ptr, b1_ptr, row, slot, sound, D, SCALED, BLOCK_D, PAIRS, LOGITS)
    tl.store(out_ptr + pair, tl.where(sound, scores, float("nan")), mask=inside)


@triton.jit
def _is_finite(x):
    if x.dtype != tl.float64:  # fp32 may not hold it
        x = x.to(tl.float32)
    return tl.abs(x) < float("inf")


@triton.jit
def _normalise(x_ptr, out_ptr, D, S, eps, TINY, LAYERNORM: tl.constexpr, NORM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Normalise a row `[D]` (stride `S`): NaN if not finite, infinite if impossible."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    read = tl.load(x_ptr + row * S + d, mask=d < D, other=0.0)
    odd, x = tl.where(_is_finite(read), 0, 1), read.to(tl.float32)
    scale = tl.full((), 1.0, dtype=tl.float32)
    sound = tl.full((), 1, dtype=tl.int32)
    if LAYERNORM:
        x = tl.where(d < D, x - tl.sum(x, axis=0) / D, 0.0)
    if NORM:
        odd = odd | tl.sum(odd, axis=0)  # one bad value spoils the row
        square = tl.sum(x * x, axis=0) / D + eps
        sound = ((square >= TINY) & (square < float("inf"))).to(tl.int32)
        scale = 1.0 / tl.sqrt(tl.where(sound > 0, square, 1.0))
    value = tl.where(sound > 0, x * scale, float("inf"))
    tl.store(out_ptr + row * D + d, tl.where(odd > 0, float("nan"), value), mask=d < D)


def normalise_triton(hidden: Tensor, norm: str, eps: float, dtype: torch.dtype) -> Tensor:
    """As `prepare_input`, with sums whose order does not depend on the number of rows.

    Values that were not finite become NaN; those that cannot be normalised or held by `dtype`, infinite.
    """
    check_states(hidden)
    check_norm(norm, ("none", "layernorm", "rmsnorm"), "kernels/triton_pairs.py")
    n, d = hidden.shape
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    # The interpreter rounds to bf16 differently.
    stored = torch.float32 if INTERPRETED else dtype
    out, block = torch.empty(n, d, dtype=stored, device=hidden.device), triton.next_power_of_2(d)
    if n:
        with torch.cuda.device_of(hidden):
            _normalise[(n,)](
                hidden,
                out,
                d,
                hidden.stride(0),
                eps,
                TINY,
                LAYERNORM=norm == "layernorm",
                NORM=norm != "none",
                BLOCK_D=block,
                num_warps=min(max(block // 512, 1), 16),
                **OPTIONS,
            )
    return out.to(dtype)


def block_sizes(d: int) -> int:
    """Return a tile's width: 16 rows are 32 registers of 128 threads."""
    return min(triton.next_power_of_2(d), 256)


def layered_meta(h1: int, h2: int, d: int, n_layers: int, scaled: bool, logits: bool = False) -> dict[str, Any]:
    """Compile-time sizes of `_layered`."""
    return {
        "LAYERS": n_layers, "SCALED": scaled, "BLOCK_D": block_sizes(d), "ROWS": ROWS,
        "BLOCK_H2": triton.next_power_of_2(max(h2, 1)),
        "BLOCK_PARTS": triton.next_power_of_2(triton.cdiv(h1, ROWS)), "LOGITS": logits,
    }  # fmt: skip


def score_triton(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M], on one device."""
    return _of_pairs(hidden, weights, rows, slots, logits=False)


def logits_triton(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return logits [M] fp32; arguments as `score_triton`."""
    return _of_pairs(hidden, weights, rows, slots, logits=True)


def _of_pairs(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor, *, logits: bool) -> Tensor:
    check_pairs(hidden, weights, rows, slots)
    out = torch.empty(len(slots), dtype=torch.float32, device=hidden.device)
    x, rows, slots = aligned(hidden.contiguous()), rows.contiguous(), slots.contiguous()
    order = None
    shares = "w3" in weights and len(slots) >= MANY and len(hidden) >= GROUP
    if shares:
        slots, order = torch.sort(slots, stable=True)
        rows = rows[order]
    with torch.cuda.device_of(hidden):
        for at in range(0, len(slots), _MOST_PAIRS):
            chunk = slice(at, at + _MOST_PAIRS)
            _score(x, weights, rows[chunk], slots[chunk], out[chunk], shares, logits)
    return out if order is None else torch.empty_like(out).index_copy_(0, order, out)


def aligned(x: Tensor) -> Tensor:
    """Return contiguous states aligned to 16 bytes: Triton specialises on alignment, which may change sums."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _score(
    x: Tensor,
    weights: Mapping[str, Tensor],
    rows: Tensor,
    slots: Tensor,
    out: Tensor,
    shares: bool,
    logits: bool,
) -> None:
    n_slots, h1, d = weights["w1"].shape
    n, is_int8, layers = len(slots), "w1_scale" in weights, arguments_of(weights)
    if "w3" not in weights:
        _linear[(triton.cdiv(n, PAIRS),)](
            x, *layers[:3], rows, slots, out, n, len(x), n_slots, d, SCALED=is_int8, BLOCK_D=block_sizes(d),
            PAIRS=PAIRS, LOGITS=logits, **OPTIONS,
        )  # fmt: skip
        return
    n_layers, h2 = 2 + ("w2" in weights), weights["w2"].shape[1] if "w2" in weights else 1
    n_parts = triton.cdiv(h1, ROWS)
    parts = torch.empty(n * n_parts * h2, dtype=torch.float32, device=x.device)
    arrived = _arrived(n, x.device)
    if uses_matrix_units(x.device, x.dtype):
        for n_programs, block, columns, does in launches(n, len(x), h1, h2):
            _states[(n_programs,)](
                x, *layers, rows, slots, parts, arrived, out, n, len(x), n_slots, block, d, h1, h2, 1.0,
                **matrix_meta(h1, h2, columns, n_layers, is_int8, logits), DOES=does, num_warps=WARPS, **OPTIONS,
            )  # fmt: skip
        return
    meta = layered_meta(h1, h2, d, n_layers, is_int8, logits)
    if shares:
        _layered_groups[(triton.cdiv(n, GROUP) * n_parts,)](
            x, *layers, rows, slots, parts, arrived, out, n, len(x), n_slots, d, h1, h2, n_parts, **meta, **OPTIONS
        )
    else:
        _layered[(n * n_parts,)](
            x, *layers, rows, slots, parts, arrived, out, len(x), n_slots, d, h1, h2, n_parts, **meta, **OPTIONS
        )


def arguments_of(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return weight, scale and bias of three layers; `b1` replaces missing ones."""
    return [weights.get(name, weights["b1"]) for i in (1, 2, 3) for name in (f"w{i}", f"w{i}_scale", f"b{i}")]


def _arrived(n: int, device: torch.device) -> Tensor:
    """Return zeros for `n` pairs, which launches reset; shared in a stream, not by graphs."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        spare = _SPARE.get(device)
        if spare is None or len(spare) < n:
            return torch.zeros(n, dtype=torch.int32, device=device)  # zeroed by the graph
        _SPARE[device] = spare[n:]
        return spare[:n]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counters = _ARRIVED.get((device, stream))
    if counters is None or len(counters) < n:
        size = max(1024, triton.next_power_of_2(n))
        counters = _ARRIVED[device, stream] = torch.zeros(size, dtype=torch.int32, device=device)
        if device.type == "cuda":
            _SPARE.setdefault(device, torch.zeros(_SPARES, dtype=torch.int32, device=device))
    return counters

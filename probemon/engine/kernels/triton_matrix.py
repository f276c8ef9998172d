"""Triton code that scores one layered probe for many states on matrix units; launched by `triton_pairs`.

For bf16 and int8 packs, whose products with bf16 states are exact in fp32. States are columns, which never mix, so a
score has the same bits for 1 or 64 states. That needs two warps: with four, instructions differ for some sizes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from probemon.util.cache_folders import give_triton_a_folder

ROWS = 16  # per program, as in a matrix instruction
BLOCK_D = 128  # blocks of D are summed apart and then added: matrix units truncate
WIDE = 64  # states per program if there are many, else `NARROW`
NARROW = 8
STAGES = {NARROW: 6, WIDE: 3}  # blocks of D in flight; does not change sums
WARPS = 2
INTERPRETED = knobs.runtime.interpret
give_triton_a_folder()


def _n_kept() -> int:
    return len(os.listdir(knobs.cache.dir)) if os.path.isdir(knobs.cache.dir) else 0


_N_KEPT = _n_kept()


def n_compiled() -> int:
    """Number of entries that Triton's cache gained since this import."""
    return _n_kept() - _N_KEPT


def uses_matrix_units(device: torch.device, dtype: torch.dtype) -> bool:
    """True if states of `dtype` are scored here; never mixed in a process, since the bits differ."""
    return dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@triton.jit
def scaled(sums, scale_ptr, at, inside, SCALED: tl.constexpr):
    """Scale sums of int8 weights."""
    if SCALED:
        sums = sums * tl.load(scale_ptr + at, mask=inside, other=0.0)
    return sums


@triton.jit
def score_of(logit, LOGITS: tl.constexpr):
    """Sigmoid, unless `LOGITS`."""
    if not LOGITS:
        logit = 1.0 / (1.0 + tl.exp(-logit))
    return logit


@triton.jit
def _first_bits(z):
    """Truncate fp32 to bf16's bits."""
    return (z.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _product(w, z, INTERPRETED: tl.constexpr):
    """Multiply bf16 or int8 weights by fp32 in three products: an fp32 is exactly three bf16."""
    if INTERPRETED:
        total = tl.dot(w.to(tl.float32), z, input_precision="ieee")
    else:
        w, high = w.to(tl.bfloat16), _first_bits(z)
        rest = tl.where(tl.abs(z) < float("inf"), z - high, 0.0)  # infinities and NaN are only in `high`
        middle = _first_bits(rest)
        total = tl.dot(w, (rest - middle).to(tl.bfloat16))
        total = tl.dot(w, middle.to(tl.bfloat16), total)
        total = tl.dot(w, high.to(tl.bfloat16), total)
    return total


@triton.jit
def _part(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, w3_ptr, rows, inside, slot, part, parts_ptr, D, H1, H2, ONE,
    N_PARTS: tl.constexpr, LAYERS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_H2: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute `ROWS` rows of layer 1 for the states `rows [COLUMNS]` that are `inside`; store their share of the layer
    above, `parts [COLUMNS, N_PARTS, H2 or 1]`. `ONE` is 1.0, unknown to the compiler.
    """
    rows, column = rows.to(tl.int64), tl.arange(0, COLUMNS)
    j = part * ROWS + tl.arange(0, ROWS)
    j_in = j < H1
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    w1_row, x_row = w1_ptr + (slot * H1 + j[:, None]) * D, x_ptr + rows[None, :] * D
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        d = start + tl.arange(0, BLOCK_D)
        w = tl.load(w1_row + d[None, :], mask=j_in[:, None] & (d < D)[None, :], other=0.0)
        x = tl.load(x_row + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        if INTERPRETED:  # the interpreter multiplies bf16's bits
            x = x.to(tl.float32)
        w = w.to(x.dtype)
        # Not `total + dot`, which Triton makes one chain over D.
        total += tl.dot(w, x) * ONE
    at = slot * H1 + j
    z = scaled(total, s1_ptr, at[:, None], j_in[:, None], SCALED) + tl.load(b1_ptr + at, mask=j_in, other=0.0)[:, None]
    z = tl.where(z < 0, 0.0, z)  # not maximum(): NaN stays NaN
    k = tl.arange(0, BLOCK_H2)
    if LAYERS == 3:
        k_in = k < H2
        above = w2_ptr + (slot * H2 + k[:, None]) * H1 + j[None, :]
    else:
        k_in = k < 1
        above = w3_ptr + slot * H1 + j[None, :] + k[:, None] * 0
    w2 = tl.load(above, mask=k_in[:, None] & j_in[None, :], other=0.0)
    products = _product(w2, z, INTERPRETED)
    at = (column * (N_PARTS * H2))[None, :] + (part * H2 + k)[:, None]
    tl.store(parts_ptr + at, products, mask=k_in[:, None] & inside[None, :])


@triton.jit
def _finished(
    s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, inside, slot, parts_ptr, H2, N_PARTS: tl.constexpr,
    LAYERS: tl.constexpr, SCALED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_H2: tl.constexpr, LOGITS: tl.constexpr,
    UNROLLED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    column, k = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_H2)
    k_in = k < H2 if LAYERS == 3 else k < 1
    mine = k_in[:, None] & inside[None, :]
    sums, of_state = tl.zeros((BLOCK_H2, COLUMNS), dtype=tl.float32), (column * (N_PARTS * H2))[None, :] + k[:, None]
    for p in tl.range(0, N_PARTS, loop_unroll_factor=UNROLLED):
        sums += tl.load(parts_ptr + p * H2 + of_state, mask=mine, other=0.0, cache_modifier=".cg")
    if LAYERS == 3:
        at = slot * H2 + k
        bias = tl.load(b2_ptr + at, mask=k_in, other=0.0)[:, None]
        z = scaled(sums, s2_ptr, at[:, None], k_in[:, None], SCALED) + bias
        z = tl.where(z < 0, 0.0, z)
        first = tl.arange(0, 16) == 0  # a product has 16 rows
        w3 = tl.load(w3_ptr + at[None, :] + first[:, None] * 0, mask=first[:, None] & k_in[None, :], other=0.0)
        logit = tl.sum(tl.where(first[:, None], _product(w3, z, INTERPRETED), 0.0), axis=0)
    else:
        logit = tl.sum(sums, axis=0)
    return score_of(scaled(logit, s3_ptr, slot, True, SCALED) + tl.load(b3_ptr + slot), LOGITS)


@triton.jit
def part_of_states(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, rows, inside, slot, part, parts_ptr,
    arrived_ptr, out_ptr,
    D, H1, H2, ONE, N_PARTS: tl.constexpr,
    LAYERS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_H2: tl.constexpr, LOGITS: tl.constexpr, STAGES: tl.constexpr, UNROLLED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Do a part of a probe; the last program stores the scores `out [COLUMNS]`. `arrived` is 0 before and after."""
    slot = slot.to(tl.int64)
    _part(
        x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, w3_ptr, rows, inside, slot, part, parts_ptr, D, H1, H2, ONE,
        N_PARTS, LAYERS, SCALED, BLOCK_D, ROWS, COLUMNS, BLOCK_H2, STAGES, INTERPRETED,
    )  # fmt: skip
    tl.debug_barrier()  # store all parts before counting
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == N_PARTS - 1:
        score = _finished(
            s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, inside, slot, parts_ptr, H2, N_PARTS,
            LAYERS, SCALED, COLUMNS, BLOCK_H2, LOGITS, UNROLLED, INTERPRETED,
        )  # fmt: skip
        tl.store(out_ptr + tl.arange(0, COLUMNS), score, mask=inside)
        tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=["M", "N", "P", "BLOCK"])
def _states(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, rows_ptr, slots_ptr, parts_ptr,
    arrived_ptr, out_ptr,
    M, N, P, BLOCK, D, H1, H2, ONE, N_PARTS: tl.constexpr,
    LAYERS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_H2: tl.constexpr, LOGITS: tl.constexpr, STAGES: tl.constexpr, UNROLLED: tl.constexpr,
    INTERPRETED: tl.constexpr, DOES: tl.constexpr,
):  # fmt: skip
    """Score `BLOCK` pairs, at most `COLUMNS`; neighbours of one probe share weights.

    `DOES`: 0, all; 1, parts; 2, the rest, which many states spread over programs.
    """
    program = tl.program_id(0)
    if DOES == 2:
        begin, part = program.to(tl.int64) * BLOCK, program * 0
    else:
        begin, part = (program // N_PARTS).to(tl.int64) * BLOCK, program % N_PARTS
    last = tl.minimum(begin + BLOCK, M)
    i = begin + tl.arange(0, COLUMNS)
    parts_ptr, out_ptr = parts_ptr + begin * N_PARTS * H2, out_ptr + begin
    slots = tl.load(slots_ptr + i, mask=i < last, other=-1)
    rows = tl.load(rows_ptr + i, mask=i < last, other=-1)
    sound = (rows >= 0) & (rows < N) & (slots >= 0) & (slots < P)
    if part == 0:
        tl.store(out_ptr + tl.arange(0, COLUMNS), float("nan"), mask=(i < last) & (sound == 0))
    while begin < last:
        slot = tl.load(slots_ptr + begin)
        end = tl.min(tl.where((i > begin) & (i < last) & (slots != slot), i, last), axis=0)
        inside = sound & (i >= begin) & (i < end)
        if (slot >= 0) & (slot < P):
            if DOES == 0:
                part_of_states(
                    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, rows, inside, slot,
                    part, parts_ptr, arrived_ptr + begin, out_ptr, D, H1, H2, ONE, N_PARTS,
                    LAYERS, SCALED, BLOCK_D, ROWS, COLUMNS, BLOCK_H2, LOGITS, STAGES, UNROLLED, INTERPRETED,
                )  # fmt: skip
            elif DOES == 1:
                _part(
                    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, w3_ptr, rows, inside, slot, part, parts_ptr, D, H1, H2, ONE,
                    N_PARTS, LAYERS, SCALED, BLOCK_D, ROWS, COLUMNS, BLOCK_H2, STAGES, INTERPRETED,
                )  # fmt: skip
            else:
                score = _finished(
                    s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, inside, slot, parts_ptr, H2, N_PARTS,
                    LAYERS, SCALED, COLUMNS, BLOCK_H2, LOGITS, UNROLLED, INTERPRETED,
                )  # fmt: skip
                tl.store(out_ptr + tl.arange(0, COLUMNS), score, mask=inside)
        begin = end


def launches(n_pairs: int, n_states: int, h1: int, h2: int) -> list[tuple[int, int, int, int]]:
    """Return the launches of `_states`: programs, pairs per program, columns, `DOES`.

    A program takes at most as many pairs as there are states, to spread probes.
    """
    n_parts = triton.cdiv(h1, ROWS)
    if n_states >= WIDE and h2 <= WIDE:  # a wider layer would not fit with so many states
        return [
            (triton.cdiv(n_pairs, WIDE) * n_parts, WIDE, WIDE, 1),
            (triton.cdiv(n_pairs, NARROW), NARROW, NARROW, 2),
        ]
    block = min(NARROW, 1 << (n_states.bit_length() - 1))
    return [(triton.cdiv(n_pairs, block) * n_parts, block, NARROW, 0)]


def matrix_meta(h1: int, h2: int, columns: int, n_layers: int, is_int8: bool, logits: bool = False) -> dict[str, Any]:
    """Compile-time sizes of `part_of_states`."""
    block_h2 = max(16, triton.next_power_of_2(h2))
    return {
        "N_PARTS": triton.cdiv(h1, ROWS), "LAYERS": n_layers, "SCALED": is_int8, "BLOCK_D": BLOCK_D, "ROWS": ROWS,
        "COLUMNS": columns, "BLOCK_H2": block_h2, "LOGITS": logits, "STAGES": STAGES[columns],
        "UNROLLED": max(1, min(4, 2048 // (block_h2 * columns))), "INTERPRETED": INTERPRETED,
    }  # fmt: skip

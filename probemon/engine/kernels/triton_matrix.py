"""Triton code that scores one probe with hidden layers for many states at once, on a GPU's matrix units.

    _states[grid](x, *layers, rows, slots, parts, arrived, out, ...)      # launched by `triton_pairs`

For packs in bf16 or int8, whose products with a state in bf16 are exact in fp32. As in `triton_pairs`, a program takes
16 rows of a probe's first layer, over the full length D, and the last one of a probe finishes it. A state is a column
of every product, and columns do not meet: a score has the same bits whether 1 or 64 states are scored, for each column
is summed by the same instructions in the same order. That is why two warps are launched: with four, Triton would take
other instructions for some sizes.
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

ROWS = 16  # rows of a program, which are those of a matrix instruction
BLOCK_D = 128  # of D at a time. Each block is summed by itself and then added: matrix units truncate as they add
WIDE = 64  # states of a program where there are many, otherwise `NARROW`, the fewest that a product can have
NARROW = 8
STAGES = {NARROW: 6, WIDE: 3}  # blocks of D under way; how many does not change a sum
WARPS = 2
INTERPRETED = knobs.runtime.interpret
give_triton_a_folder()


def _n_kept() -> int:
    """Return how many entries Triton's cache has: one for each compiled kernel, and few others."""
    return len(os.listdir(knobs.cache.dir)) if os.path.isdir(knobs.cache.dir) else 0


_N_KEPT = _n_kept()


def n_compiled() -> int:
    """Return how many entries Triton's cache got since this module was imported."""
    return _n_kept() - _N_KEPT


def uses_matrix_units(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether states of `dtype` are scored here: always or never in a process, since the bits are not those of sums
    without matrix units.
    """
    return dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@triton.jit
def scaled(sums, scale_ptr, at, inside, SCALED: tl.constexpr):
    """Multiply sums over rows of int8 weights by the scale of each row."""
    if SCALED:
        sums = sums * tl.load(scale_ptr + at, mask=inside, other=0.0)
    return sums


@triton.jit
def score_of(logit, LOGITS: tl.constexpr):
    """Return the sigmoid of logits; the logits themselves where these are asked for, as they are of softmax groups."""
    if not LOGITS:
        logit = 1.0 / (1.0 + tl.exp(-logit))
    return logit


@triton.jit
def _first_bits(z):
    """Cut fp32 off after the 8 bits that bf16 holds."""
    return (z.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _product(w, z, INTERPRETED: tl.constexpr):
    """Multiply weights in bf16 or int8 by fp32 in three products: an fp32 is the sum of three bf16, exactly."""
    if INTERPRETED:
        total = tl.dot(w.to(tl.float32), z, input_precision="ieee")
    else:
        w, high = w.to(tl.bfloat16), _first_bits(z)
        rest = tl.where(tl.abs(z) < float("inf"), z - high, 0.0)  # what is infinite or no number is so in `high`
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
    """Compute `ROWS` rows of layer 1 of a probe for the states `rows [COLUMNS]` that are `inside`, and store what they
    give to the layer above, `parts [COLUMNS, N_PARTS, H2 or 1]`.

    `ONE` is 1.0, which Triton does not know.
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
        if INTERPRETED:  # Triton's interpreter multiplies the bits of bf16
            x = x.to(tl.float32)
        w = w.to(x.dtype)
        # Not `total + dot`, of which Triton makes one chain over all of D.
        total += tl.dot(w, x) * ONE
    at = slot * H1 + j
    z = scaled(total, s1_ptr, at[:, None], j_in[:, None], SCALED) + tl.load(b1_ptr + at, mask=j_in, other=0.0)[:, None]
    z = tl.where(z < 0, 0.0, z)  # not maximum(): a NaN stays a NaN
    k = tl.arange(0, BLOCK_H2)
    if LAYERS == 3:
        k_in = k < H2
        above = w2_ptr + (slot * H2 + k[:, None]) * H1 + j[None, :]
    else:
        k_in = k < 1
        above = w3_ptr + slot * H1 + j[None, :] + k[:, None] * 0
    w2 = tl.load(above, mask=k_in[:, None] & j_in[None, :], other=0.0)
    given = _product(w2, z, INTERPRETED)
    at = (column * (N_PARTS * H2))[None, :] + (part * H2 + k)[:, None]
    tl.store(parts_ptr + at, given, mask=k_in[:, None] & inside[None, :])


@triton.jit
def _finished(
    s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, inside, slot, parts_ptr, H2, N_PARTS: tl.constexpr,
    LAYERS: tl.constexpr, SCALED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_H2: tl.constexpr, LOGITS: tl.constexpr,
    UNROLLED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return the scores of states from their parts, added up in their order."""
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
        first = tl.arange(0, 16) == 0  # a product has 16 rows, this one needs one
        w3 = tl.load(w3_ptr + at[None, :] + first[:, None] * 0, mask=first[:, None] & k_in[None, :], other=0.0)
        logit = tl.sum(tl.where(first[:, None], _product(w3, z, INTERPRETED), 0.0), axis=0)
    else:
        logit = tl.sum(sums, axis=0)  # of one row, the others are zeros
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
    """Do a part of a probe for some states; the program that is the last to arrive stores their scores.

    `out [COLUMNS]`; `arrived` is an int32 zero, which is zero again afterwards.
    """
    slot = slot.to(tl.int64)
    _part(
        x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, w3_ptr, rows, inside, slot, part, parts_ptr, D, H1, H2, ONE,
        N_PARTS, LAYERS, SCALED, BLOCK_D, ROWS, COLUMNS, BLOCK_H2, STAGES, INTERPRETED,
    )  # fmt: skip
    tl.debug_barrier()  # every thread's part is stored before one of them says so
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
    """Score `BLOCK` pairs, at most `COLUMNS`; those of one probe that stand side by side share what is read of it.

    `DOES`: 0, all of it; or 1, parts alone, and 2, what comes after them, where so many states wait for the last
    program of a probe that others do it sooner.
    """
    program = tl.program_id(0)
    if DOES == 2:
        begin, part = program.to(tl.int64) * BLOCK, program * 0
    else:
        begin, part = (program // N_PARTS).to(tl.int64) * BLOCK, program % N_PARTS
    last = tl.minimum(begin + BLOCK, M)
    i = begin + tl.arange(0, COLUMNS)
    parts_ptr, out_ptr = parts_ptr + begin * N_PARTS * H2, out_ptr + begin  # of the first pair
    slots = tl.load(slots_ptr + i, mask=i < last, other=-1)
    rows = tl.load(rows_ptr + i, mask=i < last, other=-1)
    known = (rows >= 0) & (rows < N) & (slots >= 0) & (slots < P)
    if part == 0:
        tl.store(out_ptr + tl.arange(0, COLUMNS), float("nan"), mask=(i < last) & (known == 0))
    while begin < last:
        slot = tl.load(slots_ptr + begin)
        end = tl.min(tl.where((i > begin) & (i < last) & (slots != slot), i, last), axis=0)
        inside = known & (i >= begin) & (i < end)
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
    """Return the launches of `_states` that score pairs: programs, pairs of each, columns, and what it does.

    A program takes no more pairs than a probe can have, so that probes are spread over programs.
    """
    n_parts = triton.cdiv(h1, ROWS)
    if n_states >= WIDE and h2 <= WIDE:  # the layer above of a wider probe would not fit beside so many states
        return [
            (triton.cdiv(n_pairs, WIDE) * n_parts, WIDE, WIDE, 1),
            (triton.cdiv(n_pairs, NARROW), NARROW, NARROW, 2),
        ]
    block = min(NARROW, 1 << (n_states.bit_length() - 1))
    return [(triton.cdiv(n_pairs, block) * n_parts, block, NARROW, 0)]


def matrix_meta(h1: int, h2: int, columns: int, n_layers: int, is_int8: bool, logits: bool = False) -> dict[str, Any]:
    """Return the compile-time sizes of `part_of_states`."""
    block_h2 = max(16, triton.next_power_of_2(h2))
    return {
        "N_PARTS": triton.cdiv(h1, ROWS), "LAYERS": n_layers, "SCALED": is_int8, "BLOCK_D": BLOCK_D, "ROWS": ROWS,
        "COLUMNS": columns, "BLOCK_H2": block_h2, "LOGITS": logits, "STAGES": STAGES[columns],
        "UNROLLED": max(1, min(4, 2048 // (block_h2 * columns))), "INTERPRETED": INTERPRETED,
    }  # fmt: skip

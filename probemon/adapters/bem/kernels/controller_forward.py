"""Triton kernels of the controller step, forward: the projection (`features`) and the rest (`step`).

Tiles and the order of sums depend only on the controller's sizes. A router's input is a tile `[P, W]` of P parts,
adjacent in memory (`at`), zero outside `inside`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def standardise(x, inside, N: tl.constexpr, EPS: tl.constexpr):
    """Return the LayerNorm of N values without its affine part, and its scale."""
    centred = tl.where(inside, x - tl.sum(x) / N, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / N + EPS)
    return centred * scale, scale


@triton.jit
def hidden_units(
    first_ptr, shift_ptr, last_ptr, y, inside, at, start, k,
    N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return first weights `[BLOCK, P, W]`, hidden units before the SiLU, last weights `[R, BLOCK]`."""
    j = start + tl.arange(0, BLOCK)
    mask_j = j < WIDTH
    first = tl.load(
        first_ptr + j[:, None, None] * N + at[None, :, :], mask=mask_j[:, None, None] & inside[None, :, :], other=0.0
    )
    middle = tl.sum(tl.sum(first * y[None, :, :], axis=2), axis=1) + tl.load(shift_ptr + j, mask=mask_j, other=0.0)
    last = tl.load(last_ptr + k[:, None] * WIDTH + j[None, :], mask=(k < RANK)[:, None] & mask_j[None, :], other=0.0)
    return first, middle, last


@triton.jit
def router(
    gain_ptr, bias_ptr, first_ptr, first_shift_ptr, last_ptr, last_shift_ptr, x, inside, at, k,
    N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Return `MLP(LayerNorm(x))` `[R]`."""
    hat, _scale = standardise(x, inside, N, EPS)
    y = hat * tl.load(gain_ptr + at, mask=inside, other=0.0) + tl.load(bias_ptr + at, mask=inside, other=0.0)
    raw = tl.load(last_shift_ptr + k, mask=k < RANK, other=0.0)
    for start in range(0, WIDTH, BLOCK):
        _first, middle, last = hidden_units(
            first_ptr, first_shift_ptr, last_ptr, y, inside, at, start, k, N, RANK, WIDTH, BLOCK
        )
        raw += tl.sum(last * (middle * tl.sigmoid(middle))[None, :], axis=1)
    return raw


@triton.jit
def _clamp(raw, MAX_NORM: tl.constexpr):
    norm = tl.sqrt(tl.sum(raw * raw, axis=0))
    return raw * tl.where(norm > MAX_NORM, MAX_NORM, norm) / (norm + 1e-8)  # not minimum(): a NaN stays a NaN


@triton.jit(do_not_specialize=["B"])
def features(
    hidden_ptr, real_ptr, gain_ptr, bias_ptr, weight_ptr, shift_ptr, z_ptr, B, D,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute `OUT` features of `ROWS` rows of `z [B, WIDTH]`; padding counts as zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j, lane = tl.program_id(1) * OUT + tl.arange(0, OUT), tl.arange(0, BLOCK)
    read = tl.load(real_ptr + row, mask=row < B, other=0) != 0
    total = tl.zeros((ROWS, BLOCK), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        total += tl.load(
            hidden_ptr + row[:, None] * D + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0
        ).to(ACC)
    mean = tl.sum(total, axis=1) / D
    total = tl.zeros((ROWS, BLOCK), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        x = tl.load(hidden_ptr + row[:, None] * D + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0).to(
            ACC
        )
        centred = tl.where((d < D)[None, :], x - mean[:, None], 0.0)
        total = tl.fma(centred, centred, total)
    scale = 1.0 / tl.sqrt(tl.sum(total, axis=1) / D + EPS)
    sums = tl.zeros((ROWS, OUT, BLOCK), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        x = tl.load(hidden_ptr + row[:, None] * D + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0).to(
            ACC
        )
        y = (x - mean[:, None]) * scale[:, None] * tl.load(gain_ptr + d, mask=d < D, other=0.0)[None, :] + tl.load(
            bias_ptr + d, mask=d < D, other=0.0
        )[None, :]
        weight = tl.load(
            weight_ptr + j[:, None] * D + d[None, :], mask=(j < WIDTH)[:, None] & (d < D)[None, :], other=0.0
        )
        spread = tl.broadcast_to(weight[None, :, :], sums.shape)
        sums = tl.fma(tl.broadcast_to(y[:, None, :], sums.shape), spread, sums)
    z = tl.sum(sums, axis=2) + tl.load(shift_ptr + j, mask=j < WIDTH, other=0.0)[None, :]
    tl.store(z_ptr + row[:, None] * WIDTH + j[None, :], z, mask=(row < B)[:, None] & (j < WIDTH)[None, :])


@triton.jit
def step(  # noqa: PLR0915 (compiled as one)
    z_ptr, real_ptr, n_ptr, open_ptr, code_ptr, summary_ptr, mass_ptr, sure_ptr,
    query_ptr, sure_gain_ptr, sure_bias_ptr, sure_weight_ptr, sure_shift_ptr, heat_ptr,
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, c0_ptr, c1_ptr, c2_ptr, c3_ptr, c4_ptr, c5_ptr, t0_ptr, t1_ptr,
    t2_ptr, t3_ptr, t4_ptr, t5_ptr,
    n_out_ptr, open_out_ptr, code_out_ptr, summary_out_ptr, mass_out_ptr, sure_out_ptr,
    prefix_out_ptr, chunk_out_ptr, token_out_ptr, used_out_ptr, index_out_ptr, boundary_out_ptr, level_out_ptr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PREFIX_CHUNKS: tl.constexpr, LIMIT: tl.constexpr,
    UNDER: tl.constexpr, OVER: tl.constexpr,
    EMA: tl.constexpr, MAX_NORM: tl.constexpr, ROOT: tl.constexpr, EPS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute the codes of a row's token, and the carry. p, c, t: prefix, chunk and token router."""
    row, i, k, part = tl.program_id(0).to(tl.int64), tl.arange(0, W), tl.arange(0, R), tl.arange(0, 2)[:, None]
    mask_i, mask_k = i < WIDTH, k < RANK
    at, inside = part * WIDTH + i[None, :], mask_i[None, :] & (part >= 0)
    real, before = tl.load(real_ptr + row) != 0, tl.load(n_ptr + row)
    z = tl.load(z_ptr + row * WIDTH + i, mask=mask_i, other=0.0)
    summary = tl.load(summary_ptr + row * WIDTH + i, mask=mask_i, other=0.0)
    code, sure = tl.load(code_ptr + row * RANK + k, mask=mask_k, other=0.0), tl.load(sure_ptr + row)

    # Codes come from chunks before this token.
    tl.store(used_out_ptr + row, tl.where(real, sure, 0.0))
    if p0_ptr is not None:
        raw = router(
            p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, summary[None, :], mask_i[None, :], i[None, :], k,
            WIDTH, RANK, WIDTH, BLOCK, EPS,
        )  # fmt: skip
        tl.store(prefix_out_ptr + row * RANK + k, tl.where(real, _clamp(raw, MAX_NORM) * sure, 0.0), mask=mask_k)
    if c0_ptr is not None:
        tl.store(chunk_out_ptr + row * RANK + k, tl.where(real, code, 0.0), mask=mask_k)
    if t0_ptr is not None:
        token_input = tl.where(part == 0, z[None, :], summary[None, :])
        raw = router(
            t0_ptr,
            t1_ptr,
            t2_ptr,
            t3_ptr,
            t4_ptr,
            t5_ptr,
            token_input,
            inside,
            at,
            k,
            2 * WIDTH,
            RANK,
            WIDTH,
            BLOCK,
            EPS,
        )
        tl.store(token_out_ptr + row * RANK + k, tl.where(real, _clamp(raw, MAX_NORM) * sure, 0.0), mask=mask_k)
    after = before + real.to(tl.int64)
    tl.store(n_out_ptr + row, after)
    tl.store(index_out_ptr + row, tl.where(real, before // SIZE, -1))
    tl.store(boundary_out_ptr + row, real & (before % SIZE == 0))
    if level_out_ptr is not None:
        tl.store(level_out_ptr + row, tl.where(after - 1 < LIMIT, UNDER, OVER))

    if real & (before % SIZE == SIZE - 1):  # completes its chunk
        query, mass = tl.load(query_ptr + i, mask=mask_i, other=0.0), tl.load(mass_ptr + row)
        # One-pass softmax, relative to the largest score yet.
        top, shares, weighted, sums = mass, tl.full((), 1.0, dtype=ACC), summary, tl.zeros_like(z)
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            slot_mask = (slot < SIZE)[:, None] & mask_i[None, :]
            x = tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=slot_mask, other=0.0)
            x = tl.where((slot == SIZE - 1)[:, None], z[None, :], x)
            tl.store(open_out_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], tl.zeros_like(x), mask=slot_mask)
            score = tl.where(slot < SIZE, tl.sum(x * query[None, :], axis=1) / ROOT, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=0))
            share, decay = tl.exp(score - higher), tl.exp(top - higher)
            shares = shares * decay + tl.sum(share, axis=0)
            weighted = weighted * decay + tl.sum(share[:, None] * x, axis=0)
            sums += tl.sum(x, axis=0)
            top = higher
        grows = before // SIZE < PREFIX_CHUNKS
        summary = tl.where(grows, weighted / shares, summary)
        tl.store(summary_out_ptr + row * WIDTH + i, summary, mask=mask_i)
        tl.store(mass_out_ptr + row, tl.where(grows, top + tl.log(shares), mass))
        chunk_input = tl.where(part == 0, (sums / SIZE)[None, :], summary[None, :])
        hat, _scale = standardise(chunk_input, inside, 2 * WIDTH, EPS)
        y = hat * tl.load(sure_gain_ptr + at, mask=inside, other=0.0) + tl.load(
            sure_bias_ptr + at, mask=inside, other=0.0
        )
        logit = tl.sum(y * tl.load(sure_weight_ptr + at, mask=inside, other=0.0)) + tl.load(sure_shift_ptr)
        sure = tl.sigmoid(logit / tl.exp(tl.load(heat_ptr)))
        tl.store(sure_out_ptr + row, sure)
        if c0_ptr is not None:
            raw = router(
                c0_ptr,
                c1_ptr,
                c2_ptr,
                c3_ptr,
                c4_ptr,
                c5_ptr,
                chunk_input,
                inside,
                at,
                k,
                2 * WIDTH,
                RANK,
                WIDTH,
                BLOCK,
                EPS,
            )
            code = _clamp(raw, MAX_NORM) * sure * (1.0 - EMA) + code * EMA
        tl.store(code_out_ptr + row * RANK + k, code, mask=mask_k)
    else:
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            slot_mask = (slot < SIZE)[:, None] & mask_i[None, :]
            x = tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=slot_mask, other=0.0)
            x = tl.where((real & (slot == before % SIZE))[:, None], z[None, :], x)
            tl.store(open_out_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], x, mask=slot_mask)
        tl.store(code_out_ptr + row * RANK + k, code, mask=mask_k)
        tl.store(summary_out_ptr + row * WIDTH + i, summary, mask=mask_i)
        tl.store(mass_out_ptr + row, tl.load(mass_ptr + row))
        tl.store(sure_out_ptr + row, sure)

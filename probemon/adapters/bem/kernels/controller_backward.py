"""Triton kernels of the controller step, backward. `grad_z` is the gradient of `z`."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from probemon.adapters.bem.kernels.controller_forward import hidden_units, router, standardise


@triton.jit
def _standardise_back(grad, hat, scale, inside, N: tl.constexpr):
    return tl.where(inside, (grad - tl.sum(grad) / N - hat * (tl.sum(grad * hat) / N)) * scale, 0.0)


@triton.jit
def _router_back(
    gain_ptr, bias_ptr, first_ptr, first_shift_ptr, last_ptr, last_shift_ptr, x, inside, at, k, grad, sure, parts_ptr,
    N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    MAX_NORM: tl.constexpr,
):  # fmt: skip
    """Return the gradients of x and `sure`, given `grad [R]` of `_clamp(router(x)) * sure`.

    `parts`: normalised x and its gradient `[N]`; hidden units and their gradients before the SiLU `[WIDTH]`; the
    output's gradient `[RANK]`.
    """
    raw = router(
        gain_ptr, bias_ptr, first_ptr, first_shift_ptr, last_ptr, last_shift_ptr, x, inside, at, k,
        N, RANK, WIDTH, BLOCK, EPS,
    )  # fmt: skip
    norm = tl.sqrt(tl.sum(raw * raw, axis=0))
    over = norm > MAX_NORM
    limited = tl.where(over, MAX_NORM, norm)
    grad_sure = tl.sum(grad * raw, axis=0) * limited / (norm + 1e-8)
    grad = grad * sure
    slope = (tl.where(over, 0.0, 1.0) - limited / (norm + 1e-8)) / (norm + 1e-8)
    direction = raw / tl.where(norm > 0, norm, 1.0)  # as in torch, 0 for zeros
    grad_raw = grad * limited / (norm + 1e-8) + direction * (slope * tl.sum(grad * raw, axis=0))
    hat, scale = standardise(x, inside, N, EPS)
    gain = tl.load(gain_ptr + at, mask=inside, other=0.0)
    y = hat * gain + tl.load(bias_ptr + at, mask=inside, other=0.0)
    grad_y = tl.zeros_like(x)
    for start in range(0, WIDTH, BLOCK):
        first, middle, last = hidden_units(
            first_ptr, first_shift_ptr, last_ptr, y, inside, at, start, k, N, RANK, WIDTH, BLOCK
        )
        gate = tl.sigmoid(middle)
        grad_middle = tl.sum(last * grad_raw[:, None], axis=0) * gate * (1.0 + middle * (1.0 - gate))
        j = start + tl.arange(0, BLOCK)
        tl.store(parts_ptr + 2 * N + j, middle * gate, mask=j < WIDTH)
        tl.store(parts_ptr + 2 * N + WIDTH + j, grad_middle, mask=j < WIDTH)
        grad_y += tl.sum(first * grad_middle[:, None, None], axis=0)
    tl.store(parts_ptr + at, hat, mask=inside)
    tl.store(parts_ptr + N + at, grad_y, mask=inside)
    tl.store(parts_ptr + 2 * N + 2 * WIDTH + k, grad_raw, mask=k < RANK)
    return _standardise_back(grad_y * gain, hat, scale, inside, N), grad_sure


@triton.jit
def step_back(  # noqa: PLR0915 (compiled as one)
    z_ptr, real_ptr, n_ptr, open_ptr, code_ptr, summary_ptr, mass_ptr, sure_ptr,
    query_ptr, sure_gain_ptr, sure_bias_ptr, sure_weight_ptr, sure_shift_ptr, heat_ptr,
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, c0_ptr, c1_ptr, c2_ptr, c3_ptr, c4_ptr, c5_ptr, t0_ptr, t1_ptr,
    t2_ptr, t3_ptr, t4_ptr, t5_ptr,
    summary_out_ptr, mass_out_ptr, sure_out_ptr,
    grad_z_out_ptr, grad_open_out_ptr, grad_code_out_ptr, grad_summary_out_ptr, grad_mass_out_ptr, grad_sure_out_ptr,
    grad_prefix_out_ptr, grad_chunk_out_ptr, grad_token_out_ptr, grad_used_out_ptr,
    grad_z_ptr, grad_open_ptr, grad_code_ptr, grad_summary_ptr, grad_mass_ptr, grad_sure_ptr, parts_ptr,
    PARTS: tl.constexpr, AT_PREFIX: tl.constexpr, AT_CHUNK: tl.constexpr, AT_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PREFIX_CHUNKS: tl.constexpr,
    EMA: tl.constexpr, MAX_NORM: tl.constexpr, ROOT: tl.constexpr, EPS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute a row's gradients of z and the carry, `grad_..`, from those of the outputs, `grad_.._out`.

    `parts [B, PARTS]`, initially zero, to be summed: gradients of the query `[WIDTH]`, confidence logit and log
    temperature; the normalised chunk input `[2 WIDTH]`; each router's parts.
    """
    row, i, k, part = tl.program_id(0).to(tl.int64), tl.arange(0, W), tl.arange(0, R), tl.arange(0, 2)[:, None]
    mask_i, mask_k = i < WIDTH, k < RANK
    at, inside = part * WIDTH + i[None, :], mask_i[None, :] & (part >= 0)
    real, before, row_parts = tl.load(real_ptr + row) != 0, tl.load(n_ptr + row), parts_ptr + row * PARTS
    z = tl.load(z_ptr + row * WIDTH + i, mask=mask_i, other=0.0)
    summary = tl.load(summary_ptr + row * WIDTH + i, mask=mask_i, other=0.0)
    sure = tl.load(sure_ptr + row)
    grad_z = tl.load(grad_z_out_ptr + row * WIDTH + i, mask=mask_i, other=0.0)
    grad_now = tl.load(grad_code_out_ptr + row * RANK + k, mask=mask_k, other=0.0)
    grad_summary = tl.load(grad_summary_out_ptr + row * WIDTH + i, mask=mask_i, other=0.0)
    grad_mass = tl.load(grad_mass_out_ptr + row)
    grad_after = tl.load(grad_sure_out_ptr + row)  # of the next chunk's confidence
    grad_sure, grad_code = tl.where(real, tl.load(grad_used_out_ptr + row), 0.0), tl.zeros_like(grad_now)
    # grad_summary is of the new summary.
    grad_old_summary = tl.zeros_like(z)
    if p0_ptr is not None:
        grad = tl.where(real, tl.load(grad_prefix_out_ptr + row * RANK + k, mask=mask_k, other=0.0), 0.0)
        grad_input, grad_confidence = _router_back(
            p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, summary[None, :], mask_i[None, :], i[None, :], k, grad,
            sure, row_parts + AT_PREFIX,
            WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
        )  # fmt: skip
        grad_old_summary += tl.sum(grad_input, axis=0)
        grad_sure += grad_confidence
    if c0_ptr is not None:
        grad_code += tl.where(real, tl.load(grad_chunk_out_ptr + row * RANK + k, mask=mask_k, other=0.0), 0.0)
    if t0_ptr is not None:
        grad = tl.where(real, tl.load(grad_token_out_ptr + row * RANK + k, mask=mask_k, other=0.0), 0.0)
        grad_input, grad_confidence = _router_back(
            t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr, tl.where(part == 0, z[None, :], summary[None, :]), inside,
            at, k, grad, sure, row_parts + AT_TOKEN,
            2 * WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
        )  # fmt: skip
        grad_z += tl.sum(tl.where(part == 0, grad_input, 0.0), axis=0)
        grad_old_summary += tl.sum(tl.where(part == 1, grad_input, 0.0), axis=0)
        grad_sure += grad_confidence

    if real & (before % SIZE == SIZE - 1):
        query, mass = tl.load(query_ptr + i, mask=mask_i, other=0.0), tl.load(mass_ptr + row)
        after = tl.load(summary_out_ptr + row * WIDTH + i, mask=mask_i, other=0.0)
        total, sure = tl.load(mass_out_ptr + row), tl.load(sure_out_ptr + row)
        sums = tl.zeros_like(z)
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            slot_mask = (slot < SIZE - 1)[:, None] & mask_i[None, :]
            sums += tl.sum(
                tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=slot_mask, other=0.0), axis=0
            )
        chunk_input = tl.where(part == 0, ((sums + z) / SIZE)[None, :], after[None, :])
        grad_chunk_input = tl.zeros_like(chunk_input)
        if c0_ptr is not None:
            grad_chunk_input, grad_confidence = _router_back(
                c0_ptr, c1_ptr, c2_ptr, c3_ptr, c4_ptr, c5_ptr, chunk_input, inside, at, k, grad_now * (1.0 - EMA),
                sure, row_parts + AT_CHUNK,
                2 * WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
            )  # fmt: skip
            grad_after += grad_confidence
            grad_now = grad_now * EMA
        hat, scale = standardise(chunk_input, inside, 2 * WIDTH, EPS)
        gain = tl.load(sure_gain_ptr + at, mask=inside, other=0.0)
        weight = tl.load(sure_weight_ptr + at, mask=inside, other=0.0)
        logit = tl.sum((hat * gain + tl.load(sure_bias_ptr + at, mask=inside, other=0.0)) * weight) + tl.load(
            sure_shift_ptr
        )
        grad_logit = grad_after * sure * (1.0 - sure) / tl.exp(tl.load(heat_ptr))
        grad_chunk_input += _standardise_back(grad_logit * weight * gain, hat, scale, inside, 2 * WIDTH)
        tl.store(row_parts + WIDTH, grad_logit)
        tl.store(row_parts + WIDTH + 1, -grad_logit * logit)
        tl.store(row_parts + WIDTH + 2 + at, hat, mask=inside)
        grad_mean = tl.sum(tl.where(part == 0, grad_chunk_input, 0.0), axis=0) / SIZE
        grad_summary += tl.sum(tl.where(part == 1, grad_chunk_input, 0.0), axis=0)
        # Weights: exp(mass - total) of the old summary, exp(score - total) of tokens.
        grows = before // SIZE < PREFIX_CHUNKS
        along, grad_query = tl.sum(grad_summary * after, axis=0) - grad_mass, tl.zeros_like(z)
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            slot_mask = (slot < SIZE)[:, None] & mask_i[None, :]
            x = tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=slot_mask, other=0.0)
            x = tl.where((slot == SIZE - 1)[:, None], z[None, :], x)
            share = tl.where((slot < SIZE) & grows, tl.exp(tl.sum(x * query[None, :], axis=1) / ROOT - total), 0.0)
            grad_score = share * (tl.sum(x * grad_summary[None, :], axis=1) - along) / ROOT
            grad_x = grad_mean[None, :] + share[:, None] * grad_summary[None, :] + grad_score[:, None] * query[None, :]
            grad_query += tl.sum(grad_score[:, None] * x, axis=0)
            tl.store(
                grad_open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :],
                tl.where((slot < SIZE - 1)[:, None], grad_x, 0.0),
                mask=slot_mask,
            )
            grad_z += tl.sum(tl.where((slot == SIZE - 1)[:, None], grad_x, 0.0), axis=0)
        tl.store(row_parts + i, grad_query, mask=mask_i)
        share = tl.exp(mass - total)
        grad_mass = tl.where(grows, share * (tl.sum(summary * grad_summary, axis=0) - along), grad_mass)
        grad_summary = tl.where(grows, share * grad_summary, grad_summary)
    else:
        grad_sure += grad_after
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            slot_mask = (slot < SIZE)[:, None] & mask_i[None, :]
            grad_x = tl.load(
                grad_open_out_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=slot_mask, other=0.0
            )
            taken = (real & (slot == before % SIZE))[:, None]
            tl.store(
                grad_open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :],
                tl.where(taken, 0.0, grad_x),
                mask=slot_mask,
            )
            grad_z += tl.sum(tl.where(taken, grad_x, 0.0), axis=0)
    tl.store(grad_z_ptr + row * WIDTH + i, grad_z, mask=mask_i)
    tl.store(grad_code_ptr + row * RANK + k, grad_code + grad_now, mask=mask_k)
    tl.store(grad_summary_ptr + row * WIDTH + i, grad_old_summary + grad_summary, mask=mask_i)
    tl.store(grad_mass_ptr + row, grad_mass)
    tl.store(grad_sure_ptr + row, grad_sure)


@triton.jit
def features_back(
    hidden_ptr, real_ptr, gain_ptr, weight_ptr, grad_z_ptr, hat_ptr, grad_y_ptr, moments_ptr, D,
    WIDTH: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute normalised hidden states `[D]`, the gradient after the LayerNorm `[D]`, scale and two means."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    n_read = tl.where(tl.load(real_ptr + row) != 0, D, 0)
    total = tl.zeros((BLOCK,), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        total += tl.load(hidden_ptr + row * D + d, mask=d < n_read, other=0.0).to(ACC)
    mean = tl.sum(total, axis=0) / D
    total = tl.zeros((BLOCK,), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        centred = tl.where(d < D, tl.load(hidden_ptr + row * D + d, mask=d < n_read, other=0.0).to(ACC) - mean, 0.0)
        total += centred * centred
    scale = 1.0 / tl.sqrt(tl.sum(total, axis=0) / D + EPS)
    plain, along = tl.zeros((BLOCK,), dtype=ACC), tl.zeros((BLOCK,), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        hat = tl.where(
            d < D, (tl.load(hidden_ptr + row * D + d, mask=d < n_read, other=0.0).to(ACC) - mean) * scale, 0.0
        )
        grad_y = tl.zeros((BLOCK,), dtype=ACC)
        for first in range(0, WIDTH, OUT):
            j = first + tl.arange(0, OUT)
            weight = tl.load(
                weight_ptr + j[:, None] * D + d[None, :], mask=(j < WIDTH)[:, None] & (d < D)[None, :], other=0.0
            )
            grad_y += tl.sum(weight * tl.load(grad_z_ptr + row * WIDTH + j, mask=j < WIDTH, other=0.0)[:, None], axis=0)
        tl.store(hat_ptr + row * D + d, hat, mask=d < D)
        tl.store(grad_y_ptr + row * D + d, grad_y, mask=d < D)
        grad_hat = grad_y * tl.load(gain_ptr + d, mask=d < D, other=0.0)
        plain += grad_hat
        along += grad_hat * hat
    tl.store(moments_ptr + row * 3, scale)
    tl.store(moments_ptr + row * 3 + 1, tl.sum(plain, axis=0) / D)
    tl.store(moments_ptr + row * 3 + 2, tl.sum(along, axis=0) / D)

"""The Triton kernels of the controller's step, backward: gradients of a row, and what sums over rows are made of.

    step_back[(rows,)](...)
    features_back[(rows,)](...)

`probemon.adapters.bem.kernels.controller` launches them, a program a row. A gradient is named for what it is of: `of_z`
is that of `z`.
"""

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
    """Return the gradients of x and of `sure` for that of `_clamp(router(x)) * sure`, `grad [R]`.

    `parts`: x after its LayerNorm without the affine part, and the gradient after it `[N]`; hidden units `[WIDTH]` and
    their gradients before the SiLU; the gradient of the router's output `[RANK]`.
    """
    raw = router(
        gain_ptr, bias_ptr, first_ptr, first_shift_ptr, last_ptr, last_shift_ptr, x, inside, at, k,
        N, RANK, WIDTH, BLOCK, EPS,
    )  # fmt: skip
    norm = tl.sqrt(tl.sum(raw * raw, axis=0))
    over = norm > MAX_NORM
    limited = tl.where(over, MAX_NORM, norm)
    of_sure = tl.sum(grad * raw, axis=0) * limited / (norm + 1e-8)
    grad = grad * sure
    slope = (tl.where(over, 0.0, 1.0) - limited / (norm + 1e-8)) / (norm + 1e-8)
    direction = raw / tl.where(norm > 0, norm, 1.0)  # as in torch, the gradient of the norm of zeros is 0
    of_raw = grad * limited / (norm + 1e-8) + direction * (slope * tl.sum(grad * raw, axis=0))
    hat, scale = standardise(x, inside, N, EPS)
    gain = tl.load(gain_ptr + at, mask=inside, other=0.0)
    y = hat * gain + tl.load(bias_ptr + at, mask=inside, other=0.0)
    of_y = tl.zeros_like(x)
    for start in range(0, WIDTH, BLOCK):
        first, middle, last = hidden_units(
            first_ptr, first_shift_ptr, last_ptr, y, inside, at, start, k, N, RANK, WIDTH, BLOCK
        )
        gate = tl.sigmoid(middle)
        of_middle = tl.sum(last * of_raw[:, None], axis=0) * gate * (1.0 + middle * (1.0 - gate))
        j = start + tl.arange(0, BLOCK)
        tl.store(parts_ptr + 2 * N + j, middle * gate, mask=j < WIDTH)
        tl.store(parts_ptr + 2 * N + WIDTH + j, of_middle, mask=j < WIDTH)
        of_y += tl.sum(first * of_middle[:, None, None], axis=0)
    tl.store(parts_ptr + at, hat, mask=inside)
    tl.store(parts_ptr + N + at, of_y, mask=inside)
    tl.store(parts_ptr + 2 * N + 2 * WIDTH + k, of_raw, mask=k < RANK)
    return _standardise_back(of_y * gain, hat, scale, inside, N), of_sure


@triton.jit
def step_back(  # noqa: PLR0915 (compiled as one)
    z_ptr, real_ptr, n_ptr, open_ptr, code_ptr, summary_ptr, mass_ptr, sure_ptr,
    query_ptr, sure_gain_ptr, sure_bias_ptr, sure_weight_ptr, sure_shift_ptr, heat_ptr,
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, c0_ptr, c1_ptr, c2_ptr, c3_ptr, c4_ptr, c5_ptr, t0_ptr, t1_ptr,
    t2_ptr, t3_ptr, t4_ptr, t5_ptr,
    summary_out_ptr, mass_out_ptr, sure_out_ptr,
    of_z_out_ptr, of_open_out_ptr, of_code_out_ptr, of_summary_out_ptr, of_mass_out_ptr, of_sure_out_ptr,
    of_prefix_out_ptr, of_chunk_out_ptr, of_token_out_ptr, of_used_out_ptr,
    of_z_ptr, of_open_ptr, of_code_ptr, of_summary_ptr, of_mass_ptr, of_sure_ptr, parts_ptr,
    PARTS: tl.constexpr, AT_PREFIX: tl.constexpr, AT_CHUNK: tl.constexpr, AT_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PREFIX_CHUNKS: tl.constexpr,
    EMA: tl.constexpr, MAX_NORM: tl.constexpr, ROOT: tl.constexpr, EPS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute a row's gradients of z and of the carry, `of_..`, from those of the outputs of `step`, `of_.._out`.

    `parts [B, PARTS]`, zeros at first, is what sums over rows are made of: the gradients of the query `[WIDTH]`, of the
    confidence's logit and of the log temperature; the mean and summary of a complete chunk after the LayerNorm
    `[2 WIDTH]`; and the parts of each router.
    """
    row, i, k, part = tl.program_id(0).to(tl.int64), tl.arange(0, W), tl.arange(0, R), tl.arange(0, 2)[:, None]
    of_i, of_k = i < WIDTH, k < RANK
    at, inside = part * WIDTH + i[None, :], of_i[None, :] & (part >= 0)
    real, before, row_parts = tl.load(real_ptr + row) != 0, tl.load(n_ptr + row), parts_ptr + row * PARTS
    z = tl.load(z_ptr + row * WIDTH + i, mask=of_i, other=0.0)
    summary = tl.load(summary_ptr + row * WIDTH + i, mask=of_i, other=0.0)
    sure = tl.load(sure_ptr + row)
    of_z = tl.load(of_z_out_ptr + row * WIDTH + i, mask=of_i, other=0.0)
    of_now = tl.load(of_code_out_ptr + row * RANK + k, mask=of_k, other=0.0)
    of_summary = tl.load(of_summary_out_ptr + row * WIDTH + i, mask=of_i, other=0.0)
    of_mass = tl.load(of_mass_out_ptr + row)
    of_after = tl.load(of_sure_out_ptr + row)  # of the confidence of the chunk that is open afterwards
    of_sure, of_code = tl.where(real, tl.load(of_used_out_ptr + row), 0.0), tl.zeros_like(of_now)
    # What the routers of token and prefix give to the old summary; of_summary is of the new one, until the end.
    of_old_summary = tl.zeros_like(z)
    if p0_ptr is not None:
        grad = tl.where(real, tl.load(of_prefix_out_ptr + row * RANK + k, mask=of_k, other=0.0), 0.0)
        of_input, sure_grad = _router_back(
            p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, summary[None, :], of_i[None, :], i[None, :], k, grad, sure,
            row_parts + AT_PREFIX,
            WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
        )  # fmt: skip
        of_old_summary += tl.sum(of_input, axis=0)
        of_sure += sure_grad
    if c0_ptr is not None:
        of_code += tl.where(real, tl.load(of_chunk_out_ptr + row * RANK + k, mask=of_k, other=0.0), 0.0)
    if t0_ptr is not None:
        grad = tl.where(real, tl.load(of_token_out_ptr + row * RANK + k, mask=of_k, other=0.0), 0.0)
        of_input, sure_grad = _router_back(
            t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr, tl.where(part == 0, z[None, :], summary[None, :]), inside,
            at, k, grad, sure, row_parts + AT_TOKEN,
            2 * WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
        )  # fmt: skip
        of_z += tl.sum(tl.where(part == 0, of_input, 0.0), axis=0)
        of_old_summary += tl.sum(tl.where(part == 1, of_input, 0.0), axis=0)
        of_sure += sure_grad

    if real & (before % SIZE == SIZE - 1):
        query, mass = tl.load(query_ptr + i, mask=of_i, other=0.0), tl.load(mass_ptr + row)
        after = tl.load(summary_out_ptr + row * WIDTH + i, mask=of_i, other=0.0)
        total, sure = tl.load(mass_out_ptr + row), tl.load(sure_out_ptr + row)
        sums = tl.zeros_like(z)
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            kept = (slot < SIZE - 1)[:, None] & of_i[None, :]
            sums += tl.sum(
                tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=kept, other=0.0), axis=0
            )
        chunk_input = tl.where(part == 0, ((sums + z) / SIZE)[None, :], after[None, :])
        of_chunk_input = tl.zeros_like(chunk_input)
        if c0_ptr is not None:
            of_chunk_input, sure_grad = _router_back(
                c0_ptr, c1_ptr, c2_ptr, c3_ptr, c4_ptr, c5_ptr, chunk_input, inside, at, k, of_now * (1.0 - EMA), sure,
                row_parts + AT_CHUNK,
                2 * WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
            )  # fmt: skip
            of_after += sure_grad
            of_now = of_now * EMA
        hat, scale = standardise(chunk_input, inside, 2 * WIDTH, EPS)
        gain = tl.load(sure_gain_ptr + at, mask=inside, other=0.0)
        weight = tl.load(sure_weight_ptr + at, mask=inside, other=0.0)
        logit = tl.sum((hat * gain + tl.load(sure_bias_ptr + at, mask=inside, other=0.0)) * weight) + tl.load(
            sure_shift_ptr
        )
        of_logit = of_after * sure * (1.0 - sure) / tl.exp(tl.load(heat_ptr))
        of_chunk_input += _standardise_back(of_logit * weight * gain, hat, scale, inside, 2 * WIDTH)
        tl.store(row_parts + WIDTH, of_logit)
        tl.store(row_parts + WIDTH + 1, -of_logit * logit)
        tl.store(row_parts + WIDTH + 2 + at, hat, mask=inside)
        of_mean = tl.sum(tl.where(part == 0, of_chunk_input, 0.0), axis=0) / SIZE
        of_summary += tl.sum(tl.where(part == 1, of_chunk_input, 0.0), axis=0)
        # The summary after is that before and the chunk's tokens, weighted by exp(mass - total) and exp(score - total).
        grows = before // SIZE < PREFIX_CHUNKS
        along, of_query = tl.sum(of_summary * after, axis=0) - of_mass, tl.zeros_like(z)
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            kept = (slot < SIZE)[:, None] & of_i[None, :]
            x = tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=kept, other=0.0)
            x = tl.where((slot == SIZE - 1)[:, None], z[None, :], x)
            share = tl.where((slot < SIZE) & grows, tl.exp(tl.sum(x * query[None, :], axis=1) / ROOT - total), 0.0)
            of_score = share * (tl.sum(x * of_summary[None, :], axis=1) - along) / ROOT
            of_x = of_mean[None, :] + share[:, None] * of_summary[None, :] + of_score[:, None] * query[None, :]
            of_query += tl.sum(of_score[:, None] * x, axis=0)
            tl.store(
                of_open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :],
                tl.where((slot < SIZE - 1)[:, None], of_x, 0.0),
                mask=kept,
            )
            of_z += tl.sum(tl.where((slot == SIZE - 1)[:, None], of_x, 0.0), axis=0)
        tl.store(row_parts + i, of_query, mask=of_i)
        share = tl.exp(mass - total)
        of_mass = tl.where(grows, share * (tl.sum(summary * of_summary, axis=0) - along), of_mass)
        of_summary = tl.where(grows, share * of_summary, of_summary)
    else:
        of_sure += of_after
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            kept = (slot < SIZE)[:, None] & of_i[None, :]
            of_x = tl.load(of_open_out_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=kept, other=0.0)
            taken = (real & (slot == before % SIZE))[:, None]
            tl.store(
                of_open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], tl.where(taken, 0.0, of_x), mask=kept
            )
            of_z += tl.sum(tl.where(taken, of_x, 0.0), axis=0)
    tl.store(of_z_ptr + row * WIDTH + i, of_z, mask=of_i)
    tl.store(of_code_ptr + row * RANK + k, of_code + of_now, mask=of_k)
    tl.store(of_summary_ptr + row * WIDTH + i, of_old_summary + of_summary, mask=of_i)
    tl.store(of_mass_ptr + row, of_mass)
    tl.store(of_sure_ptr + row, of_sure)


@triton.jit
def features_back(
    hidden_ptr, real_ptr, gain_ptr, weight_ptr, of_z_ptr, hat_ptr, of_y_ptr, moments_ptr, D,
    WIDTH: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute a row's hidden states after the LayerNorm without its affine part `[D]`, the gradient after it `[D]`, and
    the scale and the two means that its backward takes.
    """
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
        of_y = tl.zeros((BLOCK,), dtype=ACC)
        for first in range(0, WIDTH, OUT):
            j = first + tl.arange(0, OUT)
            weight = tl.load(
                weight_ptr + j[:, None] * D + d[None, :], mask=(j < WIDTH)[:, None] & (d < D)[None, :], other=0.0
            )
            of_y += tl.sum(weight * tl.load(of_z_ptr + row * WIDTH + j, mask=j < WIDTH, other=0.0)[:, None], axis=0)
        tl.store(hat_ptr + row * D + d, hat, mask=d < D)
        tl.store(of_y_ptr + row * D + d, of_y, mask=d < D)
        of_hat = of_y * tl.load(gain_ptr + d, mask=d < D, other=0.0)
        plain += of_hat
        along += of_hat * hat
    tl.store(moments_ptr + row * 3, scale)
    tl.store(moments_ptr + row * 3 + 1, tl.sum(plain, axis=0) / D)
    tl.store(moments_ptr + row * 3 + 2, tl.sum(along, axis=0) / D)

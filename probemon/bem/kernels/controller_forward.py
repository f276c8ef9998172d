"""The Triton kernels of the controller's step, forward and backward, which `probemon.bem.kernels.controller` launches.

    # LayerNorm and Linear over the hidden size
    features[(blocks of rows, blocks of features)](hidden, real, ..., z, ...)
    step[(rows,)](z, real, n, open, ..., **meta)                                       # all the rest, a program a row
    step_back[(rows,)](...), features_back[(rows,)](...)  # the gradients of a row, and what sums over rows are made of

The projection holds nearly all weights: its outputs are spread over programs, which read them at once. What follows
needs all features of a row, and little else. A program computes a row in tiles whose sizes depend on the controller's
alone, in a fixed order, without matrix units or atomics.

A router's input is a tile `[P, W]`: its P parts of `WIDTH` features each lie side by side in memory (`at`), with zeros
beyond (`inside`).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _standardise(x, inside, N: tl.constexpr, EPS: tl.constexpr):
    """LayerNorm of N values without its affine part, zeros outside; and the scale of their distance from the mean."""
    centred = tl.where(inside, x - tl.sum(x) / N, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / N + EPS)
    return centred * scale, scale


@triton.jit
def _standardise_back(grad, hat, scale, inside, N: tl.constexpr):
    return tl.where(inside, (grad - tl.sum(grad) / N - hat * (tl.sum(grad * hat) / N)) * scale, 0.0)


@triton.jit
def _hidden_units(
    first_ptr, shift_ptr, last_ptr, y, inside, at, start, k,
    N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First weights `[BLOCK, P, W]` of `BLOCK` hidden units of a router, their values before the SiLU, and their last
    weights `[R, BLOCK]`.
    """
    j = start + tl.arange(0, BLOCK)
    of_j = j < WIDTH
    first = tl.load(
        first_ptr + j[:, None, None] * N + at[None, :, :], mask=of_j[:, None, None] & inside[None, :, :], other=0.0
    )
    middle = tl.sum(tl.sum(first * y[None, :, :], axis=2), axis=1) + tl.load(shift_ptr + j, mask=of_j, other=0.0)
    last = tl.load(last_ptr + k[:, None] * WIDTH + j[None, :], mask=(k < RANK)[:, None] & of_j[None, :], other=0.0)
    return first, middle, last


@triton.jit
def _router(
    gain_ptr, bias_ptr, first_ptr, first_shift_ptr, last_ptr, last_shift_ptr, x, inside, at, k,
    N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """`MLP(LayerNorm(x))` `[R]`."""
    hat, _scale = _standardise(x, inside, N, EPS)
    y = hat * tl.load(gain_ptr + at, mask=inside, other=0.0) + tl.load(bias_ptr + at, mask=inside, other=0.0)
    raw = tl.load(last_shift_ptr + k, mask=k < RANK, other=0.0)
    for start in range(0, WIDTH, BLOCK):
        _first, middle, last = _hidden_units(
            first_ptr, first_shift_ptr, last_ptr, y, inside, at, start, k, N, RANK, WIDTH, BLOCK
        )
        raw += tl.sum(last * (middle * tl.sigmoid(middle))[None, :], axis=1)
    return raw


@triton.jit
def _clamp(raw, MAX_NORM: tl.constexpr):
    norm = tl.sqrt(tl.sum(raw * raw, axis=0))
    return raw * tl.where(norm > MAX_NORM, MAX_NORM, norm) / (norm + 1e-8)  # not minimum(): a NaN stays a NaN


@triton.jit
def _router_back(
    gain_ptr, bias_ptr, first_ptr, first_shift_ptr, last_ptr, last_shift_ptr, x, inside, at, k, grad, sure, parts_ptr,
    N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    MAX_NORM: tl.constexpr,
):  # fmt: skip
    """Gradients of x and of `sure` for that of `_clamp(_router(x)) * sure`, `grad [R]`.

    `parts`: x after its LayerNorm without the affine part, and the gradient after it `[N]`; hidden units `[WIDTH]` and
    their gradients before the SiLU; the gradient of the router's output `[RANK]`.
    """
    raw = _router(
        gain_ptr, bias_ptr, first_ptr, first_shift_ptr, last_ptr, last_shift_ptr, x, inside, at, k,
        N, RANK, WIDTH, BLOCK, EPS,
    )  # fmt: skip
    norm = tl.sqrt(tl.sum(raw * raw, axis=0))
    over = norm > MAX_NORM
    limited = tl.where(over, MAX_NORM, norm)
    of_sure = tl.sum(grad * raw, axis=0) * limited / (norm + 1e-8)
    grad = grad * sure
    slope = (tl.where(over, 0.0, 1.0) - limited / (norm + 1e-8)) / (norm + 1e-8)
    direction = raw / tl.where(norm > 0, norm, 1.0)  # of no code, the gradient of its norm is taken as 0, as torch does
    of_raw = grad * limited / (norm + 1e-8) + direction * (slope * tl.sum(grad * raw, axis=0))
    hat, scale = _standardise(x, inside, N, EPS)
    gain = tl.load(gain_ptr + at, mask=inside, other=0.0)
    y = hat * gain + tl.load(bias_ptr + at, mask=inside, other=0.0)
    of_y = tl.zeros_like(x)
    for start in range(0, WIDTH, BLOCK):
        first, middle, last = _hidden_units(
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
def features(
    hidden_ptr, real_ptr, gain_ptr, bias_ptr, weight_ptr, shift_ptr, z_ptr, B, D,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute `OUT` features of `ROWS` rows of `z [B, WIDTH]`. A row of padding is not read: it counts as zeros."""
    row, j, lane = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * OUT + tl.arange(0, OUT),
        tl.arange(0, BLOCK),
    )
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
        total += centred * centred
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
        sums += y[:, None, :] * weight[None, :, :]
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
    """Compute the codes of a row's token, and its carry with the token in it. p, c, t: the prefix, chunk and token
    router, None for one that is not there.
    """
    row, i, k, part = tl.program_id(0).to(tl.int64), tl.arange(0, W), tl.arange(0, R), tl.arange(0, 2)[:, None]
    of_i, of_k = i < WIDTH, k < RANK
    at, inside = part * WIDTH + i[None, :], of_i[None, :] & (part >= 0)
    real, before = tl.load(real_ptr + row) != 0, tl.load(n_ptr + row)
    z, summary = (
        tl.load(z_ptr + row * WIDTH + i, mask=of_i, other=0.0),
        tl.load(summary_ptr + row * WIDTH + i, mask=of_i, other=0.0),
    )
    code, sure = tl.load(code_ptr + row * RANK + k, mask=of_k, other=0.0), tl.load(sure_ptr + row)

    # The token's codes come from the chunks that are complete without it.
    tl.store(used_out_ptr + row, tl.where(real, sure, 0.0))
    if p0_ptr is not None:
        raw = _router(
            p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, summary[None, :], of_i[None, :], i[None, :], k,
            WIDTH, RANK, WIDTH, BLOCK, EPS,
        )  # fmt: skip
        tl.store(prefix_out_ptr + row * RANK + k, tl.where(real, _clamp(raw, MAX_NORM) * sure, 0.0), mask=of_k)
    if c0_ptr is not None:
        tl.store(chunk_out_ptr + row * RANK + k, tl.where(real, code, 0.0), mask=of_k)
    if t0_ptr is not None:
        known = tl.where(part == 0, z[None, :], summary[None, :])
        raw = _router(
            t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr, known, inside, at, k, 2 * WIDTH, RANK, WIDTH, BLOCK, EPS
        )
        tl.store(token_out_ptr + row * RANK + k, tl.where(real, _clamp(raw, MAX_NORM) * sure, 0.0), mask=of_k)
    after = before + real.to(tl.int64)
    tl.store(n_out_ptr + row, after)
    tl.store(index_out_ptr + row, tl.where(real, before // SIZE, -1))
    tl.store(boundary_out_ptr + row, real & (before % SIZE == 0))
    if level_out_ptr is not None:
        tl.store(level_out_ptr + row, tl.where(after - 1 < LIMIT, UNDER, OVER))

    if real & (before % SIZE == SIZE - 1):  # it completes its chunk
        query, mass = tl.load(query_ptr + i, mask=of_i, other=0.0), tl.load(mass_ptr + row)
        # A softmax in one pass, which goes on from the prefix so far: weights are relative to the largest score yet,
        # `top`.
        top, shares, grown, sums = mass, tl.full((), 1.0, dtype=ACC), summary, tl.zeros_like(z)
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            kept = (slot < SIZE)[:, None] & of_i[None, :]
            x = tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=kept, other=0.0)
            x = tl.where((slot == SIZE - 1)[:, None], z[None, :], x)
            tl.store(open_out_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], tl.zeros_like(x), mask=kept)
            score = tl.where(slot < SIZE, tl.sum(x * query[None, :], axis=1) / ROOT, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=0))
            share, less = tl.exp(score - higher), tl.exp(top - higher)
            shares = shares * less + tl.sum(share, axis=0)
            grown = grown * less + tl.sum(share[:, None] * x, axis=0)
            sums += tl.sum(x, axis=0)
            top = higher
        grows = before // SIZE < PREFIX_CHUNKS
        summary = tl.where(grows, grown / shares, summary)
        tl.store(summary_out_ptr + row * WIDTH + i, summary, mask=of_i)
        tl.store(mass_out_ptr + row, tl.where(grows, top + tl.log(shares), mass))
        seen = tl.where(part == 0, (sums / SIZE)[None, :], summary[None, :])
        hat, _scale = _standardise(seen, inside, 2 * WIDTH, EPS)
        y = hat * tl.load(sure_gain_ptr + at, mask=inside, other=0.0) + tl.load(
            sure_bias_ptr + at, mask=inside, other=0.0
        )
        logit = tl.sum(y * tl.load(sure_weight_ptr + at, mask=inside, other=0.0)) + tl.load(sure_shift_ptr)
        sure = tl.sigmoid(logit / tl.exp(tl.load(heat_ptr)))
        tl.store(sure_out_ptr + row, sure)
        if c0_ptr is not None:
            raw = _router(
                c0_ptr, c1_ptr, c2_ptr, c3_ptr, c4_ptr, c5_ptr, seen, inside, at, k, 2 * WIDTH, RANK, WIDTH, BLOCK, EPS
            )
            code = _clamp(raw, MAX_NORM) * sure * (1.0 - EMA) + code * EMA
        tl.store(code_out_ptr + row * RANK + k, code, mask=of_k)
    else:
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            kept = (slot < SIZE)[:, None] & of_i[None, :]
            x = tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=kept, other=0.0)
            x = tl.where((real & (slot == before % SIZE))[:, None], z[None, :], x)
            tl.store(open_out_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], x, mask=kept)
        tl.store(code_out_ptr + row * RANK + k, code, mask=of_k)
        tl.store(summary_out_ptr + row * WIDTH + i, summary, mask=of_i)
        tl.store(mass_out_ptr + row, tl.load(mass_ptr + row))
        tl.store(sure_out_ptr + row, sure)


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
    real, before, mine = tl.load(real_ptr + row) != 0, tl.load(n_ptr + row), parts_ptr + row * PARTS
    z, summary = (
        tl.load(z_ptr + row * WIDTH + i, mask=of_i, other=0.0),
        tl.load(summary_ptr + row * WIDTH + i, mask=of_i, other=0.0),
    )
    sure = tl.load(sure_ptr + row)
    of_z, of_now = (
        tl.load(of_z_out_ptr + row * WIDTH + i, mask=of_i, other=0.0),
        tl.load(of_code_out_ptr + row * RANK + k, mask=of_k, other=0.0),
    )
    of_summary, of_mass = (
        tl.load(of_summary_out_ptr + row * WIDTH + i, mask=of_i, other=0.0),
        tl.load(of_mass_out_ptr + row),
    )
    of_after = tl.load(of_sure_out_ptr + row)  # of the confidence of the chunk that is open afterwards
    of_sure, of_code = tl.where(real, tl.load(of_used_out_ptr + row), 0.0), tl.zeros_like(of_now)
    # What the token's own router and the prefix's give to the summary before. of_summary is that of the summary after,
    # until the end.
    of_known = tl.zeros_like(z)
    if p0_ptr is not None:
        grad = tl.where(real, tl.load(of_prefix_out_ptr + row * RANK + k, mask=of_k, other=0.0), 0.0)
        of_input, more = _router_back(
            p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, summary[None, :], of_i[None, :], i[None, :], k, grad, sure,
            mine + AT_PREFIX,
            WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
        )  # fmt: skip
        of_known += tl.sum(of_input, axis=0)
        of_sure += more
    if c0_ptr is not None:
        of_code += tl.where(real, tl.load(of_chunk_out_ptr + row * RANK + k, mask=of_k, other=0.0), 0.0)
    if t0_ptr is not None:
        grad = tl.where(real, tl.load(of_token_out_ptr + row * RANK + k, mask=of_k, other=0.0), 0.0)
        of_input, more = _router_back(
            t0_ptr, t1_ptr, t2_ptr, t3_ptr, t4_ptr, t5_ptr, tl.where(part == 0, z[None, :], summary[None, :]), inside,
            at, k, grad, sure, mine + AT_TOKEN,
            2 * WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
        )  # fmt: skip
        of_z += tl.sum(tl.where(part == 0, of_input, 0.0), axis=0)
        of_known += tl.sum(tl.where(part == 1, of_input, 0.0), axis=0)
        of_sure += more

    if real & (before % SIZE == SIZE - 1):
        query, mass = tl.load(query_ptr + i, mask=of_i, other=0.0), tl.load(mass_ptr + row)
        after, total, sure = (
            tl.load(summary_out_ptr + row * WIDTH + i, mask=of_i, other=0.0),
            tl.load(mass_out_ptr + row),
            tl.load(sure_out_ptr + row),
        )
        sums = tl.zeros_like(z)
        for start in range(0, SIZE, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            kept = (slot < SIZE - 1)[:, None] & of_i[None, :]
            sums += tl.sum(
                tl.load(open_ptr + (row * SIZE + slot[:, None]) * WIDTH + i[None, :], mask=kept, other=0.0), axis=0
            )
        seen = tl.where(part == 0, ((sums + z) / SIZE)[None, :], after[None, :])
        of_seen = tl.zeros_like(seen)
        if c0_ptr is not None:
            of_seen, more = _router_back(
                c0_ptr, c1_ptr, c2_ptr, c3_ptr, c4_ptr, c5_ptr, seen, inside, at, k, of_now * (1.0 - EMA), sure,
                mine + AT_CHUNK,
                2 * WIDTH, RANK, WIDTH, BLOCK, EPS, MAX_NORM,
            )  # fmt: skip
            of_after += more
            of_now = of_now * EMA
        hat, scale = _standardise(seen, inside, 2 * WIDTH, EPS)
        gain, weight = (
            tl.load(sure_gain_ptr + at, mask=inside, other=0.0),
            tl.load(sure_weight_ptr + at, mask=inside, other=0.0),
        )
        logit = tl.sum((hat * gain + tl.load(sure_bias_ptr + at, mask=inside, other=0.0)) * weight) + tl.load(
            sure_shift_ptr
        )
        of_logit = of_after * sure * (1.0 - sure) / tl.exp(tl.load(heat_ptr))
        of_seen += _standardise_back(of_logit * weight * gain, hat, scale, inside, 2 * WIDTH)
        tl.store(mine + WIDTH, of_logit)
        tl.store(mine + WIDTH + 1, -of_logit * logit)
        tl.store(mine + WIDTH + 2 + at, hat, mask=inside)
        of_mean = tl.sum(tl.where(part == 0, of_seen, 0.0), axis=0) / SIZE
        of_summary += tl.sum(tl.where(part == 1, of_seen, 0.0), axis=0)
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
        tl.store(mine + i, of_query, mask=of_i)
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
    tl.store(of_summary_ptr + row * WIDTH + i, of_known + of_summary, mask=of_i)
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
    read = tl.where(tl.load(real_ptr + row) != 0, D, 0)
    total = tl.zeros((BLOCK,), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        total += tl.load(hidden_ptr + row * D + d, mask=d < read, other=0.0).to(ACC)
    mean = tl.sum(total, axis=0) / D
    total = tl.zeros((BLOCK,), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        centred = tl.where(d < D, tl.load(hidden_ptr + row * D + d, mask=d < read, other=0.0).to(ACC) - mean, 0.0)
        total += centred * centred
    scale = 1.0 / tl.sqrt(tl.sum(total, axis=0) / D + EPS)
    plain, along = tl.zeros((BLOCK,), dtype=ACC), tl.zeros((BLOCK,), dtype=ACC)
    for start in range(0, D, BLOCK):
        d = start + lane
        hat = tl.where(d < D, (tl.load(hidden_ptr + row * D + d, mask=d < read, other=0.0).to(ACC) - mean) * scale, 0.0)
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

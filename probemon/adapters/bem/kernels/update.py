"""The generated low-rank update in Triton, forward and backward: for a block of rows, one program makes `x V`, weights
it, and spreads it over `U`.

    update = generated_update(x, V, U, codes, scale)                # scale * ((x V) * codes) U^T
    output = generated_update(x, V, U, codes, scale, base=y)        # y + the same, in one pass

Everything is widened to fp32 on loading (fp64 stays fp64), multiplied and added there, and rounded once, on storing; no
matrix unit is used, so nothing is rounded to tf32. A program takes 8 rows in tiles whose size depends on the weights
alone: a row's result is bitwise the same from run to run and whatever other rows share the batch. Sums over rows
(gradients of V and U) add up parts of consecutive rows, then the parts in their order: there are no atomics. Weights
are read fastest where V^T `[r, in]` and U^T `[r, out]` are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from probemon.adapters.bem.update import MOST_RANK
from probemon.errors import ConfigError
from probemon.util.cache_folders import give_triton_a_folder

ROWS = 8  # of a program. Fixed: a tile that grew with the batch would change the order in which a row's sums are made
PART = 256  # rows of one part of a sum over rows, at least
_MOST_PARTS = 64  # bounds the memory of the parts
_PROGRAMS = 128  # wanted of a launch: where rows are few, several programs share a block, each with its own outputs
_TILE = 16384  # products of a tile, 64 of each of 256 threads; of fp64, for which registers do not suffice, half
# Of a tile. More, which ranks of 1 and 2 would leave room for, need more shared memory than the 99 KB of many chips.
_MOST_COLUMNS = 512
_WARPS = 8
_STAGES = 3  # loads under way while a tile is multiplied
_FARTHEST = (1 << 31) - 1  # place within V or U, which the kernels count in int32: in strided ones a copy is read
give_triton_a_folder()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _load_codes(codes_ptr, row, inside, j, eps, RANK: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes `[ROWS, R]` of rows, and which rows are live. Not `abs > eps`: a NaN is live, so that it is seen."""
    codes = tl.load(
        codes_ptr + row[:, None] * RANK + j[None, :], mask=inside[:, None] & (j < RANK)[None, :], other=0.0
    ).to(ACC)
    return codes, tl.max(tl.where(tl.abs(codes) <= eps, 0, 1), axis=1) > 0


# How many rows there are must not be compiled in: code for one row is other code.
@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator,unused-ignore]
def _over_rows(  # type: ignore[no-untyped-def]
    a_ptr, first_ptr, second_ptr, codes_ptr, base_ptr, sums_ptr, out_ptr,
    M, K, N, A_ROW, BASE_ROW, FIRST_K, FIRST_R, SECOND_N, SECOND_R, N_SHARE, scale, eps,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """`sums [M, RANK]` = a first; `out [M, N]` = base + scale * (sums * codes) second^T; either may be None, and base.
    `N_SHARE` outputs a program.
    """
    row, j = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, R)
    inside, of_rank, lane = row < M, j < RANK, tl.arange(0, BLOCK)
    codes, live = _load_codes(codes_ptr, row, inside, j, eps, RANK, ACC)
    summed = live
    if sums_ptr is not None:
        summed = inside & (live | (eps == 0))  # a code of zero has a gradient; a row that was left out has none
    end = tl.where(tl.max(summed.to(tl.int32), axis=0) > 0, K, 0)
    total = tl.zeros((ROWS, R, BLOCK), dtype=ACC)
    for start in tl.range(0, end, BLOCK, num_stages=STAGES):
        k = start + lane
        a = tl.load(a_ptr + row[:, None] * A_ROW + k[None, :], mask=summed[:, None] & (k < K)[None, :], other=0.0).to(
            ACC
        )
        first = tl.load(
            first_ptr + j[:, None] * FIRST_R + k[None, :] * FIRST_K, mask=of_rank[:, None] & (k < K)[None, :], other=0.0
        ).to(ACC)
        total = tl.fma(
            tl.broadcast_to(a[:, None, :], total.shape), tl.broadcast_to(first[None, :, :], total.shape), total
        )
    sums = tl.where(summed[:, None], tl.sum(total, axis=2), 0.0)
    if sums_ptr is not None and tl.program_id(1) == 0:
        tl.store(sums_ptr + row[:, None] * RANK + j[None, :], sums, mask=inside[:, None] & of_rank[None, :])
    if out_ptr is not None:
        weighted = sums * codes * scale
        read = tl.where(tl.max(live.to(tl.int32), axis=0) > 0, N, 0)
        begin = tl.program_id(1) * N_SHARE
        for start in tl.range(begin, tl.minimum(begin + N_SHARE, N), BLOCK, num_stages=STAGES):
            n = start + lane
            kept = inside[:, None] & (n < N)[None, :]
            second = tl.load(
                second_ptr + j[:, None] * SECOND_R + n[None, :] * SECOND_N,
                mask=of_rank[:, None] & (n < read)[None, :],
                other=0.0,
            )
            update = tl.sum(weighted[:, :, None] * second.to(ACC)[None, :, :], axis=1)
            changed = live[:, None] & (update != 0)
            out = row[:, None] * N + n[None, :]
            if base_ptr is None:
                tl.store(out_ptr + out, tl.where(changed, update, 0.0), mask=kept)
            else:  # what is not changed keeps its bits, the sign of a zero too
                base = tl.load(base_ptr + row[:, None] * BASE_ROW + n[None, :], mask=kept, other=0.0)
                tl.store(out_ptr + out, tl.where(changed, (base.to(ACC) + update).to(base.dtype), base), mask=kept)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _over_columns(  # type: ignore[no-untyped-def]
    a_ptr, sums_ptr, codes_ptr, parts_ptr, M, K, A_ROW, PART_ROWS, scale, eps,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """`parts [n, RANK, K]`: scale * (sums * codes)^T a, of `PART_ROWS` consecutive rows each."""
    k, j, part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R), tl.program_id(1).to(tl.int64)
    begin = part * PART_ROWS
    total = tl.zeros((ROWS, R, BLOCK), dtype=ACC)
    for start in tl.range(begin, tl.minimum(begin + PART_ROWS, M), ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = row < M
        codes, live = _load_codes(codes_ptr, row, inside, j, eps, RANK, ACC)
        sums = tl.load(sums_ptr + row[:, None] * RANK + j[None, :], mask=live[:, None] & (j < RANK)[None, :], other=0.0)
        a = tl.load(a_ptr + row[:, None] * A_ROW + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0).to(ACC)
        weighted = (sums * codes * scale)[:, :, None]
        total = tl.fma(tl.broadcast_to(weighted, total.shape), tl.broadcast_to(a[:, None, :], total.shape), total)
    tl.store(
        parts_ptr + (part * RANK + j[:, None]) * K + k[None, :],
        tl.sum(total, axis=0),
        mask=(j < RANK)[:, None] & (k < K)[None, :],
    )


def tile_meta(rank: int, widest: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return compile-time sizes for weights of this rank, the longer `widest` long, and sums in `dtype`."""
    r = triton.next_power_of_2(rank)
    accumulator, tile = (tl.float64, _TILE // 2) if dtype == torch.float64 else (tl.float32, _TILE)
    block = min(max(triton.next_power_of_2(widest), 16), tile // (ROWS * r), _MOST_COLUMNS)
    # The compiler may fuse no product with a sum: which ones it takes differs between rows of one tile, so a row's bits
    # would depend on its place in the batch. What is to be fused says so (`tl.fma`).
    return {
        "RANK": rank, "R": r, "ROWS": ROWS, "BLOCK": block, "STAGES": _STAGES, "ACC": accumulator, "num_warps": _WARPS,
        "enable_fp_fusion": False,
    }  # fmt: skip


def _launch_rows(
    a: Tensor,
    first: Tensor,
    second: Tensor,
    codes: Tensor,
    base: Tensor | None,
    sums: Tensor | None,
    out: Tensor | None,
    dtype: torch.dtype,
    scale: float,
    eps: float,
) -> None:
    (m, k), (n, rank) = a.shape, second.shape
    if m == 0:
        return
    meta = tile_meta(rank, max(k, n), dtype)
    n_blocks, n_tiles = triton.cdiv(m, ROWS), triton.cdiv(n, meta["BLOCK"]) if out is not None else 1
    share = triton.cdiv(max(n_tiles, 1), max(1, _PROGRAMS // n_blocks))
    with torch.cuda.device_of(a):  # Triton launches on the current device
        _over_rows[(n_blocks, triton.cdiv(max(n_tiles, 1), share))](
            a, first, second, codes, base, sums, out, m, k, n, a.stride(0), 0 if base is None else base.stride(0),
            first.stride(0), first.stride(1), second.stride(0), second.stride(1), share * meta["BLOCK"], scale, eps,
            **meta,
        )  # fmt: skip


def sum_over_rows(a: Tensor, sums: Tensor, codes: Tensor, scale: float, eps: float, like: Tensor) -> Tensor:
    """Return `a^T (scale * sums * codes)`, [columns of a, r], in the dtype of `like`: the gradient of V or U."""
    (m, k), rank = a.shape, like.shape[1]
    part_rows = max(PART, triton.cdiv(triton.cdiv(m, _MOST_PARTS), ROWS) * ROWS)
    parts = torch.empty(triton.cdiv(m, part_rows), rank, k, dtype=sums.dtype, device=a.device)
    if parts.numel():
        meta = tile_meta(rank, k, sums.dtype)
        with torch.cuda.device_of(a):
            _over_columns[(triton.cdiv(k, meta["BLOCK"]), len(parts))](
                a, sums, codes, parts, m, k, a.stride(0), part_rows, scale, eps, **meta
            )
    return parts.sum(dim=0).t().to(like.dtype)


def _rows_contiguous(t: Tensor) -> Tensor:
    """Rows that begin at 16 bytes, too: for others Triton compiles other code."""
    t = t if t.stride(1) == 1 else t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _near(t: Tensor) -> Tensor:
    farthest = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t if farthest <= _FARTHEST else t.contiguous()


class _GeneratedUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, v: Tensor, u: Tensor, codes: Tensor, base: Tensor | None, scale: float, eps: float
    ) -> Tensor:  # type: ignore[override]
        sums = _empty_sums(x, codes) if ctx.needs_input_grad[2] or ctx.needs_input_grad[3] else None
        out = _forward(x=x, v=v, u=u, codes=codes, base=base, sums=sums, scale=scale, eps=eps)
        ctx.save_for_backward(x, v, u, codes, sums)
        ctx.scale, ctx.eps = scale, eps
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, v, u, codes, sums), scale, eps = ctx.saved_tensors, ctx.scale, ctx.eps
        for_x, for_v, for_u, for_codes, for_base = ctx.needs_input_grad[:5]
        grad, of_x, of_v, of_u, of_codes = _rows_contiguous(grad), None, None, None, None
        grad_u = _empty_sums(x, codes) if for_v or for_codes else None
        if for_x or grad_u is not None:  # the forward kernel with V and U in each other's place
            of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if for_x else None
            _launch_rows(
                a=grad,
                first=u,
                second=v,
                codes=codes,
                base=None,
                sums=grad_u,
                out=of_x,
                dtype=_sum_dtype(x),
                scale=scale,
                eps=eps,
            )
        if for_v and grad_u is not None:
            of_v = sum_over_rows(x, grad_u, codes, scale, eps, v)
        if for_codes and grad_u is not None:
            of_codes = (grad_u * sums * scale).to(codes.dtype)
        if for_u:
            of_u = sum_over_rows(grad, sums, codes, scale, eps, u)
        return of_x, of_v, of_u, of_codes, grad if for_base else None, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty_sums(x: Tensor, codes: Tensor) -> Tensor:
    return torch.empty(codes.shape, dtype=_sum_dtype(x), device=x.device)


def _forward(
    x: Tensor, v: Tensor, u: Tensor, codes: Tensor, base: Tensor | None, sums: Tensor | None, scale: float, eps: float
) -> Tensor:
    out = torch.empty(len(x), len(u), dtype=x.dtype if base is None else base.dtype, device=x.device)
    _launch_rows(
        a=x, first=v, second=u, codes=codes, base=base, sums=sums, out=out, dtype=_sum_dtype(x), scale=scale, eps=eps
    )
    return out


def generated_update(
    x: Tensor, V: Tensor, U: Tensor, codes: Tensor, scale: float, *, base: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Return `scale * ((x V) * codes) U^T` [M, out], in the dtype of x; with `base` [M, out], base plus it, in its own.

    x [M, in], V [in, r], U [out, r] of any strides, codes [M, r], r from 1 to 64, all floating and on one device.
    `scale` and `eps` are rounded to fp32. A row whose codes are all `|c| <= eps` is left out: its update is exactly
    zero, its base keeps its bits, and for eps > 0 it makes no gradient; with eps = 0, where leaving out is exact, its
    codes have theirs. Blocks of 8 such rows cost next to nothing.

    It is differentiable once in x, V, U, codes and base. Raises `ConfigError` where they do not fit.
    """
    _check(x, V, U, codes, base, eps)
    x, codes, base = _rows_contiguous(x), codes.contiguous(), base if base is None else _rows_contiguous(base)
    V, U = _near(V), _near(U)
    tensors = [t for t in (x, V, U, codes, base) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _GeneratedUpdate.apply(x, V, U, codes, base, float(scale), float(eps))  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
    return _forward(x=x, v=V, u=U, codes=codes, base=base, sums=None, scale=float(scale), eps=float(eps))


def _check(x: Tensor, v: Tensor, u: Tensor, codes: Tensor, base: Tensor | None, eps: float) -> None:
    """The kernels check no address: what does not fit must not reach them."""
    tensors = {"x": x, "V": v, "U": u, "codes": codes} | ({} if base is None else {"base": base})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    fit = x.dim() == u.dim() == 2
    if fit:
        (m, n_in), (n_out, rank) = x.shape, u.shape
        expected = ((m, n_in), (n_in, rank), (n_out, rank), (m, rank), (m, n_out))
        fit = shapes == dict(zip(tensors, expected, strict=False))
    if not fit:
        raise ConfigError(
            f"shapes {shapes} do not fit: expected x [M, in], V [in, r], U [out, r], codes [M, r], base [M, out];"
            " flatten batch and time to M"
        )
    for name, tensor in tensors.items():
        if tensor.device != x.device or not tensor.is_floating_point():
            raise ConfigError(
                f"{name} is {tensor.dtype} on {tensor.device}, x {x.dtype} on {x.device}: move it there, as a floating"
                " dtype"
            )
    if not 1 <= rank <= MOST_RANK:
        raise ConfigError(f"rank {rank}: the kernel has ranks from 1 to {MOST_RANK}; use the eager update for others")
    if not eps >= 0:
        raise ConfigError(f"eps {eps}: expected 0 or more; rows whose codes are all |c| <= eps are left out")

"""Generated low-rank update in Triton, forward and backward.

    update = generated_update(x, V, U, codes, scale)                # scale * ((x V) * codes) U^T
    output = generated_update(x, V, U, codes, scale, base=y)        # in one pass

Computes in fp32 (fp64 for fp64), without tf32, and rounds once. A row's result is bitwise the same in every run and
batch. Contiguous V^T and U^T are read fastest.
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

ROWS = 8  # per program; fixed, to keep the order of a row's sums
PART = 256  # minimum rows per part of a sum
_MOST_PARTS = 64  # bounds memory
_PROGRAMS = 128  # per launch, if possible
_TILE = 16384  # products per tile; half for fp64, by registers
# Per tile: at ranks 1 and 2, more exceed 99 KB of shared memory.
_MOST_COLUMNS = 512
_WARPS = 8
_STAGES = 3  # loads in flight
_FARTHEST = (1 << 31) - 1  # offsets are int32: farther ones are copied
give_triton_a_folder()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _load_codes(codes_ptr, row, inside, j, eps, RANK: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes `[ROWS, R]` and live rows; not by `abs > eps`, so that NaN is live."""
    codes = tl.load(
        codes_ptr + row[:, None] * RANK + j[None, :], mask=inside[:, None] & (j < RANK)[None, :], other=0.0
    ).to(ACC)
    return codes, tl.max(tl.where(tl.abs(codes) <= eps, 0, 1), axis=1) > 0


# Not specialised on M: code for one row would differ.
@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator,unused-ignore]
def _over_rows(  # type: ignore[no-untyped-def]
    a_ptr, first_ptr, second_ptr, codes_ptr, base_ptr, sums_ptr, out_ptr,
    M, K, N, A_ROW, BASE_ROW, FIRST_K, FIRST_R, SECOND_N, SECOND_R, N_SHARE, scale, eps,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute `sums [M, RANK]` = a first, `out [M, N]` = base + scale * (sums * codes) second^T."""
    row, j = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, R)
    inside, rank_mask, lane = row < M, j < RANK, tl.arange(0, BLOCK)
    codes, live = _load_codes(codes_ptr, row, inside, j, eps, RANK, ACC)
    summed = live
    if sums_ptr is not None:
        summed = inside & (live | (eps == 0))  # zero codes have gradients, skipped rows none
    end = tl.where(tl.max(summed.to(tl.int32), axis=0) > 0, K, 0)
    total = tl.zeros((ROWS, R, BLOCK), dtype=ACC)
    for start in tl.range(0, end, BLOCK, num_stages=STAGES):
        k = start + lane
        a = tl.load(a_ptr + row[:, None] * A_ROW + k[None, :], mask=summed[:, None] & (k < K)[None, :], other=0.0).to(
            ACC
        )
        first = tl.load(
            first_ptr + j[:, None] * FIRST_R + k[None, :] * FIRST_K,
            mask=rank_mask[:, None] & (k < K)[None, :],
            other=0.0,
        ).to(ACC)
        total = tl.fma(
            tl.broadcast_to(a[:, None, :], total.shape), tl.broadcast_to(first[None, :, :], total.shape), total
        )
    sums = tl.where(summed[:, None], tl.sum(total, axis=2), 0.0)
    if sums_ptr is not None and tl.program_id(1) == 0:
        tl.store(sums_ptr + row[:, None] * RANK + j[None, :], sums, mask=inside[:, None] & rank_mask[None, :])
    if out_ptr is not None:
        weighted = sums * codes * scale
        read = tl.where(tl.max(live.to(tl.int32), axis=0) > 0, N, 0)
        begin = tl.program_id(1) * N_SHARE
        for start in tl.range(begin, tl.minimum(begin + N_SHARE, N), BLOCK, num_stages=STAGES):
            n = start + lane
            store_mask = inside[:, None] & (n < N)[None, :]
            second = tl.load(
                second_ptr + j[:, None] * SECOND_R + n[None, :] * SECOND_N,
                mask=rank_mask[:, None] & (n < read)[None, :],
                other=0.0,
            )
            update = tl.sum(weighted[:, :, None] * second.to(ACC)[None, :, :], axis=1)
            changed = live[:, None] & (update != 0)
            out = row[:, None] * N + n[None, :]
            if base_ptr is None:
                tl.store(out_ptr + out, tl.where(changed, update, 0.0), mask=store_mask)
            else:  # unchanged values keep their bits, even -0.0
                base = tl.load(base_ptr + row[:, None] * BASE_ROW + n[None, :], mask=store_mask, other=0.0)
                tl.store(
                    out_ptr + out, tl.where(changed, (base.to(ACC) + update).to(base.dtype), base), mask=store_mask
                )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _over_columns(  # type: ignore[no-untyped-def]
    a_ptr, sums_ptr, codes_ptr, parts_ptr, M, K, A_ROW, PART_ROWS, scale, eps,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Compute `parts [n, RANK, K]`: scale * (sums * codes)^T a per `PART_ROWS` rows."""
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
    """Return compile-time arguments for weights up to `widest` long."""
    r = triton.next_power_of_2(rank)
    accumulator, tile = (tl.float64, _TILE // 2) if dtype == torch.float64 else (tl.float32, _TILE)
    block = min(max(triton.next_power_of_2(widest), 16), tile // (ROWS * r), _MOST_COLUMNS)
    # Only explicit `tl.fma` fuses: the compiler's choice differs between rows of a tile.
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
    """Return `a^T (scale * sums * codes)` [K, r], the gradient of V or U."""
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
    """Contiguous rows, 16-byte aligned: Triton specialises the kernel on alignment."""
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
        needs_x, needs_v, needs_u, needs_codes, needs_base = ctx.needs_input_grad[:5]
        grad, x_grad, v_grad, u_grad, codes_grad = _rows_contiguous(grad), None, None, None, None
        grad_sums = _empty_sums(x, codes) if needs_v or needs_codes else None
        if needs_x or grad_sums is not None:  # the forward kernel, V and U swapped
            x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
            _launch_rows(
                a=grad,
                first=u,
                second=v,
                codes=codes,
                base=None,
                sums=grad_sums,
                out=x_grad,
                dtype=_sum_dtype(x),
                scale=scale,
                eps=eps,
            )
        if needs_v and grad_sums is not None:
            v_grad = sum_over_rows(x, grad_sums, codes, scale, eps, v)
        if needs_codes and grad_sums is not None:
            codes_grad = (grad_sums * sums * scale).to(codes.dtype)
        if needs_u:
            u_grad = sum_over_rows(grad, sums, codes, scale, eps, u)
        return x_grad, v_grad, u_grad, codes_grad, grad if needs_base else None, None, None


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
    """Return `scale * ((x V) * codes) U^T` [M, out] in x's dtype, or its sum with `base` [M, out] in base's.

    x [M, in], V [in, r], U [out, r], codes [M, r]: any strides, r up to 64, floating, on one device. `scale` and `eps`
    are rounded to fp32. Rows with all `|c| <= eps` are skipped: their base keeps its bits, and codes have gradients
    only if eps is 0.

    Differentiable once. Raises `ConfigError` if inputs do not fit.
    """
    _check(x, V, U, codes, base, eps)
    x, codes, base = _rows_contiguous(x), codes.contiguous(), base if base is None else _rows_contiguous(base)
    V, U = _near(V), _near(U)
    tensors = [t for t in (x, V, U, codes, base) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _GeneratedUpdate.apply(x, V, U, codes, base, float(scale), float(eps))  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
    return _forward(x=x, v=V, u=U, codes=codes, base=base, sums=None, scale=float(scale), eps=float(eps))


def _check(x: Tensor, v: Tensor, u: Tensor, codes: Tensor, base: Tensor | None, eps: float) -> None:
    """Raise `ConfigError` if inputs do not fit: kernels check no address."""
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

"""Compiled products of weight rows and states, one for each pair of dtypes.

    address = products_of(np.uint16, np.float32)                                     # compiled at first use

`_dot_tile` emits a dot of one row and one state: 16 lanes along D, one fused multiply-add each (bf16: two, or the
bitwise equal AVX-512 instruction), then a fixed tree of additions. The order depends only on the length, so every tile,
batch and strategy gives equal bits. 4 x 4 tiles read a weight once for four states.

Calls go by address, or LLVM would optimise the products again in every caller.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from probemon.engine.kernels.numba_cached import compiled_callback

_LANES = 16
MANY = 4  # states from which 4 x 4 tiles are faster
_ONE_BY_ONE = 1024, 8192  # bytes of a row that one state reads sequentially; others at four places at once


_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WIDE, _BITS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)


def _dot_tile(n_rows: int, n_states: int) -> Any:
    """Return an intrinsic for dots `out[r * n_states + s]` of length `d`.

    Rows (int8, fp32, bf16 bits) begin at elements `w_at` of `w`; states (fp32, or bf16 bits for bf16 rows) at `x_at`
    of `x`.
    """

    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def tile(typing_context: Any, w: Any, w_at: Any, x: Any, x_at: Any, d: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds, length = signature.args, args[4]
            w_data, w_from, x_data, x_from, target = (
                pointer_of(context, builder, kinds[i], args[i]) for i in (0, 1, 2, 3, 5)
            )

            def pointers(data: Any, begin: Any, n: int) -> list[Any]:
                return [builder.gep(data, [builder.load(builder.gep(begin, [_I64(i)]))]) for i in range(n)]

            rows = pointers(w_data, w_from, n_rows), kinds[0].dtype
            states = pointers(x_data, x_from, n_states), kinds[2].dtype
            stride = 2 * _LANES if _are_pairs(rows, states) else _LANES
            whole = builder.and_(length, _I64(-stride))
            sums = [_zero(builder, _WIDE) for _ in range(n_rows * n_states)]
            with cgutils.for_range_slice(builder, _I64(0), whole, _I64(stride)) as (at, _):
                _add_products(context, builder, rows, states, at, sums)
            totals = _totals(builder, [builder.load(total) for total in sums])
            builder.store(totals, builder.bitcast(target, totals.type.as_pointer()), align=4)
            with builder.if_then(builder.icmp_signed("<", whole, length), likely=False):
                _add_tails(builder, rows, states, whole, length, target)
            return context.get_dummy_value()

        return types.void(w, w_at, x, x_at, d, out), emit

    return tile


def pointer_of(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return an array's data pointer, or `value` if it is a pointer."""
    return context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value


class _BFloat(ir.Type):  # type: ignore[misc,unused-ignore]
    """LLVM's bf16, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _are_pairs(rows: Any, states: Any) -> bool:
    return bool(rows[1] == states[1] == types.uint16)


def _zero(builder: Any, kind: Any) -> Any:
    """Return a variable that is zeroed here each time."""
    variable = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, [0.0] * _LANES if kind is _WIDE else 0.0), variable)
    return variable


def _add_products(context: Any, builder: Any, rows: Any, states: Any, at: Any, sums: list[Any]) -> None:
    """Add 16 products per lane; of bf16 pairs the odd ones first."""

    def read(pointer: Any, kind: Any, align: int) -> Any:
        return builder.load(builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer()), align=align)

    def parts(pointer: Any, kind: Any) -> tuple[Any, ...]:
        if _are_pairs(rows, states):
            pair = read(pointer, _BITS, 2)
            odd = builder.and_(pair, ir.Constant(_BITS, [0xFFFF0000] * _LANES))
            even = builder.shl(pair, ir.Constant(_BITS, [16] * _LANES))
            return builder.bitcast(odd, _WIDE), builder.bitcast(even, _WIDE)
        stored = _WIDE if kind == types.float32 else ir.VectorType(ir.IntType(kind.bitwidth), _LANES)
        return (_widened(builder, kind, read(pointer, stored, kind.bitwidth // 8), _WIDE),)

    if _are_pairs(rows, states) and _has_bf16_dots(context):
        pairs = ir.VectorType(_BFloat(), 2 * _LANES)
        dot = _function(builder, [_WIDE, pairs, pairs], "llvm.x86.avx512bf16.dpbf16ps.512")
        row_values, state_values = ([read(pointer, pairs, 2) for pointer in of] for of in (rows[0], states[0]))
        for total, (row, state) in zip(sums, itertools.product(row_values, state_values), strict=True):
            builder.store(builder.call(dot, [builder.load(total), row, state]), total)
        return
    fma = _function(builder, [_WIDE] * 3, f"llvm.fmuladd.v{_LANES}f32")
    row_values, state_values = ([parts(pointer, of[1]) for pointer in of[0]] for of in (rows, states))
    for total, (row, state) in zip(sums, itertools.product(row_values, state_values), strict=True):
        value = builder.load(total)
        for one, other in zip(row, state, strict=True):
            value = builder.call(fma, [one, other, value])
        builder.store(value, total)


def _function(builder: Any, kinds: list[Any], name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(kinds[0], kinds), name)


def _widened(builder: Any, kind: Any, value: Any, wide: Any) -> Any:
    bits = _BITS if wide is _WIDE else _I32
    if kind == types.int8:
        return builder.sitofp(builder.sext(value, bits), wide)
    if kind == types.uint16:  # the upper half of an fp32
        half = ir.Constant(bits, [16] * _LANES if wide is _WIDE else 16)
        return builder.bitcast(builder.shl(builder.zext(value, bits), half), wide)
    return value


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """Return lane totals as one vector, adding halves; folding two vectors into one saves additions."""
    group = _LANES
    while group > 1:
        pairs = [(vectors[0],) * 2] if len(vectors) == 1 else zip(vectors[::2], vectors[1::2], strict=True)
        n_lanes = vectors[0].type.count * min(2, len(vectors))
        lower = [lane for lane in range(n_lanes) if lane % group < group // 2]

        def half(pair: tuple[Any, Any], up: int, lower: list[int] = lower) -> Any:
            return builder.shuffle_vector(
                *pair, ir.Constant(ir.VectorType(_I32, len(lower)), [lane + up for lane in lower])
            )

        vectors = [builder.fadd(half(pair, 0), half(pair, group // 2)) for pair in pairs]
        group //= 2
    return vectors[0]


def _add_tails(builder: Any, rows: Any, states: Any, begin: Any, end: Any, out: Any) -> None:
    fma = _function(builder, [_F32] * 3, "llvm.fmuladd.f32")
    for i, (row, state) in enumerate(itertools.product(rows[0], states[0])):
        tail = _zero(builder, _F32)
        with cgutils.for_range_slice(builder, begin, end, _I64(1)) as (at, _):
            one, other = (
                _widened(builder, kind, builder.load(builder.gep(pointer, [at])), _F32)
                for pointer, kind in ((row, rows[1]), (state, states[1]))
            )
            builder.store(builder.call(fma, [one, other, builder.load(tail)]), tail)
        place = builder.gep(out, [_I64(i)])
        builder.store(builder.fadd(builder.load(place), builder.load(tail)), place)


def _has_bf16_dots(context: Any) -> bool:
    """True if the target CPU multiplies bf16 pairs with fp32 sums."""
    return "+avx512bf16" in context.codegen().magic_tuple()[2].split(",")


_dot_1x1, _dot_4x1, _dot_1x4, _dot_4x4 = (_dot_tile(*shape) for shape in ((1, 1), (4, 1), (1, 4), (4, 4)))


def products_of(weights: Any, states: Any) -> int:
    """Return the address of compiled products for int8, fp32 or bf16 bits (uint16).

    They set `out[i * n_rows + j]`: weight row j from element `base`, times the state at `x[x_at[i]]`.
    """
    address: int = _products(np.dtype(weights), np.dtype(states)).address
    return address


@functools.cache  # keeps the code alive
def _products(weights: np.dtype[Any], states: np.dtype[Any]) -> Any:  # noqa: C901 (compiled as one)
    """Compile them. A callback cannot raise, so it allocates nothing."""
    w_kind, x_kind, width = from_dtype(weights), from_dtype(states), weights.itemsize
    integer, integers = types.int64, types.CPointer(types.int64)
    signature = types.void(
        types.CPointer(w_kind), integer, integer, integer, types.CPointer(x_kind), integers, integer, integers,
        types.CPointer(types.float32),
    )  # fmt: skip

    def products(w, base, n_rows, d, x, x_at, n, spare, out):  # type: ignore[no-untyped-def] # noqa: C901
        w_at, at, sums = carray(spare, 4), carray(spare, 8)[4:], carray(spare, 16)[8:].view(np.float32)
        row_bytes, apart, j = d * width, n_rows // 4, 0
        if n == 1 and n_rows % 4 == 0 and (row_bytes < _ONE_BY_ONE[0] or row_bytes >= _ONE_BY_ONE[1]):
            at[0] = x_at[0]
            for j in range(apart):
                for r in range(4):
                    w_at[r] = base + (j + r * apart) * d
                _dot_4x1(w, w_at, x, at, d, sums)
                for r in range(4):
                    out[j + r * apart] = sums[r]
            return
        if n >= MANY:
            while j + 4 <= n_rows:
                for r in range(4):
                    w_at[r] = base + (j + r) * d
                i = 0
                while i + 4 <= n:
                    for s in range(4):
                        at[s] = x_at[i + s]
                    _dot_4x4(w, w_at, x, at, d, sums)
                    for s in range(4):
                        for r in range(4):
                            out[(i + s) * n_rows + j + r] = sums[r * 4 + s]
                    i += 4
                while i < n:
                    at[0] = x_at[i]
                    _dot_4x1(w, w_at, x, at, d, sums)
                    for r in range(4):
                        out[i * n_rows + j + r] = sums[r]
                    i += 1
                j += 4
        while j < n_rows:
            w_at[0] = base + j * d
            i = 0
            while i + 4 <= n:
                for s in range(4):
                    at[s] = x_at[i + s]
                _dot_1x4(w, w_at, x, at, d, sums)
                for s in range(4):
                    out[(i + s) * n_rows + j] = sums[s]
                i += 4
            while i < n:
                at[0] = x_at[i]
                _dot_1x1(w, w_at, x, at, d, sums)
                out[i * n_rows + j] = sums[0]
                i += 1
            j += 1

    return compiled_callback(signature, products)

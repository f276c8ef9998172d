"""numba compiles all code of this file: dots, scores of probes, a whole descent.

Every product is a dot of one weight row and one state. `_dot_tile` emits it for a tile of rows and states: 16 lanes
along D, one fused multiply-add each (of bf16 two, or the instruction of newer processors that does both, to the same
bits), then one fixed tree of additions. The order of a pair's sums thus depends on the length alone, and its score is
bitwise the same in every tile, batch and strategy. Rows of a single state are read one after another, as memory likes
it; for many states a tile of 4 x 4 reads each weight once for four states.

All of it is in this file on purpose: numba's cache on disk notices a change in the file of a function, not in the file
of a function that it calls. The first call on a machine compiles, which takes some seconds.

In signatures, `net` is what `numba_cpu.views_of` returns, `parent_ptr` and `parent_idx` link a hierarchy in CSR,
`groups` are the arrays `of [P]`, `ptr [G+1]` and `members [E]` of its softmax groups.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Array = npt.NDArray[Any]
_compiled = njit(cache=True, nogil=True)
_LANES = 16
_MANY = 4  # states from which a tile of 4 x 4 pays: it reads four rows at once, which memory likes less
_ONE_BY_ONE = 1024, 8192  # bytes of a row: these are read one after another for a state, others at four places at once
_SPARSE = 32  # where fewer than one in so many probes is meant, a list of them is sorted, else all probes are walked


_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WIDE, _BITS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)


def _dot_tile(n_rows: int, n_states: int) -> Any:
    """Make the dots, `out[r * n_states + s]`, of `n_rows` weight rows and `n_states` states, each of length `d`.

    Rows (int8, fp32, or bits of bf16) begin at the elements `w_at` of `w`, states at the elements `x_at` of `x` (fp32;
    beside bf16 rows also bits of bf16).
    """

    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def tile(typing_context: Any, w: Any, w_at: Any, x: Any, x_at: Any, d: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds, length = signature.args, args[4]
            w_data, w_from, x_data, x_from, target = (
                context.make_array(kinds[i])(context, builder, args[i]).data for i in (0, 1, 2, 3, 5)
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


class _BFloat(ir.Type):  # type: ignore[misc,unused-ignore]
    """bf16 in LLVM, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _are_pairs(rows: Any, states: Any) -> bool:
    """Whether both are bits of bf16, which are read two by two."""
    return bool(rows[1] == states[1] == types.uint16)


def _zero(builder: Any, kind: Any) -> Any:
    """Return a variable that begins as zero whenever the code comes by."""
    variable = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, [0.0] * _LANES if kind is _WIDE else 0.0), variable)
    return variable


def _add_products(context: Any, builder: Any, rows: Any, states: Any, at: Any, sums: list[Any]) -> None:
    """Add 16 products to the lanes of each sum; of pairs the odd ones, then the even ones."""

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
        of_rows, of_states = ([read(pointer, pairs, 2) for pointer in of] for of in (rows[0], states[0]))
        for total, (row, state) in zip(sums, itertools.product(of_rows, of_states), strict=True):
            builder.store(builder.call(dot, [builder.load(total), row, state]), total)
        return
    fma = _function(builder, [_WIDE] * 3, f"llvm.fmuladd.v{_LANES}f32")
    of_rows, of_states = ([parts(pointer, of[1]) for pointer in of[0]] for of in (rows, states))
    for total, (row, state) in zip(sums, itertools.product(of_rows, of_states), strict=True):
        value = builder.load(total)
        for one, other in zip(row, state, strict=True):
            value = builder.call(fma, [one, other, value])
        builder.store(value, total)


def _function(builder: Any, kinds: list[Any], name: str) -> Any:
    """Return a function of LLVM's that gives what its first argument is."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(kinds[0], kinds), name)


def _widened(builder: Any, kind: Any, value: Any, wide: Any) -> Any:
    """Return a number, or a vector of them, in fp32."""
    bits = _BITS if wide is _WIDE else _I32
    if kind == types.int8:
        return builder.sitofp(builder.sext(value, bits), wide)
    if kind == types.uint16:  # the upper half of an fp32
        half = ir.Constant(bits, [16] * _LANES if wide is _WIDE else 16)
        return builder.bitcast(builder.shl(builder.zext(value, bits), half), wide)
    return value


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """Return the total of the lanes of each vector, as one vector: upper half onto lower half, as often as it takes.

    Two vectors are folded into one of as many lanes, so that few additions make all totals.
    """
    group = _LANES  # lanes that are still to be one
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
    """Add the sums of the products from `begin` to `end`, one element after another."""
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
    """Whether the processor that is compiled for multiplies pairs of bf16, with products and sums in fp32."""
    return "+avx512bf16" in context.codegen().magic_tuple()[2].split(",")


_dot_1x1, _dot_4x1, _dot_1x4, _dot_4x4 = (_dot_tile(*shape) for shape in ((1, 1), (4, 1), (1, 4), (4, 4)))


def _as_read(w: Array, x: Array) -> Array:
    """Return states fp32 as dots with such rows read them: beside bf16 the upper halves, which are all there is."""
    raise NotImplementedError("compiled code alone calls it")


@overload(_as_read)  # type: ignore[untyped-decorator,unused-ignore]
def _of_as_read(w: Any, x: Any) -> Any:
    def halves(w: Any, x: Any) -> Any:
        bits, out = x.view(np.uint32), np.empty(len(x), np.uint16)
        for i in range(len(x)):
            out[i] = bits[i] >> np.uint32(16)
        return out

    def as_they_are(w: Any, x: Any) -> Any:
        return x

    return halves if w.dtype == types.uint16 and x.dtype == types.float32 else as_they_are


@_compiled
def _products(  # noqa: C901
    w: Array, base: int, n_rows: int, d: int, x: Array, x_at: Array, n: int, out: Array
) -> None:  # fmt: skip
    """Compute `out[i * n_rows + j]`: weight row j from element `base` on, times the state from `x[x_at[i]]` on."""
    w_at, at, tile = np.empty(4, np.int64), np.empty(4, np.int64), np.empty(16, np.float32)
    row_bytes, apart, j = d * w.itemsize, n_rows // 4, 0
    if n == 1 and n_rows % 4 == 0 and (row_bytes < _ONE_BY_ONE[0] or row_bytes >= _ONE_BY_ONE[1]):
        at[0] = x_at[0]
        for j in range(apart):
            for r in range(4):
                w_at[r] = base + (j + r * apart) * d
            _dot_4x1(w, w_at, x, at, d, tile)
            for r in range(4):
                out[j + r * apart] = tile[r]
        return
    if n >= _MANY:
        while j + 4 <= n_rows:
            for r in range(4):
                w_at[r] = base + (j + r) * d
            i = 0
            while i + 4 <= n:
                for s in range(4):
                    at[s] = x_at[i + s]
                _dot_4x4(w, w_at, x, at, d, tile)
                for s in range(4):
                    for r in range(4):
                        out[(i + s) * n_rows + j + r] = tile[r * 4 + s]
                i += 4
            while i < n:
                at[0] = x_at[i]
                _dot_4x1(w, w_at, x, at, d, tile)
                for r in range(4):
                    out[i * n_rows + j + r] = tile[r]
                i += 1
            j += 4
    while j < n_rows:
        w_at[0] = base + j * d
        i = 0
        while i + 4 <= n:
            for s in range(4):
                at[s] = x_at[i + s]
            _dot_1x4(w, w_at, x, at, d, tile)
            for s in range(4):
                out[(i + s) * n_rows + j] = tile[s]
            i += 4
        while i < n:
            at[0] = x_at[i]
            _dot_1x1(w, w_at, x, at, d, tile)
            out[i * n_rows + j] = tile[0]
            i += 1
        j += 1


@_compiled
def _add_bias(z: Array, scale: Array, bias: Array, base: int, n_rows: int, n: int, rectify: bool) -> None:
    for i in range(n):
        for j in range(n_rows):
            value = (z[i * n_rows + j] * scale[base + j] if len(scale) else z[i * n_rows + j]) + bias[base + j]
            z[i * n_rows + j] = np.float32(0.0) if rectify and value < 0 else value  # a NaN stays a NaN


@_compiled
def _sigmoid(logit: np.float32) -> np.float32:
    # One element at a time, through fp64: no vector body whose tail would differ.
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(logit))))


@_compiled
def _touch(w: Array, begin: int, end: int) -> int:
    """Read one value of every cache line, so that the rest is near when it is asked for."""
    total, stride = 0, 64 // w.itemsize
    for i in range(begin, end, stride):
        total += w[i]
    return total


@_compiled
def _softmax(z: Array, begin: int, end: int, out: Array) -> None:
    """Compute the softmax of `z[begin:end]` in fp64, one element after another; all NaN where one is not finite."""
    top = np.float64(z[begin])
    for i in range(begin + 1, end):
        top = max(top, np.float64(z[i]))
    total = 0.0
    for i in range(begin, end):
        total += math.exp(np.float64(z[i]) - top)
    for i in range(begin, end):
        out[i] = np.float32(math.exp(np.float64(z[i]) - top) / total)


@_compiled
def softmax_segments(z: Array, ptr: Array, out: Array) -> None:
    """Compute the softmax of each segment `ptr[g]` to `ptr[g + 1]` of `z`, `out [M]`."""
    for g in range(len(ptr) - 1):
        _softmax(z, ptr[g], ptr[g + 1], out)


@_compiled
def _logits_of_slots(net: Any, slot: int, n_slots: int, x: Array, x_at: Array, n: int, own: Array) -> None:
    """Compute `own[i * n_slots + k]`: the logit of slot + k for the state at `x[x_at[i]]`. Only slots of linear probes
    are computed several at once.
    """
    w1, s1, b1, w2, s2, b2, w3, s3, b3, d, h1, h2, n_layers = net
    if n_layers == 1:
        _products(w1, slot * d, n_slots, d, x, x_at, n, own)
        _add_bias(own, s1, b1, slot, n_slots, n, False)
    else:
        first = np.empty(n * h1, np.float32)
        begin = np.arange(n) * h1
        if n >= _MANY:  # the tiles read four rows at once, which memory is slow at: the cache has them by then
            first[0] = _touch(w1, slot * h1 * d, (slot + 1) * h1 * d)
        _products(w1, slot * h1 * d, h1, d, x, x_at, n, first)
        _add_bias(first, s1, b1, slot * h1, h1, n, True)
        if n_layers == 3:
            second = np.empty(n * h2, np.float32)
            _products(w2, slot * h2 * h1, h2, h1, first, begin, n, second)
            _add_bias(second, s2, b2, slot * h2, h2, n, True)
            _products(w3, slot * h2, 1, h2, second, np.arange(n) * h2, n, own)
        else:
            _products(w3, slot * h1, 1, h1, first, begin, n, own)
        _add_bias(own, s3, b3, slot, 1, n, False)


@_compiled
def ranges(rows: Array, slots: Array) -> Any:
    """Return the least and the most of rows and of slots, and whether no slot is less than the one before."""
    least, most, rises = np.zeros(2, np.int64), np.zeros(2, np.int64), True
    for i in range(len(slots)):
        if i == 0:
            least[:] = most[:] = rows[0], slots[0]
        least[0], most[0] = min(least[0], rows[i]), max(most[0], rows[i])
        least[1], most[1] = min(least[1], slots[i]), max(most[1], slots[i])
        rises = rises and (i == 0 or slots[i] >= slots[i - 1])
    return least[0], most[0], least[1], most[1], rises


@_compiled
def score_pairs(net: Any, x: Array, rows: Array, slots: Array, as_logits: bool, out: Array) -> None:
    """Score M pairs whose slots never fall, `out [M]`; `as_logits`: leave out the sigmoid."""
    d, states = net[9], _as_read(net[0], x)
    x_at, own, at = np.empty(len(slots), np.int64), np.empty(len(slots), np.float32), 0
    while at < len(slots):
        n = 0
        while at + n < len(slots) and slots[at + n] == slots[at]:
            x_at[n] = rows[at + n] * d
            n += 1
        _logits_of_slots(net, slots[at], 1, states, x_at, n, own)
        for i in range(n):
            out[at + i] = own[i] if as_logits else _sigmoid(own[i])
        at += n


@_compiled
def _score_groups(groups: Any, rows: Array, probes: Array, n: int, one_row: bool, scores: Array) -> None:
    """Turn logits into scores for the groups that have their first member among n pairs, each whole."""
    of, ptr, members = groups
    z = np.empty(len(members), np.float32)
    for i in range(n if len(members) else 0):
        group = of[probes[i]]
        if group < 0 or members[ptr[group]] != probes[i]:
            continue
        row, begin, size = 0 if one_row else rows[i], ptr[group], ptr[group + 1] - ptr[group]
        for k in range(size):
            z[k] = scores[row, members[begin + k]]
        _softmax(z, 0, size, z)
        for k in range(size):
            scores[row, members[begin + k]] = z[k]


@_compiled
def _score_round(
    net: Any, x: Array, n_states: int, input_of: Array, groups: Any, pair_row: Array, pair_probe: Array, n_pairs: int,
    scores: Array,
) -> None:  # fmt: skip
    """Sort the pairs of one round by probe, and score them."""
    n_probes, d, of = scores.shape[1], net[9], groups[0]
    if n_states == 1:
        pair_probe[:n_pairs].sort()
    elif n_pairs * _SPARSE < n_probes:
        key = pair_probe[:n_pairs] * n_states + pair_row[:n_pairs]
        key.sort()
        pair_probe[:n_pairs], pair_row[:n_pairs] = key // n_states, key % n_states
    else:
        count = np.zeros(n_probes + 1, np.int64)
        for i in range(n_pairs):
            count[pair_probe[i] + 1] += 1
        for p in range(n_probes):
            count[p + 1] += count[p]
        sorted_row, sorted_probe = np.empty(n_pairs, np.int64), np.empty(n_pairs, np.int64)
        for i in range(n_pairs):
            to = count[pair_probe[i]]
            count[pair_probe[i]] = to + 1
            sorted_row[to], sorted_probe[to] = pair_row[i], pair_probe[i]
        pair_row[:n_pairs], pair_probe[:n_pairs] = sorted_row, sorted_probe
    x_at, own, at = np.empty(n_states, np.int64), np.empty(n_states, np.float32), 0
    while at < n_pairs:
        probe, n = pair_probe[at], 0
        while at + n < n_pairs and pair_probe[at + n] == probe:
            x_at[n] = (input_of[probe] * n_states + pair_row[at + n]) * d
            n += 1
        _logits_of_slots(net, probe, 1, x, x_at, n, own)
        for i in range(n):
            scores[pair_row[at + i], probe] = own[i] if of[probe] >= 0 else _sigmoid(own[i])
        at += n
    _score_groups(groups, pair_row, pair_probe, n_pairs, n_states == 1, scores)


@_compiled
def _score_everything(net: Any, x: Array, n_states: int, input_of: Array, groups: Any, scores: Array) -> None:
    """Score every probe for every state."""
    n_probes, d, linear, of = scores.shape[1], net[9], net[12] == 1, groups[0]
    x_at = np.empty(n_states, np.int64)
    at = 0
    while at < n_probes:
        n = 1
        while linear and at + n < n_probes and n < 256 and input_of[at + n] == input_of[at]:
            n += 1
        for i in range(n_states):
            x_at[i] = (input_of[at] * n_states + i) * d
        own = np.empty(n_states * n, np.float32)
        _logits_of_slots(net, at, n, x, x_at, n_states, own)
        for i in range(n_states):
            for k in range(n):
                logit = own[i * n + k]
                scores[i, at + k] = logit if of[at + k] >= 0 else _sigmoid(logit)
        at += n
    every = np.arange(n_probes)
    for i in range(n_states):
        _score_groups(groups, np.full(n_probes, i), every, n_probes, False, scores)


@_compiled
def _times_best_parent(parent_ptr: Array, parent_idx: Array, scores: Array, row: int, probe: int) -> None:
    begin, end = parent_ptr[probe], parent_ptr[probe + 1]
    if begin < end:
        best = scores[row, parent_idx[begin]]
        for e in range(begin + 1, end):
            above = scores[row, parent_idx[e]]
            if above > best or above != above:  # not max(): a NaN stays a NaN
                best = above
        scores[row, probe] *= best


@_compiled
def _close(
    parent_ptr: Array, parent_idx: Array, path_rule: bool, groups: Any, active: Array, row: int, mark: Array,
    stamp: int, probes: Array, begin: int, end: int,
) -> int:  # fmt: skip
    """Append to `probes[begin:end]` what must be active with them (all ancestors by the path rule, all of a group) and
    is neither active nor marked, mark it, and return the new end.
    """
    of, ptr, members = groups
    at = begin
    while at < end:
        probe = probes[at]
        if path_rule:
            for e in range(parent_ptr[probe], parent_ptr[probe + 1]):
                parent = parent_idx[e]
                if not active[row, parent] and mark[parent] != stamp:
                    mark[parent] = stamp
                    probes[end] = parent
                    end += 1
        if of[probe] >= 0:
            for e in range(ptr[of[probe]], ptr[of[probe] + 1]):
                mate = members[e]
                if not active[row, mate] and mark[mate] != stamp:
                    mark[mate] = stamp
                    probes[end] = mate
                    end += 1
        at += 1
    return end


@_compiled
def _admit(
    parent_ptr: Array, parent_idx: Array, path_rule: bool, groups: Any, active: Array, scores: Array, row: int,
    room: int, expanded: Array, stamp: int, admitted: Array, base: int, probes: Array, begin: int, end: int,
) -> Any:  # fmt: skip
    """Keep of the children `probes[begin:end]` those that fit with what must be active with them, the child of the best
    expanding parent first. Return the new end and the children that did not fit.

    Of `admitted [P]` what is no more than `base` means nothing.
    """
    of, ptr, members = groups
    children = np.sort(probes[begin:end])
    key = np.empty(len(children), np.float32)
    for i in range(len(children)):
        best = np.float32(-np.inf)
        for e in range(parent_ptr[children[i]], parent_ptr[children[i] + 1]):
            if expanded[parent_idx[e]] == stamp:
                best = max(best, scores[row, parent_idx[e]])
        key[i] = -best
    taken, refused, n_refused = base + 1, np.empty(len(children), np.int64), 0
    end = begin
    for at in np.argsort(key, kind="mergesort"):  # stable: ties to the lower id
        child = children[at]
        if admitted[child] == taken:
            continue  # came with a better one
        probes[end] = child
        last = end + 1
        if path_rule or of[child] >= 0:
            bundle = taken + 1 + at  # a mark of this child's own
            admitted[child] = bundle
            walk = end
            while walk < last:
                probe = probes[walk]
                for e in range(parent_ptr[probe], parent_ptr[probe + 1] if path_rule else 0):
                    parent = parent_idx[e]
                    if not active[row, parent] and admitted[parent] != taken and admitted[parent] != bundle:
                        admitted[parent] = bundle
                        probes[last] = parent
                        last += 1
                group = of[probe]
                for e in range(ptr[group] if group >= 0 else 0, ptr[group + 1] if group >= 0 else 0):
                    mate = members[e]
                    if not active[row, mate] and admitted[mate] != taken and admitted[mate] != bundle:
                        admitted[mate] = bundle
                        probes[last] = mate
                        last += 1
                walk += 1
        if last - end <= room:
            for i in range(end, last):
                admitted[probes[i]] = taken
            room -= last - end
            end = last
        else:
            refused[n_refused] = child
            n_refused += 1
    return end, refused[:n_refused]


@_compiled
def _by_state(rows: Array, probes: Array, ptr: Array, active: Array) -> Array:
    """Return the active probes state by state, ascending: `rows [E]`, `probes [E]` are all of them in any order."""
    n_states, n_probes = active.shape
    out, n = np.empty(len(probes), np.int32), len(probes)
    if n * _SPARSE >= active.size:
        at = 0
        for row in range(n_states):
            for p in range(n_probes):
                if active[row, p]:
                    out[at] = p
                    at += 1
        return out
    to = ptr[:-1].copy()
    for i in range(n):
        out[to[rows[i]]] = probes[i]
        to[rows[i]] += 1
    for row in range(n_states):
        out[ptr[row] : ptr[row + 1]].sort()
    return out


@_compiled
def descend(  # noqa: C901, PLR0915 (compiled as one)
    net: Any, child_ptr: Array, child_idx: Array, parent_ptr: Array, parent_idx: Array, groups: Any, input_of: Array,
    x: Array, start: Array, retained: Array, threshold: Array, alert: Array, path_rule: bool, max_rounds: int,
    most: int, everything: bool, cells: Any, lists: Array, marks: Any,
) -> Any:  # fmt: skip
    """Descend as probemon.engine.cascade does. Return active probes state by state, `ptr [N+1]`, ids `[E]`, scores
    `[E]`, which are over `alert [P]`; and what was dropped: rows `[F]`, probes `[F]`.

    `retained`: which `row * P + probe` begin active, ascending. `cells`: active, dropped, scores `[N, P]`, zeros before
    and after. `lists [8, N * P]`: for any use. `marks`: three `[P]`, for any use but by others, and the largest numbers
    in them `[2]`. So a descent does as much as it evaluates, however many probes there are.
    """
    (active, dropped, scores), (mark, expanded, admitted, largest), states = cells, marks, _as_read(net[0], x)
    n_states, n_probes = active.shape
    closes, stamp = path_rule or len(groups[2]) > 0, largest[0]
    frontier_row, frontier, new_row, new = lists[0], lists[1], lists[2], lists[3]
    every_row, every, n_every = lists[4], lists[5], 0
    dropped_row, dropped_probe, n_dropped = lists[6], lists[7], 0
    n_active, n, at = np.zeros(n_states, np.int64), 0, 0
    for row in range(n_states):
        begin = n
        for p in start:
            active[row, p] = True
            frontier[n] = p
            n += 1
        while at < len(retained) and retained[at] < (row + 1) * n_probes:
            p = retained[at] - row * n_probes
            at += 1
            if not active[row, p]:
                active[row, p] = True
                frontier[n] = p
                n += 1
        if closes:
            stamp += 1
            end = _close(
                parent_ptr, parent_idx, path_rule, groups, active, row, mark, stamp, frontier, begin + len(start), n
            )
            for i in range(n, end):
                active[row, frontier[i]] = True
            n = end
        frontier_row[begin:n] = row
        n_active[row] = n - begin
    if everything:
        _score_everything(net, states, n_states, input_of, groups, scores)
        if path_rule:
            for row in range(n_states):
                for p in range(n_probes):
                    _times_best_parent(parent_ptr, parent_idx, scores, row, p)
    n_rounds = 0
    while True:
        every_row[n_every : n_every + n], every[n_every : n_every + n] = frontier_row[:n], frontier[:n]
        n_every += n
        if not everything:
            _score_round(net, states, n_states, input_of, groups, frontier_row, frontier, n, scores)
            if path_rule:
                for i in range(n):  # in the order of probes, so parents come first
                    row = frontier_row[i] if n_states > 1 else 0
                    _times_best_parent(parent_ptr, parent_idx, scores, row, frontier[i])
        if n_rounds == max_rounds:
            break
        n_rounds += 1
        if n_states > 1:  # row by row again
            order = np.argsort(frontier_row[:n], kind="mergesort")
            frontier_row[:n], frontier[:n] = frontier_row[:n][order], frontier[:n][order]
        i, n_new = 0, 0
        while i < n:
            row, begin = frontier_row[i], n_new
            stamp += 1
            while i < n and frontier_row[i] == row:
                parent = frontier[i]
                if scores[row, parent] > threshold[parent]:
                    expanded[parent] = stamp
                    for e in range(child_ptr[parent], child_ptr[parent + 1]):
                        child = child_idx[e]
                        if not active[row, child] and mark[child] != stamp:
                            mark[child] = stamp
                            new[n_new] = child
                            n_new += 1
                i += 1
            children_end = n_new
            if closes:
                n_new = _close(parent_ptr, parent_idx, path_rule, groups, active, row, mark, stamp, new, begin, n_new)
            if n_active[row] + n_new - begin > most:
                n_new, refused = _admit(
                    parent_ptr, parent_idx, path_rule, groups, active, scores, row, most - n_active[row], expanded,
                    stamp, admitted, largest[1], new, begin, children_end,
                )  # fmt: skip
                largest[1] += 1 + children_end - begin
                for child in refused:
                    if not dropped[row, child]:
                        dropped[row, child] = True
                        dropped_row[n_dropped], dropped_probe[n_dropped] = row, child
                        n_dropped += 1
            for k in range(begin, n_new):
                active[row, new[k]] = True
            new_row[begin:n_new] = row
            n_active[row] += n_new - begin
        frontier_row, frontier, new_row, new, n = new_row, new, frontier_row, frontier, n_new
        if n == 0:
            break
    largest[0] = stamp
    ptr = np.zeros(n_states + 1, np.int64)
    for row in range(n_states):
        ptr[row + 1] = ptr[row] + n_active[row]
    probes = _by_state(every_row[:n_every], every[:n_every], ptr, active)
    values, fired, at = np.empty(n_every, np.float32), np.empty(n_every, np.bool_), 0
    for row in range(n_states):
        while at < ptr[row + 1]:
            values[at] = scores[row, probes[at]]
            fired[at] = values[at] > alert[probes[at]]
            at += 1
    n = 0
    for i in range(n_dropped):
        row, child = dropped_row[i], dropped_probe[i]
        dropped[row, child] = False
        if not active[row, child]:  # with another of its parents it fitted later
            dropped_row[n], dropped_probe[n] = row, child
            n += 1
    if everything:
        scores[:] = 0
    for i in range(n_every):
        active[every_row[i], every[i]] = False
        scores[every_row[i], every[i]] = 0
    return ptr, probes, values, fired, dropped_row[:n].copy(), dropped_probe[:n].copy()


@_compiled
def best(ptr: Array, probes: Array, values: Array, exempt: Array, rows: Array, most: int) -> Array:
    """Mark in `[len(rows), P]` the best `most` active probes of rows that are not `exempt`, ties to the lower id."""
    kept = np.zeros((len(rows), len(exempt)), np.bool_)
    for i in range(len(rows)):
        begin, end = ptr[rows[i]], ptr[rows[i] + 1]
        chosen, key, n = np.empty(end - begin, np.int64), np.empty(end - begin, np.float32), 0
        for at in range(begin, end):
            if not exempt[probes[at]]:
                chosen[n], key[n] = probes[at], -values[at] if values[at] == values[at] else np.float32(np.inf)
                n += 1
        order = np.arange(n) if n <= most else np.argsort(key[:n], kind="mergesort")[:most]
        for k in order:
            kept[i, chosen[k]] = True
    return kept

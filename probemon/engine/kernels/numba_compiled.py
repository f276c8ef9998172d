"""numba code: scores of probes, and a whole descent.

One file, because numba's disk cache misses changes in other files' functions; only products of weights and states
(`numba_products`) are called by address. Weights and states are bytes, so one compilation serves all dtypes.

`net` is a `Net` as a plain tuple; `parent_ptr`, `parent_idx` are CSR links; `groups` are the softmax groups' arrays
`of [P]`, `ptr [G+1]`, `members [E]`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from probemon.engine.kernels.numba_cached import compiled
from probemon.engine.kernels.numba_products import MANY, pointer_of

Array = npt.NDArray[Any]
_compiled = compiled()
# Literals have their own numba types: callees would be compiled again.
_ZERO: Any = np.int64(0)
_ONE: Any = np.int64(1)
_NO: Any = np.bool_(False)
_YES: Any = np.bool_(True)
_SPARE = 16  # int64 of scratch
_SPARSE = 32  # below one in so many probes, sort a list; else walk all


class Net(NamedTuple):
    """Stacked weights: per layer the matrix as bytes, fp32 scales and bias; addresses of products for layer 1 and
    above; bytes per weight; sizes.
    """

    w1: Array
    s1: Array
    b1: Array
    w2: Array
    s2: Array
    b2: Array
    w3: Array
    s3: Array
    b3: Array
    products: tuple[int, int]
    width: int
    d: int
    h1: int
    h2: int
    n_layers: int


# Unpacking a named tuple takes compiled code three times as long per call.
_WIDTH, _D, _N_LAYERS = (Net._fields.index(name) for name in ("width", "d", "n_layers"))


def _call_by_address(
    typing_context: Any, address: Any, w: Any, base: Any, n_rows: Any, d: Any, x: Any, x_at: Any, n: Any, spare: Any,
    out: Any,
) -> Any:  # fmt: skip
    """Call products by address, with scratch `spare`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arguments = [pointer_of(context, builder, *one) for one in zip(signature.args[1:], args[1:], strict=True)]
        function = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), arguments)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, w, i64, i64, i64, x, x_at, i64, spare, out), emit


_call_products: Any = intrinsic(_call_by_address)


@_compiled
def _as_read(width: int, x: Array) -> Array:
    """Return fp32 states as products read them: for bf16 weights only the upper halves."""
    if width != 2:
        return x.view(np.uint8)
    bits, out = x.view(np.uint32), np.empty(len(x), np.uint16)
    for i in range(len(x)):
        out[i] = bits[i] >> np.uint32(16)
    return out.view(np.uint8)


@_compiled
def _add_bias(z: Array, scale: Array, bias: Array, base: int, n_rows: int, n: int, rectify: bool) -> None:
    for i in range(n):
        for j in range(n_rows):
            value = (z[i * n_rows + j] * scale[base + j] if len(scale) else z[i * n_rows + j]) + bias[base + j]
            z[i * n_rows + j] = np.float32(0.0) if rectify and value < 0 else value  # NaN stays NaN


@_compiled
def _sigmoid(logit: np.float32) -> np.float32:
    # Scalar, through fp64: a vector body's tail would round differently.
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(logit))))


@_compiled
def _touch(w: Array, begin: int, end: int) -> int:
    """Prefetch a byte of every cache line."""
    total = 0
    for i in range(begin, end, 64):
        total += w[i]
    return total


@_compiled
def _softmax(z: Array, begin: int, end: int, out: Array) -> None:
    """Softmax of `z[begin:end]`, sequentially in fp64; all NaN if one is not finite."""
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
    """Softmax of segments `ptr[g]:ptr[g + 1]` of `z`."""
    for g in range(len(ptr) - 1):
        _softmax(z, ptr[g], ptr[g + 1], out)


@_compiled
def _multiples(n: int, of: int) -> Array:
    out = np.empty(n, np.int64)
    for i in range(n):
        out[i] = i * of
    return out


@_compiled
def _logits_of_slots(net: Any, slot: int, n_slots: int, x: Array, x_at: Array, n: int, logits: Array) -> None:
    """Set `logits[i * n_slots + k]`: slot + k for the state at `x[x_at[i]]`. `n_slots > 1` only for linear probes."""
    w1, s1, b1, w2, s2, b2, w3, s3, b3, products, width, d, h1, h2, n_layers = net
    spare = np.empty(_SPARE, np.int64)
    if n_layers == 1:
        _call_products(products[0], w1, slot * d, n_slots, d, x, x_at, n, spare, logits)
        _add_bias(logits, s1, b1, slot, n_slots, n, _NO)
    else:
        first = np.empty(n * h1, np.float32)
        begin = _multiples(n, h1)
        if n >= MANY:  # prefetch: 4 x 4 tiles read four rows at once, slow from memory
            first[0] = _touch(w1, slot * h1 * d * width, (slot + 1) * h1 * d * width)
        _call_products(products[0], w1, slot * h1 * d, h1, d, x, x_at, n, spare, first)
        _add_bias(first, s1, b1, slot * h1, h1, n, _YES)
        if n_layers == 3:
            second = np.empty(n * h2, np.float32)
            _call_products(products[1], w2, slot * h2 * h1, h2, h1, first, begin, n, spare, second)
            _add_bias(second, s2, b2, slot * h2, h2, n, _YES)
            _call_products(products[1], w3, slot * h2, 1, h2, second, _multiples(n, h2), n, spare, logits)
        else:
            _call_products(products[1], w3, slot * h1, 1, h1, first, begin, n, spare, logits)
        _add_bias(logits, s3, b3, slot, _ONE, n, _NO)


@_compiled
def ranges(rows: Array, slots: Array) -> Any:
    """Return minima and maxima, and whether slots are sorted."""
    if len(slots) == 0:
        return _ZERO, _ZERO, _ZERO, _ZERO, _YES
    least_row, most_row, least_slot, most_slot, rises = rows[0], rows[0], slots[0], slots[0], _YES
    for i in range(1, len(slots)):
        least_row, most_row = min(least_row, rows[i]), max(most_row, rows[i])
        least_slot, most_slot = min(least_slot, slots[i]), max(most_slot, slots[i])
        rises = rises and slots[i] >= slots[i - 1]
    return least_row, most_row, least_slot, most_slot, rises


@_compiled
def score_pairs(net: Any, x: Array, rows: Array, slots: Array, as_logits: bool, out: Array) -> None:
    """Score M pairs sorted by slot, `out [M]`; `x` as products read it."""
    d = net[_D]
    x_at, logits, at = np.empty(len(slots), np.int64), np.empty(len(slots), np.float32), _ZERO
    while at < len(slots):
        n = _ZERO
        while at + n < len(slots) and slots[at + n] == slots[at]:
            x_at[n] = rows[at + n] * d
            n += 1
        _logits_of_slots(net, slots[at], _ONE, x, x_at, n, logits)
        for i in range(n):
            out[at + i] = logits[i] if as_logits else _sigmoid(logits[i])
        at += n


@_compiled
def _score_groups(groups: Any, rows: Array, probes: Array, n: int, one_row: bool, scores: Array) -> None:
    """Turn logits into scores, for groups whose first member is among n pairs."""
    of, ptr, members = groups
    z = np.empty(len(members), np.float32)
    for i in range(n if len(members) else 0):
        group = of[probes[i]]
        if group < 0 or members[ptr[group]] != probes[i]:
            continue
        row, begin, size = 0 if one_row else rows[i], ptr[group], ptr[group + 1] - ptr[group]
        for k in range(size):
            z[k] = scores[row, members[begin + k]]
        _softmax(z, _ZERO, size, z)
        for k in range(size):
            scores[row, members[begin + k]] = z[k]


@_compiled
def _score_round(
    net: Any, x: Array, n_states: int, input_of: Array, groups: Any, pair_row: Array, pair_probe: Array, n_pairs: int,
    scores: Array,
) -> None:  # fmt: skip
    n_probes, d, of = scores.shape[1], net[_D], groups[0]
    if n_states == 1:
        pair_probe[:n_pairs].sort()
    elif n_pairs * _SPARSE < n_probes:
        key = np.empty(n_pairs, np.int64)
        for i in range(n_pairs):
            key[i] = pair_probe[i] * n_states + pair_row[i]
        key.sort()
        for i in range(n_pairs):
            pair_probe[i], pair_row[i] = key[i] // n_states, key[i] % n_states
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
        for i in range(n_pairs):
            pair_row[i], pair_probe[i] = sorted_row[i], sorted_probe[i]
    x_at, logits, at = np.empty(n_states, np.int64), np.empty(n_states, np.float32), _ZERO
    while at < n_pairs:
        probe, n = pair_probe[at], _ZERO
        while at + n < n_pairs and pair_probe[at + n] == probe:
            x_at[n] = (input_of[probe] * n_states + pair_row[at + n]) * d
            n += 1
        _logits_of_slots(net, probe, _ONE, x, x_at, n, logits)
        for i in range(n):
            scores[pair_row[at + i], probe] = logits[i] if of[probe] >= 0 else _sigmoid(logits[i])
        at += n
    _score_groups(groups, pair_row, pair_probe, n_pairs, n_states == 1, scores)


@_compiled
def _score_everything(net: Any, x: Array, n_states: int, input_of: Array, groups: Any, scores: Array) -> None:
    n_probes, d, linear, of = scores.shape[1], net[_D], net[_N_LAYERS] == 1, groups[0]
    x_at = np.empty(n_states, np.int64)
    at = _ZERO
    while at < n_probes:
        n = _ONE
        while linear and at + n < n_probes and n < 256 and input_of[at + n] == input_of[at]:
            n += 1
        for i in range(n_states):
            x_at[i] = (input_of[at] * n_states + i) * d
        logits = np.empty(n_states * n, np.float32)
        _logits_of_slots(net, at, n, x, x_at, n_states, logits)
        for i in range(n_states):
            for k in range(n):
                logit = logits[i * n + k]
                scores[i, at + k] = logit if of[at + k] >= 0 else _sigmoid(logit)
        at += n
    every = np.arange(n_probes)
    for i in range(n_states):
        _score_groups(groups, np.full(n_probes, i), every, n_probes, _NO, scores)


@_compiled
def _times_best_parent(parent_ptr: Array, parent_idx: Array, scores: Array, row: int, probe: int) -> None:
    begin, end = parent_ptr[probe], parent_ptr[probe + 1]
    if begin < end:
        best = scores[row, parent_idx[begin]]
        for e in range(begin + 1, end):
            above = scores[row, parent_idx[e]]
            if above > best or above != above:  # not max(): NaN stays NaN
                best = above
        scores[row, probe] *= best


@_compiled
def _close(
    parent_ptr: Array, parent_idx: Array, path_rule: bool, groups: Any, active: Array, row: int, mark: Array,
    stamp: int, probes: Array, begin: int, end: int,
) -> int:  # fmt: skip
    """Append to `probes[begin:end]` inactive ancestors (path rule) and group members, and mark them. Return the end."""
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
    """Keep the children `probes[begin:end]` that fit with ancestors and groups, best expanding parent first. Return the
    new end and the refused children. `admitted [P]`: values up to `base` are stale.
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
    admitted_stamp, refused, n_refused = base + 1, np.empty(len(children), np.int64), 0
    end = begin
    for at in np.argsort(key, kind="mergesort"):  # stable: ties to the lower id
        child = children[at]
        if admitted[child] == admitted_stamp:
            continue
        probes[end] = child
        last = end + 1
        if path_rule or of[child] >= 0:
            bundle = admitted_stamp + 1 + at  # this child's stamp
            admitted[child] = bundle
            walk = end
            while walk < last:
                probe = probes[walk]
                for e in range(parent_ptr[probe], parent_ptr[probe + 1] if path_rule else 0):
                    parent = parent_idx[e]
                    if not active[row, parent] and admitted[parent] != admitted_stamp and admitted[parent] != bundle:
                        admitted[parent] = bundle
                        probes[last] = parent
                        last += 1
                group = of[probe]
                for e in range(ptr[group] if group >= 0 else 0, ptr[group + 1] if group >= 0 else 0):
                    mate = members[e]
                    if not active[row, mate] and admitted[mate] != admitted_stamp and admitted[mate] != bundle:
                        admitted[mate] = bundle
                        probes[last] = mate
                        last += 1
                walk += 1
        if last - end <= room:
            for i in range(end, last):
                admitted[probes[i]] = admitted_stamp
            room -= last - end
            end = last
        else:
            refused[n_refused] = child
            n_refused += 1
    return end, refused[:n_refused]


@_compiled
def _by_row(rows: Array, probes: Array, n: int, n_states: int, to_rows: Array, to_probes: Array) -> None:
    """Group n pairs by row, stably."""
    to = np.zeros(n_states + 1, np.int64)
    for i in range(n):
        to[rows[i] + 1] += 1
    for row in range(n_states):
        to[row + 1] += to[row]
    for i in range(n):
        at = to[rows[i]]
        to_rows[at], to_probes[at] = rows[i], probes[i]
        to[rows[i]] = at + 1


@_compiled
def _by_state(rows: Array, probes: Array, ptr: Array, active: Array) -> Array:
    """Return active probes state by state, ascending, from unordered `rows`, `probes` `[E]`."""
    n_states, n_probes = active.shape
    out, n = (
        np.empty(len(probes), np.int64),
        len(probes),
    )  # int64, as other sorted lists: one compiled sort
    if n * _SPARSE >= active.size:
        at = 0
        for row in range(n_states):
            for p in range(n_probes):
                if active[row, p]:
                    out[at] = p
                    at += 1
        return out.astype(np.int32)
    to = ptr[:-1].copy()
    for i in range(n):
        out[to[rows[i]]] = probes[i]
        to[rows[i]] += 1
    for row in range(n_states):
        out[ptr[row] : ptr[row + 1]].sort()
    return out.astype(np.int32)


@_compiled
def descend(  # noqa: C901, PLR0915 (compiled as one)
    net: Any, child_ptr: Array, child_idx: Array, parent_ptr: Array, parent_idx: Array, groups: Any, input_of: Array,
    x: Array, start: Array, retained: Array, threshold: Array, alert: Array, path_rule: bool, max_rounds: int,
    most: int, everything: bool, cells: Any, lists: Array, marks: Any,
) -> Any:  # fmt: skip
    """Descend as `probemon.engine.cascade`. Return active probes (`ptr [N+1]`; ids, scores, over `alert`, `[E]`) and
    dropped rows and probes `[F]`.

    `retained`: active cells `row * P + probe`, ascending.
    `cells`: active, dropped, scores `[N, P]`, zeros before and after.
    `lists [8, N * P]`: scratch.
    `marks`: three `[P]` kept between calls, and their largest stamps `[2]`.
    Work is proportional to what is evaluated, not to P.
    """
    (active, dropped, scores), (mark, expanded, admitted, largest), states = cells, marks, _as_read(net[_WIDTH], x)
    n_states, n_probes = active.shape
    closes, stamp = path_rule or len(groups[2]) > 0, largest[0]
    frontier_row, frontier, new_row, new = lists[0], lists[1], lists[2], lists[3]
    every_row, every, n_every = lists[4], lists[5], _ZERO
    dropped_row, dropped_probe, n_dropped = lists[6], lists[7], 0
    n_active, n, at = np.zeros(n_states, np.int64), _ZERO, _ZERO
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
        for i in range(n):
            every_row[n_every + i], every[n_every + i] = frontier_row[i], frontier[i]
        n_every += n
        if not everything:
            _score_round(net, states, n_states, input_of, groups, frontier_row, frontier, n, scores)
            if path_rule:
                for i in range(n):  # by probe number: parents first
                    row = frontier_row[i] if n_states > 1 else 0
                    _times_best_parent(parent_ptr, parent_idx, scores, row, frontier[i])
        if n_rounds == max_rounds:
            break
        n_rounds += 1
        if n_states > 1:  # back to row order
            _by_row(frontier_row, frontier, n, n_states, new_row, new)
            frontier_row, frontier, new_row, new = new_row, new, frontier_row, frontier
        i, n_new = _ZERO, _ZERO
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
        if not active[row, child]:  # it may have fitted later through another parent
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
    """Mark in `[len(rows), P]` each row's best `most` non-exempt probes, ties to the lower id."""
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

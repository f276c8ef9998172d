"""DeviceCascade descends a hierarchy on a GPU without synchronising.

    cascade = DeviceCascade(plan, weights, input_of)
    step = cascade.descend(x, n_states, retained)      # enqueues all launches
    step.overflowed.any()   # these states have too many active probes: descend them elsewhere

`_begin` lists the first active probes. Per round, `_score` scores each list's newest entries (`_share`: softmax
groups), `_expand` computes path scores and appends children. `_finish` keeps the best, with ties as on the CPU. Rounds
are the ranks, a fixed number for capture. With several parents under the path rule, ancestors that a child brings may
open later: a state that could still open something overflows. A list's order varies: the first program to mark a child
appends it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from probemon.core.inputs import check_states, described
from probemon.engine.kernels.triton_matrix import (
    NARROW,
    ROWS,
    WARPS,
    matrix_meta,
    part_of_states,
    score_of,
    uses_matrix_units,
)
from probemon.engine.kernels.triton_pairs import (
    OPTIONS,
    PAIRS,
    aligned,
    arguments_of,
    layered_meta,
    linear_scores,
    part_of_probe,
)
from probemon.engine.kernels.triton_softmax import share_of
from probemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from probemon.core.plan import CascadePlan

_BLOCK = 64  # entries at a time
_LINKS = 64  # links at a time
_CLEARED = 1024  # marks at a time
_PROGRAMS = 528  # per round: four per H100 processor
_MOST = 1024  # active probes that one program can sort
NO_MATRIX = {"COLUMNS": 0, "STAGES": 0, "UNROLLED": 0, "INTERPRETED": False}
# Sort keys above those of scores, which end at 0x7FFFFFFF.
NO_NUMBER, NOTHING = tl.constexpr(0x7FFFFFFF + 1), tl.constexpr(0x7FFFFFFF + 2)


@triton.jit
def _append(ids_ptr, mark_ptr, candidate, valid, n, CAP):
    """Append unmarked candidates. Returns the new length, beyond `CAP` if some were lost."""
    won = valid & (tl.atomic_xchg(mark_ptr + candidate, 1, mask=valid) == 0)
    at = n + tl.cumsum(won.to(tl.int32), 0) - 1
    tl.store(ids_ptr + at, candidate, mask=won & (at < CAP))
    return n + tl.sum(won.to(tl.int32), axis=0)


@triton.jit
def _append_linked(ids_ptr, mark_ptr, ptr_ptr, idx_ptr, ids, valid, n, CAP, LINKS: tl.constexpr):
    """Append the probes that `ids` link to in CSR."""
    first = tl.load(ptr_ptr + ids, mask=valid, other=0)
    length = tl.where(valid, tl.load(ptr_ptr + ids + 1, mask=valid, other=0) - first, 0)
    end = tl.cumsum(length, 0)
    n_links, shift, lane = tl.sum(length, axis=0), first - (end - length), tl.arange(0, LINKS)
    for s in range(0, n_links, LINKS):
        at = s + lane
        of_lane = (at[:, None] < end[None, :]) & (at[:, None] >= (end - length)[None, :])
        link = at + tl.sum(tl.where(of_lane, shift[None, :], 0), axis=1)
        inside = at < n_links
        n = _append(ids_ptr, mark_ptr, tl.load(idx_ptr + link, mask=inside, other=0), inside, n, CAP)
    return n


@triton.jit
def _begin(
    start_ptr, n_start, kept_ptr, anc_ptr, anc_idx, ids_ptr, mark_ptr, arrived_ptr, begin_ptr, count_ptr, over_ptr,
    P, CAP, K, LIMIT, CLOSE: tl.constexpr, BLOCK: tl.constexpr, LINKS: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Begin the list of state b. `kept [B, K]` int32, -1 for none. Clears `mark` and `arrived [B, CAP]`."""
    b = tl.program_id(0).to(tl.int64)
    ids_ptr, mark_ptr, kept_ptr = ids_ptr + b * CAP, mark_ptr + b * P, kept_ptr + b * K
    i, none = tl.arange(0, BLOCK), tl.arange(0, CLEARED)
    for s in range(0, P, CLEARED):
        tl.store(mark_ptr + s + none, tl.zeros((CLEARED,), dtype=tl.int32), mask=s + none < P)
    for s in range(0, CAP, CLEARED):
        tl.store(arrived_ptr + b * CAP + s + none, tl.zeros((CLEARED,), dtype=tl.int32), mask=s + none < CAP)
    tl.debug_barrier()
    n = tl.full((), 0, dtype=tl.int32)
    for s in range(0, n_start, BLOCK):
        inside = s + i < n_start
        n = _append(ids_ptr, mark_ptr, tl.load(start_ptr + s + i, mask=inside, other=0), inside, n, CAP)
    for s in range(0, K, BLOCK):
        kept = tl.load(kept_ptr + s + i, mask=s + i < K, other=-1)
        kept = tl.where(kept < P, kept, -1)
        tl.debug_barrier()
        n = _append(ids_ptr, mark_ptr, kept, kept >= 0, n, CAP)
        if CLOSE:
            n = _append_linked(ids_ptr, mark_ptr, anc_ptr, anc_idx, kept, kept >= 0, n, CAP, LINKS)
    tl.store(over_ptr + b, (n > LIMIT).to(tl.int32))
    tl.store(begin_ptr + b, 0)
    tl.store(count_ptr + b, tl.minimum(n, CAP))


@triton.jit(do_not_specialize=["B"])
def _score(
    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr,
    ids_ptr, input_ptr, begin_ptr, count_ptr, parts_ptr, arrived_ptr, own_ptr, B, CAP, D, H1, H2, ONE,
    N_PARTS: tl.constexpr, LAYERS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_H2: tl.constexpr, BLOCK_PARTS: tl.constexpr, LOGITS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, UNROLLED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Score entries `begin` to `count` of state b; on matrix units if `COLUMNS`."""
    b = tl.program_id(1).to(tl.int64)
    begin, count = tl.load(begin_ptr + b), tl.load(count_ptr + b)
    if LAYERS == 1:  # `ROWS` is `PAIRS` of `_linear`, for equal bits
        first = tl.program_id(0) * ROWS
        if (first + ROWS > begin) & (first < count):
            entries = first + tl.arange(0, ROWS)
            inside = (entries >= begin) & (entries < count)
            probes = tl.load(ids_ptr + b * CAP + entries, mask=inside, other=0)
            rows = tl.load(input_ptr + probes, mask=inside, other=0) * B + b
            scores = linear_scores(
                x_ptr, w1_ptr, s1_ptr, b1_ptr, rows, probes, inside, D, SCALED, BLOCK_D, ROWS, LOGITS
            )
            tl.store(own_ptr + b * CAP + entries, scores, mask=inside)
    else:
        for task in range(begin * N_PARTS + tl.program_id(0), count * N_PARTS, tl.num_programs(0)):
            at, part = b * CAP + task // N_PARTS, task % N_PARTS
            probe = tl.load(ids_ptr + at)
            row = tl.load(input_ptr + probe) * B + b
            if COLUMNS > 0:
                column = tl.arange(0, COLUMNS)
                part_of_states(
                    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, row + 0 * column,
                    column == 0, probe, part, parts_ptr + at * N_PARTS * H2, arrived_ptr + at, own_ptr + at,
                    D, H1, H2, ONE, N_PARTS,
                    LAYERS, SCALED, BLOCK_D, ROWS, COLUMNS, BLOCK_H2, LOGITS, STAGES, UNROLLED, INTERPRETED,
                )  # fmt: skip
            else:
                part_of_probe(
                    x_ptr, w1_ptr, s1_ptr, b1_ptr, w2_ptr, s2_ptr, b2_ptr, w3_ptr, s3_ptr, b3_ptr, row, probe, part,
                    parts_ptr + at * N_PARTS * H2, arrived_ptr + at, own_ptr + at,
                    D, H1, H2, N_PARTS, LAYERS, SCALED, BLOCK_D, ROWS, BLOCK_H2, BLOCK_PARTS, LOGITS,
                )  # fmt: skip


@triton.jit
def _share(
    ids_ptr, own_ptr, score_ptr, begin_ptr, count_ptr, of_ptr, ptr_ptr, members_idx, P, CAP, MOST, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn logits of state b's newest entries, `own [B, CAP]`, into scores; `score [B, P]` holds the logits. Groups are
    whole unless the state overflows.
    """
    b = tl.program_id(0).to(tl.int64)
    ids_ptr, own_ptr, score_ptr = ids_ptr + b * CAP, own_ptr + b * CAP, score_ptr + b * P
    begin, count = tl.load(begin_ptr + b), tl.load(count_ptr + b)
    i = tl.arange(0, BLOCK)
    for s in range(begin, count, BLOCK):
        inside = s + i < count
        ids = tl.load(ids_ptr + s + i, mask=inside, other=0)
        tl.store(score_ptr + ids, tl.load(own_ptr + s + i, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # all logits are stored
    for s in range(begin, count, BLOCK):
        inside = s + i < count
        ids = tl.load(ids_ptr + s + i, mask=inside, other=0)
        z = tl.load(own_ptr + s + i, mask=inside, other=0.0)
        group = tl.load(of_ptr + ids, mask=inside, other=-1)
        grouped = inside & (group >= 0)
        first = tl.load(ptr_ptr + group, mask=grouped, other=0)
        last = tl.load(ptr_ptr + group + 1, mask=grouped, other=0)
        share = share_of(z, score_ptr, members_idx, first, last, grouped, MOST, BLOCK)
        tl.store(own_ptr + s + i, tl.where(grouped, share, score_of(tl.where(grouped, 0.0, z), False)), mask=inside)


@triton.jit
def _expand(
    ids_ptr, own_ptr, score_ptr, mark_ptr, begin_ptr, count_ptr, over_ptr, rank_ptr, threshold_ptr,
    child_ptr, child_idx, parent_ptr, parent_idx, anc_ptr, anc_idx, P, CAP, LIMIT, N_RANKS, MOST_PARENTS,
    PATH: tl.constexpr, CLOSE: tl.constexpr, OPEN: tl.constexpr, BLOCK: tl.constexpr, LINKS: tl.constexpr,
):  # fmt: skip
    """Store state b's newest scores in `score [B, P]`; append the children of those over threshold.

    `OPEN`: 1; in the last round 0 (nothing opens) or 2 (a state that could open something overflows).
    """
    b = tl.program_id(0).to(tl.int64)
    ids_ptr, own_ptr, mark_ptr, score_ptr = ids_ptr + b * CAP, own_ptr + b * CAP, mark_ptr + b * P, score_ptr + b * P
    begin, count = tl.load(begin_ptr + b), tl.load(count_ptr + b)
    i = tl.arange(0, BLOCK)
    for rank in range(0, N_RANKS):
        for s in range(begin, count, BLOCK):
            inside = s + i < count
            ids = tl.load(ids_ptr + s + i, mask=inside, other=0)
            score = tl.load(own_ptr + s + i, mask=inside, other=0.0)
            if PATH:
                inside = inside & (tl.load(rank_ptr + ids, mask=inside, other=-1) == rank)
                first = tl.load(parent_ptr + ids, mask=inside, other=0)
                last = tl.load(parent_ptr + ids + 1, mask=inside, other=0)
                best = tl.full((BLOCK,), -1.0, dtype=tl.float32)
                for e in range(0, MOST_PARENTS):
                    linked = inside & (first + e < last)
                    parent = tl.load(parent_idx + first + e, mask=linked, other=0)
                    above = tl.load(score_ptr + parent, mask=linked, other=-1.0)
                    best = tl.where((above > best) | (above != above), above, best)
                score = tl.where(first < last, score * best, score)
            tl.store(score_ptr + ids, score, mask=inside)
        tl.debug_barrier()  # parents' scores are stored
    n = count
    if OPEN > 0:
        for s in range(begin, count, BLOCK):
            inside = s + i < count
            ids = tl.load(ids_ptr + s + i, mask=inside, other=0)
            score = tl.load(score_ptr + ids, mask=inside, other=0.0)
            opens = inside & (score > tl.load(threshold_ptr + ids, mask=inside, other=0.0))
            n = _append_linked(ids_ptr, mark_ptr, child_ptr, child_idx, ids, opens, n, CAP, LINKS)
        if CLOSE and OPEN == 1:
            tl.debug_barrier()  # the new children are stored
            n_children = tl.minimum(n, CAP)
            for s in range(count, n_children, BLOCK):
                inside = s + i < n_children
                ids = tl.load(ids_ptr + s + i, mask=inside, other=0)
                n = _append_linked(ids_ptr, mark_ptr, anc_ptr, anc_idx, ids, inside, n, CAP, LINKS)
    if OPEN == 2:
        if n > count:
            tl.store(over_ptr + b, 1)
    else:
        if n > LIMIT:
            tl.store(over_ptr + b, 1)
        tl.store(begin_ptr + b, count)
        tl.store(count_ptr + b, tl.minimum(n, CAP))


@triton.jit
def _finish(
    ids_ptr, score_ptr, count_ptr, exempt_ptr, out_ptr, kept_ptr, P, CAP, K, KEEP, BLOCK_CAP: tl.constexpr,
):  # fmt: skip
    """Store state b's scores in list order, `out [B, CAP]`, and its best `KEEP` non-exempt ids, `kept [B, K]`."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_CAP)
    inside = i < tl.load(count_ptr + b)
    ids = tl.load(ids_ptr + b * CAP + i, mask=inside, other=0)
    score = tl.load(score_ptr + b * P + ids, mask=inside, other=0.0)
    tl.store(out_ptr + b * CAP + i, score, mask=inside)
    may = inside & (tl.load(exempt_ptr + ids, mask=inside, other=1) == 0)
    # Bits of non-negative floats sort like floats; NaN comes last.
    best_first = 0x7FFFFFFF - score.to(tl.int32, bitcast=True).to(tl.int64)
    high = tl.where(may, tl.where(score == score, best_first, NO_NUMBER), NOTHING)
    key = tl.sort((high << 31) | ids.to(tl.int64))
    kept = tl.where(((key >> 31) < NOTHING) & (i < KEEP), (key & 0x7FFFFFFF).to(tl.int32), -1)
    tl.store(kept_ptr + b * K + i, kept, mask=i < K)


@dataclass(frozen=True)
class DeviceDescent:
    """Results of N states on the device: `count [N]`; unordered `ids`, `scores` `[N, CAP]`; `kept [N, K]`, -1 for none;
    `overflowed [N]`; `largest [I * N]`, set by the caller. All are views of `memory` (int32), for one copy.
    """

    memory: Tensor
    count: Tensor
    ids: Tensor
    scores: Tensor
    kept: Tensor
    overflowed: Tensor
    largest: Tensor

    @staticmethod
    def of(n: int, cap: int, n_kept: int, n_inputs: int, memory: Tensor) -> DeviceDescent:
        """View them in `memory`."""
        shapes = ((n,), (n, cap), (n, cap), (n, n_kept), (n,), (n_inputs * n,))
        sizes = [-(-math.prod(shape) // 4) * 4 for shape in shapes]  # 16-byte aligned
        parts = memory[: sum(sizes)].split(sizes)
        views = [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]
        count, ids, scores, kept, overflowed, largest = views
        floats = torch.float32
        return DeviceDescent(memory, count, ids, scores.view(floats), kept, overflowed, largest.view(floats))

    @staticmethod
    def size(n: int, cap: int, n_kept: int, n_inputs: int) -> int:
        """Return their int32 count."""
        return sum(-(-size // 4) * 4 for size in (n, n * cap, n * cap, n * n_kept, n, n_inputs * n))


class DeviceCascade:
    """Descends by a plan that `fits`, over weights on one device, slot = probe."""

    def __init__(self, plan: CascadePlan, weights: Mapping[str, Tensor], input_of: np.ndarray) -> None:
        tree, self._plan = plan.tree, plan
        self._weights, self.device = weights, weights["w1"].device

        def put(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).to(self.device)

        self._limit = min(plan.config.max_loaded_probes, tree.n)
        self.cap = max(16, triton.next_power_of_2(self._limit))
        self.keep = min(plan.config.keep_top_k, self.cap) if plan.config.aggressive_pruning else self.cap
        self.n_kept = max(1, self.keep)
        self._close = plan.path_rule and not tree.is_tree
        groups = tree.groups
        self._most_members = int(groups.sizes.max(initial=0))
        self._groups = [put(groups.of), put(groups.ptr), put(groups.members if len(groups) else [0])]
        # Must be active with a probe: ancestors (path rule) and group members.
        with_it = [{p, *tree.ancestors(p)} if plan.path_rule else {p} for p in range(tree.n)]
        if len(groups):
            with_it = [{mate for probe in probes for mate in groups.mates(probe).tolist()} for probes in with_it]
        with_it = [probes - {p} for p, probes in enumerate(with_it)]
        self._anc_ptr = put(np.concatenate([[0], np.cumsum([len(probes) for probes in with_it])]))
        self._anc_idx = put(np.asarray([p for probes in with_it for p in sorted(probes)] or [0]))
        self._start, self._exempt = put(plan.start), put(plan.exempt)
        sizes = [at.stop - at.start for at in tree.rank_slices]
        self._rank = put(np.repeat(np.arange(len(sizes)), sizes))
        self._threshold = put(plan.expand_threshold, torch.float32)
        self._child_ptr, self._child_idx = put(tree.child_ptr), put(tree.child_idx if len(tree.child_idx) else [0])
        self._parent_ptr, self._parent_idx = put(tree.parent_ptr), put(tree.parent_idx if len(tree.parent_idx) else [0])
        self._most_parents = int(np.diff(tree.parent_ptr).max(initial=0))
        self._n_ranks = len(sizes)
        self._input_of, self._n_inputs = put(input_of), 1 + int(np.max(input_of))
        if len(input_of) != tree.n or len(weights["w1"]) != tree.n or np.min(input_of) < 0:
            raise ConfigError(
                f"weights of {len(weights['w1'])} probes and inputs of {len(input_of)} for a hierarchy of {tree.n}"
            )
        most = plan.config.max_rounds
        self._n_rounds = self._n_ranks if most is None else min(self._n_ranks, most)
        self._last_open = 2 if self._close and (most is None or most > self._n_ranks) else 0

    @staticmethod
    def fits(plan: CascadePlan) -> bool:
        """True if one program can sort a state's active probes."""
        return min(plan.config.max_loaded_probes, plan.tree.n) <= _MOST

    def descend(self, x: Tensor, n_states: int, retained: Tensor | None) -> DeviceDescent:
        """Enqueue the descent of x `[I * N, D]` in the pack's dtype. `retained [N, R]` int32, -1 for none."""
        check_states(x, self._weights["w1"].shape[2])
        if len(x) < self._n_inputs * n_states or x.device != self.device:
            raise ConfigError(
                f"x is {described(x)} on {x.device}: give {self._n_inputs} blocks of {n_states} states on {self.device}"
            )
        if retained is not None and (
            retained.dtype != torch.int32
            or retained.dim() != 2
            or len(retained) != n_states
            or retained.device != self.device
        ):
            raise ConfigError(
                f"retained is {described(retained)} on {retained.device}: give int32 [{n_states}, R] on {self.device}"
            )
        with torch.cuda.device_of(x):
            return self._descend(x, n_states, retained)

    def _descend(self, x: Tensor, n_states: int, retained: Tensor | None) -> DeviceDescent:
        weights, cap, n_probes = self._weights, self.cap, self._plan.tree.n
        _, h1, d = weights["w1"].shape
        n_layers = 1 + ("w2" in weights) + ("w3" in weights)
        h2 = weights["w2"].shape[1] if "w2" in weights else 1
        n_parts = triton.cdiv(h1, ROWS)  # 1 for a linear probe

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        begin, mark, arrived = empty(n_states), empty(n_states, n_probes), empty(n_states, cap)
        own, score = (empty(n_states, width, dtype=torch.float32) for width in (cap, n_probes))
        parts = empty(n_states * cap * n_parts * h2 if n_layers > 1 else 1, dtype=torch.float32)
        sizes = n_states, cap, self.n_kept, len(x) // n_states
        result = DeviceDescent.of(*sizes, empty(DeviceDescent.size(*sizes)))
        before = torch.full((n_states, 1), -1, dtype=torch.int32, device=self.device) if retained is None else retained
        path, x, before = self._plan.path_rule, aligned(x.contiguous()), before.contiguous()
        _begin[(n_states,)](
            self._start, len(self._start), before, self._anc_ptr, self._anc_idx, result.ids, mark, arrived, begin,
            result.count, result.overflowed, n_probes, cap, before.shape[1], self._limit,
            CLOSE=path or self._most_members > 0, BLOCK=_BLOCK, LINKS=_LINKS,
            CLEARED=_CLEARED, **OPTIONS,
        )  # fmt: skip
        layers, is_int8, grouped = arguments_of(weights), "w1_scale" in weights, self._most_members > 0
        if n_layers > 1 and uses_matrix_units(self.device, x.dtype):
            meta = matrix_meta(h1, h2, NARROW, n_layers, is_int8, grouped) | {"BLOCK_PARTS": 0, "num_warps": WARPS}
        else:
            meta = layered_meta(h1, h2, d, n_layers, is_int8, grouped) | NO_MATRIX | {"N_PARTS": n_parts}
        if n_layers == 1:
            meta["ROWS"], n_programs = PAIRS, triton.cdiv(cap, PAIRS)
        else:  # fills a GPU; exits quickly without work
            n_programs = min(cap * n_parts, max(_PROGRAMS // n_states, n_parts))
        for at in range(self._n_rounds + 1):
            _score[(n_programs, n_states)](
                x, *layers, result.ids, self._input_of, begin, result.count, parts, arrived, own,
                n_states, cap, d, h1, h2, 1.0, **meta, **OPTIONS,
            )  # fmt: skip
            if grouped:
                _share[(n_states,)](
                    result.ids, own, score, begin, result.count, *self._groups, n_probes, cap, self._most_members,
                    BLOCK=_BLOCK, **OPTIONS,
                )  # fmt: skip
            _expand[(n_states,)](
                result.ids, own, score, mark, begin, result.count, result.overflowed, self._rank, self._threshold,
                self._child_ptr, self._child_idx, self._parent_ptr, self._parent_idx, self._anc_ptr, self._anc_idx,
                n_probes, cap, self._limit, self._n_ranks if path else 1, self._most_parents,
                PATH=path, CLOSE=self._close, OPEN=1 if at < self._n_rounds else self._last_open, BLOCK=_BLOCK,
                LINKS=_LINKS, num_warps=8, **OPTIONS,
            )  # fmt: skip
        _finish[(n_states,)](
            result.ids, score, result.count, self._exempt, result.scores, result.kept, n_probes, cap, self.n_kept,
            self.keep, BLOCK_CAP=cap, num_warps=min(max(cap // 32, 4), 16), **OPTIONS,
        )  # fmt: skip
        return result

"""The descent's rule for active, fired and retained probes. Pure functions over masks `[N, P]`.

plan = CascadePlan.of(pack.tree, pack.score_rule, config, expand_threshold, always_on)
step = descend(plan, n_rows, retained, score)       # score(rows, probes) -> own scores [M] fp32
step.active, step.scores, step.dropped, retain(plan, step)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.plan import CascadePlan
from probemon.core.scores import Floats

# Own scores [M] fp32 of distinct (row, probe) pairs.
ScorePairs = Callable[[Ints, Ints], Floats]
T = TypeVar("T")
# Yields (rows, probes), is sent their scores, and returns T.
PairRequests = Generator[tuple[Ints, Ints], Floats, T]


@dataclass(frozen=True)
class Descent:
    """`active`, `dropped` `[N, P]` bool; `scores [N, P]` fp32, 0 if not active."""

    active: Mask
    dropped: Mask
    scores: Floats


def descend(plan: CascadePlan, n_rows: int, retained: Mask | None, score: ScorePairs) -> Descent:
    """Descend from base, always_on and `retained [N, P]` to the fixed point or `max_rounds`."""
    return answer(descend_in_rounds(plan, n_rows, retained), score)


def answer(asking: PairRequests[T], score: ScorePairs) -> T:
    """Score the requested pairs; return the generator's result."""
    try:
        pairs = next(asking)
        while True:
            pairs = asking.send(score(*pairs))
    except StopIteration as done:
        result: T = done.value
        return result


def descend_in_rounds(plan: CascadePlan, n_rows: int, retained: Mask | None) -> PairRequests[Descent]:
    """As `descend`, but yield each round's pairs."""
    scores = np.zeros((n_rows, plan.tree.n), dtype=np.float32)

    def fill(which: Mask) -> PairRequests[None]:
        rows, probes = np.nonzero(which)
        if len(rows):
            scores[rows, probes] = yield rows, probes
            if plan.path_rule:
                plan.tree.times_best_parent_of(scores, rows, probes)

    active, dropped = yield from _rounds(plan, n_rows, retained, scores, fill)
    return Descent(active, dropped, scores)


def apply_rule(plan: CascadePlan, everything: Floats, retained: Mask | None) -> Descent:
    """As `descend`, from all scores `[N, P]` (path scores under the path rule)."""

    def known(which: Mask) -> PairRequests[None]:
        yield from ()

    active, dropped = answer(_rounds(plan, len(everything), retained, everything, known), _nobody)
    return Descent(active, dropped, np.where(active, everything, np.float32(0)))


def _nobody(rows: Ints, probes: Ints) -> Floats:
    raise AssertionError("every score is known")


def _rounds(
    plan: CascadePlan, n_rows: int, retained: Mask | None, scores: Floats, fill: Callable[[Mask], PairRequests[None]]
) -> PairRequests[tuple[Mask, Mask]]:
    """Return active and dropped probes; `fill(mask)` writes the scores of newly active ones."""
    tree, config = plan.tree, plan.config
    active = np.repeat(plan.always[None], n_rows, axis=0)
    if retained is not None:
        active = plan.closed(active | retained)
    dropped = np.zeros_like(active)
    yield from fill(active)
    frontier = active
    rounds = 0
    while config.max_rounds is None or rounds < config.max_rounds:
        expanded = frontier & (scores > plan.expand_threshold)
        new = tree.children_of(expanded)
        new &= ~active
        if not new.any():
            break
        # In a tree, ancestors are active already.
        wanted = plan.closed(new) & ~active if plan.path_rule and not tree.is_tree else new
        if tree.n > config.max_loaded_probes:
            over = active.sum(axis=1) + wanted.sum(axis=1) > config.max_loaded_probes
            for row in np.flatnonzero(over):
                wanted[row] = _admit(plan, new[row].copy(), active[row], expanded[row], scores[row], dropped[row])
        active = active | wanted
        dropped &= ~active
        yield from fill(wanted)
        frontier = wanted
        rounds += 1
    return active, dropped


def _admit(plan: CascadePlan, new: Mask, active: Mask, expanded: Mask, scores: Floats, dropped: Mask) -> Mask:
    """Admit by the best expanding parent's score, ties to the lower id; mark others in `dropped`."""
    tree = plan.tree
    candidates = np.flatnonzero(new)
    best_scores = np.asarray([scores[[p for p in tree.parents(c) if expanded[p]]].max() for c in candidates.tolist()])
    admitted = np.zeros_like(active)
    room = plan.config.max_loaded_probes - int(active.sum())
    for child in candidates[np.lexsort((candidates, -best_scores))].tolist():
        ancestors = tree.ancestors(child) if plan.path_rule else set()
        bundle = [child, *ancestors]
        if len(tree.groups):
            bundle = list({mate for member in bundle for mate in tree.groups.mates(member).tolist()})
        bundle = [p for p in bundle if not active[p] and not admitted[p]]
        if len(bundle) <= room:
            admitted[bundle] = True
            room -= len(bundle)
        else:
            dropped[child] = True
    return admitted


def collect(step: Descent, alert: Floats) -> tuple[Ints, Any, Floats, Mask, Ints]:
    """Return active probes (`ptr [N+1]`; ids, scores, which exceed `alert`, `[E]`) and dropped counts `[N]`."""
    rows, probes = np.nonzero(step.active)
    values = step.scores[rows, probes]
    ptr = np.concatenate([[0], np.cumsum(step.active.sum(axis=1))])
    return ptr, probes.astype(np.int32), values, values > alert[probes], step.dropped.sum(axis=1)


def retain(plan: CascadePlan, step: Descent, rows: Ints) -> tuple[Mask, Ints]:
    """Return the next retained sets `[len(rows), P]`, and how many each released."""
    config = plan.config
    kept = step.active[rows] & ~plan.exempt
    released = np.zeros(len(kept), dtype=np.int64)
    for i, row in enumerate(rows.tolist()):
        n_dropped = int(np.count_nonzero(step.dropped[row]))
        if not n_dropped and (not config.aggressive_pruning or np.count_nonzero(kept[i]) <= config.keep_top_k):
            continue
        probes = np.flatnonzero(kept[i])
        order = probes[np.argsort(-step.scores[row, probes], kind="stable")]  # stable: ties to the lower id
        if config.aggressive_pruning:
            order = order[: config.keep_top_k]
        if n_dropped:
            before = len(order)
            order = order[step.scores[row, order] >= config.unload_threshold]
            while len(order) and _start_size(plan, order) + n_dropped > config.max_loaded_probes:
                order = order[:-1]
            released[i] = before - len(order)
        kept[i] = False
        kept[i, order] = True
    return kept, released


def _start_size(plan: CascadePlan, retained: Ints) -> int:
    mask = plan.always.copy()
    mask[retained] = True
    return int(plan.closed(mask[None]).sum())

"""The descent of the hierarchy: which probes are active, fired and retained. Pure functions over arrays.

    plan = CascadePlan.of(pack.tree, pack.score_rule, config, expand_threshold, always_on)
    step = descend(plan, n_rows, retained, score)       # score(rows, probes) -> own scores [M] fp32
    step.active, step.scores, step.dropped, retain(plan, step)

N rows are descended together, round by round, as masks `[N, P]`. Only a row that meets
`max_loaded_probes` is admitted probe by probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError
from probemon.hierarchy import ConceptTree, Ints, Mask
from probemon.types import CascadeConfig, Floats

# Own scores [M] fp32 of M (row, probe) pairs; each pair is asked for once.
ScorePairs = Callable[[Ints, Ints], Floats]


@dataclass(frozen=True)
class CascadePlan:
    """What does not change from step to step. `always [P]`: active at every state; `exempt [P]`: never retained."""

    tree: ConceptTree
    path_rule: bool
    config: CascadeConfig
    expand_threshold: Floats
    always: npt.NDArray[np.bool_]
    exempt: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls, tree: ConceptTree, score_rule: str, config: CascadeConfig, expand_threshold: Floats, always_on: Iterable[int]
    ) -> CascadePlan:
        """Check that the settings fit the hierarchy. Raises `ConfigError`."""
        present = set(tree.level.tolist())
        missing = [level for level in config.base_layers if level not in present]
        if missing:
            raise ConfigError(f"base_layers names level {missing[0]}, the pack has levels {sorted(present)}")
        exempt = np.isin(tree.level, list(config.base_layers))
        exempt[list(always_on)] = True
        always = exempt.copy()
        path_rule = score_rule == "path"
        if path_rule:
            always[tree.roots] = True
            always = tree.close(always[None])[0]
        if not always.any():
            raise ConfigError("nothing would ever be scored: give base_layers or always_on")
        if always.sum() > config.max_loaded_probes:
            raise ConfigError(
                f"base and always_on probes (with ancestors) are {int(always.sum())}, max_loaded_probes is "
                f"{config.max_loaded_probes}: raise it, or choose fewer base_layers"
            )
        return cls(tree, path_rule, config, expand_threshold, always, exempt)


def expand_thresholds(
    tree: ConceptTree, score_rule: str, rule: float | str, alert: Floats, calibrated: Floats, recommended: float | str | None
) -> Floats:
    """Expand threshold `[P]` of every probe for a `load_threshold`. Raises `ConfigError` where the pack lacks what it needs."""
    if rule == "auto":
        fallback = "exact" if score_rule == "path" and not np.isnan(alert).any() else 0.3
        rule = fallback if recommended is None else recommended
    if rule == "exact":
        if score_rule != "path":
            raise ConfigError("load_threshold='exact' needs the path rule, this pack's scores are independent: give a number")
        if np.isnan(alert).any():
            raise ConfigError(
                f"load_threshold='exact' needs every alert threshold, {int(np.isnan(alert).sum())} are not calibrated: give a number"
            )
        return tree.min_over_descendants(alert)
    if rule == "calibrated":
        lacking = np.isnan(calibrated) & tree.has_children
        if lacking.any():
            raise ConfigError(
                f"load_threshold='calibrated': {int(lacking.sum())} probes with children have no expand threshold: calibrate the pack"
            )
        return calibrated
    if isinstance(rule, str):
        raise ConfigError(f"load_threshold {rule!r}: give a number, 'auto', 'exact' or 'calibrated'")
    return np.full(tree.n, rule, dtype=np.float32)


@dataclass(frozen=True)
class Descent:
    """One descent of N rows: `active`, `dropped` `[N, P]` bool and `scores [N, P]` fp32, 0 where not active."""

    active: Mask
    dropped: Mask
    scores: Floats


def descend(plan: CascadePlan, n_rows: int, retained: Mask | None, score: ScorePairs) -> Descent:
    """Descend from base, always_on and the retained sets (`[N, P]`, None for empty) to the fixed point or `max_rounds`."""
    tree, config = plan.tree, plan.config
    active = np.repeat(plan.always[None], n_rows, axis=0)
    if retained is not None:
        active |= tree.close(retained) if plan.path_rule else retained
    scores = np.zeros((n_rows, tree.n), dtype=np.float32)
    dropped = np.zeros_like(active)
    frontier = active.copy()
    _score(plan, frontier, scores, score)
    rounds = 0
    while config.max_rounds is None or rounds < config.max_rounds:
        expanded = frontier & (scores > plan.expand_threshold)
        new = tree.children_of(expanded) & ~active
        if not new.any():
            break
        wanted = tree.close(new) & ~active if plan.path_rule and not tree.is_tree else new
        over = active.sum(axis=1) + wanted.sum(axis=1) > config.max_loaded_probes
        admitted = wanted
        for row in np.flatnonzero(over):
            admitted[row] = _admit(plan, new[row], active[row], expanded[row], scores[row], dropped[row])
        active |= admitted
        dropped &= ~active
        _score(plan, admitted, scores, score)
        frontier = admitted
        rounds += 1
    return Descent(active, dropped, scores)


def _score(plan: CascadePlan, which: Mask, scores: Floats, score: ScorePairs) -> None:
    rows, probes = np.nonzero(which)
    if not len(rows):
        return
    scores[rows, probes] = score(rows, probes)
    if not plan.path_rule:
        return
    tree = plan.tree
    for level in tree.level_slices:  # a parent's path score is ready before its child's
        here = (probes >= level.start) & (probes < level.stop) & tree.has_parents[probes]
        for row in np.unique(rows[here]):
            mine = probes[here & (rows == row)]
            scores[row, mine] *= tree.best_parent(scores[row : row + 1], mine)[0]


def _admit(
    plan: CascadePlan, new: Mask, active: Mask, expanded: Mask, scores: Floats, dropped: Mask
) -> npt.NDArray[np.bool_]:
    """Best first by the best expanding parent's score, ties to the lower id; marks in `dropped` what did not fit."""
    tree = plan.tree
    candidates = np.flatnonzero(new)
    best = np.asarray([scores[[p for p in tree.parents(c) if expanded[p]]].max() for c in candidates.tolist()])
    admitted = np.zeros_like(active)
    room = plan.config.max_loaded_probes - int(active.sum())
    for child in candidates[np.lexsort((candidates, -best))].tolist():
        bundle = [child, *tree.ancestors(child)] if plan.path_rule else [child]
        bundle = [p for p in bundle if not active[p] and not admitted[p]]
        if len(bundle) <= room:
            admitted[bundle] = True
            room -= len(bundle)
        else:
            dropped[child] = True
    return admitted


def retain(plan: CascadePlan, step: Descent) -> tuple[Mask, Ints]:
    """The next step's retained sets `[N, P]`, and how many each row released to make room."""
    config = plan.config
    kept = step.active & ~plan.exempt
    released = np.zeros(len(kept), dtype=np.int64)
    for row in range(len(kept)):
        probes = np.flatnonzero(kept[row])
        order = probes[np.lexsort((probes, -step.scores[row, probes]))].tolist()
        if config.aggressive_pruning:
            order = order[: config.keep_top_k]
        n_dropped = int(step.dropped[row].sum())
        if n_dropped:
            before = len(order)
            order = [p for p in order if step.scores[row, p] >= config.unload_threshold]
            while order and _start_size(plan, order) + n_dropped > config.max_loaded_probes:
                order.pop()
            released[row] = before - len(order)
        kept[row] = False
        kept[row, order] = True
    return kept, released


def _start_size(plan: CascadePlan, retained: list[int]) -> int:
    mask = plan.always.copy()
    mask[retained] = True
    return int((plan.tree.close(mask[None]) if plan.path_rule else mask).sum())

"""Degradation levels: what a run leaves out to keep its latency budget, but never concepts with rules.

    plan = narrowed(plan, pack, NAMED)

| level | also leaves out |
|---|---|
| all | nothing |
| audit | the audit |
| depth | concepts without children, unless scored at every token |
| named | concepts that neither have rules nor are always on |
| sampled | prompts, 7 of 8 generated tokens; without rules only |
| off | every token; without rules only |
"""

from __future__ import annotations

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.core.scores import PROMPT
from probemon.engine.scorer import Plan
from probemon.packs.group import AnyPack
from probemon.tracking.align import PlacedTokens

ALL, AUDIT, DEPTH, NAMED, SAMPLED, OFF = range(6)
NAMES = ("all", "audit", "depth", "named", "sampled", "off")
EVERY = 8
LEFT_OUT = {
    SAMPLED: f"the latency budget: one generated token in {EVERY} is scored",
    OFF: "the latency budget: nothing is scored",
}


def degradations_of(plan: Plan, pack: AnyPack, *, audited: bool, ruled: bool) -> tuple[int, ...]:
    """Return the degradations that leave out more of `plan` than the ones before."""
    degradations, n_watched = [AUDIT] if audited else [], _n_watched(plan)
    for degradation in (DEPTH, NAMED):
        n = _n_watched(narrowed(plan, pack, degradation))
        if 0 < n < n_watched:
            degradations.append(degradation)
            n_watched = n
    return (*degradations, *(() if ruled else (SAMPLED, OFF)))


def narrowed(plan: Plan, pack: AnyPack, degradation: int) -> Plan:
    """Return the plan of a degradation. Without named concepts, `named` equals `depth`."""
    if degradation < DEPTH:
        return plan
    if degradation == DEPTH or not plan.named.any():
        return plan.narrowed(plan.always | _with_children(pack))
    return plan.narrowed(plan.named)


def leaves_out(degradation: int, placed: PlacedTokens) -> str:
    """Return why tokens are not scored at a degradation, or ""."""
    if degradation < SAMPLED or (
        degradation == SAMPLED and placed.phase != PROMPT and not (placed.columns % EVERY).all()
    ):
        return ""
    return LEFT_OUT[degradation]


def _with_children(pack: AnyPack) -> Mask:
    return np.asarray(pack.tree.has_children)


def _n_watched(plan: Plan) -> int:
    return plan.always.size if plan.watched is None else int(np.count_nonzero(plan.watched))

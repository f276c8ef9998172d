"""Rungs: what a run leaves out, one after another, to hold a latency budget. Never what has a rule.

    rungs = rungs_of(plan, pack, audited=True, ruled=False)         # those that would leave something out
    plan = narrowed(plan, pack, NAMED)

| rung | name | what is left out |
|---|---|---|
| 0 | all | nothing |
| 1 | audit | the audit |
| 2 | depth | also concepts without children, but those that are scored at every token |
| 3 | named | also all but the concepts that have rules or are always on |
| 4 | sampled | also seven of eight generated tokens, and prompts; not where there are rules |
| 5 | off | every token; not where there are rules |
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
EVERY = 8  # on the rung `sampled` one generated token in so many is scored
LEFT_OUT = {
    SAMPLED: f"the latency budget: one generated token in {EVERY} is scored",
    OFF: "the latency budget: nothing is scored",
}


def rungs_of(plan: Plan, pack: AnyPack, *, audited: bool, ruled: bool) -> tuple[int, ...]:
    """Return the rungs that leave out more of `plan` than those before; `audited`, `ruled`: whether it has an audit,
    and rules.
    """
    rungs, n_watched = [AUDIT] if audited else [], _n_watched(plan)
    for rung in (DEPTH, NAMED):
        n = _n_watched(narrowed(plan, pack, rung))
        if 0 < n < n_watched:
            rungs.append(rung)
            n_watched = n
    return (*rungs, *(() if ruled else (SAMPLED, OFF)))


def narrowed(plan: Plan, pack: AnyPack, rung: int) -> Plan:
    """Return the plan of a rung. Where nothing is always on by name, what every token begins with stays."""
    if rung < DEPTH:
        return plan
    if rung == DEPTH or not plan.named.any():
        return plan.narrowed(plan.always | _with_children(pack))
    return plan.narrowed(plan.named)


def leaves_out(rung: int, placed: PlacedTokens) -> str:
    """Return why these tokens are not scored on a rung, "" where they are."""
    if rung < SAMPLED or (rung == SAMPLED and placed.phase != PROMPT and not (placed.columns % EVERY).all()):
        return ""
    return LEFT_OUT[rung]


def _with_children(pack: AnyPack) -> Mask:
    return np.asarray(pack.tree.has_children)


def _n_watched(plan: Plan) -> int:
    return plan.always.size if plan.watched is None else int(np.count_nonzero(plan.watched))

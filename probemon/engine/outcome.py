"""OutcomeMaker turns the descents of N states into an Outcome.

    maker = OutcomeMaker(pack, block_of)
    outcome = maker.of(plan, step, inputs.largest, retained, keep)     # step: a Descent of N states
    for i in range(N): outcome.probes[outcome.ptr[i] : outcome.ptr[i + 1]]

A state without a number for every active probe is unseen: it shows nothing and retains what it had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import NO_SCORE, SEEN, unseen_inputs
from probemon.core.plan import CascadePlan
from probemon.core.scores import Floats
from probemon.engine.cascade import Descent, collect, retain
from probemon.packs.pack import ProbePack


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds what came of N states: E active probes state by state (`ptr [N+1]`, `probes`, `values`, `fired`), counts
    `[N]`, and the next retained sets `kept`.

    `unseen [N]`: SEEN, or why a state has no scores, and so no active probes (`probemon.core.inputs`).
    """

    ptr: Ints
    probes: Any
    values: Floats
    fired: Mask
    n_active: Ints
    n_dropped: Ints
    n_evaluated: Ints
    n_released: Ints
    n_late: Ints
    unseen: Ints
    kept: Mask


class OutcomeMaker:
    """Makes outcomes of the descents of one pack. `block_of [P]`: the block of the inputs that each probe reads."""

    def __init__(self, pack: ProbePack, block_of: Ints) -> None:
        self._pack, self._block_of = pack, block_of
        self._alert = pack.alert_threshold.numpy()

    def of(
        self,
        plan: CascadePlan,
        step: Descent,
        largest: Floats,
        retained: Mask | None,
        keep: Ints,
        *,
        late: Mask | None = None,
        everything: bool = False,
    ) -> Outcome:
        """Make the outcome of a descent of states with these largest inputs; the states `keep` retain something.

        `late [N, P]`: probes whose weights were not there. `everything`: every probe was evaluated.
        """
        n = len(step.active)
        if late is not None:
            # A path score over a late parent is late as well.
            late = np.asarray(late | (step.active & np.isnan(step.scores) & late.any(axis=1, keepdims=True)))
            step.active[late], step.scores[late] = False, 0
        unseen = self.take_out_unseen(step, largest)
        seen = unseen == SEEN
        ptr, probes, values, fired, n_dropped = collect(step, self._alert)
        released = np.zeros(n, dtype=np.int64)
        kept, released[keep] = retain(plan, step, keep)
        if retained is not None:
            kept[~seen[keep]] = retained[keep][~seen[keep]]  # what could not be seen changes nothing
        n_active = ptr[1:] - ptr[:-1]
        n_evaluated = np.where(seen, self._pack.n_probes, 0) if everything else n_active
        n_late = np.zeros(n, dtype=np.int64) if late is None else (late & seen[:, None]).sum(axis=1)
        return Outcome(
            ptr=ptr,
            probes=probes,
            values=values,
            fired=fired,
            n_active=n_active,
            n_dropped=n_dropped + n_late,
            n_evaluated=n_evaluated,
            n_released=released,
            n_late=n_late,
            unseen=unseen,
            kept=kept,
        )

    def fired(self, probes: Any, values: Floats) -> Mask:
        """Say which of these scores are over their alert thresholds."""
        return np.asarray(values > self._alert[probes])

    def beyond(self, largest: Floats, n: int, rows: Ints, probes: Ints) -> Mask:
        """Say which of M pairs of N states and checked probes have no score, because their sums may overflow.

        `largest [I * N]` of the prepared inputs and the weights decide it alone: implementations add up in different
        orders, and what overflows in one order need not in another.
        """
        limit, groups = self._pack.input_limit, self._pack.tree.groups
        if len(groups):  # without one of its logits no member of a group has a score
            limit = limit.copy()
            lowest = np.fmin.reduceat(limit[groups.members], groups.ptr[:-1])
            limit[groups.members] = np.repeat(lowest, groups.sizes)
        return np.asarray(largest[self._block_of[probes] * n + rows] > limit[probes])

    def is_small(self, largest: Floats) -> bool:
        """Say whether all inputs are so small that no checked probe can overflow."""
        # In fp64: rounded to fp32 a limit may be infinite, or 0. NaN is not small.
        return float(largest.max(initial=0)) <= self._pack.lowest_input_limit < math.inf

    def take_out_unseen(self, step: Descent, largest: Floats) -> Ints:
        """Say why each state has no scores, if it has none: by its input, or because an active probe has none. Such
        states lose their active and dropped probes.

        A descent goes wrong only after such a probe became active, and it stays so: all ways agree on the states.
        """
        n = len(step.active)
        if self.is_small(largest):
            return np.zeros(n, dtype=np.int64)
        unseen = unseen_inputs(largest, n)
        rows, probes = np.nonzero(step.active)
        without = np.zeros(n, dtype=bool)
        without[rows[self.beyond(largest, n, rows, probes)]] = True
        unseen = np.where((unseen == SEEN) & without, NO_SCORE, unseen)
        step.active[unseen != SEEN] = False
        step.dropped[unseen != SEEN] = False
        return unseen

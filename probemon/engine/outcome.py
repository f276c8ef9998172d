"""OutcomeMaker turns the descents of N states into an Outcome.

    maker = OutcomeMaker(pack, block_of)
    outcome = maker.of(plan, step, inputs.largest, retained, keep)     # step: a Descent of N states
    for i in range(N): outcome.probes[outcome.ptr[i] : outcome.ptr[i + 1]]

A state is unseen if an active probe has no score; it keeps its retained set.
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
    """Results of N states: active probes (`ptr [N+1]`; `probes`, `values`, `fired` `[E]`), counts `[N]`, the next
    retained sets `kept`; `unseen [N]`: SEEN, or why scores are missing (`probemon.core.inputs`).
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
    """Makes one pack's outcomes. `block_of [P]`: each probe's block of inputs."""

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
        """Make the outcome of a descent; only the states `keep` get retained sets.

        `late [N, P]`: probes that were not resident. `everything`: all were evaluated.
        """
        n = len(step.active)
        if late is not None:
            # Path scores below a late parent are late, too.
            late = np.asarray(late | (step.active & np.isnan(step.scores) & late.any(axis=1, keepdims=True)))
            step.active[late], step.scores[late] = False, 0
        unseen = self.take_out_unseen(step, largest)
        seen = unseen == SEEN
        ptr, probes, values, fired, n_dropped = collect(step, self._alert)
        released = np.zeros(n, dtype=np.int64)
        kept, released[keep] = retain(plan, step, keep)
        if retained is not None:
            kept[~seen[keep]] = retained[keep][~seen[keep]]
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
        """Return which scores exceed their alert thresholds."""
        return np.asarray(values > self._alert[probes])

    def beyond(self, largest: Floats, n: int, rows: Ints, probes: Ints) -> Mask:
        """Return which of M pairs have no score because their sums may overflow.

        Only `largest [I * N]` and weights decide: implementations add in different orders.
        """
        limit, groups = self._pack.input_limit, self._pack.tree.groups
        if len(groups):  # groups need all members' logits
            limit = limit.copy()
            lowest = np.fmin.reduceat(limit[groups.members], groups.ptr[:-1])
            limit[groups.members] = np.repeat(lowest, groups.sizes)
        return np.asarray(largest[self._block_of[probes] * n + rows] > limit[probes])

    def is_small(self, largest: Floats) -> bool:
        """True if no checked probe can overflow."""
        # fp64: in fp32 a limit may round to 0 or infinity.
        return float(largest.max(initial=0)) <= self._pack.lowest_input_limit < math.inf

    def take_out_unseen(self, step: Descent, largest: Floats) -> Ints:
        """Return why states have no scores, and clear their active and dropped probes.

        Such a probe stays active, so all ways agree.
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

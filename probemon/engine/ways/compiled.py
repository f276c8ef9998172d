"""Compiled: a whole descent in one compiled call, over weights that lie in memory where numba reads them.

way = Compiled(pack, arena, block_of, outcomes)
outcome = way.evaluate(plan, inputs, retained, keep)
"""

from __future__ import annotations

import math

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import Inputs
from probemon.core.plan import CascadePlan
from probemon.engine.cascade import Descent, PairRequests
from probemon.engine.kernels.numba_compiled import best, collect
from probemon.engine.kernels.numba_cpu import CompiledNet
from probemon.engine.memory.arena import ResidentArena
from probemon.engine.outcome import Outcome, OutcomeMaker
from probemon.packs.pack import ProbePack


class Compiled:
    """Descends in compiled code; with `everything` it scores every probe first, and applies the rule to the scores."""

    def __init__(
        self, pack: ProbePack, arena: ResidentArena, block_of: Ints, outcomes: OutcomeMaker, *, everything: bool = False
    ) -> None:
        self._pack, self._arena, self._block_of, self._outcomes = pack, arena, block_of, outcomes
        self._n_blocks, self._everything = 1 + int(block_of.max()), everything
        self._alert = pack.alert_threshold.numpy()
        self._net = CompiledNet.of(arena.weights)

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
        """Evaluate states that start from `retained` (None: memoryless); the states `keep` retain something."""
        step = self._descend(plan, inputs, retained)
        # In fp64, as in `OutcomeMaker.is_small`: then no state is unseen.
        if step.dropped.any() or not float(inputs.largest.max(initial=0)) <= self._pack.lowest_input_limit < math.inf:
            outcome = self._outcomes.of(plan, step, inputs.largest, retained, keep, everything=self._everything)
            self._arena.used(int(outcome.n_evaluated.sum()))
            return outcome
        ptr, probes, values, fired, none = collect(step.active, step.dropped, step.scores, self._alert)
        n_active = ptr[1:] - ptr[:-1]
        most = plan.config.keep_top_k if plan.config.aggressive_pruning else self._pack.n_probes
        kept = best(ptr, probes, values, plan.exempt, keep, most)
        n_evaluated = np.full(len(inputs), self._pack.n_probes) if self._everything else n_active
        self._arena.used(int(n_evaluated.sum()))
        return Outcome(ptr, probes, values, fired, n_active, none, n_evaluated, none, none, none, kept)

    def requests(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, late: Mask | None
    ) -> PairRequests[Outcome]:
        """`evaluate`: a compiled descent asks for nothing."""
        yield from ()
        return self.evaluate(plan, inputs, retained, keep)

    def _descend(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None) -> Descent:
        tree, checked = plan.tree, self._arena.checked  # asked before anything is read: the file may have been cut
        active, dropped, scores = self._net.descend(
            (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx),
            self._block_of,
            self._n_blocks,
            inputs.values,
            len(inputs),
            plan.start,
            retained,
            plan.expand_threshold,
            path_rule=plan.path_rule,
            max_rounds=plan.config.max_rounds,
            max_active=plan.config.max_loaded_probes,
            everything=self._everything,
        )
        # Weights are looked at when they are first used, before anybody is shown what came of them.
        if not checked.all():
            used = ~checked if self._everything else active.any(axis=0) & ~checked
            if used.any():
                self._arena.check(np.flatnonzero(used))
        return Descent(active, dropped, scores)

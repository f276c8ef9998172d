"""Compiled descends in one compiled call, over weights that lie in memory where numba reads them.

way = Compiled(pack, arena, block_of, outcomes)
outcome = way.evaluate(plan, inputs, retained, keep)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import Inputs, check_states
from probemon.core.plan import CascadePlan
from probemon.core.softmax_groups import SoftmaxGroups
from probemon.engine.cascade import Descent, PairRequests
from probemon.engine.kernels.numba_compiled import Array, best, collect, descend
from probemon.engine.kernels.numba_cpu import views_of
from probemon.engine.memory.arena import ResidentArena
from probemon.engine.outcome import Outcome, OutcomeMaker
from probemon.errors import ConfigError
from probemon.packs.pack import ProbePack


class Compiled:
    """Descends in compiled code, as a `Way`; with `everything` it scores every probe first, and searches the scores."""

    def __init__(
        self, pack: ProbePack, arena: ResidentArena, block_of: Ints, outcomes: OutcomeMaker, *, everything: bool = False
    ) -> None:
        self._pack, self._arena, self._block_of, self._outcomes = pack, arena, block_of, outcomes
        self._n_blocks, self._everything = 1 + int(block_of.max()), everything
        self._alert = pack.alert_threshold.numpy()
        self._net = CompiledNet(arena.weights)

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
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
        yield from ()  # it asks for nothing
        return self.evaluate(plan, inputs, retained, keep)

    def _descend(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None) -> Descent:
        tree, checked = plan.tree, self._arena.checked  # asked before anything is read: the file may have been cut
        active, dropped, scores = self._net.descend(
            (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx),
            tree.groups,
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
        # Weights are checked when they are first used, before anybody is shown what came of them.
        if not checked.all():
            used = ~checked if self._everything else active.any(axis=0) & ~checked
            if used.any():
                self._arena.check(np.flatnonzero(used))
        return Descent(active, dropped, scores)


class CompiledNet:
    """Calls compiled code over stacked weights on a CPU, which must stay alive."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._net = views_of(weights)

    def descend(
        self, links: tuple[Array, Array, Array, Array], groups: SoftmaxGroups, input_of: Array, n_inputs: int,
        hidden: Tensor, n_states: int, start: Array, retained: Array | None, threshold: Array,
        *, path_rule: bool, max_rounds: int | None, max_active: int, everything: bool,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """Return active and dropped `[N, P]` bool, scores `[N, P]`.

        `links`: child_ptr, child_idx, parent_ptr, parent_idx of a hierarchy that was checked; `groups`: its softmax
        groups, of which `start` has all members or none.
        `input_of [P]`: the input that each probe reads, under `n_inputs`.
        `hidden [I * N, D]`: the prepared states.
        `start`: the probes that are always active.
        `everything`: whether all probes are scored at once, and the scores searched.
        """
        shape, width = (n_states, len(input_of)), self._net[9]
        check_states(hidden, width)
        n_slots = len(self._net[0]) // (width * self._net[10])
        if (
            hidden.shape[0] < n_inputs * n_states
            or shape[1] > n_slots
            or (retained is not None and retained.shape != shape)
        ):
            raise ConfigError(
                f"{len(hidden)} prepared states for {n_states} states and {n_inputs} inputs, weights of {n_slots}"
                f" probes for {shape[1]}, retained sets {None if retained is None else retained.shape}: give N states"
                f" for each input, and retained sets {list(shape)}"
            )
        active, dropped, scores = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        descend(
            self._net, *links, (groups.of, groups.ptr, groups.members), input_of,
            hidden.to(torch.float32).contiguous().view(-1).numpy(), start,
            np.empty((0, shape[1]), np.bool_) if retained is None else retained, threshold,
            path_rule, -1 if max_rounds is None else max_rounds, max_active, everything, active, dropped, scores,
        )  # fmt: skip
        return active, dropped, scores

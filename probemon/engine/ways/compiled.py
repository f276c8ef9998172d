"""Compiled descends in one compiled call, over weights in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import Inputs, check_states
from probemon.core.plan import CascadePlan
from probemon.core.scores import Floats
from probemon.core.softmax_groups import SoftmaxGroups
from probemon.engine.cascade import Descent, PairRequests
from probemon.engine.kernels.numba_compiled import Array, best, descend
from probemon.engine.kernels.numba_cpu import views_of
from probemon.engine.memory.arena import ResidentArena
from probemon.engine.outcome import Outcome, OutcomeMaker
from probemon.errors import ConfigError
from probemon.packs.pack import ProbePack

# (state, probe) cells whose arrays a thread keeps: 6 bytes each, 64 in lists, whose unused pages stay untouched.
_KEPT_CELLS, _KEPT_LISTS = 8 << 20, 256 << 10
_NOTHING = np.empty(0, np.int64)


class Compiled:
    """Descends in compiled code, as a `Way`; `everything`: scores every probe first."""

    def __init__(
        self, pack: ProbePack, arena: ResidentArena, block_of: Ints, outcomes: OutcomeMaker, *, everything: bool = False
    ) -> None:
        self._pack, self._arena, self._block_of, self._outcomes = pack, arena, block_of, outcomes
        self._n_blocks, self._everything = 1 + int(block_of.max()), everything
        self._alert = pack.alert_threshold.numpy()
        self._net, self._all_checked = CompiledNet(arena.weights), False

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
        result = self._descend(plan, inputs, retained)
        # fp64, as in `OutcomeMaker.is_small`.
        is_small = inputs.most <= self._pack.lowest_input_limit < math.inf
        if len(result.dropped_rows) or not is_small:
            step = result.descent(self._pack.n_probes)
            outcome = self._outcomes.of(plan, step, inputs.largest, retained, keep, everything=self._everything)
            self._arena.used(int(outcome.n_evaluated.sum()))
            return outcome
        n_active = result.ptr[1:] if len(result.ptr) == 2 else result.ptr[1:] - result.ptr[:-1]
        most = plan.config.keep_top_k if plan.config.aggressive_pruning else self._pack.n_probes
        kept = best(result.ptr, result.probes, result.values, plan.exempt, keep, most)
        n_evaluated = np.full(len(inputs), self._pack.n_probes) if self._everything else n_active
        self._arena.used(len(inputs) * self._pack.n_probes if self._everything else int(result.ptr[-1]))
        none = np.zeros(len(inputs), dtype=np.int64)
        return Outcome(
            ptr=result.ptr,
            probes=result.probes,
            values=result.values,
            fired=result.fired,
            n_active=n_active,
            n_dropped=none,
            n_evaluated=n_evaluated,
            n_released=none,
            n_late=none,
            unseen=none,
            kept=kept,
        )

    def requests(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, late: Mask | None
    ) -> PairRequests[Outcome]:
        yield from ()
        return self.evaluate(plan, inputs, retained, keep)

    def _descend(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None) -> FoundActive:
        tree, checked = plan.tree, self._arena.checked  # first: the file may have been truncated
        result = self._net.descend(
            (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx),
            tree.groups,
            self._block_of,
            self._n_blocks,
            inputs.values,
            len(inputs),
            plan.start,
            retained,
            plan.expand_threshold,
            self._alert,
            path_rule=plan.path_rule,
            max_rounds=plan.config.max_rounds,
            max_active=plan.config.max_loaded_probes,
            everything=self._everything,
        )
        # Weights are checked at first use.
        if not self._all_checked:
            used = np.arange(len(checked)) if self._everything else result.probes
            new = used[~checked[used]]
            if len(new):
                self._arena.check(np.unique(new).astype(np.int64))
            self._all_checked = bool(checked.all())
        return result


@dataclass(frozen=True)
class FoundActive:
    """Active probes of N states (`ptr [N+1]`; ids, scores, firing `[E]`), and dropped pairs `[F]`."""

    ptr: Ints
    probes: Ints
    values: Floats
    fired: Mask
    dropped_rows: Ints
    dropped_probes: Ints

    def descent(self, n_probes: int) -> Descent:
        n = len(self.ptr) - 1
        active, dropped = np.zeros((n, n_probes), dtype=bool), np.zeros((n, n_probes), dtype=bool)
        scores, rows = np.zeros((n, n_probes), dtype=np.float32), np.repeat(np.arange(n), np.diff(self.ptr))
        active[rows, self.probes], scores[rows, self.probes] = True, self.values
        dropped[self.dropped_rows, self.dropped_probes] = True
        return Descent(active, dropped, scores)


class CompiledNet:
    """Calls compiled code over stacked CPU weights, which must stay alive."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._views, self._work = views_of(weights), _Work()
        self._net = tuple(self._views)  # a plain tuple is faster

    def descend(
        self, links: tuple[Array, Array, Array, Array], groups: SoftmaxGroups, input_of: Array, n_inputs: int,
        hidden: Tensor, n_states: int, start: Array, retained: Array | None, threshold: Array, alert: Array,
        *, path_rule: bool, max_rounds: int | None, max_active: int, everything: bool,
    ) -> FoundActive:  # fmt: skip
        """Descend for N states.

        `links`: child_ptr, child_idx, parent_ptr, parent_idx of a checked hierarchy.
        `groups`: `start` has all members of a softmax group or none.
        `input_of [P]`: the input of each probe, below `n_inputs`.
        `hidden [I * N, D]`: the prepared states.
        `everything`: score all probes first.
        """
        shape, views = (n_states, len(input_of)), self._views
        check_states(hidden, views.d)
        x = (hidden if hidden.dtype == torch.float32 else hidden.to(torch.float32)).numpy()
        n_slots = len(views.w1) // (views.width * views.d * views.h1)
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
        work = self._work.cells(*shape), self._work.lists(n_states * shape[1]), self._work.marks(shape[1])
        try:
            return FoundActive(*descend(
                self._net, *links, (groups.of, groups.ptr, groups.members), input_of,
                np.ascontiguousarray(x).reshape(-1), start,
                _NOTHING if retained is None else retained.reshape(-1).nonzero()[0], threshold, alert,
                path_rule, -1 if max_rounds is None else max_rounds, max_active, everything,
                *work,
            ))  # fmt: skip
        except BaseException:  # left-over marks would pass for active probes
            self._work = _Work()
            raise


class _Work(threading.local):
    """A thread's reusable arrays, which a descent leaves clear: allocating them would take time proportional to P."""

    def __init__(self) -> None:
        self._n_cells, self._flat = 0, _zeros(1, 0)
        self._cells = _zeros(0, 0)  # views of the last shape
        self._lists = np.empty((8, 0), np.int64)
        self._marks = self._new_marks(0)

    def cells(self, n_states: int, n_probes: int) -> tuple[Array, Array, Array]:
        """Active, dropped and scores `[N, P]`, zeros."""
        n = n_states * n_probes
        if n > _KEPT_CELLS:
            return _zeros(n_states, n_probes)
        if n > self._n_cells:
            self._n_cells, self._flat = n, _zeros(1, n)
        elif self._cells[0].shape == (n_states, n_probes):
            return self._cells
        active, dropped, scores = (array[0, :n].reshape(n_states, n_probes) for array in self._flat)
        self._cells = active, dropped, scores
        return self._cells

    def lists(self, n: int) -> Array:
        """Lists of cells, `[8, n]` or longer."""
        if n > _KEPT_LISTS:
            return np.empty((8, n), np.int64)
        if n > self._lists.shape[1]:
            self._lists = np.empty((8, n), np.int64)
        return self._lists

    def marks(self, n_probes: int) -> tuple[Array, Array, Array, Array]:
        """Three arrays of marks `[P]`, and the largest marks used `[2]`."""
        if len(self._marks[0]) != n_probes:
            self._marks = self._new_marks(n_probes)
        return self._marks

    @staticmethod
    def _new_marks(n_probes: int) -> tuple[Array, Array, Array, Array]:
        mark, expanded, admitted = (np.zeros(n_probes, np.int64) for _ in range(3))
        return mark, expanded, admitted, np.zeros(2, np.int64)


def _zeros(n_states: int, n_probes: int) -> tuple[Array, Array, Array]:
    shape = (n_states, n_probes)
    return np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.zeros(shape, np.float32)

"""OnDevice makes a step of a few sequences on a GPU, alongside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import SEEN, Inputs, unseen_inputs
from probemon.core.plan import CascadePlan
from probemon.engine.cascade import Descent, PairRequests, answer, descend_in_rounds
from probemon.engine.device_steps import DeviceSteps, PendingResults, StepResults
from probemon.engine.kernels.triton_cascade import DeviceCascade
from probemon.engine.outcome import Outcome, OutcomeMaker
from probemon.engine.pairs import PackScores
from probemon.packs.pack import ProbePack

_PLANS = 4  # plans ready on the device at once


@dataclass(frozen=True)
class DeviceStep:
    """A step on a device."""

    way: OnDevice
    plan: CascadePlan
    inputs: Inputs
    results: PendingResults
    retained: Mask
    keep: Ints

    def wait(self) -> Outcome:
        """Return the outcome when ready; call it once."""
        return self.way.outcome(self.plan, self.inputs, self.results.wait(), self.retained, self.keep)


class OnDevice:
    """Descends, as a `Way`, on the device that holds all weights. `side`: the stream of several packs."""

    def __init__(self, pack: ProbePack, scores: PackScores, outcomes: OutcomeMaker) -> None:
        self._pack, self._scores, self._outcomes = pack, scores, outcomes
        self.side: Any = None
        self.n_overflowed = 0
        self._by_plan: dict[int, tuple[CascadePlan, DeviceSteps | None]] = {}

    def fits(self, plan: CascadePlan, retained: Mask | None) -> bool:
        """True if the active probes and retained sets fit."""
        steps, n_kept = self.steps(plan), 0 if retained is None else int(retained.sum(axis=1).max(initial=0))
        return steps is not None and n_kept <= steps.cascade.n_kept

    def steps(self, plan: CascadePlan) -> DeviceSteps | None:
        """Return a plan's steps, made at first use; None if it does not fit."""
        entry = self._by_plan.get(id(plan))  # the entry keeps the plan, so its id is unique
        if entry is None:
            steps = None
            if DeviceCascade.fits(plan):
                cascade = DeviceCascade(plan, self._scores.weights(), self._scores.block_of)
                steps = DeviceSteps(cascade, self._pack.n_probes, self.side)
            self._scores.check_weights()
            if len(self._by_plan) >= _PLANS:
                self._by_plan.pop(next(iter(self._by_plan)), None)
            entry = self._by_plan[id(plan)] = (plan, steps)
        return entry[1]

    def begin(
        self, plan: CascadePlan, make_inputs: Callable[[], Inputs], hidden: Iterable[Tensor], retained: Mask, keep: Ints
    ) -> DeviceStep:
        """Begin a step of hidden states that the model may still compute."""
        steps = self.steps(plan)
        assert steps is not None, "asked of a plan that does not fit"
        with steps.beside(*hidden):
            inputs = make_inputs()
            return DeviceStep(self, plan, inputs, steps.enqueue(inputs.values, retained), retained, keep)

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
        if retained is None:
            retained = np.zeros((len(inputs), self._pack.n_probes), dtype=bool)
        return self.begin(plan, lambda: inputs, (), retained, keep).wait()

    def requests(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, late: Mask | None
    ) -> PairRequests[Outcome]:
        yield from ()
        return self.evaluate(plan, inputs, retained, keep)

    def outcome(self, plan: CascadePlan, inputs: Inputs, results: StepResults, retained: Mask, keep: Ints) -> Outcome:
        """Make a step's outcome; descend overflowed states again."""
        n = len(inputs)
        # `inputs.largest` would wait for the model.
        unseen = unseen_inputs(results.largest, n)
        redone = np.flatnonzero(results.overflowed & (unseen == SEEN))
        if not unseen.any() and not len(redone) and self._outcomes.is_small(results.largest):
            ptr, probes, values = results.ptr, results.probes, results.values
            n_active, none = ptr[1:] - ptr[:-1], np.zeros(n, dtype=np.int64)
            fired, kept = self._outcomes.fired(probes, values), results.kept[keep]
            return Outcome(
                ptr=ptr,
                probes=probes,
                values=values,
                fired=fired,
                n_active=n_active,
                n_dropped=none,
                n_evaluated=n_active,
                n_released=none,
                n_late=none,
                unseen=unseen,
                kept=kept,
            )
        shape = (n, self._pack.n_probes)
        step = Descent(np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.float32))
        rows = np.repeat(np.arange(n), np.diff(results.ptr))
        step.active[rows, results.probes], step.scores[rows, results.probes] = True, results.values
        if len(redone):
            self.n_overflowed += len(redone)
            exact = answer(
                descend_in_rounds(plan, len(redone), retained[redone]),
                lambda rows, probes: self._scores.of(inputs, redone[rows], probes),
            )
            step.active[redone], step.dropped[redone], step.scores[redone] = exact.active, exact.dropped, exact.scores
        return self._outcomes.of(plan, step, results.largest, retained, keep)

"""Rounds and Exhaustive score (state, probe) pairs through an arena."""

from __future__ import annotations

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import Inputs
from probemon.core.plan import CascadePlan
from probemon.core.score_rules import follows_path
from probemon.core.scores import Floats
from probemon.engine.cascade import PairRequests, answer, apply_rule, descend_in_rounds
from probemon.engine.outcome import Outcome, OutcomeMaker
from probemon.engine.pairs import PackScores
from probemon.packs.pack import ProbePack


class Rounds:
    """Descends round by round, as a `Way`."""

    def __init__(self, pack: ProbePack, scores: PackScores, outcomes: OutcomeMaker) -> None:
        self._pack, self._scores, self._outcomes = pack, scores, outcomes

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
        late = self._scores.late(len(inputs), retained)
        asking = self.requests(plan, inputs, retained, keep, late)
        return answer(asking, lambda rows, probes: self._scores.of(inputs, rows, probes, late))

    def requests(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, late: Mask | None
    ) -> PairRequests[Outcome]:
        step = yield from descend_in_rounds(plan, len(inputs), retained)
        outcome = self._outcomes.of(plan, step, inputs.largest, retained, keep, late=late)
        if self._scores.prefetches:
            self._prefetch(plan, outcome)
        return outcome

    def _prefetch(self, plan: CascadePlan, outcome: Outcome) -> None:
        ptr = outcome.ptr
        last = slice(ptr[-2] if len(ptr) > 1 else 0, ptr[-1])
        probes = outcome.probes[last]
        below = plan.expand_threshold[probes] - outcome.values[last]
        near = probes[(below >= 0) & (below <= self._scores.prefetch_margin)]
        self._scores.prefetch(child for probe in near for child in plan.tree.children(int(probe)))


class Exhaustive:
    """Scores every probe, as a `Way`, then applies the descent's rule."""

    def __init__(self, pack: ProbePack, scores: PackScores, outcomes: OutcomeMaker) -> None:
        self._pack, self._scores, self._outcomes = pack, scores, outcomes
        self._every = np.arange(pack.n_probes)

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
        asking = self.requests(plan, inputs, retained, keep, None)
        return answer(asking, lambda rows, probes: self._scores.of(inputs, rows, probes))

    def requests(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, late: Mask | None
    ) -> PairRequests[Outcome]:
        # The arena holds every probe: nothing is late.
        step = apply_rule(plan, (yield from self.request_every_pair(inputs)), retained)
        return self._outcomes.of(plan, step, inputs.largest, retained, keep, everything=True)

    def everything(self, inputs: Inputs) -> Floats:
        """Return all scores `[N, P]` fp32; NaN if there is none."""
        return answer(self.request_every_pair(inputs), lambda rows, probes: self._scores.of(inputs, rows, probes))

    def request_every_pair(self, inputs: Inputs) -> PairRequests[Floats]:
        """Yield all pairs at once; return the scores `[N, P]`."""
        n, p = len(inputs), self._pack.n_probes
        rows = np.zeros(p, dtype=np.int64) if n == 1 else np.repeat(np.arange(n), p)
        probes = self._every if n == 1 else np.tile(self._every, n)
        scores = (yield rows, probes).reshape(n, p)
        scores.reshape(-1)[self._outcomes.beyond(inputs.largest, n, rows, probes)] = np.nan
        return self._pack.tree.times_best_parent(scores) if follows_path(self._pack.score_rule) else scores

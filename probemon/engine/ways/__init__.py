"""Each way of descending one pack is a class; every `evaluate(...)` gives the same outcome, bit for bit.

compiled.py    Compiled: all in one compiled call, where numba reads weights that lie in memory
rounds.py      Rounds: round by round, pairs of state and probe asked of an arena; Exhaustive: all pairs at once
on_device.py   OnDevice: all on a GPU, beside the host model
"""

from __future__ import annotations

from typing import Protocol

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import Inputs
from probemon.core.plan import CascadePlan
from probemon.engine.cascade import PairRequests
from probemon.engine.outcome import Outcome


class Way(Protocol):
    """Evaluates N states with one pack."""

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
        """Evaluate states that start from `retained` (None: memoryless); the states `keep` retain something."""

    def requests(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, late: Mask | None
    ) -> PairRequests[Outcome]:
        """Evaluate, and yield the pairs of each round to be scored, so that several packs can go in step.

        Whoever scores them marks in `late` the pairs whose weights are not there.
        """

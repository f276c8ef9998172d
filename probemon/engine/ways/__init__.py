"""Ways to evaluate one pack, with bitwise equal outcomes.

compiled.py    Compiled: one compiled call (numba), for weights in memory
rounds.py      Rounds: round by round through an arena; Exhaustive: all pairs at once
on_device.py   OnDevice: on a GPU
"""

from __future__ import annotations

from typing import Protocol

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import Inputs
from probemon.core.plan import CascadePlan
from probemon.engine.cascade import PairRequests
from probemon.engine.outcome import Outcome


class Way(Protocol):
    """Evaluates N states."""

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints) -> Outcome:
        """Evaluate states from `retained` (None: memoryless); only the states `keep` get retained sets."""

    def requests(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, late: Mask | None
    ) -> PairRequests[Outcome]:
        """Yield each round's pairs, so that several packs advance together; return the outcome.

        The caller marks pairs without resident weights in `late`.
        """

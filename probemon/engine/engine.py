"""Engine evaluates hidden states with one pack.

engine = Engine(pack, PairScorer([pack], arena, device, impl, resident=True))
engine.choose(plan, "auto")                                   # measures both strategies
inputs = engine.inputs({"resid_post.15": hidden})             # hidden [N, D]
outcome = engine.evaluate(plan, inputs, retained, keep=np.arange(len(inputs)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import Inputs, PreparedInputs
from probemon.core.plan import CascadePlan
from probemon.core.scores import Floats
from probemon.engine.choice import BATCH, STRATEGIES, Choice, Trial
from probemon.engine.memory.arena import ResidentArena
from probemon.engine.outcome import Outcome, OutcomeMaker
from probemon.engine.pairs import PackScores, PairScorer
from probemon.engine.ways import Way
from probemon.engine.ways.rounds import Exhaustive, Rounds
from probemon.errors import ConfigError
from probemon.packs.pack import ProbePack
from probemon.util.checks import check_choice

if TYPE_CHECKING:
    from probemon.engine.ways.on_device import OnDevice

_FEW = BATCH // 4  # smaller batches count as steps
BATCH_CELLS = 1 << 22  # (state, probe) cells at once: bounds memory


class StepUnderWay(Protocol):
    """A step on a device or in a thread."""

    def wait(self) -> Outcome:
        """Return the outcome when ready; call it once."""


class Evaluator(Protocol):
    """Interface of `Engine` and `probemon.engine.joint.JointEngine`."""

    choice: Choice

    def inputs(self, hidden: Mapping[str, Tensor], prepared: PreparedInputs | None = None) -> Any:
        """Prepare hidden states, `[N, D]` at every site; `prepared` caches them."""

    def everything(self, inputs: Any) -> Floats:
        """Return all scores `[N, P]` fp32; NaN if missing."""

    def begin(
        self,
        plan: Any,
        hidden: Mapping[str, Tensor],
        retained: Mask,
        keep: Ints,
        prepared: PreparedInputs | None = None,
    ) -> Outcome | StepUnderWay:
        """Make or begin a step of hidden states `[N, D]`."""

    def evaluate(
        self, plan: Any, inputs: Any, retained: Mask | None, keep: Ints, strategy: str | None = None
    ) -> Outcome:
        """Evaluate N states from `retained` (None: memoryless); only the states `keep` get retained sets."""

    def batch_size(self) -> int:
        """Number of states to evaluate at once."""

    def choose(self, plan: Any, strategy: str) -> Choice:
        """Set `choice`; "auto" times both strategies."""

    def check_room(self, plan: Any, what: Callable[[], str]) -> None:
        """Raise `ArenaFull` if a plan leaves no slot for a probe that is not always active."""

    def background_errors(self) -> list[Exception]:
        """Return and clear the errors of background loading."""


class Engine:
    """Evaluates one pack, as an `Evaluator`; the arena numbers its probes from `first` on."""

    def __init__(self, pack: ProbePack, scorer: PairScorer, first: int = 0) -> None:
        self.pack, self.scorer, self.first = pack, scorer, first
        self.arena = scorer.arena
        self.choice = Choice("descent", "descent", "not measured")
        self.scores = PackScores(pack, scorer, first)
        outcomes = OutcomeMaker(pack, self.scores.block_of)
        self.exhaustive = Exhaustive(pack, self.scores, outcomes)
        self._ways: dict[str, Way] = {"descent": Rounds(pack, self.scores, outcomes), "exhaustive": self.exhaustive}
        self.on_device: OnDevice | None = None
        if scorer.resident and scorer.impl == "numba":
            from probemon.engine.ways.compiled import Compiled

            assert isinstance(scorer.arena, ResidentArena)
            parts = (pack, scorer.arena, self.scores.block_of, outcomes)
            self._ways = {"descent": Compiled(*parts), "exhaustive": Compiled(*parts, everything=True)}
        elif scorer.resident and scorer.impl == "triton":
            from probemon.engine.ways.on_device import OnDevice

            self.on_device = OnDevice(pack, self.scores, outcomes)

    def inputs(self, hidden: Mapping[str, Tensor], prepared: PreparedInputs | None = None) -> Inputs:
        return self.scorer.inputs.make(hidden, prepared)

    def everything(self, inputs: Inputs) -> Floats:
        return self.exhaustive.everything(inputs)

    def begin(
        self,
        plan: CascadePlan,
        hidden: Mapping[str, Tensor],
        retained: Mask,
        keep: Ints,
        prepared: PreparedInputs | None = None,
    ) -> Outcome | StepUnderWay:
        way = self.way(plan, len(retained), retained, self.choice.step)
        if way is self.on_device and self.on_device is not None:
            return self.on_device.begin(plan, lambda: self.inputs(hidden, prepared), hidden.values(), retained, keep)
        inputs, thread = self.inputs(hidden, prepared), self.scorer.thread
        if thread is None:
            return way.evaluate(plan, inputs, retained, keep)
        return thread.begin(lambda: way.evaluate(plan, inputs, retained, keep))

    def evaluate(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, strategy: str | None = None
    ) -> Outcome:
        return self.way(plan, len(inputs), retained, strategy).evaluate(plan, inputs, retained, keep)

    def way(self, plan: CascadePlan, n: int, retained: Mask | None, strategy: str | None = None) -> Way:
        """Return the way to evaluate N states."""
        if strategy is None:
            strategy = self.choice.step if retained is not None or n < _FEW else self.choice.batch
        few = strategy == "descent" and n < _FEW
        if few and self.on_device is not None and self.on_device.fits(plan, retained):
            return self.on_device
        return self._ways[strategy]

    def batch_size(self) -> int:
        return max(1, BATCH_CELLS // self.pack.n_probes)

    def choose(self, plan: CascadePlan, strategy: str) -> Choice:
        check_choice("strategy", strategy, STRATEGIES)
        if strategy == "exhaustive" and not self.scorer.resident:
            raise ConfigError(
                "strategy='exhaustive' reads every probe at every token: raise arena_bytes to hold the pack"
            )
        if strategy != "auto":
            self.choice = Choice(strategy, strategy, "as asked")
        elif not self.scorer.resident:
            self.choice = Choice("descent", "descent", "the pack is paged")
        else:
            nothing = np.arange(0)
            self.choice = Trial(
                self.pack,
                self.scorer.inputs,
                self.scores,
                lambda plan, inputs: self.evaluate(plan, inputs, None, nothing, "descent"),
            ).choose(plan)
        return self.choice

    def check_room(self, plan: CascadePlan, what: Callable[[], str]) -> None:
        self.scorer.check_room(len(plan.start), what)

    def background_errors(self) -> list[Exception]:
        return self.scorer.background_errors()

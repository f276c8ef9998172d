"""Engine: hidden states in, a descent out, by whichever way of evaluating is cheaper.

    engine = Engine(pack, PairScorer([pack], arena, device, impl, resident=True))
    inputs = engine.inputs({"resid_post.15": hidden})             # hidden [N, D]
    engine.choose(plan, "auto")                                   # measures, then says what it picked
    outcome = engine.evaluate(plan, inputs, retained, keep=np.arange(len(inputs)))

Two strategies with one result: `descent` scores a probe when the hierarchy reaches it, `exhaustive` scores
every probe at once and applies the same rule to the scores. Scores are bitwise the same either way. Where the weights
lie in memory and numba reads them, a whole descent is one compiled call; elsewhere it is `probemon.engine.cascade`,
round by round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from probemon.core.checks import check_choice
from probemon.core.hierarchy import Ints, Mask
from probemon.core.plan import CascadePlan
from probemon.core.scores import Floats
from probemon.engine.cascade import Descent, PairRequests, answer, apply_rule, collect, descend_in_rounds, retain
from probemon.engine.memory.arena import ResidentArena
from probemon.engine.pairs import NO_SCORE, SEEN, Inputs, PairScorer, unseen_inputs
from probemon.errors import ConfigError
from probemon.packs.pack import ProbePack

if TYPE_CHECKING:
    from probemon.engine.device_steps import Arrived, DeviceSteps
    from probemon.engine.memory.fetcher import Fetcher

STRATEGIES = ("auto", "descent", "exhaustive")
_BATCH = 64  # states of the measured batch: a prompt or a document, against one token of a few rows
_FEW = _BATCH // 4  # rows that a step may have, and be evaluated as a step
_PLANS = 4  # of runs with rules of their own, ready on the device at once
_REPEATS = 7
_EXHAUSTIVE_BYTES = 32 << 20  # weights read in a trial of exhaustive evaluation; a larger pack's time is scaled up
BATCH_CELLS = 1 << 22  # (state, probe) cells evaluated at once: bounds the memory of a long document


@dataclass(frozen=True)
class Outcome:
    """N states evaluated: E active probes state by state (`ptr [N+1]`, `probes`, `values`, `fired`), counts `[N]`, and
    next retained sets.

    `unseen [N]`: SEEN, or why a state has no scores (`probemon.engine.pairs`); it has no active probes then.
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


@dataclass(frozen=True)
class Choice:
    """How states are evaluated: `step` for a token of a few rows, `batch` for many tokens, `why` in words."""

    step: str
    batch: str
    why: str


class Evaluator(Protocol):
    """What a manager asks: `Engine` for one pack, `probemon.engine.joint.JointEngine` for several. Each has inputs and
    plans of its own kind.
    """

    choice: Choice

    def inputs(self, hidden: Mapping[str, Tensor]) -> Any:
        """Normalised and rounded hidden states, `[N, D]` at every site."""
        ...

    def everything(self, inputs: Any) -> Floats:
        """Scores `[N, P]` fp32 of every probe, by its pack's score rule."""
        ...

    def begin(
        self, plan: Any, hidden: Mapping[str, Tensor], retained: Mask, keep: Ints
    ) -> Outcome | Callable[[], Outcome]:
        """A step of hidden states `[N, D]`: its outcome, or, where a GPU makes it beside the host model, what waits for
        it and returns it.
        """
        ...

    def evaluate(
        self, plan: Any, inputs: Any, retained: Mask | None, keep: Ints, strategy: str | None = None
    ) -> Outcome:
        """N states that start from `retained` (None: memoryless), and what the states `keep` retain. `strategy`
        overrides the choice.
        """
        ...

    def batch_size(self) -> int:
        """States worth evaluating at once."""
        ...

    def choose(self, plan: Any, strategy: str) -> Choice:
        """Set `choice`: as told, or by measuring."""
        ...

    def check_room(self, plan: Any, what: str) -> None:
        """Raise `ArenaFull` where a plan leaves no slot for a probe that is not always active."""
        ...

    def background_errors(self) -> list[Exception]:
        """What loads in the background met and nobody was told yet."""
        ...


class Engine:
    """Descends one pack; `scorer` has the scores of its probes, which the arena numbers from `first` on."""

    def __init__(self, pack: ProbePack, scorer: PairScorer, first: int = 0) -> None:
        self.pack, self.scorer, self.first = pack, scorer, first
        self.arena, self.impl, self._resident = scorer.arena, scorer.impl, scorer.resident
        self._input = scorer.block_of(pack)
        self._n_inputs = 1 + int(self._input.max())
        self._every = np.arange(pack.n_probes)
        self._alert = pack.alert_threshold.numpy()
        self._net: Any = None
        self._device: dict[int, tuple[CascadePlan, DeviceSteps | None]] = {}
        self.side: Any = None  # the stream of steps on the device, where several engines share one
        self.n_overflowed = 0  # states that the device could not finish
        if self.impl == "numba" and self._resident:
            from probemon.engine.kernels import numba_cpu

            self._numba, self._net = numba_cpu, numba_cpu.CompiledNet.of(self.arena.weights)
        self.choice = Choice("descent", "descent", "not measured")

    @property
    def fetcher(self) -> Fetcher | None:
        """What loads in the background, where nobody waits for weights."""
        return self.scorer.fetcher

    @property
    def prefetcher(self) -> Fetcher | None:
        """What loads ahead, if anything does."""
        return self.scorer.prefetcher

    def background_errors(self) -> list[Exception]:
        """What loads in the background met and nobody was told yet."""
        return self.scorer.background_errors()

    def check_room(self, plan: CascadePlan, what: str) -> None:
        """Raise `ArenaFull` where a plan leaves no slot for a probe that is not always active."""
        self.scorer.check_room(len(plan.start), what)

    def inputs(self, hidden: Mapping[str, Tensor]) -> Inputs:
        """Normalised and rounded hidden states, `[N, D]` at every site of the scorer."""
        return self.scorer.inputs(hidden)

    def pairs(self, n: int, rows: Ints, probes: Ints) -> tuple[Ints, Ints]:
        """Pairs of N states and this pack's probes, as the scorer numbers inputs and probes."""
        at = self._input[probes] * n + rows if len(self.scorer.specs) > 1 else rows
        return at, probes + self.first if self.first else probes

    def own_scores(self, inputs: Inputs, rows: Ints, probes: Ints, late: Mask | None = None) -> Floats:
        """Own scores `[M]` fp32 of M (state, probe) pairs, each pair once.

        With `late [N, P]` no weights are waited for: NaN where they are not there, marked in `late`.
        """
        at, numbers = self.pairs(len(inputs), rows, probes)
        if late is None:
            return self.scorer.score(inputs.values, at, numbers)
        scores, missing = self.scorer.score_held(inputs.values, at, numbers)
        late[rows[missing], probes[missing]] = True
        return scores

    def late(self, n: int, retained: Mask | None) -> Mask | None:
        """Where to mark what is late of N states; None where it is waited for, as for a prompt: nothing of it would be
        there yet.
        """
        return None if self.fetcher is None or retained is None else np.zeros((n, self.pack.n_probes), dtype=bool)

    def everything(self, inputs: Inputs) -> Floats:
        """Scores `[N, P]` fp32 of every probe, by the pack's score rule; NaN where there is none."""
        return answer(self.request_every_pair(inputs), lambda rows, probes: self.own_scores(inputs, rows, probes))

    def request_every_pair(self, inputs: Inputs) -> PairRequests[Floats]:
        """`everything`, for whom it asks: all pairs at once."""
        n, p = len(inputs), self.pack.n_probes
        rows = np.zeros(p, dtype=np.int64) if n == 1 else np.repeat(np.arange(n), p)
        probes = self._every if n == 1 else np.tile(self._every, n)
        own = (yield rows, probes).reshape(n, p)
        own.reshape(-1)[self._beyond(inputs.largest, n, rows, probes)] = np.nan
        return self.pack.tree.times_best_parent(own) if self.pack.score_rule == "path" else own

    def begin(
        self, plan: CascadePlan, hidden: Mapping[str, Tensor], retained: Mask, keep: Ints
    ) -> Outcome | Callable[[], Outcome]:
        """A step of hidden states `[N, D]`: its outcome, or, where a GPU makes it beside the host model, what waits for
        it and returns it.
        """
        on_device = self.on_device(plan, len(retained), retained) if self.choice.step == "descent" else None
        if on_device is None:
            return self.evaluate(plan, self.inputs(hidden), retained, keep)
        with on_device.beside(*hidden.values()):
            inputs = self.inputs(hidden)
            under_way = on_device.enqueue(inputs.values, retained)
        return lambda: self.arrived(plan, inputs, under_way.wait(), retained, keep)

    def evaluate(
        self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, strategy: str | None = None
    ) -> Outcome:
        """N states that start from `retained` (None: memoryless), and what the states `keep` retain. `strategy`
        overrides the choice.
        """
        late = self.late(len(inputs), retained)
        asking = self.evaluating(plan, inputs, retained, keep, strategy, late)
        return answer(asking, lambda rows, probes: self.own_scores(inputs, rows, probes, late))

    def strategy(self, n: int, retained: Mask | None) -> str:
        """How N states are evaluated by choice."""
        return self.choice.step if retained is not None or n < _FEW else self.choice.batch

    def evaluating(
        self,
        plan: CascadePlan,
        inputs: Inputs,
        retained: Mask | None,
        keep: Ints,
        strategy: str | None,
        late: Mask | None,
    ) -> PairRequests[Outcome]:
        """`evaluate`, for whom it asks, who marks in `late` what is. What is compiled, or all on the device, asks
        nothing.
        """
        n = len(inputs)
        strategy = strategy or self.strategy(n, retained)
        if strategy == "descent" and (on_device := self.on_device(plan, n, retained)) is not None:
            before = np.zeros((n, self.pack.n_probes), dtype=bool) if retained is None else retained
            with on_device.beside():
                under_way = on_device.enqueue(inputs.values, before)
            return self.arrived(plan, inputs, under_way.wait(), before, keep)
        everything = strategy == "exhaustive"
        if self._net is not None:
            step = self._compiled(plan, inputs, retained, everything)
        elif everything:
            step = apply_rule(plan, (yield from self.request_every_pair(inputs)), retained)
        else:
            step = yield from descend_in_rounds(plan, n, retained)
        if late is not None:
            by_parent = np.isnan(step.scores) & late.any(
                axis=1, keepdims=True
            )  # what is scored by a parent that is not there
            late = np.asarray(late | (step.active & by_parent))
            step.active[late], step.scores[late] = False, 0
        unseen = self._unseen(inputs.largest, n, step)
        seen = unseen == SEEN
        all_seen = seen.all()
        if not all_seen:
            step.active[~seen] = False
            step.dropped[~seen] = False
        found = (
            collect(step, self._alert)
            if self._net is None
            else self._numba.collect(step.active, step.dropped, step.scores, self._alert)
        )
        ptr, probes, values, fired, n_dropped = found
        n_active, released = ptr[1:] - ptr[:-1], np.zeros(n, dtype=np.int64)
        if self._net is None or n_dropped.any():
            kept, released[keep] = retain(plan, step, keep)
        else:
            most = plan.config.keep_top_k if plan.config.aggressive_pruning else self.pack.n_probes
            kept = self._numba.best(ptr, probes, values, plan.exempt, keep, most)
        if retained is not None and not all_seen:
            kept[~seen[keep]] = retained[keep][~seen[keep]]  # what could not be seen changes nothing
        evaluated = np.where(seen, self.pack.n_probes, 0) if everything else n_active
        if self._net is not None and isinstance(self.arena, ResidentArena):
            self.arena.used(int(evaluated.sum()))
        n_late = np.zeros(n, dtype=np.int64) if late is None else (late & seen[:, None]).sum(axis=1)
        n_dropped = n_dropped + n_late
        if self.prefetcher is not None:
            self._foresee(plan, ptr, probes, values)
        return Outcome(ptr, probes, values, fired, n_active, n_dropped, evaluated, released, n_late, unseen, kept)

    def _beyond(self, largest: Floats, n: int, rows: Ints, probes: Ints) -> Mask:
        """Of pairs `[M]` of N states and probes whose weights were looked at: where sums may overflow, so that there is
        no score.

        `largest [I * N]` of the prepared inputs. It is told from the input and the weights alone, not from what came
        out: implementations add up in different orders, and what overflows in one order need not in another.
        """
        at = self._input[probes] * n + rows if len(self.scorer.specs) > 1 else rows
        return np.asarray(largest[at] > self.pack.input_limit[probes])

    def _unseen(self, largest: Floats, n: int, step: Descent) -> Ints:
        """Why each of N states has no scores, if it has none: by its input, or because an active probe has none
        (`_beyond`).

        A descent goes wrong only after such a probe has become active, and what is active stays so: all strategies
        agree on the states.
        """
        if _within(largest, self.pack.lowest_input_limit):
            return np.zeros(n, dtype=np.int64)
        unseen = unseen_inputs(largest, n)
        rows, probes = np.nonzero(step.active)
        without = np.zeros(n, dtype=bool)
        without[rows[self._beyond(largest, n, rows, probes)]] = True
        return np.where((unseen == SEEN) & without, NO_SCORE, unseen)

    def _foresee(self, plan: CascadePlan, ptr: Ints, probes: Any, values: Floats) -> None:
        """Have the children fetched of the last state's probes that nearly opened."""
        last = slice(ptr[-2] if len(ptr) > 1 else 0, ptr[-1])
        below = plan.expand_threshold[probes[last]] - values[last]
        near = probes[last][(below >= 0) & (below <= self.scorer.prefetch)]
        self.scorer.prefetch_probes(
            sorted({self.first + int(child) for p in near for child in plan.tree.children(int(p))})
        )

    def on_device(self, plan: CascadePlan, n: int, retained: Mask | None) -> DeviceSteps | None:
        """Steps of a plan on the device, or None where there is none, or rows or active probes are too many for it."""
        if self.impl != "triton" or not self._resident or n >= _FEW:
            return None
        known = self._device.get(id(plan))  # the plan is kept with it, so that its id is its own
        if known is None:
            from probemon.engine.device_steps import DeviceSteps
            from probemon.engine.kernels.triton_cascade import DeviceCascade

            mine = slice(self.first, self.first + self.pack.n_probes)
            weights = {name: tensor[mine] for name, tensor in self.arena.weights.items()}
            steps = (
                DeviceSteps(DeviceCascade(plan, weights, self._input), self.pack.n_probes, self.side)
                if DeviceCascade.fits(plan)
                else None
            )
            for _ in self.arena.waves(
                self._every + self.first
            ):  # whatever will be reached: weights are looked at before their first use
                pass
            if len(self._device) >= _PLANS:
                self._device.pop(next(iter(self._device)), None)
            known = self._device[id(plan)] = (plan, steps)
        steps = known[1]
        if (
            steps is not None
            and retained is not None
            and int(retained.sum(axis=1).max(initial=0)) > steps.cascade.n_kept
        ):
            return None
        return steps

    def arrived(self, plan: CascadePlan, inputs: Inputs, found: Arrived, retained: Mask, keep: Ints) -> Outcome:
        """Results of a step on the device. States that overflowed there are descended again, by the exact path, and
        counted in `n_overflowed`.
        """
        n = len(inputs)
        before = unseen_inputs(
            found.largest, n
        )  # looked at on the device: `inputs.largest` would wait for the host model
        again = np.flatnonzero(found.overflowed & (before == SEEN))
        none = np.zeros(n, dtype=np.int64)
        if not before.any() and not len(again) and _within(found.largest, self.pack.lowest_input_limit):
            ptr, probes, values = found.ptr, found.probes, found.values
            n_active = ptr[1:] - ptr[:-1]
            return Outcome(
                ptr,
                probes,
                values,
                values > self._alert[probes],
                n_active,
                none,
                n_active,
                none,
                none,
                before,
                found.kept[keep],
            )
        shape = (n, self.pack.n_probes)
        step = Descent(np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.float32))
        rows = np.repeat(np.arange(n), np.diff(found.ptr))
        step.active[rows, found.probes], step.scores[rows, found.probes] = True, found.values
        if len(again):
            self.n_overflowed += len(again)
            exact = answer(
                descend_in_rounds(plan, len(again), retained[again]),
                lambda rows, probes: self.own_scores(inputs, again[rows], probes),
            )
            step.active[again], step.dropped[again], step.scores[again] = exact.active, exact.dropped, exact.scores
        unseen = self._unseen(found.largest, n, step)
        seen = unseen == SEEN
        step.active[~seen] = False
        step.dropped[~seen] = False
        kept, released = retain(plan, step, keep)
        kept[~seen[keep]] = retained[keep][~seen[keep]]
        ptr, probes, values, fired, n_dropped = collect(step, self._alert)
        n_active = ptr[1:] - ptr[:-1]
        n_released = none.copy()
        n_released[keep] = np.where(seen[keep], released, 0)
        return Outcome(ptr, probes, values, fired, n_active, n_dropped, n_active, n_released, none, unseen, kept)

    def _compiled(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, everything: bool) -> Descent:
        assert self._net is not None and isinstance(self.arena, ResidentArena)
        tree, checked = plan.tree, self.arena.checked  # asked before anything is read: the file may have been cut
        active, dropped, scores = self._net.descend(
            (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx),
            self._input,
            self._n_inputs,
            inputs.values,
            len(inputs),
            plan.start,
            retained,
            plan.expand_threshold,
            path_rule=plan.path_rule,
            max_rounds=plan.config.max_rounds,
            max_active=plan.config.max_loaded_probes,
            everything=everything,
        )
        if (
            not checked.all()
        ):  # weights are looked at when they are first used, before anybody is shown what came of them
            used = ~checked if everything else active.any(axis=0) & ~checked
            if used.any():
                self.arena.check(np.flatnonzero(used))
        return Descent(active, dropped, scores)

    def batch_size(self) -> int:
        """States worth evaluating at once."""
        return max(1, BATCH_CELLS // self.pack.n_probes)

    def choose(self, plan: CascadePlan, strategy: str) -> Choice:
        """Set `choice`: as told, or by timing both on the pack's golden states (on random ones where it has none)."""
        check_choice("strategy", strategy, STRATEGIES)
        if strategy != "auto":
            if strategy == "exhaustive" and not self._resident:
                raise ConfigError(
                    "strategy='exhaustive' reads every probe at every token: raise arena_bytes to hold the pack"
                )
            self.choice = Choice(strategy, strategy, "as asked")
        elif not self._resident:
            self.choice = Choice("descent", "descent", "the pack is paged")
        else:
            states, kind = self._trial_states()
            step, step_why = self._faster(plan, self.inputs({s: x[:1] for s, x in states.items()}))
            batch, batch_why = self._faster(plan, self.inputs(states))
            self.choice = Choice(
                step, batch, f"measured on {kind} states: one token {step_why}; {_BATCH} tokens {batch_why}"
            )
        return self.choice

    def _trial_states(self) -> tuple[dict[str, Tensor], str]:
        golden = self.pack.golden_hidden
        if golden is not None and len(golden):
            repeated = golden[torch.arange(_BATCH, device="cpu") % len(golden)]
            states, kind = {site: repeated[:, i] for i, site in enumerate(self.pack.sites)}, "golden"
        else:
            generator = torch.Generator().manual_seed(0)
            size = (_BATCH, self.pack.architecture.hidden_size)
            states, kind = (
                {
                    site: torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
                    for site in self.pack.sites
                },
                "random",
            )
        # What other packs of the scorer read has to be there, and is not asked for.
        return {spec.site: next(iter(states.values())) for spec in self.scorer.specs} | states, kind

    def _faster(self, plan: CascadePlan, inputs: Inputs) -> tuple[str, str]:
        n = len(inputs)
        weight = self.pack.weight_bytes()
        part = min(1.0, _EXHAUSTIVE_BYTES / max(1, weight))
        some = self._every[: max(1, int(self.pack.n_probes * part))]
        everything = np.zeros((n, self.pack.n_probes), dtype=np.float32)

        def exhaustive() -> None:
            everything[:, some] = self.own_scores(inputs, np.repeat(np.arange(n), len(some)), np.tile(some, n)).reshape(
                n, len(some)
            )

        def rule() -> None:
            scores = self.pack.tree.times_best_parent(everything.copy()) if plan.path_rule else everything
            apply_rule(plan, scores, None)

        def searching() -> None:
            self.evaluate(plan, inputs, None, self._every[:0], "descent")

        times = _interleaved([exhaustive, rule, searching])
        scaled = times[0] * self.pack.n_probes / len(some) + times[1]
        name = "exhaustive" if scaled < times[2] else "descent"
        return name, f"{name} (all probes {scaled * 1e3:.2f} ms, a descent {times[2] * 1e3:.2f} ms)"


def _within(largest: Floats, limit: float) -> bool:
    """Whether all inputs are so small that no probe that was looked at can overflow. In fp64: rounded to fp32 a limit
    may be infinite, or 0.
    """
    return float(largest.max(initial=0)) <= limit < math.inf  # which NaN is not


def _interleaved(trials: list[Callable[[], None]]) -> list[float]:
    """Median seconds of each, in one round-robin run after a warm-up; fewer rounds where a round is slow."""
    taken: list[list[float]] = [[] for _ in trials]
    begin = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        for trial, times in zip(trials, taken, strict=True):
            start = time.perf_counter()
            trial()
            if repeat:
                times.append(time.perf_counter() - start)
        if repeat and time.perf_counter() - begin > 0.5:
            break
    return [statistics.median(times) for times in taken]

"""Engine: hidden states in, a descent out, by whichever way of evaluating is cheaper.

    engine = Engine(pack, arena, device, impl)
    inputs = engine.inputs({"resid_post.15": hidden})             # hidden [N, D]
    engine.choose(plan, "auto")                                   # measures, then says what it picked
    outcome = engine.evaluate(plan, inputs, retained, keep=np.arange(len(inputs)))

Two strategies with one result: `descent` scores a probe when the hierarchy reaches it, `exhaustive` scores
every probe at once and applies the same rule to the scores. Scores are bitwise the same either way. Where the weights lie
in memory and numba reads them, a whole descent is one compiled call; elsewhere it is `probemon.cascade`, round by round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from probemon.arena import Arena, PagedArena, ResidentArena
from probemon.cascade import CascadePlan, Descent, apply_rule, collect, descend, retain
from probemon.errors import ConfigError, ProbeLoadError
from probemon.hierarchy import Ints, Mask
from probemon.kernels import prepare_input, score_probes
from probemon.pack import ProbePack
from probemon.paging import Fetcher
from probemon.types import Floats, InputSpec

if TYPE_CHECKING:
    from probemon.kernels.device_step import Arrived, DeviceSteps

STRATEGIES = ("auto", "descent", "exhaustive")
_BATCH = 64  # states of the measured batch: a prompt or a document, against one token of a few rows
_FEW = _BATCH // 4  # rows that a step may have, and be evaluated as a step
_PLANS = 4  # of runs with rules of their own, ready on the device at once
_REPEATS = 7
_EXHAUSTIVE_BYTES = 32 << 20  # weights read in a trial of exhaustive evaluation; a larger pack's time is scaled up
_BATCH_CELLS = 1 << 22  # (state, probe) cells evaluated at once: bounds the memory of a long document


@dataclass(frozen=True)
class Inputs:
    """Prepared inputs `[I * N, D]`, one block of N for each of the pack's inputs, and which of the N states are finite."""

    values: Tensor
    n: int

    def __len__(self) -> int:
        return self.n

    def take(self, which: Ints) -> Inputs:
        """Some of the states."""
        at = torch.from_numpy(which).to(self.values.device)
        blocks = [x.index_select(0, at) for x in self.values.split(self.n)]
        return Inputs(blocks[0] if len(blocks) == 1 else torch.cat(blocks), len(which))

    @cached_property
    def finite(self) -> np.ndarray:
        """Mask `[N]`; looked at when it is asked for, since on a GPU that waits."""
        finite = np.ones(self.n, dtype=bool)
        for x in self.values.split(self.n) if self.n else ():  # a hidden state that is not finite is not finite after normalisation either
            total = x.sum(dim=-1, dtype=torch.float32).cpu().numpy()
            if not np.isfinite(total).all():  # finite terms may overflow a sum: look at each
                finite &= torch.isfinite(x).all(dim=-1).cpu().numpy()
        return finite


@dataclass(frozen=True)
class Outcome:
    """N states evaluated: E active probes state by state (`ptr [N+1]`, `probes`, `values`, `fired`), counts `[N]`, and next retained sets."""

    ptr: Ints
    probes: Any
    values: Floats
    fired: Mask
    n_active: Ints
    n_dropped: Ints
    n_evaluated: Ints
    n_released: Ints
    n_late: Ints
    finite: Mask
    kept: Mask


@dataclass(frozen=True)
class Choice:
    """How states are evaluated: `step` for a token of a few rows, `batch` for many tokens, `why` in words."""

    step: str
    batch: str
    why: str


class Engine:
    """Scores pairs of (state, probe) wherever the arena holds the probe, and descends."""

    def __init__(
        self, pack: ProbePack, arena: Arena, device: torch.device, impl: str, *, resident: bool, late: bool = False, prefetch: float = 0.0
    ) -> None:
        self.pack, self.arena, self.device, self.impl = pack, arena, device, impl
        self._resident, self._waits, self._prefetch = resident, not late, prefetch
        self.fetcher = Fetcher(arena.fetch) if isinstance(arena, PagedArena) and late else None
        self.foreseer = Fetcher(partial(arena.fetch, foreseen=True)) if isinstance(arena, PagedArena) and prefetch else None
        self._input = pack.input_index.numpy()
        self._every = np.arange(pack.n_probes)
        self._alert = pack.alert_threshold.numpy()
        self._net: Any = None
        self._device: dict[int, tuple[CascadePlan, DeviceSteps | None]] = {}
        self.n_overflowed = 0  # states that the device could not finish
        if impl == "numba" and resident:
            from probemon.kernels import numba_cpu

            self._numba, self._net = numba_cpu, numba_cpu.CompiledNet.of(arena.weights)
        self.choice = Choice("descent", "descent", "not measured")

    def background_errors(self) -> list[Exception]:
        """What loads in the background met and nobody was told yet."""
        return [error for fetcher in (self.fetcher, self.foreseer) if fetcher is not None and (error := fetcher.take_error()) is not None]

    def inputs(self, hidden: Mapping[str, Tensor]) -> Inputs:
        """Normalised and rounded hidden states, `[N, D]` at every site of the pack."""
        blocks = [self._prepare(hidden[spec.site].to(self.device), spec) for spec in self.pack.inputs]
        return Inputs(blocks[0] if len(blocks) == 1 else torch.cat(blocks), len(blocks[0]))

    def _prepare(self, hidden: Tensor, spec: InputSpec) -> Tensor:
        if self.impl != "triton":
            return prepare_input(hidden, spec, self.pack.input_dtype)
        from probemon.kernels.triton_fused import normalise_triton

        return normalise_triton(hidden, spec.norm, spec.eps, self.pack.input_dtype)

    def own_scores(self, inputs: Inputs, rows: Ints, probes: Ints) -> Floats:
        """Own scores `[M]` fp32 of M (state, probe) pairs, each pair once."""
        n = len(inputs)
        at = self._input[probes] * n + rows if len(self.pack.inputs) > 1 else rows
        with self.arena.lock:
            if self._resident:
                for _ in self.arena.waves(probes):
                    return self._score(inputs, at, probes)
            distinct, pair_of = np.unique(probes, return_inverse=True)
            scores = np.empty(len(probes), dtype=np.float32)
            for wave, slots in self.arena.waves(distinct):
                slot_of = np.full(len(distinct), -1, dtype=np.int64)
                slot_of[wave] = slots
                slot = slot_of[pair_of]
                here = np.flatnonzero(slot >= 0)
                scores[here] = self._score(inputs, at[here], slot[here])
            return scores

    def scores_of_held(self, inputs: Inputs, rows: Ints, probes: Ints, late: Mask) -> Floats:
        """`own_scores` that waits for no weights: NaN where they are not there, marked in `late [N, P]`, and fetched in the background."""
        assert isinstance(self.arena, PagedArena) and self.fetcher is not None
        self.fetcher.raise_error()
        n = len(inputs)
        scores = np.full(len(probes), np.nan, dtype=np.float32)
        with self.arena.lock:
            distinct, pair_of = np.unique(probes, return_inverse=True)
            slot = self.arena.held(distinct)[pair_of]
            here = np.flatnonzero(slot >= 0)
            if len(here):
                at = self._input[probes[here]] * n + rows[here] if len(self.pack.inputs) > 1 else rows[here]
                scores[here] = self._score(inputs, at, slot[here])
        missing = np.asarray(slot < 0)
        late[rows[missing], probes[missing]] = True
        self.fetcher.ask(np.unique(probes[missing]).tolist())
        return scores

    def everything(self, inputs: Inputs) -> Floats:
        """Scores `[N, P]` fp32 of every probe, by the pack's score rule."""
        n, p = len(inputs), self.pack.n_probes
        rows = np.zeros(p, dtype=np.int64) if n == 1 else np.repeat(np.arange(n), p)
        probes = self._every if n == 1 else np.tile(self._every, n)
        own = self.own_scores(inputs, rows, probes).reshape(n, p)
        return self.pack.tree.times_best_parent(own) if self.pack.score_rule == "path" else own

    def begin(self, plan: CascadePlan, hidden: Mapping[str, Tensor], retained: Mask, keep: Ints) -> Outcome | Callable[[], Outcome]:
        """A step of hidden states `[N, D]`: its outcome, or, where a GPU makes it beside the host model, what waits for it and returns it."""
        on_device = self._on_device(plan, len(retained), retained) if self.choice.step == "descent" else None
        if on_device is None:
            return self.evaluate(plan, self.inputs(hidden), retained, keep)
        with on_device.beside(*hidden.values()):
            inputs = self.inputs(hidden)
            under_way = on_device.enqueue(inputs.values, retained)
        return lambda: self._arrived(plan, inputs, under_way.wait(), retained, keep)

    def evaluate(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, keep: Ints, strategy: str | None = None) -> Outcome:
        """N states that start from `retained` (None: memoryless), and what the states `keep` retain. `strategy` overrides the choice."""
        n = len(inputs)
        strategy = strategy or (self.choice.step if retained is not None or n < _FEW else self.choice.batch)
        if strategy == "descent" and (on_device := self._on_device(plan, n, retained)) is not None:
            before = np.zeros((n, self.pack.n_probes), dtype=bool) if retained is None else retained
            with on_device.beside():
                under_way = on_device.enqueue(inputs.values, before)
            return self._arrived(plan, inputs, under_way.wait(), before, keep)
        finite = inputs.finite
        everything = strategy == "exhaustive"
        late: Mask | None = None
        if self._net is not None:
            step = self._compiled(plan, inputs, retained, everything)
        elif everything:
            step = apply_rule(plan, self.everything(inputs), retained)
        elif self._waits or retained is None:  # a prompt is waited for: nothing of it would be there yet
            step = descend(plan, n, retained, lambda rows, probes: self.own_scores(inputs, rows, probes))
        else:
            missing: Mask = np.zeros((n, self.pack.n_probes), dtype=bool)
            step = descend(plan, n, retained, lambda rows, probes: self.scores_of_held(inputs, rows, probes, missing))
            by_parent = np.isnan(step.scores) & missing.any(axis=1, keepdims=True)  # what is scored by a parent that is not there
            late = np.asarray(missing | (step.active & by_parent))
            step.active[late], step.scores[late] = False, 0
        all_seen = finite.all()
        if not all_seen:
            step.active[~finite] = False
            step.dropped[~finite] = False
        found = collect(step, self._alert) if self._net is None else self._numba.collect(step.active, step.dropped, step.scores, self._alert)
        ptr, probes, values, fired, n_dropped = found
        n_active, released = ptr[1:] - ptr[:-1], np.zeros(n, dtype=np.int64)
        if self._net is None or n_dropped.any():
            kept, released[keep] = retain(plan, step, keep)
        else:
            most = plan.config.keep_top_k if plan.config.aggressive_pruning else self.pack.n_probes
            kept = self._numba.best(ptr, probes, values, plan.exempt, keep, most)
        if retained is not None and not all_seen:
            kept[~finite[keep]] = retained[keep][~finite[keep]]  # what could not be seen changes nothing
        evaluated = np.where(finite, self.pack.n_probes, 0) if everything else n_active
        if self._net is not None and isinstance(self.arena, ResidentArena):
            self.arena.used(int(evaluated.sum()))
        n_late = np.zeros(n, dtype=np.int64) if late is None else (late & finite[:, None]).sum(axis=1)
        n_dropped = n_dropped + n_late
        if self.foreseer is not None:
            self._foresee(plan, ptr, probes, values)
        return Outcome(ptr, probes, values, fired, n_active, n_dropped, evaluated, released, n_late, finite, kept)

    def _foresee(self, plan: CascadePlan, ptr: Ints, probes: Any, values: Floats) -> None:
        """Have the children fetched of the last state's probes that nearly opened."""
        assert self.foreseer is not None
        last = slice(ptr[-2] if len(ptr) > 1 else 0, ptr[-1])
        below = plan.expand_threshold[probes[last]] - values[last]
        near = probes[last][(below >= 0) & (below <= self._prefetch)]
        self.foreseer.ask(sorted({int(child) for p in near for child in plan.tree.children(int(p))}))

    def _on_device(self, plan: CascadePlan, n: int, retained: Mask | None) -> DeviceSteps | None:
        """Steps of a plan on the device, or None where there is none, or rows or active probes are too many for it."""
        if self.impl != "triton" or not self._resident or n >= _FEW:
            return None
        known = self._device.get(id(plan))  # the plan is kept with it, so that its id is its own
        if known is None:
            from probemon.kernels.device_step import DeviceSteps
            from probemon.kernels.triton_cascade import DeviceCascade

            steps = DeviceSteps(DeviceCascade(plan, self.arena.weights, self._input), self.pack.n_probes) if DeviceCascade.fits(plan) else None
            for _ in self.arena.waves(self._every):  # whatever will be reached: weights are looked at before their first use
                pass
            if len(self._device) >= _PLANS:
                self._device.pop(next(iter(self._device)), None)
            known = self._device[id(plan)] = (plan, steps)
        steps = known[1]
        if steps is not None and retained is not None and int(retained.sum(axis=1).max(initial=0)) > steps.cascade.n_kept:
            return None
        return steps

    def _arrived(self, plan: CascadePlan, inputs: Inputs, found: Arrived, retained: Mask, keep: Ints) -> Outcome:
        """Results of a step on the device. States that overflowed there are descended again, by the exact path, and counted in `n_overflowed`."""
        finite = found.finite  # looked at on the device: `inputs.finite` would wait for the host model
        n, again = len(inputs), np.flatnonzero(found.overflowed & finite)
        none = np.zeros(n, dtype=np.int64)
        if finite.all() and not len(again):
            ptr, probes, values = found.ptr, found.probes, found.values
            n_active = ptr[1:] - ptr[:-1]
            return Outcome(ptr, probes, values, values > self._alert[probes], n_active, none, n_active, none, none, finite, found.kept[keep])
        shape = (n, self.pack.n_probes)
        step = Descent(np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.float32))
        rows = np.repeat(np.arange(n), np.diff(found.ptr))
        step.active[rows, found.probes], step.scores[rows, found.probes] = True, found.values
        if len(again):
            self.n_overflowed += len(again)
            exact = descend(plan, len(again), retained[again], lambda rows, probes: self.own_scores(inputs, again[rows], probes))
            step.active[again], step.dropped[again], step.scores[again] = exact.active, exact.dropped, exact.scores
        step.active[~finite] = False
        kept, released = retain(plan, step, keep)
        kept[~finite[keep]] = retained[keep][~finite[keep]]
        ptr, probes, values, fired, n_dropped = collect(step, self._alert)
        n_active = ptr[1:] - ptr[:-1]
        n_released = none.copy()
        n_released[keep] = released
        return Outcome(ptr, probes, values, fired, n_active, n_dropped, n_active, n_released, none, finite, kept)

    def _compiled(self, plan: CascadePlan, inputs: Inputs, retained: Mask | None, everything: bool) -> Descent:
        assert self._net is not None and isinstance(self.arena, ResidentArena)
        tree = plan.tree
        active, dropped, scores, damaged = self._net.descend(
            (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx), self._input, self.arena.checked, inputs.values, len(inputs), plan.start,
            retained, plan.expand_threshold, path_rule=plan.path_rule, max_rounds=plan.config.max_rounds, max_active=plan.config.max_loaded_probes,
            everything=everything,
        )  # fmt: skip
        if damaged >= 0:
            self.arena.check(np.asarray([damaged]))
            raise ProbeLoadError(f"{self.pack.concepts[damaged]['id']} has a weight that is not finite: restore the pack")
        return Descent(active, dropped, scores)

    def batch_size(self) -> int:
        """States worth evaluating at once."""
        return max(1, _BATCH_CELLS // self.pack.n_probes)

    def choose(self, plan: CascadePlan, strategy: str) -> Choice:
        """Set `choice`: as told, or by timing both on the pack's golden states (on random ones where it has none)."""
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
        if strategy != "auto":
            if strategy == "exhaustive" and not self._resident:
                raise ConfigError("strategy='exhaustive' reads every probe at every token: raise arena_bytes to hold the pack")
            self.choice = Choice(strategy, strategy, "as asked")
        elif not self._resident:
            self.choice = Choice("descent", "descent", "the pack is paged")
        else:
            states, kind = self._trial_states()
            step, step_why = self._faster(plan, self.inputs({s: x[:1] for s, x in states.items()}))
            batch, batch_why = self._faster(plan, self.inputs(states))
            self.choice = Choice(step, batch, f"measured on {kind} states: one token {step_why}; {_BATCH} tokens {batch_why}")
        return self.choice

    def _trial_states(self) -> tuple[dict[str, Tensor], str]:
        golden = self.pack.golden_hidden
        if golden is not None and len(golden):
            repeated = golden[torch.arange(_BATCH) % len(golden)]
            return {site: repeated[:, i] for i, site in enumerate(self.pack.sites)}, "golden"
        generator = torch.Generator().manual_seed(0)
        size = (_BATCH, self.pack.architecture.hidden_size)
        return {site: torch.randn(size, generator=generator) for site in self.pack.sites}, "random"

    def _faster(self, plan: CascadePlan, inputs: Inputs) -> tuple[str, str]:
        n = len(inputs)
        weight = self.pack.weight_bytes()
        part = min(1.0, _EXHAUSTIVE_BYTES / max(1, weight))
        some = self._every[: max(1, int(self.pack.n_probes * part))]
        everything = np.zeros((n, self.pack.n_probes), dtype=np.float32)

        def exhaustive() -> None:
            everything[:, some] = self.own_scores(
                inputs, np.repeat(np.arange(n), len(some)), np.tile(some, n)
            ).reshape(n, len(some))

        def rule() -> None:
            scores = self.pack.tree.times_best_parent(everything.copy()) if plan.path_rule else everything
            apply_rule(plan, scores, None)

        def searching() -> None:
            self.evaluate(plan, inputs, None, self._every[:0], "descent")

        times = _interleaved([exhaustive, rule, searching])
        scaled = times[0] * self.pack.n_probes / len(some) + times[1]
        name = "exhaustive" if scaled < times[2] else "descent"
        return name, f"{name} ({scaled * 1e3:.2f} ms against {times[2] * 1e3:.2f} ms by descent)"

    def _score(self, inputs: Inputs, rows: Ints, slots: Ints) -> Floats:
        rows_t, slots_t = torch.from_numpy(rows).to(self.device), torch.from_numpy(slots).to(self.device)
        scores: Floats = score_probes(inputs.values, self.arena.weights, rows_t, slots_t, impl=self.impl).cpu().numpy()
        return scores


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

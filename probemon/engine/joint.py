"""JointEngine evaluates several packs as one, over an engine for each.

    both = JointEngine(group, engines)
    plan = JointPlan.of(group, [part.plan_with(()) for part in parts])
    inputs = both.inputs({"resid_post.9": x, "resid_post.15": y})      # x, y [N, D]
    outcome = both.evaluate(plan, inputs, retained, keep)              # retained [N, P] of the group

Every pack is descended by its own plan, from its own part of the retained sets, so its results are those it has alone,
in the numbers of the group. Descents go in step: one call scores the pairs that packs of one arena ask for in a round.
A compiled descent on a CPU is one call a pack; steps on a GPU are one graph a pack, one after another on one stream. A
token is seen where every pack has scores of it, as it is for one pack that reads several sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import NO_SCORE, SEEN, Inputs, PreparedInputs
from probemon.core.plan import CascadePlan
from probemon.core.scores import Floats
from probemon.engine.cascade import PairRequests, T
from probemon.engine.choice import Choice
from probemon.engine.engine import BATCH_CELLS, Engine, StepUnderWay
from probemon.engine.memory.arena import Arena, ArenaStats
from probemon.engine.outcome import Outcome
from probemon.engine.ways import Way
from probemon.errors import ConfigError
from probemon.packs.group import PackGroup

_AND = "+"  # between the strategies of packs


@dataclass(frozen=True)
class JointPlan:
    """Holds a plan for every pack of a group. `always`, `named`, `watched` `[P]`, `n_excluded`, `n_shed`: those of the
    plans, in the numbers of the group.
    """

    group: PackGroup
    plans: tuple[CascadePlan, ...]
    always: Mask
    named: Mask
    watched: Mask | None

    @classmethod
    def of(cls, group: PackGroup, plans: Sequence[CascadePlan]) -> JointPlan:
        """Join the packs' own plans, given in their order."""
        always, named, watched = np.zeros((3, group.n_probes), dtype=bool)
        watched[:] = True
        for number, plan in zip(group.numbers, plans, strict=True):
            always[number], named[number] = plan.always, plan.named
            if plan.watched is not None:
                watched[number] = plan.watched
        return cls(group, tuple(plans), always, named, None if watched.all() else watched)

    @property
    def n_excluded(self) -> int:
        """How many probes are not watched, and not for a while only."""
        return sum(plan.n_excluded for plan in self.plans)

    @property
    def n_shed(self) -> int:
        """How many probes are left out for a while."""
        return sum(plan.n_shed for plan in self.plans)

    def narrowed(self, keep: Mask) -> JointPlan:
        """Give every pack `CascadePlan.narrowed`, of `keep [P]` in the numbers of the group."""
        parts = zip(self.group.numbers, self.plans, strict=True)
        return JointPlan.of(self.group, [plan.narrowed(keep[number]) for number, plan in parts])

    def taken_over(self, retained: Mask) -> Mask:
        """Return what `CascadePlan.taken_over` does of each pack, `[N, P]` in the numbers of the group."""
        taken = np.zeros_like(retained)
        for number, plan in zip(self.group.numbers, self.plans, strict=True):
            taken[:, number] = plan.taken_over(retained[:, number])
        return taken

    def with_floor(self, floor: float) -> JointPlan:
        """Give every pack `CascadePlan.with_floor`."""
        return replace(self, plans=tuple(plan.with_floor(floor) for plan in self.plans))


@dataclass(frozen=True)
class JointInputs:
    """Holds prepared inputs of N states, `parts[i]` those of pack i; packs that share a scorer have the same."""

    parts: tuple[Inputs, ...]

    def __len__(self) -> int:
        return len(self.parts[0])

    @cached_property
    def unseen(self) -> Ints:
        """Say of each state why it has no scores, if its inputs leave it without (`probemon.core.inputs`)."""
        return _first([part.unseen for part in _distinct(self.parts)])

    def take(self, which: Ints) -> JointInputs:
        """Take some of the states."""
        parts = {id(part): part.take(which) for part in _distinct(self.parts)}
        return JointInputs(tuple(parts[id(part)] for part in self.parts))


class JointEngine:
    """Evaluates the packs of a group, as an `Evaluator`; `engines[i]` is that of pack i."""

    def __init__(self, group: PackGroup, engines: Sequence[Engine]) -> None:
        self._group, self.engines = group, list(engines)
        self._scorers = _distinct([engine.scorer for engine in engines])
        device = self._scorers[0].device
        if device.type == "cuda":
            side = torch.cuda.Stream(device)
            for engine in engines:
                if engine.on_device is not None:
                    engine.on_device.side = side
        self.choice = Choice("descent", "descent", "not measured")

    def inputs(self, hidden: Mapping[str, Tensor], prepared: PreparedInputs | None = None) -> JointInputs:
        prepared = PreparedInputs() if prepared is None else prepared  # what several packs read is made once
        inputs = {id(scorer): scorer.inputs.make(hidden, prepared) for scorer in self._scorers}
        return JointInputs(tuple(inputs[id(engine.scorer)] for engine in self.engines))

    def everything(self, inputs: JointInputs) -> Floats:
        asking = [
            engine.exhaustive.request_every_pair(part) for engine, part in zip(self.engines, inputs.parts, strict=True)
        ]
        return self._laid_out(self._in_step(asking, inputs, [None] * len(self.engines)), np.float32)

    def begin(
        self,
        plan: JointPlan,
        hidden: Mapping[str, Tensor],
        retained: Mask,
        keep: Ints,
        prepared: PreparedInputs | None = None,
    ) -> Outcome | StepUnderWay:
        before = self._split(retained)
        ways = self._ways(plan, len(retained), before, [engine.choice.step for engine in self.engines])
        if not self._all_on_device(ways):
            inputs = self.inputs(hidden, prepared)
            thread = next((scorer.thread for scorer in self._scorers if scorer.thread is not None), None)
            if thread is None:
                return self.evaluate(plan, inputs, retained, keep)
            return thread.begin(lambda: self.evaluate(plan, inputs, retained, keep))
        return self._begun(plan, lambda: self.inputs(hidden, prepared), list(hidden.values()), before, keep)

    def evaluate(
        self, plan: JointPlan, inputs: JointInputs, retained: Mask | None, keep: Ints, strategy: str | None = None
    ) -> Outcome:
        n = len(inputs)
        before = [None] * len(self.engines) if retained is None else self._split(retained)
        strategies = [None] * len(self.engines) if strategy is None else self._strategies(strategy)
        ways = self._ways(plan, n, before, strategies)
        if self._all_on_device(ways):
            own = self._split(np.zeros((n, self._group.n_probes), dtype=bool) if retained is None else retained)
            return self._begun(plan, lambda: inputs, (), own, keep).wait()
        late = [engine.scores.late(n, part) for engine, part in zip(self.engines, before, strict=True)]
        asking = [
            way.requests(own, part, start, keep, mask)
            for way, own, part, start, mask in zip(ways, plan.plans, inputs.parts, before, late, strict=True)
        ]
        return self.join(self._in_step(asking, inputs, late), before, keep)

    def batch_size(self) -> int:
        return max(1, BATCH_CELLS // self._group.n_probes)

    def choose(self, plan: JointPlan, strategy: str) -> Choice:
        """Choose for each pack as asked, or as measured alone; those that differ are joined: "descent+exhaustive"."""
        choices = [
            engine.choose(own, one)
            for engine, own, one in zip(self.engines, plan.plans, self._strategies(strategy), strict=True)
        ]
        why = "; ".join(f"{name}: {choice.why}" for name, choice in zip(self._group.packs, choices, strict=True))
        step, batch = ([getattr(choice, name) for choice in choices] for name in ("step", "batch"))
        self.choice = Choice(_joined(step), _joined(batch), why, any(choice.measured for choice in choices))
        return self.choice

    def check_room(self, plan: JointPlan, what: Callable[[], str]) -> None:
        for scorer in self._scorers:
            pairs = zip(self.engines, plan.plans, strict=True)
            scorer.check_room(sum(len(own.start) for engine, own in pairs if engine.scorer is scorer), what)

    def background_errors(self) -> list[Exception]:
        return [error for scorer in self._scorers for error in scorer.background_errors()]

    # -- inside ----------------------------------------------------------------------------------

    def _strategies(self, strategy: str) -> list[str]:
        strategies = strategy.split(_AND)
        if len(strategies) not in (1, len(self.engines)):
            raise ConfigError(
                f"strategy {strategy!r} names {len(strategies)} strategies, there are {len(self.engines)} packs: give"
                " one, or one each"
            )
        return strategies * len(self.engines) if len(strategies) == 1 else strategies

    def _split(self, retained: Mask) -> list[Mask]:
        """Return the packs' own parts of retained sets `[N, P]`."""
        return [retained[:, number] for number in self._group.numbers]

    def _ways(
        self, plan: JointPlan, n: int, before: Sequence[Mask | None], strategies: Sequence[str | None]
    ) -> list[Way]:
        return [
            engine.way(own, n, part, strategy)
            for engine, own, part, strategy in zip(self.engines, plan.plans, before, strategies, strict=True)
        ]

    def _all_on_device(self, ways: Sequence[Way]) -> bool:
        return all(way is engine.on_device for way, engine in zip(ways, self.engines, strict=True))

    def _in_step(self, asking: Sequence[PairRequests[T]], inputs: JointInputs, late: Sequence[Mask | None]) -> list[T]:
        """Answer all, round by round, and return what they return; one call answers those that share a scorer."""
        results: dict[int, T] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(asking)))
        while answers:
            asked: dict[int, tuple[Ints, Ints]] = {}
            for i, scores in answers.items():
                try:
                    asked[i] = asking[i].send(scores)
                except StopIteration as done:
                    results[i] = done.value
            answers = {}
            for scorer in self._scorers:
                answers |= self._scored([i for i in asked if self.engines[i].scorer is scorer], asked, inputs, late)
        return [results[i] for i in range(len(asking))]

    def _scored(
        self,
        members: list[int],
        asked: Mapping[int, tuple[Ints, Ints]],
        inputs: JointInputs,
        late: Sequence[Mask | None],
    ) -> dict[int, Floats]:
        """Return own scores for packs of one scorer, by one call."""
        if len(members) < 2:
            return {i: self.engines[i].scores.of(inputs.parts[i], *asked[i], late[i]) for i in members}
        pairs = [self.engines[i].scores.numbered(len(inputs), *asked[i]) for i in members]
        at, probes = (np.concatenate(column) for column in zip(*pairs, strict=True))
        ends = np.cumsum([len(rows) for rows, _ in pairs])[:-1]
        scorer, values = self.engines[members[0]].scorer, inputs.parts[members[0]].values
        if late[members[0]] is None:
            return dict(zip(members, np.split(scorer.score(values, at, probes), ends), strict=True))
        scores, missing = scorer.score_held(values, at, probes)
        for i, is_late in zip(members, np.split(missing, ends), strict=True):
            (rows, own), mask = asked[i], late[i]
            assert mask is not None
            mask[rows[is_late], own[is_late]] = True
        return dict(zip(members, np.split(scores, ends), strict=True))

    def _begun(
        self,
        plan: JointPlan,
        make_inputs: Callable[[], JointInputs],
        hidden: Sequence[Tensor],
        before: Sequence[Mask],
        keep: Ints,
    ) -> JointStep:
        """Begin a step of every pack on the device, one after another on the stream that they share."""
        inputs = cache(make_inputs)  # the first step makes them, on that stream
        devices = [engine.on_device for engine in self.engines if engine.on_device is not None]
        steps = [
            on_device.begin(own, partial(lambda i: inputs().parts[i], i), hidden, start, keep)
            for i, (on_device, own, start) in enumerate(zip(devices, plan.plans, before, strict=True))
        ]
        return JointStep(self, steps, before, keep)

    def join(self, outcomes: Sequence[Outcome], before: Sequence[Mask | None], keep: Ints) -> Outcome:
        """Join the packs' outcomes into one, in the numbers of the group."""
        unseen = _first([outcome.unseen for outcome in outcomes])
        outcomes = [_seen(outcome, unseen, start, keep) for outcome, start in zip(outcomes, before, strict=True)]
        state = np.concatenate([np.repeat(np.arange(len(unseen)), np.diff(outcome.ptr)) for outcome in outcomes])
        ids = [number[outcome.probes] for number, outcome in zip(self._group.numbers, outcomes, strict=True)]
        probes = np.concatenate(ids).astype(np.int32)
        order = np.lexsort((probes, state))
        counts = {name: np.sum([getattr(outcome, name) for outcome in outcomes], axis=0) for name in _COUNTS}
        return Outcome(
            probes=probes[order],
            values=np.concatenate([outcome.values for outcome in outcomes])[order],
            fired=np.concatenate([outcome.fired for outcome in outcomes])[order],
            unseen=unseen,
            kept=self._laid_out([outcome.kept for outcome in outcomes], np.bool_),
            **counts,
        )

    def _laid_out(self, parts: Sequence[Any], dtype: Any) -> Any:
        """Lay the packs' own `[N, P]` out in the numbers of the group."""
        whole = np.empty((len(parts[0]), self._group.n_probes), dtype=dtype)
        for number, part in zip(self._group.numbers, parts, strict=True):
            whole[:, number] = part
        return whole


@dataclass(frozen=True)
class JointStep:
    """Waits for a step of every pack that a device is at."""

    engine: JointEngine
    steps: Sequence[StepUnderWay]
    before: Sequence[Mask]
    keep: Ints

    def wait(self) -> Outcome:
        """Return their outcomes as one, once they are there; call it once."""
        return self.engine.join([step.wait() for step in self.steps], self.before, self.keep)


class JointArena:
    """Asks the arenas of several packs in the numbers of their group; its methods are those of `Arena`."""

    def __init__(self, group: PackGroup, engines: Sequence[Engine]) -> None:
        self._group, self._engines = group, list(engines)
        self.arenas: list[Arena] = _distinct([engine.arena for engine in engines])

    def pin(self, probes: Sequence[int] | Ints) -> None:
        done: list[tuple[Arena, Ints]] = []
        try:
            for arena, own in self._split(probes):
                arena.pin(own)
                done.append((arena, own))
        except BaseException:
            for arena, own in done:
                arena.unpin(own)
            raise

    def unpin(self, probes: Sequence[int] | Ints) -> None:
        for arena, own in self._split(probes):
            arena.unpin(own)

    def stats(self) -> ArenaStats:
        """Return sums over the arenas."""
        each = [astuple(arena.stats()) for arena in self.arenas]
        return ArenaStats(*(sum(column) for column in zip(*each, strict=True)))

    def check_integrity(self) -> None:
        for arena in self.arenas:
            arena.check_integrity()

    def _split(self, probes: Sequence[int] | Ints) -> list[tuple[Arena, Ints]]:
        parts = list(zip(self._engines, self._group.split(probes), strict=True))

        def numbered(arena: Arena) -> Ints:
            return np.concatenate([part + engine.first for engine, part in parts if engine.arena is arena])

        return [(arena, numbered(arena)) for arena in self.arenas]


_COUNTS = ("ptr", "n_active", "n_dropped", "n_evaluated", "n_released", "n_late")  # which add up


def _seen(outcome: Outcome, unseen: Ints, before: Mask | None, keep: Ints) -> Outcome:
    """Make the states that another pack has no scores of show nothing, and retain what they had."""
    if (outcome.unseen == unseen).all():
        return outcome
    sizes, seen = np.diff(outcome.ptr), unseen == SEEN
    shown = np.repeat(seen, sizes)
    counts = {name: np.where(seen, getattr(outcome, name), 0) for name in _COUNTS if name != "ptr"}
    kept, unseen_kept = outcome.kept.copy(), ~seen[keep]
    kept[unseen_kept] = False if before is None else before[keep][unseen_kept]
    return replace(
        outcome,
        ptr=np.concatenate([[0], np.cumsum(np.where(seen, sizes, 0))]),
        probes=outcome.probes[shown],
        values=outcome.values[shown],
        fired=outcome.fired[shown],
        unseen=unseen,
        kept=kept,
        **counts,
    )


def _first(reasons: Sequence[Ints]) -> Ints:
    """Return for each state the first reason that a pack has not to see it, or SEEN."""
    every = np.stack(reasons)
    first = np.where(every == SEEN, NO_SCORE + 1, every).min(axis=0)
    return np.where(first > NO_SCORE, SEEN, first)


def _joined(strategies: Sequence[str]) -> str:
    return strategies[0] if len(set(strategies)) == 1 else _AND.join(strategies)


def _distinct(things: Sequence[Any]) -> list[Any]:
    """Return each object once, in order."""
    return list({id(thing): thing for thing in things}.values())

"""JointEngine evaluates several packs as one; every pack has the results that it has alone.

    both = JointEngine(group, engines)
    plan = JointPlan.of(group, [part.plan_with(()) for part in parts])
    inputs = both.inputs({"resid_post.9": x, "resid_post.15": y})      # x, y [N, D]
    outcome = both.evaluate(plan, inputs, retained, keep)              # retained [N, P] of the group

One call scores a round's pairs of all packs in an arena. A token is seen if every pack has scores for it.
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

_AND = "+"


@dataclass(frozen=True)
class JointPlan:
    """The packs' plans; masks `[P]` in the group's numbers."""

    group: PackGroup
    plans: tuple[CascadePlan, ...]
    always: Mask
    named: Mask
    watched: Mask | None

    @classmethod
    def of(cls, group: PackGroup, plans: Sequence[CascadePlan]) -> JointPlan:
        """Join plans in the packs' order."""
        always, named, watched = np.zeros((3, group.n_probes), dtype=bool)
        watched[:] = True
        for number, plan in zip(group.numbers, plans, strict=True):
            always[number], named[number] = plan.always, plan.named
            if plan.watched is not None:
                watched[number] = plan.watched
        return cls(group, tuple(plans), always, named, None if watched.all() else watched)

    @property
    def n_excluded(self) -> int:
        """Number of probes excluded for good."""
        return sum(plan.n_excluded for plan in self.plans)

    @property
    def n_shed(self) -> int:
        """Number of probes left out for a while."""
        return sum(plan.n_shed for plan in self.plans)

    def narrowed(self, keep: Mask) -> JointPlan:
        """`CascadePlan.narrowed` of every pack; `keep [P]`."""
        parts = zip(self.group.numbers, self.plans, strict=True)
        return JointPlan.of(self.group, [plan.narrowed(keep[number]) for number, plan in parts])

    def taken_over(self, retained: Mask) -> Mask:
        """`CascadePlan.taken_over` of every pack, `[N, P]`."""
        taken = np.zeros_like(retained)
        for number, plan in zip(self.group.numbers, self.plans, strict=True):
            taken[:, number] = plan.taken_over(retained[:, number])
        return taken

    def with_floor(self, floor: float) -> JointPlan:
        """`CascadePlan.with_floor` of every pack."""
        return replace(self, plans=tuple(plan.with_floor(floor) for plan in self.plans))


@dataclass(frozen=True)
class JointInputs:
    """Prepared inputs of N states; `parts[i]` are pack i's, shared by packs with one scorer."""

    parts: tuple[Inputs, ...]

    def __len__(self) -> int:
        return len(self.parts[0])

    @cached_property
    def unseen(self) -> Ints:
        """Why each state's inputs leave it without scores."""
        return _first([part.unseen for part in _distinct(self.parts)])

    def take(self, which: Ints) -> JointInputs:
        """Select some states."""
        parts = {id(part): part.take(which) for part in _distinct(self.parts)}
        return JointInputs(tuple(parts[id(part)] for part in self.parts))


class JointEngine:
    """Evaluates a group's packs, as an `Evaluator`."""

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
        prepared = PreparedInputs() if prepared is None else prepared
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
        """Choose for each pack; different choices are joined: "descent+exhaustive"."""
        choices = [
            engine.choose(pack_plan, pack_strategy)
            for engine, pack_plan, pack_strategy in zip(
                self.engines, plan.plans, self._strategies(strategy), strict=True
            )
        ]
        why = "; ".join(f"{name}: {choice.why}" for name, choice in zip(self._group.packs, choices, strict=True))
        step, batch = ([getattr(choice, name) for choice in choices] for name in ("step", "batch"))
        self.choice = Choice(_joined(step), _joined(batch), why, any(choice.measured for choice in choices))
        return self.choice

    def check_room(self, plan: JointPlan, what: Callable[[], str]) -> None:
        for scorer in self._scorers:
            pairs = zip(self.engines, plan.plans, strict=True)
            scorer.check_room(sum(len(pack_plan.start) for engine, pack_plan in pairs if engine.scorer is scorer), what)

    def background_errors(self) -> list[Exception]:
        return [error for scorer in self._scorers for error in scorer.background_errors()]

    # -- private ---------------------------------------------------------------------------------

    def _strategies(self, strategy: str) -> list[str]:
        strategies = strategy.split(_AND)
        if len(strategies) not in (1, len(self.engines)):
            raise ConfigError(
                f"strategy {strategy!r} names {len(strategies)} strategies, there are {len(self.engines)} packs: give"
                " one, or one each"
            )
        return strategies * len(self.engines) if len(strategies) == 1 else strategies

    def _split(self, retained: Mask) -> list[Mask]:
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
        results: dict[int, T] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(asking)))
        while answers:
            requested: dict[int, tuple[Ints, Ints]] = {}
            for i, scores in answers.items():
                try:
                    requested[i] = asking[i].send(scores)
                except StopIteration as done:
                    results[i] = done.value
            answers = {}
            for scorer in self._scorers:
                answers |= self._scored(
                    [i for i in requested if self.engines[i].scorer is scorer], requested, inputs, late
                )
        return [results[i] for i in range(len(asking))]

    def _scored(
        self,
        members: list[int],
        requested: Mapping[int, tuple[Ints, Ints]],
        inputs: JointInputs,
        late: Sequence[Mask | None],
    ) -> dict[int, Floats]:
        if len(members) < 2:
            return {i: self.engines[i].scores.of(inputs.parts[i], *requested[i], late[i]) for i in members}
        pairs = [self.engines[i].scores.numbered(len(inputs), *requested[i]) for i in members]
        at, probes = (np.concatenate(column) for column in zip(*pairs, strict=True))
        ends = np.cumsum([len(rows) for rows, _ in pairs])[:-1]
        scorer, values = self.engines[members[0]].scorer, inputs.parts[members[0]].values
        if late[members[0]] is None:
            return dict(zip(members, np.split(scorer.score(values, at, probes), ends), strict=True))
        scores, missing = scorer.score_held(values, at, probes)
        for i, is_late in zip(members, np.split(missing, ends), strict=True):
            (rows, own), mask = requested[i], late[i]
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
        inputs = cache(make_inputs)
        devices = [engine.on_device for engine in self.engines if engine.on_device is not None]
        steps = [
            on_device.begin(pack_plan, partial(lambda i: inputs().parts[i], i), hidden, start, keep)
            for i, (on_device, pack_plan, start) in enumerate(zip(devices, plan.plans, before, strict=True))
        ]
        return JointStep(self, steps, before, keep)

    def join(self, outcomes: Sequence[Outcome], before: Sequence[Mask | None], keep: Ints) -> Outcome:
        """Join the packs' outcomes."""
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
        whole = np.empty((len(parts[0]), self._group.n_probes), dtype=dtype)
        for number, part in zip(self._group.numbers, parts, strict=True):
            whole[:, number] = part
        return whole


@dataclass(frozen=True)
class JointStep:
    """A step of all packs on a device."""

    engine: JointEngine
    steps: Sequence[StepUnderWay]
    before: Sequence[Mask]
    keep: Ints

    def wait(self) -> Outcome:
        """Return the joined outcome when ready; call it once."""
        return self.engine.join([step.wait() for step in self.steps], self.before, self.keep)


class JointArena:
    """A group's arenas, as an `Arena`."""

    def __init__(self, group: PackGroup, engines: Sequence[Engine]) -> None:
        self._group, self._engines = group, list(engines)
        self.arenas: list[Arena] = _distinct([engine.arena for engine in engines])

    def pin(self, probes: Sequence[int] | Ints) -> None:
        pinned: list[tuple[Arena, Ints]] = []
        try:
            for arena, numbers in self._split(probes):
                arena.pin(numbers)
                pinned.append((arena, numbers))
        except BaseException:
            for arena, numbers in pinned:
                arena.unpin(numbers)
            raise

    def unpin(self, probes: Sequence[int] | Ints) -> None:
        for arena, numbers in self._split(probes):
            arena.unpin(numbers)

    def stats(self) -> ArenaStats:
        """Sums over the arenas."""
        counts = [astuple(arena.stats()) for arena in self.arenas]
        return ArenaStats(*(sum(column) for column in zip(*counts, strict=True)))

    def check_integrity(self) -> None:
        for arena in self.arenas:
            arena.check_integrity()

    def _split(self, probes: Sequence[int] | Ints) -> list[tuple[Arena, Ints]]:
        parts = list(zip(self._engines, self._group.split(probes), strict=True))

        def numbered(arena: Arena) -> Ints:
            return np.concatenate([part + engine.first for engine, part in parts if engine.arena is arena])

        return [(arena, numbered(arena)) for arena in self.arenas]


_COUNTS = ("ptr", "n_active", "n_dropped", "n_evaluated", "n_released", "n_late")


def _seen(outcome: Outcome, unseen: Ints, before: Mask | None, keep: Ints) -> Outcome:
    """Clear states that another pack has no scores for; they keep their retained sets."""
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
    """Return each state's first reason, or SEEN."""
    stacked = np.stack(reasons)
    first = np.where(stacked == SEEN, NO_SCORE + 1, stacked).min(axis=0)
    return np.where(first > NO_SCORE, SEEN, first)


def _joined(strategies: Sequence[str]) -> str:
    return strategies[0] if len(set(strategies)) == 1 else _AND.join(strategies)


def _distinct(things: Sequence[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())

"""Watches: what a run watches and what follows, changed as a whole while the host generates.

watches = Watches(manager)
watch = watches.now                      # taken once for a batch of tokens: its plan scores them, its rules judge them
watches.change(rules=rules, exclude=["plant"], count=True)
watches.past[watch.number]               # what it was, without the plan
watches.shed_to(3)                       # for a while only what is named is scored, to hold a budget
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from probemon.core.concept_names import Wanted
from probemon.engine.scorer import Plan, Scorer
from probemon.monitor.rule_panel import RulePanel
from probemon.monitor.rule_spec import Rule
from probemon.monitor.rungs import ALL, NAMES, narrowed, rungs_of
from probemon.packs.configured import found

Concepts = tuple[str, ...]


@dataclass(frozen=True)
class Watched:
    """What held from some token on: `rules`, the ids of the concepts that are `always_on` and that are excluded (None:
    as the manager's settings say), and the sha256 of the `deployment` file that says so, if one does. `rung`: of
    `probemon.monitor.rungs`, what was left out of it to hold a budget.
    """

    rules: tuple[Rule, ...] = ()
    always_on: Concepts | None = None
    exclude: Concepts | None = None
    deployment: str | None = None
    rung: int = ALL


@dataclass(frozen=True)
class Watch:
    """One state of what is watched: its `number` in the run; its `plan`; its rules, each with a number of its own in
    the run, by which its streaks and running scores are found again after a change; the `rung` that it is on; the hash
    of its `deployment`.
    """

    number: int
    plan: Plan
    rules: tuple[tuple[int, Rule], ...]
    rung: int = ALL
    deployment: str | None = None

    @cached_property
    def panel(self) -> RulePanel:
        """Return its rules as they are asked."""
        return RulePanel(self.rules)


class Watches:
    """`now` is replaced whole; whoever scores or judges tokens takes it once."""

    def __init__(self, manager: Scorer) -> None:
        self._manager = manager
        self.now = self._whole = Watch(0, manager.plan, ())
        self._on_rungs: dict[int, Watch] = {}
        self._rungs: tuple[int, ...] | None = None
        self.asked_rung = ALL
        self.past = [Watched()]
        self._own: tuple[Rule, ...] = ()
        self._of_file: tuple[Rule, ...] = ()
        self._n_rules, self._pinned = 0, False
        self._lock = threading.RLock()

    @property
    def rules(self) -> list[Rule]:
        """Return the rules that hold: those of a deployment file, then the run's own."""
        return [rule for _, rule in self.now.rules]

    @property
    def rungs(self) -> tuple[int, ...]:
        """Return the rungs of `probemon.monitor.rungs` that leave something out of what holds now, mildest first."""
        with self._lock:  # else they might be of what held before a change in another thread
            if self._rungs is None:
                audited, ruled = self._manager.audit_rate > 0, bool(self._whole.rules)
                self._rungs = rungs_of(self._whole.plan, self._manager.pack, audited=audited, ruled=ruled)
            return self._rungs

    @property
    def rung_name(self) -> str:
        """Return the name of the rung that holds now, "all" where nothing is left out."""
        return NAMES[self.now.rung]

    def shed_to(self, rung: int) -> None:
        """Leave out what `rung` does, as far as what is watched allows, for the tokens from now on."""
        with self._lock:
            self.asked_rung = rung
            self.now = self._on_rung()

    def add(self, rules: Sequence[Rule], *, count: bool) -> None:
        """Add rules; `count`: tokens were judged by what held before."""
        self.change([*self._own, *rules], count=count)

    def change(
        self,
        rules: Sequence[Rule] | None = None,
        *,
        of_file: Sequence[Rule] | None = None,
        always_on: Wanted | None = None,
        exclude: Wanted | None = None,
        deployment: str | None = None,
        count: bool = True,
    ) -> int:
        """Replace what is given, for the tokens from now on, and return the number of the state that holds then.

        `rules`: the run's own; `of_file`: those of the deployment. A rule that held before, and still does, goes on
        with its streaks. Not `count`ed is what comes before the first token. Raises `UnknownConcept`, `ConfigError`,
        `ArenaFull`, and changes nothing then.
        """
        with self._lock:
            before, said = self._whole, self.past[self._whole.number]
            own = self._own if rules is None else tuple(rules)
            filed = self._of_file if of_file is None else tuple(of_file)
            said = Watched(
                (*filed, *own),
                said.always_on if always_on is None else self._ids(always_on),
                said.exclude if exclude is None else self._ids(exclude),
                deployment or said.deployment,
            )
            probes = [probe for rule in said.rules for probe in rule.probes]
            plan = self._manager.plan_with(probes, said.exclude, said.always_on)
            self._manager.engine.check_room(plan, partial(self._named, probes))
            if self._pinned:
                self._manager.arena.pin(np.flatnonzero(plan.always))
                self._manager.arena.unpin(np.flatnonzero(before.plan.always))
            self._own, self._of_file = own, filed
            if count:
                self.past.append(said)
            else:  # no token was scored by it, nor on a rung of it
                self.past[before.number :] = [said]
            number = len(self.past) - 1 if count else before.number
            self._whole = Watch(number, plan, self._numbered(said.rules), deployment=said.deployment)
            self._on_rungs, self._rungs = {}, None
            self.now = self._on_rung()
            return number

    def pin(self, stack: ExitStack) -> None:
        """Keep the weights of what is always evaluated on the device until `stack` closes."""
        self._manager.arena.pin(np.flatnonzero(self._whole.plan.always))
        self._pinned = True
        stack.callback(self._unpin)

    def _on_rung(self) -> Watch:
        """Return what holds on the rung that is asked for, or the lowest one under it that there is."""
        # Without a budget no rung is asked for, and what the rungs are need not be known.
        rung = ALL
        if self.asked_rung != ALL:
            rung = max((one for one in self.rungs if one <= self.asked_rung), default=ALL)
        if rung == ALL:
            return self._whole
        if rung not in self._on_rungs:
            plan = narrowed(self._whole.plan, self._manager.pack, rung)
            self.past.append(replace(self.past[self._whole.number], rung=rung))
            self._on_rungs[rung] = replace(self._whole, number=len(self.past) - 1, plan=plan, rung=rung)
        return self._on_rungs[rung]

    def _unpin(self) -> None:
        self._pinned = False
        self._manager.arena.unpin(np.flatnonzero(self._whole.plan.always))

    def _named(self, probes: Sequence[int]) -> str:
        return ", ".join(self._manager.pack.concepts[probe]["id"] for probe in dict.fromkeys(probes))

    def _ids(self, concepts: Wanted) -> Concepts:
        pack = self._manager.pack
        return tuple(pack.concepts[probe]["id"] for probe in found(pack, concepts))

    def _numbered(self, rules: Sequence[Rule]) -> tuple[tuple[int, Rule], ...]:
        # A rule that was there is mostly the very same object: of thousands each is then found at once.
        known = {id(rule): (number, rule) for number, rule in self._whole.rules}
        others = [rule for rule in rules if id(rule) not in known]
        kept = {id(rule) for rule in rules}
        equal = [one for key, one in known.items() if key not in kept] if others else []
        numbered = []
        for rule in rules:
            same = known.pop(id(rule), None) or next((one for one in equal if one[1] == rule), None)
            if same is None:
                same = (self._n_rules, rule)
                self._n_rules += 1
            elif same in equal:
                equal.remove(same)
            numbered.append(same)
        return tuple(numbered)

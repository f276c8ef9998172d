"""Watches: what a run watches and its rules, replaced as a whole while the model generates.

watch = watches.now                      # once for each batch
watches.change(rules=rules, exclude=["plant"], count=True)
watches.past[watch.number]               # a `Watched`
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
from probemon.monitor.degradations import ALL, NAMES, degradations_of, narrowed
from probemon.monitor.rule_panel import RulePanel
from probemon.monitor.rule_spec import Rule
from probemon.packs.configured import found

Concepts = tuple[str, ...]


@dataclass(frozen=True)
class Watched:
    """What was watched from some token on.

    `always_on`, `exclude`: concept ids; None: the manager's settings
    `deployment`: the file's sha256
    `degradation`: of `probemon.monitor.degradations`
    """

    rules: tuple[Rule, ...] = ()
    always_on: Concepts | None = None
    exclude: Concepts | None = None
    deployment: str | None = None
    degradation: int = ALL


@dataclass(frozen=True)
class Watch:
    """What is watched now.

    `rules`: with numbers that identify their streaks after a change
    `deployment`: the file's sha256
    """

    number: int
    plan: Plan
    rules: tuple[tuple[int, Rule], ...]
    degradation: int = ALL
    deployment: str | None = None

    @cached_property
    def panel(self) -> RulePanel:
        """Return the panel of its rules."""
        return RulePanel(self.rules)


class Watches:
    """`now` is replaced whole: read it once for each batch."""

    def __init__(self, manager: Scorer) -> None:
        self._manager = manager
        self.now = self._whole = Watch(0, manager.plan, ())
        self._degraded_watches: dict[int, Watch] = {}
        self._degradations: tuple[int, ...] | None = None
        self.asked_degradation = ALL
        self.past = [Watched()]
        self._own: tuple[Rule, ...] = ()
        self._of_file: tuple[Rule, ...] = ()
        self._n_rules, self._pinned = 0, False
        self._lock = threading.RLock()

    @property
    def rules(self) -> list[Rule]:
        """Return the rules in force: the deployment file's, then the run's."""
        return [rule for _, rule in self.now.rules]

    @property
    def degradations(self) -> tuple[int, ...]:
        """Return the degradations that leave something out, mildest first."""
        with self._lock:
            if self._degradations is None:
                audited, ruled = self._manager.audit_rate > 0, bool(self._whole.rules)
                self._degradations = degradations_of(self._whole.plan, self._manager.pack, audited=audited, ruled=ruled)
            return self._degradations

    @property
    def degradation_name(self) -> str:
        """Return the degradation in force."""
        return NAMES[self.now.degradation]

    def shed_to(self, degradation: int) -> None:
        """Leave out what level `degradation` leaves out, for the tokens from now on.

        If what is watched does not have that level, the nearest milder one applies.
        """
        with self._lock:
            self.asked_degradation = degradation
            self.now = self._degraded()

    def add(self, rules: Sequence[Rule], *, count: bool) -> None:
        """Add rules; `count`: tokens were scored before."""
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
        """Replace what is given from now on; return the number of the new state.

        `rules`: the run's; continued ones keep their streaks
        `of_file`: the deployment's rules
        `count`: False before the first token

        Raises `UnknownConcept`, `ConfigError` or `ArenaFull`, and then changes nothing.
        """
        with self._lock:
            before, watched = self._whole, self.past[self._whole.number]
            own_rules = self._own if rules is None else tuple(rules)
            file_rules = self._of_file if of_file is None else tuple(of_file)
            watched = Watched(
                (*file_rules, *own_rules),
                watched.always_on if always_on is None else self._ids(always_on),
                watched.exclude if exclude is None else self._ids(exclude),
                deployment or watched.deployment,
            )
            probes = [probe for rule in watched.rules for probe in rule.probes]
            plan = self._manager.plan_with(probes, watched.exclude, watched.always_on)
            self._manager.engine.check_room(plan, partial(self._named, probes))
            if self._pinned:
                self._manager.arena.pin(np.flatnonzero(plan.always))
                self._manager.arena.unpin(np.flatnonzero(before.plan.always))
            self._own, self._of_file = own_rules, file_rules
            if count:
                self.past.append(watched)
            else:  # no token was scored by it
                self.past[before.number :] = [watched]
            number = len(self.past) - 1 if count else before.number
            self._whole = Watch(number, plan, self._numbered(watched.rules), deployment=watched.deployment)
            self._degraded_watches, self._degradations = {}, None
            self.now = self._degraded()
            return number

    def pin(self, stack: ExitStack) -> None:
        """Pin weights that are always evaluated until `stack` closes."""
        self._manager.arena.pin(np.flatnonzero(self._whole.plan.always))
        self._pinned = True
        stack.callback(self._unpin)

    def _degraded(self) -> Watch:
        """Return the requested degradation, or the nearest milder one."""
        degradation = ALL
        if self.asked_degradation != ALL:
            degradation = max((one for one in self.degradations if one <= self.asked_degradation), default=ALL)
        if degradation == ALL:
            return self._whole
        if degradation not in self._degraded_watches:
            plan = narrowed(self._whole.plan, self._manager.pack, degradation)
            self.past.append(replace(self.past[self._whole.number], degradation=degradation))
            self._degraded_watches[degradation] = replace(
                self._whole, number=len(self.past) - 1, plan=plan, degradation=degradation
            )
        return self._degraded_watches[degradation]

    def _unpin(self) -> None:
        self._pinned = False
        self._manager.arena.unpin(np.flatnonzero(self._whole.plan.always))

    def _named(self, probes: Sequence[int]) -> str:
        return ", ".join(self._manager.pack.concepts[probe]["id"] for probe in dict.fromkeys(probes))

    def _ids(self, concepts: Wanted) -> Concepts:
        pack = self._manager.pack
        return tuple(pack.concepts[probe]["id"] for probe in found(pack, concepts))

    def _numbered(self, rules: Sequence[Rule]) -> tuple[tuple[int, Rule], ...]:
        # By id first: thousands of unchanged rules are matched fast.
        earlier = {id(rule): (number, rule) for number, rule in self._whole.rules}
        others = [rule for rule in rules if id(rule) not in earlier]
        current_ids = {id(rule) for rule in rules}
        candidates = [one for key, one in earlier.items() if key not in current_ids] if others else []
        numbered = []
        for rule in rules:
            entry = earlier.pop(id(rule), None) or next((one for one in candidates if one[1] == rule), None)
            if entry is None:
                entry = (self._n_rules, rule)
                self._n_rules += 1
            elif entry in candidates:
                candidates.remove(entry)
            numbered.append(entry)
        return tuple(numbered)

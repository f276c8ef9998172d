"""Held: what a server's deployment file says now, which is replaced whole when the file is read again.

    holding = Holding(manager, tokenizer, deployment)
    with holding.answering(answer) as held: ...     # `answer.hold_to(held)` is called when it changes meanwhile
    holding.reload()                                # DeploymentError where the file is wrong: what held before goes on

Of a file that is read again rules, what is always on and what is excluded may have changed, and its name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from probemon.errors import ConfigError
from probemon.manager import DynamicProbeManager
from probemon.monitor.rule_spec import Rule
from probemon.monitor.rules import check_asked
from probemon.ops.deployment.deployment import Deployment


@dataclass(frozen=True)
class Held:
    """`deployment`: of a server without a file None. `always_on`, `exclude`: None where the manager's settings say."""

    deployment: Deployment | None = None
    rules: tuple[Rule, ...] = ()
    always_on: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None


Takes = Literal["all", "rules", "nothing"]


class Answer(Protocol):
    """An answer under way."""

    def hold_to(self, held: Held) -> Takes:
        """Hold to what the file says now, from the next token on; return how much of it can be held to beside the rules
        of the request.
        """


class Reloaded(NamedTuple):
    """How many answers under way do not hold to all of a file: to its rules alone, and to what they held to before."""

    to_rules: int
    to_nothing: int


class Holding:
    """`now` holds for what begins. Any thread may ask."""

    def __init__(self, manager: DynamicProbeManager, tokenizer: Any, deployment: Deployment | None) -> None:
        self._manager, self._tokenizer = manager, tokenizer
        self._lock, self._answers = threading.Lock(), list[Answer]()
        self._reloading = threading.Lock()  # one after the other: what was read last holds
        self.now = Held() if deployment is None else Held(deployment, tuple(deployment.rules(manager.pack)))
        check_asked(self.now.rules, tokenizer)
        self.check_room([])

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[Held]:
        """Give what holds, and tell the answer where that changes while the block runs."""
        with self._lock:
            self._answers.append(answer)
            held = self.now
        try:
            yield held
        finally:
            with self._lock:
                self._answers.remove(answer)

    def check_room(self, probes: Sequence[int]) -> None:
        """Raise `ConfigError`, `ArenaFull` where rules on more probes do not fit what holds."""
        self._check(self.now, probes, "the rules of a request")

    def reload(self) -> Reloaded:
        """Read the file again; all that is under way holds to it from its next token on, and what begins from now on.

        Returns how many answers do not, for rules of their own: they are on what is now excluded, or leave no room.
        Raises `DeploymentError`, `ArenaFull`, and `ConfigError` for a judge that cannot be asked, and changes nothing
        then.
        """
        with self._reloading:
            return self._reload()

    # -- inside ----------------------------------------------------------------------------------

    def _reload(self) -> Reloaded:
        before = self.now.deployment
        if before is None:
            raise ConfigError("this server has no deployment file that could be read again: start it with --deployment")
        newer = Deployment.read(before.path)
        filed, always_on, exclude = before.changed_by(newer, self._manager)
        # A rule that stays is the one that was: what it compares with goes on. The same may stand twice.
        known, rules = list(self.now.rules), list[Rule]()
        for rule in filed:
            rules.append(known.pop(known.index(rule)) if rule in known else rule)
        held = Held(newer, tuple(rules), tuple(always_on), tuple(exclude))
        check_asked(rules, self._tokenizer)
        with newer.errors_of_settings():
            self._check(held, [], "the rules of the file")
        with self._lock:
            self.now, answers = held, list(self._answers)
        takes = [answer.hold_to(held) for answer in answers]
        return Reloaded(takes.count("rules"), takes.count("nothing"))

    def _check(self, held: Held, probes: Sequence[int], what: str) -> None:
        all_probes = [*(probe for rule in held.rules for probe in rule.probes), *probes]
        self._manager.engine.check_room(self._manager.plan_with(all_probes, held.exclude, held.always_on), lambda: what)

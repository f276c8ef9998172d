"""The present content of a server's deployment file, replaced whole on reload."""

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
    """`deployment`: None without a file. `always_on`, `exclude`: None for the manager's settings."""

    deployment: Deployment | None = None
    rules: tuple[Rule, ...] = ()
    always_on: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None


Takes = Literal["all", "rules", "nothing"]


class Answer(Protocol):
    """An answer under way."""

    def hold_to(self, held: Held) -> Takes:
        """Apply a reloaded file from the next token on; return how much of it fits next to the request's rules."""


class Reloaded(NamedTuple):
    """How many answers take only a reloaded file's rules, or nothing."""

    to_rules: int
    to_nothing: int


class Holding:
    """`now` applies to new answers. Thread-safe."""

    def __init__(self, manager: DynamicProbeManager, tokenizer: Any, deployment: Deployment | None) -> None:
        self._manager, self._tokenizer = manager, tokenizer
        self._lock, self._answers = threading.Lock(), list[Answer]()
        self._reloading = threading.Lock()  # the last file read applies
        self.now = Held() if deployment is None else Held(deployment, tuple(deployment.rules(manager.pack)))
        check_asked(self.now.rules, tokenizer)
        self.check_room([])

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[Held]:
        """Yield the present settings; `answer` receives changes."""
        with self._lock:
            self._answers.append(answer)
            held = self.now
        try:
            yield held
        finally:
            with self._lock:
                self._answers.remove(answer)

    def check_room(self, probes: Sequence[int]) -> None:
        """Raise `ConfigError` or `ArenaFull` if rules on more probes do not fit."""
        self._check(self.now, probes, "the rules of a request")

    def reload(self) -> Reloaded:
        """Read the file again, for new answers and the next token of running ones.

        Returns how many cannot apply it all because of the request's rules. Raises `DeploymentError`, `ArenaFull`, or
        `ConfigError` for a judge that cannot be asked; nothing changes then.
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
        # An unchanged rule keeps its object, and so its state. Equal rules may occur twice.
        previous_rules, rules = list(self.now.rules), list[Rule]()
        for rule in filed:
            rules.append(previous_rules.pop(previous_rules.index(rule)) if rule in previous_rules else rule)
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

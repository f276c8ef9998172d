"""Change: an update of `MonitorRun`, checked before it is applied.

change = Change.of(manager, old, deployment, rules, always_on, exclude)
change.make(watches)                                  # number of the new state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from probemon.core.concept_names import Wanted
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError
from probemon.monitor.rule_spec import Rule, RuleSpec
from probemon.monitor.watches import Watches
from probemon.packs.group import AnyPack
from probemon.util.checks import check_mappings


class DeploymentFile(Protocol):
    """A file that says what is watched (`probemon.ops.deployment`)."""

    sha256: str
    name: str
    content: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> DeploymentFile:
        """Read another file."""

    @property
    def names_model(self) -> bool:
        """True if it names its model."""

    @property
    def says_what_follows(self) -> bool:
        """True if it has rules."""

    @property
    def breaker(self) -> Any:
        """Return its breaker, or None."""

    def check_host(self, pack: AnyPack, model: Any) -> None:
        """Raise `ModelMismatch` for another model."""

    def followers(self, manager: Scorer, given: Sequence[Any]) -> list[Any]:
        """Return its followers; `given`: the run's."""

    def show(self, manager: Scorer) -> None:
        """Show its metrics; raise if a dependency is missing."""

    def rules(self, pack: AnyPack) -> list[Rule]:
        """Return its rules."""

    def changed_by(self, newer: Any, manager: Scorer) -> tuple[list[Rule], list[str], list[str]]:
        """Check a newer file; return its rules, `always_on` and `exclude`."""

    def check_exclude(self, manager: Scorer, exclude: Wanted) -> None:
        """Raise `ConfigError` if a concept that it counts is excluded."""


@dataclass(frozen=True)
class Change:
    """None leaves a part unchanged. `of_file`: the rules of `deployment`."""

    deployment: DeploymentFile | None
    of_file: Sequence[Rule] | None
    rules: Sequence[Rule] | None
    always_on: Wanted | None
    exclude: Wanted | None

    @classmethod
    def of(
        cls,
        manager: Scorer,
        before: DeploymentFile | None,
        deployment: str | Path | DeploymentFile | None,
        rules: Sequence[Mapping[str, Any]] | None,
        always_on: Wanted | None,
        exclude: Wanted | None,
    ) -> Change:
        """Check the arguments of `MonitorRun.update`; `before`: the deployment in force."""
        run_rules = None if rules is None else _made(manager, rules)
        if deployment is None:
            if run_rules is None and always_on is None and exclude is None:
                raise ConfigError("update() needs at least one of: deployment, rules, always_on, exclude")
            if before is not None and exclude is not None:
                before.check_exclude(manager, exclude)
            return cls(None, None, run_rules, always_on, exclude)
        if always_on is not None or exclude is not None:
            raise ConfigError("a deployment sets always_on and exclude: give either a deployment or these")
        if before is None:
            raise ConfigError("this run began without a deployment: make its manager by from_deployment")
        newer = type(before).read(deployment) if isinstance(deployment, (str, Path)) else deployment
        file_rules, on, off = before.changed_by(newer, manager)
        return cls(newer, file_rules, run_rules, on, off)

    @property
    def new_rules(self) -> tuple[Rule, ...]:
        """Return the new rules."""
        return (*(self.of_file or ()), *(self.rules or ()))

    def make(self, watches: Watches) -> int:
        """Apply it. Raises `ConfigError` or `ArenaFull`, and then changes nothing."""
        return watches.change(
            self.rules,
            of_file=self.of_file,
            always_on=self.always_on,
            exclude=self.exclude,
            deployment=None if self.deployment is None else self.deployment.sha256,
        )


def _made(manager: Scorer, rules: Sequence[Mapping[str, Any]]) -> list[Rule]:
    specs = [RuleSpec.from_dict(rule) for rule in check_mappings("rules", rules)]
    return [rule for spec in specs for rule in spec.rules(manager.pack)]

"""Change: what `MonitorRun.update` changes, checked whole before any of it holds.

change = Change.of(manager, old, deployment, rules, always_on, exclude)
check_beams(change.new_rules)                         # while beams run
change.make(watches)                                  # the number of the state that holds from then on
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
    """A file that says what is watched and what follows, as `probemon.ops.deployment` reads it: the seam by which a run
    holds to one.
    """

    sha256: str
    name: str
    content: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> DeploymentFile:
        """Read another one."""

    @property
    def names_host(self) -> bool:
        """Whether it says which model it is for."""

    @property
    def says_what_follows(self) -> bool:
        """Whether it has rules, which say what follows at a token that was not seen."""

    @property
    def breaker(self) -> Any:
        """Return when errors of scoring pause it, None where it does not say."""

    def check_host(self, pack: AnyPack, model: Any) -> None:
        """Raise `HostMismatch` where a model is not the one that it names."""

    def followers(self, pack: AnyPack, given: Sequence[Any]) -> list[Any]:
        """Return what hears a run by it, beside what the run is `given`."""

    def show(self, pack: AnyPack) -> None:
        """Show its metrics from now on; raise where something that it needs is not installed."""

    def rules(self, pack: AnyPack) -> list[Rule]:
        """Return its rules."""

    def changed_by(self, newer: Any, manager: Scorer) -> tuple[list[Rule], list[str], list[str]]:
        """Check a newer file; return its rules, what is always on, and what is excluded."""

    def check_exclude(self, manager: Scorer, exclude: Wanted) -> None:
        """Raise `ConfigError` where it counts a concept by name that is to be excluded."""


@dataclass(frozen=True)
class Change:
    """None of a part leaves it as it is. `of_file`: the rules of `deployment`."""

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
        """Check the arguments of `MonitorRun.update`; `before`: the deployment that holds. Raises what that raises."""
        own = None if rules is None else _made(manager, rules)
        if deployment is None:
            if own is None and always_on is None and exclude is None:
                raise ConfigError("nothing is to change: give a deployment, rules, always_on or exclude")
            if before is not None and exclude is not None:
                before.check_exclude(manager, exclude)
            return cls(None, None, own, always_on, exclude)
        if always_on is not None or exclude is not None:
            raise ConfigError("a deployment says what is always_on and excluded: give the one or the other")
        if before is None:
            raise ConfigError("this run began without a deployment: make its manager by from_deployment")
        newer = type(before).read(deployment) if isinstance(deployment, (str, Path)) else deployment
        filed, on, off = before.changed_by(newer, manager)
        return cls(newer, filed, own, on, off)

    @property
    def new_rules(self) -> tuple[Rule, ...]:
        """Return the rules that it brings."""
        return (*(self.of_file or ()), *(self.rules or ()))

    def make(self, watches: Watches) -> int:
        """Make it hold for the tokens from now on. Raises `ConfigError`, `ArenaFull`, and changes nothing then."""
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

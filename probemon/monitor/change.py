"""Change: what `MonitorRun.update` changes, checked whole before any of it holds.

change = Change.of(manager, old, deployment, rules, always_on, exclude)
check_beams(change.new_rules)                         # while beams run
change.make(watches)                                  # the number of the state that holds from then on
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probemon.core.concept_names import Wanted
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError, closest
from probemon.monitor.deployment import Deployment
from probemon.monitor.rules import Rule, make_rules
from probemon.monitor.watches import Watches
from probemon.util.checks import check_mappings

_OF_A_RULE = [name for name in inspect.signature(make_rules).parameters if name != "pack"]


@dataclass(frozen=True)
class Change:
    """None of a part leaves it as it is. `of_file`: the rules of `deployment`."""

    deployment: Deployment | None
    of_file: Sequence[Rule] | None
    rules: Sequence[Rule] | None
    always_on: Wanted | None
    exclude: Wanted | None

    @classmethod
    def of(
        cls,
        manager: Scorer,
        before: Deployment | None,
        deployment: str | Path | Deployment | None,
        rules: Sequence[Mapping[str, Any]] | None,
        always_on: Wanted | None,
        exclude: Wanted | None,
    ) -> Change:
        """Check the arguments of `MonitorRun.update`; `before`: the deployment that holds. Raises what that raises."""
        own = (
            None if rules is None else [one for rule in check_mappings("rules", rules) for one in _made(manager, rule)]
        )
        if deployment is None:
            if own is None and always_on is None and exclude is None:
                raise ConfigError("nothing is to change: give a deployment, rules, always_on or exclude")
            if before is not None and exclude is not None:
                _check_counted(manager, before, exclude)
            return cls(None, None, own, always_on, exclude)
        if always_on is not None or exclude is not None:
            raise ConfigError("a deployment says what is always_on and excluded: give the one or the other")
        if before is None:
            raise ConfigError("this run began without a deployment: make its manager by from_deployment")
        newer = deployment if isinstance(deployment, Deployment) else Deployment.read(deployment)
        before.check_only_rules_differ(newer)
        newer.metrics(manager.pack)  # what is counted may be excluded now
        filed = newer.rules(manager.pack)
        named: list[list[str]] = [newer.content.get(name, []) for name in ("always_on", "exclude")]
        with newer.errors_of_settings():
            manager.plan_with([rule.probe for rule in filed], exclude=named[1], always_on=named[0])
        return cls(newer, filed, own, *named)

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


def _check_counted(manager: Scorer, deployment: Deployment, exclude: Wanted) -> None:
    """Raise `ConfigError` where the metrics of a deployment count a concept by name that is to be excluded."""
    metrics, watched = deployment.metrics(manager.pack), manager.plan_with((), exclude=exclude).watched
    if metrics is None or watched is None:
        return
    for concept in metrics["concepts"]:
        if not watched[manager.pack.find(concept)]:
            raise ConfigError(
                f"exclude leaves out {concept!r:.80}, which metrics of {deployment.name} count, so that its count would"
                " stay where it is: watch it, or do not count it"
            )


def _made(manager: Scorer, rule: Mapping[str, Any]) -> list[Rule]:
    for name in rule:
        if name not in _OF_A_RULE:
            raise ConfigError(f"a rule has no {name!r}{closest(name, _OF_A_RULE)}: see MonitorRun.on")
    if "concept" not in rule:
        raise ConfigError("a rule has no concept: give the arguments of MonitorRun.on, concept among them")
    return make_rules(manager.pack, **rule)

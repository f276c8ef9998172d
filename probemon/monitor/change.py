"""Change: what `MonitorRun.update` changes, checked whole before any of it holds.

change = Change.of(manager, old, deployment, rules, always_on, exclude)
change.check_beams()                                  # while beams run
change.make(watches)                                  # the number of the state that holds from then on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probemon.core.checks import check_mappings
from probemon.core.concept_names import Wanted
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError, NotSupportedDecoding, closest
from probemon.monitor.deployment import Deployment
from probemon.monitor.rules import Rule, make_rules
from probemon.monitor.watches import Watches

_OF_A_RULE = {"concept": None, "above": None, "for_tokens": 1, "aggregate": None, "action": "stop", "on_blind": "pass"}


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
            return cls(None, None, own, always_on, exclude)
        if always_on is not None or exclude is not None:
            raise ConfigError("a deployment says what is always_on and excluded: give the one or the other")
        if before is None:
            raise ConfigError("this run began without a deployment: make its manager by from_deployment")
        newer = deployment if isinstance(deployment, Deployment) else Deployment.read(deployment)
        before.check_only_rules_differ(newer)
        with newer.errors_of_settings():
            given = {name: newer.content.get(name, []) for name in ("always_on", "exclude")}
            manager.plan_with([], given["exclude"], given["always_on"])
        return cls(newer, newer.rules(manager.pack), own, given["always_on"], given["exclude"])

    def check_beams(self) -> None:
        """Raise `NotSupportedDecoding` where a rule stops."""
        if any("stop" in rule.actions for rule in (*(self.of_file or ()), *(self.rules or ()))):
            raise NotSupportedDecoding("a stop cannot end one beam, and beams run: change it once they have ended")

    def make(self, watches: Watches) -> int:
        """Make it hold for the tokens from now on. Raises `ConfigError`, `ArenaFull`, and changes nothing then."""
        return watches.change(
            self.rules,
            of_file=self.of_file,
            always_on=self.always_on,
            exclude=self.exclude,
            deployment=None if self.deployment is None else self.deployment.sha256,
        )


def _made(manager: Scorer, rule: Mapping[str, Any]) -> list[Rule]:
    for name in rule:
        if name not in _OF_A_RULE:
            raise ConfigError(f"a rule has no {name!r}{closest(name, _OF_A_RULE)}: see MonitorRun.on")
    if "concept" not in rule:
        raise ConfigError("a rule has no concept: give the arguments of MonitorRun.on, concept among them")
    return make_rules(manager.pack, **{**_OF_A_RULE, **rule})

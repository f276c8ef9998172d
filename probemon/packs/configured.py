"""A pack with the settings and thresholds that hold for it.

part = ConfiguredPack.of(pack, {"keep_top_k": 20})             # what is not given is as the pack recommends
plan = part.plan_with(["weapon"])
parts = configure_group(group, {"keep_top_k": 20})    # of several packs, each its own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from probemon.core.plan import CascadePlan, expand_thresholds
from probemon.core.scores import Floats
from probemon.core.settings import CascadeConfig
from probemon.errors import ConfigError
from probemon.packs.group import PackGroup
from probemon.packs.pack import ProbePack


@dataclass(frozen=True)
class ConfiguredPack:
    """A pack, its settings, and its expand thresholds `[P]` by them."""

    pack: ProbePack
    config: CascadeConfig
    thresholds: Floats

    @classmethod
    def of(cls, pack: ProbePack, settings: Mapping[str, Any]) -> ConfiguredPack:
        """With the pack's recommendation for what is not given. Raises `ConfigError` (`UnknownSetting` for a typo)."""
        recommended = {
            name: value for name, value in pack.recommended.items() if name != "load_threshold"
        }  # that one is what "auto" means
        config = CascadeConfig.of({**recommended, **settings})
        thresholds = expand_thresholds(
            pack.tree,
            pack.score_rule,
            config.load_threshold,
            pack.alert_threshold.numpy(),
            pack.expand_threshold.numpy(),
            pack.recommended.get("load_threshold"),
        )
        return cls(pack, config, thresholds)

    def plan_with(self, extra: Sequence[str | int]) -> CascadePlan:
        """A plan with more concepts always on. Raises `UnknownConcept`, `ConfigError`."""
        always_on = [self.pack.find(concept) for concept in (*self.config.always_on, *extra)]
        return CascadePlan.of(self.pack.tree, self.pack.score_rule, self.config, self.thresholds, always_on)


def configure_group(group: PackGroup, settings: Mapping[str, Any]) -> list[ConfiguredPack]:
    """Every pack of a group with the settings given; `always_on` names concepts of the group. An error says of which
    pack it is.
    """
    always_on = CascadeConfig.of(settings).always_on
    own = group.split([group.find(concept) for concept in always_on])
    made = []
    for (name, pack), mine in zip(group.packs.items(), own, strict=True):
        given = {**settings, "always_on": mine.tolist()} if "always_on" in settings else settings
        with named(name):
            part = ConfiguredPack.of(pack, given)
            part.plan_with(())  # what does not fit the hierarchy is told here, too
        made.append(part)
    return made


@contextmanager
def named(name: str) -> Iterator[None]:
    """A `ConfigError` of the block begins with a pack's name."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{name}: {error}") from error

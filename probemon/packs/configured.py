"""A pack with the settings and thresholds that hold for it.

configured = ConfiguredPack.of(pack, {"keep_top_k": 20})  # the pack's recommendation for what is not given
plan = configured.plan_with(["weapon"])
members = configure_group(group, {"keep_top_k": 20})      # of several packs, each its own
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
        """Configure a pack by `settings`, and by its own recommendation for what is not given. Raises `ConfigError`
        (`UnknownSetting` for a typo).
        """
        recommended = dict(pack.recommended)
        recommended_load = recommended.pop("load_threshold", None)  # that one is what "auto" means
        config = CascadeConfig.of({**recommended, **settings})
        thresholds = expand_thresholds(
            pack.tree,
            pack.score_rule,
            config.load_threshold,
            pack.alert_threshold.numpy(),
            pack.expand_threshold.numpy(),
            recommended_load,
        )
        return cls(pack, config, thresholds)

    def plan_with(self, extra: Sequence[str | int]) -> CascadePlan:
        """Return a plan with more concepts always on. Raises `UnknownConcept`, `ConfigError`."""
        always_on = [self.pack.find(concept) for concept in (*self.config.always_on, *extra)]
        return CascadePlan.of(self.pack.tree, self.pack.score_rule, self.config, self.thresholds, always_on)


def configure_group(group: PackGroup, settings: Mapping[str, Any]) -> list[ConfiguredPack]:
    """Configure every pack of a group by `settings`; `always_on` names concepts of the group. An error names the pack
    that it is about.
    """
    always_on = CascadeConfig.of(settings).always_on
    own_always_on = group.split([group.find(concept) for concept in always_on])
    members = []
    for (name, pack), probes in zip(group.packs.items(), own_always_on, strict=True):
        own = {**settings, "always_on": probes.tolist()} if "always_on" in settings else settings
        with errors_name_pack(name):
            member = ConfiguredPack.of(pack, own)
            member.plan_with(())  # what does not fit the hierarchy is an error here, too
        members.append(member)
    return members


@contextmanager
def errors_name_pack(name: str) -> Iterator[None]:
    """Begin a `ConfigError` of the block with a pack's name."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{name}: {error}") from error

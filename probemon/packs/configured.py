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

import numpy as np

from probemon.core.branches import cut_group, watched_probes, without
from probemon.core.concept_names import Wanted
from probemon.core.hierarchy import Mask
from probemon.core.plan import CascadePlan, expand_thresholds
from probemon.core.scores import Floats
from probemon.core.settings import CascadeConfig
from probemon.errors import ConfigError
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.pack import ProbePack


@dataclass(frozen=True)
class ConfiguredPack:
    """A pack, its settings, what is watched of it by them (None: all) and its expand thresholds `[P]`."""

    pack: ProbePack
    config: CascadeConfig
    recommended_load: float | str | None
    watched: Mask | None
    thresholds: Floats

    @classmethod
    def of(cls, pack: ProbePack, settings: Mapping[str, Any]) -> ConfiguredPack:
        """Configure a pack by `settings`, and by its own recommendation for what is not given. Raises `ConfigError`
        (`UnknownSetting` for a typo).
        """
        recommended = dict(pack.descent()[1])
        recommended_load = recommended.pop("load_threshold", None)  # that one is what "auto" means
        config = CascadeConfig.of({**recommended, **settings})
        watched = _watched(pack, config, config.exclude)
        return cls(pack, config, recommended_load, watched, _thresholds(pack, config, recommended_load, watched))

    def plan_with(
        self, extra: Sequence[str | int], exclude: Wanted | None = None, always_on: Sequence[str | int] | None = None
    ) -> CascadePlan:
        """Return a plan with more concepts always on; with others excluded, or always on, than the settings say, where
        `exclude` or `always_on` is given. Raises `UnknownConcept`, `ConfigError`.
        """
        pack, config, watched, thresholds = self.pack, self.config, self.watched, self.thresholds
        if exclude is not None:
            watched = _watched(pack, config, exclude)
            thresholds = _thresholds(pack, config, self.recommended_load, watched)
        named = config.always_on if always_on is None else always_on
        always = [pack.find(concept) for concept in (*named, *extra)]
        for probe in always:
            if watched is not None and not watched[probe]:
                raise ConfigError(
                    f"{pack.concepts[probe]['id']} has a rule or is always_on, and include, exclude or depth leave it"
                    " out: watch it, or take it out of the others"
                )
        return CascadePlan.of(pack.tree, pack.score_rule, config, thresholds, always, watched)


def configure_group(group: PackGroup, settings: Mapping[str, Any]) -> list[ConfiguredPack]:
    """Configure every pack of a group by `settings`; `always_on` names concepts of the group. An error names the pack
    that it is about.
    """
    group.check_thresholds()
    config = CascadeConfig.of(settings)
    named = {
        "always_on": [group.find(concept) for concept in config.always_on],
        "include": found(group, config.include),
        "exclude": found(group, config.exclude),
    }
    own = {key: group.split(probes) for key, probes in named.items() if key in settings}
    depths = [(probe, n) for concept, n in config.depth.items() for probe in group.find_all(concept)]
    members = []
    for at, (name, pack) in enumerate(group.packs.items()):
        mine: dict[str, Any] = {**settings, **{key: parts[at].tolist() for key, parts in own.items()}}
        if depths:
            mine["depth"] = {
                pack.concepts[probe]["id"]: n for top, n in depths for probe in group.split([top])[at].tolist()
            }
        if config.include and not mine["include"]:
            raise ConfigError(f"include names no concept of {name}, so nothing of it would be watched: leave it out")
        with errors_name_pack(name):
            member = ConfiguredPack.of(pack, mine)
            member.plan_with(())  # what does not fit the hierarchy is an error here, too
        members.append(member)
    return members


def found(pack: AnyPack, concepts: Wanted) -> list[int]:
    """Return what `find_all` does, and no probe for an empty list, which that refuses."""
    return pack.find_all(concepts) if not isinstance(concepts, Sequence) or len(concepts) else []


def _watched(pack: ProbePack, config: CascadeConfig, exclude: Wanted) -> Mask | None:
    depth = {probe: n for concept, n in config.depth.items() for probe in pack.find_all(concept)}
    watched = watched_probes(pack.tree, found(pack, config.include), found(pack, exclude), depth)
    cut = None if watched is None else cut_group(pack.tree, watched)
    if cut is not None:
        kept, lost = (pack.concepts[probe]["id"] for probe in cut)
        raise ConfigError(
            f"{lost} is left out by exclude or depth, and {kept} of its softmax group is watched: their scores are made"
            " of the logits of all members, so leave out all of them or none"
        )
    return watched


def _thresholds(
    pack: ProbePack, config: CascadeConfig, recommended_load: float | str | None, watched: Mask | None
) -> Floats:
    tree, alert = pack.tree, pack.lowest_alert.numpy()
    if watched is not None:  # what is left out never fires, so nothing has to open for it
        tree, alert = without(tree, watched), np.where(watched, alert, np.float32(np.inf))
    expand = pack.descent()[0].numpy()
    return expand_thresholds(tree, pack.score_rule, config.load_threshold, alert, expand, recommended_load)


@contextmanager
def errors_name_pack(name: str) -> Iterator[None]:
    """Begin a `ConfigError` of the block with a pack's name."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{name}: {error}") from error

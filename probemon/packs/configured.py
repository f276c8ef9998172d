"""A pack with its settings and thresholds.

configured = ConfiguredPack.of(pack, {"keep_top_k": 20})
plan = configured.plan_with(["weapon"])
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
    """A pack, its settings, the watched probes (None: all) and expand thresholds `[P]`."""

    pack: ProbePack
    config: CascadeConfig
    recommended_load: float | str | None
    watched: Mask | None
    thresholds: Floats

    @classmethod
    def of(cls, pack: ProbePack, settings: Mapping[str, Any]) -> ConfiguredPack:
        """Configure by `settings`, then by the recommendation. Raises `ConfigError` (`UnknownSetting` for a typo)."""
        recommended = dict(pack.descent()[1])
        recommended_load = recommended.pop("load_threshold", None)  # the meaning of "auto"
        config = CascadeConfig.of({**recommended, **settings})
        watched = _watched(pack, config, config.exclude)
        return cls(pack, config, recommended_load, watched, _thresholds(pack, config, recommended_load, watched))

    def plan_with(
        self, extra: Sequence[str | int], exclude: Wanted | None = None, always_on: Sequence[str | int] | None = None
    ) -> CascadePlan:
        """Return a plan with `extra` concepts always on; `exclude` and `always_on` replace the settings. Raises
        `UnknownConcept`, `ConfigError`.
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
    """Configure each pack of a group; errors name the pack."""
    group.check_thresholds()
    config = CascadeConfig.of(settings)
    named = {
        "always_on": [group.find(concept) for concept in config.always_on],
        "include": found(group, config.include),
        "exclude": found(group, config.exclude),
    }
    split_settings = {key: group.split(probes) for key, probes in named.items() if key in settings}
    depths = [(probe, n) for concept, n in config.depth.items() for probe in group.find_all(concept)]
    members = []
    for at, (name, pack) in enumerate(group.packs.items()):
        pack_settings: dict[str, Any] = {
            **settings,
            **{key: parts[at].tolist() for key, parts in split_settings.items()},
        }
        if depths:
            pack_settings["depth"] = {
                pack.concepts[probe]["id"]: n for top, n in depths for probe in group.split([top])[at].tolist()
            }
        if config.include and not pack_settings["include"]:
            raise ConfigError(f"include names no concept of {name}, so nothing of it would be watched: leave it out")
        with errors_name_pack(name):
            member = ConfiguredPack.of(pack, pack_settings)
            member.plan_with(())  # raises if it does not fit the hierarchy
        members.append(member)
    return members


def found(pack: AnyPack, concepts: Wanted) -> list[int]:
    """Return `find_all`, or [] for an empty list."""
    return pack.find_all(concepts) if not isinstance(concepts, Sequence) or len(concepts) else []


def names_left_out(pack: AnyPack, watched: Mask | None, probes: Sequence[int]) -> str:
    """Return the names of at most three of `probes` that are not `watched` (None: all are), else ""."""
    left_out = [] if watched is None else [probe for probe in probes if not watched[probe]]
    return ", ".join(ascii(pack.concepts[probe]["name"]) for probe in left_out[:3])


def _watched(pack: ProbePack, config: CascadeConfig, exclude: Wanted) -> Mask | None:
    depth = {probe: n for concept, n in config.depth.items() for probe in pack.find_all(concept)}
    watched = watched_probes(pack.tree, found(pack, config.include), found(pack, exclude), depth)
    cut = None if watched is None else cut_group(pack.tree, watched)
    if cut is not None:
        watched_id, left_out_id = (pack.concepts[probe]["id"] for probe in cut)
        raise ConfigError(
            f"{left_out_id} is left out by exclude or depth, and {watched_id} of its softmax group is watched: their"
            " scores are computed from the logits of all members, so leave out all of them or none"
        )
    return watched


def _thresholds(
    pack: ProbePack, config: CascadeConfig, recommended_load: float | str | None, watched: Mask | None
) -> Floats:
    tree, alert = pack.tree, pack.lowest_alert.numpy()
    if watched is not None:  # excluded probes never fire: open nothing for them
        tree, alert = without(tree, watched), np.where(watched, alert, np.float32(np.inf))
    expand = pack.descent()[0].numpy()
    return expand_thresholds(tree, pack.score_rule, config.load_threshold, alert, expand, recommended_load)


@contextmanager
def errors_name_pack(name: str) -> Iterator[None]:
    """Prefix a `ConfigError` with a pack's name."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{name}: {error}") from error

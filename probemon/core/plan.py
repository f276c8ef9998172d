"""CascadePlan: the constant part of a descent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from probemon.core.branches import without
from probemon.core.hierarchy import ConceptTree, Ints, Mask
from probemon.core.score_rules import follows_path
from probemon.core.scores import Floats
from probemon.core.settings import CascadeConfig, check_load_threshold
from probemon.errors import ConfigError


@dataclass(frozen=True)
class CascadePlan:
    """The constant part of a descent.

    - `always [P]`: active at every state; `exempt [P]`: never retained.
    - `watched [P]`: probes that may be active, None for all; `tree` opens no others.
    - `named [P]`: always on by name, with what their scores need.
    - `n_shed`: probes unwatched temporarily.
    """

    tree: ConceptTree
    path_rule: bool
    config: CascadeConfig
    expand_threshold: Floats
    always: npt.NDArray[np.bool_]
    exempt: npt.NDArray[np.bool_]
    named: npt.NDArray[np.bool_]
    watched: Mask | None = None
    n_shed: int = 0

    @cached_property
    def start(self) -> Ints:
        """Ascending ids of `always`."""
        return np.flatnonzero(self.always)

    @cached_property
    def n_excluded(self) -> int:
        """Number of probes permanently unwatched."""
        return 0 if self.watched is None else int(np.count_nonzero(~self.watched)) - self.n_shed

    def narrowed(self, keep: Mask) -> CascadePlan:
        """Return a plan that temporarily sheds all but `keep [P]` and what their scores need."""
        watched = self.closed(keep[None])[0]
        if self.watched is not None:
            watched &= self.watched
        return replace(
            self,
            tree=without(self.tree, watched),
            always=self.always & watched,
            exempt=self.exempt & watched,
            watched=watched,
            n_shed=int(np.count_nonzero(~watched)) - self.n_excluded,
        )

    def taken_over(self, retained: Mask) -> Mask:
        """Return the watched part of retained sets `[N, P]`; rows that do not fit are emptied."""
        if self.watched is not None:
            retained = retained & self.watched
        if self.tree.n <= self.config.max_loaded_probes:
            return retained
        n_active = self.closed(retained | self.always).sum(axis=1)
        return retained & (n_active <= self.config.max_loaded_probes)[:, None]

    def closed(self, mask: Mask) -> Mask:
        """Return `mask [N, P]` with softmax groups and, by the path rule, ancestors."""
        return self.tree.groups.close(self.tree.close(mask) if self.path_rule else mask)

    def with_floor(self, floor: float) -> CascadePlan:
        """Return a plan that, by the path rule, also finds every score above `floor`."""
        if not self.path_rule:
            return self
        return replace(self, expand_threshold=np.fmin(self.expand_threshold, np.float32(floor)))

    @classmethod
    def of(
        cls,
        tree: ConceptTree,
        score_rule: str,
        config: CascadeConfig,
        expand_threshold: Floats,
        always_on: Sequence[int],
        watched: Mask | None = None,
    ) -> CascadePlan:
        """Check the settings against the hierarchy, or its part `watched [P]`. Raises `ConfigError`."""
        present = set(tree.level.tolist())
        missing = [level for level in config.base_layers if level not in present]
        if missing:
            raise ConfigError(f"base_layers names level {missing[0]}, the pack has levels {sorted(present)}")
        path_rule = follows_path(score_rule)
        named = np.zeros(tree.n, dtype=bool)
        named[list(always_on)] = True
        named = tree.groups.close(tree.close(named[None]) if path_rule else named[None])[0]
        exempt, always = starting_probes(tree, path_rule, config.base_layers, always_on, watched)
        tree = tree if watched is None else without(tree, watched)
        if not always.any():
            what = "base_layers or always_on" if watched is None else "a wider include, or exclude less"
            raise ConfigError(f"nothing would ever be scored: give {what}")
        if always.sum() > config.max_loaded_probes:
            raise ConfigError(
                f"base and always_on probes (with ancestors) are {int(always.sum())}, max_loaded_probes is "
                f"{config.max_loaded_probes}: raise it, or choose fewer base_layers"
            )
        return cls(tree, path_rule, config, expand_threshold, always, exempt, named, watched)


def starting_probes(
    tree: ConceptTree,
    path_rule: bool,
    base_layers: Iterable[int],
    always_on: Iterable[int],
    watched: Mask | None = None,
) -> tuple[Mask, Mask]:
    """Return `(exempt, always)` `[P]`: base and always-on probes, and all that a descent begins with.

    Both include softmax groups; by the path rule `always` includes roots and ancestors.
    """
    exempt: Mask = np.isin(tree.level, list(base_layers))
    exempt[list(always_on)] = True
    exempt = tree.groups.close(exempt[None])[0]
    if watched is not None:
        exempt &= watched
    always = exempt.copy()
    if path_rule:
        always[tree.roots if watched is None else tree.roots[watched[tree.roots]]] = True
        always = tree.groups.close(tree.close(always[None]))[0]
    return exempt, always


def auto_threshold(score_rule: str, alert: Floats, recommended: float | str | None) -> float | str:
    """Return the meaning of `load_threshold="auto"` for a pack."""
    fallback = "exact" if follows_path(score_rule) and not np.isnan(alert).any() else 0.3
    return fallback if recommended is None else recommended


def expand_thresholds(
    tree: ConceptTree,
    score_rule: str,
    rule: float | str,
    alert: Floats,
    calibrated: Floats,
    recommended: float | str | None,
) -> Floats:
    """Return expand thresholds `[P]`. Raises `ConfigError` if the pack lacks what the rule needs."""
    if rule == "auto":
        rule = check_load_threshold(auto_threshold(score_rule, alert, recommended))
    if rule == "auto":
        raise ConfigError(
            "load_threshold='auto' is what the pack recommends, which is 'auto' again: give a number, 'exact' or"
            " 'calibrated'"
        )
    if rule == "exact":
        if not follows_path(score_rule):
            raise ConfigError(
                "load_threshold='exact' needs the path rule, this pack's scores are independent: give a number"
            )
        if np.isnan(alert).any():
            raise ConfigError(
                f"load_threshold='exact' needs every alert threshold, {int(np.isnan(alert).sum())} are not calibrated:"
                " give a number"
            )
        return tree.min_over_descendants(alert)
    if rule == "calibrated":
        lacking = np.isnan(calibrated) & tree.has_children
        if lacking.any():
            raise ConfigError(
                f"load_threshold='calibrated': {int(lacking.sum())} probes with children have no expand threshold:"
                " calibrate the pack"
            )
        return calibrated
    with np.errstate(over="ignore"):  # inf still compares correctly
        return np.full(tree.n, rule, dtype=np.float32)

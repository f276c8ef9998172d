"""HTML of packs for notebooks: contents, model and thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from probemon.core.hierarchy import ConceptTree, Ints
from probemon.packs.opened import OpenedPack
from probemon.util.static_html import fragment
from probemon.util.templates import macros

_MOST_LEVELS, _MOST_ROOTS, _MOST_CHILDREN, _MOST_SETS, _MOST_PACKS = 20, 40, 12, 20, 8


def packs_html(title: str, packs: Mapping[str, OpenedPack]) -> str:
    """Return the HTML of packs by name."""
    return fragment(title, _parts(packs))


def _parts(packs: Mapping[str, OpenedPack]) -> Iterator[str]:
    page = macros("packs/pack.html.j2")
    for name, pack in list(packs.items())[:_MOST_PACKS]:
        yield page.about(name if len(packs) > 1 else "", pack, ", ".join(str(site) for site in pack.sites[:10]))
        yield page.levels(_levels(pack))
        names = list(pack.alert_sets)
        yield page.alert_sets(names[:_MOST_SETS], pack.alert_set, len(names) - _MOST_SETS)
        yield page.top(*_top(pack))
    if len(packs) > _MOST_PACKS:
        yield page.more(len(packs) - _MOST_PACKS)


def _levels(pack: OpenedPack) -> list[tuple[str, str, str]]:
    calibrated = ~np.isnan(pack.alert_threshold.numpy())
    levels = np.unique(pack.tree.level)
    rows = [
        (f"{level}", f"{int(at.sum()):,}", f"{int((at & calibrated).sum()):,}")
        for level in levels[:_MOST_LEVELS].tolist()
        for at in [pack.tree.level == level]
    ]
    return rows + [(f"and {len(levels) - _MOST_LEVELS} more", "", "")] * (len(levels) > _MOST_LEVELS)


def _top(pack: OpenedPack) -> tuple[list[Any], int]:
    """Return the largest roots with children, and the number of others."""
    below, rows = _placed_below(pack.tree), []

    def largest(probes: Ints, most: int) -> list[int]:
        return probes[np.argsort(-below[probes], kind="stable")].tolist()[:most]

    def named(probe: int) -> tuple[str, int]:
        return pack.concepts[probe]["name"], int(below[probe])

    for root in largest(pack.tree.roots, _MOST_ROOTS):
        children = pack.tree.children(root)
        shown = [named(child) for child in largest(children, _MOST_CHILDREN)]
        rows.append((*named(root), shown, len(children) - len(shown)))
    return rows, len(pack.tree.roots) - len(rows)


def _placed_below(tree: ConceptTree) -> Ints:
    """Return the number of probes below each `[P]`, each under its first parent."""
    below = np.zeros(tree.n, dtype=np.int64)
    for probe in range(tree.n - 1, -1, -1):  # children have larger numbers
        if tree.first_parent[probe] >= 0:
            below[tree.first_parent[probe]] += 1 + below[probe]
    return below

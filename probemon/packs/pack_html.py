"""A pack, or several, as a notebook shows them: what they hold, for which host, what fires by which thresholds.

packs_html("ProbePack words", {"words": pack})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from probemon.core.hierarchy import ConceptTree, Ints
from probemon.packs.manifest import HERE
from probemon.packs.opened import OpenedPack
from probemon.util.harmless_text import clip
from probemon.util.static_html import element, fragment, table

_MOST_LEVELS, _MOST_ROOTS, _MOST_CHILDREN, _MOST_SETS, _MOST_PACKS = 20, 40, 12, 20, 8


def packs_html(title: str, packs: Mapping[str, OpenedPack]) -> str:
    """Return the HTML of some packs by name."""
    parts = [
        part
        for name, pack in list(packs.items())[:_MOST_PACKS]
        for part in (*([element("p", element("b", clip(name, 100)))] if len(packs) > 1 else []), *_parts(pack))
    ]
    if len(packs) > _MOST_PACKS:
        parts.append(element("p", f"and {len(packs) - _MOST_PACKS} more packs", kind="dim"))
    return fragment(title, parts)


def _parts(pack: OpenedPack) -> Iterator[Element]:
    host = pack.manifest["host"]
    reads = ", ".join(str(site) for site in pack.sites[:10])
    yield element(
        "p",
        f"{pack.n_probes:,} probes ({pack.architecture}, {str(pack.dtype).removeprefix('torch.')}, rule",
        f" {pack.score_rule}{'' if pack.scope == HERE else ', of all tokens so far'},"
        f"{f' {len(pack.tree.groups):,} softmax groups,' if len(pack.tree.groups) else ''}"
        f" {pack.weight_bytes() / 1e6:,.1f} MB) for ",
        element("bdi", clip(str(host.get("model_id") or "a host that is not stated"), 120)),
        f", at {clip(reads, 200)}",
    )
    yield element(
        "p", "Licence: ", element("bdi", clip(str(pack.manifest.get("licence", "not stated")), 300)), kind="dim"
    )
    yield _levels(pack)
    yield _alert_sets(pack)
    yield from _top(pack)


def _levels(pack: OpenedPack) -> Element:
    known = ~np.isnan(pack.alert_threshold.numpy())
    levels = np.unique(pack.tree.level)
    rows = [
        (f"{level}", f"{int(at.sum()):,}", f"{int((at & known).sum()):,}")
        for level in levels[:_MOST_LEVELS].tolist()
        for at in [pack.tree.level == level]
    ]
    if len(levels) > _MOST_LEVELS:
        rows.append((f"and {len(levels) - _MOST_LEVELS} more", "", ""))
    return table(["level", "probes", "with an alert threshold"], rows, numbers=(1, 2))


def _alert_sets(pack: OpenedPack) -> Element:
    names = list(pack.alert_sets)
    if not names:
        return element("p", "Its alert thresholds are one set without a name.")
    shown: list[str | Element] = ["Alert thresholds: "]
    for i, name in enumerate(names[:_MOST_SETS]):
        in_force = name == pack.alert_set
        shown += [
            ", " if i else "",
            element("b" if in_force else "bdi", clip(name, 60)),
            " (in force)" if in_force else "",
        ]
    if len(names) > _MOST_SETS:
        shown.append(f" and {len(names) - _MOST_SETS} more sets")
    return element("p", *shown)


def _top(pack: OpenedPack) -> Iterator[Element]:
    """Yield the roots with their children, the largest first."""
    below, roots = _placed_below(pack.tree), pack.tree.roots
    order = roots[np.argsort(-below[roots], kind="stable")].tolist()
    yield element("p", "The top of its hierarchy, each concept with how many are placed below it:")
    lines = []
    for root in order[:_MOST_ROOTS]:
        children = pack.tree.children(root)
        first = children[np.argsort(-below[children], kind="stable")].tolist()[:_MOST_CHILDREN]
        names: list[str | Element] = [" › "] if first else []
        for i, child in enumerate(first):
            names += [", " if i else "", *_named(pack.concepts[child], int(below[child]))]
        if len(children) > len(first):
            names.append(f", and {len(children) - len(first):,} more")
        lines.append(element("li", *_named(pack.concepts[root], int(below[root]), tag="b"), *names))
    yield element("ul", *lines)
    if len(order) > _MOST_ROOTS:
        yield element("p", f"and {len(order) - _MOST_ROOTS:,} more roots", kind="dim")


def _named(concept: Mapping[str, Any], n_below: int, tag: str = "bdi") -> list[str | Element]:
    """Return a concept's name, and how many are below it, if any."""
    return [element(tag, clip(concept["name"], 60)), f" {n_below:,}" if n_below else ""]


def _placed_below(tree: ConceptTree) -> Ints:
    """Return how many probes each has below it, of several parents under the first `[P]`."""
    below = np.zeros(tree.n, dtype=np.int64)
    for probe in range(tree.n - 1, -1, -1):  # a parent's number is smaller than its child's
        if tree.first_parent[probe] >= 0:
            below[tree.first_parent[probe]] += 1 + below[probe]
    return below

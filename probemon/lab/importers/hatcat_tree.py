"""The hierarchy of a HatCat pack, over the concepts that have a probe.

    graph = read_graph(folder, notes)
    placed = graph.over(stored, notes, break_cycles=False)     # {node: PlacedNode}

A node is a concept on a level: `("Entity", 0)`, written "Entity:0". Faults are counted in `notes`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probemon.errors import HierarchyError, ImportRefused
from probemon.lab.importers.report import Notes
from probemon.lab.importers.weights import Folder

Node = tuple[str, int]
MAX_LEVEL = 1000
_LAYER_FILE = re.compile(r"layer(\d{1,4})\.json")


def key_of(node: Node) -> str:
    """ "Name:level"."""
    return f"{node[0]}:{node[1]}"


def node_of(key: object) -> Node | None:
    """Return the node of a key, split at its last colon, or None."""
    if not isinstance(key, str):
        return None
    name, _, level = key.rpartition(":")
    return (name, int(level)) if name and re.fullmatch(r"\d{1,4}", level) and int(level) <= MAX_LEVEL else None


@dataclass(frozen=True)
class PlacedNode:
    """The nearest concepts with a probe above one; `reachable`: by a descent."""

    parents: tuple[Node, ...]
    reachable: bool


@dataclass
class Graph:
    """Concepts and edges of the files. `about`: definitions and synsets."""

    parents: dict[Node, dict[Node, None]] = field(default_factory=dict)
    about: dict[Node, dict[str, Any]] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        self.parents.setdefault(node, {})

    def link(self, parent: Node, child: Node) -> None:
        self.add(parent)
        self.add(child)
        self.parents[child][parent] = None

    def children(self) -> dict[Node, list[Node]]:
        """Return the children of every node, sorted."""
        down: dict[Node, list[Node]] = {node: [] for node in self.parents}
        for child, above in self.parents.items():
            for parent in above:
                down[parent].append(child)
        return {node: sorted(below, key=_order) for node, below in down.items()}

    def levels_of(self) -> dict[str, list[int]]:
        """Return the ascending levels of each name."""
        return levels_by_name(sorted(self.parents, key=_order))

    def flatten(self, notes: Notes) -> None:
        for node in sorted(self.parents, key=_order):
            for parent in self.parents[node]:
                notes.add("flattened", f"{key_of(parent)} > {key_of(node)}")
            self.parents[node] = {}

    def over(
        self,
        stored: Collection[Node],
        notes: Notes,
        *,
        break_cycles: bool,
        base: Collection[int] = (),
        heads: Collection[Node] = (),
    ) -> dict[Node, PlacedNode]:
        """Place every stored node. Raises `HierarchyError` for a cycle, unless it may be broken.

        - `base`: levels that a descent begins with (default: the lowest)
        - `heads`: stored nodes without a single score; nothing is put under them
        """
        named_nodes = set(self.parents)
        for node in sorted(set(stored) - named_nodes, key=_order):
            if named_nodes:
                notes.add("unlisted", key_of(node))
            self.add(node)
        for node in sorted(named_nodes - set(stored), key=_order):
            notes.add("missing", key_of(node))
        for name, levels in self.levels_of().items():
            if len(levels) > 1:
                notes.add("repeated", f"{name} on levels {', '.join(map(str, levels))}")
        for node in sorted(self.parents, key=_order):
            if len(self.parents[node]) > 1:
                notes.add(
                    "several_parents",
                    f"{key_of(node)} under {', '.join(key_of(parent) for parent in list(self.parents[node])[:4])}",
                )
        self._break_cycles(notes, break_cycles)
        opening = set(stored) - set(heads)
        above: dict[Node, dict[Node, None]] = {}
        base = base or {min((level for _, level in stored), default=0)}
        placed: dict[Node, PlacedNode] = {}
        for node in self._top_down():
            # A concept without a probe is replaced by those above it.
            nearest = dict.fromkeys(
                up for parent in self.parents[node] for up in ([parent] if parent in opening else above[parent])
            )
            above[node] = nearest
            if node not in stored:
                continue
            if any(parent not in opening for parent in self.parents[node]):
                notes.add(
                    "bridged", f"{key_of(node)} under {', '.join(key_of(up) for up in list(nearest)[:4]) or 'nothing'}"
                )
            for up in nearest:
                if up[1] >= node[1]:
                    notes.add("not_down", f"{key_of(up)} > {key_of(node)}")
            placed[node] = PlacedNode(tuple(nearest), node[1] in base or any(placed[up].reachable for up in nearest))
        for node in sorted(placed, key=_order):
            if not placed[node].reachable:
                notes.add("unreachable", key_of(node))
        return placed

    def _break_cycles(self, notes: Notes, allowed: bool) -> None:
        """Remove the back edges of a depth-first search from level 0."""
        down = self.children()
        done: set[Node] = set()
        for start in sorted(down, key=_order):
            if start in done:
                continue
            trail: dict[Node, Iterator[Node]] = {start: iter(down[start])}
            while trail:
                last = next(reversed(trail))
                child = next(trail[last], None)
                if child is None:
                    done.add(last)
                    del trail[last]
                elif child in trail:
                    if not allowed:
                        way = list(trail)
                        cycle = [key_of(node) for node in [*way[way.index(child) :], child]]
                        shown = " > ".join(cycle if len(cycle) <= 10 else [*cycle[:5], "...", *cycle[-4:]])
                        raise HierarchyError(
                            f"the hierarchy has a cycle: {shown}: mend the files, or pass break_cycles=True to leave"
                            " its last edge out"
                        )
                    notes.add("cycle", f"{key_of(last)} > {key_of(child)}", listed=True)
                    del self.parents[child][last]
                elif child not in done:
                    trail[child] = iter(down[child])

    def _top_down(self) -> list[Node]:
        """Return every node after its parents."""
        down, waiting = self.children(), {node: len(above) for node, above in self.parents.items()}
        ready = sorted((node for node, count in waiting.items() if not count), key=_order, reverse=True)
        order = []
        while ready:
            node = ready.pop()
            order.append(node)
            for child in reversed(down[node]):
                waiting[child] -= 1
                if not waiting[child]:
                    ready.append(child)
        return order


def _order(node: Node) -> tuple[int, str]:
    return node[1], node[0]


def hierarchies(folder: Folder) -> list[str]:
    """List files with a hierarchy, in the order to try."""
    matches = [match for path in folder.files(suffix=".json") if (match := _LAYER_FILE.fullmatch(path.name))]
    layers = [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]
    whole = [path.name for path in folder.files(suffix="hierarchy.json") if path.name == "hierarchy.json"]
    return whole + layers[:1]


def read_graph(folder: Folder, notes: Notes, file: str = "hierarchy.json") -> Graph:
    """Read a hierarchy, else the layer files. Raises `ImportRefused` for JSON of another kind."""
    layers = {
        int(match[1]): path.name for path in folder.files(suffix=".json") if (match := _LAYER_FILE.fullmatch(path.name))
    }
    concepts = _layers(folder, layers)
    content = None if _LAYER_FILE.fullmatch(file) else folder.json(file)
    if content is None:
        return _graph_of_layers(concepts, notes)
    graph = _graph_of_hierarchy(folder.path / file, content, notes)
    for node, _ in concepts:
        if node not in graph.parents:
            notes.add("stale", f"{key_of(node)} is in layer{node[1]}.json alone")
    stated_nodes = {node for node, _ in concepts}
    for node in sorted(graph.parents, key=_order) if concepts else ():
        if node[1] in layers and node not in stated_nodes:
            notes.add("stale", f"{key_of(node)} is in hierarchy.json alone")
    _compare_edges(graph, concepts, notes)
    graph.about = {node: _definition(concept) for node, concept in concepts if node in graph.parents}
    return graph


def _graph_of_hierarchy(path: Path, whole: Any, notes: Notes) -> Graph:
    graph = Graph()
    if not isinstance(whole, dict):
        raise ImportRefused(
            f"{path} is not an object: expected parent_to_children, child_to_parent, root_concepts, leaf_concepts"
        )
    downward, upward = whole.get("parent_to_children") or {}, whole.get("child_to_parent") or {}
    if not isinstance(downward, dict) or not isinstance(upward, dict):
        raise ImportRefused(f'{path}: parent_to_children and child_to_parent are objects of "Name:level"')
    # A key without edges is a concept, too.
    without_edges = [key for edges in (downward, upward) for key, others in edges.items() if not _list(others)]
    for key in [*_list(whole.get("root_concepts")), *_list(whole.get("leaf_concepts")), *without_edges]:
        if (node := node_of(key)) is None:
            notes.add("malformed", f"{key!r:.80}")
        else:
            graph.add(node)
    for linked, parent, child in [
        *((True, parent, child) for parent, children in downward.items() for child in _list(children)),
        *((False, parent, child) for child, parents in upward.items() for parent in _list(parents)),
    ]:
        above, below = node_of(parent), node_of(child)
        if above is None or below is None:
            notes.add("malformed", f"{parent!r:.60} > {child!r:.60}")
            continue
        if not linked and downward and above not in graph.parents.get(below, {}):
            notes.add("one_sided", f"{key_of(above)} > {key_of(below)}")
        graph.link(above, below)
    _compare_ends(graph, whole, notes)
    return graph


def _compare_ends(graph: Graph, whole: Mapping[str, Any], notes: Notes) -> None:
    for key, linked, word in (("root_concepts", graph.parents, "under"), ("leaf_concepts", graph.children(), "above")):
        if whole.get(key) is None:
            continue
        listed_nodes = {node_of(key_listed) for key_listed in _list(whole[key])}
        for node in sorted(graph.parents, key=_order):
            if (node in listed_nodes) == bool(linked[node]):
                linked_keys = [key_of(linked_node) for linked_node in linked[node]]
                notes.add(
                    "contradicted",
                    f"{key_of(node)} is {'' if node in listed_nodes else 'not '}in {key}, and {word}"
                    f" {', '.join(linked_keys[:4]) or 'nothing'}",
                )


def _compare_edges(graph: Graph, concepts: Iterable[tuple[Node, dict[str, Any]]], notes: Notes) -> None:
    """Note edges that only one source has. Layer files name the other end without its level; one that lists none
    says nothing.
    """
    below: dict[Node, set[str]] = {}
    above: dict[Node, set[str]] = {}
    for node, concept in concepts:
        for names, key in ((below, "category_children"), (above, "parent_concepts")):
            if concept.get(key) is not None:
                names.setdefault(node, set()).update(
                    name if isinstance(name, str) else f"{name!r:.60}" for name in _list(concept[key])
                )
    children = graph.children()
    noted_edges = set()
    for node, names_of in below.items():
        for name in sorted(names_of - {child[0] for child in children.get(node, [])}):
            noted_edges.add((node[0], name))
            notes.add("stale_edges", f"{key_of(node)} > {name} is in the layer files alone")
    for node, names_of in above.items():
        for name in sorted(names_of - {parent[0] for parent in graph.parents.get(node, {})}):
            if (name, node[0]) not in noted_edges:
                notes.add("stale_edges", f"{name} > {key_of(node)} is in the layer files alone")
    for child in sorted(graph.parents, key=_order):
        for parent in graph.parents[child]:
            agreements = [
                name in names
                for names, name in ((below.get(parent), child[0]), (above.get(child), parent[0]))
                if names is not None
            ]
            if agreements and not any(agreements):
                notes.add("stale_edges", f"{key_of(parent)} > {key_of(child)} is in hierarchy.json alone")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _layers(folder: Folder, files: Mapping[int, str]) -> list[tuple[Node, dict[str, Any]]]:
    concepts_of = []
    for layer, file in sorted(files.items()):
        content = folder.json(file)
        concepts = content.get("concepts") if isinstance(content, dict) else None
        if not isinstance(concepts, list) or not all(
            isinstance(c, dict) and isinstance(c.get("sumo_term"), str) and c["sumo_term"] for c in concepts
        ):
            raise ImportRefused(f"{folder.path / file}: expected an object with concepts, each with its sumo_term")
        for concept in concepts:
            concept_level = concept.get("layer")
            level = (
                concept_level
                if isinstance(concept_level, int)
                and not isinstance(concept_level, bool)
                and 0 <= concept_level <= MAX_LEVEL
                else layer
            )
            if level > MAX_LEVEL:
                raise ImportRefused(f"{folder.path / file}: level {level}: at most {MAX_LEVEL} are read")
            concepts_of.append(((concept["sumo_term"], level), concept))
    return concepts_of


def _graph_of_layers(concepts: Iterable[tuple[Node, dict[str, Any]]], notes: Notes) -> Graph:
    """Link bare names: a child at its nearest level below, a parent at the nearest above."""
    concepts = list(concepts)
    graph = Graph()
    for node, concept in concepts:
        graph.add(node)
        graph.about.setdefault(node, _definition(concept))
    levels = graph.levels_of()
    for node, concept in concepts:
        for name in _list(concept.get("category_children")):
            candidates = levels.get(name, []) if isinstance(name, str) else []
            if not candidates:
                notes.add("dangling", f"{key_of(node)} > {name!r:.60}")
                continue
            below = [level for level in candidates if level > node[1]]
            graph.link(node, (name, min(below) if below else max(candidates)))
    for node, concept in concepts:
        for name in _list(concept.get("parent_concepts")):
            above = [level for level in levels.get(name, []) if level < node[1]] if isinstance(name, str) else []
            if above:
                graph.link((name, max(above)), node)
            elif not any(parent[0] == name for parent in graph.parents[node]):
                notes.add("dangling", f"{name!r:.60} > {key_of(node)}")
    return graph


def _definition(concept: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"definition": concept["definition"]} if isinstance(concept.get("definition"), str) else {}
    synsets = concept.get("synsets")
    return fields | (
        {"synsets": synsets} if isinstance(synsets, list) and all(isinstance(one, str) for one in synsets) else {}
    )


def levels_by_name(nodes: Iterable[Node]) -> dict[str, list[int]]:
    """Return the levels of each name, in order."""
    levels: dict[str, list[int]] = {}
    for name, level in nodes:
        levels.setdefault(name, []).append(level)
    return levels

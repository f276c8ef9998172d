"""Puts a pack under a given hierarchy, or one proposed from the weights.

    # or {"whale": ["mammal"], "mammal": ["animal"]}
    pack, placement = with_hierarchy(flat, {"animal": {"mammal": {"whale": {}}}}, "tree/")
    pack = propose(flat).write("tree/")

A proposal groups linear probes of similar direction under a bounding probe (`probemon.packs.bounding_probes`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probemon.core.score_rules import follows_path
from probemon.core.settings import CascadeConfig
from probemon.errors import PackError, UnknownConcept
from probemon.packs.bounding_probes import Group, group_probes, opened_groups
from probemon.packs.copies import always_on, card_of, concepts_of, copy_pack, made_by, some_of, spec_of
from probemon.packs.files import check_target
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.writer import PackWriter
from probemon.util.checks import check_share

_STATES = 256  # random states, without golden ones
Place = tuple[str, ...]  # names from the top of a tree, or one name
_OF_ITS_HIERARCHY = ("load_threshold", "base_layers", "max_rounds")  # settings of the former hierarchy


@dataclass(frozen=True)
class Placement:
    """The outcome of `with_hierarchy`.

    - `groups`: names without a probe; their children moved up
    - `unnamed`: ids missing in the tree, which are roots
    """

    n_placed: int
    n_roots: int
    groups: list[str]
    unnamed: list[str]

    def __str__(self) -> str:
        lines = [f"{self.n_placed} concepts are under others, {self.n_roots} are roots"]
        if self.groups:
            lines.append(
                f"{len(self.groups)} names have no probe, and what is under them went to what is above:"
                f" {some_of(self.groups)}"
            )
        if self.unnamed:
            lines.append(f"{len(self.unnamed)} concepts are not named and are roots: {some_of(self.unnamed)}")
        return "\n".join(lines)


def with_hierarchy(
    pack: ProbePack, tree: Mapping[str, Any], path: str | Path, *, name: str | None = None, overwrite: bool = False
) -> tuple[ProbePack, Placement]:
    """Write the same probes under a hierarchy of ids or unambiguous names.

    `tree`: nested objects (`{"animal": {"whale": {}}}`), or parents by concept (`{"whale": "animal"}`, or lists)

    Clears expand thresholds. Raises `PackError` for the path rule and for bounding probes, `HierarchyError` for a
    cycle, `UnknownConcept` for an ambiguous name.
    """
    check_target(path, overwrite)
    pack = check_pack(pack)
    if follows_path(pack.score_rule):
        raise PackError(
            f"{pack.name} scores by the path rule: under other parents its scores, and so its thresholds, would change."
            " Train it for the hierarchy, or attach further probes to it: probemon.packs.attached.attach_below"
        )
    if pack.bounding:
        raise PackError(
            f"{pack.name} has bounding probes ({pack.concepts[pack.bounding[0]]['id']!r}), which only bound the scores"
            " of the concepts below them: give the pack that they were made for"
        )
    above = _places(tree)
    labels = list(dict.fromkeys(place[-1] for place in [*above, *(one for places in above.values() for one in places)]))
    probes = _probes_of(pack, labels)
    if not probes:
        raise PackError(
            f"no concept of {pack.name} is named in the hierarchy, which has"
            f" {', '.join(map(repr, labels[:5]))}{', ...' if len(labels) > 5 else ''}: give ids or names of its"
            " concepts"
        )
    ids = [concept["id"] for concept in pack.concepts]
    nearest = _nearest(above, probes)
    parent_ids = {probe: [ids[probes[parent]] for parent in nearest[label]] for label, probe in probes.items()}
    lines = _lines_under(pack, parent_ids)
    placed_pack = copy_pack(
        pack,
        path,
        "The same probes under another hierarchy, from",
        made_by("with_hierarchy", [pack]),
        name=name or f"{pack.name}-tree",
        concepts=lines,
        expand_threshold=None,
        recommended=_recommended_without_hierarchy(pack),
        overwrite=overwrite,
    )
    n_placed = sum(bool(line["parents"]) for line in lines)
    groups = [label for label in labels if label not in probes]
    unnamed = [ids[i] for i in range(len(ids)) if i not in parent_ids]
    return placed_pack, Placement(n_placed, len(lines) - n_placed, groups, unnamed)


def _places(tree: Mapping[str, Any]) -> dict[Place, list[Place]]:
    """Return the places above each place. Raises `PackError`. In nested objects, equal names are separate places."""
    if not isinstance(tree, Mapping) or not tree:
        raise PackError("the hierarchy is empty or not an object: give names within names, or parents by name")
    nested = all(isinstance(value, Mapping) for value in tree.values())
    above: dict[Place, list[Place]] = {}
    waiting: deque[tuple[Place, Mapping[str, Any]]] = deque([((), tree)])
    while waiting:
        parent, below = waiting.popleft()
        for label, value in below.items():
            if nested:
                if not isinstance(value, Mapping):
                    raise PackError(
                        f"{label!r} holds {value!r}: in a hierarchy of objects within objects, give an object for each"
                        " name, {} if nothing is below"
                    )
                waiting.append(((*parent, label), value))
                above[*parent, label] = [parent] if parent else []
            else:
                names = [value] if isinstance(value, str) else value
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    raise PackError(f"the parents of {label!r} are {value!r}: give a name or a list of names")
                above[(label,)] = [(name,) for name in dict.fromkeys(names)]
    return above


def _probes_of(pack: ProbePack, labels: list[str]) -> dict[str, int]:
    """Return the labels' probes. Raises `UnknownConcept` for an ambiguous label, `PackError` for two labels of one
    probe.
    """
    probes: dict[str, int] = {}
    for label in labels:
        try:
            probes[label] = pack.find(label)
        except UnknownConcept as error:
            if "concepts are named" in str(error):
                raise
    label_of: dict[int, str] = {}
    for label, probe in probes.items():
        if label_of.setdefault(probe, label) != label:
            raise PackError(f"{label_of[probe]!r} and {label!r} are one concept: name it once")
    return probes


def _nearest(above: Mapping[Place, list[Place]], probes: Mapping[str, int]) -> dict[str, list[str]]:
    """Return each label's nearest ancestors with a probe."""
    nearest: dict[str, list[str]] = {label: [] for label in probes}
    for start in above:
        if start[-1] not in probes:
            continue
        parents, visited, waiting = nearest[start[-1]], {start}, deque(above[start])
        while waiting:
            place = waiting.popleft()
            if place[-1] in probes:
                parents += [place[-1]] if place[-1] not in parents else []
            elif place not in visited:
                visited.add(place)
                waiting += above.get(place, [])
    return nearest


def _lines_under(pack: ProbePack, parent_ids: Mapping[int, list[str]]) -> list[dict[str, Any]]:
    """Return concept lines under other parents."""
    return [
        {key: value for key, value in concept.items() if key != "level"} | {"parents": parent_ids.get(probe, [])}
        for probe, concept in enumerate(concepts_of(pack))
    ]


def _recommended_without_hierarchy(pack: ProbePack) -> dict[str, Any]:
    settings = {key: value for key, value in pack.recommended.items() if key not in _OF_ITS_HIERARCHY}
    return {**settings, **always_on(pack)}


@dataclass(frozen=True)
class Proposal:
    """Groups that save work.

    - `n_tried`: candidate groups
    - `share`: evaluations relative to the flat pack, on held-out states
    - `states`: "golden" or "random"
    """

    pack: ProbePack
    groups: list[Group]
    n_tried: int
    share: float
    n_states: int
    states: str

    def __str__(self) -> str:
        how = (
            f"spherical k-means over directions, {self.n_tried} groups tried, chosen on half of {self.n_states}"
            f" {self.states} states"
        )
        if not self.groups:
            return (
                f"no group of probes would save anything ({how}): their directions are too far apart, and the flat pack"
                " is as cheap"
            )
        n = sum(len(group.members) for group in self.groups)
        return (
            f"{n} of {self.pack.n_probes} probes in {len(self.groups)} groups, each under a bounding probe ({how}): on"
            f" the other half an exact cascade evaluates {self.share:.1%} of what the flat pack does"
        )

    def write(self, path: str | Path, *, name: str | None = None, overwrite: bool = False) -> ProbePack:
        """Write the pack with the bounding probes, which never fire. Raises `PackError` without groups."""
        if not self.groups:
            raise PackError(f"{self}; nothing is written")
        pack, n, name = self.pack, len(self.groups), name or f"{self.pack.name}-grouped"
        bounds = self._concepts()
        above = {
            int(probe): [bound["id"]]
            for bound, group in zip(bounds, self.groups, strict=True)
            for probe in group.members
        }
        spec = spec_of(pack)
        room = max(n + pack.n_probes, pack.recommended.get("max_loaded_probes", CascadeConfig.max_loaded_probes))
        ones = torch.ones(n, dtype=torch.float32, device="cpu")
        thresholds = torch.tensor([group.threshold for group in self.groups], dtype=torch.float32, device="cpu")
        spec |= {
            "name": name,
            "concepts": [*bounds, *_lines_under(pack, above)],
            "card": card_of(name, f"{self}. Made of", [pack]),
            "input_index": torch.cat(
                [torch.tensor([group.input for group in self.groups], device="cpu"), pack.input_index]
            ),
            "softmax_group": None,  # not proposed with softmax groups
            "alert_threshold": torch.cat([ones, pack.alert_threshold]),
            "expand_threshold": torch.cat([thresholds, torch.full_like(pack.expand_threshold, math.nan)]),
            **{
                kind: {key: torch.cat([ones, values]) for key, values in spec[kind].items()}
                for kind in ("aggregated", "alert_sets")
            },
            "score_counts": {
                name: torch.cat([counts.new_zeros(n, counts.shape[1]), counts])
                for name, counts in spec["score_counts"].items()
            },
            "recommended": {
                **_recommended_without_hierarchy(pack),
                "load_threshold": "calibrated",
                "keep_top_k": 0,
                "max_loaded_probes": room,  # a state may open every group
            },
            "provenance": made_by("propose", [pack], method=str(self), share=self.share),
        }
        weights = {
            "w1": torch.stack([group.weight for group in self.groups])[:, None].to(pack.dtype),
            "b1": torch.tensor([[group.bias] for group in self.groups], dtype=torch.float32, device="cpu"),
        }
        with PackWriter(path, **spec, overwrite=overwrite) as writer:
            writer.put_slice(0, weights)
            for start, block in pack.blocks():
                writer.put_slice(n + start, block)
        return ProbePack.of(writer.opened)

    def _concepts(self) -> list[dict[str, Any]]:
        """Return the bounding probes' concepts."""
        firsts, prefix = [self.pack.concepts[int(group.members[0])] for group in self.groups], "group:"
        while {prefix + first["id"] for first in firsts} & {concept["id"] for concept in self.pack.concepts}:
            prefix += "group:"
        return [
            {
                "id": prefix + first["id"],
                "name": f"{first['name']} and {len(group.members) - 1} like it",
                "parents": [],
                "bounding": True,
            }
            for first, group in zip(firsts, self.groups, strict=True)
        ]


def propose(pack: ProbePack, *, threshold: float | None = None) -> Proposal:
    """Return groups of probes under bounding probes that save work.

    `threshold`: for probes without an alert threshold

    Raises `PackError` unless the pack is flat, linear, float and reads normalised states: else there is no bound.
    """
    if threshold is not None:
        threshold = check_share(
            "threshold", threshold, "give an alert threshold, more than 0 and less than 1", error=PackError
        )
    pack = check_pack(pack)
    if (
        pack.architecture.hidden
        or pack.dtype == torch.int8
        or follows_path(pack.score_rule)
        or bool(pack.tree.has_parents.any())
        or len(pack.tree.groups)
    ):
        raise PackError(
            f"{pack} is not a flat pack of linear probes with float weights and scores of their own"
            f"{', for it has softmax groups' if len(pack.tree.groups) else ''}: no bound is known, so give its"
            " hierarchy as a file"
        )
    if all(spec.norm == "none" for spec in pack.inputs):
        raise PackError(
            f"{pack.name} reads states that are not normalised, so there is no bound for them: give its hierarchy as"
            " a file"
        )
    alert = pack.lowest_alert.clone()
    if threshold is not None:
        alert = torch.where(alert.isnan(), alert.new_tensor(float(threshold)), alert)
    if bool(alert.isnan().all()):
        raise PackError(
            f"{pack.name} has no alert thresholds, so every probe may matter at every score: calibrate it, or give"
            " threshold"
        )
    hidden, kind = _states(pack)
    groups, share, n_tried = list[Group](), 1.0, 0
    for factor in (0.25, 0.5, 1.0, 2.0):
        candidates = group_probes(pack, alert, factor)
        n_tried += len(candidates)
        paying, cost = _paying(pack, candidates, hidden)
        if cost < share:
            groups, share = paying, cost
    return Proposal(pack, groups, n_tried, share, len(hidden), kind)


def _paying(pack: ProbePack, groups: list[Group], hidden: Tensor) -> tuple[list[Group], float]:
    """Return the groups that save work on even states, and the share of evaluations on odd ones."""
    opened = opened_groups(pack, groups, hidden)
    sizes = [len(group.members) for group in groups]
    paying = [i for i, size in enumerate(sizes) if opened[::2, i].mean() * size + 1 < size]
    if not paying:
        return [], 1.0
    rest = pack.n_probes - sum(sizes[i] for i in paying)
    evaluated = len(paying) + rest + (opened[1::2][:, paying] * [sizes[i] for i in paying]).sum(axis=1)
    return [groups[i] for i in paying], float(evaluated.mean() / pack.n_probes)


def _states(pack: ProbePack) -> tuple[Tensor, str]:
    if pack.golden_hidden is not None and len(pack.golden_hidden) >= 2:
        return pack.golden_hidden, "golden"
    size = (_STATES, len(pack.sites), pack.architecture.hidden_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"), "random"

"""A hierarchy for a pack that has none, or another one: given, or proposed from the weights.

    # or {"whale": ["mammal"], "mammal": ["animal"]}
    pack, told = with_hierarchy(flat, {"animal": {"mammal": {"whale": {}}}}, "tree/")
    proposal = propose(flat)
    print(proposal)  # what an exact cascade over it would evaluate
    pack = proposal.write("tree/")                                                         # where it saves anything

What is proposed are groups of linear probes of like direction, each under a *bounding probe*: a linear probe whose
logit is never under that of any member. So none fires unless it scores over the smallest threshold of its members, and
a descent finds all that fire. A member i has `w_i x + b_i <= c x + b_i + |w_i - c| |x|` for any c; of a normalised
state of D values |x| is at most sqrt(D); c is the mean of the members. Directions are clustered by spherical k-means
(Dhillon and Modha 2001).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.checks import check_share
from probemon.core.hierarchy import Ints
from probemon.core.inputs import prepare_input
from probemon.core.settings import CascadeConfig
from probemon.errors import PackError, UnknownConcept
from probemon.packs.copies import always_on, card_of, copy_pack, made_by
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.writer import PackWriter, check_target

_SHOWN = 5
_STATES = 256  # random ones, for a pack without golden states
_OF_ITS_HIERARCHY = ("load_threshold", "base_layers", "max_rounds")  # settings that mean nothing under another one
_ROUNDS = 30  # of k-means, at most
_ROUNDING = {
    torch.float32: 2.0**-22,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}  # how much longer a rounded state can be, relative


@dataclass(frozen=True)
class Told:
    """What `with_hierarchy` made of a tree: `n_placed` concepts under others, `n_roots`; `groups`: names of the tree
    without a probe, whose children went to what is above them; `unnamed`: ids of the pack that the tree does not name,
    which are roots.
    """

    n_placed: int
    n_roots: int
    groups: list[str]
    unnamed: list[str]

    def __str__(self) -> str:
        lines = [f"{self.n_placed} concepts lie under others, {self.n_roots} are roots"]
        if self.groups:
            lines.append(
                f"{len(self.groups)} names have no probe, and what is under them went to what is above:"
                f" {_some(self.groups)}"
            )
        if self.unnamed:
            lines.append(f"{len(self.unnamed)} concepts are not named and are roots: {_some(self.unnamed)}")
        return "\n".join(lines)


def with_hierarchy(
    pack: ProbePack, tree: Mapping[str, Any], path: str | Path, *, name: str | None = None, overwrite: bool = False
) -> tuple[ProbePack, Told]:
    """The same probes under a hierarchy, and what was made of it. Concepts go by id or unambiguous name.

    `tree`: objects within objects (`{"animal": {"whale": {}}}`), or parents by concept (`{"whale": "animal"}`, lists
    for several). Scores stay the same, so only a pack of independent scores can be given one: by the path rule they
    would change. Expand thresholds of another hierarchy are cleared. Raises `PackError`, `HierarchyError` for a cycle,
    `UnknownConcept` for a name that several concepts bear.
    """
    check_target(path, overwrite)
    pack = check_pack(pack)
    if pack.score_rule == "path":
        raise PackError(
            f"{pack.name} scores by the path rule: under other parents its scores, and so its thresholds, would be"
            " others. Train it for the hierarchy"
        )
    parents, probes = _parents(tree), {}
    for label in dict.fromkeys([*parents, *(parent for above in parents.values() for parent in above)]):
        try:
            probes[label] = pack.find(label)
        except UnknownConcept as error:
            if "concepts are named" in str(error):
                raise
    if not probes:
        raise PackError(
            f"no concept of {pack.name} is named in the hierarchy, which has"
            f" {', '.join(map(repr, list(parents)[:5]))}{', ...' if len(parents) > 5 else ''}: give ids or names of its"
            " concepts"
        )
    by_probe: dict[int, str] = {}
    for label, probe in probes.items():
        if by_probe.setdefault(probe, label) != label:
            raise PackError(f"{by_probe[probe]!r} and {label!r} are one concept: name it once")
    ids = [concept["id"] for concept in pack.concepts]
    above = {
        probe: [ids[probes[found]] for found in _nearest(label, parents, probes)] for label, probe in probes.items()
    }
    lines = [
        {key: value for key, value in concept.items() if key != "level"} | {"parents": above.get(i, [])}
        for i, concept in enumerate(pack.concepts)
    ]
    groups = [
        label
        for label in dict.fromkeys([*parents, *(parent for names in parents.values() for parent in names)])
        if label not in probes
    ]
    made = copy_pack(
        pack,
        path,
        "The same probes under another hierarchy, from",
        made_by("with_hierarchy", [pack]),
        name=name or f"{pack.name}-tree",
        concepts=lines,
        expand_threshold=None,
        overwrite=overwrite,
        recommended={key: value for key, value in pack.recommended.items() if key not in _OF_ITS_HIERARCHY}
        | always_on(pack),
    )
    n_placed = sum(bool(line["parents"]) for line in lines)
    return made, Told(n_placed, len(lines) - n_placed, groups, [ids[i] for i in range(len(ids)) if i not in by_probe])


def _parents(tree: Mapping[str, Any]) -> dict[str, list[str]]:
    """Parents by name, of either form. Raises `PackError` for anything else."""
    if not isinstance(tree, Mapping) or not tree:
        raise PackError("the hierarchy is empty or no object: give names within names, or parents by name")
    nested = all(isinstance(value, Mapping) for value in tree.values())
    found: dict[str, list[str]] = {}
    waiting: list[tuple[str | None, Mapping[str, Any]]] = [(None, tree)]
    while waiting:
        parent, below = waiting.pop(0)
        for label, value in below.items():
            if nested:
                if not isinstance(value, Mapping):
                    raise PackError(
                        f"{label!r} holds {value!r}: in a hierarchy of objects within objects, give an object for each"
                        " name, {} where nothing is below"
                    )
                waiting.append((label, value))
                names = [] if parent is None else [parent]
            else:
                names = [value] if isinstance(value, str) else value
                if not isinstance(names, list) or not all(isinstance(above, str) for above in names):
                    raise PackError(f"the parents of {label!r} are {value!r}: give a name or a list of names")
            known = found.setdefault(label, [])
            known += [above for above in names if above not in known]
    return found


def _nearest(label: str, parents: Mapping[str, list[str]], probes: Mapping[str, int]) -> list[str]:
    """The nearest names above that have a probe."""
    found: list[str] = []
    seen, waiting = {label}, list(parents.get(label, []))
    while waiting:
        above = waiting.pop(0)
        if above in probes:
            found += [above] if above not in found else []
        elif above not in seen:
            seen.add(above)
            waiting += parents.get(above, [])
    return found


@dataclass(frozen=True)
class Group:
    """Probes `members` under a bounding probe `weight [D]`, `bias`; `threshold`: the smallest alert threshold of
    theirs.
    """

    members: Ints
    weight: Tensor
    bias: float
    threshold: float
    input: int


@dataclass(frozen=True)
class Proposal:
    """Groups that save work. `n_tried`: groups looked at; `share`: of the flat pack's evaluations, how many the cascade
    makes on the states kept aside; `n_states`, `states` ("golden" or "random"): those the groups were chosen on and
    those kept aside, half each.
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
        """The pack with the bounding probes above the groups. They never fire: their alert threshold is 1. Raises
        `PackError` where there are none.
        """
        if not self.groups:
            raise PackError(f"{self}; nothing is written")
        pack = self.pack
        above = {int(member): number for number, group in enumerate(self.groups) for member in group.members}
        first, prefix = [pack.concepts[int(group.members[0])]["id"] for group in self.groups], "group:"
        while {prefix + member for member in first} & {concept["id"] for concept in pack.concepts}:
            prefix += "group:"
        ids = [prefix + member for member in first]
        bounds = [
            {
                "id": ids[i],
                "name": f"{pack.concepts[int(group.members[0])]['name']} and {len(group.members) - 1} like it",
                "parents": [],
                "bounding": True,
            }
            for i, group in enumerate(self.groups)
        ]
        lines = [
            {key: value for key, value in concept.items() if key != "level"}
            | {"parents": [ids[above[i]]] if i in above else []}
            for i, concept in enumerate(pack.concepts)
        ]
        weights = {
            "w1": torch.stack([group.weight for group in self.groups])[:, None].to(pack.dtype),
            "b1": torch.tensor([[group.bias] for group in self.groups], dtype=torch.float32, device="cpu"),
        }
        n = len(bounds)
        with PackWriter(
            path,
            name=name or f"{pack.name}-grouped",
            concepts=[*bounds, *lines],
            architecture=pack.architecture,
            dtype=pack.dtype,
            score_rule=pack.score_rule,
            inputs=[spec.as_dict() for spec in pack.inputs],
            host=pack.manifest["host"],
            licence=pack.manifest["licence"],
            card=card_of(name or f"{pack.name}-grouped", f"{self}. Made of", [pack]),
            input_index=torch.cat(
                [torch.tensor([group.input for group in self.groups], device="cpu"), pack.input_index]
            ),
            alert_threshold=torch.cat([torch.ones(n, dtype=torch.float32, device="cpu"), pack.alert_threshold]),
            expand_threshold=torch.cat(
                [
                    torch.tensor([group.threshold for group in self.groups], dtype=torch.float32, device="cpu"),
                    torch.full_like(pack.expand_threshold, math.nan),
                ]
            ),
            aggregated={
                key: torch.cat([torch.ones(n, dtype=torch.float32, device="cpu"), pack.thresholds_for(key)])
                for key in pack.aggregated
            },
            golden_hidden=pack.golden_hidden,
            recommended={  # room for all: a state may open every group
                **{key: value for key, value in pack.recommended.items() if key not in _OF_ITS_HIERARCHY},
                **always_on(pack),
                "load_threshold": "calibrated",
                "keep_top_k": 0,
                "max_loaded_probes": max(
                    n + pack.n_probes, pack.recommended.get("max_loaded_probes", CascadeConfig.max_loaded_probes)
                ),
            },
            provenance=made_by("propose", [pack], method=str(self), share=self.share),
            overwrite=overwrite,
        ) as writer:
            writer.put_slice(0, weights)
            for start, block in pack.blocks():
                writer.put_slice(n + start, block)
        return ProbePack.of(writer.opened)


def propose(pack: ProbePack, *, threshold: float | None = None) -> Proposal:
    """Groups of the pack's probes under bounding probes, where they save work.

    `threshold`: the alert threshold of probes that have none; without it these stay where they are, at every token. For
    flat packs of linear probes in a float dtype that read normalised states, of which alone a bound is known. Raises
    `PackError` for others.
    """
    if threshold is not None:
        threshold = check_share(
            "threshold", threshold, "give an alert threshold, more than 0 and less than 1", error=PackError
        )
    pack = check_pack(pack)
    if (
        pack.architecture.hidden
        or pack.dtype == torch.int8
        or pack.score_rule != "independent"
        or bool(pack.tree.has_parents.any())
    ):
        raise PackError(
            f"{pack} is not a flat pack of linear probes with float weights and scores of their own: no bound is known,"
            " so give its hierarchy as a file"
        )
    if all(spec.norm == "none" for spec in pack.inputs):
        raise PackError(
            f"{pack.name} reads states that are not normalised, so that no bound holds for them: give its hierarchy as"
            " a file"
        )
    alert = pack.alert_threshold.clone()
    if threshold is not None:
        alert = torch.where(alert.isnan(), alert.new_tensor(float(threshold)), alert)
    if bool(alert.isnan().all()):
        raise PackError(
            f"{pack.name} has no alert thresholds, so every probe may matter at every score: calibrate it, or give"
            " threshold"
        )
    hidden, kind = _states(pack)
    best = Proposal(pack, [], 0, 1.0, len(hidden), kind)
    n_tried = 0
    for factor in (0.25, 0.5, 1.0, 2.0):
        tried = _groups(pack, alert, factor)
        n_tried += len(tried)
        opens = _opened(pack, tried, hidden)
        paying = [
            i for i, group in enumerate(tried) if opens[::2, i].mean() * len(group.members) + 1 < len(group.members)
        ]
        rest = pack.n_probes - sum(len(tried[i].members) for i in paying)
        cost = (
            (len(paying) + rest + (opens[1::2][:, paying] * [len(tried[i].members) for i in paying]).sum(axis=1)).mean()
            / pack.n_probes
            if paying
            else 1.0
        )
        if cost < best.share:
            best = Proposal(pack, [tried[i] for i in paying], 0, float(cost), len(hidden), kind)
    return Proposal(pack, best.groups, n_tried, best.share, best.n_states, best.states)


def _states(pack: ProbePack) -> tuple[Tensor, str]:
    if pack.golden_hidden is not None and len(pack.golden_hidden) >= 2:
        return pack.golden_hidden, "golden"
    return (
        torch.randn(
            _STATES,
            len(pack.sites),
            pack.architecture.hidden_size,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float32,
            device="cpu",
        ),
        "random",
    )


def _groups(pack: ProbePack, alert: Tensor, factor: float) -> list[Group]:
    """Groups of two or more, `factor` times the square root of as many as there are probes; by input."""
    found = []
    weights, biases = pack.weights["w1"][:, 0], pack.weights["b1"][:, 0].double()
    size = pack.architecture.hidden_size
    for number, spec in enumerate(pack.inputs):
        probes = ((pack.input_index == number) & ~alert.isnan()).nonzero()[:, 0]
        if spec.norm == "none" or len(probes) < 2:
            continue
        longest = math.sqrt(size) * (1 + _ROUNDING[pack.dtype])
        for members in _clusters(weights[probes].float(), max(1, round(factor * math.sqrt(len(probes))))):
            at = probes[members]
            rows = weights[at].double()
            centre = rows.mean(dim=0).to(pack.dtype)
            away = (rows - centre.double()).norm(dim=1)
            # Sums in fp32 of D products err by D units in the last place of what their magnitudes can add up to.
            slack = (
                size * 2.0**-23 * longest * (rows.norm(dim=1) + centre.double().norm()) + 2.0**-20 * biases[at].abs()
            )
            bias = float((biases[at] + away * longest + slack).max())
            bias = float(np.nextafter(np.float32(bias), np.float32(np.inf)))
            found.append(Group(at.numpy(), centre, bias, float(alert[at].min()), number))
    return found


def _clusters(rows: Tensor, k: int) -> list[Tensor]:
    """Members of each cluster of two rows or more `[P, D]`, the nearest to its direction first. Begun with rows far
    apart; the same every time.
    """
    units = torch.nn.functional.normalize(rows, dim=1)
    centres = units[:1]
    nearest = units @ centres[0]
    for _ in range(min(k, len(units)) - 1):
        centres = torch.cat([centres, units[nearest.argmin()][None]])
        nearest = torch.maximum(nearest, units @ centres[-1])
    of = torch.full((len(units),), -1, device=units.device)
    for _ in range(_ROUNDS):
        cosines = units @ centres.T
        now = cosines.argmax(dim=1)
        if torch.equal(now, of):
            break
        of = now
        sums = torch.zeros_like(centres).index_add_(0, of, units)
        filled = sums.norm(dim=1) > 0
        centres = torch.where(filled[:, None], torch.nn.functional.normalize(sums, dim=1), centres)
    found = []
    for cluster in range(len(centres)):
        members = (of == cluster).nonzero()[:, 0]
        if len(members) > 1:
            found.append(members[(units[members] @ centres[cluster]).argsort(descending=True, stable=True)])
    return found


def _opened(pack: ProbePack, groups: list[Group], hidden: Tensor) -> np.ndarray:
    """Whether each group would be opened `[G, n]` by states `[G, S, D]`."""
    opened = np.zeros((len(hidden), len(groups)), dtype=bool)
    for number, spec in enumerate(pack.inputs):
        mine = [i for i, group in enumerate(groups) if group.input == number]
        if mine:
            x = prepare_input(hidden[:, pack.sites.index(spec.site)], spec, pack.input_dtype).double()
            logits = x @ torch.stack([groups[i].weight for i in mine]).double().T + torch.tensor(
                [groups[i].bias for i in mine], dtype=torch.float64
            )
            opened[:, mine] = (
                logits.sigmoid() > torch.tensor([groups[i].threshold for i in mine], dtype=torch.float64)
            ).numpy()
    return opened


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

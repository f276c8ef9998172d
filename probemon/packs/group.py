"""Several packs that look like one: what a manager of several packs has as its `pack`.

    group = PackGroup([animals, deception])              # named by their packs
    group = PackGroup({"a": one, "b": other})            # by names of your own, where two packs bear one name
    group.find("animals:whale"), group.find("whale"), group.concepts[3]["id"]
    group.numbers[1][7]                                  # the number in the group of probe 7 of the second pack

The probes of all packs are numbered together, by rank (mostly their level), within a rank by pack, within a pack in
their order: so ties between probes of one pack fall as they do where it is alone. Every pack keeps its weights,
thresholds, score rule and recommendations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.concept_names import Names, Wanted
from probemon.core.hierarchy import ConceptTree, Ints
from probemon.core.score_counts import N_BINS
from probemon.core.softmax_groups import SoftmaxGroups
from probemon.errors import ConfigError
from probemon.packs.manifest import HERE, SO_FAR
from probemon.packs.pack import ProbePack
from probemon.packs.pack_html import packs_html
from probemon.packs.tensors import Noted
from probemon.util.checks import check_count

_QUALIFIES = ":"
_SHOWN = 3  # concepts of a sentence


class PackGroup:
    """Packs for one host, as one of P probes.

    - `packs`: by name; `tree`: their hierarchies side by side
    - `concepts`: ids, names and parents qualified: "pack:id"
    - `inputs` and `sites`: each once
    - `alert_threshold`, `expand_threshold` `[P]`; `aggregated`, `counted`: what any pack has thresholds, or
      counts of scores, for
    - `numbers[i]`: ascending, the numbers in the group of the probes of pack i

    Raises `ConfigError` where packs cannot be told apart or read hidden states of different sizes.
    """

    def __init__(self, packs: Sequence[ProbePack] | Mapping[str, ProbePack]) -> None:
        named = list(packs.items()) if isinstance(packs, Mapping) else [(pack.name, pack) for pack in _checked(packs)]
        self.packs: dict[str, ProbePack] = dict(named)
        _check_names([name for name, _ in named])
        members = _checked(list(self.packs.values()))
        sizes = {name: pack.architecture.hidden_size for name, pack in self.packs.items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError(
                f"the packs read states of different sizes {sizes}: they are for different hosts, or read other sites"
                " of one (a recurrent state beside the residual stream), so give each its manager"
            )
        self.name = " + ".join(self.packs)
        self.hidden_size = members[0].architecture.hidden_size
        self.n_probes = sum(pack.n_probes for pack in members)
        self.scope = SO_FAR if any(pack.scope == SO_FAR for pack in members) else HERE  # that of the widest
        self.inputs = list(dict.fromkeys(spec for pack in members for spec in pack.inputs))
        self.sites = list(dict.fromkeys(spec.site for spec in self.inputs))
        self.aggregated = tuple(sorted({name for pack in members for name in pack.aggregated}))
        self.counted = tuple(sorted({name for pack in members for name in pack.counted}))
        self._pack_of, self._own = _order([pack.tree for pack in members])
        self.numbers = [np.flatnonzero(self._pack_of == i) for i in range(len(members))]
        self.tree = _union([pack.tree for pack in members], self.numbers)
        self.alert_threshold = self._laid_out([pack.alert_threshold for pack in members])
        self._as_laid_out = Noted(self.alert_threshold)
        self.expand_threshold = self._laid_out([pack.expand_threshold for pack in members])
        self.concepts, bare = [], []
        for i, own in zip(self._pack_of.tolist(), self._own.tolist(), strict=True):
            concept, prefix = members[i].concepts[own], f"{named[i][0]}{_QUALIFIES}"
            self.concepts.append(
                {
                    **concept,
                    "id": prefix + concept["id"],
                    "name": prefix + concept["name"],
                    "parents": [prefix + parent for parent in concept["parents"]],
                }
            )
            bare.append((concept["id"], concept["name"]))
        self._bare_names = [name for _, name in bare]
        self._names = Names(self.name, self.concepts, self.path, bare)

    def check_thresholds(self) -> None:
        """Raise `ConfigError` where the group's thresholds are not those of its packs, by which concepts fire."""
        for name in ("alert_threshold", "expand_threshold"):
            own = self._laid_out([getattr(pack, name) for pack in self.packs.values()])
            if not torch.equal(getattr(self, name).nan_to_num(-1.0), own.nan_to_num(-1.0)):
                raise ConfigError(
                    f"{name} of the group {self.name} was written to, or that of one of its packs since the group was"
                    f" made, and concepts fire by its packs': write to {name} of a pack, then make the group"
                )

    @property
    def alert_set(self) -> str | None:
        """The name of the set of alert thresholds that every pack has in force, or "pack: name, ..."; None where none
        has a name, or the group's own `alert_threshold` was written to.
        """
        if self._as_laid_out.changed(self.alert_threshold):
            return None
        names = {name: pack.alert_set for name, pack in self.packs.items()}
        if len(set(names.values())) == 1:
            return next(iter(names.values()))
        return ", ".join(f"{name}: {alert_set or 'its only one'}" for name, alert_set in names.items())

    def with_alert_set(self, name: str) -> PackGroup:
        """Return the packs with another of their sets of alert thresholds in force. Raises `ConfigError` where one has
        no set of this name.
        """
        return PackGroup({own: pack.with_alert_set(name) for own, pack in self.packs.items()})

    def find(self, concept: str | int) -> int:
        """Return the number of a concept by qualified id or name ("pack:whale"), by the bare one where it is
        unambiguous, or by number. Raises `UnknownConcept`.
        """
        return self._names.find(concept)

    def find_all(self, concept: Wanted) -> list[int]:
        """Return the numbers of a name, id, number, list of these, or pattern over ids and names, qualified and bare.
        Raises `UnknownConcept`.
        """
        return self._names.find_all(concept)

    def path(self, probe: int) -> list[str]:
        """Return the names from the root down to the probe; the root's is qualified by the pack's."""
        root, *below = self.tree.path(check_count("probe", probe, most=self.n_probes - 1))
        return [self.concepts[root]["name"], *(self._bare_names[i] for i in below)]

    def thresholds_for(self, aggregator: object = None) -> Tensor:
        """Return what `ProbePack.thresholds_for` does, NaN for the probes of packs that have none for it. Raises
        `ConfigError` where no pack has any.
        """
        thresholds, errors = [], []
        for pack in self.packs.values():
            try:
                thresholds.append(pack.thresholds_for(aggregator))
            except ConfigError as error:
                errors.append(error)
                thresholds.append(torch.full_like(pack.alert_threshold, float("nan")))
        if len(errors) == len(thresholds):
            raise errors[0]
        return self._laid_out(thresholds)

    def score_counts(self, aggregator: object = None) -> Tensor:
        """Return what `ProbePack.score_counts` does, zeros for the probes of packs that have none for it. Raises
        `ConfigError` where no pack has any.
        """
        name = "each" if aggregator is None else str(aggregator)
        if name not in self.counted:
            next(iter(self.packs.values())).score_counts(aggregator)  # raises, and says how to get them
        counts = torch.zeros(self.n_probes, N_BINS, dtype=torch.int32, device="cpu")
        for numbers, pack in zip(self.numbers, self.packs.values(), strict=True):
            if name in pack.counted:
                counts[torch.from_numpy(numbers)] = pack.score_counts(aggregator)
        return counts

    def split(self, probes: Sequence[int] | Ints) -> list[Ints]:
        """Return the packs' own numbers of some probes, an array for each pack, in their order."""
        numbers = np.asarray(probes, dtype=np.int64)
        return [self._own[numbers[self._pack_of[numbers] == i]] for i in range(len(self.packs))]

    def pack_of(self, probe: int) -> ProbePack:
        """Return the pack that a probe of the group is of."""
        return list(self.packs.values())[int(self._pack_of[probe])]

    def precision(self, probe: int) -> float:
        """Return what the concept's own pack says: see `ProbePack.precision`."""
        probe = check_count("probe", probe, most=self.n_probes - 1)
        own = int(self._own[probe])
        return math.nan if self._as_laid_out.changed(self.alert_threshold) else self.pack_of(probe).precision(own)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights of all packs."""
        return sum(pack.weight_bytes() for pack in self.packs.values())

    def __repr__(self) -> str:
        return f"PackGroup({', '.join(f'{name}: {pack!r}' for name, pack in self.packs.items())})"

    def _repr_html_(self) -> str:
        return packs_html(f"PackGroup {self.name}", self.packs)

    def _laid_out(self, own: Sequence[Tensor]) -> Tensor:
        """Return values `[P]` of the group's probes, of those of each pack."""
        values = torch.empty(self.n_probes, dtype=torch.float32, device="cpu")
        for numbers, tensor in zip(self.numbers, own, strict=True):
            values[torch.from_numpy(numbers)] = tensor
        return values


AnyPack = ProbePack | PackGroup


def stated_chat_dates(pack: AnyPack) -> list[str]:
    """Return the days, as YYYY-MM-DD, that the chats were rendered with of which packs were made: `chat_date` of their
    provenance, or of that of their parents. Most packs state none.
    """
    members = pack.packs.values() if isinstance(pack, PackGroup) else [pack]
    waiting, found = [member.manifest.get("provenance") or {} for member in members], set[str]()
    while waiting:
        provenance = waiting.pop()
        if provenance.get("chat_date"):
            found.add(provenance["chat_date"])
        parents = provenance.get("parents") or []
        waiting += [parent.get("provenance") or {} for parent in parents if isinstance(parent, dict)]
    return sorted(found)


PackOrName = ProbePack | str | os.PathLike[str]  # a pack, its folder, or its name on the hub
Packs = PackOrName | PackGroup | Sequence[PackOrName] | Mapping[str, PackOrName]


def one_or_several(packs: Packs) -> AnyPack:
    """Return a pack, or a group, as it is; several packs as a group. Folders, and names on the hub, are opened."""
    opened = _opened(packs)
    if isinstance(opened, (ProbePack, PackGroup)):
        return opened
    if isinstance(packs, Mapping):
        return PackGroup({name: _opened(pack) for name, pack in packs.items()})
    several: Any = [_opened(pack) for pack in packs] if isinstance(packs, Sequence) else packs
    return PackGroup(several)


def never_fires(pack: AnyPack) -> Ints:
    """Return the probes whose alert threshold is 1, which no score exceeds, so that their silence says nothing."""
    return np.flatnonzero(pack.alert_threshold.numpy() >= 1)


def told_of_never(pack: AnyPack) -> str:
    """Return a sentence on the concepts that can never fire, "" where all that have a threshold can."""
    probes = never_fires(pack).tolist()
    if not probes:
        return ""
    shown = ", ".join(ascii(pack.concepts[probe]["name"]) for probe in probes[:_SHOWN])
    more = f" and {len(probes) - _SHOWN:,} more" if len(probes) > _SHOWN else ""
    fire = "concept never fires" if len(probes) == 1 else "concepts never fire"
    return f"{len(probes):,} {fire} (alert threshold 1): {shown}{more}"


def _opened(pack: Any) -> Any:
    return ProbePack.from_pretrained(os.fspath(pack)) if isinstance(pack, (str, os.PathLike)) else pack


def open_packs(wanted: Sequence[str], alert_set: str | None = None) -> AnyPack:
    """Open packs by folder or hub name, for the commands. One is itself; several are a group, named as their packs say,
    or NAME in "NAME=folder". With `alert_set` that one is in force. Raises `ConfigError`, `PackError`.
    """
    return join_packs([open_one(text, alone=len(wanted) == 1) for text in wanted], alert_set)


def open_one(text: str, *, alone: bool, verify: bool = False) -> tuple[str, ProbePack]:
    """Return what a pack is called among several, and the pack, of "folder" or, unless it is `alone`, "NAME=folder"."""
    name, equals, folder = text.partition("=")
    is_named = equals and not alone and not Path(text).is_dir()  # a folder's own name may have one
    pack = ProbePack.from_pretrained(folder if is_named else text, verify=verify)
    return name if is_named else pack.name, pack


def join_packs(named: Sequence[tuple[str, ProbePack]], alert_set: str | None = None) -> AnyPack:
    """Return one pack itself, of several the group; with `alert_set` that one is in force. Raises `ConfigError`."""
    if len(named) == 1:
        joined: AnyPack = named[0][1]
    else:
        _check_names([name for name, _ in named])
        joined = PackGroup(dict(named))
    return joined if alert_set is None else joined.with_alert_set(alert_set)


def _checked(packs: Sequence[ProbePack]) -> Sequence[ProbePack]:
    if (
        isinstance(packs, bytes)
        or not isinstance(packs, Sequence)
        or not packs
        or not all(isinstance(pack, ProbePack) for pack in packs)
    ):
        raise ConfigError(
            f"packs are {packs!r}: give a ProbePack, or the folder of one or its name on the hub, a list of some, or a"
            " mapping of names to them"
        )
    return packs


def _check_names(names: Sequence[object]) -> None:
    for name in names:
        if not isinstance(name, str) or not name or _QUALIFIES in name:
            raise ConfigError(
                f"a pack is named {name!r}, and names qualify concepts as 'name{_QUALIFIES}concept': give a mapping"
                f" with names of your own, without '{_QUALIFIES}'"
            )
        if names.count(name) > 1:
            raise ConfigError(
                f'{names.count(name)} packs are named {name!r}: give them names of your own, as a mapping {{"a": pack,'
                ' "b": pack} (a=FOLDER --pack b=FOLDER on the command line)'
            )


def _order(trees: Sequence[ConceptTree]) -> tuple[Ints, Ints]:
    """Return, by number in the group, which pack a probe is of, and its own number. In the order in which a hierarchy
    of all of them is numbered, then pack, then own number.
    """
    pack_of = np.repeat(np.arange(len(trees)), [tree.n for tree in trees])
    own = np.concatenate([np.arange(tree.n) for tree in trees])
    # Stable: what comes first in the whole stays first in its rank.
    order = np.argsort(np.concatenate([tree.rank for tree in trees]), kind="stable")
    return pack_of[order], own[order]


def _union(trees: Sequence[ConceptTree], numbers: Sequence[Ints]) -> ConceptTree:
    """Return hierarchies side by side; `numbers[i]`: where the probes of tree i are."""
    n = sum(tree.n for tree in trees)
    level = np.empty(n, dtype=np.int64)
    for tree, number in zip(trees, numbers, strict=True):
        level[number] = tree.level
    parent = np.concatenate(
        [
            number[np.repeat(np.arange(tree.n), np.diff(tree.child_ptr))]
            for tree, number in zip(trees, numbers, strict=True)
        ]
    )
    child = np.concatenate([number[tree.child_idx] for tree, number in zip(trees, numbers, strict=True)])
    order = np.lexsort((child, parent))
    ptr = np.concatenate([[0], np.cumsum(np.bincount(parent, minlength=n))])
    groups = np.empty(n, dtype=np.int64)
    groups[np.concatenate(numbers)] = SoftmaxGroups.join([tree.groups for tree in trees]).of
    return ConceptTree(ptr, child[order], level, groups)

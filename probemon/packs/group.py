"""Several packs that act as one.

    group = PackGroup([animals, deception])              # named by their packs
    group = PackGroup({"a": one, "b": other})
    group.find("animals:whale"), group.find("whale"), group.concepts[3]["id"]
    group.numbers[1][7]                                  # number of probe 7 of the second pack

Probes are numbered by rank (mostly level), pack, then their order, which keeps the order of ties.
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

from probemon.core.aggregate import Aggregator, parse
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
_SHOWN = 3  # concepts named in a sentence


class PackGroup:
    """Packs for one model, as one pack of P probes.

    - `packs`: by name; `tree`: hierarchies side by side
    - `concepts`: with qualified ids, names and parents: "pack:id"
    - `aggregated`, `counted`: of any pack
    - `numbers[i]`: ascending numbers of pack i's probes

    Raises `ConfigError` if names repeat or hidden sizes differ.
    """

    def __init__(self, packs: Sequence[ProbePack] | Mapping[str, ProbePack]) -> None:
        named = list(packs.items()) if isinstance(packs, Mapping) else [(pack.name, pack) for pack in _checked(packs)]
        self.packs: dict[str, ProbePack] = dict(named)
        _check_names([name for name, _ in named])
        members = _checked(list(self.packs.values()))
        sizes = {name: pack.architecture.hidden_size for name, pack in self.packs.items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError(
                f"the packs read states of different sizes {sizes}: they are for different models, or read other sites"
                " of one (a recurrent state and the residual stream), so give each its own manager"
            )
        self.name = " + ".join(self.packs)
        self.hidden_size = members[0].architecture.hidden_size
        self.n_probes = sum(pack.n_probes for pack in members)
        self.scope = SO_FAR if any(pack.scope == SO_FAR for pack in members) else HERE  # the wider one
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
        for i, local in zip(self._pack_of.tolist(), self._own.tolist(), strict=True):
            concept, prefix = members[i].concepts[local], f"{named[i][0]}{_QUALIFIES}"
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
        """Raise `ConfigError` if the group's thresholds are not its packs'."""
        for name in ("alert_threshold", "expand_threshold"):
            pack_thresholds = self._laid_out([getattr(pack, name) for pack in self.packs.values()])
            if not torch.equal(getattr(self, name).nan_to_num(-1.0), pack_thresholds.nan_to_num(-1.0)):
                raise ConfigError(
                    f"{name} of the group {self.name} was written to, or that of one of its packs since the group was"
                    f" made, but the packs' own decide what fires: write to {name} of a pack, then make the group"
                )

    @property
    def alert_set(self) -> str | None:
        """Return the alert set in force, or "pack: name, ..."; None if unnamed or written to."""
        if self._as_laid_out.changed(self.alert_threshold):
            return None
        names = {name: pack.alert_set for name, pack in self.packs.items()}
        if len(set(names.values())) == 1:
            return next(iter(names.values()))
        return ", ".join(f"{name}: {alert_set or 'its only one'}" for name, alert_set in names.items())

    def with_alert_set(self, name: str) -> PackGroup:
        """Return the group with another alert set. Raises `ConfigError`."""
        return PackGroup({pack_name: pack.with_alert_set(name) for pack_name, pack in self.packs.items()})

    def find(self, concept: str | int) -> int:
        """Return the number of a qualified id or name ("pack:whale"), or of an unambiguous bare one. Raises
        `UnknownConcept`.
        """
        return self._names.find(concept)

    def find_all(self, concept: Wanted) -> list[int]:
        """Return the numbers of a name, id, number, list or pattern. Raises `UnknownConcept`."""
        return self._names.find_all(concept)

    def path(self, probe: int) -> list[str]:
        """Return the names from the qualified root to the probe."""
        root, *below = self.tree.path(check_count("probe", probe, most=self.n_probes - 1))
        return [self.concepts[root]["name"], *(self._bare_names[i] for i in below)]

    def thresholds_for(self, aggregator: object = None) -> Tensor:
        """Return all packs' thresholds, NaN if missing. Raises `ConfigError` if all lack them."""
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
        """Return all packs' counts, zeros if missing. Raises `ConfigError` if all lack them."""
        name = "each" if aggregator is None else str(aggregator)
        if name not in self.counted:
            next(iter(self.packs.values())).score_counts(aggregator)  # raises
        counts = torch.zeros(self.n_probes, N_BINS, dtype=torch.int32, device="cpu")
        for numbers, pack in zip(self.numbers, self.packs.values(), strict=True):
            if name in pack.counted:
                counts[torch.from_numpy(numbers)] = pack.score_counts(aggregator)
        return counts

    def split(self, probes: Sequence[int] | Ints) -> list[Ints]:
        """Return probes as each pack's own numbers."""
        numbers = np.asarray(probes, dtype=np.int64)
        return [self._own[numbers[self._pack_of[numbers] == i]] for i in range(len(self.packs))]

    def pack_of(self, probe: int) -> ProbePack:
        """Return the pack of a probe."""
        return list(self.packs.values())[int(self._pack_of[probe])]

    def precision(self, probe: int) -> float:
        """Return the precision that its pack states."""
        probe = check_count("probe", probe, most=self.n_probes - 1)
        local = int(self._own[probe])
        return math.nan if self._as_laid_out.changed(self.alert_threshold) else self.pack_of(probe).precision(local)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(pack.weight_bytes() for pack in self.packs.values())

    def __repr__(self) -> str:
        return f"PackGroup({', '.join(f'{name}: {pack!r}' for name, pack in self.packs.items())})"

    def _repr_html_(self) -> str:
        return packs_html(f"PackGroup {self.name}", self.packs)

    def _laid_out(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the packs' values in the group's order `[P]`."""
        values = torch.empty(self.n_probes, dtype=torch.float32, device="cpu")
        for numbers, tensor in zip(self.numbers, tensors, strict=True):
            values[torch.from_numpy(numbers)] = tensor
        return values


AnyPack = ProbePack | PackGroup


def stated_chat_dates(pack: AnyPack) -> list[str]:
    """Return the dates (YYYY-MM-DD) with which packs' or parents' chats were rendered (`chat_date`)."""
    members = pack.packs.values() if isinstance(pack, PackGroup) else [pack]
    waiting, dates = [member.manifest.get("provenance") or {} for member in members], set[str]()
    while waiting:
        provenance = waiting.pop()
        if provenance.get("chat_date"):
            dates.add(provenance["chat_date"])
        parents = provenance.get("parents") or []
        waiting += [parent.get("provenance") or {} for parent in parents if isinstance(parent, dict)]
    return sorted(dates)


PackOrName = ProbePack | str | os.PathLike[str]  # a pack, its folder, or its hub name
Packs = PackOrName | PackGroup | Sequence[PackOrName] | Mapping[str, PackOrName]


def one_or_several(packs: Packs) -> AnyPack:
    """Return a pack or a group as it is, several packs as a group. Opens folders and names on the hub."""
    opened = _opened(packs)
    if isinstance(opened, (ProbePack, PackGroup)):
        return opened
    if isinstance(packs, Mapping):
        return PackGroup({name: _opened(pack) for name, pack in packs.items()})
    several: Any = [_opened(pack) for pack in packs] if isinstance(packs, Sequence) else packs
    return PackGroup(several)


def never_fires(pack: AnyPack) -> Ints:
    """Return the probes with alert threshold 1."""
    return np.flatnonzero(pack.alert_threshold.numpy() >= 1)


def found_nowhere(pack: AnyPack) -> list[str]:
    """Return the names of concepts that were found in none of their own texts when their probes were trained."""
    names = []
    for own in pack.packs.values() if isinstance(pack, PackGroup) else [pack]:
        quality: Any = own.manifest.get("quality") or {}
        trained = quality.get("concepts")
        for concept in own.concepts if isinstance(trained, Mapping) else ():
            measured = trained.get(concept["id"])
            found = measured.get("found") if isinstance(measured, Mapping) else None
            if isinstance(found, Mapping) and found.get("n") and found.get("count") == 0:
                names.append(str(concept["name"]))
    return names


def trained_score(pack: AnyPack, probe: int) -> Aggregator | None:
    """Return the running score that a concept was trained for, as its pack's `quality` names it; None without one."""
    id, member = pack.concepts[probe]["id"], pack
    if isinstance(pack, PackGroup):
        id, member = id.partition(_QUALIFIES)[2], pack.pack_of(probe)
    assert isinstance(member, ProbePack)
    concepts: Any = (member.manifest.get("quality") or {}).get("concepts")
    measured = concepts.get(id) if isinstance(concepts, Mapping) else None
    reads = measured.get("reads") if isinstance(measured, Mapping) else None
    return parse(reads) if isinstance(reads, str) else None


def told_of_never(pack: AnyPack) -> str:
    """Return a sentence on concepts that can never fire, or that found none of their own texts; or "".

    Concepts that were trained for a running score, and can exceed its threshold, fire by that.
    """
    probes = [probe for probe in never_fires(pack).tolist() if not _fires_by_running_score(pack, probe)]
    parts = []
    for names, one, several in (
        ([pack.concepts[probe]["name"] for probe in probes], "concept never fires", "concepts never fire"),
        (found_nowhere(pack), "concept was found in none of its own texts", "concepts were found in none of their own"),
    ):
        if names:
            shown = ", ".join(ascii(name) for name in names[:_SHOWN])
            rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            why = " (alert threshold 1)" if one.endswith("never fires") else " when it was trained"
            parts.append(f"{len(names):,} {one if len(names) == 1 else several}{why}: {shown}{rest}")
    return "; ".join(parts)


def _fires_by_running_score(pack: AnyPack, probe: int) -> bool:
    aggregator = trained_score(pack, probe)
    if aggregator is None or str(aggregator) not in pack.aggregated:
        return False
    return float(pack.thresholds_for(aggregator)[probe]) < 1


def _opened(pack: Any) -> Any:
    return ProbePack.from_pretrained(os.fspath(pack)) if isinstance(pack, (str, os.PathLike)) else pack


def open_packs(wanted: Sequence[str], alert_set: str | None = None) -> AnyPack:
    """Open packs by folder, hub name or "NAME=folder"; several become a group. Raises `ConfigError`, `PackError`."""
    return join_packs([open_one(text, alone=len(wanted) == 1) for text in wanted], alert_set)


def open_one(text: str, *, alone: bool, verify: bool = False) -> tuple[str, ProbePack]:
    """Return name and pack of "folder" or, unless `alone`, "NAME=folder"."""
    name, equals, folder = text.partition("=")
    is_named = equals and not alone and not Path(text).is_dir()  # a folder's name may contain one
    pack = ProbePack.from_pretrained(folder if is_named else text, verify=verify)
    return name if is_named else pack.name, pack


def join_packs(named: Sequence[tuple[str, ProbePack]], alert_set: str | None = None) -> AnyPack:
    """Return the only pack, or a group, with `alert_set` in force. Raises `ConfigError`."""
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
    """Return each probe's pack and its number there."""
    pack_of = np.repeat(np.arange(len(trees)), [tree.n for tree in trees])
    local = np.concatenate([np.arange(tree.n) for tree in trees])
    # Stable: keeps the order within a rank.
    order = np.argsort(np.concatenate([tree.rank for tree in trees]), kind="stable")
    return pack_of[order], local[order]


def _union(trees: Sequence[ConceptTree], numbers: Sequence[Ints]) -> ConceptTree:
    """Return hierarchies side by side."""
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

"""What differs between two packs, by concept id.

diff = pack_diff(before, after)
diff.same, diff.only_in_a, diff.changed["whale"]      # {"weights": 0.25, "parents": [...], ...}
print(diff)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probemon.core.counted import counted
from probemon.errors import PackError
from probemon.packs.copies import some_of
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.widen import smallest_common, widen

_FIELDS = ("name", "level", "parents", "definition")


@dataclass(frozen=True)
class PackDiff:
    """What differs between two packs.

    - `only_in_a`, `only_in_b`: ids
    - `changed`: by id, what differs: `weights` (the largest difference of a weight or bias), thresholds as
      `[in a, in b]` (None: not calibrated), `input`, `softmax_group` (the ids of all its members, None for none),
      `name`, `level`, `parents`, `definition`
    - `about`: of the packs as a whole, `[in a, in b]` by key
    - `n_same`: how many concepts are alike in all
    """

    names: tuple[str, str]
    only_in_a: list[str]
    only_in_b: list[str]
    changed: dict[str, dict[str, Any]]
    about: dict[str, list[Any]]
    n_same: int

    @property
    def same(self) -> bool:
        """Whether both score alike and say the same of every concept."""
        return not (self.only_in_a or self.only_in_b or self.changed or self.about)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "a": self.names[0],
            "b": self.names[1],
            "same": self.same,
            "n_same": self.n_same,
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "changed": self.changed,
            "about": self.about,
        }

    def __str__(self) -> str:
        said = {key: _apart(*both) for key, both in self.about.items()}
        lines = [f"{key}: {a!r} in {self.names[0]}, {b!r} in {self.names[1]}" for key, (a, b) in said.items()]
        for name, ids in zip(self.names, (self.only_in_a, self.only_in_b), strict=True):
            if ids:
                lines.append(f"only in {name}: {some_of(ids)}")
        kinds = sorted({kind for changes in self.changed.values() for kind in changes})
        for kind in kinds:
            ids = [concept for concept, changes in self.changed.items() if kind in changes]
            worst = (
                f", by at most {max(self.changed[concept][kind] for concept in ids):.3g}" if kind == "weights" else ""
            )
            lines.append(f"{kind} of {counted(len(ids), 'concept')} differ{worst}: {some_of(ids)}")
        return "\n".join([*lines, f"{self.n_same} concepts are alike"])


def pack_diff(a: ProbePack, b: ProbePack) -> PackDiff:
    """Compare two packs concept by concept. Probes of different shapes are compared as ones of the shape that has room
    for both.

    Scores are the same where weights, inputs, softmax groups, score rule and, by the path rule, parents are. Raises
    `PackError` where int8 is compared with another dtype, or states of different sizes are read: no weight has a
    counterpart then.
    """
    sizes = [check_pack(pack).architecture.hidden_size for pack in (a, b)]
    if sizes[0] != sizes[1]:
        raise PackError(
            f"{a.name} reads states of {sizes[0]} values, {b.name} of {sizes[1]}: they are for different hosts, and no"
            " weight of one has a counterpart in the other"
        )
    if (a.dtype == torch.int8) != (b.dtype == torch.int8):
        raise PackError(
            f"{a.name} is {a.dtype}, {b.name} {b.dtype}: a whole number has a scale beside it. Compare what the int8"
            " pack was made from"
        )
    architecture = smallest_common([a.architecture, b.architecture])
    number_in_a, number_in_b = ({concept["id"]: i for i, concept in enumerate(pack.concepts)} for pack in (a, b))
    shared = [(i, number_in_b[concept]) for concept, i in number_in_a.items() if concept in number_in_b]
    thresholds = {
        "alert_threshold": (a.alert_threshold, b.alert_threshold),
        "expand_threshold": (a.expand_threshold, b.expand_threshold),
    }
    for name in sorted({*a.aggregated, *b.aggregated}):
        thresholds[f"alert_threshold:{name}"] = (_thresholds(a, name), _thresholds(b, name))
    sets_a, sets_b = a.other_alert_sets(), b.other_alert_sets()
    for name in sorted({*sets_a, *sets_b}):
        none = torch.full_like(a.alert_threshold, math.nan), torch.full_like(b.alert_threshold, math.nan)
        thresholds[f"alert_threshold@{name}"] = sets_a.get(name, none[0]), sets_b.get(name, none[1])
    changed: dict[str, dict[str, Any]] = {}
    for i, j in shared:
        before, after = a.concepts[i], b.concepts[j]
        changes: dict[str, Any] = {
            key: [before.get(key), after.get(key)]
            for key in _FIELDS
            if _plain(before.get(key)) != _plain(after.get(key))
        }
        inputs = [a.inputs[int(a.input_index[i])].as_dict(), b.inputs[int(b.input_index[j])].as_dict()]
        if inputs[0] != inputs[1]:
            changes["input"] = inputs
        mates = [_mates(a, i), _mates(b, j)]
        if mates[0] != mates[1]:
            changes["softmax_group"] = mates
        for key, (first, second) in thresholds.items():
            pair = [_number(first[i]), _number(second[j])]
            if pair[0] != pair[1]:
                changes[key] = pair
        largest = _largest(
            {key: tensor[i : i + 1] for key, tensor in a.weights.items()},
            {key: tensor[j : j + 1] for key, tensor in b.weights.items()},
            architecture,
        )
        if largest:
            changes["weights"] = largest
        if changes:
            changed[before["id"]] = changes
    about = {}
    for key in ("score_rule", "scope", "dtype", "licence", "host", "recommended", "alert_set"):
        # A pack can be open with another of its sets in force than its manifest recommends, and need not say its scope.
        said = [getattr(pack, key) if key in ("alert_set", "scope") else pack.manifest.get(key) for pack in (a, b)]
        if said[0] != said[1]:
            about[key] = said
    return PackDiff(
        (a.name, b.name),
        [concept for concept in number_in_a if concept not in number_in_b],
        [concept for concept in number_in_b if concept not in number_in_a],
        changed,
        about,
        len(shared) - len(changed),
    )


def _apart(a: Any, b: Any) -> tuple[Any, Any]:
    """Return what is said of both, without what is the same: a host has dozens of settings."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return a, b
    both = {key: _apart(a[key], b[key]) for key in a if key in b and a[key] != b[key]}
    return (
        {key: both[key][0] if key in both else a[key] for key in a if key in both or key not in b},
        {key: both[key][1] if key in both else b[key] for key in b if key in both or key not in a},
    )


def _largest(a: Mapping[str, Tensor], b: Mapping[str, Tensor], architecture: Any) -> float:
    first, second = widen(a, architecture), widen(b, architecture)
    return max(float((first[key].double() - second[key].double()).abs().max()) for key in first)


def _thresholds(pack: ProbePack, name: str) -> Tensor:
    return pack.thresholds_for(name) if name in pack.aggregated else torch.full_like(pack.alert_threshold, math.nan)


def _mates(pack: ProbePack, probe: int) -> list[str] | None:
    """Return the ids of all members of a probe's softmax group, None where it has none."""
    if pack.tree.groups.of[probe] < 0:
        return None
    return sorted(pack.concepts[mate]["id"] for mate in pack.tree.groups.mates(probe).tolist())


def _number(value: Tensor) -> float | None:
    return None if math.isnan(float(value)) else float(value)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) and all(isinstance(part, str) for part in value) else value

"""What differs between two packs, by concept id.

diff = pack_diff(before, after)
diff.same, diff.only_in_a, diff.changed["whale"]      # {"weights": 0.25, "parents": [...], ...}
print(diff)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.drift_reference import DriftReference
from probemon.errors import PackError
from probemon.packs.copies import some_of
from probemon.packs.opened import MAX_REPLAY_ERROR
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.tensors import name_of
from probemon.packs.widen import smallest_common, widen
from probemon.util.counted import counted

Rows = np.ndarray  # of one probe each
_Table = tuple[Rows, Rows, Callable[[Rows, Rows], Any]]
_HASH_DIGITS = 12


@dataclass(frozen=True)
class PackDiff:
    """What differs between two packs in what they score, in what rules and views make of it, and in what they say of
    concepts and host.

    - `only_in_a`, `only_in_b`: ids
    - `changed`: by id, what differs: `weights` and `golden_scores` as the largest difference, and as `[in a, in b]`
      thresholds (None: not calibrated), `input`, `softmax_group` (the ids of all its members, None for none),
      `first_parent` of the same parents, `score_counts:NAME` (how many scores were counted), `drift` (in how many
      requests it fired) and whatever its line of `concepts.jsonl` says, as `name`, `parents` and `precision`
    - `about`: of the packs as a whole, `[in a, in b]` by key, tensors by the beginning of their sha256
    - `n_same`: how many concepts are alike in all

    Not compared are the packs' names, cards, provenance and quality, and the numbers of probes.
    """

    names: tuple[str, str]
    only_in_a: list[str]
    only_in_b: list[str]
    changed: dict[str, dict[str, Any]]
    about: dict[str, list[Any]]
    n_same: int

    @property
    def same(self) -> bool:
        """Whether both score alike, rules and views make the same of it, and both say the same of every concept."""
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
            differences = [self.changed[concept][kind] for concept in ids]
            sizes = [difference for difference in differences if isinstance(difference, float)]
            worst = f", by at most {max(sizes):.3g}" if sizes else ""
            lines.append(f"{kind} of {counted(len(ids), 'concept')} differ{worst}: {some_of(ids)}")
        return "\n".join([*lines, f"{self.n_same} concepts are alike"])


def pack_diff(a: ProbePack, b: ProbePack) -> PackDiff:
    """Compare two packs concept by concept. Probes of different shapes are compared as ones of the shape that has room
    for both.

    Scores are the same where weights, inputs, softmax groups, score rule and, by the path rule, parents are; what
    follows from them also depends on thresholds, counts, familiar states and recommended settings. Raises
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
    about = _about(a, b)
    thresholds = _all_thresholds(a, b)
    tables = _tables(a, b, "golden_hidden" not in about)
    changed: dict[str, dict[str, Any]] = {}
    for i, j in shared:
        changes = _lines_apart(a, b, i, j)
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
        for key, (rows_in_a, rows_in_b, said_of) in tables.items():
            said = None if np.array_equal(rows_in_a[i], rows_in_b[j]) else said_of(rows_in_a[i], rows_in_b[j])
            if said is not None:
                changes[key] = said
        largest = _largest(
            {key: tensor[i : i + 1] for key, tensor in a.weights.items()},
            {key: tensor[j : j + 1] for key, tensor in b.weights.items()},
            architecture,
        )
        if largest:
            changes["weights"] = largest
        if changes:
            changed[a.concepts[i]["id"]] = changes
    return PackDiff(
        (a.name, b.name),
        [concept for concept in number_in_a if concept not in number_in_b],
        [concept for concept in number_in_b if concept not in number_in_a],
        changed,
        about,
        len(shared) - len(changed),
    )


def _about(a: ProbePack, b: ProbePack) -> dict[str, list[Any]]:
    """Return what is said of both packs as a whole, by key, where it differs."""
    of_a, of_b = _of_the_whole(a), _of_the_whole(b)
    return {key: [of_a[key], of_b[key]] for key in of_a if of_a[key] != of_b[key]}


def _of_the_whole(pack: ProbePack) -> dict[str, Any]:
    # A pack can be open with another of its sets in force than its manifest recommends, and need not say its scope.
    familiar = [
        {**spec.as_dict(), "limit": known.limit, "states": _hash(known.mean, known.basis)}
        for spec, known in zip(pack.inputs, pack.familiar, strict=True)
        if known is not None
    ]
    golden, reference = pack.golden_hidden, pack.drift_reference
    return {
        "score_rule": pack.score_rule,
        "scope": pack.scope,
        "dtype": name_of(pack.dtype),
        "licence": pack.manifest["licence"],
        "host": pack.manifest["host"],
        "recommended": pack.recommended,
        "alert_set": pack.alert_set,
        "alert_sets": sorted(pack.alert_sets),
        "aggregated": sorted(pack.aggregated),
        "counted": sorted(pack.counted),
        "inputs": sorted((spec.as_dict() for spec in pack.inputs), key=str),
        "familiar": sorted(familiar, key=str),
        "golden_hidden": {} if golden is None else {site: _hash(golden[:, i]) for i, site in enumerate(pack.sites)},
        "drift": None if reference is None else {**reference.stated(), "norms": _norms(reference)},
    }


def _norms(reference: DriftReference) -> dict[str, str]:
    norms = torch.from_numpy(reference.counts.norms)
    return {site: _hash(norms[i]) for i, site in enumerate(reference.sites)}


def _hash(*tensors: Tensor) -> str:
    """Return the beginning of a sha256 of shapes and values."""
    parts = [f"{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes() for tensor in tensors]
    return sha256(b"".join(parts)).hexdigest()[:_HASH_DIGITS]


def _all_thresholds(a: ProbePack, b: ProbePack) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the thresholds `[P]` of both by kind, NaN where one has none of that kind."""
    none_in_a, none_in_b = torch.full_like(a.alert_threshold, math.nan), torch.full_like(b.alert_threshold, math.nan)
    thresholds = {
        "alert_threshold": (a.alert_threshold, b.alert_threshold),
        "expand_threshold": (a.expand_threshold, b.expand_threshold),
    }
    for name in sorted({*a.aggregated, *b.aggregated}):
        thresholds[f"alert_threshold:{name}"] = (
            a.thresholds_for(name) if name in a.aggregated else none_in_a,
            b.thresholds_for(name) if name in b.aggregated else none_in_b,
        )
    sets_a, sets_b = a.other_alert_sets(), b.other_alert_sets()
    for name in sorted({*sets_a, *sets_b}):
        thresholds[f"alert_threshold@{name}"] = sets_a.get(name, none_in_a), sets_b.get(name, none_in_b)
    return thresholds


def _tables(a: ProbePack, b: ProbePack, golden_states_are_same: bool) -> dict[str, _Table]:
    """Return what both packs hold in more numbers than one a probe, by kind, and what is said of rows that differ."""
    tables: dict[str, _Table] = {
        f"score_counts:{name}": (a.score_counts(name).numpy(), b.score_counts(name).numpy(), _sums)
        for name in a.counted
        if name in b.counted
    }
    drifts = a.drift_reference, b.drift_reference
    if drifts[0] is not None and drifts[1] is not None:
        tables["drift"] = (_requests(drifts[0]), _requests(drifts[1]), _firsts)
    goldens = a.golden_scores, b.golden_scores
    if golden_states_are_same and goldens[0] is not None and goldens[1] is not None:
        tables["golden_scores"] = (goldens[0].T.numpy(), goldens[1].T.numpy(), _most_apart)
    return tables


def _requests(reference: DriftReference) -> Rows:
    """Return the counts of requests of each concept, first in how many it fired."""
    counts = reference.counts
    traits = np.stack([counts.fired, counts.low, counts.high, counts.flat], axis=1)
    return np.concatenate([traits, counts.highest], axis=1)


def _sums(a: Rows, b: Rows) -> list[int]:
    return [int(a.sum()), int(b.sum())]


def _firsts(a: Rows, b: Rows) -> list[int]:
    return [int(a[0]), int(b[0])]


def _most_apart(a: Rows, b: Rows) -> float | None:
    """Return the largest difference of two rows of golden scores, None where the same weights may have made both."""
    apart = float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
    return apart if apart > MAX_REPLAY_ERROR else None


def _lines_apart(a: ProbePack, b: ProbePack, i: int, j: int) -> dict[str, Any]:
    """Return what differs of the lines of probe i of `a` and probe j of `b`, and of which parent comes first."""
    before, after = a.concepts[i], b.concepts[j]
    said: dict[str, Any] = {
        key: [before.get(key), after.get(key)]
        for key in {**before, **after}
        if key != "parents" and before.get(key) != after.get(key)
    }
    if sorted(before["parents"]) != sorted(after["parents"]):
        said["parents"] = [before["parents"], after["parents"]]
    elif before["parents"]:
        firsts = [pack.concepts[int(pack.tree.first_parent[probe])]["id"] for pack, probe in ((a, i), (b, j))]
        if firsts[0] != firsts[1]:
            said["first_parent"] = firsts
    return said


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


def _mates(pack: ProbePack, probe: int) -> list[str] | None:
    """Return the ids of all members of a probe's softmax group, None where it has none."""
    if pack.tree.groups.of[probe] < 0:
        return None
    return sorted(pack.concepts[mate]["id"] for mate in pack.tree.groups.mates(probe).tolist())


def _number(value: Tensor) -> float | None:
    return None if math.isnan(float(value)) else float(value)

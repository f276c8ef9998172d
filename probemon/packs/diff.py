"""Compares two packs by concept id.

diff = pack_diff(before, after)
diff.same, diff.only_in_a, diff.changed["whale"]      # {"weights": 0.25, "parents": [...], ...}
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

Rows = np.ndarray  # one per probe
_Table = tuple[Rows, Rows, Callable[[Rows, Rows], Any]]
_HASH_DIGITS = 12


@dataclass(frozen=True)
class PackDiff:
    """Differences in scores, thresholds, settings and descriptions of concepts and model.

    - `only_in_a`, `only_in_b`: ids
    - `changed`: by id; the largest difference of `weights` and `golden_scores`; else `[in a, in b]`: thresholds (None:
      not calibrated), `input`, `softmax_group` (all member ids), `first_parent`, `score_counts:NAME` (totals), `drift`
      (requests in which it fired), and fields of `concepts.jsonl`
    - `about`: `[in a, in b]` of the whole packs, tensors as sha256 prefix
    - `n_same`: concepts without differences

    Names, cards, provenance, quality and probe numbers are not compared.
    """

    names: tuple[str, str]
    only_in_a: list[str]
    only_in_b: list[str]
    changed: dict[str, dict[str, Any]]
    about: dict[str, list[Any]]
    n_same: int

    @property
    def same(self) -> bool:
        """True if nothing differs."""
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
        reduced = {key: _apart(*both) for key, both in self.about.items()}
        lines = [f"{key}: {a!r} in {self.names[0]}, {b!r} in {self.names[1]}" for key, (a, b) in reduced.items()]
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
    """Compare two packs concept by concept; different shapes are widened to a common one.

    Scores are equal if weights, inputs, softmax groups, score rule and, with the path rule, parents are. What follows
    from scores also depends on thresholds, score counts, familiar states and recommended settings.

    Raises `PackError` if only one is int8, or hidden sizes differ.
    """
    sizes = [check_pack(pack).architecture.hidden_size for pack in (a, b)]
    if sizes[0] != sizes[1]:
        raise PackError(
            f"{a.name} reads states of {sizes[0]} values, {b.name} of {sizes[1]}: they are for different models, and no"
            " weight of one has a counterpart in the other"
        )
    if (a.dtype == torch.int8) != (b.dtype == torch.int8):
        raise PackError(
            f"{a.name} is {a.dtype}, {b.name} {b.dtype}: int8 weights have scales. Compare the pack that the int8"
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
        for key, (rows_in_a, rows_in_b, describe) in tables.items():
            difference = None if np.array_equal(rows_in_a[i], rows_in_b[j]) else describe(rows_in_a[i], rows_in_b[j])
            if difference is not None:
                changes[key] = difference
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
    """Return the differences of the packs as a whole."""
    whole_a, whole_b = _of_the_whole(a), _of_the_whole(b)
    return {key: [whole_a[key], whole_b[key]] for key in whole_a if whole_a[key] != whole_b[key]}


def _of_the_whole(pack: ProbePack) -> dict[str, Any]:
    # The open pack may have another alert set than its manifest recommends.
    familiar = [
        {**spec.as_dict(), "limit": entry.limit, "states": _hash(entry.mean, entry.basis)}
        for spec, entry in zip(pack.inputs, pack.familiar, strict=True)
        if entry is not None
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
    """Return a sha256 prefix of shapes and values."""
    parts = [f"{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes() for tensor in tensors]
    return sha256(b"".join(parts)).hexdigest()[:_HASH_DIGITS]


def _all_thresholds(a: ProbePack, b: ProbePack) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both packs' thresholds `[P]` by kind, NaN if missing."""
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
    """Return arrays with several numbers per probe, by kind, and how to describe a difference."""
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
    """Return the counts of requests by concept, the fired ones first."""
    counts = reference.counts
    traits = np.stack([counts.fired, counts.low, counts.high, counts.flat], axis=1)
    return np.concatenate([traits, counts.highest], axis=1)


def _sums(a: Rows, b: Rows) -> list[int]:
    return [int(a.sum()), int(b.sum())]


def _firsts(a: Rows, b: Rows) -> list[int]:
    return [int(a[0]), int(b[0])]


def _most_apart(a: Rows, b: Rows) -> float | None:
    """Return the largest difference of golden scores, None if within the replay error."""
    apart = float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
    return apart if apart > MAX_REPLAY_ERROR else None


def _lines_apart(a: ProbePack, b: ProbePack, i: int, j: int) -> dict[str, Any]:
    """Return the differences of two concept lines, and of the first parent."""
    before, after = a.concepts[i], b.concepts[j]
    changes: dict[str, Any] = {
        key: [before.get(key), after.get(key)]
        for key in {**before, **after}
        if key != "parents" and before.get(key) != after.get(key)
    }
    if sorted(before["parents"]) != sorted(after["parents"]):
        changes["parents"] = [before["parents"], after["parents"]]
    elif before["parents"]:
        firsts = [pack.concepts[int(pack.tree.first_parent[probe])]["id"] for pack, probe in ((a, i), (b, j))]
        if firsts[0] != firsts[1]:
            changes["first_parent"] = firsts
    return changes


def _apart(a: Any, b: Any) -> tuple[Any, Any]:
    """Return both values without equal parts."""
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
    """Return the ids of a probe's softmax group, or None."""
    if pack.tree.groups.of[probe] < 0:
        return None
    return sorted(pack.concepts[mate]["id"] for mate in pack.tree.groups.mates(probe).tolist())


def _number(value: Tensor) -> float | None:
    return None if math.isnan(float(value)) else float(value)

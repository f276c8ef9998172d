"""Merges, cuts and renames packs into new ones.

    merge([animals, deception], "both/", name="both")
    merge({"a": before, "b": after}, "both/", name="both")        # ids become a:whale, b:whale
    merge([bf16_pack, fp32_pack], "both/", name="both", dtype="bf16")     # weights are rounded
    subset(pack, "whales/", ["whale"])                            # with all above and below
    rename(pack, "mine/", name="mine", concepts={"whale.n.02": {"id": "whale"}})

Measurements stay in the parents' provenance, and in `quality` if still valid. Packs may exceed memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.concept_names import Wanted
from probemon.core.dtypes import ROUNDINGS
from probemon.core.familiarity import Familiar
from probemon.core.hierarchy import Ints
from probemon.core.plan import auto_threshold, starting_probes
from probemon.core.probes import InputSpec
from probemon.core.score_counts import N_BINS
from probemon.core.score_rules import follows_path
from probemon.core.settings import CascadeConfig
from probemon.core.softmax_groups import SoftmaxGroups
from probemon.core.state_settings import differing
from probemon.errors import ConfigError, PackError
from probemon.packs.configured import ConfiguredPack, errors_name_pack
from probemon.packs.copies import always_on, card_of, concepts_of, copy_pack, made_by, quality_of
from probemon.packs.files import check_target
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.tensors import ALWAYS, MATRICES
from probemon.packs.widen import smallest_common, widen
from probemon.packs.writer import PackWriter
from probemon.util.checks import shown

_SHOWN = 5
_MERGED = "merged"  # the alert set in force if the packs' names differ
_BY_CONCEPT = ("concepts", "contradictions", "shown_over")  # parts of `quality` by concept id
# Merged settings: at least as much room and rounds as alone, no stricter limit.
_JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "max_loaded_probes": sum, "keep_top_k": sum, "aggressive_pruning": all, "unload_threshold": min,
    "report_top_k": max,
    "max_rounds": lambda rounds: None if None in rounds else max(rounds),
}  # fmt: skip


def merge(
    packs: Sequence[ProbePack] | Mapping[str, ProbePack],
    path: str | Path,
    *,
    name: str,
    card: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> ProbePack:
    """Write one pack of the probes of several for one model, with the same scores and separate hierarchies.

    A mapping prefixes ids: `name:id`. Smaller probes are widened. A descent opens what those of the parts do, except
    that `keep_top_k` applies to the whole: room adds up, `max_rounds` is the largest, and packs with different rules
    keep theirs as expand thresholds. Alert sets that all have stay if one rule fits; the set in force is "merged" if
    names differ.

    `dtype`: "bf16" or "fp32", required if dtypes differ. It moves scores: a part is scored by its weights in this
    dtype, and by hidden states rounded to it.

    Score rules may differ if all parts of one of them are flat: a root scores the same by both. Raises `PackError` if
    score rules, scopes, models, dtypes or ids clash (`DynamicProbeManager` takes such packs together), `ConfigError`
    for an unusable recommendation.
    """
    check_target(path, overwrite)
    if not isinstance(packs, (Sequence, Mapping)):
        check_pack(packs)
        raise PackError("there is one pack and nothing to merge it with: give a list of packs")
    named = list(packs.items()) if isinstance(packs, Mapping) else [("", pack) for pack in packs]
    if not named:
        raise PackError("there is nothing to merge: give two packs or more")
    members = [check_pack(pack) for _, pack in named]
    score_rule = _one_score_rule(members)
    weights_dtype = one_dtype(members, dtype)
    concepts = [concept for prefix, pack in named for concept in _with_prefix(pack, prefix)]
    recommended, expand_threshold = _joined_settings(named, score_rule)
    specs = joined_inputs(members)
    return write_joined(
        members,
        path,
        name=name,
        concepts=concepts,
        dtype=weights_dtype,
        score_rule=score_rule,
        card=card or card_of(name, f"Merged{_rounded(dtype)} from", members),
        alert_threshold=torch.cat([pack.alert_threshold for pack in members]),
        expand_threshold=expand_threshold,
        **_joined_alert_sets(members, recommended.get("load_threshold")),
        familiar=[_one_familiar(members, spec) for spec in specs],
        golden_hidden=golden_of(members, list(dict.fromkeys(spec.site for spec in specs))),
        recommended=recommended,
        provenance=made_by("merge", members, prefixes=[prefix for prefix, _ in named], dtype=dtype),
        overwrite=overwrite,
    )


def write_joined(
    members: Sequence[ProbePack],
    path: str | Path,
    *,
    concepts: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    **spec: Any,
) -> ProbePack:
    """Write the probes of several packs, one after another, as one pack and open it.

    `concepts`: lines of all; `spec`: other arguments of `PackWriter` that do not follow from the packs

    Raises `PackError` if ids, scopes, models or hidden sizes clash.
    """
    scopes = {pack.scope: pack.name for pack in members}
    if len(scopes) > 1:
        raise _differ("scope", scopes)
    _check_unique(concepts)
    architecture = smallest_common([pack.architecture for pack in members])
    specs = joined_inputs(members)
    input_maps = [torch.tensor([specs.index(spec) for spec in pack.inputs], device="cpu") for pack in members]
    with PackWriter(
        path,
        concepts=concepts,
        architecture=architecture,
        dtype=dtype,
        scope=members[0].scope,
        inputs=[spec.as_dict() for spec in specs],
        host=_one_host(members),
        licence=" AND ".join(dict.fromkeys(pack.manifest["licence"] for pack in members)),
        input_index=torch.cat(
            [input_map[pack.input_index] for input_map, pack in zip(input_maps, members, strict=True)]
        ),
        softmax_group=torch.from_numpy(SoftmaxGroups.join([pack.tree.groups for pack in members]).of),
        aggregated=_aggregated(members),
        score_counts=_score_counts(members),
        **spec,
    ) as writer:
        first = 0
        for pack in members:
            for start, block in pack.blocks():
                rounded = {key: tensor.to(dtype) if key in MATRICES else tensor for key, tensor in block.items()}
                writer.put_slice(first + start, widen(rounded, architecture))
            first += pack.n_probes
    return ProbePack.of(writer.opened)


def joined_inputs(packs: Sequence[ProbePack]) -> list[InputSpec]:
    """Return the inputs of all packs, each once."""
    return list(dict.fromkeys(spec for pack in packs for spec in pack.inputs))


def one_dtype(packs: Sequence[ProbePack], stated: str | None) -> torch.dtype:
    """Return the dtype of joined weights, `stated` if they differ. Raises `PackError`."""
    dtypes = {pack.dtype: pack.name for pack in packs}
    dtype = packs[0].dtype if stated is None else ROUNDINGS.get(stated)
    if dtype is None:
        raise PackError(f"dtype is {shown(stated)}: give {' or '.join(map(repr, ROUNDINGS))}, or leave it out")
    changed = [pack for pack in packs if pack.dtype != dtype]
    if torch.int8 in dtypes and (changed or dtype != torch.int8):
        raise PackError(
            f"{dtypes[torch.int8]} is int8, and cannot be rounded to another dtype: take the pack that it was made of,"
            " and run `probemon quantize` on the new one"
        )
    if changed and stated is None:
        how = "state the rounding, dtype='bf16' or dtype='fp32' (--dtype), which moves scores"
        raise _differ("dtype", {str(one).removeprefix("torch."): name for one, name in dtypes.items()}, f"{how}; or ")
    bounding = next((pack for pack in changed if pack.bounding), None)
    if bounding is not None:
        raise PackError(
            f"{bounding.name} has bounding probes ({bounding.concepts[bounding.bounding[0]]['id']!r}), which would no"
            " longer bound their members once weights are rounded: give the flat pack that its hierarchy was proposed"
            " for"
        )
    return dtype


def _one_score_rule(packs: Sequence[ProbePack]) -> str:
    """Return the score rule of all packs with a hierarchy. Raises `PackError` if they differ."""
    rules = {pack.score_rule: pack.name for pack in packs if pack.tree.has_parents.any()}
    if len(rules) > 1:
        raise _differ("score_rule", rules)
    return next(iter(rules), packs[0].score_rule)


def _differ(what: str, values: Mapping[str, str], remedy: str = "") -> PackError:
    listed = ", ".join(f"{value} ({pack_name})" for value, pack_name in values.items())
    apart = "leave them apart, and give a manager both: DynamicProbeManager([a, b])"
    return PackError(f"{what} differs: {listed}. {(remedy + apart)[0].upper()}{(remedy + apart)[1:]}")


def _rounded(dtype: str | None) -> str:
    return "" if dtype is None else f", with weights in {dtype},"


def subset(
    pack: ProbePack,
    path: str | Path,
    concepts: Sequence[Wanted],
    *,
    above: bool = True,
    below: bool = True,
    name: str | None = None,
    overwrite: bool = False,
) -> ProbePack:
    """Write a pack of some concepts, by id, name or pattern, with all `above` and `below` them and the other members of
    their softmax groups.

    Thresholds stay, so each concept is opened by the same parents as in the whole pack. Without `above`, a concept
    whose parents are left out becomes a root. Its score would change in a pack with the path rule, which is refused.
    Raises `UnknownConcept`, `PackError`.
    """
    check_target(path, overwrite)
    pack = check_pack(pack)
    if isinstance(concepts, (str, bytes)) or not isinstance(concepts, Iterable):
        raise ConfigError(f"concepts is {shown(concepts)}: give a list of ids, names or patterns, even of one")
    chosen = {probe for concept in concepts for probe in pack.find_all(concept)}
    if not chosen:
        raise PackError("no concept is chosen: give ids, names or patterns")
    selected = set(chosen)
    if below:
        selected |= {int(child) for probe in chosen for child in _reached(probe, pack.tree.children)}
    if above:
        selected |= {int(parent) for probe in tuple(selected) for parent in _reached(probe, pack.tree.parents)}
    selected |= {int(mate) for probe in tuple(selected) for mate in pack.tree.groups.mates(probe)}  # same parents
    orphans = [probe for probe in sorted(selected) if not set(pack.tree.parents(probe).tolist()) <= selected]
    if orphans and follows_path(pack.score_rule):
        raise PackError(
            f"{pack.concepts[orphans[0]]['id']!r} would be without a parent, and its score is a product along its path:"
            " keep what is above"
        )
    probes = np.asarray(sorted(selected), dtype=np.int64)
    lines, recommended = _cut(pack, probes, orphans)
    return copy_pack(
        pack,
        path,
        "Cut out of",
        made_by("subset", [pack], concepts=[str(concept) for concept in concepts], above=above, below=below),
        probes=probes,
        name=name or f"{pack.name}-subset",
        concepts=lines,
        recommended=recommended,
        overwrite=overwrite,
    )


def rename(
    pack: ProbePack,
    path: str | Path,
    *,
    name: str | None = None,
    concepts: Mapping[str, str | Mapping[str, str]] | None = None,
    overwrite: bool = False,
) -> ProbePack:
    """Write the same pack under other names; `concepts`: new names or `{"id": ..., "name": ...}` by id.

    Raises `UnknownConcept`, and `PackError` if an id is taken.
    """
    check_target(path, overwrite)
    pack = check_pack(pack)
    if concepts is not None and not isinstance(concepts, Mapping):
        raise PackError(f"concepts is {concepts!r}: give new names by id, {{old: new}}")
    if name is None and not concepts:
        raise PackError("nothing is renamed: give a name for the pack, or concepts")
    lines = concepts_of(pack)
    new_ids: dict[str, str] = {}
    for concept, new in (concepts or {}).items():
        line = lines[pack.find(concept)]
        change = {"name": new} if isinstance(new, str) else dict(new) if isinstance(new, Mapping) else {}
        texts = all(isinstance(value, str) and value for value in change.values())
        if not change or set(change) - {"id", "name"} or not texts:
            raise PackError(
                f'{concept!r} becomes {new!r}: give its new name, or {{"id": ..., "name": ...}}, texts that are not'
                " empty"
            )
        new_ids[line["id"]] = change.get("id", line["id"])
        line.update(change)
    ids = [line["id"] for line in lines]
    if len(set(ids)) < len(ids):
        duplicate = next(concept for concept in new_ids.values() if ids.count(concept) > 1)
        raise PackError(f"id {duplicate!r} is another concept's: ids are unique in a pack")
    for line in lines:
        line["parents"] = [new_ids.get(parent, parent) for parent in line["parents"]]
    changed = {old: new for old, new in new_ids.items() if old != new}
    return copy_pack(
        pack,
        path,
        "Renamed from",
        made_by("rename", [pack], ids=changed),
        name=name or pack.name,
        concepts=lines,
        recommended={**pack.descent()[1], **always_on(pack, new_ids=new_ids)},
        quality=_by_new_ids(quality_of(pack), changed),
        overwrite=overwrite,
    )


def _with_prefix(pack: ProbePack, prefix: str) -> list[dict[str, Any]]:
    qualifier = f"{prefix}:" if prefix else ""
    return [
        {**concept, "id": qualifier + concept["id"], "parents": [qualifier + parent for parent in concept["parents"]]}
        for concept in concepts_of(pack)
    ]


def _check_unique(concepts: Sequence[Mapping[str, Any]]) -> None:
    repeated = sorted(concept for concept, n in Counter(concept["id"] for concept in concepts).items() if n > 1)
    if repeated:
        raise PackError(
            f"{len(repeated)} ids are in more than one pack"
            f" ({', '.join(map(repr, repeated[:_SHOWN]))}{', ...' if len(repeated) > _SHOWN else ''}): rename them"
            ' (probemon pack rename), or name the packs that you merge, merge({"a": first, "b": second}) or --prefix,'
            " and ids become a:id"
        )


def _aggregated(packs: Sequence[ProbePack]) -> dict[str, Tensor]:
    """Return alert thresholds `[P]` by aggregator, NaN if missing."""
    return {
        name: torch.cat(
            [
                pack.thresholds_for(name) if name in pack.aggregated else torch.full_like(pack.alert_threshold, np.nan)
                for pack in packs
            ]
        )
        for name in dict.fromkeys(name for pack in packs for name in pack.aggregated)
    }


def _score_counts(packs: Sequence[ProbePack]) -> dict[str, Tensor]:
    """Return counts `[P, N_BINS]` by aggregator, zeros if missing."""
    return {
        name: torch.cat(
            [
                pack.score_counts(name)
                if name in pack.counted
                else torch.zeros(pack.n_probes, N_BINS, dtype=torch.int32, device="cpu")
                for pack in packs
            ]
        )
        for name in dict.fromkeys(name for pack in packs for name in pack.counted)
    }


def _joined_alert_sets(packs: Sequence[ProbePack], rule: float | str | None) -> dict[str, Any]:
    """Return the named alert sets that all packs have, without those by which a part would descend by another rule.

    `rule`: the merged load threshold
    """
    names = {pack.alert_set for pack in packs}
    if None in names:
        return {}
    in_force = packs[0].alert_set if len(names) == 1 else _MERGED
    sets = [{**pack.other_alert_sets(), pack.alert_set: pack.alert_threshold} for pack in packs]
    joined = {
        name: torch.cat([alerts[name] for alerts in sets])
        for name in sets[0]
        if name != in_force and all(name in alerts for alerts in sets)
    }
    return {
        "alert_set": in_force,
        "alert_sets": {name: alert for name, alert in joined.items() if _one_rule(packs, name, alert, rule)},
    }


def _one_rule(packs: Sequence[ProbePack], name: str, alert: Tensor, rule: float | str | None) -> bool:
    """True if all parts and the whole descend by one rule with an alert set, `[P]`."""
    deep = [pack.with_alert_set(name) for pack in packs if pack.tree.has_children.any()]
    if any(pack.bounding for pack in deep):  # their expand thresholds follow the set
        return all(pack.bounding for pack in deep)
    rules = {
        auto_threshold(pack.score_rule, pack.lowest_alert.numpy(), pack.recommended.get("load_threshold"))
        for pack in deep
    }
    return not deep or rules == {
        auto_threshold(deep[0].score_rule, alert.numpy(), None if rule == "calibrated" else rule)
    }


def _one_host(packs: Sequence[ProbePack]) -> dict[str, Any]:
    """Return the merged `host` section. Raises `PackError` if packs disagree."""
    host: dict[str, Any] = {}
    for pack in packs:
        for key, value in pack.manifest["host"].items():
            former = host.setdefault(key, value)
            if former is None or value is None or former == value:
                what = ""
            elif key == "settings":  # transformers releases state different keys
                what = next(iter(differing(former, value)), "")
            else:
                what = f"{key} is {former!r} and {value!r}"
            if what:
                raise PackError(f"the packs are for different models: {what} ({pack.name}). A pack has one model")
            host[key] = value if host[key] is None else host[key]
    return host


def _one_familiar(packs: Sequence[ProbePack], spec: InputSpec) -> Familiar | None:
    """Return an input's `Familiar` if all packs that read it agree."""
    statistics = [pack.familiar[pack.inputs.index(spec)] for pack in packs if spec in pack.inputs]
    first = statistics[0]
    same = first is not None and all(
        other is not None
        and torch.equal(other.mean, first.mean)
        and torch.equal(other.basis, first.basis)
        and other.limit == first.limit
        for other in statistics
    )
    return first if same else None


def golden_of(packs: Sequence[ProbePack], sites: Sequence[str]) -> Tensor | None:
    """Return the packs' states `[G, S, D]`, repeated at sites with fewer."""
    states: dict[str, list[Tensor]] = {site: [] for site in sites}
    for pack in packs:
        golden = pack.golden_hidden
        if golden is None or not len(golden):
            return None
        for i, site in enumerate(pack.sites):
            states[site].append(golden[:, i])
    joined = [torch.cat(tensor) for tensor in states.values()]
    n = max(map(len, joined))
    return torch.stack([tensor[torch.arange(n, device=tensor.device) % len(tensor)] for tensor in joined], dim=1)


def _joined_settings(named: Sequence[tuple[str, ProbePack]], score_rule: str) -> tuple[dict[str, Any], Tensor]:
    """Return merged recommendations and expand thresholds `[P]` of a pack by `score_rule`. Raises `ConfigError`."""
    members, never_dropped = [], []
    for _, pack in named:
        with errors_name_pack(pack.name):
            members.append(ConfiguredPack.of(pack, {}))
            plan = members[-1].plan_with(())
            # By the path rule all roots are active, also those that are not exempt.
            never_dropped.append(plan.exempt if follows_path(score_rule) else plan.always)
    settings = {key: join([getattr(member.config, key) for member in members]) for key, join in _JOINED.items()}
    # Common first levels; other starting concepts are always on.
    levels = {level for member in members for level in member.config.base_layers}
    settings["base_layers"] = base = sorted(
        level
        for level in levels
        if all(level in member.config.base_layers or level not in member.pack.tree.level for member in members)
    )
    settings["always_on"] = []
    for (prefix, pack), exempt in zip(named, never_dropped, strict=True):
        ids = always_on(pack).get("always_on", []) + [
            pack.concepts[probe]["id"] for probe in np.flatnonzero(exempt & ~np.isin(pack.tree.level, base)).tolist()
        ]
        settings["always_on"] += [f"{prefix}:{concept}" if prefix else concept for concept in dict.fromkeys(ids)]
    recommended_keys = {key for _, pack in named for key in pack.recommended}
    defaults = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(CascadeConfig()).items()
    }
    recommended = {key: value for key, value in settings.items() if key in recommended_keys or value != defaults[key]}
    deep = [pack for _, pack in named if pack.tree.has_children.any()]
    rules = {
        auto_threshold(pack.score_rule, pack.lowest_alert.numpy(), pack.descent()[1].get("load_threshold"))
        for pack in deep
    }
    if len(rules) > 1 or ("exact" in rules and any(bool(pack.lowest_alert.isnan().any()) for _, pack in named)):
        return recommended | {"load_threshold": "calibrated"}, torch.from_numpy(
            np.concatenate([_writable_thresholds(member) for member in members])
        )
    if rules and any("load_threshold" in pack.descent()[1] for pack in deep):
        recommended["load_threshold"] = rules.pop()
    return recommended, torch.cat([pack.descent()[0] for _, pack in named])


def _writable_thresholds(member: ConfiguredPack) -> np.ndarray:
    """Return expand thresholds, NaN for leaves, clipped to valid values."""
    thresholds = np.where(member.thresholds < 0, np.float32(ALWAYS), np.minimum(member.thresholds, np.float32(1)))
    return np.where(member.pack.tree.has_children, thresholds, np.float32(np.nan))


def _reached(probe: int, neighbours: Callable[[int], Ints]) -> set[int]:
    """Return all probes reachable over `neighbours`."""
    reached: set[int] = set()
    waiting = [probe]
    while waiting:
        new = set(neighbours(waiting.pop()).tolist()) - reached
        reached |= new
        waiting += new
    return reached


def _cut(pack: ProbePack, probes: Ints, orphans: Sequence[int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return concept lines and recommendations such that descents begin with the same concepts. `orphans`: concepts
    that lose a parent.
    """
    lines = concepts_of(pack, probes)
    ids = {line["id"] for line in lines}
    recommended = {**pack.descent()[1], **always_on(pack, ids)}
    layers = recommended.pop("base_layers", CascadeConfig.base_layers)
    base = [level for level in layers if level in pack.tree.level[probes]]
    # If the hierarchy begins elsewhere, roots move to level 0.
    begins_elsewhere = bool(orphans) or not base
    if not begins_elsewhere and "base_layers" in pack.recommended:
        recommended["base_layers"] = base
    recommended_on = [pack.find(concept) for concept in pack.recommended.get("always_on", ())]
    _, always = starting_probes(pack.tree, follows_path(pack.score_rule), layers, recommended_on)
    always[list(orphans)] = True  # a removed parent could open it
    on = list(recommended.get("always_on", []))
    for line, probe in zip(lines, probes.tolist(), strict=True):
        line["parents"] = [parent for parent in line["parents"] if parent in ids]
        level = line.pop("level") if begins_elsewhere else line["level"]
        if always[probe] and line["parents"] and (begins_elsewhere or level not in base):
            on.append(line["id"])
    if on:
        recommended["always_on"] = list(dict.fromkeys(on))
    return lines, recommended


def _by_new_ids(value: Any, new_ids: Mapping[str, str]) -> Any:
    """Return `value` with ids renamed below `_BY_CONCEPT` keys; other keys may look like ids ("fpr")."""
    if isinstance(value, Mapping):
        return {
            key: {new_ids.get(concept, concept): content for concept, content in inner.items()}
            if key in _BY_CONCEPT and isinstance(inner, Mapping)
            else _by_new_ids(inner, new_ids)
            for key, inner in value.items()
        }
    return [_by_new_ids(inner, new_ids) for inner in value] if isinstance(value, list) else value

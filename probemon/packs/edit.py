"""New packs out of packs: merged, cut down, renamed. Each says in its manifest what it was made of.

    merge([animals, deception], "both/", name="both")
    merge({"a": before, "b": after}, "both/", name="both")        # ids become a:whale, b:whale
    subset(pack, "whales/", ["whale"])                            # with all above it and all below
    rename(pack, "mine/", name="mine", concepts={"whale.n.02": {"id": "whale"}})

A pack is never changed in place. What was measured of a pack is kept with it, as a parent in the new one's provenance,
and stands under `quality` only where the new one is still what was measured. Weights are copied in blocks, so that a
pack larger than memory can be edited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.checks import shown
from probemon.core.concept_names import Wanted
from probemon.core.hierarchy import Ints
from probemon.core.plan import auto_threshold, starting_probes
from probemon.core.settings import CascadeConfig
from probemon.errors import ConfigError, PackError
from probemon.packs.configured import ConfiguredPack
from probemon.packs.configured import named as of_pack
from probemon.packs.manifest import PROBES
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.tensors import ALWAYS
from probemon.packs.widen import smallest_common, widen
from probemon.packs.writer import PackWriter, check_target

_SHOWN = 5
# Settings of several packs as one: none has less room, fewer rounds or a stricter limit than alone.
_TOGETHER: dict[str, Callable[[list[Any]], Any]] = {
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
    overwrite: bool = False,
) -> ProbePack:
    """One pack of the probes of several, for one host; hierarchies stay side by side. Scores are those of each alone.

    A mapping puts its names before ids: `name:id`. Smaller probes are embedded exactly in the largest shape. What a
    descent of one alone begins with and opens is begun with and opened: room adds up, `max_rounds` is the largest, and
    where packs descend by unlike rules, each keeps its own as expand thresholds. Raises `PackError` where dtypes, score
    rules, hosts or ids clash: `DynamicProbeManager` takes such packs side by side; `ConfigError` for one that does not
    work as recommended.
    """
    check_target(path, overwrite)
    if not isinstance(packs, (Sequence, Mapping)):
        check_pack(packs)
        raise PackError("there is one pack and nothing to merge it with: give a list of packs")
    named = list(packs.items()) if isinstance(packs, Mapping) else [("", pack) for pack in packs]
    if not named:
        raise PackError("there is nothing to merge: give two packs or more")
    all_packs = [check_pack(pack) for _, pack in named]
    for what in ("dtype", "score_rule"):
        found = {str(getattr(pack, what)): pack.name for pack in all_packs}
        if len(found) > 1:
            told = ", ".join(f"{value} ({pack_name})" for value, pack_name in found.items())
            raise PackError(
                f"{what} differs: {told}. Leave them apart, and give a manager both: DynamicProbeManager([a, b])"
            )
    architecture = smallest_common([pack.architecture for pack in all_packs])
    concepts: list[dict[str, Any]] = []
    for prefix, pack in named:
        concepts += _qualified(pack, prefix)
    ids = [concept["id"] for concept in concepts]
    twice = sorted({str(concept) for concept, n in zip(*np.unique(ids, return_counts=True), strict=True) if n > 1})
    if twice:
        raise PackError(
            f"{len(twice)} ids are in more than one pack"
            f" ({', '.join(map(repr, twice[:_SHOWN]))}{', ...' if len(twice) > _SHOWN else ''}): name the packs,"
            ' merge({"a": first, "b": second}) or --prefix, and ids become a:id'
        )
    specs = list(dict.fromkeys(spec for pack in all_packs for spec in pack.inputs))
    index = torch.cat(
        [
            torch.tensor([specs.index(spec) for spec in pack.inputs], device="cpu")[pack.input_index]
            for pack in all_packs
        ]
    )
    aggregators = dict.fromkeys(key for pack in all_packs for key in pack.aggregated)
    unknown = [torch.full_like(pack.alert_threshold, float("nan")) for pack in all_packs]
    recommended, expand = _together(named)
    licences = list(dict.fromkeys(pack.manifest["licence"] for pack in all_packs))
    with PackWriter(
        path,
        name=name,
        concepts=concepts,
        architecture=architecture,
        dtype=all_packs[0].dtype,
        score_rule=all_packs[0].score_rule,
        inputs=[spec.as_dict() for spec in specs],
        host=_one_host(all_packs),
        licence=" AND ".join(licences),
        card=card or card_of(name, "Merged from", all_packs),
        input_index=index,
        alert_threshold=torch.cat([pack.alert_threshold for pack in all_packs]),
        expand_threshold=expand,
        aggregated={
            key: torch.cat(
                [
                    pack.thresholds_for(key) if key in pack.aggregated else nan
                    for pack, nan in zip(all_packs, unknown, strict=True)
                ]
            )
            for key in aggregators
        },
        golden_hidden=_golden(all_packs, list(dict.fromkeys(spec.site for spec in specs))),
        recommended=recommended,
        provenance=made_by("merge", all_packs, prefixes=[prefix for prefix, _ in named]),
        overwrite=overwrite,
    ) as writer:
        at = 0
        for pack in all_packs:
            for start, block in pack.blocks():
                writer.put_slice(at + start, widen(block, architecture))
            at += pack.n_probes
    return ProbePack.of(writer.opened)


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
    """A pack of some concepts, by id, name or pattern, with all that is `above` and `below` them.

    Without `above` a concept whose parents are left out begins a hierarchy of its own; in a pack of the path rule its
    score would then be another one, so that is refused. Thresholds stay: a concept is opened by the parents that open
    it in the whole pack. Raises `UnknownConcept`, `PackError`.
    """
    check_target(path, overwrite)
    pack = check_pack(pack)
    if isinstance(concepts, (str, bytes)) or not isinstance(concepts, Iterable):
        raise ConfigError(f"concepts is {shown(concepts)}: give a list of ids, names or patterns, even of one")
    chosen = {probe for concept in concepts for probe in pack.find_all(concept)}
    if not chosen:
        raise PackError("no concept is chosen: give ids, names or patterns")
    kept = set(chosen)
    if below:
        kept |= {int(child) for probe in chosen for child in _reached(probe, pack.tree.children)}
    if above:
        kept |= {int(parent) for probe in tuple(kept) for parent in _reached(probe, pack.tree.parents)}
    orphans = [probe for probe in sorted(kept) if not set(pack.tree.parents(probe).tolist()) <= kept]
    if orphans and pack.score_rule == "path":
        raise PackError(
            f"{pack.concepts[orphans[0]]['id']!r} would be without a parent, and its score is a product along its path:"
            " keep what is above"
        )
    probes = np.asarray(sorted(kept), dtype=np.int64)
    ids = {pack.concepts[probe]["id"] for probe in kept}
    lines = [dict(pack.concepts[probe]) for probe in probes.tolist()]
    recommended = {**pack.recommended, **always_on(pack, ids)}
    layers = recommended.pop("base_layers", CascadeConfig.base_layers)
    base = [level for level in layers if level in pack.tree.level[probes]]
    elsewhere = (
        bool(orphans) or not base
    )  # the hierarchy begins elsewhere: what is a root now is at level 0, where descents begin
    if not elsewhere and "base_layers" in pack.recommended:
        recommended["base_layers"] = base
    _, always = starting_probes(
        pack.tree,
        pack.score_rule == "path",
        layers,
        [pack.find(concept) for concept in pack.recommended.get("always_on", ())],
    )
    always[orphans] = True  # another parent, which is left out, could open it
    on = list(recommended.get("always_on", []))
    for line, probe in zip(lines, probes.tolist(), strict=True):
        line["parents"] = [parent for parent in line["parents"] if parent in ids]
        level = line.pop("level") if elsewhere else line["level"]
        if always[probe] and line["parents"] and (elsewhere or level not in base):
            on.append(line["id"])
    if on:
        recommended["always_on"] = list(dict.fromkeys(on))
    at = torch.from_numpy(probes)
    return copy_pack(
        pack,
        path,
        name or f"{pack.name}-subset",
        lines,
        "Cut out of",
        made_by("subset", [pack], concepts=[str(concept) for concept in concepts], above=above, below=below),
        probes=probes,
        overwrite=overwrite,
        alert_threshold=pack.alert_threshold[at],
        expand_threshold=pack.expand_threshold[at],
        aggregated={key: pack.thresholds_for(key)[at] for key in pack.aggregated},
        input_index=pack.input_index[at],
        recommended=recommended,
    )


def rename(
    pack: ProbePack,
    path: str | Path,
    *,
    name: str | None = None,
    concepts: Mapping[str, str | Mapping[str, str]] | None = None,
    overwrite: bool = False,
) -> ProbePack:
    """The same pack by other names: `name` its own; `concepts`: by id (or unambiguous name) a new name, or `{"id": ...,
    "name": ...}`.

    Scores, thresholds and what was measured stay. Raises `UnknownConcept`, `PackError` where an id is taken.
    """
    check_target(path, overwrite)
    pack = check_pack(pack)
    if concepts is not None and not isinstance(concepts, Mapping):
        raise PackError(f"concepts is {concepts!r}: give new names by id, {{old: new}}")
    if name is None and not concepts:
        raise PackError("nothing is renamed: give a name for the pack, or concepts")
    lines = [dict(concept) for concept in pack.concepts]
    new_ids: dict[str, str] = {}
    for concept, given in (concepts or {}).items():
        line = lines[pack.find(concept)]
        change = {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
        if (
            not change
            or set(change) - {"id", "name"}
            or not all(isinstance(value, str) and value for value in change.values())
        ):
            raise PackError(
                f'{concept!r} becomes {given!r}: give its new name, or {{"id": ..., "name": ...}}, texts that are not'
                " empty"
            )
        new_ids[line["id"]] = change.get("id", line["id"])
        line.update(change)
    ids = [line["id"] for line in lines]
    if len(set(ids)) < len(ids):
        taken = next(concept for concept in new_ids.values() if ids.count(concept) > 1)
        raise PackError(f"id {taken!r} is another concept's: ids are unique in a pack")
    for line in lines:
        line["parents"] = [new_ids.get(parent, parent) for parent in line["parents"]]
    changed = {old: new for old, new in new_ids.items() if old != new}
    return copy_pack(
        pack,
        path,
        name or pack.name,
        lines,
        "Renamed from",
        made_by("rename", [pack], ids=changed),
        overwrite=overwrite,
        alert_threshold=pack.alert_threshold,
        expand_threshold=pack.expand_threshold,
        aggregated={key: pack.thresholds_for(key) for key in pack.aggregated},
        input_index=pack.input_index,
        recommended={**pack.recommended, **always_on(pack, renamed=new_ids)},
        quality=_by_new_ids(pack.manifest.get("quality") or {}, changed),
    )


def made_by(operation: str, packs: Sequence[ProbePack], **how: Any) -> dict[str, Any]:
    """Provenance of a pack that was made of others: each with its name, hashes, provenance and quality."""
    parents = [
        {
            "name": pack.name,
            "sha256": pack.manifest["files"][PROBES]["sha256"],
            "provenance": pack.manifest.get("provenance") or {},
            "quality": pack.manifest.get("quality") or {},
        }
        for pack in packs
    ]
    return {
        "made_by": f"probemon.packs.edit.{operation}",
        "how": how,
        "parents": parents,
        "versions": {"probemon": version("probemon"), "torch": torch.__version__},
    }


def copy_pack(
    pack: ProbePack,
    path: str | Path,
    name: str,
    lines: Sequence[Mapping[str, Any]],
    how: str,
    provenance: Mapping[str, Any],
    *,
    probes: Ints | None = None,
    **rest: Any,
) -> ProbePack:
    """Some `probes` of a pack (all) as another pack, concept `i` being `lines[i]`. `how` begins its card; `rest`:
    thresholds and what else `PackWriter` takes.
    """
    with PackWriter(
        path,
        name=name,
        concepts=lines,
        architecture=pack.architecture,
        dtype=pack.dtype,
        score_rule=pack.score_rule,
        inputs=[spec.as_dict() for spec in pack.inputs],
        host=pack.manifest["host"],
        licence=pack.manifest["licence"],
        card=card_of(name, how, [pack]),
        golden_hidden=pack.golden_hidden,
        provenance=provenance,
        **rest,
    ) as writer:
        for start, block in pack.blocks(probes):
            writer.put_slice(start, block)
    return ProbePack.of(writer.opened)


def _qualified(pack: ProbePack, prefix: str) -> list[dict[str, Any]]:
    if not prefix:
        return [dict(concept) for concept in pack.concepts]
    return [
        {
            **concept,
            "id": f"{prefix}:{concept['id']}",
            "parents": [f"{prefix}:{parent}" for parent in concept["parents"]],
        }
        for concept in pack.concepts
    ]


def _reached(probe: int, neighbours: Any) -> set[int]:
    """All that follows from a probe by going on to its neighbours."""
    found: set[int] = set()
    waiting = [probe]
    while waiting:
        for other in neighbours(waiting.pop()).tolist():
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def _one_host(packs: Sequence[ProbePack]) -> dict[str, Any]:
    """What the packs say of their host together. Raises `PackError` where they say different things."""
    host: dict[str, Any] = {}
    for pack in packs:
        for key, value in pack.manifest["host"].items():
            if host.setdefault(key, value) != value and value is not None and host[key] is not None:
                raise PackError(
                    f"the packs are for different hosts: {key} is {host[key]!r} and {value!r} ({pack.name}). A pack has"
                    " one host"
                )
            host[key] = value if host[key] is None else host[key]
    return host


def _golden(packs: Sequence[ProbePack], sites: Sequence[str]) -> Tensor | None:
    """States of all packs `[G, S, D]`; of a site that a pack does not read, those of the packs that do, in turn. None
    where one has no states.
    """
    states: dict[str, list[Tensor]] = {site: [] for site in sites}
    for pack in packs:
        if pack.golden_hidden is None or not len(pack.golden_hidden):
            return None
        for i, site in enumerate(pack.sites):
            states[site].append(pack.golden_hidden[:, i])
    joined = [torch.cat(parts) for parts in states.values()]
    n = max(len(part) for part in joined)
    return torch.stack([part[torch.arange(n, device=part.device) % len(part)] for part in joined], dim=1)


def always_on(
    pack: ProbePack, kept: Collection[str] | None = None, *, renamed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`{"always_on": ids}` of those `kept` (all), where the pack recommends any: what it names by number or name is
    another concept in another pack.
    """
    if "always_on" not in pack.recommended:
        return {}
    ids = [pack.concepts[pack.find(concept)]["id"] for concept in pack.recommended["always_on"]]
    return {"always_on": [(renamed or {}).get(concept, concept) for concept in ids if kept is None or concept in kept]}


def _together(named: Sequence[tuple[str, ProbePack]]) -> tuple[dict[str, Any], Tensor]:
    """What is recommended for several packs as one, and their expand thresholds `[P]`. Raises `ConfigError` for a pack
    that does not work as it is recommended.
    """
    parts, never_kept = [], []
    for _, pack in named:
        with of_pack(pack.name):
            parts.append(ConfiguredPack.of(pack, {}))
            never_kept.append(parts[-1].plan_with(()).exempt)
    said = {key for _, pack in named for key in pack.recommended}
    found = {key: combine([getattr(part.config, key) for part in parts]) for key, combine in _TOGETHER.items()}
    # Levels at which every pack begins that has them; what else one begins with is always on.
    levels = {level for part in parts for level in part.config.base_layers}
    found["base_layers"] = base = sorted(
        level
        for level in levels
        if all(level in part.config.base_layers or level not in part.pack.tree.level for part in parts)
    )
    on: list[str] = []
    for (prefix, pack), begun in zip(named, never_kept, strict=True):
        ids = always_on(pack).get("always_on", []) + [
            pack.concepts[probe]["id"] for probe in np.flatnonzero(begun & ~np.isin(pack.tree.level, base))
        ]
        on += [f"{prefix}:{concept}" if prefix else concept for concept in dict.fromkeys(ids)]
    found["always_on"] = on
    usual = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(CascadeConfig()).items()
    }
    recommended = {key: value for key, value in found.items() if key in said or value != usual[key]}
    deep = [pack for _, pack in named if pack.tree.has_children.any()]
    rules = {
        auto_threshold(pack.score_rule, pack.alert_threshold.numpy(), pack.recommended.get("load_threshold"))
        for pack in deep
    }
    if len(rules) > 1 or ("exact" in rules and any(bool(pack.alert_threshold.isnan().any()) for _, pack in named)):
        # Of numbers that no score can be on one side of, those that a pack may hold: they open the same.
        thresholds = [
            np.where(part.thresholds < 0, np.float32(ALWAYS), np.minimum(part.thresholds, np.float32(1)))
            for part in parts
        ]
        own = [
            np.where(part.pack.tree.has_children, some, np.float32(np.nan))
            for part, some in zip(parts, thresholds, strict=True)
        ]
        return recommended | {"load_threshold": "calibrated"}, torch.from_numpy(np.concatenate(own))
    if rules and any("load_threshold" in pack.recommended for pack in deep):
        recommended["load_threshold"] = rules.pop()
    return recommended, torch.cat([pack.expand_threshold for _, pack in named])


def _by_new_ids(value: Any, new_ids: Mapping[str, str]) -> Any:
    """With concept ids that are keys renamed, at any depth."""
    if isinstance(value, Mapping):
        return {new_ids.get(key, key): _by_new_ids(inner, new_ids) for key, inner in value.items()}
    return [_by_new_ids(inner, new_ids) for inner in value] if isinstance(value, list) else value


def card_of(name: str, how: str, packs: Sequence[ProbePack]) -> str:
    """A card that says what it was made of, with the parents' cards below."""
    made_of = "\n".join(
        f"- `{pack.name}`, {pack.n_probes} probes, sha256 of its weights {pack.manifest['files'][PROBES]['sha256']}"
        for pack in packs
    )
    cards = [pack.card_text() for pack in packs if pack.card is not None]
    below = "".join(
        f"\n---\n\nThe card of what it was made of; its figures are those of that pack.\n\n{card}" for card in cards
    )
    return f"# {name}\n\n{how}:\n\n{made_of}\n{below}"

"""The notes, counts and card of a HatCat import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from probemon.lab.importers.hatcat_files import Stored
from probemon.lab.importers.hatcat_probe import Kind
from probemon.lab.importers.hatcat_tree import Node, PlacedNode, key_of
from probemon.lab.importers.report import ImportReport, Notes

N_STATES = 2  # random ones, to compare written with read
KINDS = {
    "unreachable": "concepts that no descent from the base level reaches",
    "unfit": "hierarchy files that are not the one of these probes: another was taken",
    "flattened": "edges left out, as asked: every level is a base level, and every probe is scored at every token",
    "tripole": "three-way heads: each is three concepts that exclude one another (Name/negative, /neutral, /positive)",
    "unknown": "files whose tensors are not a probe of this format: not imported",
    "dtype": "probes of a dtype that packs do not have: not imported; save them again in float32 (module.float())",
    "not_finite": "probes with weights that are not finite: not imported",
    "width": "probes that read states of another size than the others: not imported",
    "missing": "concepts of the hierarchy without a probe",
    "bridged": "concepts whose parent has no probe, or a three-way head: put under the nearest above that has one",
    "unlisted": "probes of concepts that the hierarchy does not name: roots on their level",
    "cycle": "edges of a cycle left out, as asked",
    "several_parents": "concepts with several parents, all kept",
    "not_down": "edges that do not go down a level: kept, and the levels too",
    "repeated": "names on several levels, each a separate concept",
    "ambiguous": "flat files, and probes in banks, of a name on several levels: taken for the first without a probe",
    "stale": "concepts that hierarchy.json and the layer files do not agree on: hierarchy.json counts",
    "stale_edges": "edges that hierarchy.json and the layer files do not agree on: hierarchy.json counts",
    "contradicted": "concepts that root_concepts or leaf_concepts list otherwise than the edges: the edges count",
    "one_sided": "edges of child_to_parent that parent_to_children lacks, kept",
    "dangling": "edges to names that no layer file has: left out",
    "malformed": 'keys that are not "Name:level": left out',
    "bank_edges": "edges that only banks and their index state: taken",
    "bank_elsewhere": "probes of banks that the hierarchy does not put under the bank's parent: the hierarchy counts",
    "bank_lacks": "concepts that bank_index.json lists and their bank lacks",
    "bank_unlisted": "probes of banks that bank_index.json does not list: taken",
    "twice": "probes stored twice: the first is taken",
    "rounded": "probes of a wider dtype than was asked for: rounded to it",
    "widened": "probes of a narrower dtype than the pack's: kept exactly, in more bytes",
    "concatenated": (
        "probes that read several layers side by side: no model gives such a state at one site, give it to"
        " score_tokens by hand"
    ),
    "uncalibrated": "probes that calibration.json does not name",
    "calibration_unknown": "entries of calibration.json for no imported probe",
    "unusable": "numbers of the pack's JSON that cannot be: not used",
    "unread": "files that are not .pt (text probes, centroids): not read",
    "elsewhere": (
        "files of weights where this format keeps no probes: not read; move them, or import their folder by itself"
    ),
}


def note_conversions(kinds: Mapping[Node, Kind], dtype: torch.dtype, notes: Notes) -> None:
    """Note probes whose weights are rounded or widened."""
    for node, kind in kinds.items():
        if kind.dtype != dtype:
            narrower = torch.promote_types(kind.dtype, dtype) == dtype
            notes.add(
                "widened" if narrower else "rounded", f"{key_of(node)} ({kind.dtype} to {dtype})".replace("torch.", "")
            )


def count_probes(
    n_probes: int, stored: Mapping[Node, Stored], kinds: Mapping[Node, Kind], n_edges: int, n_calibrated: int
) -> dict[str, Any]:
    variants = Counter(kind.variant for kind in kinds.values())
    dtypes = Counter(kind.dtype for kind in kinds.values())
    return {
        "probes": n_probes,
        "files": len({place.path for place in stored.values()}),
        "edges": n_edges,
        **{f"{variant} probes": n for variant, n in variants.items()},
        **{f"in {str(dtype).removeprefix('torch.')}": n for dtype, n in dtypes.items()},
        **({"calibrated": n_calibrated} if n_calibrated else {}),
    }


def unreached(placed: Mapping[Node, PlacedNode], base: Sequence[int]) -> str:
    """Return a warning of unreachable probes, or ""."""
    lost = [node for node, place in placed.items() if not place.reachable]
    if not lost:
        return ""
    example = ", ".join(key_of(node) for node in sorted(lost, key=lambda node: (node[1], node[0]))[:3])
    return (
        f"{len(lost):,} of {len(placed):,} probes are never scored ({example}{', ...' if len(lost) > 3 else ''}): no"
        f" edge leads to them from level {base[0]}. To have them scored, name their levels in base_layers, make them"
        " always on (the pack's card has the lines), or import again with the hierarchy that has them (--hierarchy"
        " FILE) or with --flat"
    )


def origin_of(info: Mapping[str, Any]) -> dict[str, Any]:
    fields = (
        "source_pack",
        "pack_version",
        "probe_pack_id",
        "lens_pack_id",
        "version",
        "model",
        "model_info",
        "concept_pack",
        "trained_layers",
        "training_config",
        "training_info",
    )
    return {key: info[key] for key in fields if key in info}


def card_text(
    name: str, report: ImportReport, placed: Mapping[Node, PlacedNode], worst: float, model: str | None, licence: str
) -> str:
    lost = sum(not place.reachable for place in placed.values())
    lines = [
        f"# {name}",
        "",
        f"{report.counts['probes']:,} concept probes, imported. Model: {model or 'not stated'}. Licence: {licence}.",
        "",
        (
            f"On {N_STATES} random states the scores are within {worst:.2g} of those of the state dicts as they were"
            " saved, evaluated in fp32."
        ),
        "",
        (
            "No alert thresholds are set: what the source records of its calibration (kept in `concepts.jsonl`) does"
            " not say which threshold gives which rate of false alarms."
        ),
        "`probemon calibrate` sets them. Quality was not measured.",
    ]
    if lost:
        lines += [
            "",
            "## Not reached",
            "",
            (
                f"{lost:,} of the concepts have no path from the base level, so a descent never reaches them and a"
                " token's silence says nothing of them; its coverage counts them as `not_reached`. Those that are"
                " roots can be made always on, at their cost, and bring what is below them:"
            ),
            "",
            "```python",
            'orphans = [c["id"] for c in pack.concepts if c.get("reachable") is False and not c["parents"]]',
            (
                "manager = DynamicProbeManager(pack, always_on=orphans,"
                ' max_loaded_probes=pack.recommended.get("max_loaded_probes", 500) + len(orphans))'
            ),
            "```",
        ]
    return "\n".join(lines) + "\n" + report.section()

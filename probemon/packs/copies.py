"""Packs derived from other packs: contents, provenance and card.

spec = spec_of(pack, probes)                # arguments of PackWriter
copy_pack(pack, "mine/", "Renamed from", made_by("rename", [pack]), name="mine")
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from probemon.core.hierarchy import Ints
from probemon.packs.manifest import PROBES
from probemon.packs.pack import ProbePack
from probemon.packs.writer import PackWriter

# Figures that depend on the alert thresholds.
_AT_THRESHOLD = (
    "false_positive_rate",
    "false_positive_rate_all_tokens",
    "recall_at_threshold",
    "precision_at_threshold",
    "fired_per_token",
    "firing_recall_exact",
    "share_evaluated_exact",
    "n_fired",
    "n_fired_changed",
    "running_text",
    "background_fires",
    # of trained concepts
    "alert",
    "alert_of_texts",
    "found",
    "found_in_text",
    "near_over",
    "precision",
)
JUDGED_BY = "alert_threshold_of"  # key of a concept: the basis of its threshold


def quality_of(pack: ProbePack) -> dict[str, Any]:
    """Return the manifest's quality, without figures for thresholds that are not in force."""
    quality = dict(pack.manifest.get("quality") or {})
    if not _of_another(pack):
        return quality
    quality = without_thresholds(quality)
    quality.pop("expansion", None)
    if quality.get("alerts"):
        quality["alerts"] = {name: rates for name, rates in quality["alerts"].items() if name != "each"}
    return quality


def _of_another(pack: ProbePack) -> bool:
    """True if the thresholds in force are not those of the files."""
    return pack.edited or pack.alert_set != pack.manifest.get("alert_set")


def without_thresholds(quality: Mapping[str, Any]) -> dict[str, Any]:
    """Return it without figures for the thresholds in force; named sets stay."""
    return {
        key: without_thresholds(value) if isinstance(value, Mapping) and key != "alert_sets" else value
        for key, value in quality.items()
        if key not in _AT_THRESHOLD
    }


def concepts_of(
    pack: ProbePack, probes: Ints | None = None, *, recalibrated: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return the lines of `probes` (None: all), without notes on outdated or `recalibrated` thresholds."""
    other_thresholds = _of_another(pack)
    return [
        {
            key: value
            for key, value in pack.concepts[probe].items()
            if key != JUDGED_BY or not (other_thresholds or probe in recalibrated)
        }
        for probe in (range(pack.n_probes) if probes is None else probes.tolist())
    ]


def spec_of(pack: ProbePack, probes: Ints | None = None) -> dict[str, Any]:
    """Return the arguments of `PackWriter`, without `card`, `provenance` and `quality`."""
    at = slice(None) if probes is None else torch.from_numpy(probes)
    expand, recommended = pack.descent()
    return {
        "name": pack.name,
        "concepts": concepts_of(pack, probes),
        "architecture": pack.architecture,
        "dtype": pack.dtype,
        "score_rule": pack.score_rule,
        "scope": pack.scope,
        "inputs": [spec.as_dict() for spec in pack.inputs],
        "host": pack.manifest["host"],
        "licence": pack.manifest["licence"],
        "input_index": pack.input_index[at],
        "softmax_group": pack.softmax_group[at],
        "alert_threshold": pack.alert_threshold[at],
        "expand_threshold": expand[at],
        "aggregated": {name: pack.thresholds_for(name)[at] for name in pack.aggregated},
        "alert_set": pack.alert_set,
        "alert_sets": {name: thresholds[at] for name, thresholds in pack.other_alert_sets().items()},
        "score_counts": {name: pack.score_counts(name)[at] for name in pack.counted},
        "familiar": pack.familiar,
        "golden_hidden": pack.golden_hidden,
        "recommended": recommended,
    }


def copy_pack(
    pack: ProbePack,
    path: str | Path,
    how: str,
    provenance: Mapping[str, Any],
    *,
    probes: Ints | None = None,
    **changes: Any,
) -> ProbePack:
    """Write `probes` (None: all) as another pack and open it.

    `how`: begins the card; `changes`: other arguments of `PackWriter`
    """
    spec = {**spec_of(pack, probes), **changes}
    with PackWriter(path, **spec, card=card_of(spec["name"], how, [pack]), provenance=provenance) as writer:
        for start, block in pack.blocks(probes):
            writer.put_slice(start, block)
    return ProbePack.of(writer.opened)


def made_by(operation: str, packs: Sequence[ProbePack], **how: Any) -> dict[str, Any]:
    """Return the provenance of a derived pack."""
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


def card_of(name: str, how: str, packs: Sequence[ProbePack]) -> str:
    """Return a card that includes the parents' cards."""
    parents = "\n".join(
        f"- `{pack.name}`, {pack.n_probes} probes, sha256 of its weights {pack.manifest['files'][PROBES]['sha256']}"
        for pack in packs
    )
    cards = "".join(
        f"\n---\n\nThe card of what it was made of; its figures are those of that pack.\n\n{pack.card_text()}"
        for pack in packs
        if pack.card is not None
    )
    return f"# {name}\n\n{how}:\n\n{parents}\n{cards}"


def always_on(
    pack: ProbePack, kept: Collection[str] | None = None, *, new_ids: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return `{"always_on": ids}` if the pack recommends any, only of `kept` concepts, renamed by `new_ids`."""
    if "always_on" not in pack.recommended:
        return {}
    ids = [pack.concepts[pack.find(concept)]["id"] for concept in pack.recommended["always_on"]]
    return {"always_on": [(new_ids or {}).get(concept, concept) for concept in ids if kept is None or concept in kept]}


def some_of(names: Sequence[str], shown: int = 5) -> str:
    """Return the first names and the number of others."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")

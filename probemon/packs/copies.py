"""Packs made of other packs: what a copy keeps, and what it says of where it came from.

spec = spec_of(pack, probes)                # of some probes, as PackWriter takes it
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

# What a pack says of itself that holds at its alert thresholds alone: not said of a pack with others.
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
    # Of a concept that was trained.
    "alert",
    "alert_of_texts",
    "precision",
)
JUDGED_BY = "alert_threshold_of"  # in a concept's line: on what its threshold rests


def quality_of(pack: ProbePack) -> dict[str, Any]:
    """Return what the pack's manifest says was measured, without what was measured at other alert thresholds than those
    in force.
    """
    quality = dict(pack.manifest.get("quality") or {})
    if not _of_another(pack):
        return quality
    quality = without_thresholds(quality)
    quality.pop("expansion", None)
    if quality.get("alerts"):
        quality["alerts"] = {name: rates for name, rates in quality["alerts"].items() if name != "each"}
    return quality


def _of_another(pack: ProbePack) -> bool:
    """Whether other alert thresholds are in force than those of which the pack's files speak."""
    return pack.edited or pack.alert_set != pack.manifest.get("alert_set")


def without_thresholds(quality: Mapping[str, Any]) -> dict[str, Any]:
    """Return it without what was measured at the alert thresholds in force, at any depth. What is said of a set of
    thresholds by its name stays.
    """
    return {
        key: without_thresholds(value) if isinstance(value, Mapping) and key != "alert_sets" else value
        for key, value in quality.items()
        if key not in _AT_THRESHOLD
    }


def concepts_of(
    pack: ProbePack, probes: Ints | None = None, *, recalibrated: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return the lines of some `probes` (all), without what is said of thresholds that are not in force: those of the
    `recalibrated` are new, and so are all of a set that the pack does not recommend.
    """
    of_another = _of_another(pack)
    return [
        {
            key: value
            for key, value in pack.concepts[probe].items()
            if key != JUDGED_BY or not (of_another or probe in recalibrated)
        }
        for probe in (range(pack.n_probes) if probes is None else probes.tolist())
    ]


def spec_of(pack: ProbePack, probes: Ints | None = None) -> dict[str, Any]:
    """Return what `PackWriter` takes for some `probes` of a pack (all), without `card`, `provenance` and `quality`."""
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
    """Write some `probes` of a pack (all) as another pack, and open it.

    `how` begins its card; `changes`: what `PackWriter` takes, where it is another than the pack's.
    """
    spec = {**spec_of(pack, probes), **changes}
    with PackWriter(path, **spec, card=card_of(spec["name"], how, [pack]), provenance=provenance) as writer:
        for start, block in pack.blocks(probes):
            writer.put_slice(start, block)
    return ProbePack.of(writer.opened)


def made_by(operation: str, packs: Sequence[ProbePack], **how: Any) -> dict[str, Any]:
    """Return the provenance of a pack that was made of others: each with its name, hash, provenance and quality."""
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
    """Return a card that says what a pack was made of, with the cards of these packs below."""
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
    """Return `{"always_on": ids}` of the concepts `kept` (all), where the pack recommends any, by their `new_ids`.

    Ids, since what a pack names by number or name is another concept in another pack.
    """
    if "always_on" not in pack.recommended:
        return {}
    ids = [pack.concepts[pack.find(concept)]["id"] for concept in pack.recommended["always_on"]]
    return {"always_on": [(new_ids or {}).get(concept, concept) for concept in ids if kept is None or concept in kept]}


def some_of(names: Sequence[str], shown: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")

"""Writes a new version of a pack with calibrated thresholds.

calibrated = write_calibrated(pack, "my-pack-calibrated", watched=[17, 20], alerts=alerts)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Each
from probemon.core.drift_reference import DriftReference
from probemon.core.request_counts import RequestCounts
from probemon.core.score_rules import follows_path
from probemon.core.scores import Floats
from probemon.errors import ConfigError
from probemon.lab.calibration.calibrate import CalibratedAlerts
from probemon.lab.calibration.expansion import Expansion
from probemon.lab.calibration.score_statistics import ScoreStatistics
from probemon.packs.copies import concepts_of, quality_of, without_thresholds
from probemon.packs.manifest import PROBES
from probemon.packs.opened import bounds_for, lowest_alert
from probemon.packs.pack import ProbePack
from probemon.packs.writer import PackWriter
from probemon.util.counted import counted


def write_calibrated(
    pack: ProbePack,
    path: str | Path,
    *,
    watched: Sequence[int] = (),
    alerts: CalibratedAlerts | None = None,
    expansion: Expansion | None = None,
    statistics: ScoreStatistics | None = None,
    inputs: Mapping[str, Any] | None = None,
    drift: Callable[[Floats], RequestCounts] | None = None,
    host: Mapping[str, str] | None = None,
    stated: Mapping[str, Any] | None = None,
    chat_date: str | None = None,
) -> ProbePack:
    """Write a new version of a pack and open it. Raises `PackError`, `ConfigError`.

    - `path`: must not exist.
    - `alerts`: thresholds of the probes `watched`, in order.
    - `expansion`: None clears expand thresholds of other alert thresholds.
    - `inputs`: description of the documents, for the record.
    - `drift`, `host`: drift reference: request counts by alert thresholds `[P]`, and `probemon.host.identity`.
    - `stated`: the model's manifest entry; added to the pack's if the weights are the same or unknown.
    """
    if alerts is None and expansion is None and statistics is None:
        raise ConfigError("there is nothing to write: give alerts, an expansion, or statistics")
    if alerts is not None and len(watched) != len(alerts.threshold):
        raise ConfigError(
            f"{len(watched)} probes are watched, the thresholds are of {len(alerts.threshold)}: give the same, in the"
            " same order"
        )
    if wrong := [probe for probe in watched if probe in pack.bounding]:
        raise ConfigError(
            f"{pack.concepts[wrong[0]]['id']!r} is a bounding probe, which is not a concept and never fires: leave"
            " those out of watched"
        )
    source, (expand, recommended) = pack.manifest, pack.descent()
    recommended = dict(recommended)
    alert, aggregated = pack.alert_threshold.clone(), {name: pack.thresholds_for(name) for name in pack.aggregated}
    quality = quality_of(pack)
    changes = alerts is not None and alerts.aggregator == Each()
    if alerts is not None:
        target = alert if changes else torch.full_like(alert, float("nan"))
        if str(alerts.aggregator) in aggregated:
            target = aggregated[str(alerts.aggregator)].clone()
        target[list(watched)] = torch.from_numpy(alerts.threshold)
        if changes:
            quality = without_thresholds(quality)
            _forget_others(aggregated, watched, quality.get("alerts") or {})
        else:
            aggregated[str(alerts.aggregator)] = target
        quality["alerts"] = _alert_quality(pack, quality.get("alerts") or {}, watched, alerts)
    if alerts is not None and pack.bounding:
        expand = bounds_for(pack, lowest_alert(alert, aggregated))
    cleared = changes and expansion is None and not pack.bounding and not bool(expand.isnan().all())
    if cleared:
        expand = torch.full_like(expand, float("nan"))
        quality.pop("expansion", None)
        if recommended.get("load_threshold") == "calibrated":
            del recommended["load_threshold"]
    if expansion is not None:
        expand = torch.from_numpy(expansion.expand_threshold)
        quality["expansion"] = expansion.stated()
        if not _is_exact(pack, lowest_alert(alert, aggregated), recommended):
            recommended["load_threshold"] = "calibrated"
    entry = {
        **({} if alerts is None else alerts.stated()),
        "watched": [pack.concepts[probe]["id"] for probe in watched] if alerts is not None else [],
        "expansion": None if expansion is None else expansion.stated(),
        "expand_thresholds_cleared": cleared,
        **({} if statistics is None else {"statistics": statistics.stated()}),
        "inputs": dict(inputs or {}),
        "source": {"name": pack.name, "sha256": source["files"][PROBES]["sha256"]},
        "versions": {"probemon": version("probemon"), "torch": torch.__version__, "numpy": np.__version__},
    }
    sets = _alert_sets(pack, changes)
    reference = None
    if drift is not None:
        ids, every = tuple(concept["id"] for concept in pack.concepts), np.arange(pack.n_probes)
        counts = drift(alert.numpy())
        reference = DriftReference(ids, every, tuple(pack.sites), counts, host or {}, {}, sets["alert_set"])
    provenance = dict(source.get("provenance") or {})
    provenance["calibrations"] = [*(provenance.get("calibrations") or []), entry]
    if chat_date is not None:
        provenance.setdefault("chat_date", chat_date)
    with PackWriter(
        path,
        name=pack.name if pack.name.endswith("-calibrated") else f"{pack.name}-calibrated",
        concepts=_with_precision(pack, watched) if changes else concepts_of(pack),
        architecture=pack.architecture,
        dtype=pack.dtype,
        score_rule=pack.score_rule,
        scope=pack.scope,
        inputs=[spec.as_dict() for spec in pack.inputs],
        host=_host(source["host"], stated),
        licence=source["licence"],
        card=pack.card_text() + _note(alerts, expansion, statistics, changes, cleared, inputs or {}),
        input_index=pack.input_index,
        softmax_group=pack.softmax_group,
        alert_threshold=alert,
        expand_threshold=expand,
        aggregated=aggregated,
        score_counts=_counts_of(pack) if statistics is None else statistics.beside(pack),
        **sets,
        drift=reference,
        familiar=pack.familiar,
        golden_hidden=pack.golden_hidden,
        recommended=recommended,
        provenance=provenance,
        quality=quality,
    ) as writer:
        for start, block in pack.blocks():
            writer.put_slice(start, block)
    return ProbePack.of(writer.opened)


def _host(recorded: Mapping[str, Any], stated: Mapping[str, Any] | None) -> dict[str, Any]:
    if stated is None or recorded.get("fingerprint") not in (None, stated["fingerprint"]):
        return dict(recorded)
    if recorded.get("fingerprint") is None:  # such as an imported pack
        return {**stated, **{name: value for name, value in recorded.items() if value is not None}}
    same = (recorded.get("adapters") or []) == stated.get("adapters", [])
    addable = ("settings", *(["adapter_weights"] if same else []))
    return {**{name: stated[name] for name in addable if name in stated}, **recorded}


def _forget_others(aggregated: dict[str, Tensor], watched: Sequence[int], calibrated: Mapping[str, Any]) -> None:
    """Drop uncalibrated thresholds for running scores of concepts with new alert thresholds."""
    for name in [name for name in aggregated if name not in calibrated]:
        thresholds = aggregated[name].clone()
        thresholds[list(watched)] = float("nan")
        aggregated[name] = thresholds
        if bool(thresholds.isnan().all()):
            del aggregated[name]


def _alert_sets(pack: ProbePack, changes: bool) -> dict[str, Any]:
    """New single-token thresholds become the set "calibrated"."""
    if not changes or pack.alert_set is None:
        return {"alert_set": pack.alert_set, "alert_sets": pack.other_alert_sets()}
    before = {pack.alert_set: pack.alert_threshold, **pack.other_alert_sets()}
    before.pop("calibrated", None)  # an earlier calibration is replaced
    return {"alert_set": "calibrated", "alert_sets": before}


def _with_precision(pack: ProbePack, watched: Sequence[int]) -> list[dict[str, Any]]:
    lines = []
    for probe, concept in enumerate(concepts_of(pack, recalibrated=watched)):
        stored = concept.get("precision")
        if pack.alert_set and isinstance(stored, dict):
            by_set = {name: value for name, value in stored.items() if name != "calibrated"}
            precision = pack.precision(probe)
            if probe not in watched and not math.isnan(precision):
                by_set["calibrated"] = precision
            concept = {**concept, "precision": by_set}
        lines.append(concept)
    return lines


def _is_exact(pack: ProbePack, alert: torch.Tensor, recommended: Mapping[str, Any]) -> bool:
    """Whether the pack's own descent finds every firing probe; a calibrated one would lose some."""
    return (
        follows_path(pack.score_rule)
        and not bool(alert.isnan().any())
        and recommended.get("load_threshold", "exact") == "exact"
    )


def _alert_quality(
    pack: ProbePack, before: Mapping[str, Any], watched: Sequence[int], alerts: CalibratedAlerts
) -> dict[str, Any]:
    name = str(alerts.aggregator)
    concepts = dict((before.get(name) or {}).get("concepts") or {})
    settings = {"unit": alerts.unit, "fpr": alerts.fpr, "confidence": alerts.confidence, "n_watched": len(watched)}
    concepts |= {pack.concepts[probe]["id"]: {**alerts.entry(i), **settings} for i, probe in enumerate(watched)}
    any_rates = {"any_token": alerts.any_token.entry(0), "any_document": alerts.any_document.entry(0)}
    return {**before, name: {**any_rates, "concepts": concepts}}


def _counts_of(pack: ProbePack) -> dict[str, Tensor]:
    return {name: pack.score_counts(name) for name in pack.counted}


def _note(
    alerts: CalibratedAlerts | None,
    expansion: Expansion | None,
    statistics: ScoreStatistics | None,
    changes: bool,
    cleared: bool,
    inputs: Mapping[str, Any],
) -> str:
    lines = ["", "## Calibration", ""]
    if alerts is not None:
        as_if = " if tokens were independent, which those of one document are not" if alerts.unit == "token" else ""
        target = "single tokens" if changes else f"`{alerts.aggregator}`"
        lines.append(
            f"Alert thresholds of {len(alerts.threshold)} concepts for {target}: a false-positive rate of at most"
            f" {alerts.fpr:g} by {alerts.unit}, with probability {alerts.confidence:g} for all of them together{as_if},"
            f" from {alerts.n_tokens} benign tokens in {alerts.n_documents} documents."
        )
    if changes:
        lines.append(
            "All other figures of this card that depend on alert thresholds are those of the thresholds before."
        )
    if cleared:
        lines.append("Expand thresholds were calibrated for the thresholds before and are cleared.")
    if expansion is not None:
        lines.append(expansion.sentence())
    if statistics is not None:
        lines.append(statistics.sentence())
    if left_out := _left_out(inputs):
        lines.append(left_out)
    return "\n".join(lines) + "\n"


def _left_out(inputs: Mapping[str, Any]) -> str:
    counts = []
    for kind in ("benign", "positive"):
        summary = inputs.get(kind)
        if isinstance(summary, Mapping) and (n := summary.get("n_bad", 0) + summary.get("n_unseen", 0)):
            counts.append(counted(n, f"{kind} document"))
    return f"Left out, since they could not be scored: {' and '.join(counts)}." if counts else ""

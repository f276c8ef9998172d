"""The command inspect.

probemon inspect demo
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.cli import options as opt
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.util.checks import is_number
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.packs.pack import ProbePack

_PER_LEVEL = ("auroc_median", "auroc_p10", "auroc_siblings_median", "auroc_examples_median")
_OVERALL = {
    "AUROC": {
        "auroc_median": "median",
        "auroc_p10": "tenth percentile",
        "auroc_siblings_median": "median against siblings",
        "auroc_examples_median": "median in examples",
        "n_test": "states tested",
    },
    "at the alert thresholds, on its test states": {
        "precision_at_threshold": "precision",
        "recall_at_threshold": "recall",
        "false_positive_rate": "false-positive rate",
    },
    "exact descent": {
        "firing_recall_exact": "share of what fires that it finds",
        "share_evaluated_exact": "share of the probes that it evaluates",
    },
}
_MEANS = {
    "auroc_siblings_median": "siblings: against words of the concepts with the same parent",
    "auroc_examples_median": "examples: in sentences that show how a word is used",
}


def inspect(pack: opt.Pack, as_json: opt.AsJson = False) -> None:
    """Show what is in PACK, how good it is, and whether it is whole (every hash, every weight, the golden scores)."""
    from probemon.packs.pack import ProbePack

    opened = ProbePack.from_pretrained(pack, verify=True)
    if as_json:
        answer(_as_dict(opened))
    else:
        _show(opened)


def _calibrations(pack: ProbePack) -> list[dict[str, Any]]:
    return (pack.manifest.get("provenance") or {}).get("calibrations") or []


def _groups(pack: ProbePack) -> list[list[str]]:
    groups = pack.tree.groups
    parts = np.split(groups.members, groups.ptr[1:-1]) if len(groups) else []
    return [[pack.concepts[probe]["id"] for probe in part.tolist()] for part in parts]


def _of(quality: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    return [
        f"{words} {quality[name]:.3g}" if isinstance(quality[name], float) else f"{words} {quality[name]}"
        for name, words in names.items()
        if isinstance(quality.get(name), (int, float))
    ]


def _rounded(errors: Mapping[str, Any]) -> str:
    moved = ", ".join(_of(errors, {"max_score_error": "at most", "mean_score_error": "on average"}))
    return f"which moved scores ({moved})" if moved else "by how much is not stated"


def _as_dict(pack: ProbePack) -> dict[str, Any]:
    manifest = pack.manifest
    return {
        "name": pack.name,
        "directory": str(pack.directory),
        "licence": manifest["licence"],
        "host": manifest["host"],
        "n_probes": pack.n_probes,
        "architecture": str(pack.architecture),
        "dtype": manifest.get("dtype"),
        "weight_bytes": pack.weight_bytes(),
        "score_rule": pack.score_rule,
        "scope": pack.scope,
        "softmax_groups": _groups(pack),
        "inputs": manifest["inputs"],
        "counts_per_level": manifest.get("counts_per_level"),
        "recommended": pack.recommended,
        "alert_set": pack.alert_set,
        "alert_sets": list(pack.alert_sets),
        "aggregated_thresholds": {name: int((~pack.thresholds_for(name).isnan()).sum()) for name in pack.aggregated},
        "counted_scores": {name: int(pack.score_counts(name).sum(1).max()) for name in pack.counted},
        "calibrations": _calibrations(pack),
        "n_alert_thresholds": int((~pack.alert_threshold.isnan()).sum()),
        "quality": manifest.get("quality") or None,
        "whole": True,
        "golden_states": 0 if pack.golden_hidden is None else len(pack.golden_hidden),
        "golden_error": pack.golden_error,
    }


def _show(pack: ProbePack) -> None:
    from probemon.core.probes import is_recurrent  # imports torch

    manifest, host = pack.manifest, pack.manifest["host"]
    say(
        f"{pack.name}  {counted(pack.n_probes, 'probe')}, {pack.architecture}, {manifest.get('dtype')},"
        f" {pack.weight_bytes() / 1e6:.2f} MB, {pack.score_rule} scores"
        f"{'' if pack.scope == 'here' else ' of all tokens so far'}"
    )
    n_layers = f"{host['n_layers']} layers, " if host.get("n_layers") is not None else ""
    size = pack.architecture.hidden_size
    width = f"{size} values a token" if any(map(is_recurrent, pack.sites)) else f"hidden size {size}"
    say(
        f"for {host.get('model_id') or 'a model that is not stated'} ({n_layers}{width}), read at"
        f" {', '.join(pack.sites)}; licence: {manifest['licence']}"
    )
    _show_levels(pack)
    groups = _groups(pack)
    if groups:
        first = f"{groups[0][0]} and {len(groups[0]) - 1} more"
        say(
            f"{counted(sum(map(len, groups)), 'probe')} in {counted(len(groups), 'softmax group')} ({first},"
            " for example): within each, scores add up to 1"
        )
    quality = manifest.get("quality") or {}
    figures = [f"{about}: {', '.join(values)}" for about, names in _OVERALL.items() if (values := _of(quality, names))]
    trained = quality.get("concepts")
    trained_concepts = trained.values() if isinstance(trained, dict) else ()
    areas = [one["auroc"] for one in trained_concepts if isinstance(one, dict) and is_number(one.get("auroc"))]
    if areas and not figures:
        figures = [
            f"AUROC of {counted(len(areas), 'concept')} on texts that a probe did not see: median {median(areas):.3f},"
            f" least {min(areas):.3f}"
        ]
    rounded = quality.get("int8")
    before_rounding = (
        f" of the weights before they were rounded, {_rounded(rounded)}" if isinstance(rounded, dict) else ""
    )
    say(f"quality{before_rounding}: {'; '.join(figures) or 'not stated'}")
    if pack.alert_sets:
        others = f"; also {', '.join(pack.alert_sets[1:])}" if pack.alert_sets[1:] else ""
        say(f"alert thresholds: {pack.alert_sets[0]}, which it recommends{others}")
    if pack.counted:
        say(f"it says how its concepts score on ordinary text, by {', '.join(pack.counted)} (rules: z:pack, rank:pack)")
    for entry in _calibrations(pack):
        what = (
            f"alerts on {entry['aggregator']} of {counted(entry['n_watched'], 'concept')} to"
            f" {entry['fpr']:g} by {entry['unit']}"
            if "aggregator" in entry
            else "no alerts"
        )
        reach = f"; expansion to a recall of {entry['expansion']['recall']:g}" if entry.get("expansion") else ""
        say(f"calibrated from {entry['source']['name']}: {what}{reach}")
    worst = pack.golden_error
    golden = "it records no scores to compare with"
    if worst is not None:
        golden = f"its recorded scores come out {f'within {worst:.1g}' if worst else 'the same to the last bit'}"
    say(f"whole: every file has its hash, every weight is finite, {golden}")


def _show_levels(pack: ProbePack) -> None:
    quality = (pack.manifest.get("quality") or {}).get("per_level") or {}
    names = [key for key in _PER_LEVEL if any(key in level for level in quality.values())]
    table = plain_table(title="AUROC on held-out words" if names else None, title_justify="left")
    for name in ("level", "probes", *names):
        label = "median" if name == "auroc_median" else name.removeprefix("auroc_").removesuffix("_median")
        table.add_column(label, justify="right", min_width=max(5, len(label)))
    table.add_column("for example", no_wrap=True, overflow="ellipsis", ratio=1)
    for level in np.unique(pack.tree.level).tolist():
        probes = np.flatnonzero(pack.tree.level == level).tolist()
        values = [quality.get(str(level), {}).get(name) for name in names]
        example = ", ".join(pack.concepts[probe]["name"] for probe in probes[:3])
        table.add_row(str(level), str(len(probes)), *("-" if v is None else f"{v:.3f}" for v in values), example)
    terminal().print(table)
    if explained := [_MEANS[name] for name in names if name in _MEANS]:
        say(f"{'; '.join(explained)}.")

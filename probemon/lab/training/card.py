"""The card of a trained pack: what it finds, how often it errs, what is not known.

text = card("mails", data, quality, settings, "HuggingFaceTB/SmolLM2-135M-Instruct")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probemon.core.aggregate import RollingLogit, named
from probemon.lab.calibration.calibrate import units_needed
from probemon.lab.training.baselines import BASELINES
from probemon.lab.training.calibration import PRECISION
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.evaluation import area_interval
from probemon.lab.training.measured import OTHER_RATES
from probemon.lab.training.rates import CONFIDENCE
from probemon.lab.training.settings import TrainingSettings
from probemon.packs.strength import in_short

_SHOWN = 50
_UNLIKE = 3  # contradictory concepts to name
_KINDS = 12  # concepts in the table by kind
_AREA_WIDTH, _FOUND_WIDTH = 0.05, 0.15  # half intervals that a claim should have
_LOUD = 2.0  # times the stated rate
_LEANS = 0.05  # of AUROC lost without the words that give a concept away
_TELLS = 0.7  # AUROC of length
_EASY = 0.97  # AUROC of words
_TELLING = 3  # alarms of a kind
MERIT = (
    "Merit: the mean, over concepts, of AUROC and of balanced accuracy (what is found, and what near misses do not"
    " exceed, at one alarm in 100 ordinary texts), alone and after other text, out of fold; with its standard error"
    " over folds. Chosen: the simplest within one standard error of the best."
)
Quality = Mapping[str, Any]


def verdict(quality: Quality) -> list[str]:
    """Return the first sentences: what never fires, how often ordinary text alarms, and whether words would do."""
    concepts = quality["concepts"]
    sentences = []
    silent = [id for id, one in concepts.items() if never_fires(one)]
    if silent:
        sentences.append(
            f"{_some(silent)} never fire{'s' if len(silent) == 1 else ''}: at the threshold none of the texts with"
            f" {'it' if len(silent) == 1 else 'them'} is found. Silence says nothing there."
        )
    parted = [id for id, one in concepts.items() if one["under_chance"]]
    parted += [id for id, one in concepts.items() if id not in parted and one["words_under_chance"]]
    if parted:
        sentences.append(
            f"{_some(parted)}: an AUROC is below chance, interval and all. That happens if a text learns and its twin"
            " is judged: give both one `group`, or write them as a pair."
        )
    sentences.append(_of_alarms(quality))
    sentences.append(_of_words(concepts))
    if behind := [id for id, one in concepts.items() if (one["over_mean state"]["high"] or 0) < 0]:
        sentences.append(f"The mean hidden state of a text tells {_some(behind)} better than the probe.")
    elsewhere = {id: one["outside"] for id, one in concepts.items() if "outside" in one}
    if ahead := [id for id, one in elsewhere.items() if (one["over_words"]["low"] or 0) > 0]:
        gap = ", ".join(
            f"`{id}` {elsewhere[id]['auroc']:.2f} against {elsewhere[id]['baselines']['words']['auroc']:.2f}"
            for id in ahead[:3]
        )
        sentences.append(f"On texts from elsewhere the probes hold where words do not: {gap}.")
    if lost := [id for id, one in elsewhere.items() if _finds_less(concepts[id]["found"], one["found"])]:
        gap = ", ".join(f"`{id}` {_share(elsewhere[id]['found'], short=True)}" for id in lost[:3])
        sentences.append(f"They find less there than on your own texts: {gap}.")
    if not elsewhere:
        sentences.append("Nothing was measured on texts of another writer or genre: give some (--test).")
    return sentences


def _finds_less(found: Quality, there: Quality) -> bool:
    """Whether the intervals of two shares do not overlap, the second being lower."""
    return there["high"] is not None and found["low"] is not None and bool(there["high"] < found["low"])


def never_fires(concept: Quality) -> bool:
    """Whether it found none of its own texts."""
    return bool(concept["found"]["n"]) and concept["found"]["count"] == 0 and concept["found_in_text"]["count"] == 0


def _of_alarms(quality: Quality) -> str:
    concepts, tokens = quality["concepts"], quality["ordinary"]["mean_tokens"]
    rates = {id: one["alert_of_texts"] for id, one in concepts.items()}
    worst_id = max(rates, key=lambda id: (rates[id]["rate"], rates[id]["new_kind_high"]))
    worst = rates[worst_id]
    if tokens is None:
        return (
            f"No ordinary text was used: of 100 of your texts without it, {100 * worst['rate']:.1f} raise an alarm of"
            f" `{worst_id}`; what other text does is not known."
        )
    kind, by_kind = worst["worst"], worst["by_kind"]
    at_kind = f", {100 * by_kind[kind]['rate']:.1f} of its worst kind ({kind})" if kind else ""
    new_id = max(rates, key=lambda id: rates[id]["new_kind_high"])
    return (
        f"Of 100 ordinary texts of about {tokens:.0f} tokens, of kinds that the probe never saw,"
        f" {100 * worst['rate']:.1f} raise an alarm of `{worst_id}`{at_kind}"
        f"{'; the other concepts are as quiet or quieter' if len(rates) > 1 else ''}. Of new kinds of text 19 of 20"
        f" stay under {100 * rates[new_id]['new_kind_high']:.1f}{f' (`{new_id}`)' if len(rates) > 1 else ''}; one that"
        " is close to the concept may not. Ordinary text counts as without your concepts. The report shows its"
        " strongest tokens: if they are right, leave out that kind of text (--unknown-in)."
    )


def _of_words(concepts: Quality) -> str:
    behind = [id for id, one in concepts.items() if not beats(one, "words")]
    easy = [id for id in behind if (concepts[id]["baselines"]["words"] or 0) >= _EASY]
    if easy:
        words = ", ".join(f"“{word}”" for word in concepts[easy[0]]["giveaways"][:3])
        return (
            f"Words (TF-IDF) separate your texts of {_some(easy)} as well, such as {words}: texts that easy cannot show"
            " whether a probe is better. Add pairs of which both sides have these words."
        )
    if not behind:
        subject = f"All {len(concepts)} probes are better" if len(concepts) > 1 else "The probe is better"
        return f"{subject} than the words of a text (TF-IDF) at telling texts with a concept from those without."
    verb = "is" if len(behind) == 1 else "are"
    return (
        f"{_some(behind)} {verb} not shown to beat the words of a text (TF-IDF) on your texts: a simpler monitor may do"
        " as well on short ones."
    )


def beats(found: Quality, name: str) -> bool:
    """Whether the interval of a concept's gain over a baseline is above 0."""
    low = found[f"over_{name}"]["low"]
    return low is not None and low > 0


def warnings(quality: Quality) -> list[str]:
    """Return limits of the pack, a sentence each."""
    sentences, concepts = [], quality["concepts"]
    left_out = {name: one["left_out"]["texts"] for name, one in quality["examples"].items() if "left_out" in one}
    if left_out:
        cut = ", ".join(f"{n} of {name}" for name, n in left_out.items())
        sentences.append(f"The budget had no room for all texts ({cut} were left out): give more, or fewer layers.")
    contradictory = list(quality["contradictions"].items())
    sentences += [
        f"{_n(entry['texts'], 'text')} {'is' if entry['texts'] == 1 else 'are'} given with `{id}` and without it"
        f" ({entry['there']} and {entry['absent']} say the same): both are learnt, and nothing can be right on both."
        for id, entry in contradictory[:_UNLIKE]
    ]
    if len(contradictory) > _UNLIKE:
        sentences.append(f"So are texts of {_some([id for id, _ in contradictory[_UNLIKE:]])}.")
    raised: dict[str, list[str]] = {}
    for id, one in concepts.items():
        for kind in one["alert_of_texts"]["raised"]:
            raised.setdefault(kind, []).append(id)
    if raised:
        kinds = "; ".join(f"{kind} ({_some(ids)})" for kind, ids in raised.items())
        sentences.append(f"Thresholds had to rise to keep the rate on some kinds of text: {kinds}.")
    loud = {
        id: [kind for kind, rate in one["alert_of_texts"]["by_kind"].items() if rate["low"] > _LOUD * quality["fpr"]]
        for id, one in concepts.items()
    }
    for id, kinds_of in loud.items():
        if kinds_of:
            sentences.append(f"`{id}` alarms more often than stated on {', '.join(kinds_of)}.")
    near = [id for id, one in concepts.items() if (one["near_over"]["low"] or 0) > 0.25]
    if near:
        sentences.append(
            f"{_some(near)} also fire{'s' if len(near) == 1 else ''} on more than a quarter of your own near misses:"
            " what it tells from ordinary text, it does not tell from these."
        )
    unsure = [id for id, one in concepts.items() if "precision" in one and one["precision"]["fired"] == 0]
    if unsure:
        precision = float(_precise_set(quality).removeprefix(PRECISION))
        texts = _n(units_needed(1 - precision, 1 - CONFIDENCE), "text")
        sentences.append(
            f"No threshold is shown to reach the precision requested for {_some(unsure)}: that set has none for"
            f" {'it' if len(unsure) == 1 else 'them'}, so `{quality['alert_sets'][0]}` is recommended. It takes"
            f" {texts} with a concept that fire, and none without, to show {100 * precision:g} %."
        )
    generated = [id for id, one in concepts.items() if one["n_generated"]]
    if generated:
        sentences.append(
            f"The model wrote {_n(quality['examples']['generated']['texts'], 'text')} to train on, of"
            f" {_some(generated)}: what it makes of a concept may not be what you mean by it. None is judged."
        )
    easy = [id for id, one in concepts.items() if one["beside_ordinary"]]
    if easy:
        sentences.append(
            f"No text of yours is without {_some(easy)}: compared with ordinary text instead, which is easy to"
            " separate, for words, too."
        )
    return sentences


def reads(id: str, concept: Quality) -> str:
    """Return a sentence on what a probe seems to read, by what would do without it."""
    signs, base, words = [], concept["baselines"], ", ".join(f"“{word}”" for word in concept["giveaways"][:4])
    if concept["auroc"] is None or concept["beside_ordinary"]:
        return f"What `{id}` reads is not known: no text of yours is without it."
    auroc = concept["auroc"]
    if words and concept["without_giveaways"] is not None and auroc - concept["without_giveaways"] > _LEANS:
        signs.append(f"words such as {words}, without which it has {concept['without_giveaways']:.2f}")
    elif words and (base["words"] or 0) >= auroc - 0.02:
        signs.append(f"what words tell as well ({words})")
    if max(base["length"] or 0.5, 1 - (base["length"] or 0.5)) > _TELLS:
        signs.append("length: texts with it and without differ in it")
    kind, by_kind = concept["alert_of_texts"]["worst"], concept["alert_of_texts"]["by_kind"]
    if kind and by_kind[kind]["alarms"] >= _TELLING:
        signs.append(f"something that {kind} has, too ({by_kind[kind]['alarms']} of {by_kind[kind]['n']} alarm)")
    if not signs and (concept["low"] or 0) <= 0.5:
        return f"`{id}` hardly tells your texts with it from those without: what it reads is not known."
    if not signs and (base["embedding"] or 0) >= auroc - 0.02:
        return f"`{id}` tells no more than the mean input embedding of a text does."
    if not signs:
        return f"`{id}` shows no sign of reading words, length or kinds of text instead of the concept."
    return f"`{id}` may read {'; '.join(signs)}."


def works(quality: Quality) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of what works."""
    heads = [
        "concept",
        "read by",
        "threshold",
        "finds",
        "after other text",
        "near misses",
        *(f"at {rate:.0%}" for rate in OTHER_RATES),
        "alarms of 100 ordinary texts",
        "worst kind",
    ]
    rows = []
    for id, one in list(quality["concepts"].items())[:_SHOWN]:
        alert = one["alert_of_texts"]
        kind = alert["worst"]
        rows.append(
            [
                _cell(id),
                one["reads"],
                _threshold(alert),
                _share(one["found"]),
                _share(one["found_in_text"], short=True),
                _share(one["near_over"], short=True),
                *(f"{_rate(at['found'])}, {_rate(at['near_over'])}" for at in one["at_rates"]),
                f"{100 * alert['rate']:.1f} (under {100 * alert['high']:.1f})",
                "none" if kind is None else f"{kind}, {100 * alert['by_kind'][kind]['rate']:.1f}",
            ]
        )
    return heads, rows


def needs(quality: Quality) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of how many more texts narrow a claim."""
    heads = ["concept", "texts with it", f"for AUROC ± {_AREA_WIDTH}", f"for what it finds ± {_FOUND_WIDTH:.0%}"]
    rows = []
    for id, one in list(quality["concepts"].items())[:_SHOWN]:
        n, auroc, found = one["n_positive"], one["auroc"], one["found"]["rate"]
        if auroc is None or found is None:
            continue
        area = _until(lambda m, auroc=auroc: _half(*area_interval(auroc, m, m)) <= _AREA_WIDTH, n)  # type: ignore[misc]
        spread = max(found * (1 - found), 0.05)
        share = max(n, round(3.84 * spread / _FOUND_WIDTH**2))
        if area > n or share > n:
            rows.append(
                [_cell(id), str(n), "enough" if area <= n else str(area), "enough" if share <= n else str(share)]
            )
    return heads, rows


def _half(low: float, high: float) -> float:
    return (high - low) / 2


def _until(holds: Any, n: int) -> int:
    """Return the least number from n on, in steps of a tenth, that suffices."""
    while not holds(n):
        n = n + max(1, n // 10)
    return n


def card(name: str, data: Dataset, quality: Quality, settings: TrainingSettings, model_id: str) -> str:
    """Return the card as Markdown."""
    concepts = dict(list(quality["concepts"].items())[:_SHOWN])
    names = {concept.id: _cell(concept.name) for concept in data.concepts}
    lines = [f"# {name}", "", *(line for sentence in verdict(quality) for line in (sentence, ""))]
    sites = ", ".join(sorted({one["site"] for one in concepts.values()}))
    lines += [
        f"{_n(len(data.concepts), 'concept')}{' in a hierarchy' if data.is_tree else ''}, read from {sites} of"
        f" {model_id or 'a model without a name'}; seed {settings.seed}.",
        "",
    ]
    lines += ["## What works", ""]
    lines.append(
        "Every text is judged by probes that saw neither it nor its group or pair, and ordinary text by probes that saw"
        " none of its kind, but for chats in the model's own template; the probes of this pack then learnt from all. A"
        " text's score is the highest running score over its tokens. Thresholds are set so that of ordinary texts"
        f" {quality['fpr']:.1%} exceed them. *Finds*: the share of your texts over the threshold (95 % interval);"
        " *after other text*: of the same that follow an ordinary text; *near misses*: of your texts without the"
        " concept; *at 5 %* (`--fpr 0.05`): what another rate would find, and near misses over it. Alarms on ordinary"
        " text are counted kind by kind, at thresholds set"
        f" without the kind; *under*: with 95 % confidence.{_too_short(quality)}"
    )
    lines += _table(*works(quality))
    lines += [""] + [f"- {warning}" for warning in warnings(quality)]
    lines += ["", "## Beside simpler monitors", ""]
    lines.append(
        "AUROC: how often a text with the concept scores higher than one without, on your texts. *In order*: within a"
        " pair. *Masked*: without the tokens of words that give the concept away. *Shuffled*: labels at random."
    )
    heads = ["concept", "with", "without", "AUROC", "after other text", "in order", *BASELINES, "masked", "shuffled"]
    rows = [
        [
            names[id],
            str(one["n_positive"]),
            str(one["n_negative"]),
            _area(one),
            number(one["carried"]["auroc"]),
            _share(one["pairs_in_order"], short=True),
            *(number(one["baselines"][name]) for name in BASELINES),
            number(one["without_giveaways"]),
            number(one["shuffled"]),
        ]
        for id, one in concepts.items()
    ]
    lines += _table(heads, rows)
    lines += [""] + [f"- {reads(id, one)}" for id, one in concepts.items()]
    if any(one["tokens"] for one in concepts.values()):
        lines += ["", "## Tokens of marked stretches", ""]
        lines.append("AUROC of single tokens: of the stretch against the rest of its text, and against the twin.")
        rows = [
            [
                names[id],
                str(one["tokens"]["inside"]),
                *(number(one["tokens"][key]) for key in ("against_rest", "against_twins")),
            ]
            for id, one in concepts.items()
            if one["tokens"]
        ]
        lines += _table(["concept", "tokens", "against the rest", "against the twin"], rows)
    lines += _kinds(quality, names)
    lines += _tokens(quality, names)
    lines += _elsewhere(concepts, names)
    if len(quality["concepts"]) > len(concepts):
        more = len(quality["concepts"]) - len(concepts)
        lines += ["", f"And {more} more concepts: `quality` in the manifest."]
    lines += ["", "## What was tried", ""]
    lines.append(MERIT)
    lines += _table(
        ["site", "scale", "tokens", "penalty", "merit", "standard error", "concepts"],
        [
            [
                row["site"],
                row["scale"],
                str(row["width"]),
                f"{row['penalty']:g}",
                f"{row['merit']:.3f}",
                f"{row['standard_error']:.3f}",
                str(row["concepts"]),
            ]
            for row in quality["tried"]
        ],
    )
    heads, rows = needs(quality)
    lines += ["", "## How many texts would tell more", ""]
    if rows:
        lines.append("In all, with and without the concept each, for an interval as narrow as the column says.")
        lines += _table(heads, rows)
    else:
        lines.append("No more of the same kind: the intervals are narrow. Texts of other writers and genres tell more.")
    return "\n".join(lines) + "\n"


def _too_short(quality: Quality) -> str:
    """Say which texts a running mean of logits has no score for."""
    read = {named(one["reads"]) for one in quality["concepts"].values()}
    least = {str(one): -(-one.n // 2) for one in sorted(read, key=str) if isinstance(one, RollingLogit)}
    return "".join(f" A text under {n} tokens never fires by `{name}`." for name, n in least.items())


def by_kind(quality: Quality, names: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of alarms by kind of ordinary text, the worst kinds first."""
    concepts = dict(list(quality["concepts"].items())[:_KINDS])
    tables = [one["alert_of_texts"]["by_kind"] for one in concepts.values()]
    kinds = dict.fromkeys(kind for table in tables for kind in table)
    rows, most = [], {}
    for kind in kinds:
        rates = [table.get(kind) for table in tables]  # none if the kind may have the concept
        known = [rate for rate in rates if rate]
        most[kind] = max(rate["alarms"] for rate in known)
        n = str(max(rate["n"] for rate in known))
        rows.append([kind, n, *("–" if rate is None else str(rate["alarms"]) for rate in rates)])
    rows.sort(key=lambda row: -most[row[0]])
    return ["kind", "texts", *(names[id] for id in concepts)], rows


def _kinds(quality: Quality, names: Mapping[str, str]) -> list[str]:
    heads, rows = by_kind(quality, names)
    if not rows:
        return []
    about = "Texts with an alarm, of so many, by probes that saw none of the kind."
    return ["", "## Alarms by kind of ordinary text", "", about, *_table(heads, rows)]


def _tokens(quality: Quality, names: Mapping[str, str]) -> list[str]:
    concepts = dict(list(quality["concepts"].items())[:_SHOWN])
    lines = ["", "## Thresholds of single tokens", ""]
    lines.append(
        f"What a rule without a running score compares with: of the tokens of ordinary text {quality['fpr']:.1%} exceed"
        " it, so most long texts do somewhere. *Texts with it*: those of yours with a token over it."
    )
    rows = []
    for id, one in concepts.items():
        alert = one["alert"]
        kind = alert["worst"]
        rows.append(
            [
                names[id],
                _threshold(alert),
                f"{alert['rate']:.2%} (under {alert['high']:.2%})",
                "none" if kind is None else f"{kind}, {alert['by_kind'][kind]['rate']:.2%}",
                _share(alert["found"], short=True),
            ]
        )
    lines += _table(["concept", "threshold", "of ordinary tokens", "worst kind", "texts with it"], rows)
    if any("precision" in one for one in concepts.values()):
        precise = _precise_set(quality)
        recommended = ", which is recommended" * (quality["alert_sets"][0] == precise)
        lines += [
            "",
            f"The set `{precise}`{recommended}: the lowest of up to eight thresholds over which, with 95 % confidence"
            " for each concept by itself, that share of the tokens that fire is of the concept, in the mix of the texts"
            " given here, which may not be yours.",
        ]
        rows = []
        for id, one in concepts.items():
            entry = one["precision"]
            right = f"{entry['right']} of {entry['fired']}" if entry["fired"] else "not shown to be reached"
            rows.append([names[id], _threshold(entry), right])
        lines += _table(["concept", "threshold", "right of the tokens that fire"], rows)
    return lines


def _elsewhere(concepts: Quality, names: Mapping[str, str]) -> list[str]:
    heads, rows = elsewhere(concepts, names)
    if not rows:
        return []
    about = "Texts that neither trained nor chose anything, and the same monitors on them."
    return ["", "## Elsewhere", "", about, *_table(heads, rows)]


def elsewhere(concepts: Quality, names: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of texts that only tested."""
    outside = {id: one["outside"] for id, one in concepts.items() if "outside" in one}
    rows = [
        [
            names[id],
            str(one["n_positive"]),
            str(one["n_negative"]),
            _area(one),
            _share(one["found"]),
            _share(one["near_over"], short=True),
            *(number(one["baselines"][name]["auroc"]) for name in BASELINES),
        ]
        for id, one in outside.items()
    ]
    return ["concept", "with", "without", "AUROC", "finds", "near misses", *BASELINES], rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "",
        f"| {' | '.join(heads)} |",
        "|---|" + "---:|" * (len(heads) - 1),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _precise_set(quality: Quality) -> str:
    return next(str(name) for name in quality["alert_sets"] if name.startswith(PRECISION))


def _threshold(entry: Quality) -> str:
    return "none" if entry["threshold"] is None else in_short(entry["threshold"], ".4f")


def _area(entry: Quality) -> str:
    if entry["auroc"] is None:
        return "–"
    return f"{entry['auroc']:.3f} ({entry['low']:.3f} to {entry['high']:.3f})"


def _share(entry: Quality, *, short: bool = False) -> str:
    if entry["rate"] is None:
        return "–"
    found = f"{entry['count']} of {entry['n']}"
    return found if short else f"{found} ({entry['low']:.0%} to {entry['high']:.0%})"


def _cell(name: str) -> str:
    return name.replace("|", "\\|")


def _rate(entry: Quality) -> str:
    return "–" if entry["rate"] is None else f"{entry['rate']:.0%}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _some(ids: Sequence[str]) -> str:
    shown = ", ".join(f"`{id}`" for id in ids[:5])
    return shown if len(ids) <= 5 else f"{shown} and {len(ids) - 5} more"


def _n(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"

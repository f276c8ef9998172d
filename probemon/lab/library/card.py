"""The card of a fitted library: what works, what works with a warning, what this model does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from probemon.lab.training.card import verdict, warnings

if TYPE_CHECKING:
    from probemon.lab.library.fit import Bars, Verdict
    from probemon.lab.library.library import Library

Quality = Mapping[str, Any]
HEADS = (
    "concept", "near cases", "words", "mean state", "in order", "ordinary text", "found", "after other text",
    "found there", "threshold", "of 100 ordinary texts",
)  # fmt: skip
GROUPS = {
    "works": ("Works", "Told from ordinary text and from near cases."),
    "warned": (
        "Works with a warning",
        "Told from ordinary text, but hardly from near cases: these will alarm.",
    ),
    "missing": ("Not found on this model", "Not in the pack. *Misses*: the bars that it does not reach."),
}


def library_card(
    name: str, library: Library, quality: Quality, verdicts: Mapping[str, Verdict], bars: Bars, model_id: str
) -> str:
    """Return the card as Markdown."""
    of = {group: [id for id, one in verdicts.items() if one.group == group] for group in GROUPS}
    kept = {id: quality["concepts"][id] for group in ("works", "warned") for id in of[group]}
    own = {**quality, "concepts": kept}
    better = [id for id, found in kept.items() if (found["near"]["over_words"]["low"] or 0) > 0]
    lines = [
        f"# {name}",
        "",
        f"Of {len(verdicts)} concepts {len(of['works'])} work on {model_id or 'this model'}, {len(of['warned'])} work"
        f" with a warning, and {len(of['missing'])} are not found. {len(better)} are better than words (TF-IDF) at"
        " telling their near cases apart, by more than the interval.",
        "",
        *(line for sentence in verdict(own) for line in (sentence, "")),
        "The texts were written for this by language models, not taken from use: written examples, not observed cases."
        f" Library {library.about['name']}, version {library.about['version']}.",
        "",
        "Every text is judged by probes that saw neither it nor its pair, and ordinary text by probes that saw none "
        "of its kind. *Near cases*: AUROC against texts without it that were written beside it; *words* and *mean "
        "state*: the same of simpler monitors. *In order*: pairs in which the text with the concept scores higher. "
        "*Ordinary text*: AUROC against ordinary texts; *found*: texts over the threshold of one alarm in 100 ordinary "
        "texts. *After other text*: AUROC of texts that follow an ordinary text, against ordinary texts. In brackets: "
        "95 % intervals.",
    ]
    for group, (title, about) in GROUPS.items():
        if of[group]:
            heads, rows = table(quality, verdicts, of[group])
            lines += [
                "",
                f"## {title}",
                "",
                about,
                "",
                f"| {' | '.join(heads)} |",
                "|---|" + "---:|" * (len(heads) - 1),
            ]
            lines += [f"| {' | '.join(row)} |" for row in rows]
    added = [(id, found["added"]) for id, found in quality["concepts"].items() if found.get("added")]
    if added:
        lines += ["", "## Your texts", "", "Found of the texts that you added, by probes that did not see them.", ""]
        lines += [f"- `{id}`: {found['count']} of {found['n']}" for id, found in added]
    lines += ["", "## Limits", "", *(f"- {sentence}" for sentence in warnings(own))]
    lines += [
        "",
        f"Bars: {bars.ordinary:.2f} against ordinary text, {bars.found:.0%} found, {bars.long:.2f} in other text,"
        f" {bars.near:.2f} against near cases ({bars.warned:.2f} with a warning).",
    ]
    return "\n".join(lines) + "\n"


def table(quality: Quality, verdicts: Mapping[str, Verdict], ids: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of these concepts."""
    missing = any(verdicts[id].group == "missing" for id in ids)
    rows = []
    for id in ids:
        found = quality["concepts"][id]
        near, alert = found["near"], found["alert_of_texts"]
        base = near["baselines"]
        rows.append(
            [
                id,
                _area(near),
                _number(base["words"]),
                _number(base["mean state"]),
                _share(found["pairs_in_order"]),
                _area(found["against_ordinary"]),
                _share(found["found"]),
                _area(found["carried_against_ordinary"]),
                _share(found["found_in_text"]),
                *([", ".join(verdicts[id].reasons)] if missing else _alarms(alert)),
            ]
        )
    return [*HEADS[:-2], "misses"] if missing else list(HEADS), rows


def _alarms(alert: Quality) -> list[str]:
    threshold = "none" if alert["threshold"] is None else f"{alert['threshold']:.3f}"
    kind = alert["worst"]
    worst = "" if kind is None else f"; {kind} {100 * alert['by_kind'][kind]['rate']:.0f}"
    return [threshold, f"{100 * alert['rate']:.1f}{worst}"]


def _area(found: Quality) -> str:
    return "–" if found["auroc"] is None else f"{found['auroc']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(found: Quality) -> str:
    return "–" if found["rate"] is None else f"{found['count']} of {found['n']}"

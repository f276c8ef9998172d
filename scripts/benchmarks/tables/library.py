"""Tables of docs/library.md."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

CLAIMS = {
    "cpu_minutes": ("CPU minutes to fit all concepts to the demo model", "at most {:.0f}"),
    "ships": ("concepts that hold on it, of 98", "at least {:.0f}"),
    "near_on_tests": ("of these that tell their tests from near cases, AUROC .60", "at least {:.0f}"),
    "over_words": (
        "of these better than words by more than the interval, on near cases or one sentence in a long text",
        "at least {:.0f}",
    ),
    "alarms_as_stated": (
        "share of cells of concept and real kind of text with alarms as the card states",
        "at least {}",
    ),
    "precision": ("what `watch demo` shows: right, of what readers judged", "at least {}"),
    "untold": ("of these told by no word of the sentence", "at least {}"),
    "topic_by_sentence": ("sentences of news at which their topic is shown", "at least {}"),
}
SAFETY = (
    "injection", "override", "persona_jailbreak", "prompt_extraction", "suicidal_thought", "self_injury",
    "encouragement", "incitement", "hate", "secret", "hard_coded_secret", "id_number", "birth_data", "person_contact",
    "doxxing",
)  # fmt: skip


def library_claims(found: dict[str, Any]) -> list[str]:
    """The bars, and what was measured."""
    lines = ["| | measured | bar |", "|---|---|---|"]
    for name, claim in found["claims"].items():
        text, bar = CLAIMS[name]
        missed = "" if claim["holds"] else ", **missed**"
        value = claim["value"]
        shown = f"{value:.0f}" if name in ("ships", "near_on_tests", "over_words", "cpu_minutes") else f"{value:.2f}"
        lines.append(f"| {text} | {shown} | {bar.format(claim['bar'])}{missed} |")
    return lines


def first_sight_claims(found: dict[str, Any]) -> list[str]:
    """The same of what `watch demo` shows."""
    return library_claims(found)


def library_domains(found: dict[str, Any]) -> list[str]:
    """By domain: what ships, and medians over what ships."""
    domains: dict[str, list[dict[str, Any]]] = {}
    for one in found["concepts"].values():
        domains.setdefault(one["path"].partition("/")[0], []).append(one)
    lines = [
        "| domain | hold | near cases | words | found | in other text: near cases | found |",
        "|---|---|---|---|---|---|---|",
    ]
    for domain, concepts in [*domains.items(), ("all", list(found["concepts"].values()))]:
        own = [one for one in concepts if one["verdict"] != "missing"]
        short, long = ([one["tests"][name] for one in own] for name in ("short", "long"))
        cells = [
            f"{len(own)} of {len(concepts)}",
            _median(one["auroc"] for one in short),
            _median(one["words"] for one in short if one["auroc"] is not None),
            _median(one["found"]["rate"] for one in short),
            _median(one["auroc"] for one in long),
            _median(one["found"]["rate"] for one in long),
        ]
        lines.append(f"| {domain} | {' | '.join(cells)} |")
    return lines


def library_safety(found: dict[str, Any]) -> list[str]:
    """The concepts of examples/safety.yaml on tests, and their alarms on real text."""
    lines = [
        "| concept | near cases | found | near cases over | in other text: near cases | found | alarms, real texts |",
        "|---|---|---|---|---|---|---|",
    ]
    for id in SAFETY:
        short, long = (found["concepts"][id]["tests"][name] for name in ("short", "long"))
        cells = [one[id] for one in found["real_text"].values() if id in one]
        alarms = f"{sum(one['alarms'] for one in cells)} of {sum(one['texts'] for one in cells)}"
        lines.append(
            f"| `{id}` | {_number(short)} | {_share(short['found'])} | {_share(short['near_over'])} | {_number(long)} |"
            f" {_share(long['found'])} | {alarms} |"
        )
    return lines


def library_real(found: dict[str, Any]) -> list[str]:
    """By kind of real text: alarms of a hundred texts, as a mean over concepts, and the loudest concepts."""
    lines = ["| kind of text | alarms of 100 texts, mean of concepts | loudest concepts |", "|---|---|---|"]
    for kind, cells in found["real_text"].items():
        rates = {id: 100 * one["alarms"] / one["texts"] for id, one in cells.items()}
        loudest = sorted(rates, key=lambda id: (-rates[id], id))[:3]
        named = ", ".join(f"`{id}` {rates[id]:.0f}" for id in loudest)
        lines.append(f"| {kind} | {sum(rates.values()) / len(rates):.1f} | {named} |")
    return lines


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.2f}" if known else "–"


def _number(one: dict[str, Any]) -> str:
    return "–" if one["auroc"] is None else f"{one['auroc']:.2f}"


def _share(one: dict[str, Any]) -> str:
    return f"{one['count']} of {one['n']}" if one["n"] else "–"

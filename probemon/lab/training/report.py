"""HTML report of a training: what works, alarms in ordinary text with their words, misses, layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from probemon.lab.training.baselines import BASELINES
from probemon.lab.training.card import MERIT, by_kind, elsewhere, needs, number, reads, verdict, warnings, works
from probemon.lab.training.dataset import ORDINARY, OWN, Dataset
from probemon.lab.training.measured import TrainingMeasurement
from probemon.util.harmless_text import clip
from probemon.util.templates import macros

_CONCEPTS, _MISTAKES, _STRONGEST, _TOKENS = 24, 4, 20, 120
_AROUND = 90  # characters on each side of a token


def report_html(name: str, data: Dataset, found: TrainingMeasurement, quality: Mapping[str, Any]) -> str:
    """Return the page; every text in it is escaped."""
    shown = range(min(_CONCEPTS, len(data.concepts)))
    ids = [concept.id for concept in data.concepts]
    return macros("lab/training/report.html.j2").page(
        name,
        [sentence.replace("`", "") for sentence in verdict(quality)],
        [warning.replace("`", "") for warning in warnings(quality)],
        works(quality),
        [[part, f"{n['texts']:,}", f"{n['tokens']:,}"] for part, n in quality["examples"].items()],
        by_kind(quality, {id: clip(id, 40) for id in ids}),
        _monitors(data, quality),
        [
            (
                data.concepts[p].name,
                reads(ids[p], quality["concepts"][ids[p]]).replace("`", ""),
                _roc(data, found, p),
                _strongest(data, found, p),
                _mistakes(data, found, p),
            )
            for p in shown
        ],
        _tried(quality),
        needs(quality),
        elsewhere(quality["concepts"], {id: clip(id, 40) for id in ids}),
        MERIT,
    )


def _monitors(data: Dataset, quality: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = {concept.id: concept.name for concept in data.concepts}
    rows = []
    for id, one in quality["concepts"].items():
        interval = "–" if one["low"] is None else f"{one['low']:.3f}–{one['high']:.3f}"
        cells = [
            one["auroc"],
            *(one["baselines"][name] for name in BASELINES),
            one["without_giveaways"],
            one["shuffled"],
        ]
        numbers = [number(cell) for cell in cells]
        rows.append(
            [clip(names[id], 60), numbers[0], interval, *numbers[1:], f"{one['n_positive']} + {one['n_negative']}"]
        )
    return ["concept", "AUROC", "95 %", *BASELINES, "masked", "shuffled", "texts"], rows


def _tried(quality: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            f"{one['site']}, {one['scale']}, {one['width']} tokens, penalty {one['penalty']:g}",
            f"{one['merit']:.3f}",
            f"{one['standard_error']:.3f}",
            str(one["concepts"]),
        ]
        for one in quality["tried"]
    ]
    return ["probes", "merit", "standard error", "concepts"], rows


def _labels(data: Dataset, p: int) -> np.ndarray:
    return np.where(data.is_of(OWN) & (data.fold >= 0), data.judged[:, p], -1)


def _roc(data: Dataset, found: TrainingMeasurement, p: int) -> tuple[str, str, int]:
    size, known = 200, _labels(data, p)
    probe, words = (_curve(scores, known, size) for scores in (found.score(p), found.baselines["words"][:, p]))
    return probe, words, size


def _curve(scores: np.ndarray, known: np.ndarray, size: int) -> str:
    use = (known >= 0) & ~np.isnan(scores)
    scores, positive = scores[use], known[use] == 1
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.r_[np.diff(scores[order]) != 0, True]) if len(order) else np.zeros(0, dtype=np.int64)
    right, wrong = np.cumsum(positive[order])[last], np.cumsum(~positive[order])[last]
    points = zip(np.r_[0, wrong / max(1, (~positive).sum())], np.r_[0, right / max(1, positive.sum())], strict=True)
    return " ".join(f"{size * a:.1f},{size * (1 - b):.1f}" for a, b in points)


def _strongest(data: Dataset, found: TrainingMeasurement, p: int) -> list[tuple[str, str, str, str, bool]]:
    """Return the strongest tokens of ordinary text, one of a text: kind, what is before, token, after, and whether its
    text alarms.
    """
    scored, rows = found.scored, np.flatnonzero(data.is_of(ORDINARY)[found.scored.document])
    rows = rows[np.argsort(-scored.scores[rows, p], kind="stable")]
    seen, shown = set[int](), list[tuple[str, str, str, str, bool]]()
    threshold = found.text_rate(p).threshold
    for row in rows.tolist():
        document = int(scored.document[row])
        if document in seen:
            continue
        seen.add(document)
        tokens, text = data.tokens[document], data.texts[document].text
        start, end = (int(places[scored.position[row]]) for places in (tokens.start, tokens.end))
        if start >= 0:
            before, after = text[max(0, start - _AROUND) : start], text[end : end + _AROUND]
            alarm = bool(found.score(p)[document] > threshold)
            shown.append((data.kinds[data.kind[document]], before, text[start:end], after, alarm))
        if len(shown) == _STRONGEST:
            break
    return shown


def _mistakes(data: Dataset, found: TrainingMeasurement, p: int) -> list[tuple[str, list[Any]]]:
    scores, known, threshold = found.score(p), _labels(data, p), found.text_rate(p).threshold

    def texts(side: int, sign: int, most: int, over: bool) -> list[Any]:
        places = np.flatnonzero((known == side) & ~np.isnan(scores) & ((scores > threshold) == over))
        places = places[np.argsort(sign * scores[places], kind="stable")][:most]
        return [(float(scores[i]), _pieces(data, found, int(i), p)) for i in places]

    return [
        ("missed: with it, and not over the threshold", texts(1, 1, _MISTAKES, False)),
        ("near misses over the threshold: without it", texts(0, -1, _MISTAKES, True)),
        ("found, and the highest score", texts(1, -1, 1, True)),
    ]


def _pieces(data: Dataset, found: TrainingMeasurement, document: int, p: int) -> list[str | tuple[str, float, bool]]:
    """Return (text, score, fires) of tokens, and strings between."""
    text, tokens, scored = data.texts[document].text, data.tokens[document], found.scored
    rows = np.flatnonzero(scored.document == document)
    if tokens.start.min() < 0:
        return [clip(text, 600)]
    begin = _busiest(scored.scores[rows, p])
    at = int(tokens.start[scored.position[rows[begin]]])
    pieces: list[str | tuple[str, float, bool]] = ["… "] if at else []
    threshold = found.of_tokens[p].threshold
    for row in rows[begin : begin + _TOKENS]:
        token, value = int(scored.position[row]), float(scored.scores[row, p])
        start, end = int(tokens.start[token]), int(tokens.end[token])
        if start < at:  # a character of several tokens
            continue
        pieces += [
            text[at:start] if start - at <= 80 else " … ",
            (text[start:end], value, value > threshold),
        ]
        at = end
    return pieces + [" …"] * (begin + _TOKENS < len(rows))


def _busiest(scores: np.ndarray) -> int:
    if len(scores) <= _TOKENS:
        return 0
    return int(np.clip(int(np.argmax(scores)) - _TOKENS // 2, 0, len(scores) - _TOKENS))

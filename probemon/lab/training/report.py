"""HTML report of a training: layers, ROC curves, tokens of held-out texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from probemon.lab.training.card import NAMES, verdict, warnings
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.measured import TrainingMeasurement
from probemon.util.harmless_text import clip
from probemon.util.templates import macros

_CONCEPTS, _MISTAKES, _TOKENS = 24, 3, 160
_LEAST_SPAN = 0.02  # of the axis of areas


def report_html(name: str, data: Dataset, found: TrainingMeasurement, quality: Mapping[str, Any]) -> str:
    """Return the page; every text in it is escaped."""
    shown = range(min(_CONCEPTS, len(data.concepts)))
    return macros("lab/training/report.html.j2").page(
        name,
        verdict(quality).replace("`", ""),
        [warning.replace("`", "") for warning in warnings(quality)],
        [[split, f"{n['texts']:,}", f"{n['tokens']:,}"] for split, n in quality["examples"].items()],
        quality["watch"],
        _layers(quality),
        ["concept", "AUROC", "95 %", "TPR at 1 %", "masked", *NAMES.values(), "shuffled", "random", "texts"],
        _concepts(data, quality),
        [_roc(data, found, p) for p in shown],
        [(data.concepts[p].name, _mistakes(data, found, p)) for p in shown],
    )


def _layers(quality: Mapping[str, Any]) -> dict[str, Any]:
    rows = quality["sites"]
    used = {concept["site"] for concept in quality["concepts"].values()}
    low = min(row["auroc"] - row["standard_error"] for row in rows)
    high = max(row["auroc"] + row["standard_error"] for row in rows)
    low, high = low - 0.05 * (high - low), min(1.0, high + 0.05 * (high - low))
    low = min(low, high - _LEAST_SPAN)
    width, height, left, foot = 640, 240, 60, 40

    def x(i: int) -> float:
        return left + 20 + (width - left - 40) * (i / max(1, len(rows) - 1))

    def y(value: float) -> float:
        return 10 + (height - foot - 10) * (high - value) / (high - low)

    points = [(f"{x(i):.1f}", f"{y(row['auroc']):.1f}") for i, row in enumerate(rows)]
    ends = [[f"{y(row['auroc'] + end * row['standard_error']):.1f}" for end in (1, -1)] for row in rows]
    sites = [(row["site"], row["site"] in used) for row in rows]
    return {
        **{"left": left, "width": width, "height": height, "foot": height - foot, "points": points},
        "marks": [(value, y(value)) for value in np.linspace(low, high, 4)[1:-1].tolist()],
        "sites": [(point, *end, *site) for point, end, site in zip(points, ends, sites, strict=True)],
    }


def _concepts(data: Dataset, quality: Mapping[str, Any]) -> list[list[str]]:
    names = {concept.id: concept.name for concept in data.concepts}
    rows = []
    for id, entry in quality["concepts"].items():
        rate = entry["tpr_at_fpr"]["0.01"]
        rows.append(
            [
                clip(names[id], 60),
                _number(entry["auroc"]),
                "–" if entry["low"] is None else f"{entry['low']:.3f}–{entry['high']:.3f}",
                "too few" if rate is None else f"{rate['rate']:.2f}",
                _number(entry["without_giveaways"]),
                *(_number(entry["baselines"][name]) for name in NAMES),
                _number(entry["shuffled"]),
                _number(entry["random_direction"]),
                f"{entry['n_positive']} + {entry['n_negative']}",
            ]
        )
    return rows


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _roc(data: Dataset, measurement: TrainingMeasurement, p: int) -> tuple[str, str, str, int]:
    tested, size = measurement.test_of(p), 200
    known = data.known[tested, p]
    curves = (measurement.highest[measurement.method][tested, p], measurement.baselines["words"][tested, p])
    probe, words = (_curve(scores, known, size) for scores in curves)
    return data.concepts[p].name, probe, words, size


def _curve(scores: np.ndarray, known: np.ndarray, size: int) -> str:
    use = (known >= 0) & ~np.isnan(scores)
    scores, positive = scores[use], known[use] == 1
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.r_[np.diff(scores[order]) != 0, True]) if len(order) else np.zeros(0, dtype=np.int64)
    right, wrong = np.cumsum(positive[order])[last], np.cumsum(~positive[order])[last]
    points = zip(np.r_[0, wrong / max(1, (~positive).sum())], np.r_[0, right / max(1, positive.sum())], strict=True)
    return " ".join(f"{size * a:.1f},{size * (1 - b):.1f}" for a, b in points)


def _mistakes(data: Dataset, measurement: TrainingMeasurement, p: int) -> list[tuple[str, list[Any]]]:
    highest = measurement.highest[measurement.method][:, p]
    known = np.where(measurement.test_of(p) & ~np.isnan(highest), data.known[:, p], -1)

    def texts(side: int, sign: int, most: int) -> list[Any]:
        parts = np.flatnonzero(known == side)
        parts = parts[np.argsort(sign * highest[parts], kind="stable")][:most]
        return [(float(highest[part]), _pieces(data, measurement, int(part), p)) for part in parts]

    return [
        ("without it, and the highest scores", texts(0, -1, _MISTAKES)),
        ("with it, and the lowest scores", texts(1, 1, _MISTAKES)),
        ("with it, and the highest score", texts(1, -1, 1)),
    ]


def _pieces(data: Dataset, measurement: TrainingMeasurement, part: int, p: int) -> list[str | tuple[str, float, bool]]:
    """Return (text, score, fires) of tokens, and strings between."""
    document = int(data.document[part])
    text, tokens = data.texts[document].text, data.tokens[document]
    rows = np.flatnonzero(measurement.part == part)
    if tokens.start.min() < 0:
        return [clip(text, 600)]
    begin = _busiest(measurement.scores[rows, p])
    at = int(tokens.start[measurement.position[rows[begin]]])
    pieces: list[str | tuple[str, float, bool]] = ["… "] if at else []
    for row in rows[begin : begin + _TOKENS]:
        token, value = int(measurement.position[row]), float(measurement.scores[row, p])
        start, end = int(tokens.start[token]), int(tokens.end[token])
        if start < at:  # a character of several tokens, or a sampled text
            continue
        pieces += [
            text[at:start] if start - at <= 80 else " … ",
            (text[start:end], value, value > measurement.alert_threshold[p]),
        ]
        at = end
    return pieces + [" …"] * (begin + _TOKENS < len(rows))


def _busiest(scores: np.ndarray) -> int:
    if len(scores) <= _TOKENS:
        return 0
    return int(np.clip(int(np.argmax(scores)) - _TOKENS // 2, 0, len(scores) - _TOKENS))

"""What was trained, as one HTML page: layers, ROC curves, tokens of held-out texts, the worst mistakes first.

page = report_html("mails", data, found, quality)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from probemon.lab.training.card import NAMES, verdict, warnings
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.measured import TrainingMeasurement
from probemon.util.harmless_text import clip
from probemon.util.static_html import element, html_of, table

_CONCEPTS, _MISTAKES, _TOKENS = 24, 3, 160
_LEAST_SPAN = 0.02  # of areas over the height of a curve: smaller differences are none
_STYLE = """
:root { color-scheme: light dark; --line: rgb(128 128 128 / .35); --ink: rgb(47 110 166); }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; max-width: 1080px; margin: 32px auto;
  padding: 0 20px; background: Canvas; color: CanvasText; }
h1 { font-size: 24px; margin-bottom: 4px; } h2 { font-size: 18px; margin: 32px 0 6px; }
h3 { font-size: 15px; margin: 20px 0 4px; }
.verdict { font-size: 17px; } .dim { opacity: .72; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; opacity: .72; } .number { text-align: right; }
.wide { font-size: 13px; } .wide th, .wide td { padding-right: 10px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 12px; margin: 4px 0 10px; line-height: 1.8; }
.fires { box-shadow: inset 0 -2px rgb(190 70 90); }
svg { max-width: 100%; height: auto; } svg text { fill: CanvasText; font-size: 12px; }
.axis { stroke: var(--line); fill: none; } .curve { stroke: var(--ink); stroke-width: 2; fill: none; }
.error { stroke: var(--ink); stroke-opacity: .5; } .dot { fill: var(--ink); } .chosen { fill: rgb(190 70 90); }
.rocs { display: flex; flex-wrap: wrap; gap: 20px; } figure { margin: 0; } figcaption { font-size: 13px; }
"""


def report_html(name: str, data: Dataset, found: TrainingMeasurement, quality: Mapping[str, Any]) -> str:
    """Return the page; every text in it is escaped."""
    body = element("body", *_parts(name, data, found, quality))
    head = f'<meta charset="utf-8"><title>{html_of(element("i", name))[3:-4]}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head>{html_of(body)}</html>\n'


def _parts(name: str, data: Dataset, found: TrainingMeasurement, quality: Mapping[str, Any]) -> Iterator[Element]:
    yield element("h1", name)
    yield element("p", verdict(quality).replace("`", ""), kind="verdict")
    stated = warnings(quality)
    if stated:
        yield element("ul", *(element("li", warning.replace("`", "")) for warning in stated))
    counts = [[split, f"{n['texts']:,}", f"{n['tokens']:,}"] for split, n in quality["examples"].items()]
    yield table(["part", "texts", "tokens"], counts, numbers=(1, 2))
    yield element("h2", "Layers")
    yield element(
        "p",
        "AUROC by cross-validation among the texts that train, with its standard error. The earliest layer within one"
        " standard error of the best is taken, in red.",
        kind="dim",
    )
    yield _layers(quality)
    yield element("h2", "Concepts")
    yield element("p", f"On texts that chose nothing. A text's score is the highest of {quality['watch']}.", kind="dim")
    yield element("div", _concepts(data, quality), kind="wide")
    yield element("h2", "ROC")
    yield element("p", "Solid: the probe. Dashed: words alone (TF-IDF). The same test texts.", kind="dim")
    shown = range(min(_CONCEPTS, len(data.concepts)))
    yield element("div", *(_roc(data, found, p) for p in shown), kind="rocs")
    yield element("h2", "The worst mistakes, and what is right")
    yield element(
        "p",
        "Held-out texts. The deeper a token's colour, the higher its score; a red line is under tokens over the alert"
        " threshold. Point at one for its score.",
        kind="dim",
    )
    for p in shown:
        yield from _mistakes(data, found, p)


def _layers(quality: Mapping[str, Any]) -> Element:
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

    parts = [element("path", d=f"M{left},10V{height - foot}H{width}", kind="axis")]
    for value in np.linspace(low, high, 4)[1:-1]:
        parts.append(element("text", f"{value:.3f}", x="8", y=f"{y(value) + 4:.1f}"))
        parts.append(element("path", d=f"M{left},{y(value):.1f}H{width}", kind="axis"))
    points = " ".join(f"{x(i):.1f},{y(row['auroc']):.1f}" for i, row in enumerate(rows))
    parts.append(element("polyline", points=points, kind="curve"))
    for i, row in enumerate(rows):
        top, bottom = y(row["auroc"] + row["standard_error"]), y(row["auroc"] - row["standard_error"])
        parts.append(element("path", d=f"M{x(i):.1f},{top:.1f}V{bottom:.1f}", kind="error"))
        kind = "chosen" if row["site"] in used else "dot"
        parts.append(element("circle", cx=f"{x(i):.1f}", cy=f"{y(row['auroc']):.1f}", r="5", kind=kind))
        label = element("text", row["site"], x=f"{x(i):.1f}", y=f"{height - 14}")
        label.set("text-anchor", "middle")
        parts.append(label)
    return element("svg", *parts, viewBox=f"0 0 {width + 20} {height}", width=f"{width + 20}")


def _concepts(data: Dataset, quality: Mapping[str, Any]) -> Element:
    names = {concept.id: concept.name for concept in data.concepts}
    heads = ["concept", "AUROC", "95 %", "TPR at 1 %", "masked", *NAMES.values(), "shuffled", "random", "texts"]
    rows = []
    for id, found in quality["concepts"].items():
        rate = found["tpr_at_fpr"]["0.01"]
        rows.append(
            [
                clip(names[id], 60),
                _number(found["auroc"]),
                "–" if found["low"] is None else f"{found['low']:.3f}–{found['high']:.3f}",
                "too few" if rate is None else f"{rate['rate']:.2f}",
                _number(found["without_giveaways"]),
                *(_number(found["baselines"][name]) for name in NAMES),
                _number(found["shuffled"]),
                _number(found["random_direction"]),
                f"{found['n_positive']} + {found['n_negative']}",
            ]
        )
    return table(heads, rows, numbers=range(1, len(heads)))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _roc(data: Dataset, found: TrainingMeasurement, p: int) -> Element:
    own, size = found.test_of(p), 200
    known = data.known[own, p]
    main = found.highest[found.method][own, p]
    lines = [
        element("path", d=f"M0,0V{size}H{size}M0,{size}L{size},0", kind="axis"),
        element("polyline", points=_curve(main, known, size), kind="curve"),
    ]
    words = element("polyline", points=_curve(found.baselines["words"][own, p], known, size), kind="curve")
    words.set("stroke-dasharray", "4 4")
    words.set("stroke-opacity", "0.6")
    drawing = element("svg", *lines, words, viewBox=f"-2 -2 {size + 4} {size + 4}", width=f"{size}")
    return element("figure", drawing, element("figcaption", clip(data.concepts[p].name, 40)))


def _curve(scores: np.ndarray, known: np.ndarray, size: int) -> str:
    use = (known >= 0) & ~np.isnan(scores)
    scores, positive = scores[use], known[use] == 1
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.r_[np.diff(scores[order]) != 0, True]) if len(order) else np.zeros(0, dtype=np.int64)
    found, wrong = np.cumsum(positive[order])[last], np.cumsum(~positive[order])[last]
    points = zip(np.r_[0, wrong / max(1, (~positive).sum())], np.r_[0, found / max(1, positive.sum())], strict=True)
    return " ".join(f"{size * a:.1f},{size * (1 - b):.1f}" for a, b in points)


def _mistakes(data: Dataset, found: TrainingMeasurement, p: int) -> Iterator[Element]:
    highest = found.highest[found.method][:, p]
    known = np.where(found.test_of(p) & ~np.isnan(highest), data.known[:, p], -1)
    yield element("h3", clip(data.concepts[p].name, 60))
    sides: Sequence[tuple[str, int, int, int]] = (
        ("without it, and the highest scores", 0, -1, _MISTAKES),
        ("with it, and the lowest scores", 1, 1, _MISTAKES),
        ("with it, and the highest score", 1, -1, 1),
    )
    for title, side, sign, most in sides:
        parts = np.flatnonzero(known == side)
        parts = parts[np.argsort(sign * highest[parts], kind="stable")][:most]
        if len(parts):
            yield element("p", title, kind="dim")
        for part in parts:
            yield _text(data, found, int(part), p)


def _text(data: Dataset, found: TrainingMeasurement, part: int, p: int) -> Element:
    document = int(data.document[part])
    text, tokens = data.texts[document].text, data.tokens[document]
    rows = np.flatnonzero(found.part == part)
    score = found.highest[found.method][part, p]
    head = element("span", f"{score:.3f}  ", kind="dim")
    if tokens.start.min() < 0:
        return element("div", head, clip(text, 600), kind="text")
    begin = _busiest(found.scores[rows, p])
    spans: list[Element | str] = [head]
    at = int(tokens.start[found.position[rows[begin]]])
    spans += ["… "] if at else []
    for row in rows[begin : begin + _TOKENS]:
        token, value = int(found.position[row]), float(found.scores[row, p])
        start, end = int(tokens.start[token]), int(tokens.end[token])
        if start < at:  # a character of several tokens, or a text that was sampled
            continue
        spans += [text[at:start]] if start - at <= 80 else [" … "]
        fires = value > found.alert_threshold[p]
        span = element("span", text[start:end], kind="fires" if fires else "", title=f"{value:.3f}")
        span.set("style", f"background: rgb(47 110 166 / {0.55 * value:.2f})")
        spans.append(span)
        at = end
    if begin + _TOKENS < len(rows):
        spans.append(" …")
    return element("div", *spans, kind="text")


def _busiest(scores: np.ndarray) -> int:
    """Where the stretch of tokens begins that is shown: some before the highest score."""
    if len(scores) <= _TOKENS:
        return 0
    return int(np.clip(int(np.argmax(scores)) - _TOKENS // 2, 0, len(scores) - _TOKENS))

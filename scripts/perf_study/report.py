"""The report of `scripts/perf_track.py`: one static page of HTML, and lines for a terminal.

page(found)                  # a string; no script, nothing fetched
lines(found)                 # the same, shorter
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from perf_study.comparisons import compare

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 340, 62, 46, 14, 170
AXES = {
    "operations": ("operations a token, beside the host's own", 1.0),
    "memory": ("highest memory of a forward, MB", 1e-6),
    "latency": ("median milliseconds of a forward", 1.0),
}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --ours: #1f6f8b; --others: #b0702f; --good: #2c7a4b; --bad: #b3392f }
@media (prefers-color-scheme: dark) { :root { --ours: #63b4d1; --others: #dba267; --good: #6cc493; --bad: #ee8177 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .8rem 0; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child, td.why { text-align: left } td.why { white-space: normal; min-width: 22rem }
svg { width: 100%; height: auto; max-width: 760px } svg text { font: 12px system-ui, sans-serif; fill: currentColor }
.passed { color: var(--good) } .failed { color: var(--bad) } .axis { stroke: currentColor; stroke-width: 1 }
.on { fill: var(--ours) } .off { fill: var(--others) } .bar { stroke: currentColor; opacity: .45 }
.front { fill: none; stroke: var(--ours); stroke-dasharray: 4 3 }
"""


def page(found: dict[str, Any]) -> str:
    """The whole report as HTML."""
    parts = ["<h1>Forms of a generated update</h1>"]
    if "demo" in found:
        parts += _demo(found["demo"])
    if "rows" in found:
        parts += _planted(found)
    machine = found["machine"]
    parts.append(
        f"<p>Commit {escape(str(found['commit'])[:12])}; {escape(machine['cpu'])}, {machine['threads']} thread; torch"
        f" {escape(machine['torch'])}.</p>"
    )
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f"{head}<title>Forms of an update</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What was judged in plain text, each arm with its gates."""
    for verdict in found.get("verdicts", ()):
        ahead = _signed(verdict["ahead_of_lora"], verdict["low"], verdict["high"])
        gates = ", ".join(f"{name} {said}" for name, (said, _) in verdict["gates"].items())
        yield f"{verdict['task']:12s} {verdict['method']:12s} {ahead} ahead of the LoRA  {gates}"
    for row in summary(found["demo"]) if "demo" in found else ():
        saved = "" if row["saved"] is None else f"saves {row['saved']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        gates = ", ".join(f"{name} {verdict}" for name, (verdict, _) in row["gates"].items())
        yield f"{row['method']:16s} {row['nats']:.4f} nats  {saved}  {gates}".rstrip()


def summary(demo: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each arm: nats a token by part (means over seeds), its t interval, what it saves beside the LoRA, costs."""
    judged = {verdict["method"]: verdict for verdict in demo["verdicts"]}
    rows = []
    for method, cost in demo["costs"].items():
        own = [row for row in demo["rows"] if row["method"] == method]

        def mean(which: str, domain: str = "all", own: Sequence[Any] = own) -> float | None:
            return statistics.mean(row[which][domain] for row in own) if which in own[0] else None

        verdict, spread = judged.get(method), compare([row["held_out"]["all"] for row in own])
        rows.append(
            {
                "method": method,
                "nats": spread.mean,
                "nats_low": spread.low,
                "nats_high": spread.high,
                "by_domain": {domain: mean("held_out", domain) for domain in own[0]["held_out"] if domain != "all"},
                "frozen": mean("held_out_frozen"),
                "shuffled": mean("held_out_shuffled"),
                "saved": verdict["saved_nats"] if verdict else None,
                "low": verdict["low"] if verdict else None,
                "high": verdict["high"] if verdict else None,
                "p": verdict["p"] if verdict else None,
                "gates": verdict["gates"] if verdict else {},
                "promoted": bool(verdict and verdict["promoted"]),
                **cost,
            }
        )
    return rows


def _demo(demo: dict[str, Any]) -> list[str]:
    rows = summary(demo)
    domains, n = list(rows[0]["by_domain"]), len({row["seed"] for row in demo["rows"]})
    parts = [
        "<h2>Real texts on the demo model</h2>",
        f"<p>Nats a token of words never seen, means over {n} seeds; what is saved beside the LoRA on the same sites,"
        " with its 95 % t interval over seeds and the exact one-sided p. “Frozen” has all codes at their mean,"
        " “shuffled” those of other rows. Operations and times are of the layer that learns and a cut head alone.</p>",
        _table(
            ["", *domains, "all", "saved", "p", "frozen", "shuffled", "trainable", "operations", "MB", "ms p50", "p95",
             "p99", "ratio", "step ratio"],
            [_cells(row, domains) for row in rows],
        ),
    ]  # fmt: skip
    for cost in AXES:
        parts += [f"<h3>Loss and {cost}</h3>", frontier(demo, rows, cost)]
    parts.append("<h3>Gates</h3>")
    parts.append("<p>All must hold. What has no data is not judged, and has not passed.</p>")
    gates = [
        f"<tr><td>{escape(row['method'])}</td><td class=why>{escape(name)}</td><td class={verdict.split()[0]}>{verdict}"
        f"</td><td class=why>{escape(why)}</td></tr>"
        for row in rows
        for name, (verdict, why) in row["gates"].items()
    ]
    parts.append(f"<table><tr><th></th><th>gate</th><th>verdict</th><th>why</th></tr>{''.join(gates)}</table>")
    return parts


def _cells(row: dict[str, Any], domains: Sequence[str]) -> list[str]:
    def number(x: float | None, form: str = ".4f") -> str:
        return "" if x is None else format(x, form)

    def timed(triple: Sequence[float | None]) -> str:
        value, low, high = triple
        return number(value, ".2f") + ("" if low is None else f" ({low:.2f} to {high:.2f})")

    saved = "" if row["saved"] is None else f"{row['saved']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
    times = [timed(row["prefill"][name]) for name in ("p50", "p95", "p99", "ratio")]
    return [
        row["method"],
        *(number(row["by_domain"][domain]) for domain in domains),
        number(row["nats"]),
        saved,
        number(row["p"]),
        number(row["frozen"]),
        number(row["shuffled"]),
        f"{row['n_trainable']:,}",
        f"{row['operations']:,}",
        f"{row['memory'] / 1e6:.1f}",
        *times,
        timed(row["step"]["ratio"]) if row["step"] else "no cache",
    ]


def _planted(found: dict[str, Any]) -> list[str]:
    rows: dict[tuple[str, str], list[float]] = {}
    for row in found["rows"]:
        rows.setdefault((row["task"], row["method"]), []).append(row["removed"])
    cells = [[task, method, f"{statistics.mean(v):.3f}", str(len(v))] for (task, method), v in rows.items()]
    judged = [
        [v["task"], v["method"], _signed(v["ahead_of_lora"], v["low"], v["high"]), f"{v['p']:.3f}",
         f"{100 * v['share_of_draws_on_it']:.0f} %", *(verdict for verdict, _ in v["gates"].values())]
        for v in found["verdicts"]
    ]  # fmt: skip
    drawn = [
        part
        for task in dict.fromkeys(row["task"] for row in found["rows"])
        for part in (f"<h3>{escape(task)}: what is left, and operations a token</h3>", planted_frontier(found, task))
    ]
    claims = [
        [name, f"{claim['value']:.5f}", f"{claim['bar']:g}", "holds" if claim["holds"] else "missed"]
        for name, claim in found["claims"].items()
    ]
    return [
        "<h2>Planted teachers</h2><p>Random data. The share of the divergence from a teacher that is removed.</p>",
        _table(["planted", "learns", "removed", "seeds"], cells),
        _table(["claim", "value", "bar", ""], claims),
        *drawn,
        "<h3>Gates</h3><p>Beside the LoRA, seed by seed. What has no data is not judged, and has not passed.</p>",
        _table(["planted", "learns", "ahead", "p", "on the frontier", *found["verdicts"][0]["gates"]], judged),
    ]


def _signed(value: float, low: float | None, high: float | None) -> str:
    return f"{value:+.4f}" + ("" if low is None or high is None else f" ({low:+.4f} to {high:+.4f})")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def frontier(demo: dict[str, Any], rows: Sequence[dict[str, Any]], cost: str) -> str:
    """Loss over one cost as SVG; beside each arm, in how many of 100 drawn seeds it is on the frontier."""
    label, unit = AXES[cost]
    judged = {verdict["method"]: verdict["frontiers"][cost] for verdict in demo["verdicts"]}
    points = []
    for row in rows:
        if row["method"] == "base":
            continue  # its loss would press the others together
        x = row["prefill"]["p50"][0] if cost == "latency" else row[cost] * unit
        points.append((x, row["nats"], row["nats_low"], row["nats_high"], row["method"]))
    shares = {method: share for method, (_, share) in judged.items()}
    return _frontier(points, shares, label, "nats a token", whole=cost == "operations")


def planted_frontier(found: dict[str, Any], task: str) -> str:
    """What students of one teacher leave of its divergence, over their operations, as SVG."""
    rows = [row for row in found["rows"] if row["task"] == task and ", rank" not in row["method"]]
    points = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        left = compare([1 - row["removed"] for row in own])
        low, high = (left.mean if end is None else end for end in (left.low, left.high))
        points.append((float(own[0]["flops_per_token"]), left.mean, low, high, method))
    shares = {v["method"]: v["share_of_draws_on_it"] for v in found["verdicts"] if v["task"] == task}
    return _frontier(points, shares, AXES["operations"][0], "share of the divergence left", whole=True)


def _frontier(
    points: Sequence[tuple[float, float, float, float, str]],
    shares: Mapping[str, float],
    label: str,
    quality: str,
    *,
    whole: bool,
) -> str:
    """Points of a cost, a quality of which less is better, the ends of its interval over seeds and a name, as SVG:
    those on the frontier of the means are joined. `whole`: costs are whole numbers.
    """
    xs, ys = [p[0] for p in points], [y for p in points for y in p[2:4]]
    (x_low, x_high), (y_low, y_high) = _margins(xs), _margins(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    on = sorted(p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q[:2] != p[:2] for q in points))
    drawn = [f'<path class=front d="M{" L".join("{:.1f} {:.1f}".format(*at(p[0], p[1])) for p in on)}"/>']
    labels: list[float] = []
    for x, y, low, high, method in sorted(points, key=lambda p: -p[1]):
        (px, py), (_, top), (_, bottom) = at(x, y), at(x, high), at(x, low)
        text = py + 4
        while any(abs(text - other) < 14 for other in labels):  # names stand in a column, none over another
            text += 1
        labels.append(text)
        share = f", {100 * shares[method]:.0f} %" if method in shares else ""
        drawn += [
            f'<path class=bar d="M{px:.1f} {top:.1f} V{bottom:.1f}"/>',
            f'<path class=bar stroke-dasharray="1 4" d="M{px:.1f} {py:.1f} L{WIDTH - RIGHT + 4} {text - 4:.1f}"/>',
            f'<circle class={"on" if any(p[4] == method for p in on) else "off"} cx="{px:.1f}" cy="{py:.1f}" r="5"/>',
            f'<text x="{WIDTH - RIGHT + 8}" y="{text:.1f}">{escape(method)}{share}</text>',
        ]
    (left, base), (right, top) = at(x_low, y_low), at(x_high, y_high)
    drawn.append(f'<path class=axis fill=none d="M{left:.0f} {top:.0f} V{base:.0f} H{right:.0f}"/>')
    for k in range(5):
        x, y = x_low + k / 4 * (x_high - x_low), y_low + k / 4 * (y_high - y_low)
        shown = f"{x:,.0f}" if whole else f"{x:.2f}"
        drawn.append(f'<text x="{at(x, y)[0]:.0f}" y="{base + 18:.0f}" text-anchor="middle">{shown}</text>')
        drawn.append(f'<text x="{left - 6:.0f}" y="{at(x, y)[1] + 4:.0f}" text-anchor="end">{y:.3f}</text>')
    drawn.append(
        f'<text x="{left:.0f}" y="{base + 38:.0f}">{escape(label)}; upwards: {quality}, lower is better</text>'
    )
    named = f'role="img" aria-label="{quality} and {escape(label)}"'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {named}>{"".join(drawn)}</svg>'


def _margins(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis that holds these values."""
    margin = 0.05 * (max(values) - min(values)) or 1.0
    return min(values) - margin, max(values) + margin

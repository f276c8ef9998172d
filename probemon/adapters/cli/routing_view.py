"""Live view of routing.

with LiveRouting(console, title="...") as view:          # or PlainRouting, for pipes
    view.show(token, record, recorder.report)            # token: the text at a position
    view.show_alert(alert)
summary(console, recorder.report())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from probemon.adapters.routing.alerts import Alert
from probemon.adapters.routing.decisions import BEM
from probemon.adapters.routing.records import RoutingRecord
from probemon.adapters.routing.recurrent.tally import Told
from probemon.cli.terminal import harmless, plain_table
from probemon.cli.watch.live_view import printable
from probemon.tracking.align import PlacedTokens
from probemon.util.counted import counted

_BAR = "▁▂▃▄▅▆▇█"
_WIDE = 32  # bars; more experts share them
_ROUTERS = 3  # a line
# Heading, metric, format.
_DISTRIBUTION = (
    ("decision", "decision_entropy", ".2f"), ("marginal", "marginal_entropy", ".2f"),
    ("MI", "mutual_information", ".2f"),
    ("experts", "effective_experts", ".1f"), ("flips", "flip_rate", ".2f"), ("MaxVio", "max_vio", ".2f"),
)  # fmt: skip
_CODES = (
    ("rank", "effective_rank", ".1f"), ("varies", "variation", ".2f"), ("norm", "code_norm", ".2f"),
    ("sure", "confidence", ".2f"),
    ("flips", "flip_rate", ".2f"), ("reused", "code_reuse_rate", ".1%"),
)  # fmt: skip
# Recurrent layers; _FOLLOWED if states are followed.
_STATES = (
    ("half-life", "half_life_p50", ".3g"), ("holds", "length_mean", ".1f"), ("step", "delta_p50", ".3g"),
    ("forgets", "forgets", ".1%"), ("keeps", "keeps", ".1%"), ("at limit", "at_limit", ".1%"),
    ("resets", "resets", "d"),
)  # fmt: skip
_FOLLOWED = (("norm", "norm", ".3g"), ("new", "update_share", ".2f"), ("rank", "effective_rank", ".1f"))
_BROKEN = (("not finite", "n_not_finite", "d"),)
Report = Callable[[], Mapping[str, Any]]
Token = Callable[[int], str]


class PlainRouting:
    """One line a token, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, token: Token, record: RoutingRecord, report: Report) -> None:
        """Print the first routers' choices, a line for each token."""
        decisions = list(record.lines())
        for position in sorted({line["pos_start"] for line in decisions}):
            parts = [_decision(line) for line in decisions if line["pos_start"] == position]
            self._print_token(position, token(position), parts, "routers")

    def show_states(self, token: Token, placed: PlacedTokens, told: Mapping[str, Told], report: Report) -> None:
        """Print the reach of the first recurrent layers, a line for each token."""
        for i, position in enumerate(placed.columns.tolist()):
            parts = [part for names, tally in told.items() for part in _reaches(names.split(), tally, i)]
            self._print_token(position, token(position), parts, "layers")

    def show_alert(self, alert: Alert) -> None:
        """Print an alert."""
        self._print(f"alert: {alert}")

    def _print_token(self, position: int, token: str, parts: Sequence[str], kind: str) -> None:
        more = [f"and {len(parts) - _ROUTERS} more {kind}"] if len(parts) > _ROUTERS else []
        self._print(f"{position:>4}  {printable(token):<14} {'; '.join([*parts[:_ROUTERS], *more])}")

    def _print(self, line: str) -> None:
        self._console.print(Text(harmless(line)), soft_wrap=True)


class LiveRouting(Live):
    """The text so far, a table of routers, costs and alerts."""

    def __init__(self, console: Console, *, title: str) -> None:
        super().__init__(console=console, auto_refresh=False, vertical_overflow="crop")
        self._title, self._text = Text(harmless(title)), ""
        self._shown: set[int] = set()

    def show(self, token: Token, record: RoutingRecord, report: Report) -> None:
        """Update text and tables."""
        positions = {int(p) + i for p, n in zip(record.pos_start, record.n_tokens, strict=True) for i in range(n)}
        for position in sorted(positions - self._shown):
            self._shown.add(position)
            self._text += harmless(token(position), keep="\n")
        self.update(self.render(report()), refresh=True)

    def show_states(self, token: Token, placed: PlacedTokens, told: Mapping[str, Told], report: Report) -> None:
        """Update text and tables."""
        self._text += "".join(harmless(token(position), keep="\n") for position in placed.columns.tolist())
        self.update(self.render(report()), refresh=True)

    def show_alert(self, alert: Alert) -> None:
        """Do nothing: the report has it."""

    def render(self, report: Mapping[str, Any]) -> RenderableType:
        """Return the frame, with as many routers as fit."""
        columns = max(20, self.console.width - 4)
        tail = Text(self._text[-3 * columns :])
        n_lines = len(tail.wrap(self.console, columns))
        room = max(4, self.console.height - n_lines - 10 - len(report["alerts"]) - 2 * bool(report["unjudged"]))
        return Panel(
            Group(tail, Text(), *_tables(report, room), Text(), *_foot(report)),
            title=self._title,
            title_align="left",
            border_style="dim",
        )


def _tables(report: Mapping[str, Any], room: int = 10_000) -> list[RenderableType]:
    """Return tables of expert routers, of code routers and of recurrent layers, each of at most `room` rows."""
    streams, states = report["streams"], report["states"]
    experts, codes = ([(_router(s), s) for s in streams if (s["source"] == BEM) == coded] for coded in (False, True))
    broken = _BROKEN if any(stream.get("n_not_finite") for stream in streams) else ()
    followed = _FOLLOWED if any("norm" in layer for layer in states.values()) else ()
    lost = _BROKEN if any(layer["n_not_finite"] for layer in states.values()) else ()
    return [
        *_table("router", experts, _DISTRIBUTION + broken, room, bars=("load", "load")),
        *_table("router", codes, _CODES + broken, room, bars=("variance", "variances")),
        *_table("layer", list(states.items()), _STATES + followed + lost, room),
    ]


def _table(
    kind: str,
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    columns: Sequence[tuple[str, str, str]],
    room: int,
    bars: tuple[str, str] | None = None,
) -> list[RenderableType]:
    """Return a table of named metrics, [] without rows. `bars`: heading and metric of the last column."""
    if not rows:
        return []
    table = plain_table()
    table.add_column(kind, no_wrap=True)
    for heading, *_ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    if bars is not None:
        table.add_column(bars[0], overflow="ellipsis")  # cut first: a truncated number misleads
    for name, metrics in rows[:room]:
        values = [format(metrics[key], style) if metrics.get(key) is not None else "-" for _, key, style in columns]
        table.add_row(Text(harmless(name)), *values, *([] if bars is None else [load_bars(metrics[bars[1]])]))
    rest = [Text(f"and {len(rows) - room} more {kind}s", style="dim")] if len(rows) > room else []
    return [table, *rest]


def _router(line: Mapping[str, Any]) -> str:
    return f"{line['site']} {line['level']}".strip()


def _reaches(names: Sequence[str], tally: Told, i: int) -> list[str]:
    lengths, resets = tally.length[:, i].mean(dim=-1).tolist(), tally.resets[:, i].tolist()
    return [
        f"{name} holds {length:.1f}{', reset' if reset else ''}"
        for name, length, reset in zip(names, lengths, resets, strict=True)
    ]


def load_bars(load: Sequence[float]) -> Text:
    """Return a bar for each expert (over 32: for several): full at twice the mean load, a dot for none."""
    n = min(_WIDE, len(load))
    groups = [load[i * len(load) // n : (i + 1) * len(load) // n] for i in range(n)]
    means = [sum(group) / len(group) for group in groups]
    whole = sum(load) / len(load)
    text = Text()
    for mean in means:
        level = min(7, int(4 * mean / whole)) if whole else 0
        text.append(_BAR[level] if mean else "·", style="red" if not mean else "yellow" if level == 7 else "cyan")
    return text


def summary(console: Console, report: Mapping[str, Any]) -> None:
    """Print every router, the costs and the alerts."""
    for part in (*_tables(report), *_foot(report)):
        console.print(part, soft_wrap=True)


def _foot(report: Mapping[str, Any]) -> list[Text]:
    times = (
        ", ".join(f"{name} {value:.1f}" for name, value in report["latency_us"].items() if value is not None) or "none"
    )
    line = (
        f"{counted(report['n_tokens'], 'token')}, {report['n_unseen']} unseen; capture of a decision, us:"
        f" {times}; memory at most"
        f" {report['memory_watermark_bytes'] / 1e6:.0f} MB"
    )
    alerts = [Text(harmless(alert), style="bold red") for alert in report["alerts"]] or [
        Text("no alert", style="dim" if report["unjudged"] else "green")
    ]
    if report["unjudged"]:  # no alert means little yet
        needed = ", ".join(
            f"{kind} ({counted(n, 'token')})"
            for kind, n in sorted(report["unjudged"].items(), key=lambda item: item[1])
        )
        alerts.append(Text(f"too few tokens that count yet for {needed}", style="yellow"))
    return [Text(line, style="dim"), *alerts]


def _decision(line: Mapping[str, Any]) -> str:
    weights = ["not finite" if weight is None else f"{weight:.2f}" for weight in line["top_w"]]
    if line["top_position"] is None:
        parts = [f"{expert} ({weight})" for expert, weight in zip(line["top_idx"], weights, strict=True)]
    else:  # memory slots: the token that is read
        slot_reads = zip(line["top_idx"], line["top_position"], line["top_token"], weights, strict=True)
        parts = [
            f"slot {slot}: token {token} at {position} ({weight})" if position >= 0 else f"nothing ({weight})"
            for slot, position, token, weight in slot_reads
            if weight != "0.00"
        ]
    entropy = "" if line["h_decision"] is None else f", entropy {line['h_decision']:.2f}"
    return f"{_router(line)} {', '.join(parts)}{entropy}{', reused' if line['reused'] else ''}"

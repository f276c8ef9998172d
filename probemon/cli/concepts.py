"""The command concepts.

probemon concepts demo              # the top of the hierarchy
probemon concepts demo animal       # one concept: ancestors and descendants
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.terminal import answer, harmless, plain_table, say, terminal
from probemon.errors import ConfigError
from probemon.util.counted import counted
from probemon.util.near_names import texts_of

if TYPE_CHECKING:
    from rich.text import Text

    from probemon.packs.pack import ProbePack

_MOST_LINES = 100
_MOST_IN_FULL = 24  # concepts, for whole definitions
_MOST_EXAMPLES = 8
_MOST_NAMES = 40
_WIDE = 10_000


@dataclass(frozen=True)
class Line:
    """A concept in the tree, after `guides`. Not `opens`: its children are listed elsewhere; `hidden`: descendants not
    shown.
    """

    probe: int
    guides: str
    opens: bool
    hidden: list[int]


def concepts(
    pack: opt.Pack,
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="A concept by its name or id, or a text with * for several."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            help=(
                "Levels to show below the roots, or below what PATTERN names; by default as many as"
                f" {_MOST_LINES} concepts allow."
            ),
        ),
    ] = None,
    alert_set: opt.AlertSet = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show the concepts of PACK as a tree: when each fires, how much of that is right, and what it means."""
    if depth is not None and depth < 0:
        raise ConfigError(f"--depth is {depth}: give 0 or more")
    from probemon.packs.pack import ProbePack

    opened = ProbePack.from_pretrained(pack)
    if alert_set is not None:
        opened = opened.with_alert_set(alert_set)
    matches = opened.tree.roots.tolist() if pattern is None else _named(opened, pattern)
    below = opened.tree.levels_below(matches)
    if depth is None:
        depth = len(below) if as_json else _fitting(below)
    within = {probe for level in below[: depth + 1] for probe in level}
    shown = within.union(*(opened.tree.ancestors(probe) for probe in matches))
    if as_json:
        answer(_as_dict(opened, sorted(shown), set(matches)))
    else:
        _show(opened, shown, set() if pattern is None else set(matches), len(below) - 1, depth)


def _named(pack: ProbePack, pattern: str) -> list[int]:
    same_name = [probe for probe, concept in enumerate(pack.concepts) if concept["name"] == pattern]
    return same_name if len(same_name) > 1 else pack.find_all(pattern)


def _fitting(levels: Sequence[Sequence[int]]) -> int:
    n_shown = n_fitting = 0
    for depth, level in enumerate(levels):
        n_shown += len(level)
        n_fitting = depth if n_shown <= _MOST_LINES else n_fitting
    return n_fitting


def _lines(pack: ProbePack, shown: set[int]) -> Iterator[Line]:
    """Yield the tree of `shown` probes; each subtree is listed once."""
    tree, met = pack.tree, set[int]()
    # A stack of probes and guides.
    pending = [(root, "", "") for root in reversed(tree.roots.tolist()) if root in shown]
    while pending:
        probe, guides, next_guides = pending.pop()
        children = [child for child in tree.children(probe).tolist() if child in shown]
        opens = probe not in met or not children
        met.add(probe)
        hidden = [] if children else [below for level in tree.levels_below([probe])[1:] for below in level]
        yield Line(probe, guides, opens, hidden)
        for child in reversed(children if opens else []):
            is_last = child == children[-1]
            pending.append(
                (child, next_guides + ("└─ " if is_last else "├─ "), next_guides + ("   " if is_last else "│  "))
            )


def _show(pack: ProbePack, shown: set[int], matches: set[int], deepest: int, depth: int) -> None:
    from rich.text import Text

    from probemon.packs.strength import in_short

    console = terminal(soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDE
    in_full = len(shown) <= _MOST_IN_FULL
    above = {ancestor for probe in matches for ancestor in pack.tree.ancestors(probe)}
    rows = []
    for line in _lines(pack, shown):
        name = Text(line.guides, style="dim")
        name.append(harmless(pack.concepts[line.probe]["name"]), style=_style(line.probe, matches))
        threshold, precision = float(pack.alert_threshold[line.probe]), pack.precision(line.probe)
        numbers = (
            str(pack.tree.level[line.probe]),
            "-" if math.isnan(threshold) else in_short(threshold, ".3f"),
            "" if math.isnan(precision) else f"{precision:.0%}",
        )
        rows.append((name, *numbers, _meaning(pack, line, in_full=in_full and line.probe not in above)))
    table = plain_table(expand=console.is_terminal)
    table.add_column("concept", width=min(max(row[0].cell_len for row in rows), console.width // 2), no_wrap=True)
    for header in ("level", "over", "right"):
        table.add_column(header, width=5, justify="right", no_wrap=True)
    table.add_column("what it means", ratio=1, no_wrap=not in_full, overflow="fold" if in_full else "ellipsis")
    for row in rows:
        table.add_row(*row)
    by = f"alert set {pack.alert_set}" if pack.alert_set else "alert thresholds without a name"
    others = [name for name in pack.alert_sets if name != pack.alert_set]
    also = f" (--alert-set also knows {', '.join(others)})" if others else ""
    say(f"{pack.name}: {len(shown)} of {counted(pack.n_probes, 'concept')}, {by}{also}")
    console.print(table)
    if all(row[2] == "-" for row in rows):
        say("None of these has an alert threshold, so none fires: probemon calibrate sets thresholds.")
    else:
        right = (
            " right: how much of that was right where the pack was calibrated." if any(row[3] for row in rows) else ""
        )
        say(f"over: the score over which a concept fires.{right}")
    if depth < deepest:
        say(f"--depth {deepest} shows everything below; a name after the pack shows one concept and what is below it.")


def _style(probe: int, matches: set[int]) -> str:
    return "bold" if probe in matches else "dim" if matches else ""


def _meaning(pack: ProbePack, line: Line, *, in_full: bool) -> Text:
    from rich.text import Text

    if not line.opens:
        return Text("(what is below it is listed above)", style="dim")
    concept = pack.concepts[line.probe]
    definition, words = str(concept.get("definition") or ""), texts_of(concept.get("words"))[:_MOST_EXAMPLES]
    parts = [Text(harmless(definition))] if definition and (in_full or not line.hidden) else []
    if in_full and words:
        parts.append(Text(harmless(f"for example: {', '.join(words)}"), style="dim"))
    if line.hidden:
        names = ", ".join(pack.concepts[probe]["name"] for probe in line.hidden[:_MOST_NAMES])
        parts.append(Text(harmless(f"+{len(line.hidden)}: {names}"), style="dim"))
    return Text("\n").join(parts)


def _as_dict(pack: ProbePack, shown: list[int], matches: set[int]) -> dict[str, Any]:
    return {
        "pack": pack.name,
        "alert_set": pack.alert_set,
        "alert_sets": list(pack.alert_sets),
        "n_concepts": pack.n_probes,
        "concepts": [
            {
                "id": pack.concepts[probe]["id"],
                "name": pack.concepts[probe]["name"],
                "path": pack.path(probe),
                "level": int(pack.tree.level[probe]),
                "parents": pack.concepts[probe]["parents"],
                "children": [pack.concepts[child]["id"] for child in pack.tree.children(probe).tolist()],
                "threshold": float(pack.alert_threshold[probe]),
                "precision": pack.precision(probe),
                "definition": pack.concepts[probe].get("definition"),
                "words": texts_of(pack.concepts[probe].get("words")),
                "matches": probe in matches,
            }
            for probe in shown
        ],
    }

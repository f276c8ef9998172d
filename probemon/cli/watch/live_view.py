"""The live view: each token with its leading concepts and their paths.

    with LiveView(console, title="...") as view:          # or PlainView, one line per token, for pipes
        for event in manager.stream(...):
            view.show(event)

Without alert thresholds, the best-ranked concepts are shown. `above [P]`: scores over which concepts are shown.
`brief`: concepts are shown at the last token of a word, known one token later, and paths without the root.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from probemon.cli.terminal import harmless, plain_table, shorten_path
from probemon.core.aggregate import Doubles
from probemon.monitor.result import ConceptScore, Result, without_thresholds
from probemon.monitor.rules import Event
from probemon.monitor.stream import TokenEvent
from probemon.monitor.summary import inside_words, lower_thresholds, nothing_listed, summarise
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.cli.watch.rules import Showing

_COLOURS = (
    "cyan", "green", "magenta", "yellow", "blue", "bright_blue", "bright_cyan", "bright_green", "bright_magenta",
)  # fmt: skip
_NARROW = 60  # columns, to show precision
_CLEAR = 0.5  # least strength in bold
RANKED = "ranked, not firing"
_BAR = "▁▂▃▄▅▆▇█"
_FROM_ROOT = (", from the root", "")  # not brief, brief


class _View:
    """Passes each token on, with whether it ends inside a word; `brief`: one token later, when that is known."""

    risen: Mapping[int, Sequence[Event]] = MappingProxyType({})  # by column, concepts whose running score rises
    _brief: bool
    _waiting: TokenEvent | None = None

    def show(self, event: TokenEvent) -> None:
        """Show a token."""
        if not self._brief:
            return self._add(event, inside=False)
        before, self._waiting = self._waiting, event
        if before is not None:
            self._add(before, inside=inside_words([before.token, event.token])[0])

    def _show_last(self) -> None:
        if self._waiting is not None:
            self._add(self._waiting, inside=False)

    def _add(self, event: TokenEvent, *, inside: bool) -> None:
        raise NotImplementedError


class PlainView(_View):
    """One line per token with something to show, without control characters."""

    def __init__(
        self, console: Console, *, n_concepts: int = 3, above: Doubles | None = None, brief: bool = False
    ) -> None:
        self._console, self._k, self._above, self._brief = console, n_concepts, above, brief

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exception: object) -> None:
        self._show_last()

    def _add(self, event: TokenEvent, *, inside: bool) -> None:
        token = printable(event.token)
        leading = [] if inside else event.leading(event.pack.n_probes, self._above)
        concepts = [
            f"{' > '.join(path_of(c, brief=self._brief))} {c.strength:+.1f}{right(c)}" for c in leading[: self._k]
        ]
        concepts += [f"and {len(leading) - self._k} more"] if len(leading) > self._k else []
        if ranked := event.ranked(self._k, self._above):
            concepts.append(f"{RANKED}: " + ", ".join(f"{' > '.join(c.path)} {c.score:.2f}" for c in ranked))
        remarks = unseen(event) or "; ".join(
            [*concepts, *filter(None, [begins(event, self.risen, brief=self._brief), memories_read(event)])]
        )
        if remarks:
            self._console.print(Text(harmless(f"{event.position:>4}  {token:<14} {remarks}")), soft_wrap=True)


class LiveView(_View):
    """The text so far, coloured by concepts, above a table of the last tokens."""

    def __init__(
        self,
        console: Console,
        *,
        title: str,
        n_concepts: int = 2,
        n_rows: int = 16,
        above: Doubles | None = None,
        brief: bool = False,
    ) -> None:
        self._console, self._title, self._k = console, Text(harmless(title)), n_concepts
        self._above, self._brief, self._text = above, brief, Text()
        self._n_rows = n_rows
        self._events: deque[tuple[TokenEvent, bool]] = deque(maxlen=n_rows)  # and whether it ends inside a word
        self._n_tokens = self._n_active = 0
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show_last()
        self._live.__exit__(kind, error, trace)

    def _add(self, event: TokenEvent, *, inside: bool) -> None:
        leading = [] if inside else event.leading(1, self._above)
        clear = leading and leading[0].strength >= _CLEAR
        self._text.append(harmless(event.token, keep="\n"), style=style(leading[0]) if clear else "")
        remarks = event.unseen or begins(event, self.risen) or memories_read(event)
        if leading or remarks or event.ranked(1, self._above):  # others are shown in the text
            self._events.append((event, inside))
        if not event.unseen:
            self._n_tokens += 1
            self._n_active += int(event.coverage.active[0])
        self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """Return the end of the text, and the last tokens that fit."""
        columns = max(20, self._console.width - 4)
        tail = self._text[-4 * columns :]
        least = 2 * self._k + 1
        lines = tail.wrap(self._console, columns)[-max(1, self._console.height - least - 7) :]
        tail = Text("\n").join(lines)
        room = min(self._n_rows, max(least, self._console.height - len(lines) - 7))
        shown: list[tuple[TokenEvent, list[ConceptScore]]] = []
        for event, inside in reversed(self._events):
            leading = [] if inside else event.leading(self._k, self._above)
            concepts = [*leading, *event.ranked(self._k, self._above)]
            remarks = [*filter(None, [begins(event, self.risen, brief=self._brief), memories_read(event)])]
            room -= max(1, len(concepts) + len(remarks))
            if room < 0:
                break
            shown.insert(0, (event, concepts))
        table = plain_table(expand=True)
        narrow = self._console.width < _NARROW
        table.add_column("token", width=8 if narrow else 14, no_wrap=True)
        table.add_column(
            f"leading concepts (at most {self._k}){_FROM_ROOT[self._brief]}", ratio=1, no_wrap=True, overflow="ellipsis"
        )
        if not narrow:
            table.add_column("right", width=5, justify="right", style="dim")
        table.add_column("strength", width=10)
        width = self._console.width - (26 if narrow else 39)  # without other columns
        if any(math.isnan(concept.threshold) for _, concepts in shown for concept in concepts):
            table.columns[1].header = Text(f"concepts{_FROM_ROOT[self._brief]} ({RANKED} if there is no alert)")
        for event, concepts in shown:
            token = Text(printable(event.token))
            if event.unseen:
                table.add_row(token, Text(unseen(event), style="dim"))
            elif concepts and not math.isnan(concepts[0].threshold):
                token.style = style(concepts[0])
            for concept in concepts:
                bare = math.isnan(concept.threshold)
                strength = Text(f"score {concept.score:.2f}", style="dim") if bare else strength_bar(concept)
                share = [] if narrow else [share_right(concept)]
                table.add_row(token, path_text(concept, width, brief=self._brief), *share, strength)
                token = Text()
            for remark in filter(None, [begins(event, self.risen, brief=self._brief), memories_read(event)]):
                table.add_row(token, Text(harmless(remark), style="dim" if remark.startswith("reads") else "bold"))
                token = Text()
        per_token = self._n_active / max(1, self._n_tokens)
        foot = Text(f"{counted(self._n_tokens, 'token')} scored, {per_token:.0f} probes active a token", style="dim")
        return Panel(
            Group(tail, Text(), table, Text(), foot), title=self._title, title_align="left", border_style="dim"
        )


def colour(concept: ConceptScore) -> str:
    """Return the colour of a concept's root."""
    return _COLOURS[zlib.crc32(concept.path[0].encode()) % len(_COLOURS)]


def style(concept: ConceptScore) -> str:
    """Return a concept's colour, bold if clearly over threshold."""
    return f"{'bold ' if concept.strength >= _CLEAR else ''}{colour(concept)}"


def path_of(concept: ConceptScore, *, brief: bool) -> Sequence[str]:
    """Return the path; `brief`: below the root."""
    return concept.path[1:] if brief and len(concept.path) > 1 else concept.path


def path_text(concept: ConceptScore, width: int = 10_000, *, brief: bool = False) -> Text:
    """Return path and concept, shortened to `width`."""
    *above, name = shorten_path(path_of(concept, brief=brief), width)
    text = Text()
    for parent in above:
        text.append(harmless(f"{parent} > "), style="dim")
    return text.append(harmless(name), style=style(concept))


def strength_bar(concept: ConceptScore) -> Text:
    """Return a bar of the strength, full at 4."""
    step = int(min(max(0.0, concept.strength) * 2, 7))  # infinite for a score of 1
    return Text(f"{_BAR[step] * 3} {concept.strength:+.1f}", style=colour(concept))


def unseen(event: TokenEvent) -> str:
    """Return why a token has no scores, or ""."""
    return f"unseen: {event.unseen}" if event.unseen else ""


def begins(event: TokenEvent, risen: Mapping[int, Sequence[Event]], *, brief: bool = False) -> str:
    """Return the concepts whose running score rises over its threshold at a token, or ""."""
    names = [name_of(one, brief=brief) for one in risen.get(event.position, ())] if risen else []
    return f"from here: {', '.join(names)}" if names else ""


def _begun(risen: Mapping[int, Sequence[Event]], start: int, stop: int) -> list[str]:
    """Return the concepts that rise at these positions, each once, in their order."""
    events = [event for column, some in sorted(risen.items()) if start <= column < stop for event in some]
    return list(dict.fromkeys(name_of(event, brief=True) for event in events))


def name_of(event: Event, *, brief: bool, packs: bool = True) -> str:
    """Return a concept's name, with its families before it unless `brief`; `packs`: with the name of its pack."""
    names = (event.name if packs else event.name.rpartition(":")[2]).split("/")
    return names[-1] if brief else " > ".join(names)


def memories_read(event: TokenEvent) -> str:
    """Return which token each memory read most, or ""."""
    several = len(event.reading) > 1
    tokens = [
        f"{printable(one.token)} at {one.position} ({one.weight:.2f}{f' of {one.site}' if several else ''})"
        for one in event.reading
        if one.token_id >= 0
    ]
    return f"reads {', '.join(tokens)}" if tokens else ""


def printable(token: str) -> str:
    """Return a token on one line, escaped; blanks are quoted."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
    return shown if shown.strip() else repr(shown)


def share_right(concept: ConceptScore) -> str:
    """Return the concept's precision, or ""."""
    return "" if math.isnan(concept.precision) else f"{concept.precision:.0%}"


def right(concept: ConceptScore) -> str:
    """The same within a line."""
    return f" ({share_right(concept)} right)" if share_right(concept) else ""


def summary(
    console: Console,
    result: Result,
    lines: list[str],
    showing: Showing | None = None,
    *,
    k: int = 8,
    risen: Mapping[int, Sequence[Event]] = MappingProxyType({}),
) -> None:
    """Print the answer by sentences, its concepts, then `lines`; `risen`: as of the views."""
    above, brief = (None, False) if showing is None else (showing.above, showing.brief)
    only_running = showing is not None and len(showing.running) == result.pack.n_probes
    summed = summarise(result, k=3, above=above, word_ends=brief)
    if summed.answer.text.strip():
        console.print(Text("the answer, sentence by sentence", style="bold"))
    for sentence in summed.sentences:
        console.print(Text(harmless(sentence.text.strip())), soft_wrap=True)
        about = Text("    ")
        for concept in sentence.concepts:
            about.append(", " if len(about) > 4 else "").append(
                harmless(path_of(concept, brief=True)[-1] if brief else concept.name), style=style(concept)
            )
        if sentence.n_more:
            about.append(f" and {sentence.n_more} more", style="dim")
        for name in _begun(risen, sentence.start, sentence.stop):
            about.append(", " if len(about) > 4 else "").append(harmless(name), style="bold")
        if len(about) > 4:
            console.print(about, soft_wrap=True)
    table = plain_table(title="in the whole answer", title_justify="left")
    table.add_column(f"concept{_FROM_ROOT[brief]}", overflow="fold")
    table.add_column("strongest at", no_wrap=True)
    for name in ("right", "strength"):
        table.add_column(name, justify="right", no_wrap=True)
    for concept in summed.answer.concepts[:k]:
        table.add_row(
            path_text(concept, brief=brief),
            Text(printable(concept.token)),
            share_right(concept),
            f"{concept.strength:+.1f}",
        )
    mute = without_thresholds(result.pack)
    if table.rows or not (mute.all() or only_running or risen):
        what = "concept" if above is None else "concept that is to be shown"
        console.print(table if table.rows else nothing_listed(summed.answer, "the answer", what))
    if len(summed.answer.concepts) > k:
        console.print(Text(f"and {len(summed.answer.concepts) - k} more", style="dim"))
    if mute.any():
        best = plain_table(title=f"{RANKED}: highest scores over the generated tokens", title_justify="left")
        best.add_column("token", no_wrap=True)
        best.add_column("concept, from the root")
        best.add_column("score", justify="right", no_wrap=True)
        strongest = result.top(result.pack.n_probes, row=0, phase="generated")
        shown = mute if above is None else mute & (above < math.inf)
        for concept in [concept for concept in strongest if shown[concept.probe]][: k + 2]:
            best.add_row(Text(printable(concept.token)), path_text(concept), f"{concept.score:.2f}")
        console.print(best)
    lower = [lower_thresholds(summed)] if summed.n_lower else []
    for line in [*([summed.unlike] if summed.unlike else []), *lines, *lower]:
        console.print(Text(harmless(line)), soft_wrap=True)

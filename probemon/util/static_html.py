"""Static HTML for notebooks: built of elements, so that every text is escaped; without a script, and 300 KB at most.

    line = element("p", "of ", element("b", f"{n:,}"), " tokens", title="all rows")
    page = fragment("Result", [line, table(["concept", "score"], [[path_of(names), "0.93"]])])   # of _repr_html_

Ink and paper are the notebook's own, whatever its theme: a colour lies between them, and is half transparent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from probemon.util.harmless_text import clip, harmless

MAX_BYTES = 300_000
Child = str | Element
# A test computes how readable text is on each, on white and on black.
HUES = (
    (47, 110, 166), (46, 139, 87), (178, 107, 0), (150, 84, 168), (190, 70, 90), (20, 140, 150), (120, 125, 30),
    (128, 128, 128),
)  # fmt: skip
ALPHAS = (0.2, 0.32, 0.45)  # of a strength under 0.5, under 2, and over
_STYLE = """
.probemon { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; max-width: 110ch;
  overflow-wrap: anywhere; text-align: left; }
.probemon bdi { unicode-bidi: isolate; }
.probemon p { margin: 4px 0; }
.probemon .title { font-size: 16px; font-weight: 650; }
.probemon .dim { opacity: .72; }
.probemon .text { white-space: pre-wrap; line-height: 1.85; padding: 8px 12px; margin: 4px 0 8px;
  border: 1px solid rgb(128 128 128 / .35); border-radius: 8px; }
.probemon .text span { border-radius: 2px; cursor: default; }
.probemon .own { font-size: 85%; font-style: italic; }
.probemon .unseen { outline: 1px dashed rgb(128 128 128); outline-offset: -1px;
  background: repeating-linear-gradient(45deg, rgb(128 128 128 / .6) 0 1px, transparent 1px 5px); }
.probemon table { border-collapse: collapse; margin: 4px 0 8px; }
.probemon th, .probemon td { text-align: left; vertical-align: top; padding: 3px 18px 3px 0; white-space: normal;
  border: 0; border-bottom: 1px solid rgb(128 128 128 / .35); background: none; }
.probemon th { font-weight: 600; opacity: .72; }
.probemon .number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.probemon .key { padding: 1px 8px; margin-right: 6px; border-radius: 3px; }
.probemon ul { margin: 2px 0; padding-left: 20px; }
""" + "".join(
    # The line at the foot is seen on black, too, where a weak colour hardly is. It takes no room.
    f".probemon .h{hue}s{level} {{ background: rgb({r} {g} {b} / {alpha});"
    f" box-shadow: inset 0 -2px rgb({r} {g} {b}); }}\n"
    for hue, (r, g, b) in enumerate(HUES)
    for level, alpha in enumerate(ALPHAS)
)


def element(tag: str, *children: Child, kind: str = "", **attributes: str) -> Element:
    """Return an element of class `kind`. Texts are made harmless; line ends and tabs in them stay."""
    made = Element(tag, {"class": kind} if kind else {})
    for name, value in attributes.items():
        made.set(name, harmless(value, keep="\n"))
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + harmless(child, keep="\n\t")
        else:
            made.text = (made.text or "") + harmless(child, keep="\n\t")
    return made


def html_of(made: Element) -> str:
    """Return an element as text."""
    return tostring(made, encoding="unicode", method="html")


def size_of(made: Element) -> int:
    """Return the bytes of an element."""
    return len(html_of(made).encode())


def table(heads: Sequence[str], rows: Iterable[Sequence[Child]], *, numbers: Iterable[int] = ()) -> Element:
    """Return a table whose columns `numbers` stand to the right."""
    right = set(numbers)

    def line(tag: str, cells: Sequence[Child]) -> Element:
        return element("tr", *(element(tag, cell, kind="number" * (i in right)) for i, cell in enumerate(cells)))

    return element("table", element("thead", line("th", heads)), element("tbody", *(line("td", row) for row in rows)))


def path_of(names: Sequence[str]) -> Element:
    """Return a path from the root to a concept, those above it in grey. Long names and long paths are cut."""
    *above, name = names
    shown = above if len(above) <= 8 else [*above[:4], "…", *above[-3:]]
    grey = [element("bdi", clip(parent, 60)) for parent in shown]
    parents = [child for parent in grey for child in (parent, " › ")]
    return element("span", element("span", *parents, kind="dim"), element("bdi", clip(name, 60)))


class Colours:
    """Gives each root the next colour, and those for which none is left the same grey."""

    def __init__(self) -> None:
        self.hues: dict[str, int] = {}

    def of(self, root: str, strength: float) -> str:
        """Return the class of a concept under `root`: its colour is the deeper the stronger the concept is."""
        hue = self.hues.setdefault(root, min(len(self.hues), len(HUES) - 1))
        return f"h{hue}s{0 if strength < 0.5 else 1 if strength < 2 else 2}"

    def legend(self, most: int = 12) -> Element:
        """Return the roots in their colours."""
        keys = [element("span", clip(root, 60), kind=f"key {self.of(root, 1.0)}") for root in list(self.hues)[:most]]
        more = [f"and {len(self.hues) - most:,} more"] if len(self.hues) > most else []
        return element("p", *keys, *more)


def fragment(title: str, parts: Iterable[Element]) -> str:
    """Return what a notebook shows: a title over parts, of which one that is too large is left out, and said to be."""
    begin = f'<div class="probemon"><style>{_STYLE}</style>{html_of(element("p", clip(title, 300), kind="title"))}'
    pieces, room = [begin], MAX_BYTES - len(begin.encode()) - 10_000
    for part in parts:
        text = html_of(part)
        size = len(text.encode())
        if size > room:
            text = html_of(element("p", f"A part of {size:,} bytes is left out: it is too large for a notebook."))
            size = len(text)
        if size > room:  # so many parts were left out
            break
        pieces.append(text)
        room -= size
    return "".join([*pieces, "</div>"])

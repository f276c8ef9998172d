"""Static HTML for notebooks: parts in one page without scripts, at most 300 KB.

page = macros("monitor/result.html.j2")
fragment("Result", [page.coverage(...), page.legend(colours.keys(), 0)])
"""

from __future__ import annotations

from collections.abc import Iterable

from probemon.util.templates import macros

MAX_BYTES = 300_000
HUES = (
    (47, 110, 166), (46, 139, 87), (178, 107, 0), (150, 84, 168), (190, 70, 90), (20, 140, 150), (120, 125, 30),
    (128, 128, 128),
)  # fmt: skip
ALPHAS = (0.2, 0.32, 0.45)  # for strengths under 0.5, under 2, and above


class Colours:
    """Gives each root the next colour, at last grey."""

    def __init__(self) -> None:
        self.hues: dict[str, int] = {}

    def of(self, root: str, strength: float) -> str:
        """Return the CSS class of a concept; stronger ones are more opaque."""
        hue = self.hues.setdefault(root, min(len(self.hues), len(HUES) - 1))
        return f"h{hue}s{0 if strength < 0.5 else 1 if strength < 2 else 2}"

    def legend(self, most: int = 12) -> str:
        """Return the legend of the roots."""
        keys = [(root, self.of(root, 1.0)) for root in list(self.hues)[:most]]
        return macros("util/static.html.j2").legend(keys, len(self.hues) - most)


def fragment(title: str, parts: Iterable[str]) -> str:
    """Return a titled fragment; a part that is too large becomes a note."""
    page = macros("util/static.html.j2")
    begin = page.begin(title, HUES, ALPHAS)
    pieces, room = [begin], MAX_BYTES - len(begin.encode()) - 10_000
    for part in parts:
        text, size = part, len(part.encode())
        if size > room:
            text = page.left_out(size)
            size = len(text)
        if size > room:  # even the notes do not fit
            break
        pieces.append(text)
        room -= size
    return "".join([*pieces, "</div>"])

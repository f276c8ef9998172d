"""Sees that no page of a built site loads anything from elsewhere.

python scripts/docs_check.py site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
ELSEWHERE = re.compile(r"(https?:)?//")
IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Loaded(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(LOADED.get(tag, "")) or ""
        named_only = tag == "link" and values.get("rel") in ("canonical", "prev", "next", "alternate")
        if ELSEWHERE.match(address) and not named_only:
            self.elsewhere.append(address)
        self.elsewhere += IN_STYLE.findall(values.get("style") or "")


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return "file: address" for each thing that a page, a picture or a style sheet loads from elsewhere."""
    lines = []
    for page in sorted(site.rglob("*.html")):
        parser = Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        lines += [f"{page.relative_to(site)}: {address}" for address in parser.elsewhere]
    for sheet in sorted([*site.rglob("*.svg"), *site.rglob("*.css")], key=lambda sheet: sheet.suffix, reverse=True):
        found = IN_STYLE.findall(sheet.read_text(encoding="utf-8"))
        lines += [f"{sheet.relative_to(site)}: {address}" for address in found]
    return lines


if __name__ == "__main__":
    lines = loaded_from_elsewhere(Path(sys.argv[1]))
    sys.exit("\n".join(["these would be loaded from elsewhere:", *lines]) if lines else 0)

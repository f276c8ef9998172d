"""Docstrings as Markdown reads them, for the site: an extension of griffe, named in mkdocs.yml.

Options that stand one a line become a list; what follows them is a paragraph of its own.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"`[\w.]+(\([^`]*\))?`(, `\w+`)*: ")


def as_markdown(text: str) -> str:
    """Return a docstring with its options as a list."""
    lines: list[str] = []
    listing = False
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        if OPTION.match(line):
            if not listing and before:
                lines.append("")
            line, listing = f"- {line}", True
        elif not line.strip():
            listing = False
        elif listing and before.endswith((".", ")")) and line[0].isupper():  # a sentence after the list
            lines.append("")
            listing = False
        lines.append(line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Changes every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

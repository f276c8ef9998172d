"""Shortens another library's error to one line.

first_sentence(OSError("no tokenizer from one of:\\n(1) a file,\\n(2) a class.\\nInstall it."))
# "no tokenizer from one of: (1) a file, (2) a class"
"""

from __future__ import annotations

import re

_END = re.compile(r"[.!?](?=\s+[A-Z])")
_GOES_ON = (":", ",", ";", "(")


def first_sentence(error: BaseException | None, most: int = 300) -> str:
    """Return the first line of an error (first sentence if it spans lines), or its class's name."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.endswith(_GOES_ON):
        text = _END.split(" ".join(lines), maxsplit=1)[0]
    return (text if len(text) <= most else f"{text[: most - 1]}…").rstrip(".").rstrip(" :,;(")

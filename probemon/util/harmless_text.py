"""Makes other people's texts safe to display.

harmless("\\x1b[2Jname")              # "\\\\x1b[2Jname"
"""

from __future__ import annotations

import re

# Control, zero-width, direction, invisible and tag characters, line separators, surrogate halves. Joiners stay: scripts
# and emoji need them.
_HARMFUL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def harmless(text: str, keep: str = "") -> str:
    """Escape control and invisible characters, except `keep`. Idempotent."""
    if text.isascii() and text.isprintable():
        return text
    return _HARMFUL.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )


def clip(text: str, n: int) -> str:
    """Return the harmless text on one line, at most `n` characters of it and the length."""
    if len(text) <= n:
        return harmless(text)
    return f"{harmless(text[:n])}… ({len(text):,} characters)"


def is_unicode(text: str) -> bool:
    """True if UTF-8 can hold the text, unlike undecodable shell bytes."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

"""Texts of others, made harmless where they are shown.

harmless("\\x1b[2Jname")              # "\\\\x1b[2Jname"
clip(name, 60)                        # harmless, and at most 60 characters and what says that there are more
"""

from __future__ import annotations

import re

# Control characters (C0, C1, DEL); soft hyphens, marks and embeddings of direction, spaces without width, line and
# paragraph separators, invisible operators, interlinear and tag characters; halves of surrogate pairs. Joiners stay:
# scripts and emoji need them.
_HARMFUL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def harmless(text: str, keep: str = "") -> str:
    """Return the text with every character written out that a terminal would obey or nobody would see, but for `keep`.

    Doing it twice changes nothing more.
    """
    if text.isascii() and text.isprintable():
        return text
    return _HARMFUL.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )


def clip(text: str, n: int) -> str:
    """Return the text harmless, on one line; of a longer one the first `n` characters and how many there are."""
    if len(text) <= n:
        return harmless(text)
    return f"{harmless(text[:n])}… ({len(text):,} characters)"


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a text: not half of a surrogate pair, as of bytes that the shell could not decode."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

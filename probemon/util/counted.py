"""Counts with their nouns.

counted(1, "probe")            # "1 probe"
counted(1_204, "probe")        # "1204 probes"
"""

from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """Return a count and its noun, plural except for 1."""
    return f"{n} {noun}{'' if n == 1 else 's'}"

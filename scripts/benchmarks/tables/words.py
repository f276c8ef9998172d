"""Words that tables of results have in common."""

from __future__ import annotations

JUDGED = {True: "", False: ", **missed**", None: ", cannot be told"}  # after a bar, by whether a claim holds


def reason_of(text: str) -> str:
    return text[:117].replace("|", "/").replace("<", "").replace("*", "") + ("..." if len(text) > 117 else "")

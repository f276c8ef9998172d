"""JSON that somebody wrote by hand, or another program: no key stands twice in an object, and every text can be written
again.

    loads(text)                           # RepeatedKey, ValueError or RecursionError where it cannot be taken as it is
    loads(text, constant=no_constant)     # NaN and infinities, which are no JSON, are a ValueError

Python's own reader keeps the last of two values of one key and loses the first, with the probes or the edges in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any


class RepeatedKey(ValueError):
    """A key stands twice in one object; the text names it and says what to do."""


def loads(text: str, *, constant: Callable[[str], Any] | None = None, halves: bool = False) -> Any:
    """Return what a JSON text holds.

    `constant`: what is taken for "NaN", "Infinity" and "-Infinity", else floats.
    `halves`: half of a surrogate pair is taken, too.

    Raises `RepeatedKey` (a `ValueError`), another `ValueError` for what is no JSON or half of a surrogate pair,
    `RecursionError`.
    """
    value = _decoder(constant).decode(text)
    if not halves and "\\u" in text:  # half of a surrogate pair, which no UTF-8 can hold
        json.dumps(value, ensure_ascii=False).encode()
    return value


@cache  # making one takes as long as reading a line
def _decoder(constant: Callable[[str], Any] | None) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_once, parse_constant=constant)


def no_constant(name: str) -> Any:
    """Raise `ValueError`."""
    raise ValueError(f"{name} is no number of JSON: put a number there, or null")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RepeatedKey(
                    f"{key!r:.80} stands twice in one object, and only the last would be read: put the two together, or"
                    " give one another name"
                )
            seen.add(key)
    return value

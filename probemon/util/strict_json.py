"""Strict JSON: rejects repeated keys (Python drops all but the last) and texts that UTF-8 cannot hold.

loads(text)                           # RepeatedKey, ValueError or RecursionError
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any


class RepeatedKey(ValueError):
    """A key appears twice in one object."""


def loads(text: str, *, constant: Callable[[str], Any] | None = None, halves: bool = False) -> Any:
    """Return the value of a JSON text.

    `constant`: called for NaN and infinities; None makes them floats.
    `halves`: accept half of a surrogate pair.

    Raises `RepeatedKey`, another `ValueError`, or `RecursionError`.
    """
    value = _decoder(constant).decode(text)
    if not halves and "\\u" in text:  # UTF-8 cannot hold half of a surrogate pair
        json.dumps(value, ensure_ascii=False).encode()
    return value


@cache
def _decoder(constant: Callable[[str], Any] | None) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_once, parse_constant=constant)


def no_constant(name: str) -> Any:
    """Raise `ValueError`."""
    raise ValueError(f"{name} is not a JSON number: put a number there, or null")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise RepeatedKey(
                    f"{key!r:.80} appears twice in one object, and only the last would be read: put the two together,"
                    " or give one another name"
                )
            keys.add(key)
    return value

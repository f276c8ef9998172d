"""Tells reasoning from the reply, by the tokens that a model writes around its reasoning.

marks = marks_of(tokenizer)                         # of <think> and </think>, for one; None if there are none
mask, is_open = marks.reasons([5, 9, 7], is_open=False)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)


class ReasoningMarks(NamedTuple):
    """Ids of the tokens that begin and end reasoning; they belong to neither part."""

    begin: int
    end: int

    def reasons(self, ids: Iterable[int], is_open: bool = False) -> tuple[list[bool], bool]:
        """Return which of a row's next tokens are reasoning, and whether reasoning goes on after them.

        `is_open`: whether it went on before. A prompt that ends with the first mark begins reasoning.
        """
        found = []
        for id in ids:
            is_mark = id in self
            found.append(is_open and not is_mark)
            is_open = id == self.begin if is_mark else is_open
        return found, is_open


def marks_of(tokenizer: Any) -> ReasoningMarks | None:
    """Return the marks that are tokens of a tokenizer, or None."""
    for pair in _PAIRS:
        ids = [_id_of(tokenizer, name) for name in pair]
        if ids[0] is not None and ids[1] is not None:
            return ReasoningMarks(ids[0], ids[1])
    return None


def _id_of(tokenizer: Any, name: str) -> int | None:
    try:
        id = tokenizer.convert_tokens_to_ids(name)
        return int(id) if id is not None and tokenizer.convert_ids_to_tokens(int(id)) == name else None
    except (AttributeError, KeyError, TypeError, ValueError):  # no tokenizer, or one of another kind
        return None

"""Tells reasoning from the reply, by the tokens that a model writes around its reasoning.

marks = marks_of(tokenizer)                         # of <think> and </think>, for one; None if there are none
marks.opened_by(prompt_ids)                         # whether the generation prompt begins reasoning
parts, is_open = marks.parts([5, 9, 7], is_open=False)     # True: reasoning, False: reply, None: a mark
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)


N_LAST = 3  # tokens of a prompt among which a template may begin reasoning; a turn cannot end there


class ReasoningMarks(NamedTuple):
    """Ids of the tokens that begin and end reasoning."""

    begin: int
    end: int

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt's last tokens begin reasoning. Marks before them are what somebody said."""
        last = [id for id in prompt[-N_LAST:] if id in self]
        return last[-1:] == [self.begin]

    def parts(self, ids: Iterable[int], is_open: bool) -> tuple[list[bool | None], bool]:
        """Return whether each next token of an answer is reasoning, None for a mark; and whether reasoning goes on.

        `is_open`: whether it went on before.
        """
        found = list[bool | None]()
        for id in ids:
            is_mark = id in self
            found.append(None if is_mark else is_open)
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

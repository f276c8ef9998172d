"""Renders examples as texts for the model, and marks the tokens that count.

texts = render(examples, tokenizer, roles=("assistant",))
texts[0].counts(tokens)                            # [T] bool
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.errors import ChatRefused, ConfigError, TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.chat_forms import REASONING
from probemon.host.chat_parts import ChatPart, parts_of
from probemon.host.chat_template import render as render_chat
from probemon.host.text_tokens import counted as counted_tokens
from probemon.host.text_tokens import in_ranges
from probemon.lab.corpora.windows import WindowTokens
from probemon.lab.training.examples import Example

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Text:
    """An example as the model reads it.

    - `counted`: ranges of characters that count; None for all.
    - `is_chat`: has the template's special tokens.
    - `counted_tokens [T]`: without offsets.
    - `reads_date`: its template writes the date.
    - `places`: of a chat, what counts.
    """

    where: str
    text: str
    counted: Ranges | None = None
    is_chat: bool = False
    counted_tokens: Mask | None = field(default=None, compare=False, repr=False)
    reads_date: bool = False
    places: tuple[ChatPart, ...] = field(default=(), compare=False, repr=False)

    def place_of(self, turn: int | None, at: int) -> int | None:
        """Return where a character of a turn's content is in the text; None if it does not count."""
        if turn is None:
            return at
        found = (part for part in self.places if part.turn == turn and part.inside[0] <= at < part.inside[1])
        return next((part.offset + at for part in found), None)

    def counts(self, tokens: WindowTokens) -> Mask:
        """Return which tokens count `[T]`."""
        if self.counted is None:
            return np.ones(len(tokens), dtype=bool)
        if self.counted_tokens is not None:
            return self.counted_tokens
        return in_ranges(tokens.start, tokens.end, self.counted)


def after(text: Text, n_before: int, turn: int | None) -> Text:
    """Return a text of which only what follows the first `n_before` characters, of a chat's turn, counts."""
    first = text.place_of(turn, n_before)
    assert first is not None
    ranges = text.counted or ((0, len(text.text)),)
    return replace(text, counted=tuple((max(a, first), b) for a, b in ranges if b > first))


def render(
    examples: Sequence[Example], tokenizer: Any, *, roles: Sequence[str], chat_date: str = CHAT_DATE
) -> list[Text]:
    """Return the text of each example; in chats, turns of `roles` count. Raises `TrainingError`."""
    return [
        _chat(example, tokenizer, roles, chat_date) if example.messages else Text(example.where, example.text)
        for example in examples
    ]


def _chat(example: Example, tokenizer: Any, roles: Sequence[str], chat_date: str) -> Text:
    if not getattr(tokenizer, "chat_template", None):
        raise TrainingError(
            f"{example.where} is a chat, and this model's tokenizer has no chat template: give texts, or another model"
        )
    try:
        chat = render_chat(tokenizer, example.messages, tools=example.tools, date=chat_date)
    except ChatRefused as error:
        raise TrainingError(f"{example.where}: {error}") from error
    try:
        places = parts_of(chat, roles)
    except ChatRefused as error:
        raise TrainingError(f"{example.where}: {error}") from error
    ranges = [(part.start, part.stop) for part in places]
    if not ranges:
        condition = " that says anything" if any(message["role"] in roles for message in chat.said) else ""
        raise TrainingError(
            f"{example.where} has no {'' if roles == (REASONING,) else 'turn of '}{' or '.join(roles)}{condition} for"
            " its labels: choose others by --on"
        )
    tokens = None
    if not getattr(tokenizer, "is_fast", False):
        try:
            tokens = counted_tokens(tokenizer, chat.text, chat.ids, ranges)
        except ConfigError as error:
            raise TrainingError(
                f"{example.where}: which tokens are of {' or '.join(roles)} is unknown: {error}"
            ) from None
    return Text(example.where, chat.text, tuple(ranges), True, tokens, chat.reads_date, places)

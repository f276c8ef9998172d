"""Renders examples as texts for the model, and marks the tokens that count.

texts = render(examples, tokenizer, roles=("assistant",))
texts[0].counts(tokens)                            # [T] bool
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.errors import ChatRefused, ConfigError, TrainingError
from probemon.host.chat_dates import CHAT_DATE
from probemon.host.chat_template import Chat
from probemon.host.chat_template import render as render_chat
from probemon.host.text_tokens import counted as counted_tokens
from probemon.host.text_tokens import in_ranges
from probemon.lab.corpora.windows import WindowTokens
from probemon.lab.training.examples import Example

Ranges = tuple[tuple[int, int], ...]
_MARK = "\uf8ff"  # of the private use area


@dataclass(frozen=True)
class Text:
    """An example as the model reads it.

    - `counted`: ranges of characters that count; None for all.
    - `is_chat`: has the template's special tokens.
    - `counted_tokens [T]`: without offsets.
    - `reads_date`: its template writes the date.
    - `offsets`: of each counted turn, where the first character of its content would stand.
    """

    where: str
    text: str
    counted: Ranges | None = None
    is_chat: bool = False
    counted_tokens: Mask | None = field(default=None, compare=False, repr=False)
    reads_date: bool = False
    offsets: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)

    def counts(self, tokens: WindowTokens) -> Mask:
        """Return which tokens count `[T]`."""
        if self.counted is None:
            return np.ones(len(tokens), dtype=bool)
        if self.counted_tokens is not None:
            return self.counted_tokens
        return in_ranges(tokens.start, tokens.end, self.counted)


def after(text: Text, n_before: int, turn: int | None) -> Text:
    """Return a text of which only what follows the first `n_before` characters, of a chat's turn, counts."""
    first = n_before + (0 if turn is None else text.offsets[turn])
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
    role_turns = [at for at, message in enumerate(chat.said) if message["role"] in roles]
    turns = [at for at in role_turns if chat.said[at]["content"].strip()]
    ranges, offsets = _placed(example, chat, turns)
    if not ranges:
        condition = " that says anything" if role_turns else ""
        raise TrainingError(
            f"{example.where} has no turn of {' or '.join(roles)}{condition} for its labels: choose others by --on"
        )
    tokens = None
    if not getattr(tokenizer, "is_fast", False):
        try:
            tokens = counted_tokens(tokenizer, chat.text, chat.ids, ranges)
        except ConfigError as error:
            raise TrainingError(
                f"{example.where}: which tokens are of {' or '.join(roles)} is unknown: {error}"
            ) from None
    return Text(example.where, chat.text, tuple(ranges), True, tokens, chat.reads_date, offsets)


def _placed(example: Example, chat: Chat, turns: Sequence[int]) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Return the ranges of these turns in a chat's text, in order, and `Text.offsets`. Raises `TrainingError`.

    Renders marks instead of the turns, because a turn may repeat the template's text.
    """
    marks = {f"{_MARK}{at}{_MARK}": chat.said[at]["content"] for at in turns}
    marked = [dict(message) for message in chat.said]
    for at, mark in zip(turns, marks, strict=True):
        marked[at]["content"] = mark
    try:
        rest = chat.written(marked, add_generation_prompt=False)
    except Exception as error:  # templates are programs of the model
        raise TrainingError(f"{example.where}: the model's chat template looks into what is said: {error}") from error
    around, contents, order = [], [], list[int]()
    turn_of = dict(zip(marks, turns, strict=True))
    while occurrences := sorted((rest.find(mark), mark) for mark in marks if mark in rest):
        at, mark = occurrences[0]
        around.append(rest[:at])
        contents.append(marks.pop(mark))
        order.append(turn_of[mark])
        rest = rest[at + len(mark) :]
    # Templates may strip turns, so a prefix can match in several ways.
    ways: dict[int, list[tuple[int, int]]] = {0: []}
    for before, content in zip(around, contents, strict=True):
        core = content.strip()
        leading, trailing = content.split(core)[0], content[content.index(core) + len(core) :]
        further: dict[int, list[tuple[int, int]]] = {}
        for end, places in ways.items():
            first = end + len(before)
            n_leading = len(chat.text[first:]) - len(chat.text[first:].lstrip())
            start = first + n_leading
            fits = chat.text.startswith(before, end) and chat.text.startswith(core, start)
            if fits and leading.endswith(chat.text[first:start]):
                stop = start + len(core)
                for n in range(len(trailing), -1, -1):
                    if chat.text.startswith(trailing[:n], stop):
                        further.setdefault(stop + n, [*places, (first, stop + n)])
        ways = further
    solutions = [places for end, places in ways.items() if chat.text[end:] == rest]
    if marks or not solutions:
        raise TrainingError(
            f"{example.where}: the model's chat template changes what is said (many cut reasoning in <think> away), so"
            " the place of each turn is unknown: leave out what the template removes"
        )
    offsets = {}
    for turn, content, (first, stop) in zip(order, contents, solutions[0], strict=True):
        core = content.strip()
        offsets[turn] = chat.text.index(core, first, stop) - content.index(core)
    return solutions[0], offsets

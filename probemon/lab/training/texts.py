"""Makes of examples what a host reads: texts, of chats in its own template, and the tokens of each that count.

    texts = render(examples, tokenizer, roles=("assistant",))
    read = tokenise(texts, tokenizer, reader)          # the tokens of each text
    read[0].counts                                     # [T] bool: not of the template, nor of another role

A chat's turns stand where the template puts marks that are given in their places, with or without the white space
around them; where it does not say, it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
_MARK = "\uf8ff"  # of the private use area: of no chat, and of no template


@dataclass(frozen=True)
class Text:
    """What a host reads of an example.

    - `counted`: the characters that count; None for all.
    - `is_chat`: it holds the special tokens of a template, and needs none before it.
    - `counted_tokens [T]`: which tokens count, where the tokenizer does not say where they stand.
    - `reads_date`: its template writes which day it is.
    """

    where: str
    text: str
    counted: Ranges | None = None
    is_chat: bool = False
    counted_tokens: Mask | None = field(default=None, compare=False, repr=False)
    reads_date: bool = False

    def counts(self, tokens: WindowTokens) -> Mask:
        """Return which of its tokens count `[T]`: those with a character that does."""
        if self.counted is None:
            return np.ones(len(tokens), dtype=bool)
        if self.counted_tokens is not None:
            return self.counted_tokens
        return in_ranges(tokens.start, tokens.end, self.counted)


def render(
    examples: Sequence[Example], tokenizer: Any, *, roles: Sequence[str], chat_date: str = CHAT_DATE
) -> list[Text]:
    """Return the text of each example; of a chat the turns of `roles` count. Raises `TrainingError`."""
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
    of_roles = [at for at, message in enumerate(chat.said) if message["role"] in roles]
    ranges = _placed(example, chat, [at for at in of_roles if chat.said[at]["content"].strip()])
    if not ranges:
        silent = " that says anything" if of_roles else ""
        raise TrainingError(
            f"{example.where} has no turn of {' or '.join(roles)}{silent}, of whom its labels would be: choose others"
            " by --on"
        )
    tokens = None
    if not getattr(tokenizer, "is_fast", False):
        try:
            tokens = counted_tokens(tokenizer, chat.text, chat.ids, ranges)
        except ConfigError as error:
            raise TrainingError(
                f"{example.where}: which tokens are of {' or '.join(roles)} is unknown: {error}"
            ) from None
    return Text(example.where, chat.text, tuple(ranges), True, tokens, chat.reads_date)


def _placed(example: Example, chat: Chat, turns: Sequence[int]) -> list[tuple[int, int]]:
    """Return where in the text of a chat these turns stand, in their order there. Raises `TrainingError`.

    A turn may say what the template itself says, so it is not looked for: the template is asked for marks in the turns'
    places, and what it wrote around them is what stands around the turns.
    """
    marks = {f"{_MARK}{at}{_MARK}": chat.said[at]["content"] for at in turns}
    marked = [dict(message) for message in chat.said]
    for at, mark in zip(turns, marks, strict=True):
        marked[at]["content"] = mark
    try:
        rest = chat.written(marked, add_generation_prompt=False)
    except Exception as error:  # a template is a program of the model's own
        raise TrainingError(f"{example.where}: the model's chat template looks into what is said: {error}") from error
    around, contents = [], []
    while found := sorted((rest.find(mark), mark) for mark in marks if mark in rest):
        at, mark = found[0]
        around.append(rest[:at])
        contents.append(marks.pop(mark))
        rest = rest[at + len(mark) :]
    # Many templates strip some turns, on some sides; so a beginning of the text may be read in several ways.
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
    whole = [places for end, places in ways.items() if chat.text[end:] == rest]
    if marks or not whole:
        raise TrainingError(
            f"{example.where}: the model's chat template changes what is said (many cut reasoning in <think> away), so"
            " where each turn stands is unknown: say only what the template writes"
        )
    return whole[0]

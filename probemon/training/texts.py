"""Makes of examples what a host reads: texts, of chats in its own template, and the tokens of each that count.

    texts = render(examples, tokenizer, roles=("assistant",))
    read = tokenise(texts, tokenizer, reader)          # the tokens of each text
    read[0].counts                                     # [T] bool: not of the template, nor of another role

A chat's turns are found again in what the template made of them, in order; what is not found is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.errors import TrainingError
from probemon.offline.windows import Tokens
from probemon.training.examples import Example

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Text:
    """What a host reads of an example.

    - `counted`: the characters that count; None for all.
    - `is_chat`: it holds the special tokens of a template, and needs none before it.
    """

    where: str
    text: str
    counted: Ranges | None = None
    is_chat: bool = False

    def counts(self, tokens: Tokens) -> Mask:
        """Return which of its tokens count `[T]`: those with a character that does."""
        if self.counted is None:
            return np.ones(len(tokens), dtype=bool)
        return overlapping(tokens, self.counted)


def overlapping(tokens: Tokens, ranges: Sequence[tuple[int, int]]) -> Mask:
    """Return which tokens `[T]` have a character in one of the ranges."""
    found = np.zeros(len(tokens), dtype=bool)
    for start, end in ranges:
        found |= (tokens.start < end) & (tokens.end > start)
    return found


def render(examples: Sequence[Example], tokenizer: Any, *, roles: Sequence[str]) -> list[Text]:
    """Return the text of each example; of a chat the turns of `roles` count. Raises `TrainingError`."""
    return [
        _chat(example, tokenizer, roles) if example.messages else Text(example.where, example.text)
        for example in examples
    ]


def _chat(example: Example, tokenizer: Any, roles: Sequence[str]) -> Text:
    if not getattr(tokenizer, "chat_template", None):
        raise TrainingError(
            f"{example.where} is a chat, and this model's tokenizer has no chat template: give texts, or another model"
        )
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in example.messages], tokenize=False)
    except Exception as error:  # a template is a program of the model's own
        raise TrainingError(f"{example.where}: the model's chat template refuses these messages: {error}") from error
    counted, at = [], 0
    for message in example.messages:
        content = _found_in(text, message, at)
        if content is None:
            raise TrainingError(
                f"{example.where}: what the {message['role']} says is not in what the model's chat template makes of it"
            )
        if message["role"] in roles:
            counted.append(content)
        at = content[1]
    if not counted:
        raise TrainingError(
            f"{example.where} has no turn of {' or '.join(roles)}, of whom its labels would be: choose others by --on"
        )
    return Text(example.where, text, tuple(counted), is_chat=True)


def _found_in(text: str, message: Mapping[str, Any], at: int) -> tuple[int, int] | None:
    for content in (message["content"], message["content"].strip()):  # many templates strip
        start = text.find(content, at)
        if content and start >= 0:
            return start, start + len(content)
    return None if message["content"].strip() else (at, at)

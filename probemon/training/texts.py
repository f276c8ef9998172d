"""Makes of examples what a host reads: texts, of chats in its own template, and the tokens of each that count.

    texts = render(examples, tokenizer, roles=("assistant",))
    read = tokenise(texts, tokenizer, reader)          # the tokens of each text
    read[0].counts                                     # [T] bool: not of the template, nor of another role

A chat's turns stand where the template puts marks that are given in their places; where it does not say, it is an
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.errors import TrainingError
from probemon.offline.windows import Tokens
from probemon.training.examples import Example

Ranges = tuple[tuple[int, int], ...]
_MARK = "\uf8ff"  # of the private use area: of no chat, and of no template


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
    text, places = _placed(example, tokenizer)
    of_roles = [place for message, place in zip(example.messages, places, strict=True) if message["role"] in roles]
    counted = [(start, end) for start, end in of_roles if text[start:end].strip()]
    if not counted:
        silent = " that says anything" if of_roles else ""
        raise TrainingError(
            f"{example.where} has no turn of {' or '.join(roles)}{silent}, of whom its labels would be: choose others"
            " by --on"
        )
    return Text(example.where, text, tuple(counted), is_chat=True)


def _placed(example: Example, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and where in it each turn stands. Raises `TrainingError`.

    A turn may say what the template itself says, so it is not looked for: the template is asked for marks in the turns'
    places, and what it wrote around them is what stands around the turns.
    """
    turns = [str(message["content"]) for message in example.messages]
    text = _templated(example, tokenizer, turns)
    marks = [f"{_MARK}{i}{_MARK}" if turn.strip() else turn for i, turn in enumerate(turns)]
    marked = _templated(example, tokenizer, marks)
    for said in (turns, [turn.strip() for turn in turns]):  # many templates strip
        filled, places = "", list[tuple[int, int]]()
        rest = marked
        for mark, turn in zip(marks, said, strict=True):
            if mark.strip():  # of a blank turn there is nothing to place
                before, _, rest = rest.partition(mark)
                filled += before + turn
            places.append((len(filled) - len(turn) * bool(mark.strip()), len(filled)))
        if filled + rest == text:
            return text, places
    raise TrainingError(
        f"{example.where}: the model's chat template changes what is said, so where each turn stands is unknown: give"
        " the chat as a text of its own with 'spans' or 'labels'"
    )


def _templated(example: Example, tokenizer: Any, turns: Sequence[str]) -> str:
    messages = [{**message, "content": turn} for message, turn in zip(example.messages, turns, strict=True)]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program of the model's own
        raise TrainingError(f"{example.where}: the model's chat template refuses these messages: {error}") from error

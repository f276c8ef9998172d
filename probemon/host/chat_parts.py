"""Says where the parts of a chat are in its rendered text: what each role says, and reasoning.

    for part in parts_of(render(tokenizer, messages)):
        part.turn, part.part, chat.text[part.start : part.stop]     # 1, "assistant", "A whale."

Empty parts, and reasoning that the template leaves out (of earlier turns), have no place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from probemon.errors import ChatRefused
from probemon.host.chat_forms import PARTS, REASONING, Message, reasoning_in, stated_reasoning
from probemon.host.chat_template import Chat

_MARK = "\uf8ff"  # of the private use area


@dataclass(frozen=True)
class ChatPart:
    """Characters `start` to `stop` of a rendered chat.

    - `turn`: number of its message, from 0. `part`: its role, or "reasoning".
    - `offset`: where the first character of its message's content would be; `inside`: its range of that content, empty
      for reasoning in a field of its own.
    """

    turn: int
    part: str
    start: int
    stop: int
    offset: int = 0
    inside: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Said:
    """A part as the message has it."""

    turn: int
    part: str
    text: str
    inside: tuple[int, int]


def parts_of(chat: Chat, parts: Sequence[str] = PARTS) -> tuple[ChatPart, ...]:
    """Return these parts of a chat rendered without a generation prompt, in order. Raises `ChatRefused`.

    Renders marks instead of the parts, because they may repeat the template's text.
    """
    wanted = [one for one in _said(chat.said) if one.part in parts and one.text.strip()]
    said = {f"{_MARK}{at}{_MARK}": one for at, one in enumerate(wanted)}
    try:
        rest = chat.written(_marked(chat.said, said))
    except Exception as error:  # templates are programs of the model
        raise ChatRefused(f"the model's chat template looks into what is said: {error}") from error
    around, order = [], []
    while occurrences := sorted((rest.find(mark), mark) for mark in said if mark in rest):
        at, mark = occurrences[0]
        around.append(rest[:at])
        order.append(said.pop(mark))
        rest = rest[at + len(mark) :]
    solutions = _solutions(chat.text, around, order, rest)
    if any(one.part != REASONING for one in said.values()) or not solutions:
        raise ChatRefused(
            "the model's chat template changes what is said, so the place of each turn is unknown: leave out what the"
            " template removes"
        )
    return tuple(_placed(chat.text, one, place) for one, place in zip(order, solutions[0], strict=True))


def _said(messages: Iterable[Message]) -> Iterable[_Said]:
    for at, message in enumerate(messages):
        role, content = message["role"], message["content"]
        reasons = role == "assistant"
        inside = reasoning_in(content) if reasons else None
        if reasons and (stated := stated_reasoning(message)):
            yield _Said(at, REASONING, stated, (0, 0))
        elif inside is not None:
            start, stop, answer = inside
            yield _Said(at, REASONING, content[start:stop], (start, stop))
            yield _Said(at, role, content[answer:], (answer, len(content)))
            continue
        yield _Said(at, role, content, (0, len(content)))


def _marked(messages: Iterable[Message], said: dict[str, _Said]) -> list[dict[str, object]]:
    """Return the messages with marks instead of their parts."""
    marked = [dict(message) for message in messages]
    for mark, one in reversed(said.items()):  # from the end of a content
        message, (start, stop) = marked[one.turn], one.inside
        if start == stop:
            message["reasoning_content"] = mark
        else:
            message["content"] = f"{message['content'][:start]}{mark}{message['content'][stop:]}"
    return marked


def _solutions(text: str, around: list[str], order: list[_Said], rest: str) -> list[list[tuple[int, int]]]:
    """Return the ways to find the parts in a text; templates may strip each of them."""
    ways: dict[int, list[tuple[int, int]]] = {0: []}
    for before, one in zip(around, order, strict=True):
        core = one.text.strip()
        leading, trailing = one.text.split(core)[0], one.text[one.text.index(core) + len(core) :]
        further: dict[int, list[tuple[int, int]]] = {}
        for end, places in ways.items():
            first = end + len(before)
            n_leading = len(text[first:]) - len(text[first:].lstrip())
            start = first + n_leading
            fits = text.startswith(before, end) and text.startswith(core, start)
            if fits and leading.endswith(text[first:start]):
                stop = start + len(core)
                for n in range(len(trailing), -1, -1):
                    if text.startswith(trailing[:n], stop):
                        further.setdefault(stop + n, [*places, (first, stop + n)])
        ways = further
    return [places for end, places in ways.items() if text[end:] == rest]


def _placed(text: str, one: _Said, place: tuple[int, int]) -> ChatPart:
    core = one.text.strip()
    offset = text.index(core, *place) - one.text.index(core) - one.inside[0]
    return ChatPart(one.turn, one.part, *place, offset, one.inside)

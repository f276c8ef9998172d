"""Chats as a model reads them: the one place where a tokenizer's chat template is run.

    chat = render(tokenizer, messages, tools=tools, add_generation_prompt=True)
    chat.text, chat.ids                                     # what the template writes, and its tokens
    chat = render(tokenizer, messages, date="2025-01-01")   # for files: today's date is written nowhere

Templates are programs of the model's own, and differ in what they take: arguments of tool calls as objects or as JSON
in a text, content that is "", absent or null, contents as texts or as parts, the role "developer" or "system". The
forms of `probemon.host.chat_forms` are tried in order. The first is taken in which the template raises nothing, leaves
nothing out, escapes no arguments once more, and writes no None for an empty content. Where there is none,
`ChatRefused` names the message and the part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date as Day
from functools import cached_property
from typing import Any

from probemon.errors import ChatRefused
from probemon.host.chat_dates import date_parts, may_read_date, parse_date, with_stated_date
from probemon.host.chat_forms import (
    ChatForm,
    Messages,
    as_object,
    calls_of,
    forms,
    normalised,
    probed,
    with_arguments,
    wrong_arguments,
)

_LONG = 40  # characters of a message: fewer may stand in a prompt by chance
_NOTHING = ("None", "null", "Undefined")  # what templates write for a content that they do not look at
_PARTS = ("{'type': 'text'", '{"type": "text"')  # as Python and JSON write a part of a content
_OTHER_DAY = 400  # days from another: no part of the date is the same


@dataclass(frozen=True)
class Chat:
    """A rendered chat: its text, and the form in which the template took it."""

    text: str
    said: Messages = field(repr=False)  # normalised
    form: ChatForm
    _template: _Template = field(repr=False)
    _prompting: bool = field(repr=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages as the template was given them."""
        return self.form.of(self.said)

    @cached_property
    def ids(self) -> list[int]:
        """The tokens, as the template's tokenizer gives them."""
        return self._template.ids(self.messages, self._prompting)

    @cached_property
    def reads_date(self) -> bool:
        """Whether the text says which day it is."""
        return self._template.reads_date(self.messages, self._prompting)

    def written(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """Return the text of other normalised messages in the same form. Raises what the template raises."""
        return self._template.write(self.form.of(messages), add_generation_prompt)


def render(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    date: str | None = None,
) -> Chat:
    """Return a chat as the tokenizer's template writes it. Raises `ChatRefused`.

    - `messages`, `tools`: of OpenAI's form
    - `date`: the day that the template is told, as YYYY-MM-DD; None for today
    """
    template = _Template(tokenizer, list(tools) if tools else None, None if date is None else parse_date(date))
    said, refusals, texts = normalised(messages), list[ChatRefused](), set[str]()
    for form in forms(said, template.source):
        try:
            text = _text(template, form, said, add_generation_prompt)
            if text in texts:  # as it was in another form, and refused
                continue
            texts.add(text)
            _check(template, form, said, add_generation_prompt, text)
        except ChatRefused as refusal:
            refusals.append(refusal)
        else:
            return Chat(text, said, form, template, add_generation_prompt)
    # Of the form in which the template got farthest: what it leaves out says more than what it raises on.
    raise max(refusals, key=lambda refusal: (refusal.__cause__ is None, refusal.at or 0))


def source_of(tokenizer: Any, tools: Any = None) -> str:
    """Return the source of the template that a chat with these tools is written by; "" where there is none. Raises
    `ChatRefused` if there are several and none is the default.
    """
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):
        try:
            source = tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise ChatRefused(
                f"the tokenizer has several chat templates ({', '.join(source)}) and none of them is called default:"
                " set tokenizer.chat_template to the one that is meant"
            ) from error
    return source if isinstance(source, str) else ""


@dataclass(frozen=True)
class _Template:
    """A tokenizer's template with the tools and the date that it is told."""

    tokenizer: Any
    tools: list[Any] | None
    day: Day | None

    @cached_property
    def source(self) -> str:
        return source_of(self.tokenizer, self.tools)

    def write(self, messages: list[dict[str, Any]], prompting: bool, *, with_tools: bool = True) -> str:
        return str(self._applied(messages, prompting, self.day, with_tools, tokenize=False))

    def ids(self, messages: list[dict[str, Any]], prompting: bool) -> list[int]:
        return list(self._applied(messages, prompting, self.day, True, tokenize=True, return_dict=False))

    def reads_date(self, messages: list[dict[str, Any]], prompting: bool) -> bool:
        if not may_read_date(self.source):
            return False
        days = (Day(2001, 2, 3), Day.fromordinal(Day(2001, 2, 3).toordinal() + _OTHER_DAY))
        one, other = (self._applied(messages, prompting, day, True, tokenize=False) for day in days)
        return bool(one != other)

    def _applied(
        self, messages: list[dict[str, Any]], prompting: bool, day: Day | None, with_tools: bool, **how: Any
    ) -> Any:
        if self.tools is not None and with_tools:
            how["tools"] = self.tools
        if day is not None and may_read_date(self.source):
            how |= {"chat_template": with_stated_date(self.source), **date_parts(day)}
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, **how)


def _text(template: _Template, form: ChatForm, said: Messages, prompting: bool) -> str:
    """Return the text of a chat in a form. Raises `ChatRefused` where the template does."""

    def write(messages: Messages) -> str:
        return template.write(form.of(messages), prompting)

    try:
        return write(said)
    except Exception as error:  # a template is a program of the model's own
        raise _refused(write, said, error) from error


def _check(template: _Template, form: ChatForm, said: Messages, prompting: bool, text: str) -> None:
    """Raise `ChatRefused` where the text of a chat in a form is not what was said."""

    def write(messages: Messages) -> str:
        return template.write(form.of(messages), prompting)

    if template.tools is not None and not _changes(
        lambda messages: template.write(form.of(messages), prompting, with_tools=False), said, text
    ):
        raise ChatRefused("the chat template leaves out tools: the model never reads them", None, "tools")
    if lost := left_out(write, said):
        at, part = lost
        raise ChatRefused(
            f"the chat template leaves out {part} of messages[{at}], with the role {said[at].get('role')!r}: the model"
            " never reads it",
            at,
            part,
        )
    _check_arguments(write, said, form)
    _check_empty(write, said, text)
    if form.parts and any(text.count(mark) > sum(one["content"].count(mark) for one in said) for mark in _PARTS):
        # As if it had raised on them: what it says of texts goes before.
        raise ChatRefused("the chat template writes the parts of a content as code") from TypeError("no text")


def _refused(write: Callable[[Messages], str], said: Messages, error: Exception) -> ChatRefused:
    """Say which message a template raises on: the one after the longest beginning of the chat that it takes."""
    no_objects = [(at, place) for at, place, arguments in calls_of(said) if isinstance(as_object(arguments), str)]
    if no_objects and _renders(write, with_arguments(said, lambda at, place, arguments: {})):
        at, place = no_objects[0]
        part = f"tool_calls[{place}].function.arguments"
        return ChatRefused(
            f"the chat template takes only objects, and messages[{at}].{part} is no JSON object: give one", at, part
        )
    at, end = 0, len(said)  # the template takes the messages before `at`, and raises on those before `end`
    while end - at > 1:
        middle = (at + end) // 2
        at, end = (middle, end) if _renders(write, said[:middle]) else (at, middle)
    reason = " ".join(str(error).split())[:300]
    return ChatRefused(
        f"the chat template does not take messages[{at}], with the role {said[at].get('role')!r}: {reason}", at
    )


def _renders(write: Callable[[Messages], str], messages: Messages) -> bool:
    try:
        write(messages)
    except Exception:  # a template is a program of the model's own
        return False
    return True


def _check_arguments(write: Callable[[Messages], str], said: Messages, form: ChatForm) -> None:
    """Raise `ChatRefused` for arguments of tool calls that the template does not write as they are: others in their
    places would be.
    """
    if not any(True for _ in calls_of(said)):
        return
    try:
        text = write(probed(said))
    except Exception as error:  # it looks at the arguments more closely than anybody can
        raise _refused(write, said, error) from error
    if wrong := wrong_arguments(text, said, form):
        at, part, how = wrong
        raise ChatRefused(
            f"the chat template has messages[{at}].{part} {how}: the model would read something else. Give a JSON"
            " object, or leave the call out",
            at,
            part,
        )


def _check_empty(write: Callable[[Messages], str], said: Messages, text: str) -> None:
    """Raise `ChatRefused` where the template writes a word for a content that says nothing."""
    empty = [at for at, message in enumerate(said) if message["content"] == ""]
    if not empty or not any(word in text for word in _NOTHING):
        return
    filled = [{**message, "content": message["content"] or "probed"} for message in said]
    try:
        other = write(filled)
    except Exception:  # nothing can be compared with
        return
    for word in _NOTHING:
        if text.count(word) > other.count(word):
            raise ChatRefused(
                f"the chat template writes {word} for messages[{empty[0]}].content, which is empty", empty[0], "content"
            )


def left_out(write: Callable[[Messages], str], messages: Messages) -> tuple[int, str] | None:
    """Return which message of a chat, and what of it ("content", "tool_calls"), changes nothing in its text; the first,
    None where all that is said is there.

    A message whose words stand in the text, as often as messages say them, is taken to be read. An error
    of `write` at a chat that was changed counts as having looked; at the chat itself it is raised.
    """
    text = write(messages)
    for at, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        said = content.strip() if isinstance(content, str) else ""
        sure = (message.get("role") in ("user", "assistant") and not calls) or len(said) >= _LONG
        n_said = sum(str(one.get("content")).count(said) for one in messages) if said else 0
        if said and not (sure and text.count(said) >= n_said):
            other = {**message, "content": f"{said} {at}"}
            if not _changes(write, [*messages[:at], other, *messages[at + 1 :]], text):
                return at, "content"
        if calls:
            without = {name: value for name, value in message.items() if name != "tool_calls"}
            if not _changes(write, [*messages[:at], without, *messages[at + 1 :]], text):
                return at, "tool_calls"
    return None


def _changes(write: Callable[[Messages], str], messages: Messages, text: str) -> bool:
    try:
        return write(messages) != text
    except Exception:  # whatever a template raises: it looked
        return True

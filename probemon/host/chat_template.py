"""Renders chats; no other module runs a chat template.

    chat = render(tokenizer, messages, tools=tools, add_generation_prompt=True)
    chat.text, chat.ids
    chat = render(tokenizer, messages, date="2025-01-01")   # for reproducible files

Templates differ in the forms that they accept. `render` takes the first form of `probemon.host.chat_forms` that the
template writes completely. Otherwise `ChatRefused` names the message and its part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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
    reasoning_in,
    reasons,
    with_arguments,
    with_other_reasoning,
    wrong_arguments,
)
from probemon.host.chat_options import check_options

_LONG = 40  # characters; shorter texts may occur in a prompt by chance
_NOTHING = ("None", "null", "Undefined")  # written for contents that a template does not check
_PARTS = ("{'type': 'text'", '{"type": "text"')  # a content part, as Python or JSON
_OTHER_DAY = 400  # days until no part of the date is the same


@dataclass(frozen=True)
class Chat:
    """A rendered chat."""

    text: str
    said: Messages = field(repr=False)  # normalised
    form: ChatForm
    _template: _Template = field(repr=False)
    _prompting: bool = field(repr=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages in the template's form."""
        return self.form.of(self.said)

    @cached_property
    def ids(self) -> list[int]:
        """The tokens of the chat."""
        if self.form.answered:
            return list(self._template.tokenizer(self.text, add_special_tokens=False)["input_ids"])
        return self._template.ids(self.messages, self._prompting)

    @cached_property
    def reads_date(self) -> bool:
        """True if the text contains the date."""
        return self._template.reads_date(self.form, self.said, self._prompting)

    def written(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """Return other normalised messages in the same form."""
        return self._template.write(self.form, messages, add_generation_prompt)


def render(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    date: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Chat:
    """Return a chat as the tokenizer's template writes it. Raises `ChatRefused`.

    - `messages`, `tools`: in OpenAI's form
    - `continue_final_message`: ends with the last message's content, for the model to go on with
    - `date`: the template's date, YYYY-MM-DD; None for today
    - `options`: other variables of the template, such as {"enable_thinking": False}; those it never reads are refused
    """
    day = None if date is None else parse_date(date)
    template = _Template(tokenizer, list(tools) if tools else None, day, options or {}, continue_final_message)
    if options:
        check_options(options, template.source, template.taken)
    chat, refusals, texts = normalised(messages), list[ChatRefused](), set[str]()
    for form in forms(chat, template.source, add_generation_prompt):
        try:
            text = _text(template, form, chat, add_generation_prompt)
            if text in texts:  # refused already in another form
                continue
            texts.add(text)
            _check(template, form, chat, add_generation_prompt, text)
        except ChatRefused as refusal:
            refusals.append(refusal)
        else:
            return Chat(text, chat, form, template, add_generation_prompt)
    # Prefer left-out content to errors, then the form that got farthest.
    raise max(refusals, key=lambda refusal: (refusal.__cause__ is None, refusal.at or 0))


def source_of(tokenizer: Any, tools: Any = None) -> str:
    """Return the source of the template that is used with these tools, or "".

    Raises `ChatRefused` if there are several without a default.
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
    tokenizer: Any
    tools: list[Any] | None
    day: Day | None
    options: Mapping[str, Any]
    continues: bool = False  # the last message

    @cached_property
    def source(self) -> str:
        return source_of(self.tokenizer, self.tools)

    @property
    def taken(self) -> set[str]:
        """Names that no option may have: transformers passes them itself."""
        arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return {"self", "messages", *arguments, *self.tokenizer.special_tokens_map}

    def write(self, form: ChatForm, messages: Messages, prompting: bool, *, with_tools: bool = True) -> str:
        """Return the text of normalised messages."""
        return self._written(form, messages, prompting, self.day, with_tools)

    def ids(self, messages: list[dict[str, Any]], prompting: bool) -> list[int]:
        return list(self._applied(messages, prompting, self.day, True, tokenize=True, return_dict=False))

    def reads_date(self, form: ChatForm, messages: Messages, prompting: bool) -> bool:
        if not may_read_date(self.source):
            return False
        days = (Day(2001, 2, 3), Day.fromordinal(Day(2001, 2, 3).toordinal() + _OTHER_DAY))
        first, second = (self._written(form, messages, prompting, day, True) for day in days)
        return first != second

    def _written(self, form: ChatForm, messages: Messages, prompting: bool, day: Day | None, with_tools: bool) -> str:
        if prompting or not form.answered:
            return str(self._applied(form.of(messages), prompting, day, with_tools, tokenize=False))
        prompt = str(self._applied(form.of(messages[:-1]), True, day, with_tools, tokenize=False))
        return prompt + _behind(prompt, ChatForm(reasoning="content").of(messages[-1:])[0]["content"])

    def _applied(
        self, messages: list[dict[str, Any]], prompting: bool, day: Day | None, with_tools: bool, **arguments: Any
    ) -> Any:
        if self.tools is not None and with_tools:
            arguments["tools"] = self.tools
        if self.continues and not prompting:
            arguments["continue_final_message"] = True
        if day is not None and may_read_date(self.source):
            arguments |= {"chat_template": with_stated_date(self.source), **date_parts(day)}
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=prompting, **self.options, **arguments
        )


def _text(template: _Template, form: ChatForm, chat: Messages, prompting: bool) -> str:
    """Return a chat's text in a form. Raises `ChatRefused` on the template's errors."""

    def write(messages: Messages) -> str:
        return template.write(form, messages, prompting)

    try:
        return write(chat)
    except ChatRefused:
        raise
    except Exception as error:  # templates run arbitrary code
        raise _refused(write, chat, error) from error


def _behind(prompt: str, content: str) -> str:
    """Return what a model writes behind a generation prompt, which may begin its reasoning. Raises `ChatRefused`."""
    end, found = prompt.rstrip(), reasoning_in(content)
    if found is None:
        return content
    if end.endswith("</think>"):
        raise ChatRefused("the chat template closes reasoning before the answer: leave the reasoning out")
    is_begun, opening = end.endswith("<think>"), content[: found[0]]
    if is_begun:
        return content[found[0] :]
    return content if "<think>" in opening else f"<think>\n{content[found[0] :]}"


def _check(template: _Template, form: ChatForm, chat: Messages, prompting: bool, text: str) -> None:
    """Raise `ChatRefused` if the text loses or changes a part of the chat."""

    def write(messages: Messages) -> str:
        return template.write(form, messages, prompting)

    if template.tools is not None and not _changes(
        lambda messages: template.write(form, messages, prompting, with_tools=False), chat, text
    ):
        raise ChatRefused("the chat template leaves out tools: the model never reads them", None, "tools")
    if lost := left_out(write, chat):
        at, part = lost
        raise ChatRefused(
            f"the chat template leaves out {part} of messages[{at}], with the role {chat[at].get('role')!r}: the model"
            " never reads it",
            at,
            part,
        )
    if not prompting and reasons(chat[-1]):
        _check_reasoning(write, chat, text)
    _check_arguments(write, chat, form)
    _check_empty(write, chat, text)
    if form.parts and any(
        text.count(mark) > sum(message["content"].count(mark) for message in chat) for mark in _PARTS
    ):
        # Like an error: texts are reported first.
        raise ChatRefused("the chat template writes the parts of a content as code") from TypeError("no text")


def _refused(write: Callable[[Messages], str], chat: Messages, error: Exception) -> ChatRefused:
    """Return which message a template raises on, found by bisection."""
    no_objects = [(at, place) for at, place, arguments in calls_of(chat) if isinstance(as_object(arguments), str)]
    if no_objects and _renders(write, with_arguments(chat, lambda at, place, arguments: {})):
        at, place = no_objects[0]
        part = f"tool_calls[{place}].function.arguments"
        return ChatRefused(
            f"the chat template takes only objects, and messages[{at}].{part} is not a JSON object: give one", at, part
        )
    at, end = 0, len(chat)  # invariant: the template takes chat[:at] and raises on chat[:end]
    while end - at > 1:
        middle = (at + end) // 2
        at, end = (middle, end) if _renders(write, chat[:middle]) else (at, middle)
    reason = " ".join(str(error).split())[:300]
    return ChatRefused(
        f"the chat template does not take messages[{at}], with the role {chat[at].get('role')!r}: {reason}", at
    )


def _renders(write: Callable[[Messages], str], messages: Messages) -> bool:
    try:
        write(messages)
    except Exception:  # templates run arbitrary code
        return False
    return True


def _check_arguments(write: Callable[[Messages], str], chat: Messages, form: ChatForm) -> None:
    """Raise `ChatRefused` if the template changes arguments of tool calls."""
    if not any(True for _ in calls_of(chat)):
        return
    try:
        text = write(probed(chat))
    except Exception as error:  # it validates the arguments
        raise _refused(write, chat, error) from error
    if wrong := wrong_arguments(text, chat, form):
        at, part, problem = wrong
        raise ChatRefused(
            f"the chat template has messages[{at}].{part} {problem}: the model would read something else. Give a JSON"
            " object, or leave the call out",
            at,
            part,
        )


def _check_reasoning(write: Callable[[Messages], str], chat: Messages, text: str) -> None:
    """Raise `ChatRefused` if the template leaves out what the last answer follows from."""
    if not _changes(write, [*chat[:-1], with_other_reasoning(chat[-1], "probed")], text):
        at = len(chat) - 1
        raise ChatRefused(
            f"the chat template leaves out the reasoning of messages[{at}]: the model never reads it", at, "reasoning"
        )


def _check_empty(write: Callable[[Messages], str], chat: Messages, text: str) -> None:
    """Raise `ChatRefused` if the template writes a word for an empty content."""
    empty = [at for at, message in enumerate(chat) if message["content"] == ""]
    if not empty or not any(word in text for word in _NOTHING):
        return
    filled = [{**message, "content": message["content"] or "probed"} for message in chat]
    try:
        other = write(filled)
    except Exception:  # no comparison possible
        return
    for word in _NOTHING:
        if text.count(word) > other.count(word):
            raise ChatRefused(
                f"the chat template writes {word} for messages[{empty[0]}].content, which is empty", empty[0], "content"
            )


def left_out(write: Callable[[Messages], str], messages: Messages) -> tuple[int, str] | None:
    """Return the first message of a chat that does not change its text, and which part; or None.

    A message counts as read if its words occur often enough, or if `write` fails on the changed chat.
    """
    text = write(messages)
    for at, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        words = content.strip() if isinstance(content, str) else ""
        sure = (message.get("role") in ("user", "assistant") and not calls) or len(words) >= _LONG
        n_expected = sum(str(one.get("content")).count(words) for one in messages) if words else 0
        if words and not (sure and text.count(words) >= n_expected):
            other = {**message, "content": f"{words} {at}"}
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
    except Exception:  # the template looked at it
        return True

"""Forms in which chats are passed to templates.

said = normalised(messages)                       # OpenAI's form
for form in forms(said, source):                  # the likeliest first
    form.of(said)                                 # the template's messages
probed(said), wrong_arguments(text, said)         # checks tool arguments
reasoning_in("<think>So.</think>Yes.")            # (7, 10, 18)

Reasoning of the assistant stands in a field of its message (`reasoning_content`), or in <think> at the beginning of its
content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from probemon.errors import ChatRefused
from probemon.util.harmless_text import is_unicode
from probemon.util.strict_json import loads, no_constant

Message = Mapping[str, Any]
Messages = Sequence[Message]
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = "reasoning"
PARTS = (*ROLES, REASONING)  # of a chat
_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names of it in messages
_OPENS, _SHUTS = "<think>", "</think>"


@dataclass(frozen=True)
class ChatForm:
    """How messages are passed.

    - `parts`: contents as lists of one text part
    - `system`: "developer" as "system"
    - `empty`: empty content as "" (""), left out ("absent") or None ("null")
    - `objects`: tool arguments as objects, else JSON text
    - `reasoning`: as this field of a message, within the "content", or as it is given ("")
    - `answered`: the last message stands behind the generation prompt, as the model writes it
    """

    parts: bool = False
    system: bool = False
    empty: str = ""
    objects: bool = True
    reasoning: str = ""
    answered: bool = False

    def of(self, messages: Messages) -> list[dict[str, Any]]:
        """Return normalised messages in this form."""
        return [self._given(message) for message in messages]

    def _given(self, message: Message) -> dict[str, Any]:
        converted = _with_reasoning(message, self.reasoning)
        if self.system and converted.get("role") == "developer":
            converted["role"] = "system"
        content = converted.get("content")
        if content == "" and converted.get("role") == "assistant" and self.empty:
            del converted["content"]
            if self.empty == "null":
                converted["content"] = None
        elif self.parts and isinstance(content, str):
            converted["content"] = [{"type": "text", "text": content}]
        if isinstance(converted.get("tool_calls"), (list, tuple)):
            change = as_object if self.objects else _as_text
            converted["tool_calls"] = [_with_arguments(call, change) for call in converted["tool_calls"]]
        return converted


def forms(messages: Messages, source: str, prompting: bool) -> Iterator[ChatForm]:
    """Yield possible forms, the likeliest first; `source` is the template's."""
    is_empty = any(message.get("role") == "assistant" and message["content"] == "" for message in messages)
    has_objects = any(_is_object(arguments) for _, _, arguments in calls_of(messages))
    is_known = "developer" in source
    for_developers = (not is_known, is_known) if any(m.get("role") == "developer" for m in messages) else (False,)
    axes = (
        (False, True),
        for_developers,
        ("", "absent", "null") if is_empty else ("",),
        (True, False)[: 1 + has_objects],
        _ways_to_reason(messages, source, prompting),
    )
    return (ChatForm(*axis[:4], *axis[4]) for axis in product(*axes))


def _ways_to_reason(messages: Messages, source: str, prompting: bool) -> list[tuple[str, bool]]:
    """Return values of `reasoning` and `answered`."""
    known = [name for name in _FIELDS if re.search(rf"\b{name}\b", source)]
    if prompting:  # <think> in earlier turns is the template's to handle
        is_stated = any(name in message for message in messages for name in _FIELDS)
        return [(known[0] if known and is_stated else "", False)]
    if not any(map(reasons, messages)):
        return [("", False)]
    may_follow = reasons(messages[-1]) and not messages[-1].get("tool_calls")
    return [*((name, False) for name in (*known, "content")), *([("content", True)] if may_follow else [])]


def reasons(message: Message) -> bool:
    """Return whether a normalised message has reasoning."""
    if message.get("role") != "assistant":
        return False
    inside = reasoning_in(message["content"])
    return bool(stated_reasoning(message)) or (inside is not None and inside[0] < inside[1])


def reasoning_in(content: str) -> tuple[int, int, int] | None:
    """Return where reasoning within a content starts and ends, and where the answer starts; None if there is none.

    It may lack <think>, which some prompts end with, if </think> is alone on its line; or </think>, if the answer was
    cut off.
    """
    begin = len(content) - len(content.lstrip())
    is_opened = content.startswith(_OPENS, begin)
    start = begin + len(_OPENS) if is_opened else 0
    stop = content.find(_SHUTS, start)
    if not is_opened:  # an answer may also speak of the marks: alone on its line, it is one
        before, _, after = content.partition(_SHUTS)
        if stop < 0 or not before.endswith("\n") or after[:1] not in ("", "\n") or _OPENS in before:
            return None
    answer = len(content) if stop < 0 else stop + len(_SHUTS)
    stop = len(content) if stop < 0 else stop
    start = stop - len(content[start:stop].lstrip("\n"))
    stop = start + len(content[start:stop].rstrip("\n"))
    return start, stop, len(content) - len(content[answer:].lstrip("\n"))


def with_other_reasoning(message: Message, reasoning: str) -> dict[str, Any]:
    """Return a normalised message that reasons with other reasoning."""
    if stated_reasoning(message):
        name = next(name for name in _FIELDS if message.get(name))
        return {**message, name: reasoning}
    inside = reasoning_in(message["content"])
    assert inside is not None
    start, stop, _ = inside
    return {**message, "content": message["content"][:start] + reasoning + message["content"][stop:]}


def stated_reasoning(message: Message) -> str:
    """Return the reasoning of a message's own field, or ""."""
    return next((one.strip("\n") for one in map(message.get, _FIELDS) if isinstance(one, str) and one.strip()), "")


def _with_reasoning(message: Message, where: str) -> dict[str, Any]:
    converted, content = dict(message), message.get("content")
    if not where or message.get("role") != "assistant" or not isinstance(content, str):
        return converted
    stated, inside = stated_reasoning(message), reasoning_in(content)
    converted = {name: value for name, value in converted.items() if name not in _FIELDS}
    if stated and where == "content":
        converted["content"] = f"{_OPENS}\n{stated}\n{_SHUTS}\n\n{content}"
    elif stated:
        converted[where] = stated
    elif inside is not None and where != "content":
        start, stop, answer = inside
        converted |= {where: content[start:stop], "content": content[answer:]}
    return converted


def normalised(messages: Any) -> list[dict[str, Any]]:
    """Return messages in one spelling: joined texts, "" and "{}" for empty values, no nulls. Raises `ChatRefused`."""
    return [_normalised(message, at) for at, message in enumerate(messages)]


def check_said(messages: Any, roles: Sequence[str] | None = ROLES) -> None:
    """Raise `ChatRefused` unless messages have OpenAI's form and text contents."""
    if not isinstance(messages, (list, tuple)) or not messages:
        kind = "empty" if isinstance(messages, (list, tuple)) else type(messages).__name__
        raise ChatRefused(f"'messages' is {kind}: give a list of messages, each with a role and a content")
    for at, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or (roles is not None and role not in roles):
            choices = f" ({', '.join(roles)})" if roles is not None else ""
            raise ChatRefused(f"messages[{at}] has the role {role!r:.60}: a message has a 'role'{choices}", at, "role")
        if message.get("audio"):
            raise ChatRefused(f"messages[{at}] has audio; texts only: leave out this chat", at, "audio")
        if not isinstance(_joined(message.get("content"), role), str):
            raise ChatRefused(
                f"messages[{at}] has a content that is no text: a message has a text as 'content', or a list of text"
                " parts",
                at,
                "content",
            )


def _normalised(message: Any, at: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatRefused(f"messages[{at}] is {type(message).__name__}: give an object with a role and a content", at)
    fields = {name: value for name, value in message.items() if value is not None}
    content = _joined(fields.get("content"), fields.get("role"))
    if content is None:
        raise ChatRefused(f"messages[{at}] has no content: give a text", at, "content")
    fields["content"] = content
    if fields.get("role") == "assistant":
        _say_as_templates_do(fields)
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    if isinstance(fields.get("tool_calls"), (list, tuple)):
        fields["tool_calls"] = [_with_arguments(call, _stated) for call in fields["tool_calls"]]
    if invalid := next((name for name, value in fields.items() if not all(map(is_unicode, texts_in(value)))), None):
        raise ChatRefused(
            f"messages[{at}] has a {invalid} that is not valid Unicode (a lone surrogate), which no tokenizer reads",
            at,
            invalid,
        )
    return fields


def _say_as_templates_do(message: dict[str, Any]) -> None:
    """Convert ignored fields: a function call, a refusal."""
    call, refusal = message.pop("function_call", None), message.pop("refusal", None)
    if isinstance(call, Mapping) and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if isinstance(refusal, str) and not message["content"]:
        message["content"] = refusal


def texts_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from texts_in(inner)


def _joined(content: Any, role: Any) -> Any:
    """Join text parts; other contents stay."""
    if content is None and role == "assistant":
        return ""
    if isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


# -- arguments of tool calls ---------------------------------------------------------------------


def calls_of(messages: Messages) -> Iterator[tuple[int, int, Any]]:
    """Yield each tool call's message index, place and arguments."""
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, (list, tuple)) else ()):
            function = call.get("function", call) if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and "arguments" in function:
                yield at, place, function["arguments"]


def with_arguments(messages: Messages, change: Callable[[int, int, Any], Any]) -> list[dict[str, Any]]:
    """Return messages with arguments from `change(message index, place, arguments)`."""
    changed = [dict(message) for message in messages]
    for at, place, arguments in calls_of(messages):
        calls = list(changed[at]["tool_calls"])
        calls[place] = _replaced(calls[place], change(at, place, arguments))
        changed[at]["tool_calls"] = calls
    return changed


def _replaced(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return _replaced(call, change(function["arguments"]))


def _stated(arguments: Any) -> Any:
    says_nothing = arguments is None or (isinstance(arguments, str) and not arguments.strip())
    return "{}" if says_nothing else arguments


def as_object(arguments: Any) -> Any:
    """Parse JSON objects; other arguments stay."""
    if isinstance(arguments, str):
        try:
            parsed = loads(arguments, constant=no_constant)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def probed(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with probe arguments for `wrong_arguments`."""

    def probe(at: int, place: int, arguments: Any) -> Any:
        name = _probe(at, place)
        return {name: f"{name} value"} if _is_object(arguments) else f'{{"{name}": "{name} value"}}'[:-1]

    return with_arguments(messages, probe)


def wrong_arguments(text: str, messages: Messages, form: ChatForm) -> tuple[int, str, str] | None:
    """Return the first call that the text changes (message index, part, problem), or None."""
    for at, place, arguments in calls_of(messages):
        name = _probe(at, place)
        part = f"tool_calls[{place}].function.arguments"
        if name not in text:
            return at, part, "left out"
        if f'\\"{name}' in text:
            return at, part, "escaped once more"
        if f"{{'{name}'" in text:
            return at, part, "written as Python's repr"
        is_text = not form.objects or not _is_object(arguments)
        if f"{name} value" not in text or (is_text and f'{{"{name}": "{name} value"' not in text):
            return at, part, "not written as they are"
    return None


def _is_object(arguments: Any) -> bool:
    return isinstance(as_object(arguments), Mapping)


def _probe(at: int, place: int) -> str:
    return f"probed_{at}_{place}_"

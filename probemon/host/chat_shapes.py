"""Recognises rows of people's files by their shape, and converts them to chats in OpenAI's form.

    shape_of({"instruction": "Add.", "input": "1 2", "output": "3"})     # "Alpaca"; "" for no chat
    for chat in chats_of(row):                                          # [] for no chat; a pair is two chats
        chat.messages, chat.tools, chat.part                            # part: "chosen" or "rejected" of a pair
    chats_as("Alpaca", row)                                             # also if the row has a text

- A row has the first shape of `SHAPES` that fits. Rows with a text are never prompt and completion, or Alpaca.
- Texts only. Text parts are joined, thinking becomes `reasoning_content`, other fields of messages are dropped.
- A batch output has no prompt: its chats have only the assistant's turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from probemon.errors import ChatRefused, ConfigError, ProbemonError, closest
from probemon.host.chat_forms import ROLES
from probemon.util.strict_json import loads

Row = Mapping[str, Any]
_NUMBERED = ("Anthropic messages", "OpenAI messages", "ShareGPT", "inspect-ai sample")  # of one list of messages
Turn = dict[str, Any]
_Chats = list[tuple[list[Turn], list[Any] | None, str]]  # messages, tools, part
_LIST = (list, tuple)
_WANTED = {str: "a text", Mapping: "an object", _LIST: "a list", (str, *_LIST): "a text or a list of messages"}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA = {"image": "an image", "audio": "audio", "video": "a video", "document": "a file", "file": "a file"}
_OTHER_ROLES = {"human": "user", "function": "tool", "observation": "tool", "function_response": "tool"}
_OTHER_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "ai"), "assistant")
# Where traces hold a chat: the first field that is there.
_ASKED = ("messages", "input", "question", "prompt", "query")
_ANSWERED = ("messages", "generations", "choices", "message", "output", "answer", "response", "completion", "text")
_LANGFUSE = ("traceId", "trace_id", "projectId", "project_id", "parentObservationId", "observations")
_WITHOUT_CHATS = ("EVENT", "TOOL", "RETRIEVER", "EMBEDDING", "EVALUATOR", "GUARDRAIL")
_OBSERVATIONS = ("GENERATION", "SPAN", "AGENT", "CHAIN", *_WITHOUT_CHATS)
_SAID = re.compile(r"\n\n(Human|Assistant):")
_WRITTEN = re.compile(rf'\s*(\[\s*)?\{{\s*"(role"\s*:\s*"({"|".join(ROLES)})"|messages"\s*:\s*\[)')


@dataclass(frozen=True)
class ShapedChat:
    """A chat of a row; `part` is "chosen" or "rejected" of a pair.

    `numbers`: of each message, in the row's list of messages; None for one that is not in it.
    """

    shape: str
    messages: list[Turn]
    tools: list[Any] | None = None
    part: str = ""

    @property
    def numbers(self) -> list[int | None]:
        if self.shape not in _NUMBERED or not any(isinstance(turn, _Numbered) for turn in self.messages):
            return list(range(len(self.messages)))
        return [getattr(turn, "number", None) for turn in self.messages]


class _Numbered(dict[str, Any]):
    """A turn with the number of its message in a list."""

    def __init__(self, turn: Turn, number: int) -> None:
        super().__init__(turn)
        self.number = number


def shape_of(row: Row) -> str:
    """Return the name of a row's shape, "" if it is no chat."""
    return next((name for name, (_, fits) in _SHAPES.items() if fits(row)), "")


def chats_of(row: Row) -> list[ShapedChat]:
    """Return the chats of a row, [] if it is no chat. Raises `ChatRefused` for a malformed row."""
    return chats_as(shape, row) if (shape := shape_of(row)) else []


def chats_as(shape: str, row: Row) -> list[ShapedChat]:
    """Return the chats of a row of a stated shape. Raises `ChatRefused`."""
    if shape not in _SHAPES:
        raise ChatRefused(f"no shape is named {shape!r:.60}{closest(shape, SHAPES)}: give one of {', '.join(SHAPES)}")
    return [ShapedChat(shape, *chat) for chat in _SHAPES[shape][0](row)]


def check_shape(shape: str, error: type[ProbemonError] = ConfigError) -> None:
    """Raise an error for what names no shape; "" is to recognise it."""
    if shape and shape not in SHAPES:
        near = next((f", did you mean {name!r}?" for name in SHAPES if name.casefold() == shape.casefold()), "")
        raise error(f"format is {shape!r:.60}{near or closest(shape, SHAPES)}: give one of {', '.join(SHAPES)}")


def _a(kind: Any, value: Any, where: str) -> Any:
    """Return a value of the right type, which is no empty list."""
    if isinstance(value, kind) and value not in ([], ()):
        return value
    found = "missing" if value is None else "empty" if value in ([], ()) else type(value).__name__
    raise ChatRefused(f"{where} is {found}: give {_WANTED[kind]}")


def _optional(row: Row, name: str, where: str = "the row") -> str:
    return "" if row.get(name) is None else str(_a(str, row[name], f"'{name}' of {where}"))


def _turn(role: str, content: str, **more: Any) -> Turn:
    return {"role": role, "content": content} | {name: value for name, value in more.items() if value}


def _turns(messages: Any, where: str) -> list[Turn]:
    """Convert messages of OpenAI, Anthropic or inspect-ai."""
    listed = _a(_LIST, messages, f"'{where}'")
    return [_Numbered(turn, at) for at, message in enumerate(listed) for turn in _turns_of(message, f"{where}[{at}]")]


def _turns_of(message: Any, where: str) -> list[Turn]:
    role = _a(Mapping, message, where).get("role")
    role = "tool" if role == "function" else role
    if role not in ROLES:
        raise ChatRefused(f"{where} has the role {role!r:.60}: a message has a 'role' ({', '.join(ROLES)})")
    found = _parts([{"type": "audio"}] if message.get("audio") else _said(message, role, where), where)
    calls = message.get("tool_calls") or [{"function": call} for call in [message.get("function_call")] if call]
    listed = [_call(call, f"a tool call of {where}") for call in (calls if isinstance(calls, _LIST) else [calls])]
    thoughts = _optional(message, "reasoning_content", where) or _optional(message, "reasoning", where)
    thoughts = thoughts or "\n".join(filter(None, found["thought"]))
    more: dict[str, Any] = {"reasoning_content": thoughts, "tool_calls": listed or found["call"]}
    if (role != "assistant" and any(more.values())) or (role != "user" and found["result"]):
        raise ChatRefused(f"{where} has thinking, calls or results of tools as the {role}'s: correct its role")
    if found["result"] and not any(found["text"]):
        return found["result"]
    names = ("tool_call_id", "name", "function") if role == "tool" else ("name",)
    more |= {name: _optional(message, name, where) for name in names}
    function = more.pop("function", "")  # inspect-ai's name of a tool
    more["name"] = more["name"] or function
    # Texts on both sides of a call are two.
    return [*found["result"], _turn(role, ("\n\n" if found["call"] else "").join(found["text"]), **more)]


def _said(message: Row, role: str, where: str) -> Any:
    """Return a content, or what stands for an empty one: a refusal, the error of a tool (inspect-ai), no text."""
    content, error = message.get("content"), message.get("error")
    if role == "assistant" and content in (None, ""):
        return _optional(message, "refusal", where)
    if role == "tool" and content in (None, "") and isinstance(error, Mapping):
        return f"Error: {_optional(error, 'message', where)}"
    return content


def _parts(content: Any, where: str) -> dict[str, list[Any]]:
    """Return the texts, thoughts, calls and results of a content."""
    if not isinstance(content, (str, *_LIST)):
        raise ChatRefused(f"{where} has a content that is no text: give a text, or a list of text parts")
    listed = [{"type": "text", "text": content}] if isinstance(content, str) else content
    pairs = [_part(_a(Mapping, part, f"a part of {where}"), where) for part in listed]
    return {kind: [value for of, value in pairs if of == kind] for kind in ("text", "thought", "call", "result")}


def _part(part: Row, where: str) -> tuple[str, Any]:
    kind = str(part.get("type"))
    if medium := _MEDIA.get(kind.removeprefix("input_").removesuffix("_url")):
        raise ChatRefused(f"{where} has {medium}; texts only: leave out this chat")
    if kind in _TEXTS:
        return "text", _a(str, part.get(_TEXTS[kind]), f"the text of {where}")
    if kind == "redacted_thinking" or (kind == "reasoning" and part.get("redacted")):
        return "thought", _optional(part, "summary", where)
    if kind in ("thinking", "reasoning"):
        return "thought", _a(str, part.get(kind, part.get("text")), f"the {kind} of {where}")
    if kind == "tool_use" and "tool_type" not in part:
        return "call", _call({**part, "args": _a(Mapping, part.get("input"), f"'input' of {where}")}, where)
    if kind == "tool_result":
        texts = _parts(part.get("content") or "", f"a tool result of {where}")["text"]
        return "result", _turn("tool", "".join(texts), tool_call_id=_optional(part, "tool_use_id", where))
    raise ChatRefused(f"{where} has a part of type {kind!r:.60}, which is no text: leave out this chat")


def _call(call: Any, where: str) -> Turn:
    """Convert a tool call of OpenAI, inspect-ai (the function is a name) or LangChain (a name and args)."""
    function = _a(Mapping, call, where).get("function")
    stated = function if isinstance(function, Mapping) else {"name": function, **call}
    name, arguments = stated.get("name"), stated.get("arguments", stated.get("args"))
    if not isinstance(name, str) or not isinstance(arguments, (str, Mapping, type(None))):
        raise ChatRefused(f"{where} is no call of a function: give its name, and its arguments as an object or JSON")
    called, said = _optional(call, "id", where), {"name": name, "arguments": "{}" if arguments is None else arguments}
    return ({"id": called} if called else {}) | {"type": "function", "function": said}


def _tools(row: Row) -> list[Any] | None:
    """Return tools in OpenAI's form; given in it, as its JSON text, or in Anthropic's form."""
    tools = row.get("tools")
    tools = _parsed(tools, "'tools'") if isinstance(tools, str) and tools else tools
    return [_tool(_a(Mapping, tool, "a tool")) for tool in _a(_LIST, tools, "'tools'")] if tools else None


def _tool(tool: Row) -> Row:
    parts = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    function = {name: part for name, part in parts.items() if part is not None}
    return {"type": "function", "function": function} if "input_schema" in tool else tool


def _parsed(text: str, where: str) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatRefused(f"{where} is a text that is no JSON: give it as JSON") from error


def _asked(row: Row) -> Any:
    """Return a batch input's body, or the row."""
    is_batch = "messages" not in row and isinstance(row.get("body"), Mapping)
    return row["body"] if is_batch else row


def _with_system(row: Row, turns: list[Turn]) -> _Chats:
    said = "".join(_parts(row.get("system") or "", "'system'")["text"])
    if said and turns[0]["role"] in ("system", "developer"):
        raise ChatRefused("it has 'system' and a system turn: give only one of them")
    return [([_turn("system", said), *turns] if said else turns, _tools(row), "")]


def _is_anthropic(row: Row) -> bool:
    if not isinstance(listed := row.get("messages"), _LIST):
        return False
    messages = [message for message in listed if isinstance(message, Mapping)]
    contents = [message["content"] for message in messages if isinstance(message.get("content"), _LIST)]
    kinds = {str(part.get("type")) for content in contents for part in content if isinstance(part, Mapping)}
    has_its_roles = all(message.get("role") in ("user", "assistant") for message in messages)
    is_marked = isinstance(row.get("system"), (str, list)) or bool(kinds & {"tool_use", "tool_result"})
    return is_marked or (has_its_roles and bool(kinds & {"thinking", "redacted_thinking"}))


def _sharegpt(row: Row) -> _Chats:
    name = "conversations" if row.get("conversation") is None else "conversation"
    given = [_of_sharegpt(item, f"{name}[{at}]") for at, item in enumerate(_a(_LIST, row.get(name), f"'{name}'"))]
    return _with_system(row, _turns(given, name))


def _of_sharegpt(item: Any, where: str) -> Row:
    said = _a(Mapping, item, where).get("from", item.get("role"))
    role = _OTHER_ROLES.get(str(said), said)
    if "from" not in item:
        return {**item, "role": role}
    text = _a(str, item.get("value"), f"'value' of {where}")
    if said != "function_call":
        return _turn(str(role), text)
    calls = _parsed(text, f"the function call of {where}")
    return _turn("assistant", "", tool_calls=calls if isinstance(calls, list) else [calls])


def _side(value: Any, role: str, name: str) -> list[Turn]:
    given = _a((str, *_LIST), value, f"'{name}'")
    return [_turn(role, given)] if isinstance(given, str) else _turns(given, name)


def _replied(prompt: Any, reply: Any, name: str) -> list[Turn]:
    if isinstance(prompt, str) and isinstance(reply, str) and _SAID.search(prompt):
        return _human(prompt + reply, "prompt")
    answer = _side(reply, "assistant", name)
    return answer if prompt is None else _continued(_side(prompt, "user", "prompt"), answer)


def _continued(asked: list[Turn], answer: list[Turn]) -> list[Turn]:
    """Join turns; an answer that repeats what was asked is the whole chat."""
    said = [(turn["role"], turn["content"].strip()) for turn in answer]
    repeats = all((turn["role"], turn["content"].strip()) in said for turn in asked)
    return answer if answer[0]["role"] not in ("assistant", "tool") and repeats else asked + answer


def _completion(row: Row) -> _Chats:
    names = [name for name in ("completion", "response") if row.get(name) is not None]
    if row.get("prompt") is None or len(names) != 1:
        raise ChatRefused("it needs 'prompt', and one of 'completion' and 'response': give these two")
    return [(_replied(row["prompt"], row[names[0]], names[0]), _tools(row), "")]


def _human(text: str, name: str) -> list[Turn]:
    before, *said = _SAID.split("\n\n" + text.lstrip())
    if before.strip() or not said:
        raise ChatRefused(f"'{name}' does not begin with 'Human:' or 'Assistant:': give turns with these names")
    turns = zip(said[::2], said[1::2], strict=True)
    return [_turn("user" if who == "Human" else "assistant", words.strip()) for who, words in turns]


def _alpaca(row: Row) -> _Chats:
    asked = [_a(str, row.get("instruction"), "'instruction'"), _optional(row, "input")]
    answer = _turn("assistant", _a(str, row.get("output"), "'output'"))
    turns = list[Turn]()
    for at, pair in enumerate(row.get("history") or ()):
        if not isinstance(pair, _LIST) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ChatRefused(f"history[{at}] is no pair of texts: give [question, answer]")
        turns += [_turn("user", pair[0]), _turn("assistant", pair[1])]
    return _with_system(row, [*turns, _turn("user", "\n\n".join(filter(None, asked))), answer])


def _batch(row: Row) -> _Chats:
    response: Any = row.get("response") or ({} if row.get("error") else None)
    response = _a(Mapping, {"status_code": 200, "body": row} if "choices" in row else response, "'response'")
    status, body = response.get("status_code"), response.get("body") or {}
    error = row.get("error") or _a(Mapping, body, "'body'").get("error")
    if error or status != 200:
        words = error.get("message") if isinstance(error, Mapping) else error
        said = " ".join(f"status {status}: {words or 'no answer'}".split())
        raise ChatRefused(f"the request failed ({said:.200}): leave out failed requests, or repeat them")
    choices = enumerate(_a(_LIST, body.get("choices"), "'choices'"))
    found = [_a(Mapping, choice, f"choices[{at}]").get("message") for at, choice in choices]
    given = [{"role": "assistant", **_a(Mapping, message, "'message' of a choice")} for message in found]
    return [(_turns_of(message, f"choices[{at}].message"), None, "") for at, message in enumerate(given)]


def _is_batch(row: Row) -> bool:
    failed = row.get("response", "") is None and isinstance(row.get("error"), Mapping)
    answered = isinstance(row.get("custom_id"), str) and (failed or isinstance(row.get("response"), Mapping))
    return answered or row.get("object") == "chat.completion"


def _inspect(row: Row) -> _Chats:
    name = "samples[{}].messages" if "samples" in row else "messages"
    samples = [_a(Mapping, sample, "a sample") for sample in _a(_LIST, row.get("samples", [row]), "'samples'")]
    given = [(sample.get("messages") or sample.get("input"), name.format(at)) for at, sample in enumerate(samples)]
    return [(_side(messages, "user", where), None, "") for messages, where in given]


def _is_inspect(row: Row) -> bool:
    is_log = isinstance(row.get("eval"), Mapping) and "status" in row and isinstance(row.get("samples"), _LIST)
    return is_log or {"id", "epoch", "input", "target", "messages"} <= row.keys()


def _trace(row: Row, asked: str, answered: str, tools: Any) -> _Chats:
    question = _turns(_traced(row.get(asked), "user", _ASKED, asked), asked)
    answer = _turns(_traced(row.get(answered), "assistant", _ANSWERED, answered), answered)
    return [(_continued(question, answer), _tools(tools) if isinstance(tools, Mapping) else None, "")]


def _traced(value: Any, role: str, names: tuple[str, ...], where: str) -> list[Row]:
    """Return the messages in a value of a trace; `names` are the fields that may hold them."""
    if isinstance(value, str):
        is_json = _WRITTEN.match(value)  # some exports write messages as JSON text
        return _traced(_parsed(value, f"'{where}'"), role, names, where) if is_json else [_turn(role, value)]
    if isinstance(value, Mapping):
        if message := _of_langchain(value, role):
            return [message]
        if name := next((name for name in names if value.get(name) is not None), None):
            return _traced(value[name], role, names, f"{where}.{name}")
        raise ChatRefused(f"'{where}' is an object without {names[0]}: give only runs of a chat model")
    listed = _a(_LIST, value, f"'{where}'")
    found = [said for item in listed if isinstance(item, Mapping) and (said := _of_langchain(item, role))]
    if len(found) == len(listed):
        return found
    if len(listed) > 1 or isinstance(listed[0], str):
        raise ChatRefused(f"'{where}' is a list of {len(listed)} that are not all messages: give a row for each chat")
    return _traced(listed[0], role, names, where)


def _of_langchain(message: Row, role: str) -> Row | None:
    """Return a message in OpenAI's form, also from LangChain's serialised forms; None if the value is none."""
    inner = next((message[name] for name in ("kwargs", "data") if isinstance(message.get(name), Mapping)), message)
    if "role" not in inner and "content" not in inner:
        return None
    made = message["id"][-1] if isinstance(message.get("id"), list) and message["id"] else message.get("type")
    kind = re.sub(r"message(chunk)?$", "", str(inner.get("role") or inner.get("type") or made or role).lower())
    more = inner.get("additional_kwargs")
    own = {name: value for name, value in inner.items() if value not in (None, [])}
    return {**(more if isinstance(more, Mapping) else {}), **own, "role": _OTHER_ROLES.get(kind, kind)}


def _langfuse(row: Row) -> _Chats:
    if row.get("type") in _WITHOUT_CHATS:
        raise ChatRefused(f"it is an observation of type {row['type']}: give only those of type GENERATION")
    return _trace(row, "input", "output", row.get("input"))


def _is_langfuse(row: Row) -> bool:
    has_mark = any(name in row for name in _LANGFUSE) or row.get("type") in _OBSERVATIONS
    return has_mark and "input" in row and "output" in row and "instruction" not in row


def _langsmith(row: Row) -> _Chats:
    inputs, extra = _a(Mapping, row.get("inputs"), "'inputs'"), row.get("extra")
    if row.get("error") and not row.get("outputs"):
        raise ChatRefused(f"the run failed ({' '.join(str(row['error']).split()):.200}): leave out failed runs")
    options = extra.get("invocation_params") if isinstance(extra, Mapping) and not inputs.get("tools") else inputs
    return _trace(row, "inputs", "outputs", options)


def _has(row: Row, name: str, *others: str, loose: bool = False) -> bool:
    """Return whether a row has a field and one of others, and one of these is a text or a list."""
    values = [row[other] for other in others if row.get(other) is not None]
    if row.get(name) is None or not values or (loose and isinstance(row.get("text"), str)):
        return False
    return any(isinstance(value, (str, *_LIST)) for value in (row[name], *values))


def _pair(row: Row) -> _Chats:
    return [(_replied(row.get("prompt"), row.get(part), part), _tools(row), part) for part in ("chosen", "rejected")]


def _hh(row: Row) -> _Chats:
    return [(_human(_a(str, row.get(part), f"'{part}'"), part), None, part) for part in ("chosen", "rejected")]


# What reads each shape, and what recognises it.
_SHAPES: dict[str, tuple[Callable[[Row], _Chats], Callable[[Row], bool]]] = {
    "OpenAI batch output": (_batch, _is_batch),
    "inspect-ai sample": (_inspect, _is_inspect),
    "Anthropic messages": (lambda r: _with_system(r, _turns(r.get("messages"), "messages")), _is_anthropic),
    "OpenAI messages": (
        lambda r: [(_turns(_asked(r).get("messages"), "messages"), _tools(_asked(r)), "")],
        lambda r: isinstance(_asked(r).get("messages"), _LIST) and ("messages" in r or "custom_id" in r),
    ),
    "ShareGPT": (_sharegpt, lambda r: any(isinstance(r.get(f"conversation{s}"), _LIST) for s in ("s", ""))),
    "LangSmith": (_langsmith, lambda r: isinstance(r.get("inputs"), Mapping) and "outputs" in r),
    "Langfuse": (_langfuse, _is_langfuse),
    "hh-rlhf": (_hh, lambda r: _has(r, "chosen", "rejected") and "\n\nHuman:" in str(r["chosen"])),
    "chosen and rejected": (_pair, lambda r: _has(r, "chosen", "rejected")),
    "prompt and completion": (_completion, lambda r: _has(r, "prompt", "completion", "response", loose=True)),
    "Alpaca": (_alpaca, lambda r: _has(r, "instruction", "output", loose=True)),
}
SHAPES: tuple[str, ...] = tuple(_SHAPES)
FIELDS: Mapping[str, frozenset[str]] = {
    "OpenAI batch output": frozenset({"response", "choices", "error"}),
    "inspect-ai sample": frozenset({"messages", "input", "output", "samples"}),
    "Anthropic messages": frozenset({"system", "messages", "tools"}),
    "OpenAI messages": frozenset({"messages", "tools", "body"}),
    "ShareGPT": frozenset({"conversations", "conversation", "system", "tools"}),
    "LangSmith": frozenset({"inputs", "outputs"}),
    "Langfuse": frozenset({"input", "output"}),
    "hh-rlhf": frozenset({"chosen", "rejected"}),
    "chosen and rejected": frozenset({"prompt", "chosen", "rejected", "tools"}),
    "prompt and completion": frozenset({"prompt", "completion", "response", "tools"}),
    "Alpaca": frozenset({"instruction", "input", "output", "system", "history"}),
}

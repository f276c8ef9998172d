"""Checks request bodies.

request = read_request("chat", body, limits)         # body: bytes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probemon.errors import ConfigError, RequestRefused, closest
from probemon.host.chat_options import TEMPLATE_OPTIONS
from probemon.monitor.rule_spec import FIELDS, RuleSpec
from probemon.ops.server.limits import Limits
from probemon.util.checks import check_bool, check_count, check_number, check_text, shown
from probemon.util.strict_json import loads, no_constant

# OpenAI parameters without effect, and their allowed values; None for any.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "store": (False, None),
    "service_tier": ("auto", "default", None),
    "parallel_tool_calls": (True, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "tool_choice": ("auto", "none", None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
}
_SHARED: tuple[str, ...] = (
    "model",
    "n",
    "stop",
    "stream",
    "stream_options",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
)
_SHARED += ("top_k", "min_p", "repetition_penalty", "min_tokens", "probemon")
_PARAMETERS = {"chat": ("messages", "tools", "max_completion_tokens", TEMPLATE_OPTIONS), "completion": ("prompt",)}
_WATCH = ("concepts", "top_k", "prompt", "hold", "rules")
_RULE = tuple(name for name in FIELDS if name not in ("on_blind", "rate", "alert_set"))
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PRIVATE = ("messages", "prompt", "user", "metadata", "safety_identifier", "prompt_cache_key")
_MOST_OF_A_NAME = 200  # characters
_MOST_OF_A_STREAK = 2**31  # tokens
_SCORE: dict[str, Any] = {"low": 0, "high": 1, "open_high": True, "remedy": "give 0 or more, and less than 1"}
_Z: dict[str, Any] = {"low": 0, "remedy": "give 0 or more"}
_NO_SAMPLING = {"do_sample": False}
_TOO_DEEP = "the body is nested too deeply to be read as JSON"
_LEAST_TEMPERATURE = 1e-4
_MOST_NESTED = 64


@dataclass(frozen=True)
class RequestedWatch:
    """The `probemon` object of a body. `concepts` None: all."""

    concepts: tuple[str, ...] | None = None
    top_k: int = 3
    prompt: bool = False
    hold: bool = False
    rules: tuple[RuleSpec, ...] = ()


@dataclass(frozen=True)
class Request:
    """A checked request.

    - `max_tokens`: None for as many as allowed
    - `sampling`: of `model.generate`; {} for the model's defaults
    - `template_options`: what the chat template reads besides
    - `options`: the body without messages or prompt, and without what says who asks
    """

    kind: str
    model: str
    messages: tuple[Mapping[str, Any], ...]
    prompts: tuple[str | tuple[int, ...], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    template_options: Mapping[str, Any]
    n: int
    max_tokens: int | None
    sampling: Mapping[str, Any]
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    watch: RequestedWatch | None
    options: Mapping[str, Any]


def read_request(kind: str, body: bytes, limits: Limits) -> Request:
    """Return the checked request; `kind` is "chat" or "completion". Raises `RequestRefused`, naming the parameter."""
    parameters = _object(None, _parsed(body))
    accepted = (*_SHARED, *_PARAMETERS[kind])
    for name, value in parameters.items():
        if name in _WITHOUT_EFFECT:
            allowed = _WITHOUT_EFFECT[name]
            if allowed is not None and not any(_same(value, one) for one in allowed):
                raise RequestRefused(f"{name} is {shown(value)}: this server only takes {_either(allowed)}", name)
        elif name not in accepted:
            raise RequestRefused(f"there is no parameter {name!r:.60} here{closest(name, accepted)}", name[:60])
    model = parameters.get("model")
    if not isinstance(model, str):
        raise RequestRefused("model is missing: give the name that /v1/models lists", "model")
    read = _Reader(parameters)
    n = read.count("n", 1, least=1, most=limits.choices)
    prompts = _prompts(parameters.get("prompt"), limits) if kind == "completion" else ()
    if len(prompts) * n > limits.choices:
        raise RequestRefused(f"{len(prompts)} prompts times n={n}: at most {limits.choices} answers a request", "n")
    stream = read.flag("stream")
    return Request(
        kind=kind,
        model=model,
        messages=_messages(parameters.get("messages"), limits) if kind == "chat" else (),
        prompts=prompts,
        tools=_tools(parameters, limits),
        template_options={}
        if (given := parameters.get(TEMPLATE_OPTIONS)) is None
        else _object(TEMPLATE_OPTIONS, given),
        n=n,
        max_tokens=_max_tokens(read, parameters, limits),
        sampling=_sampling(read),
        seed=read.count("seed", None, most=2**63 - 1),
        stop=_stops(parameters.get("stop"), limits),
        stream=stream,
        include_usage=_include_usage(parameters.get("stream_options"), stream),
        watch=read_watch(parameters["probemon"], limits) if parameters.get("probemon") is not None else None,
        options={name: value for name, value in parameters.items() if name not in _PRIVATE},
    )


class _Reader:
    """Values of one object; null counts as absent."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._given, self._prefix = values, prefix

    def _take(self, name: str, default: Any, check: Any) -> Any:
        value = self._given.get(name)
        if value is None:
            return default
        try:
            return check(self._prefix + name, value)
        except ConfigError as error:
            raise RequestRefused(str(error), self._prefix + name) from None

    def count(self, name: str, default: Any, *, least: int = 0, most: int) -> Any:
        return self._take(name, default, lambda where, value: check_count(where, value, least=least, most=most))

    def number(self, name: str, **bounds: Any) -> Any:
        return self._take(name, None, lambda where, value: check_number(where, value, **bounds))

    def flag(self, name: str) -> bool:
        return bool(self._take(name, False, check_bool))

    def text(self, name: str, default: Any = None) -> Any:
        return self._take(name, default, _name)


def _parsed(body: bytes) -> Any:
    try:
        content = loads(body.decode(), constant=no_constant)
    except RecursionError:
        raise RequestRefused(_TOO_DEEP) from None
    except ValueError as error:
        raise RequestRefused(f"the body is not valid JSON: {str(error)[:300]}") from None
    _check_parts(content)
    return content


def _check_parts(content: Any) -> None:
    """Refuse 1e999 and deep nesting, which JSON could not hold again."""
    parts = [(content, 0)]
    while parts:
        part, depth = parts.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise RequestRefused("the body has a number that is too large for a float: give a smaller one")
        if isinstance(part, (dict, list)):
            if depth == _MOST_NESTED:
                raise RequestRefused(_TOO_DEEP)
            parts += [(inner, depth + 1) for inner in (part.values() if isinstance(part, dict) else part)]


def _object(param: str | None, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestRefused(f"{param or 'the body'} is {shown(value)}: give an object", param)
    return value


def _list(param: str, value: Any, most: int, least: int = 0) -> Sequence[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise RequestRefused(f"{param} is {shown(value)}: give a list of {least} to {most}", param)
    return value


def _same(value: Any, allowed: Any) -> bool:
    # 0 equals False, but a completion's logprobs=0 asks for log probabilities.
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _either(values: Sequence[Any]) -> str:
    return " or ".join("null" if value is None else shown(value) for value in values)


def _name(param: str, value: Any) -> str:
    text = check_text(param, value)
    if not 0 < len(text) <= _MOST_OF_A_NAME:
        raise ConfigError(f"{param} has {len(text)} characters: give 1 to {_MOST_OF_A_NAME}")
    return text


def _messages(value: Any, limits: Limits) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        _message(f"messages[{at}]", message)
        for at, message in enumerate(_list("messages", value, limits.messages, least=1))
    )


def _message(param: str, value: Any) -> Mapping[str, Any]:
    message = dict(_object(param, value))
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RequestRefused(f"{param}.role is {shown(role)}: give one of {', '.join(_ROLES)}", f"{param}.role")
    if isinstance(content, list):
        content = "".join(_text_part(f"{param}.content[{at}]", part) for at, part in enumerate(content))
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        raise RequestRefused(
            f"{param}.content is {shown(content)}: give a text, or a list of text parts", f"{param}.content"
        )
    return {**message, "content": content or ""}


def _text_part(param: str, value: Any) -> str:
    part = _object(param, value)
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestRefused(f'{param} is {shown(value)}: this server reads {{"type": "text", "text": ...}}', param)
    return str(part["text"])


def _prompts(value: Any, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
    """A text, ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    items = _list("prompt", value, most=limits.body_bytes, least=1)
    if all(_is_id(item) for item in items):
        return (tuple(items),)
    for at, item in enumerate(items):
        if not isinstance(item, str) and not (isinstance(item, list) and item and all(_is_id(inner) for inner in item)):
            raise RequestRefused(f"prompt[{at}] is {shown(item)}: give a text, or a list of token ids", "prompt")
    return tuple(item if isinstance(item, str) else tuple(item) for item in items)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _tools(parameters: Mapping[str, Any], limits: Limits) -> tuple[Mapping[str, Any], ...] | None:
    tools = parameters.get("tools")
    if tools is None or parameters.get("tool_choice") == "none":
        return None
    listed = _list("tools", tools, limits.messages)
    return tuple(_object(f"tools[{at}]", tool) for at, tool in enumerate(listed)) or None


def _max_tokens(read: _Reader, parameters: Mapping[str, Any], limits: Limits) -> int | None:
    new, old = (read.count(name, None, least=1, most=2**31) for name in ("max_completion_tokens", "max_tokens"))
    if new is not None and old is not None and new != old:
        raise RequestRefused(f"max_tokens is {old} and max_completion_tokens {new}: give one of them", "max_tokens")
    wanted: int | None = old if new is None else new
    if wanted is not None and wanted > limits.max_tokens:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise RequestRefused(f"{name} is {wanted}: this server gives at most {limits.max_tokens} tokens", name)
    return wanted


def _sampling(read: _Reader) -> Mapping[str, Any]:
    temperature = read.number("temperature", low=0, high=2, remedy="give a number from 0 to 2")
    top_p = read.number("top_p", low=0, high=1, open_low=True, remedy="give a number over 0, at most 1")
    top_k = read.count("top_k", None, most=2**31 - 1)  # 0: all
    min_p = read.number("min_p", low=0, high=1, remedy="give a number from 0 to 1")
    penalty = read.number("repetition_penalty", low=0, high=2, open_low=True, remedy="give a number over 0, at most 2")
    least = read.count("min_tokens", None, most=2**31 - 1)
    always = {} if penalty is None else {"repetition_penalty": penalty}
    always |= {"min_new_tokens": least} if least else {}
    if all(value is None for value in (temperature, top_p, top_k, min_p)):
        return always
    if temperature == 0:
        return {**_NO_SAMPLING, **always}
    if temperature is not None and temperature < _LEAST_TEMPERATURE:
        raise RequestRefused(
            f"temperature is {temperature!r}: give 0 for the likeliest token, or {_LEAST_TEMPERATURE} or more",
            "temperature",
        )
    # No top_k unless it is asked for: a model's default of 50 would cut the distribution.
    return {
        "do_sample": True,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": top_k or 0,
        **({"min_p": min_p} if min_p else {}),
        **always,
    }


def _stops(value: Any, limits: Limits) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = _list("stop", [value] if isinstance(value, str) else value, limits.stops)
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= _MOST_OF_A_NAME:
            raise RequestRefused(f"stop has {shown(stop)}: give texts of 1 to {_MOST_OF_A_NAME} characters", "stop")
    return tuple(stops)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise RequestRefused("stream_options is for streams: give stream=true too, or leave it out", "stream_options")
    options = _object("stream_options", value)
    for name, flag in options.items():
        if name not in ("include_usage", "include_obfuscation") or not isinstance(flag, bool):
            raise RequestRefused(f"stream_options.{name:.60} is {shown(flag)}: only include_usage is known, a boolean")
    return bool(options.get("include_usage", False))


def read_watch(value: Any, limits: Limits) -> RequestedWatch:
    """Return the checked `probemon` object of a body. Raises `RequestRefused`."""
    settings = _object("probemon", value)
    _check_names("probemon", settings, _WATCH)
    read = _Reader(settings, "probemon.")
    concepts = settings.get("concepts")
    if concepts is not None:
        concepts = tuple(
            _Reader({"": one}, f"probemon.concepts[{at}]").text("", "")
            for at, one in enumerate(_list("probemon.concepts", concepts, limits.names, least=1))
        )
    rules = [] if settings.get("rules") is None else _list("probemon.rules", settings["rules"], limits.names)
    return RequestedWatch(
        concepts=concepts,
        top_k=read.count("top_k", 3, most=limits.top_k),
        prompt=read.flag("prompt"),
        hold=read.flag("hold"),
        rules=tuple(_rule(f"probemon.rules[{at}]", rule) for at, rule in enumerate(rules)),
    )


def _rule(param: str, value: Any) -> RuleSpec:
    settings = dict(_object(param, value))
    _check_names(param, settings, _RULE)
    action = settings.pop("action", None)
    action = "record" if action is None else action
    if action not in ("stop", "record"):
        raise RequestRefused(f"{param}.action is {shown(action)}: give 'stop' or 'record'", f"{param}.action")
    texts = [
        (name, text) for name, value in settings.items() for text in (value if isinstance(value, list) else [value])
    ]
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        for name, text in texts:
            if isinstance(text, str):
                _name(name, text)
        if not isinstance(settings.get("concept", ""), str):
            check_text("concept", settings["concept"])
        if isinstance(settings.get("all_of"), list):
            for one in settings["all_of"]:
                check_text("all_of", one)
        return RuleSpec.from_dict(settings, action=action, on_blind="pass")
    except ConfigError as error:
        field = getattr(error, "field", "") or str(error).split(" ")[0]
        raise RequestRefused(f"{param}.{error}", f"{param}.{field}") from None


def _check_names(param: str, settings: Mapping[str, Any], accepted: Sequence[str]) -> None:
    for name in settings:
        if name not in accepted:
            raise RequestRefused(
                f"there is no {name!r:.60} in {param}{closest(name, accepted)}: it has {', '.join(accepted)}",
                f"{param}.{name:.60}",
            )

"""Types of the parameters of a request, for pydantic, with errors that say what to give."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_plain_validator_function

from probemon.errors import ConfigError, closest
from probemon.monitor.rule_spec import FIELDS, RuleSpec
from probemon.util.checks import check_text, is_number
from probemon.util.checks import shown as shown_in_python

_VLLM = "vLLM has this, watched: `probemon vllm serve`"
# What to give instead, by parameter.
REMEDIES = {
    "model": "give the name that /v1/models lists",
    "messages": "give a list of messages, each with a role and a content",
    "prompt": "give a text, a list of token ids, or a list of either",
    "reasoning": "give chat_template_kwargs what the chat template reads",
    "input": "give messages, or a prompt to /v1/completions",
    "truncation": "a prompt that is too long is refused: send less of the conversation",
    "use_beam_search": "leave it out: tokens are drawn one by one",
    "reasoning_effort": "if the chat template reads it, give it in chat_template_kwargs",
    "verbosity": "say in a message how long the answer is to be",
    "prediction": "leave it out: the answer is the same without it",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "prompt_logprobs": "ask /v1/completions with echo and logprobs",
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"), _VLLM),
    **dict.fromkeys(("tool_choice", "parallel_tool_calls"), _VLLM),
    **dict.fromkeys(("modalities", "audio"), "answers are texts"),
    "best_of": "give n, and choose among the answers",
}
# By route of OpenAI's API or vLLM's.
_OTHER_ROUTES = ("responses", "embeddings", "moderations", "audio", "images", "score", "rerank", "messages", "tokenize")
MOST_COUNT = 2**31 - 1
_NOT_IN_REQUESTS = ("on_blind", "rate", "alert_set")  # fields of a rule
_RULE = tuple(name for name in FIELDS if name not in _NOT_IN_REQUESTS)
_MOST_OF_A_NAME = 200  # characters
_LEAST_TEMPERATURE = 1e-4
_MOST_SHOWN = 80  # characters


def shown(value: Any) -> str:
    """Return a value of a body as its client wrote it, shortened."""
    if isinstance(value, int) and not isinstance(value, bool):
        return shown_in_python(value)
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def route_remedy(path: str) -> str:
    """Return what to do about a route that this server does not have, or ""."""
    name = path.removeprefix("/v1/").partition("/")[0]
    if name not in _OTHER_ROUTES:
        return ""
    has = "no server of probemon has it" if name in ("moderations", "images") else _VLLM
    return f" ({has}; this one has /v1/chat/completions and /v1/completions)"


def refused(reason: str, below: str = "") -> PydanticCustomError:
    """Return the error of a value; `below`: the part of it that is at fault, such as "[0]"."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "below": below})


def most(limit: str) -> AfterValidator:
    """Check a number, or the length of a list, against a limit of the server."""

    def check(value: Any, info: ValidationInfo) -> Any:
        most = None if info.context is None else getattr(info.context, limit)
        if most is not None and (len(value) if isinstance(value, list) else value) > most:
            raise refused(f"is {shown(value)}: this server takes at most {most}")
        return value

    return AfterValidator(check)


class Only:
    """A parameter that has no effect here, with the values that need none."""

    def __init__(self, *allowed: Any) -> None:
        self._allowed = allowed

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [*self._allowed]}

    def _checked(self, value: Any) -> Any:
        # 0 equals False in Python.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self._allowed):
            raise refused(f"is {shown(value)}: this server only takes {' or '.join(map(shown, self._allowed))}")
        return value


def not_nearly_0(value: float) -> float:
    if 0 < value < _LEAST_TEMPERATURE:
        raise refused(f"is {value!r}: give 0 for the likeliest token, or {_LEAST_TEMPERATURE} or more")
    return value


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(_is_id, value)):
            return [value]
        for at, one in enumerate(value):
            if not isinstance(one, str) and not (isinstance(one, list) and one and all(map(_is_id, one))):
                raise refused(f"has {shown(one)} at {at}: give texts, or lists of token ids")
        return value
    raise refused(f"is {shown(value)}: {REMEDIES['prompt']}")


_ID = re.compile(r"0|[1-9][0-9]{0,18}")  # each has one form, so that none stands twice


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise refused(f"is {shown(value)}: give an object of token ids and biases")
    for name, bias in value.items():
        if not _ID.fullmatch(name) or int(name) > MOST_COUNT:
            raise refused(f"has {name!r:.60}: give token ids, as texts")
        if not is_number(bias) or not -100 <= bias <= 100:
            raise refused(f"has {shown(bias)} for {name}: give numbers from -100 to 100")
    return {int(name): float(bias) for name, bias in value.items()}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise refused(f"is {shown(stops)}: give a text, or a list of texts")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= _MOST_OF_A_NAME:
            raise refused(f"has {shown(stop)}: give texts of 1 to {_MOST_OF_A_NAME} characters")
    return stops


def joined(value: Any) -> Any:
    """Join the text parts of a content."""
    if not isinstance(value, list):
        if isinstance(value, str):
            return value
        raise refused(f"is {shown(value)}: give a text, or a list of text parts")
    for at, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused(f'is {shown(part)}: this server reads {{"type": "text", "text": ...}}', f"[{at}]")
    return "".join(part["text"] for part in value)


def _rule(value: Any) -> RuleSpec:
    if not isinstance(value, dict):
        raise refused(f"is {shown(value)}: give an object")
    settings = {name: one for name, one in value.items() if one is not None or name not in _RULE}
    for name in settings:
        if name not in _RULE:
            has = f"it has {', '.join(_RULE)}"
            raise refused(f"is not known in a rule{closest(name, _RULE)}: {has}", f".{name:.60}")
    action = settings.pop("action", "record")
    if action not in ("stop", "record"):
        raise refused(f'is {shown(action)}: give "stop" or "record"', ".action")
    try:
        for name, one in settings.items():
            for text in one if isinstance(one, list) else [one]:
                if isinstance(text, str) and not 0 < len(text) <= _MOST_OF_A_NAME:
                    raise ConfigError(f"{name} has {len(text)} characters: give 1 to {_MOST_OF_A_NAME}")
        all_of = settings.get("all_of", [])
        # No numbers: in another pack they are other concepts.
        check_text("concept", settings.get("concept", ""))
        for one in all_of if isinstance(all_of, list) else []:
            check_text("all_of", one)
        return RuleSpec.from_dict(settings, action=action, on_blind="pass")
    except ConfigError as error:
        field = getattr(error, "field", "") or str(error).split(" ")[0]
        raise refused(str(error).removeprefix(f"{field} "), f".{field}") from None


Name = Annotated[str, Field(min_length=1, max_length=_MOST_OF_A_NAME)]
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = Annotated[dict[int, float], PlainValidator(_bias, json_schema_input_type=dict[str, float])]
TokenIds = Annotated[list[Count], Field(max_length=1000)]
RuleObject = Annotated[Any, PlainValidator(_rule), WithJsonSchema(RuleSpec.schema(without=_NOT_IN_REQUESTS))]
_T = TypeVar("_T")
_Some = Annotated[list[_T], Field(min_length=1)]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | _Some[str] | _Some[Count] | _Some[_Some[Count]]),
]
Stops = Annotated[list[str], PlainValidator(_stops, json_schema_input_type=str | list[Name]), most("stops")]

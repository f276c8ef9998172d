"""Request bodies, as pydantic models.

request = read_request("chat", body, limits)         # body: bytes

Types are strict: true is no number, "3" neither. Null counts as absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from probemon.errors import RequestRefused, closest
from probemon.ops.server.limits import Limits
from probemon.ops.server.parameters import (
    MOST_COUNT,
    REMEDIES,
    Biases,
    Count,
    Name,
    Only,
    Penalty,
    Prompts,
    RuleObject,
    Stops,
    TokenIds,
    joined,
    most,
    not_nearly_0,
    refused,
    shown,
)
from probemon.util.strict_json import loads, no_constant

_PRIVATE = ("messages", "prompt", "user", "metadata", "safety_identifier", "prompt_cache_key")
_TOO_DEEP = "the body is nested too deeply to be read as JSON"
_MOST_NESTED = 64
_MOST_TOP = 20  # likeliest tokens, as OpenAI


# -- bodies --------------------------------------------------------------------------------------


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if one is not None or name not in cls.model_fields}


class TextPart(_Body):
    """A part of a content."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a chat. Other keys, such as `tool_calls`, reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(joined, json_schema_input_type=str | list[TextPart] | None)] = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise refused("is missing: give a text, or a list of text parts", ".content")
        return self

    @property
    def said(self) -> dict[str, Any]:
        """The message in OpenAI's form, its content one text."""
        return {"role": self.role, "content": self.content or "", **(self.model_extra or {})}


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class RequestedWatch(_Body):
    """The `probemon` object of a body. `concepts` None: all."""

    concepts: Annotated[list[Name], Field(min_length=1), most("names")] | None = None
    top_k: Annotated[Count, most("top_k")] = 3
    prompt: bool = False
    hold: bool = False
    rules: Annotated[list[RuleObject], most("names")] = []


class Request(_Body):
    """A checked request.

    - `max_tokens`: None for as many as allowed
    - `probemon`: None if no concepts are asked for
    """

    kind: ClassVar[str]

    model: str
    n: Annotated[int, Field(ge=1), most("choices")] = 1
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(not_nearly_0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = Field(None, description="0: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases = {}
    min_tokens: Count = 0
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    probemon: RequestedWatch | None = Field(None, description="asks for the concepts of every token")

    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    store: Annotated[Any, Only(False)] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    tool_choice: Annotated[Any, Only("auto", "none")] = None
    parallel_tool_calls: Annotated[Any, Only(True)] = None
    modalities: Annotated[Any, Only(["text"])] = None
    best_of: Annotated[Any, Only(1)] = None
    suffix: Annotated[Any, Only("")] = None

    _options: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @field_validator("stream_options")
    @classmethod
    def _is_stream(cls, value: Any, info: ValidationInfo) -> Any:
        if not info.data.get("stream"):
            raise refused("is for streams: give stream=true too, or leave it out")
        return value

    @property
    def said(self) -> tuple[Mapping[str, Any], ...]:
        """The messages of a chat in OpenAI's form."""
        return ()

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts of a completion."""
        return ()

    @property
    def wanted_tokens(self) -> int | None:
        """How many tokens the answer may have; None for as many as allowed."""
        return self.max_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported at each token; None for no log probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """True if the prompt is a part of the answer."""
        return False

    @property
    def penalises(self) -> bool:
        """True if logits are changed token by token."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def options(self) -> Mapping[str, Any]:
        """The body without messages or prompt, and without what says who asks."""
        return self._options

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """`user` and `metadata`, those that were given."""
        return {name: value for name in ("user", "metadata") if (value := getattr(self, name)) is not None}

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of `model.generate`; {} for the model's defaults."""
        always: dict[str, Any] = {}
        if self.repetition_penalty is not None:
            always["repetition_penalty"] = self.repetition_penalty
        if self.min_tokens:
            always["min_new_tokens"] = self.min_tokens
        if all(value is None for value in (self.temperature, self.top_p, self.top_k, self.min_p)):
            return always
        if self.temperature == 0:
            return {"do_sample": False, **always}
        # No top_k unless it is asked for: a model's default of 50 would cut the distribution.
        return {
            "do_sample": True,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or 0,
            **({"min_p": self.min_p} if self.min_p else {}),
            **always,
        }


class ChatRequest(Request):
    """The body of /v1/chat/completions."""

    kind = "chat"

    messages: Annotated[list[Message], Field(min_length=1), most("messages")]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_COUNT)] | None = None
    tools: Annotated[list[dict[str, Any]], most("messages")] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise refused(f"is {old} and max_completion_tokens {new}: give one of them", ".max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise refused("needs logprobs: give logprobs=true too, or leave it out", ".top_logprobs")
        if self.continue_final_message:
            last = self.messages[-1]
            if self.add_generation_prompt:
                raise refused("needs add_generation_prompt=false", ".continue_final_message")
            if last.role != "assistant" or not last.content or (last.model_extra or {}).get("tool_calls"):
                raise refused(
                    "is to be continued: give a text of the assistant", f".messages[{len(self.messages) - 1}]"
                )
        return self

    @property
    def said(self) -> tuple[Mapping[str, Any], ...]:
        """The messages in OpenAI's form."""
        return tuple(message.said for message in self.messages)

    @property
    def offered_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools that the chat template gets."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def wanted_tokens(self) -> int | None:
        """How many tokens the answer may have; None for as many as allowed."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported at each token; None for no log probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(Request):
    """The body of /v1/completions."""

    kind = "completion"

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MOST_COUNT)] | None = Field(None, description="0: only with echo")
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP)] | None = None

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        if info.context is not None and len(self.prompt) * self.n > info.context.choices:
            raise refused(
                f"is {self.n}, of {len(self.prompt)} prompts: at most {info.context.choices} answers a request",
                ".n",
            )
        if self.max_tokens == 0 and not self.echo:
            raise refused("is 0: give 1 or more, or echo=true for the prompt alone", ".max_tokens")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Its prompts."""
        return tuple(one if isinstance(one, str) else tuple(one) for one in self.prompt)

    @property
    def n_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported at each token; None for no log probabilities."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """True if the prompt is a part of the answer."""
        return self.echo


BODIES: Mapping[str, type[Request]] = {"chat": ChatRequest, "completion": CompletionRequest}


# -- reading -------------------------------------------------------------------------------------


def read_request(kind: str, body: bytes, limits: Limits) -> Request:
    """Return the checked request; `kind` is "chat" or "completion". Raises `RequestRefused`, naming the parameter."""
    parameters = _parsed(body)
    request = _validated(BODIES[kind], parameters, limits)
    request._options = {name: value for name, value in parameters.items() if name not in _PRIVATE}
    return request


def read_watch(value: Any, limits: Limits) -> RequestedWatch:
    """Return the checked `probemon` object of a body. Raises `RequestRefused`."""
    return _validated(RequestedWatch, value, limits, ("probemon",))


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


_Model = TypeVar("_Model", bound=_Body)


def _validated(model: type[_Model], value: Any, limits: Limits, at: tuple[str, ...] = ()) -> _Model:
    try:
        return model.model_validate(value, context=limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise _refusal(first, (*at, *first["loc"]), model)


def _refusal(error: ErrorDetails, place: tuple[int | str, ...], model: type[_Body]) -> RequestRefused:
    kind, value, details = error["type"], error["input"], error.get("ctx", {})
    written = [f"[{one}]" if isinstance(one, int) else f".{one:.60}" for one in place]
    param = "".join([*written, details.get("below", "")]).removeprefix(".")
    name = str(place[-1]) if place else ""
    if kind == "extra_forbidden":
        owners: dict[int | str, type[_Body]] = {"probemon": RequestedWatch, "stream_options": StreamOptions}
        inside, names = place[0], [*owners.get(place[0] if len(place) > 1 else "", model).model_fields]
        where = "here" if len(place) == 1 else f"in {inside}"
        has = "" if len(place) == 1 else f": it has {', '.join(names)}"
        remedy = f": {REMEDIES[name]}" if name in REMEDIES and len(place) == 1 else closest(name, names) + has
        return RequestRefused(f"there is no parameter {name!r:.60} {where}{remedy}", param)
    remedy = f" ({REMEDIES[name]})" if name in REMEDIES and len(place) == 1 else ""
    if kind == "refused":
        return RequestRefused(f"{param} {details['reason']}{remedy}", param)
    if kind == "missing":
        return RequestRefused(f"{param} is missing: {REMEDIES.get(name, 'give it')}", param)
    said = re.sub(r"^(Input|List|String|Dictionary) should", "it should", error["msg"]).replace(" after validation", "")
    said = "give an object" if kind in ("model_type", "dict_type") else said
    return RequestRefused(f"{param or 'the body'} is {shown(value)}: {said}{remedy}", param or None)

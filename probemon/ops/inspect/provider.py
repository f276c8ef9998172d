"""The provider of inspect-ai: a model of transformers, watched while it answers.

    inspect eval task.py --model probemon/MODEL -M pack=PACK            # the packs of `demo` may be left out
    get_model("probemon/MODEL", pack="PACK", device="cuda")

Answers, options and concepts are those of `probemon serve`, whose modules read the request and watch the answer.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from probemon.errors import ConfigError, RequestRefused, closest

if TYPE_CHECKING:
    from probemon.ops.server.answering import Ending, Piece
    from probemon.ops.server.requests import Request
    from probemon.packs.group import AnyPack

KEY = "probemon"  # in the metadata of a message, and in `extra_body`
_ARGUMENTS = ("pack", "alert_set", "device", "dtype", "strict")
# Options of a generation, as OpenAI calls them.
_HONOURED = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop_seqs": "stop",
    "num_choices": "n",
}
# Applied by inspect-ai itself, or without a meaning for text that is made here.
_APPLIED: tuple[str, ...] = ("max_retries", "timeout", "attempt_timeout", "max_connections", "adaptive_connections")
_APPLIED += ("system_message", "max_tool_output", "fail_on_refusal", "reasoning_history", "cache", "cache_prompt")
_APPLIED += ("internal_tools", "parallel_tool_calls")
_AT_ONCE = 2  # answers at the same time, unless max_connections says otherwise
_MAX_TOKENS = 2048  # of an answer, as inspect-ai's other providers of local models
_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "max_tokens", "content_filter": "content_filter"}


class WatchedModel(ModelAPI):
    """Loads a model and its probes. Raises `ConfigError`, `PackError`, `ModelMismatch`.

    - `pack`: a folder, a name on the hub or "demo", or a list of these; it may be left out for the model "demo"
    - `alert_set`: a set of thresholds of the pack
    - `device`: "cpu", "cuda", ...; `dtype`: "auto" or a name, such as "bfloat16"
    - `strict`: refuses a model that is not the one the pack was made for
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  as inspect-ai's
        *,
        pack: str | Sequence[str] | None = None,
        alert_set: str | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        strict: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        for name in unknown:
            raise ConfigError(
                f"there is no model argument {name!r:.60}{closest(name, _ARGUMENTS)}: it has {', '.join(_ARGUMENTS)}"
            )
        from probemon.cli.common import pack_for
        from probemon.engine.kernels import check_device
        from probemon.host.compatibility import check_readable
        from probemon.host.loading import load_model
        from probemon.host.model import unwrap
        from probemon.manager import DynamicProbeManager
        from probemon.ops.server.limits import Limits
        from probemon.ops.server.served import Served, served_name
        from probemon.packs.group import open_packs

        check_device(device)
        packs = [pack_for(model_name, pack)] if pack is None or isinstance(pack, str) else list(pack)
        opened = open_packs(packs, alert_set)
        # A part of the key of inspect-ai's cache, which knows no model arguments: other packs have other concepts.
        identity = f"{KEY}:{_identity(opened, dtype)}"
        if base_url not in (None, identity):
            raise ConfigError(f"base_url is {base_url!r:.100}: {KEY}/{model_name} runs here, so leave it out")
        self.base_url = identity
        model, tokenizer = load_model(model_name, device, lambda line: None, dtype=dtype)
        manager = DynamicProbeManager(opened, device=device)
        check_readable(manager.pack, unwrap(model), strict=strict)
        limits = Limits(max_tokens=_MAX_TOKENS)
        self._served: Any = Served(served_name(model_name), model, tokenizer, manager, limits)
        self._limiter = RunVar[CapacityLimiter]("answers at the same time")  # one for each event loop

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer, with the concepts of each choice in `message.metadata["probemon"]`. Raises `RequestRefused`."""
        if tools and tool_choice != "none":
            raise RequestRefused(
                f"{KEY}/{self.model_name} is given tools, and calls of tools are not read from its answers: evaluate it"
                " without tools",
                "tools",
            )
        request = self._request(input, config)
        limiter = self._limiter.get(None)
        if limiter is None:
            self._limiter.set(limiter := CapacityLimiter(_AT_ONCE))
        limiter.total_tokens = config.max_connections or _AT_ONCE
        gathered = [_Gathered(f"{KEY}-{number}") for number in range(request.n)]
        try:
            work = partial(self._answer, request, gathered)
            return await to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)
        finally:
            for one in gathered:
                one.cancel()  # ends it at its next token

    def max_connections(self) -> int:
        """Answers at the same time."""
        return _AT_ONCE

    def close(self) -> None:
        """Drop the model."""
        self._served = None

    def ids_below(self, concepts: Iterable[str]) -> frozenset[str]:
        """Return the ids of concepts (given by id, name or pattern) and of those below. Raises `RequestRefused`."""
        from probemon.ops.server.requests import RequestedWatch
        from probemon.ops.server.served import shown_probes

        manager = self._served.manager
        mask = shown_probes(manager, RequestedWatch(concepts=list(concepts)))
        assert mask is not None
        return frozenset(manager.pack.concepts[probe]["id"] for probe in mask.nonzero()[0].tolist())

    # -- inside ----------------------------------------------------------------------------------

    def _request(self, input: list[ChatMessage], config: GenerateConfig) -> Request:
        """Return the request that a client of `probemon serve` would send."""
        from probemon.host.chat_shapes import chats_as
        from probemon.ops.server.limits import Limits
        from probemon.ops.server.requests import read_request

        said = [message.model_dump(mode="json", exclude_none=True) for message in input]
        body = {"model": self._served.name, "messages": chats_as("inspect-ai sample", {"messages": said})[0].messages}
        body[KEY] = {}
        for name, value in config:
            if name in _HONOURED:
                body[_HONOURED[name]] = value
            elif name == "extra_body":
                if unknown := next((key for key in value or () if key != KEY), None):
                    raise RequestRefused(f"extra_body has {unknown!r:.60}: only {KEY!r} is known", name)
                body |= value or {}
            elif value and name not in _APPLIED:
                raise RequestRefused(f"{name} has no effect on {KEY}/{self.model_name}: leave it out", name)
        most = dict.fromkeys(("max_tokens", "choices", "messages", "stops"), 2**31)
        return read_request("chat", json.dumps(body).encode(), Limits(**most))

    def _answer(self, request: Request, gathered: Sequence[_Gathered]) -> ModelOutput:
        from probemon.ops.server.answering import Answering

        served, began = self._served, time.monotonic()
        endings: list[Ending] = []
        try:
            prepared = served.prepare(request)
        except RequestRefused as error:
            if error.code != "context_length_exceeded":
                raise
            return ModelOutput.from_content(self.model_name, str(error), stop_reason="model_length", error=str(error))
        (ids,), (max_tokens,) = prepared.prompts, prepared.max_tokens
        for number, listener in enumerate(gathered):
            if listener.cancelled:  # nobody waits for the output
                break
            answering = Answering(
                served,
                prepared,
                ids,
                choice=number,
                max_tokens=max_tokens,
                seed=None if request.seed is None else request.seed + number,
                tell_prompt=prepared.watch.prompt and number == 0,
                listener=listener,
            )
            endings.append(answering.run())
        is_cut = request.max_tokens is None and max_tokens < _MAX_TOKENS  # by the length of the context
        n_answers = sum(ending.n_tokens for ending in endings)
        return ModelOutput(
            model=self.model_name,
            choices=[
                self._choice(request, listener, ending, "model_length" if is_cut else "max_tokens")
                for listener, ending in zip(gathered, endings, strict=False)
            ],
            usage=ModelUsage(input_tokens=len(ids), output_tokens=n_answers, total_tokens=len(ids) + n_answers),
            time=time.monotonic() - began,
        )

    def _choice(
        self, request: Request, listener: _Gathered, ending: Ending, at_length: StopReason
    ) -> ChatCompletionChoice:
        pack, watch = self._served.manager.pack, request.probemon
        told = {
            "tokens": listener.tokens,
            "events": listener.events,
            "summary": ending.summary,
            "concepts": _concepts(pack, listener.tokens),
            "pack": pack.name,
            "only": None if watch is None or watch.concepts is None else list(watch.concepts),
        }
        message = ChatMessageAssistant(
            content=ending.text, source="generate", model=self.model_name, metadata={KEY: told}
        )
        reason = at_length if ending.finish_reason == "length" else _REASONS.get(ending.finish_reason, "unknown")
        return ChatCompletionChoice(message=message, stop_reason=reason)


@modelapi(name="probemon")
def provider() -> type[ModelAPI]:
    """Return the class of `probemon/...`; decorated itself, it would no longer be a class."""
    return WatchedModel


class _Gathered:
    """Gathers the concepts of one answer."""

    def __init__(self, name: str) -> None:
        self.id, self._cancelled = name, False
        self.tokens: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for the answer."""
        return self._cancelled

    def cancel(self) -> None:
        """End the answer at its next token."""
        self._cancelled = True

    def note(self, choice: int, tokens: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        """Wait for `send`, which has them too."""

    def send(self, piece: Piece) -> None:
        """Keep tokens and events."""
        self.tokens += piece.tokens
        self.events += piece.events


def _concepts(pack: AnyPack, tokens: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what the numbers in tokens stand for, by number."""
    from probemon.monitor.result import describe

    numbers = {probe for token in tokens for probe in (*token["fired"], *(entry[0] for entry in token["top"]))}
    named = {probe: describe(pack, probe, 0.0) for probe in sorted(numbers)}
    return {
        str(probe): {"concept": one.concept, "name": one.name, "path": list(one.path)} for probe, one in named.items()
    }


def _identity(pack: AnyPack, dtype: str) -> str:
    """Return a hash of all that concepts depend on, apart from the model's files."""
    from probemon.packs.group import PackGroup

    named = pack.packs if isinstance(pack, PackGroup) else {"": pack}
    parts = [[name, one.manifest, one.alert_set] for name, one in named.items()]
    return hashlib.sha256(json.dumps([parts, dtype], sort_keys=True).encode()).hexdigest()

"""The model of a server, and requests in terms of its tokens and probes.

prepared = Served("demo", model, tokenizer, manager, limits).prepare(request)
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from transformers.generation.configuration_utils import GenerationMode

from probemon.core.hierarchy import Mask
from probemon.errors import ArenaFull, ChatRefused, ConfigError, RequestRefused, RuleError, UnknownConcept
from probemon.host.chat_forms import texts_in
from probemon.host.chat_template import render
from probemon.host.model import unwrap
from probemon.host.reasoning_marks import ReasoningMarks, marks_of
from probemon.host.text_tokens import ids_of
from probemon.manager import DynamicProbeManager
from probemon.monitor.breaker import Circuit
from probemon.monitor.followers import Follower
from probemon.monitor.rule_spec import Rule, RuleSpec
from probemon.monitor.rules import check_asked
from probemon.ops.budget import Budget
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.server.held import Holding
from probemon.ops.server.limits import Limits
from probemon.ops.server.logprobs import ToldToken, told_token
from probemon.ops.server.requests import ChatRequest, Request, RequestedWatch
from probemon.packs.configured import names_left_out

Decode = Callable[[Sequence[int]], str]


def control_tokens_of(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return tuple(sorted({str(token) for token in added if token.special and str(token).strip()}))


def _arguments_in(tool_calls: Any) -> list[Any]:
    """Return the decoded arguments of tool calls, as a template gets them: JSON may escape a control token."""
    decoded = []
    for call in tool_calls or ():
        arguments = (call.get("function") or {}).get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                decoded.append(json.loads(arguments))
    return decoded


def served_name(model: str) -> str:
    """Return a model's name for clients: of a folder, the last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def check_serves(deployment: Deployment) -> None:
    """Raise `ConfigError` for sections that a server does not support."""
    if deployment.content.get("sinks"):
        raise ConfigError(
            f"{deployment.path.name} has sinks, which take the tokens of one run: a server's tokens go to readers of"
            " /v1/probemon/events. Leave them out"
        )
    if "port" in deployment.content.get("metrics", {}):
        raise ConfigError(
            f"{deployment.path.name} has a port for metrics: a server shows them at its own /metrics. Leave it out"
        )


@dataclass(frozen=True)
class Prepared:
    """A request in tokens and probes.

    - `prompts`, `max_tokens`: ids, and tokens of the answers, for each prompt
    - `shown [P]`: mask of reported probes; None for all
    - `marks`: of the reasoning that is told apart; None if there is one text
    - `cut_to`: tokens of the longest answer, if the request asked for more
    - `traceparent`: the header, for telemetry
    """

    request: Request
    watch: RequestedWatch
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    rules: tuple[tuple[RuleSpec, tuple[int, ...]], ...]
    shown: Mask | None
    marks: ReasoningMarks | None
    cut_to: int | None
    traceparent: str = ""


class Served:
    """A model that is served. Thread-safe. Raises `ConfigError`, `ModelMismatch`.

    - `deployment`: its rules apply to every request
    - `followers`: each follows every answer, one after another, so it has to allow several runs
    - `control_tokens`: let messages have tokens that begin and end turns
    - `keep_metadata`: keep `user` and `metadata` of a request in its record
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        manager: DynamicProbeManager,
        limits: Limits,
        deployment: Deployment | None = None,
        followers: Sequence[Follower] = (),
        *,
        control_tokens: bool = False,
        keep_metadata: bool = False,
    ) -> None:
        self.keep_metadata = keep_metadata
        self._control_tokens = () if control_tokens else control_tokens_of(tokenizer)
        self.name, self.model, self.tokenizer, self.manager, self.limits = name, model, tokenizer, manager, limits
        self.marks = marks_of(tokenizer)
        check_mode(model)
        self.holding = Holding(manager, tokenizer, deployment)
        self.budget: Budget | None = None  # shared by all answers, like the circuit
        self.circuit: Circuit | None = None
        self.metric_concepts: list[str] | None = None
        self.drift = None if deployment is None else deployment.drift(manager)
        self.followers = tuple(one for one in (self.drift, *followers) if one is not None)
        self.telemetry = None if deployment is None else deployment.opentelemetry()
        if deployment is not None:
            deployment.check_host(manager.pack, model)
            check_serves(deployment)
            self.budget = deployment.budget
            self.circuit = None if deployment.breaker is None else Circuit(deployment.breaker)
            metrics = deployment.metrics(manager.pack)
            self.metric_concepts = None if metrics is None else metrics["concepts"]
        ends = model.generation_config.eos_token_id
        self.end_ids = frozenset(ends if isinstance(ends, list) else [ends])
        pad = model.generation_config.pad_token_id
        # Nothing is padded, but transformers warns without a pad token.
        self.padding = {"pad_token_id": pad if pad is not None else next(iter(self.end_ids - {None}), 0)}
        config = model.config.get_text_config()
        self.n_columns: int | None = getattr(config, "max_position_embeddings", None)  # context length
        self.n_ids = model.get_input_embeddings().num_embeddings
        # Otherwise the model gives the logits of all positions anyway.
        self.keeps_logits = "logits_to_keep" in signature(unwrap(model).forward).parameters
        self._encoding = threading.Lock()  # a fast tokenizer must not be set up by two threads

    @property
    def decode(self) -> Decode:
        """The decoder of shown text."""
        return partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def raw_text(self, token_id: int) -> str:
        """Return the text of one token, even a special one."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def told_token(self, token_id: int) -> ToldToken:
        """Return one token, even a special one."""
        return told_token(self.tokenizer, self.raw_text(token_id), token_id)

    def ends_of(self, request: Request) -> frozenset[int]:
        """Return the tokens that end an answer."""
        ends = frozenset() if request.ignore_eos else self.end_ids - {None}
        return ends | frozenset(request.stop_token_ids)

    def draws(self, request: Request) -> bool:
        """True if tokens are sampled."""
        return bool(request.sampling.get("do_sample", self.model.generation_config.do_sample))

    def prepare(self, request: Request) -> Prepared:
        """Return the request in tokens and probes. Raises `RequestRefused`."""
        if request.model != self.name:
            raise RequestRefused(
                f"there is no model {request.model!r:.100} here: this server has {self.name!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        watch = request.probemon or RequestedWatch()
        shown, rules = self._shown(watch), self._rules(watch)
        prompts = tuple(tuple(ids) for ids in self._encoded(request))
        param = "messages" if request.kind == "chat" else "prompt"
        max_tokens = tuple(self._room(ids, request, param) for ids in prompts)
        marks = self.marks if request.kind == "chat" else None
        if request.min_tokens > max(max_tokens):
            raise RequestRefused(
                f"min_tokens is {request.min_tokens}, and the answer has at most {max(max_tokens)} tokens: give fewer",
                "min_tokens",
            )
        self._check_ids("logit_bias", request.logit_bias)
        self._check_ids("stop_token_ids", request.stop_token_ids)
        cut_to = self.limits.max_tokens if (request.wanted_tokens or 0) > self.limits.max_tokens else None
        return Prepared(request, watch, prompts, max_tokens, rules, shown, marks, cut_to)

    # -- tokens ----------------------------------------------------------------------------------

    def _encoded(self, request: Request) -> list[Sequence[int]]:
        if not isinstance(request, ChatRequest):
            return [self._ids_of(prompt) for prompt in request.prompts]
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestRefused(
                f"{self.name} has no chat template: ask /v1/completions for what follows a text", "messages"
            )
        for at, message in enumerate(request.said):
            for name, value in message.items():
                self._check_no_control(f"messages[{at}].{name}", value)
            self._check_no_control(f"messages[{at}].tool_calls", _arguments_in(message.get("tool_calls")))
        self._check_no_control("chat_template_kwargs", request.chat_template_kwargs)
        self._check_no_control("tools", request.offered_tools)
        try:
            with self._encoding:  # a template may write today's date, which is right here
                chat = render(
                    self.tokenizer,
                    request.said,
                    tools=request.offered_tools,
                    add_generation_prompt=request.add_generation_prompt,
                    continue_final_message=request.continue_final_message,
                    options=request.chat_template_kwargs,
                )
            if request.continue_final_message:
                self._check_no_open_reasoning(request.said, chat.ids)
            return [chat.ids]
        except ChatRefused as error:
            raise RequestRefused(f"{self.name}: {error}", error.param) from error

    def _check_no_open_reasoning(self, messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> None:
        """Refuse to continue reasoning that began before a prompt's end, where its mark may be a quoted one."""
        if self.marks is None or self.marks.opened_by(ids):
            return
        content = messages[-1]["content"]
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        with self._encoding:
            said = ids_of(self.tokenizer, "".join(texts))
        if self.marks.parts(said, is_open=False)[1]:
            at = f"messages[{len(messages) - 1}].content"
            raise RequestRefused(
                f"{at} ends inside reasoning, which would be told as the reply: end the reasoning in it, or let the"
                " content end with the mark that begins it",
                at,
            )

    def _check_no_control(self, param: str, value: Any) -> None:
        """Refuse texts that would be read as several turns."""
        found = next((token for text in texts_in(value) for token in self._control_tokens if token in text), None)
        if found is not None:
            raise RequestRefused(
                f"{param} has {found!r}, which the model reads as a control token, such as the end of a turn: leave it"
                " out (the server lets it through with --allow-control-tokens)",
                param,
                code="control_token",
            )

    def _ids_of(self, prompt: str | tuple[int, ...]) -> Sequence[int]:
        if isinstance(prompt, str):
            with self._encoding:
                return ids_of(self.tokenizer, prompt)
        self._check_ids("prompt", prompt)
        return prompt

    def _check_ids(self, param: str, ids: Collection[int]) -> None:
        if ids and max(ids) >= self.n_ids:
            raise RequestRefused(f"{param} has id {max(ids)}: the model has {self.n_ids} tokens, from 0", param)

    def _room(self, ids: Sequence[int], request: Request, param: str) -> int:
        if not ids:
            raise RequestRefused(f"{param} has no tokens: say something", param)
        wanted = request.wanted_tokens
        most = min(self.limits.max_tokens if wanted is None else wanted, self.limits.max_tokens)
        if self.n_columns is None:
            return most
        room = self.n_columns - len(ids)
        if room < 1 or (wanted is not None and room < most):
            raise RequestRefused(
                f"{param} has {len(ids)} tokens and up to {most} are to follow: the model reads at most"
                f" {self.n_columns} together, so shorten it or ask for fewer",
                param,
                code="context_length_exceeded",
            )
        return min(most, room)

    # -- concepts --------------------------------------------------------------------------------

    def _shown(self, watch: RequestedWatch) -> Mask | None:
        held = self.holding.now
        return shown_probes(self.manager, watch, held.exclude, held.always_on)

    def _made(self, rule: RuleSpec) -> list[Rule]:
        made = rule.rules(self.manager.pack)
        check_asked(made, self.tokenizer)
        return made

    def _rules(self, watch: RequestedWatch) -> tuple[tuple[RuleSpec, tuple[int, ...]], ...]:
        rules: list[tuple[RuleSpec, tuple[int, ...]]] = []
        for at, rule in enumerate(watch.rules):
            made = _refused(f"probemon.rules[{at}]", partial(self._made, rule))
            rules.append((rule, tuple(probe for one in made for probe in one.probes)))
        probes = [probe for _, probes in rules for probe in probes]
        if len(probes) > self.limits.names:
            raise RequestRefused(
                f"the rules name {len(probes)} concepts: at most {self.limits.names} a request", "probemon.rules"
            )
        _refused("probemon.rules", partial(self.holding.check_room, probes))
        return tuple(rules)


def shown_probes(
    manager: DynamicProbeManager,
    watch: RequestedWatch,
    exclude: Sequence[str] | None = None,
    always_on: Sequence[str] | None = None,
) -> Mask | None:
    """Return a mask of the probes that a request asks for; None for all. Raises `RequestRefused`.

    `exclude`, `always_on`: of a deployment; None for the manager's settings.
    """
    if watch.concepts is None:
        return None
    pack, shown = manager.pack, np.zeros(manager.pack.n_probes, dtype=bool)
    plan = manager.plan_with([], exclude, always_on)
    for at, concept in enumerate(watch.concepts):
        param = f"probemon.concepts[{at}]"
        named = _refused(param, partial(pack.find_all, concept))
        if names := names_left_out(pack, plan.watched, named):
            raise RequestRefused(
                f"{param}: {names} is left out by the deployment, so that its silence would say nothing: ask for"
                " another concept",
                param,
            )
        for level in pack.tree.levels_below(named):
            shown[list(level)] = True
    return shown


def _refused(param: str, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuleError as error:
        raise RequestRefused(f"{param}.{error}", f"{param}.{error.field}" if error.field else param) from error
    except (UnknownConcept, ConfigError, ArenaFull) as error:
        raise RequestRefused(f"{param}: {error}", param) from error


def check_mode(model: Any) -> None:
    """Raise `ConfigError` if the model's settings do not generate token by token.

    Beams are ignored: each answer is one sequence.
    """
    config = copy.deepcopy(model.generation_config)
    config.num_beams = 1
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(
            f"the generation_config of this {type(model).__name__} asks for {mode.value}, and answers are served token"
            " by token: unset there what asks for it (prompt_lookup_num_tokens, assistant_early_exit, penalty_alpha,"
            " dola_layers, ...)"
        )

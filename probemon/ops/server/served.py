"""Served: the host, its tokenizer and the manager that a server answers with, and what a request means for them.

served = Served("demo", model, tokenizer, manager, limits)
prepared = served.prepare(request)           # RequestRefused, before anything runs
prepared.prompts, prepared.rules, prepared.shown
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers.generation.configuration_utils import GenerationMode

from probemon.core.hierarchy import Mask
from probemon.errors import ArenaFull, ChatRefused, ConfigError, RequestRefused, UnknownConcept
from probemon.host.chat_template import render
from probemon.host.text_tokens import ids_of
from probemon.manager import DynamicProbeManager
from probemon.monitor.breaker import Circuit
from probemon.monitor.rule_spec import RuleSpec
from probemon.ops.budget import Budget
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.server.held import Holding
from probemon.ops.server.limits import Limits
from probemon.ops.server.requests import Request, RequestedWatch

Decode = Callable[[Sequence[int]], str]


def served_name(model: str) -> str:
    """Return the name by which clients ask for a model: of a folder its last part, else as it was given."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def check_serves(deployment: Deployment) -> None:
    """Raise `ConfigError` for a deployment that says what a server cannot do."""
    if deployment.content.get("sinks"):
        raise ConfigError(
            f"{deployment.path.name} has sinks, which take the tokens of one run: a server's tokens go to whoever reads"
            " /v1/probemon/events. Leave them out"
        )
    if "port" in deployment.content.get("metrics", {}):
        raise ConfigError(
            f"{deployment.path.name} has a port for metrics: a server shows them at /metrics of its own. Leave it out"
        )


@dataclass(frozen=True)
class Prepared:
    """A request in tokens and probes. `prompts`: ids of each; `max_tokens`: of the answers to each.

    `rules`: each with the numbers of its probes. `shown [P]`: which probes are told of, None for all.
    """

    request: Request
    watch: RequestedWatch
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    rules: tuple[tuple[RuleSpec, tuple[int, ...]], ...]
    shown: Mask | None


class Served:
    """`name`: of the model, as clients give it. `deployment`: whose rules hold for every request, beside its own; the
    manager is of its packs and settings. Any thread may ask. Raises `ConfigError`, `HostMismatch`.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        manager: DynamicProbeManager,
        limits: Limits,
        deployment: Deployment | None = None,
    ) -> None:
        self.name, self.model, self.tokenizer, self.manager, self.limits = name, model, tokenizer, manager, limits
        check_mode(model)
        self.holding = Holding(manager, tokenizer, deployment)
        self.budget: Budget | None = None  # of all answers together, as is the circuit
        self.circuit: Circuit | None = None
        self.metric_concepts: list[str] | None = None  # None: nobody asks for metrics
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
        # Of one sequence nothing is padded; where it is not said, transformers tells of what it takes.
        self.padding = {"pad_token_id": pad if pad is not None else next(iter(self.end_ids - {None}), 0)}
        config = model.config.get_text_config()
        self.n_columns: int | None = getattr(config, "max_position_embeddings", None)  # that the host was made to read
        self.n_ids = model.get_input_embeddings().num_embeddings
        self._encoding = threading.Lock()  # a fast tokenizer may not be set up by two threads

    @property
    def decode(self) -> Decode:
        """The tokenizer's decoder of what is shown, without special tokens."""
        return partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def raw_text(self, token_id: int) -> str:
        """Return the text of one token as it is, special or not."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def draws(self, request: Request) -> bool:
        """Whether tokens of its answers are drawn at random."""
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
        watch = request.watch or RequestedWatch()
        shown, rules = self._shown(watch), self._rules(watch)
        prompts = tuple(tuple(ids) for ids in self._encoded(request))
        param = "messages" if request.kind == "chat" else "prompt"
        return Prepared(
            request, watch, prompts, tuple(self._room(ids, request, param) for ids in prompts), rules, shown
        )

    # -- tokens ----------------------------------------------------------------------------------

    def _encoded(self, request: Request) -> list[Sequence[int]]:
        if request.kind == "completion":
            return [self._ids_of(prompt) for prompt in request.prompts]
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestRefused(
                f"{self.name} has no chat template: ask /v1/completions for what follows a text", "messages"
            )
        try:
            with self._encoding:  # today's date, where the template writes one: the model is asked now
                return [render(self.tokenizer, request.messages, tools=request.tools, add_generation_prompt=True).ids]
        except ChatRefused as error:
            raise RequestRefused(f"{self.name}: {error}", error.param) from error

    def _ids_of(self, prompt: str | tuple[int, ...]) -> Sequence[int]:
        if isinstance(prompt, str):
            with self._encoding:
                return ids_of(self.tokenizer, prompt)
        if max(prompt) >= self.n_ids:
            raise RequestRefused(f"prompt has id {max(prompt)}: the model has {self.n_ids} tokens, from 0", "prompt")
        return prompt

    def _room(self, ids: Sequence[int], request: Request, param: str) -> int:
        """Return how many tokens an answer may have."""
        if not ids:
            raise RequestRefused(f"{param} has no tokens: say something", param)
        most = self.limits.max_tokens if request.max_tokens is None else request.max_tokens
        if self.n_columns is None:
            return most
        room = self.n_columns - len(ids)
        if room < 1 or (request.max_tokens is not None and room < request.max_tokens):
            raise RequestRefused(
                f"{param} has {len(ids)} tokens and up to {most} are to follow: the model reads at most"
                f" {self.n_columns} together, so shorten it or ask for fewer",
                param,
                code="context_length_exceeded",
            )
        return min(most, room)

    # -- concepts --------------------------------------------------------------------------------

    def _shown(self, watch: RequestedWatch) -> Mask | None:
        """Return the probes of the concepts that were named, and of what is below them."""
        if watch.concepts is None:
            return None
        pack, shown = self.manager.pack, np.zeros(self.manager.pack.n_probes, dtype=bool)
        held = self.holding.now
        plan = self.manager.plan_with([], held.exclude, held.always_on)
        for at, concept in enumerate(watch.concepts):
            param = f"probemon.concepts[{at}]"
            named = _refused(param, partial(pack.find_all, concept))
            if names := self.manager.left_out(named, plan):
                raise RequestRefused(
                    f"{param}: {names} is left out by the deployment, so that its silence would say nothing: ask for"
                    " another concept",
                    param,
                )
            for level in pack.tree.levels_below(named):
                shown[list(level)] = True
        return shown

    def _rules(self, watch: RequestedWatch) -> tuple[tuple[RuleSpec, tuple[int, ...]], ...]:
        rules: list[tuple[RuleSpec, tuple[int, ...]]] = []
        for at, rule in enumerate(watch.rules):
            made = _refused(f"probemon.rules[{at}]", partial(rule.rules, self.manager.pack))
            rules.append((rule, tuple(probe for one in made for probe in one.probes)))
        probes = [probe for _, probes in rules for probe in probes]
        if len(probes) > self.limits.names:
            raise RequestRefused(
                f"the rules name {len(probes)} concepts: at most {self.limits.names} a request", "probemon.rules"
            )
        _refused("probemon.rules", partial(self.holding.check_room, probes))
        return tuple(rules)


def _refused(param: str, ask: Callable[[], Any]) -> Any:
    """Return what `ask` does; what it refuses is the parameter's fault."""
    try:
        return ask()
    except (UnknownConcept, ConfigError, ArenaFull) as error:
        raise RequestRefused(f"{param}: {error}", param) from error


def check_mode(model: Any) -> None:
    """Raise `ConfigError` where a host's own settings generate otherwise than token by token: an answer is told so.

    One sequence of each answer is asked for, so beams by themselves do not matter.
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

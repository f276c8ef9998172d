"""A vLLM worker that scores every token in the step that runs it. Needs vLLM.

    LLM(model, **client.engine_arguments())        # of a VllmClient

After warm-up a canary runs one request. Then every step is scored before the next tokens are sampled, by the first rank
of tensor parallelism.
"""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import asdict
from typing import Any

import torch
import vllm
from torch import Tensor

from probemon.core.scores import ModelState
from probemon.errors import Blind, ConfigError
from probemon.host.compatibility import check_host
from probemon.manager import DynamicProbeManager
from probemon.ops.vllm import internals
from probemon.ops.vllm.channel import Channel
from probemon.ops.vllm.engine_canary import (
    TOLERANCES,
    canary_prompts,
    canary_way,
    judge,
    judge_alone,
    judge_scores,
    reference_states,
)
from probemon.ops.vllm.engine_watch import EngineWatch
from probemon.ops.vllm.kept_scores import KeptScores
from probemon.ops.vllm.layer_states import HOOKS, LayerStates
from probemon.ops.vllm.messages import CHANNEL_VARIABLE, Hello, WorkerSettings
from probemon.ops.vllm.refusals import check_engine, is_tested
from probemon.ops.vllm.rows import StepRows
from probemon.ops.vllm.step_stops import STOPS
from probemon.ops.vllm.watched import open_manager
from probemon.util.host_memory import host_memory

Worker = internals.worker_class()
LOG = logging.getLogger("probemon")


class ProbeWorker(Worker):  # type: ignore[misc,valid-type]
    """Raises `UnsupportedModel`, `ConfigError`, `ModelMismatch` and `Blind`, before the engine serves."""

    _watch: EngineWatch | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model, and tap it before it is compiled."""
        self._settings = WorkerSettings.of_config(self.vllm_config.additional_config)
        check_engine(self.vllm_config, vllm.__version__, self._settings)
        loaded = super().load_model(*args, **kwargs)
        self._states = LayerStates.put_on(
            self.model_runner, self._settings.sites, eager=not self._compiled, auxiliary=internals.has_auxiliary_states
        )
        return loaded

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, run the canary, and begin to score."""
        if self._settings.stop and not STOPS.installed:  # runner V2 makes it after loading
            raise ConfigError(
                "stops inside the step are made by a logits processor, which this engine was not given: give"
                ' logits_processors=["probemon.ops.vllm.stop:StopRows"]'
            )
        warmed_up = super().compile_or_warm_up_model()
        self._canary, self._why = self._canary_way()  # the engine has all its memory by now
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices):  # keeps later samples unchanged
            prompts = canary_prompts(self.model_config.get_vocab_size())
            taken = {} if self._canary == "off" else self._run_canary(prompts)
            if self.rank % self.parallel_config.tensor_parallel_size == 0:
                self._begin(prompts, taken)
        return warmed_up

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run and score a step."""
        if self._watch is not None:
            self._watch.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            STOPS.rows = [] if self._watch is None else self._score(self._watch, scheduler_output)
            if self._settings.stop and self.parallel_config.tensor_parallel_size > 1:  # every rank samples
                STOPS.rows = internals.told_by_first_rank(STOPS.rows)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the next tokens, and score accepted drafts."""
        output = super().sample_tokens(grammar_output)
        if self._watch is not None and self.vllm_config.speculative_config is not None:
            output, counts = internals.sampled(output)
            self._watch.settle({name: max(0, n - 1) for name, n in counts.items()})
        return output

    def shutdown(self) -> None:
        """End the run."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        super().shutdown()

    def probemon_stats(self) -> dict[str, Any] | None:
        """Return counts, for `collective_rpc`; None if this rank does not score."""
        return None if self._watch is None else self._watch.stats()

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _compiled(self) -> bool:
        return not self.model_config.enforce_eager

    def _taken(self) -> dict[str, Tensor]:
        return self._states.of_step(internals.step_state(self.model_runner))

    def _rows(self, scheduled: Any) -> StepRows:
        return internals.step_rows(self.model_runner, scheduled.num_scheduled_tokens)

    def _score(self, watch: EngineWatch, scheduled: Any) -> list[int]:
        """Score a step; return the rows that end."""
        drafts = {name: len(ids) for name, ids in scheduled.scheduled_spec_decode_tokens.items()}
        try:
            return watch.step(self._rows(scheduled), drafts, self._taken())
        except Exception as error:  # only these are unseen from now on: raising would end all requests
            watch.lose(list(scheduled.num_scheduled_tokens), error)
            return []

    def _canary_way(self) -> tuple[str, str]:
        """Return the comparison and its reason (`canary_way`). Raises `ConfigError`."""
        n_bytes = sum(one.nbytes for one in self.model_runner.get_model().parameters())
        used, total = host_memory()
        canary, why = canary_way(
            self._settings.canary,
            n_bytes * self.parallel_config.tensor_parallel_size,
            total - used,
            self.model_config.quantization,
        )
        if self._states.way == HOOKS and canary != "weights":
            raise ConfigError(
                "states that hooks read are to be compared with those of transformers (canary='weights')"
                + f", and {why}" * bool(why)
            )
        return canary, why

    def _run_canary(self, prompts: dict[str, list[int]]) -> dict[str, Tensor]:
        first, last = internals.new_requests(self.model_runner, prompts)
        super().execute_model(first)
        try:
            rows, taken = self._rows(first), self._taken()
            spans = dict(zip(rows.requests, itertools.pairwise(rows.starts.tolist()), strict=True))
            order = [row for name in prompts for row in range(*spans[name])]
            if rows.ids[order].tolist() != [token for ids in prompts.values() for token in ids]:
                raise Blind("vLLM's first forward did not run the tokens of the canary: its rows cannot be read")
            taken = {site: states[order].clone() for site, states in taken.items()}
        finally:
            super().sample_tokens(None)
            super().execute_model(last)
        return taken

    def _begin(self, prompts: dict[str, list[int]], taken: dict[str, Tensor]) -> None:
        settings, model = self._settings, self.model_runner.get_model()
        address = settings.channel or os.environ.get(CHANNEL_VARIABLE, "")
        if not address:
            raise ConfigError(f"no address of a client: give channel, or {CHANNEL_VARIABLE}")
        manager = open_manager(settings, str(self.device))
        figures = self._judge(manager, prompts, taken)
        channel = Channel(address, settings.high_water_mark)
        model_state = ModelState(
            model=type(model).__name__,
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            adapters=(),
            adapters_disabled=(),
            adapters_merged=(),
            adapter_scales=(),
            quantisation=str(self.model_config.quantization or ""),
            devices=(str(self.device),),
            n_ranks=self.parallel_config.tensor_parallel_size,
        )
        kept = (
            KeptScores(*internals.prefix_cache(self.model_runner)) if self.cache_config.enable_prefix_caching else None
        )
        watch = EngineWatch(manager, settings, model_state, channel, model, self._tokenizer(manager), kept)
        channel.send(
            lambda sequence: Hello(
                sequence=sequence,
                pid=os.getpid(),
                vllm=vllm.__version__,
                way=self._states.way,
                runner=internals.runner_name(self.model_runner),
                compiled=self._compiled,
                pack=manager.pack.name,
                n_probes=manager.pack.n_probes,
                sites=tuple(settings.sites),
                sha256=settings.sha256,
                host=asdict(model_state),
                canary=figures,
                canary_way=f"{self._canary}: {self._why}" if self._why else self._canary,
                n_ahead=self.vllm_config.num_speculative_tokens
                + bool(self.vllm_config.scheduler_config.async_scheduling),
            )
        )
        self._watch = watch

    def _judge(
        self, manager: DynamicProbeManager, prompts: dict[str, list[int]], taken: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Compare states with transformers, the weights with the packs', and scores in an untried version."""
        deployment = manager.deployment
        if self._canary != "weights":
            if self._settings.untried_version and not is_tested(vllm.__version__):
                raise ConfigError(
                    f"vLLM {vllm.__version__} is untried, and scores are to be compared with those of transformers"
                    " (canary='weights')" + f", and {self._why}" * bool(self._why)
                )
            if deployment is not None and deployment.content.get("host"):
                raise ConfigError(
                    "the deployment names its host, which is only compared with canary='weights'"
                    + f", and {self._why}" * bool(self._why)
                )
            return judge_alone(taken)
        from transformers import AutoModelForCausalLM

        config = self.model_config
        model = AutoModelForCausalLM.from_pretrained(config.model, revision=config.revision, dtype=config.dtype)
        model.eval()
        check_host(manager.pack, model, strict=False)
        if deployment is not None:
            deployment.check_host(manager.pack, model)
        tolerance = None if config.quantization else TOLERANCES.get(config.dtype, 0.1)
        reference = reference_states(model, prompts.values())
        figures = judge(taken, reference, tolerance)
        if not is_tested(vllm.__version__):
            figures["scores"] = judge_scores(manager, taken, reference)
        return figures

    def _tokenizer(self, manager: DynamicProbeManager) -> Any:
        deployment = manager.deployment
        if deployment is None or not any(
            rule.get("action") == "escalate" for rule in deployment.content.get("rules", ())
        ):
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_config.tokenizer, revision=self.model_config.tokenizer_revision)

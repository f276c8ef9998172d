"""Refuses untested engine modes, before the model is loaded.

docs/vllm.md lists what was tested.
"""

from __future__ import annotations

from typing import Any

from probemon.errors import ConfigError, UnsupportedModel
from probemon.ops.vllm.messages import WorkerSettings

TESTED = ("0.32.0",)  # versions of vLLM
SPECULATIONS = ("ngram",)


def check_engine(config: Any, version: str, settings: WorkerSettings) -> None:
    """Raise for an untested version, configuration or settings. `config`: a `VllmConfig`."""
    if version.split("+")[0] not in TESTED:
        raise UnsupportedModel(
            f"vLLM {version} is not tested with probemon, only {', '.join(TESTED)}: where a step keeps its rows is"
            " private to each version. Install a tested one (scripts/vllm_env.sh)"
        )
    for what, is_so, remedy in _untested(config):
        if is_so:
            raise UnsupportedModel(f"{what} is not tested while probemon watches inside vLLM: {remedy}")
    for site in settings.sites:
        if not site.startswith("resid_post."):
            raise UnsupportedModel(
                f"the packs read {site}: inside vLLM hidden states are read after whole layers alone (resid_post.N)"
            )
    _check_speculation(config, settings)
    if settings.stop and _of(config, "parallel_config", "tensor_parallel_size", default=1) > 1:
        raise UnsupportedModel(
            "stops inside the step are not tested with tensor parallel, where every rank samples and one alone scores:"
            " let the client abort instead"
        )


def unseen_request(request: Any) -> str:
    """Return why a request (`NewRequestData`) is not scored, or ""."""
    if getattr(request, "lora_request", None) is not None:
        return "it was asked with a LoRA adapter, and the pack is of the model without it"
    if getattr(request, "mm_features", None):
        return "its prompt has images, sound or video, which is not tested"
    if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
        return "its prompt was given as embeddings, so its tokens are not known"
    return ""


def _untested(config: Any) -> list[tuple[str, bool, str]]:
    parallel = "parallel_config"
    size = "a size of 1"
    return [
        ("pipeline parallel", _of(config, parallel, "pipeline_parallel_size", default=1) > 1, f"give it {size}"),
        ("data parallel", _of(config, parallel, "data_parallel_size", default=1) > 1, "run an engine for each replica"),
        (
            "context parallel",
            _of(config, parallel, "decode_context_parallel_size", default=1) > 1
            or _of(config, parallel, "prefill_context_parallel_size", default=1) > 1,
            f"give it {size}",
        ),
        (
            "micro-batching (DBO, ubatches)",
            bool(_of(config, parallel, "enable_dbo") or _of(config, parallel, "use_ubatching")),
            "leave it out",
        ),
        (
            "sequence parallelism",
            bool(_of(config, "compilation_config", "pass_config", "enable_sp")),
            "leave it out of the passes of the compiler",
        ),
        (
            "asynchronous scheduling, which runs a step before the one before it is read,",
            bool(_of(config, "scheduler_config", "async_scheduling")),
            "give --no-async-scheduling (async_scheduling=False)",
        ),
        ("sleep mode", bool(_of(config, "model_config", "enable_sleep_mode")), "leave it out"),
        ("a pooling model", _of(config, "model_config", "runner_type") == "pooling", "use it to generate"),
        ("an encoder-decoder", bool(_of(config, "model_config", "is_encoder_decoder")), "use one that only decodes"),
        ("prompts as embeddings", bool(_of(config, "model_config", "enable_prompt_embeds")), "leave them out"),
        (
            "keys and values of other engines (a KV connector)",
            _of(config, "kv_transfer_config") is not None,
            "leave it out",
        ),
    ]


def _check_speculation(config: Any, settings: WorkerSettings) -> None:
    method = _of(config, "speculative_config", "method")
    if method is None:
        return
    if method not in SPECULATIONS:
        raise UnsupportedModel(
            f"speculation by {method} is not tested while probemon watches inside vLLM, only {', '.join(SPECULATIONS)}:"
            " use that, or none"
        )
    if settings.stop:
        raise ConfigError(
            "rules that stop inside the step do not go with speculation, whose drafts are known to stay only after the"
            " next token was sampled: leave speculation out, or let the client abort"
        )


def _of(config: Any, *names: str, default: Any = None) -> Any:
    """Return a nested attribute; `default` if one is missing or None."""
    for name in names:
        config = getattr(config, name, None)
        if config is None:
            return default
    return config

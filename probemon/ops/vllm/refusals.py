"""Refuses untested engine modes, before the model is loaded.

docs/vllm.md lists what was tested.
"""

from __future__ import annotations

from typing import Any

from probemon.errors import ConfigError, UnsupportedModel
from probemon.ops.vllm.messages import WorkerSettings

TESTED = ("0.32.0", "0.33.0")  # versions of vLLM
SPECULATIONS = ("ngram",)


def check_engine(config: Any, version: str, settings: WorkerSettings) -> None:
    """Raise for an untested version, configuration or settings. `config`: a `VllmConfig`."""
    if not settings.untried_version:
        check_version(version)
    for what, is_so, remedy in _untested(config):
        if is_so:
            raise UnsupportedModel(f"{what} is not tested while probemon watches inside vLLM: {remedy}")
    for site in settings.sites:
        if not site.startswith("resid_post."):
            raise UnsupportedModel(
                f"the packs read {site}: inside vLLM hidden states are read after whole layers alone (resid_post.N)"
            )
    _check_speculation(config, settings)


def is_tested(version: str) -> bool:
    """True for a tested version of vLLM, however it was built."""
    return version.split("+")[0] in TESTED


def check_version(version: str, package: str = "vllm") -> None:
    """Raise `UnsupportedModel` for an untested version."""
    if not is_tested(version):
        raise UnsupportedModel(
            f"{package} {version} is not tested with probemon, only {', '.join(TESTED)}: where a step keeps its rows is"
            f" private to each version. Install a tested one (pip install {package}=={TESTED[-1]}), or try this one:"
            " --untried-version (untried_version=True) compares its scores with transformers before the first answer"
        )


def unseen_request(request: Any) -> str:
    """Return why a request (`NewRequestData`) is not scored, or ""."""
    adapter = getattr(request, "lora_request", None)
    if adapter is not None:
        return f"it was asked with the LoRA adapter {adapter.lora_name!r}, and the packs are of the model without it"
    if getattr(request, "mm_features", None):
        return "its prompt has images, sound or video, which is not tested"
    if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
        return "its prompt was given as embeddings, so its tokens are not known"
    return ""


def _untested(config: Any) -> list[tuple[str, bool, str]]:
    parallel = "parallel_config"
    size = "a size of 1"
    return [
        (
            "pipeline parallel, whose stages each hold a part of the layers,",
            _of(config, parallel, "pipeline_parallel_size", default=1) > 1,
            "give --tensor-parallel-size instead",
        ),
        (
            "data parallel",
            _of(config, parallel, "data_parallel_size", default=1) > 1,
            "start a server for each replica, with the same deployment and PROBEMON_API_KEY, behind your balancer",
        ),
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
            "asynchronous scheduling with model runner V1",
            bool(_of(config, "scheduler_config", "async_scheduling")) and not _of(config, "use_v2_model_runner"),
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

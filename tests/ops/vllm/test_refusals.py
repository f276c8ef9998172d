"""Engine settings that are unsupported while it is watched are refused by name, with a remedy."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from probemon.errors import ConfigError, UnsupportedModel
from probemon.ops.vllm.messages import WorkerSettings
from probemon.ops.vllm.refusals import check_engine, unseen_request

SETTINGS = WorkerSettings(packs=("p",), sites=("resid_post.1",))
PLAIN = {
    "parallel_config": {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
        "use_ubatching": False,
    },
    "scheduler_config": {"async_scheduling": False},
    "model_config": {
        "enable_sleep_mode": False,
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "enable_prompt_embeds": False,
    },
    "compilation_config": {"pass_config": SimpleNamespace(enable_sp=False)},
    "speculative_config": None,
    "kv_transfer_config": None,
}


def config(**changes):
    parts = {}
    for name, part in PLAIN.items():
        more = changes.get(name, {})
        parts[name] = SimpleNamespace(**{**part, **more}) if isinstance(part, dict) else (more or part)
    return SimpleNamespace(**parts)


def test_plain_engine_of_a_tested_version_is_accepted():
    check_engine(config(), "0.32.0", SETTINGS)
    check_engine(config(), "0.32.0+cpu", SETTINGS)
    check_engine(config(speculative_config=SimpleNamespace(method="ngram")), "0.32.0", SETTINGS)
    check_engine(config(parallel_config={"tensor_parallel_size": 2}), "0.32.0", SETTINGS)


@pytest.mark.parametrize("version", ["0.34.0", "0.31.0", "0.32.1", "0.32.0rc1"])
def test_untested_version_is_refused_and_tested_ones_are_named(version):
    with pytest.raises(UnsupportedModel, match=rf"vllm {version} is not tested .* only 0\.32\.0, 0\.33\.0:"):
        check_engine(config(), version, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline parallel"),
        ({"parallel_config": {"data_parallel_size": 2}}, "data parallel"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "context parallel"),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, "context parallel"),
        ({"parallel_config": {"enable_dbo": True}}, "micro-batching"),
        ({"parallel_config": {"use_ubatching": True}}, "micro-batching"),
        ({"compilation_config": {"pass_config": SimpleNamespace(enable_sp=True)}}, "sequence parallelism"),
        ({"scheduler_config": {"async_scheduling": True}}, "--no-async-scheduling"),
        ({"model_config": {"enable_sleep_mode": True}}, "sleep mode"),
        ({"model_config": {"runner_type": "pooling"}}, "pooling"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model_config": {"enable_prompt_embeds": True}}, "prompts as embeddings"),
        ({"kv_transfer_config": SimpleNamespace()}, "KV connector"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "speculation by eagle3"),
    ],
)
def test_untested_engine_settings_are_refused_by_name(changes, says):
    with pytest.raises(UnsupportedModel, match=says):
        check_engine(config(**changes), "0.32.0", SETTINGS)


def test_sites_other_than_residual_streams_are_refused():
    with pytest.raises(UnsupportedModel, match=r"the packs read attn_out\.1"):
        check_engine(config(), "0.32.0", WorkerSettings(packs=("p",), sites=("attn_out.1",)))


def test_stops_inside_the_step_are_refused_with_drafts():
    settings = WorkerSettings(packs=("p",), sites=("resid_post.1",), stop=True)
    with pytest.raises(ConfigError, match="stop"):
        check_engine(config(speculative_config=SimpleNamespace(method="ngram")), "0.32.0", settings)
    check_engine(config(parallel_config={"tensor_parallel_size": 2}), "0.32.0", settings)


def test_asynchronous_scheduling_is_taken_with_runner_v2():
    engine = config(scheduler_config={"async_scheduling": True})
    engine.use_v2_model_runner = True
    check_engine(engine, "0.32.0", SETTINGS)


def test_untried_version_is_taken_if_that_is_said():
    check_engine(config(), "0.99.0", dataclasses.replace(SETTINGS, untried_version=True))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, ""),
        ({"lora_request": SimpleNamespace(lora_name="mine")}, "LoRA adapter 'mine'"),
        ({"mm_features": [1]}, "images"),
        ({"prompt_embeds": object(), "prompt_token_ids": None}, "embeddings"),
    ],
)
def test_requests_that_cannot_be_scored_get_a_reason(given, says):
    reason = unseen_request(SimpleNamespace(**{"prompt_token_ids": [1], **given}))
    assert (says in reason) if says else reason == ""

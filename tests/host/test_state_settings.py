"""Which settings of a model are kept, and how two sets of them are compared."""

import json

import pytest
from transformers import AutoConfig

from probemon.core.state_settings import differing, state_settings

LLAMA = AutoConfig.for_model("llama").to_dict()


def test_state_settings_are_json_without_loading_options():
    other = AutoConfig.for_model(
        "llama", dtype="bfloat16", use_cache=False, pad_token_id=7, attn_implementation="eager", attention_dropout=0.5
    )
    settings = state_settings(LLAMA)
    assert json.loads(json.dumps(settings, allow_nan=False)) == settings == state_settings(other.to_dict())
    assert settings["hidden_act"] == "silu" and settings["rope_parameters"]["rope_theta"] == 10000.0
    mamba = state_settings(AutoConfig.for_model("mamba2").to_dict())  # whose limits of a time step are infinite
    assert json.loads(json.dumps(mamba, allow_nan=False)) == mamba and mamba["time_step_limit"] == [0.0, "inf"]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"rms_norm_eps": 0.1}, ["rms_norm_eps is 0.1 and was 1e-06"]),
        ({"rms_norm_eps": 9.999999974752427e-07}, []),  # what fp32 makes of it
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, ["rope_parameters.rope_theta is 500000.0"]),
        ({"attention_bias": True}, ["attention_bias is True and was False"]),
        ({"eos_token_id": 9, "attention_dropout": 0.1}, []),
        ({"of_a_later_release": 1}, []),
        ({"router_jitter_noise": 0.0, "task_specific_params": {"a": {"b": 1}}}, []),
        (
            {"rope_parameters": None},
            ["rope_parameters.rope_theta is None and", "rope_parameters.rope_type is None and"],
        ),
        ({"rope_parameters": {**LLAMA["rope_parameters"], "mscale": 2.0}}, ["rope_parameters.mscale is 2.0 and was"]),
        ({"rope_parameters": {**LLAMA["rope_parameters"], "factor": None}}, []),
    ],
)
def test_differing_setting_is_named(change, expected):
    said = differing(state_settings(LLAMA), state_settings({**LLAMA, **change}))
    assert len(said) == len(expected) and all(
        line.startswith(start) for line, start in zip(said, expected, strict=True)
    )


def test_setting_of_only_one_release_is_no_difference():
    assert differing({"rope_theta": 1e4, "bias": None}, {"rope_parameters": {"rope_theta": 1e6}, "bias": None}) == []
    assert differing({"layers": [1, 2.0]}, {"layers": [1, 2]}) == []
    assert len(differing({"eps": 10**400, "bias": {"a": 1}}, {"eps": 0.1, "bias": False})) == 2
    assert differing({"rope_parameters": None, "a": {}}, {"rope_parameters": {}, "a": {"b": None}}) == []
    one = {"encoder": {"model_type": "t5", "eps": 1e-6, "of_another_release": 1}}
    assert differing(one, {"encoder": {"model_type": "t5", "eps": 1e-5}}) == ["encoder.eps is 1e-05 and was 1e-06"]
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    assert len(differing({"rope_parameters": {"rope_theta": 1e4}}, nested)) == 2


def test_training_and_token_settings_are_left_out_by_name_and_type():
    counted = {
        "token_dropout": True,
        "moe_token_dropout": 0.2,
        "normalize_router_prob_before_dropping": False,
        "output_gate_type": None,
        "output_multiplier": 2.0,
        "router_jitter_noise": 0.01,
        "mask_token_id": 3,
        "image_token_id": 4,
    }
    left_out = {
        "hidden_dropout": 0.1,
        "drop_path_rate": [0.1, 0.2],
        "output_attentions": False,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
        "audio_eos_token_id": 1,
        "pad_token_id": 1,
    }
    assert state_settings({**counted, **left_out}) == counted
    inner = {"model_type": "t5", "eps": 0.1}
    assert state_settings({"encoder": {**inner, **left_out, "dtype": "bfloat16"}}) == {"encoder": inner}
    assert differing({"layers": [1, 2]}, {"layers": [1]}) == ["layers is [1] and was [1, 2]"]

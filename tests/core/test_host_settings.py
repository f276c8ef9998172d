"""Which settings of a host are kept, and in what two differ."""

import json

import pytest
from transformers import AutoConfig

from probemon.core.host_settings import differing, state_settings

LLAMA = AutoConfig.for_model("llama").to_dict()


def test_settings_are_json_and_say_nothing_of_how_a_host_is_loaded():
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
    ],
)
def test_what_differs_is_named(change, expected):
    said = differing(state_settings(LLAMA), state_settings({**LLAMA, **change}))
    assert len(said) == len(expected) and all(
        line.startswith(start) for line, start in zip(said, expected, strict=True)
    )


def test_what_one_release_says_alone_is_no_difference():
    assert differing({"rope_theta": 1e4, "bias": None}, {"rope_parameters": {"rope_theta": 1e6}, "bias": None}) == []
    assert differing({"layers": [1, 2.0]}, {"layers": [1, 2]}) == []
    assert len(differing({"eps": 10**400, "bias": {"a": 1}}, {"eps": 0.1, "bias": False})) == 1
    assert differing({"layers": [1, 2]}, {"layers": [1]}) == ["layers is [1] and was [1, 2]"]

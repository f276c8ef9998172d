"""A request body that asks for something unsupported is refused with the name of the parameter."""

import json
import re

import pytest

from probemon.errors import RequestRefused
from probemon.ops.server.limits import Limits
from probemon.ops.server.requests import read_request

LIMITS = Limits(max_tokens=20, choices=4, messages=3, stops=2, names=2, top_k=5)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "m", "prompt": "Hi"}


def refused(kind, body):
    with pytest.raises(RequestRefused) as raised:
        read_request(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize(
    "changes, param",
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 4}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "root", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"prompt": "a"}, "prompt"),
        ({"max_token": 3}, "max_token"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"logit_bias": {"03": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"3": True}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"store": 0}, "store"),
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": "none"}, "tools"),
        ({"tools": ["look"]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"probemon": []}, "probemon"),
        ({"probemon": {"concept": "a"}}, "probemon.concept"),
        ({"probemon": {"concepts": []}}, "probemon.concepts"),
        ({"probemon": {"concepts": ["a", "b", "c"]}}, "probemon.concepts"),
        ({"probemon": {"concepts": ["a" * 201]}}, "probemon.concepts[0]"),
        ({"probemon": {"concepts": [3]}}, "probemon.concepts[0]"),
        ({"probemon": {"top_k": 6}}, "probemon.top_k"),
        ({"probemon": {"hold": 1}}, "probemon.hold"),
        ({"probemon": {"rules": {}}}, "probemon.rules"),
        ({"probemon": {"rules": False}}, "probemon.rules"),
        ({"temperature": 1e-40}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 0.5}, "min_tokens"),
        ({"probemon": {"rules": [{}]}}, "probemon.rules[0].concept"),
        ({"probemon": {"rules": [{"concept": "a", "abov": 1}]}}, "probemon.rules[0].abov"),
        ({"probemon": {"rules": [{"concept": "a", "above": 1}]}}, "probemon.rules[0].above"),
        (
            {"probemon": {"rules": [{"concept": "a", "above": 3, "aggregate": "rank:last:64"}]}},
            "probemon.rules[0].above",
        ),
        ({"probemon": {"rules": [{"concept": "a", "above": -3, "aggregate": "z:last:64"}]}}, "probemon.rules[0].above"),
        ({"probemon": {"rules": [{"concept": "a", "for_tokens": 0}]}}, "probemon.rules[0].for_tokens"),
        ({"probemon": {"rules": [{"concept": "a", "action": "raise"}]}}, "probemon.rules[0].action"),
    ],
)
def test_refusal_of_a_chat_names_its_parameter(changes, param):
    error = refused("chat", {**CHAT, **changes})
    assert error.param == param and param.split("[")[0].split(".")[0] in str(error)


@pytest.mark.parametrize(
    "changes, param",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", "b", "c"], "n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_refusal_of_a_completion_names_its_parameter(changes, param):
    assert refused("completion", {**TEXT, **changes}).param == param


@pytest.mark.parametrize(
    "changes, remedy",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "`probemon vllm serve`"),
        ({"guided_json": {}}, "`probemon vllm serve`"),
        ({"tool_choice": "required"}, '"auto" or "none" .*`probemon vllm serve`'),
        ({"input": "Hi"}, "give messages"),
        ({"n": True}, "n is true: "),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "`probemon vllm serve`"),
        ({"parallel_tool_calls": False}, "`probemon vllm serve`"),
        ({"reasoning_effort": "low"}, "chat_template_kwargs"),
        ({"verbosity": "low"}, "say in a message"),
        ({"prediction": {"type": "content", "content": "a"}}, "leave it out"),
        ({"functions": []}, "give tools"),
        ({"function_call": "auto"}, "give tool_choice"),
        ({"temperatur": 1}, "did you mean 'temperature'"),
        ({"n": 5}, "at most 4"),
        ({"messages": []}, "give a list of messages"),
        ({"model": 3}, "/v1/models"),
        ({"probemon": {"hold": "yes", "concepts": ["a"]}}, "it should be a valid boolean"),
    ],
)
def test_refusals_say_what_to_do(changes, remedy):
    assert re.search(remedy, str(refused("chat", {**CHAT, **changes})))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"model": "m", "model": "n", "prompt": "a"}',
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": "m", "prompt": "a", "metadata": {"x": 1e999}}',
        b'{"model": "m", "prompt": "a", "metadata": ' + b"[" * 950 + b"]" * 950 + b"}",
    ],
)
def test_body_that_is_not_a_json_object_is_refused(body):
    assert refused("completion", body).param is None


def test_valid_requests_are_parsed_into_their_settings():
    watch = {"concepts": ["a"], "rules": [{"concept": "b", "above": 0.5, "action": "stop"}], "hold": True}
    asked = {**CHAT, "max_completion_tokens": 7, "stop": "x", "user": "me", "metadata": {"a": "b"}, "probemon": watch}
    request = read_request("chat", json.dumps(asked).encode(), LIMITS)
    assert request.wanted_tokens == 7 and request.stop == ["x"] and request.sampling == {} and request.seed is None
    assert request.probemon.concepts == ["a"] and request.probemon.hold and request.probemon.top_k == 3
    [rule] = request.probemon.rules
    z = {"concept": "b", "above": 3, "aggregate": "z:last:64"}
    [unusual] = read_request("chat", json.dumps({**CHAT, "probemon": {"rules": [z]}}).encode(), LIMITS).probemon.rules
    assert (unusual.above, unusual.aggregate) == (3.0, "z:last:64")
    assert (rule.concept, rule.above, rule.for_tokens, rule.aggregate, rule.action) == ("b", 0.5, 1, None, "stop")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    request = read_request("chat", json.dumps({**CHAT, "messages": parts, "temperature": 0}).encode(), LIMITS)
    assert request.said[0]["content"] == "ab" and request.sampling == {"do_sample": False}
    private = {"user": "alice@example.com", "metadata": {"ssn": "1"}, "safety_identifier": "a", "prompt_cache_key": "b"}
    kept = read_request("chat", json.dumps({**CHAT, **private, "seed": 3}).encode(), LIMITS).options
    assert kept == {"model": CHAT["model"], "seed": 3}
    assert request.probemon is None

"""A server with a deployment: the file's rules hold for every request, beside its own."""

import hashlib
import json

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from conftest import make_pack
from local_servers import answering
from probemon import DynamicProbeManager
from probemon.errors import ConfigError
from probemon.monitor.deployment import Deployment
from probemon.serving.served import Served
from running_server import LIMITS, Running, demo_tokenizer, tiny_host

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("deployed"), demo_tokenizer()
    host = tiny_host(tokenizer)
    make_pack(folder / "pack", host)
    return folder, host, tokenizer


def deployment_of(folder, *rules, **more):
    sha256 = hashlib.sha256((folder / "pack/manifest.json").read_bytes()).hexdigest()
    packs = [{"pack": "pack", "manifest_sha256": sha256}]
    path = folder / "serve.json"
    path.write_text(json.dumps({"deployment": 1, "packs": packs, "cascade": {"keep_top_k": 4}, "rules": rules, **more}))
    return Deployment.read(path)


def served_by(parts, *rules, **more):
    folder, host, tokenizer = parts
    deployment = deployment_of(folder, *rules, **more)
    manager = DynamicProbeManager(deployment.open_packs(), **deployment.settings)
    return Served("tiny", host, tokenizer, manager, LIMITS, deployment)


def answer_of(served, **probemon):
    running = Running(served, token=None)
    try:
        answer = running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": probemon}, Authorization=None)
    finally:
        running.close()
    return answer.status, json.loads(answer.content)


def test_rules_of_the_file_are_told_and_stop_beside_those_of_the_request(parts):
    record = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
    served = served_by(parts, record)
    status, whole = answer_of(served, rules=[{"concept": "c2", "above": 0.0}])
    told = whole["choices"][0]["message"]["probemon"]
    assert status == 200 and whole["choices"][0]["finish_reason"] == "length"
    assert {(event["concept"], event["action"]) for event in told["events"]} == {("c1", "tell"), ("c2", "tell")}
    assert told["summary"]["deployment"] == served.deployment.sha256
    status, cut = answer_of(served_by(parts, {**record, "for_tokens": 3, "action": "stop"}))
    [choice] = cut["choices"]
    assert status == 200 and choice["finish_reason"] == "content_filter"
    assert choice["message"]["probemon"]["summary"]["stopped_by"]["for_tokens"] == 3
    assert whole["choices"][0]["message"]["content"].startswith(choice["message"]["content"])


@pytest.mark.filterwarnings("ignore:1 of 7 generated tokens have no scores")
@pytest.mark.parametrize(
    ("on_blind", "own"),
    [("pass", []), ("stop", []), ("raise", []), ("pass", [{"concept": "c2", "above": 0.99}])],
    ids=["pass", "stop", "raise", "a rule of the request"],
)
def test_a_token_that_is_not_seen_does_what_the_file_says(parts, on_blind, own):
    served = served_by(parts, {"concepts": ["c1"], "above": 0.99, "action": "record", "on_blind": on_blind})
    running, decoder = Running(served, token=None), served.model.model
    steps = []

    def lose(module, args, kwargs):
        steps.append(kwargs["input_ids"].shape[1])
        if len(steps) == 4:
            steps.append(dict(decoder.layers[1]._forward_hooks))
            decoder.layers[1]._forward_hooks.clear()
        elif len(steps) > 5 and isinstance(steps[4], dict):
            decoder.layers[1]._forward_hooks.update(steps[4])
            steps[4] = 0

    handle = decoder.register_forward_pre_hook(lose, with_kwargs=True)
    try:
        answer = running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": {"rules": own}}, Authorization=None)
    finally:
        handle.remove()
        running.close()
    content = json.loads(answer.content)
    if on_blind == "raise" or own:  # whoever sent a rule relies on it
        assert answer.status == 500 and content["error"]["code"] == "answer_failed"
        return
    assert "choices" in content, content
    [choice] = content["choices"]
    events = choice["message"]["probemon"]["events"]
    if on_blind == "pass":
        assert choice["finish_reason"] == "length" and not events
        assert any(token["unseen"] for token in choice["message"]["probemon"]["tokens"][:-1])
    else:
        assert choice["finish_reason"] == "content_filter" and events[0]["blind"] and events[0]["action"] == "stop"


def test_what_a_server_cannot_do_is_refused(parts):
    with pytest.raises(ConfigError, match=r"serve\.json has sinks"):
        served_by(parts, sinks=[{"kind": "jsonl", "path": "scores.jsonl"}])


def test_answers_are_events_of_opentelemetry_with_their_ids(parts):
    received = []

    def take(path, headers, body):
        for of_resource in ExportLogsServiceRequest.FromString(body).resource_logs:
            for of_scope in of_resource.scope_logs:
                received.extend({one.key: one.value.string_value for one in r.attributes} for r in of_scope.log_records)
        return 200, "application/x-protobuf", b""

    rule = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
    with answering(take) as address:
        served = served_by(parts, rule, opentelemetry={"endpoint": address})
        ids = [answer_of(served)[1]["id"] for _ in range(2)]
    told = [(one["gen_ai.response.id"], one["gen_ai.evaluation.name"]) for one in received]
    assert told == [(id_, f"probemon.{name}") for id_ in ids for name in ("c1", "generation")]


def test_a_judge_is_asked_for_every_answer_and_stops_it(parts):
    rulings = {"stop": "stop", "pass": "pass", "mute": "I do not know"}
    asked, word = [], "stop"

    def judge(path, headers, body):
        asked.append(json.loads(json.loads(body)["messages"][1]["content"]))
        content = {"choices": [{"message": {"content": rulings[word]}}]}
        return 200, "application/json", json.dumps(content).encode()

    with answering(judge) as address:
        rule = {
            "concepts": ["c1"], "above": 0.0, "for_tokens": 3, "action": "escalate", "on_blind": "pass",
            "judge": {"url": address, "model": "guard"}, "within": 20, "meanwhile": "hold", "on_failure": "raise",
        }  # fmt: skip
        served = served_by(parts, rule)
        answers = {}
        for word in rulings:
            answers[word] = answer_of(served)
        at_once = served_by(parts, {**rule, "meanwhile": "stop", "on_failure": "stop"})
        word = "pass"
        answers["at once"] = answer_of(at_once)
    whole = answers["pass"][1]["choices"][0]["message"]["content"]
    for name, ruling in (("stop", "stop"), ("pass", "pass"), ("at once", "pending")):
        status, answer = answers[name]
        [choice] = answer["choices"]
        [event] = choice["message"]["probemon"]["events"]
        stops = name != "pass"
        assert status == 200 and choice["finish_reason"] == ("content_filter" if stops else "length")
        assert event["action"] == ("stop" if stops else "tell") and event["verdict"]["ruling"] == ruling
        assert (
            whole.startswith(choice["message"]["content"]) and event["position"] == answer["usage"]["prompt_tokens"] + 2
        )
        assert answer["usage"]["completion_tokens"] == (4 if stops else 8)
    status, failed = answers["mute"]
    assert status == 500 and "ConceptRaised" in failed["error"]["message"]
    assert len(asked) == 4 and {question["concept"] for question in asked} == {"concept 1"}


def test_a_key_that_is_not_there_shows_before_the_server_begins(parts):
    judge = {"url": "http://localhost:1/v1", "model": "guard", "key_env": "NO_SUCH_KEY"}
    rule = {"concepts": ["c1"], "action": "escalate", "judge": judge, "within": 1, "on_blind": "pass"}
    with pytest.raises(ConfigError, match="key_env is 'NO_SUCH_KEY'"):
        served_by(parts, {**rule, "meanwhile": "hold", "on_failure": "stop"})

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


def test_metrics_of_a_server_are_those_of_its_runs_beside_its_own(parts):
    served = served_by(parts, metrics={"concepts": ["c1", "c3*"]})
    running = Running(served, token=None)
    try:
        answers = [running.ask("POST", "/v1/chat/completions", BODY, Authorization=None) for _ in range(2)]
        text = running.ask("GET", "/metrics", Authorization=None).content.decode()
        exemplars = running.ask("GET", "/metrics", Authorization=None, Accept="application/openmetrics-text")
    finally:
        running.close()
    usage = [json.loads(answer.content)["usage"] for answer in answers]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    n_prompt, n_generated = (sum(one[f"{what}_tokens"] for one in usage) for what in ("prompt", "completion"))
    assert found['probemon_answer_tokens_total{what="prompt"}'] == n_prompt > 0
    assert found['probemon_tokens_total{phase="prompt",unseen=""}'] == n_prompt
    # The last token of each answer is never run, and the forwards of the canary are no answers.
    assert found['probemon_tokens_total{phase="generated",unseen=""}'] == n_generated - 2
    assert found["probemon_forward_overhead_seconds_count"] == n_generated
    named = {line for line in found if line.startswith("probemon_fired_total{")}
    assert len(named) == 11 and 'probemon_fired_total{concept="c39"}' in named
    [info] = [line for line in found if line.startswith("probemon_info") and found[line]]
    assert f'deployment="{served.deployment.sha256}"' in info
    ids = {json.loads(answer.content)["id"] for answer in answers}
    assert exemplars.headers["content-type"].startswith("application/openmetrics-text")
    assert any(f'# {{request="{one}"}}' in exemplars.content.decode() for one in ids)


def test_a_server_has_no_second_port_for_metrics(parts):
    with pytest.raises(ConfigError, match="a server shows them at /metrics of its own"):
        served_by(parts, metrics={"port": 9464})


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

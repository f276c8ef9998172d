"""A server with a deployment applies the file's rules to every request, in addition to the request's own."""

import hashlib
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event

import pytest
import torch
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from conftest import make_pack
from local_servers import answering
from probemon import DynamicProbeManager
from probemon.errors import ConfigError, DeploymentError
from probemon.monitor.degradations import NAMES
from probemon.ops.cli.serve import _reload
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.server.served import Served
from running_server import LIMITS, Running, demo_tokenizer, eventually, tiny_host

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


def escalating(address, **more):
    """A rule that asks the judge at an address."""
    judge = {"url": address, "model": "guard", "within": 20, "meanwhile": "pass", "on_failure": "raise"}
    judge |= {name: more.pop(name) for name in list(more) if name in judge}
    return {"concepts": ["c1"], "above": 0.0, "action": "escalate", "judge": judge, "on_blind": "pass", **more}


def answer_of(served, **probemon):
    running = Running(served, token=None)
    try:
        answer = running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": probemon}, Authorization=None)
    finally:
        running.close()
    return answer.status, json.loads(answer.content)


def test_rules_of_file_and_request_both_record_and_stop(parts):
    record = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
    served = served_by(parts, record)
    status, whole = answer_of(served, rules=[{"concept": "c2", "above": 0.0}])
    told = whole["choices"][0]["message"]["probemon"]
    assert status == 200 and whole["choices"][0]["finish_reason"] == "length"
    assert {(event["concept"], event["action"]) for event in told["events"]} == {("c1", "record"), ("c2", "record")}
    assert told["summary"]["deployment"] == served.holding.now.deployment.sha256
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
def test_unseen_token_follows_on_blind_of_the_file(parts, on_blind, own):
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


def test_deployment_with_sinks_is_refused_by_the_server(parts):
    with pytest.raises(ConfigError, match=r"serve\.json has sinks"):
        served_by(parts, sinks=[{"kind": "jsonl", "path": "scores.jsonl"}])


def test_server_metrics_include_those_of_its_runs(parts):
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
    assert len(named) == 12 and 'probemon_fired_total{concept="c39"}' in named
    [info] = [line for line in found if line.startswith("probemon_info") and found[line]]
    assert f'deployment="{served.holding.now.deployment.sha256}"' in info
    ids = {json.loads(answer.content)["id"] for answer in answers}
    assert exemplars.headers["content-type"].startswith("application/openmetrics-text")
    assert any(f'# {{request="{one}"}}' in exemplars.content.decode() for one in ids)


def test_metrics_describe_the_current_deployment_when_idle(parts, monkeypatch):
    shared = {"budget": {"ms": 1e-6}, "breaker": {"errors": 1, "retry_after": 1000}}
    served = served_by(parts, **shared)
    running, decoder, own = Running(served, token=None), served.model.model, {"rules": [{"concept": "c2"}]}
    first, outer = served.holding.now.deployment.sha256, []

    def another_answer_by_a_newer_file(module, args, kwargs):
        if not outer:  # whose own rule the newer file does not let it have: it goes on by the one before
            outer.append(True)
            deployment_of(parts[0], exclude=["c2"], **shared)
            served.holding.reload()
            running.ask("POST", "/v1/chat/completions", BODY, Authorization=None)

    def fail(*arguments, **options):
        raise RuntimeError("broken")

    def shown():
        lines = running.ask("GET", "/metrics", Authorization=None).content.decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    handle = decoder.register_forward_pre_hook(another_answer_by_a_newer_file, with_kwargs=True)
    try:
        running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": own}, Authorization=None)
        handle.remove()
        found = shown()
        monkeypatch.setattr(served.manager, "score_prompt", fail)
        running.ask("POST", "/v1/chat/completions", BODY, Authorization=None)
        failed = shown()
    finally:
        handle.remove()
        running.close()
    newer = served.holding.now.deployment.sha256
    assert newer != first and [
        value
        for sha256 in (first, newer)
        for name, value in found.items()
        if name.startswith("probemon_info") and sha256 in name
    ] == [0, 1]
    assert found["probemon_runs"] == failed["probemon_runs"] == 0
    assert failed["probemon_budget_degradation"] == served.budget.degradation > 0
    assert (found["probemon_breaker_open"], failed["probemon_breaker_open"]) == (0, 1)


def test_second_metrics_port_is_refused(parts):
    with pytest.raises(ConfigError, match="a server shows them at its own /metrics"):
        served_by(parts, metrics={"port": 9464})


@contextmanager
def collecting():
    """The address of an OTLP collector, and the log records that it receives."""
    received = []

    def take(path, headers, body):
        for of_resource in ExportLogsServiceRequest.FromString(body).resource_logs:
            for of_scope in of_resource.scope_logs:
                received.extend(of_scope.log_records)
        return 200, "application/x-protobuf", b""

    with answering(take) as address:
        yield address, received


def attributes_of(records):
    return [{one.key: one.value for one in record.attributes} for record in records]


def test_answers_are_opentelemetry_events_with_their_ids(parts):
    rule = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
    with collecting() as (address, received):
        served = served_by(parts, rule, opentelemetry={"endpoint": address})
        ids = [answer_of(served)[1]["id"] for _ in range(2)]
    events = [{name: value.string_value for name, value in one.items()} for one in attributes_of(received)]
    told = [(one["gen_ai.response.id"], one["gen_ai.evaluation.name"]) for one in events]
    assert told == [(id_, f"probemon.{name}") for id_ in ids for name in ("c1", "generation")]
    of_rules = [one for one in events if one["gen_ai.evaluation.name"] == "probemon.c1"]
    assert {one["probemon.action"] for one in of_rules} == {"record"}
    assert {one["probemon.deployment"] for one in of_rules} == {served.holding.now.deployment.sha256}


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_events_join_the_trace_of_the_request_unless_it_is_invalid(parts, stream):
    valid = f"00-{TRACE}-{SPAN}-01"

    def judge(path, headers, body):
        return 200, "application/json", b'{"choices": [{"message": {"content": "pass"}}]}'

    sent = [valid, None, "", "00-" + valid, valid.upper(), valid[:-1], f"00-{'0' * 32}-{SPAN}-01", f"ff{valid[2:]}"]
    with collecting() as (address, received), answering(judge) as at:
        served = served_by(parts, escalating(at, meanwhile="hold"), opentelemetry={"endpoint": address})
        running = Running(served, token=None)
        try:
            for header in sent:
                body = {**BODY, "stream": stream}
                answer = running.ask("POST", "/v1/chat/completions", body, Authorization=None, traceparent=header)
                assert answer.status == 200
        finally:
            running.close()
    told = [(one.trace_id.hex(), one.span_id.hex(), one.flags) for one in received]
    assert told == 3 * [(TRACE, SPAN, 1)] + (len(sent) - 1) * 3 * [("", "", 0)]  # a rule, its verdict, the end
    models = [one["gen_ai.request.model"].string_value for one in attributes_of(received)]
    assert models == ["tiny"] * len(received)
    assert {one.severity_text for one in received} == {"INFO"} and all(one.body.string_value for one in received)


def test_event_of_an_answer_whose_client_left_is_marked(parts):
    with collecting() as (address, received):
        served = served_by(parts, opentelemetry={"endpoint": address})
        running, host = Running(served, token=None), served.model
        handle = host.register_forward_pre_hook(lambda *seen: time.sleep(0.02))
        try:
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
            body = json.dumps({**BODY, "max_tokens": 40, "stream": True})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            connection.getresponse().read(1)
            connection.close()
            gone = b'probemon_requests_total{outcome="cancelled"} 1.0'
            eventually(lambda: gone in running.ask("GET", "/metrics", Authorization=None).content)
            running.ask("POST", "/v1/chat/completions", BODY, Authorization=None)
        finally:
            handle.remove()
            running.close()
    cancelled = [one.get("probemon.cancelled") for one in attributes_of(received)]
    assert [one is not None and one.bool_value for one in cancelled] == [True, False]


def test_reloaded_file_applies_to_running_answers_from_their_next_token(parts):
    record = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
    served = served_by(parts, record, always_on=["c5"])
    first, folder = served.holding.now.deployment.sha256, parts[0]
    running, seen = Running(served, token=None), []
    decoder = served.model.model

    def reload(module, args, kwargs):
        seen.append(kwargs["input_ids"].shape[1])
        if len(seen) == 4:  # before the third token is run
            deployment_of(folder, record, {**record, "concepts": ["c2"], "for_tokens": 2}, exclude=["c3"])
            assert served.holding.reload() == (0, 0)

    handle = decoder.register_forward_pre_hook(reload, with_kwargs=True)
    try:
        answers = [running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": {}}, Authorization=None)]
        handle.remove()
        answers.append(running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": {}}, Authorization=None))
    finally:
        handle.remove()
        running.close()
    told = [json.loads(answer.content)["choices"][0]["message"]["probemon"] for answer in answers]
    newer = served.holding.now.deployment.sha256
    assert newer != first and [one["summary"]["deployment"] for one in told] == [newer, newer]
    begin = told[0]["tokens"][0]["position"]
    held = [{"position": 0, "deployment": first}, {"position": begin + 2, "deployment": newer}]
    assert told[0]["summary"]["deployments"] == held and "deployments" not in told[1]["summary"]
    met = [[(event["concept"], event["position"] - begin) for event in one["events"]] for one in told]
    assert met == [[("c1", 0), ("c2", 3)], [("c1", 0), ("c2", 1)]]


@pytest.mark.parametrize(
    ("rules", "more", "said"),
    [
        ([{"concepts": ["c99"], "action": "stop", "on_blind": "pass"}], {}, "has no concept 'c99'"),
        ([], {"cascade": {"keep_top_k": 5}}, "cascade cannot change while it runs"),
        ([{"concepts": ["c1"], "action": "stop", "on_blind": "pass", "above": 0.1}], {"exclude": ["c1"]}, "leave it"),
    ],
)
def test_bad_file_is_refused_and_the_old_one_stays(parts, rules, more, said):
    record = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
    served = served_by(parts, record)
    before = served.holding.now
    deployment_of(parts[0], *rules, **more)
    with pytest.raises(DeploymentError, match=said):
        served.holding.reload()
    assert served.holding.now is before


def test_running_answer_keeps_its_rule_on_a_newly_excluded_concept(parts):
    served = served_by(parts)
    running, decoder, told = Running(served, token=None), served.model.model, []

    def reload(module, args, kwargs):
        if not told:
            record = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
            deployment_of(parts[0], record, exclude=["c2"])
            told.append(served.holding.reload())

    own = {"rules": [{"concept": "c2", "above": 0.0}]}
    handle = decoder.register_forward_pre_hook(reload, with_kwargs=True)
    try:
        answer = running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": own}, Authorization=None)
        refused = running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": own}, Authorization=None)
    finally:
        handle.remove()
        running.close()
    events = json.loads(answer.content)["choices"][0]["message"]["probemon"]["events"]
    assert told == [(1, 0)] and [event["concept"] for event in events] == ["c1", "c2"]
    assert refused.status == 400 and "leave it" in json.loads(refused.content)["error"]["message"]


def test_answer_that_cannot_take_the_new_file_keeps_the_old_and_is_counted(parts, capsys):
    """A rule of its own is on what the new file excludes, and the new file's rule on what the old one did."""
    served, told = served_by(parts, exclude=["c3"]), []
    first = served.holding.now.deployment.sha256

    def reload(module, args, kwargs):
        if not told:
            stop = {"concepts": ["c3"], "above": 0.0, "action": "stop", "on_blind": "stop"}
            deployment_of(parts[0], stop, exclude=["c2"])
            told.append(_reload(served))

    own = {"rules": [{"concept": "c2", "above": 0.999}]}
    running, handle = (
        Running(served, token=None),
        served.model.model.register_forward_pre_hook(reload, with_kwargs=True),
    )
    try:
        answers = [
            running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": asked}, Authorization=None)
            for asked in (own, {})
        ]
    finally:
        handle.remove()
        running.close()
    kept, new = (json.loads(answer.content)["choices"][0] for answer in answers)
    summary = kept["message"]["probemon"]["summary"]
    assert kept["finish_reason"] == "length" and summary["deployment"] == first and "deployments" not in summary
    assert new["finish_reason"] == "content_filter" and served.holding.now.deployment.sha256 != first
    assert "; 1 answer under way: NOTHING of it applies, because of the request's rules" in capsys.readouterr().out


@pytest.mark.parametrize("stream", [False, True])
def test_queued_request_is_refused_when_the_new_file_excludes_its_concept(parts, stream):
    served = served_by(parts)
    running, begun, may_go_on = Running(served, replace(LIMITS, at_once=1), token=None), Event(), Event()

    def wait(module, args, kwargs):
        begun.set()
        may_go_on.wait(30)

    own = {
        **BODY,
        "stream": stream,
        "probemon": {"rules": [{"concept": "c1", "above": 0.0}, {"concept": "c2", "above": 0.0}]},
    }
    handle = served.model.model.register_forward_pre_hook(wait, with_kwargs=True)
    try:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(running.ask, "POST", "/v1/chat/completions", BODY, Authorization=None)
            assert begun.wait(30)
            second = pool.submit(running.ask, "POST", "/v1/chat/completions", own, Authorization=None)
            eventually(lambda: b"probemon_requests_waiting 1" in running.ask("GET", "/metrics").content)
            deployment_of(parts[0], exclude=["c2"])
            assert served.holding.reload() == (0, 0)
            may_go_on.set()
            answers = [first.result(30), second.result(30)]
        refused = b'probemon_requests_total{outcome="refused"} 1.0'
        eventually(lambda: refused in running.ask("GET", "/metrics").content)
        assert b'{outcome="failed"}' not in running.ask("GET", "/metrics").content
    finally:
        may_go_on.set()
        handle.remove()
        running.close()
    assert answers[0].status == 200 and answers[1].status == (200 if stream else 400)  # a stream had begun
    begin, *rest = answers[1].content.split(b"\n\n")
    assert bool(rest) == stream and rest[-2:-1] == [b"data: [DONE]"][: len(rest)]
    error = json.loads(begin.removeprefix(b"data: "))["error"]
    assert error["param"] == "probemon.rules[1]" and "c2" in error["message"]
    assert error["type"] == "invalid_request_error"


def test_budget_and_breaker_are_shared_by_all_answers(parts):
    served = served_by(parts, budget={"ms": 1e-6}, breaker={"errors": 1})
    for _ in range(3):
        answer_of(served)
    assert served.budget.degradation > 0 and served.circuit.state == "closed"


def test_judge_is_asked_for_every_answer_and_can_stop_it(parts):
    rulings = {"stop": "stop", "pass": "pass", "mute": "I do not know"}
    asked, word = [], "stop"

    def judge(path, headers, body):
        asked.append(json.loads(json.loads(body)["messages"][1]["content"]))
        content = {"choices": [{"message": {"content": rulings[word]}}]}
        return 200, "application/json", json.dumps(content).encode()

    with answering(judge) as address:
        rule = escalating(address, for_tokens=3, meanwhile="hold")
        served = served_by(parts, rule)
        answers = {}
        for word in rulings:
            answers[word] = answer_of(served)
        at_once = served_by(parts, {**rule, "judge": {**rule["judge"], "meanwhile": "stop", "on_failure": "stop"}})
        word = "pass"
        answers["at once"] = answer_of(at_once)
    whole = answers["pass"][1]["choices"][0]["message"]["content"]
    for name, ruling in (("stop", "stop"), ("pass", "pass"), ("at once", "pending")):
        status, answer = answers[name]
        [choice] = answer["choices"]
        [event] = choice["message"]["probemon"]["events"]
        stops = name != "pass"
        assert status == 200 and choice["finish_reason"] == ("content_filter" if stops else "length")
        assert event["action"] == ("stop" if stops else "record") and event["verdict"]["ruling"] == ruling
        assert (
            whole.startswith(choice["message"]["content"]) and event["position"] == answer["usage"]["prompt_tokens"] + 2
        )
        assert answer["usage"]["completion_tokens"] == (4 if stops else 8)
    status, failed = answers["mute"]
    assert status == 500 and "ConceptRaised" in failed["error"]["message"]
    assert len(asked) == 4 and {question["concept"] for question in asked} == {"concept 1"}
    # The turns are told apart by words: a control token of the judge's model would end its own turn.
    assert all("user\nHi\nassistant\n" in one["text"] and "<|im_" not in one["text"] for one in asked)


@pytest.mark.filterwarnings("ignore:.* to judges had no answer that counts")
@pytest.mark.parametrize("hold", [False, True], ids=["", "hold"])
@pytest.mark.parametrize(
    ("within", "on_failure", "verdict"),
    [(20, "raise", ("stop", "")), (0.2, "stop", ("stop", "late")), (0.2, "raise", ("raise", "late"))],
    ids=["ruled", "late, stop", "late, raise"],
)
def test_verdict_after_the_complete_answer_is_still_reported(parts, within, on_failure, verdict, hold):
    def judge(path, headers, body):
        time.sleep(0.5)
        return 200, "application/json", b'{"choices": [{"message": {"content": "stop"}}]}'

    with answering(judge) as address:
        rule = escalating(address, for_tokens=8 if hold else 7, within=within, on_failure=on_failure)
        status, answer = answer_of(served_by(parts, rule), hold=hold)  # it is met at the last token that is run
    [choice] = answer["choices"]
    [event] = choice["message"]["probemon"]["events"]
    assert status == 200 and choice["finish_reason"] == "length" and event["action"] == "record"
    assert (event["verdict"]["ruling"], event["verdict"]["failure"]) == verdict


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_tokens_shown_while_the_judge_decides_are_counted_as_shown(parts, stream):
    """With `hold`: the judge rules in the forward of the sixth token, and three were seen by then beside the third."""
    n_forwards, ruling = [], Event()

    def judge(path, headers, body):
        ruling.wait(20)
        return 200, "application/json", b'{"choices": [{"message": {"content": "stop"}}]}'

    def rule_at_the_sixth(module, args, kwargs):
        n_forwards.append(None)
        if len(n_forwards) == 6:
            ruling.set()
            time.sleep(0.3)

    with answering(judge) as address:
        served = served_by(parts, escalating(address, for_tokens=2))
        running = Running(served, token=None)
        handle = served.model.model.register_forward_pre_hook(rule_at_the_sixth, with_kwargs=True)
        try:
            asked = {**BODY, "max_tokens": 12, "stream": stream, "probemon": {"hold": True}}
            answer = running.ask("POST", "/v1/chat/completions", asked, Authorization=None)
            [newest] = json.loads(running.ask("GET", "/v1/probemon/requests", Authorization=None).content)["requests"]
            record = running.ask("GET", f"/v1/probemon/requests/{newest['request']}", Authorization=None)
        finally:
            ruling.set()
            handle.remove()
            running.close()
    [choice] = json.loads(record.content)["choices"]
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.content.decode().split("\n") if line.startswith("data: {")]
        deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        text = "".join(delta["delta"].get("content") or "" for delta in deltas)
        tokens = [token for delta in deltas for token in delta["delta"].get("probemon", {}).get("tokens", [])]
    else:
        [whole] = json.loads(answer.content)["choices"]
        text, tokens = whole["message"]["content"], whole["message"]["probemon"]["tokens"]
    assert text == choice["text"] == "".join(token["text"] for token in tokens) != ""
    assert choice["finish_reason"] == "content_filter" and len(tokens) > 2
    n_generated = choice["summary"]["coverage"]["tokens"]
    assert choice["summary"]["n_withheld"] == n_generated - len(tokens) > 0


def test_client_that_leaves_frees_its_thread_though_a_judge_holds_the_answer(parts):
    asked, may_rule = Event(), Event()

    def rules(*request):
        asked.set()
        may_rule.wait(60)
        return 200, "application/json", json.dumps({"choices": [{"message": {"content": "stop"}}]}).encode()

    with answering(rules) as address:
        served = served_by(parts, escalating(address, within=60, meanwhile="hold"))
        running = Running(served, token=None)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", running.port)
            body = json.dumps({**BODY, "stream": True})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            assert asked.wait(20)
            connection.close()
            eventually(lambda: not running.get("/v1/probemon/requests")["requests"][0]["running"], 10)
            metrics = running.ask("GET", "/metrics", Authorization=None).content.decode()
        finally:
            may_rule.set()
            running.close()
    assert 'probemon_verdicts_total{failure="abandoned",ruling="pass"} 1.0' in metrics


def test_missing_judge_key_is_refused_at_start_and_at_reload(parts):
    judge = {"url": "http://localhost:1/v1", "model": "guard", "key_env": "NO_SUCH_KEY"}
    judge |= {"within": 1, "meanwhile": "hold", "on_failure": "stop"}
    rule = {"concepts": ["c1"], "action": "escalate", "judge": judge, "on_blind": "pass"}
    with pytest.raises(ConfigError, match="key_env is 'NO_SUCH_KEY'"):
        served_by(parts, rule)
    served = served_by(parts)
    before = served.holding.now
    deployment_of(parts[0], rule)
    with pytest.raises(ConfigError, match="key_env is 'NO_SUCH_KEY'"):
        served.holding.reload()
    assert served.holding.now is before


@pytest.mark.filterwarnings(r"ignore:\d of \d generated tokens have no scores")
@pytest.mark.parametrize("hold", [False, True], ids=["", "hold"])
@pytest.mark.parametrize("why", ["scoring failed: RuntimeError", "hidden state is not finite"])
def test_request_rule_stops_or_fails_at_an_unseen_token(parts, monkeypatch, why, hold):
    served, n_calls = served_by(parts, breaker={"errors": 1, "retry_after": 1000}), []
    begin = served.manager.begin

    def at_the_third_token(*arguments):
        n_calls.append(None)
        if len(n_calls) == 3 and why.startswith("scoring"):
            raise RuntimeError("broken")
        return begin(*arguments)

    def lose(module, args, output):
        return torch.full_like(output, torch.inf) if len(n_calls) == 2 and "finite" in why else None

    running = Running(served, token=None)
    monkeypatch.setattr(served.manager, "begin", at_the_third_token)
    handle = served.model.model.embed_tokens.register_forward_hook(lose)
    try:
        own = {"hold": hold, "rules": [{"concept": "c2", "above": 0.99, "action": "stop"}]}
        answer = running.ask("POST", "/v1/chat/completions", {**BODY, "probemon": own}, Authorization=None)
    finally:
        handle.remove()
        running.close()
    content = json.loads(answer.content)
    if hold:  # what cannot be judged is not shown
        [choice] = content["choices"]
        assert choice["finish_reason"] == "content_filter"
        assert [token["unseen"] for token in choice["message"]["probemon"]["tokens"]] == [None, None]
    else:
        assert answer.status == 500 and why in content["error"]["message"]


def test_request_rule_is_evaluated_at_any_degradation_level(parts):
    served = served_by(parts, budget={"ms": 1e-6})
    running, own = Running(served, token=None), {"rules": [{"concept": "c2", "above": 0.0}]}
    try:
        bodies = [{**BODY, "max_tokens": 48}] * 2 + [{**BODY, "probemon": own}]
        answers = [running.ask("POST", "/v1/chat/completions", body, Authorization=None) for body in bodies]
    finally:
        running.close()
    assert NAMES[served.budget.degradation] == NAMES[-1]
    [event] = json.loads(answers[-1].content)["choices"][0]["message"]["probemon"]["events"]
    assert event["concept"] == "c2"


def test_last_read_file_wins_over_a_slower_earlier_read(parts, monkeypatch):
    served, read, first_is_read, second_asks = served_by(parts), Deployment.read, Event(), Event()

    def read_slowly(path):
        deployment = read(path)
        if not first_is_read.is_set():
            first_is_read.set()
            second_asks.wait(10)
            time.sleep(0.2)
        return deployment

    deployment_of(parts[0], exclude=["c1"])
    monkeypatch.setattr(Deployment, "read", read_slowly)
    with ThreadPoolExecutor() as pool:
        readings = [pool.submit(served.holding.reload)]
        first_is_read.wait(10)
        (parts[0] / "serve.json").write_text((parts[0] / "serve.json").read_text().replace('"c1"', '"c2"'))
        readings.append(pool.submit(served.holding.reload))
        second_asks.set()
        assert [reading.result() for reading in readings] == [(0, 0), (0, 0)]
    assert served.holding.now.exclude == ("c2",)


def test_excluded_concept_cannot_be_requested_or_counted(parts):
    """Its silence would say nothing: not in an answer, nor as a count that stays where it is."""
    served = served_by(parts, exclude=["c2"], metrics={"concepts": ["c3"]})
    assert answer_of(served, concepts=["c3"])[0] == 200
    status, answer = answer_of(served, concepts=["c3", "c2"])
    error = answer["error"]
    assert status == 400 and error["param"] == "probemon.concepts[1]" and "'concept 2' is left out" in error["message"]
    deployment_of(parts[0], exclude=["c3"], metrics={"concepts": ["c3"]})
    with pytest.raises(DeploymentError, match="'concept 3' is left out"):
        served.holding.reload()
    deployment_of(parts[0], exclude=["c4"], metrics={"concepts": ["c3"]})
    served.holding.reload()
    assert [answer_of(served, concepts=[concept])[0] for concept in ("c2", "c4")] == [200, 400]


def test_server_is_unready_while_the_breaker_is_open(parts, monkeypatch):
    served = served_by(parts, breaker={"errors": 1, "retry_after": 1000})
    running, prompt = Running(served, token=None), served.manager.score_prompt

    def ready():
        answer = running.ask("GET", "/readyz", Authorization=None)
        checks = json.loads(answer.content)["checks"]
        return answer.status, [check["name"] for check in checks if check["state"] == "failed"]

    def fail(*arguments, **options):
        raise RuntimeError("broken")

    try:
        assert ready() == (200, [])
        monkeypatch.setattr(served.manager, "score_prompt", fail)
        running.ask("POST", "/v1/chat/completions", BODY, Authorization=None)
        monkeypatch.setattr(served.manager, "score_prompt", prompt)
        assert ready() == (503, ["breaker"])
        served.circuit._clock = lambda: time.monotonic() + 2000
        assert ready() == (200, [])  # or nobody would ask, and it would stay open
        running.ask("POST", "/v1/chat/completions", BODY, Authorization=None)
        assert ready() == (200, []) and served.circuit.state == "closed"
    finally:
        running.close()


def test_identical_rules_keep_separate_traffic_after_a_reload(parts):
    rule = {"concepts": ["c9"], "above": 3, "aggregate": "z:traffic:64", "action": "record", "on_blind": "pass"}
    served = served_by(parts, rule, rule)
    before = served.holding.now.rules
    assert served.holding.reload() == (0, 0)
    assert [known is new for known, new in zip(before, served.holding.now.rules, strict=True)] == [True, True]
    assert before[0] is not before[1]


def test_identical_rules_each_count_a_token_once(parts, monkeypatch):
    """With one window for both, each token would stand in it twice, and its rank would be another one."""
    monkeypatch.setitem(BODY, "max_tokens", 30)
    rule = {"concepts": ["c9"], "above": 0.0, "aggregate": "rank:traffic:16", "action": "record", "on_blind": "pass"}
    met = []
    for rules in ([rule], [rule, rule]):
        _, answer = answer_of(served_by(parts, *rules))
        events = answer["choices"][0]["message"]["probemon"]["events"]
        met.append([event["position"] for event in events])
    assert met[0] and sorted(met[1]) == sorted(met[0] * 2)

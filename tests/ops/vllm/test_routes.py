"""The routes added to vLLM's server, called over HTTP on the real middleware in front of another application."""

import http.client
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from test_client import ended_of, hello_of, step_of, wait_for
from test_engine_watch import SITES

import grouped_packs
from probemon.errors import AlignmentError, ConfigError, MissingExtra, UnsupportedModel
from probemon.ops.cli.vllm import vllm
from probemon.ops.server.limits import Limits
from probemon.ops.server.server import all_names, make_server, open_socket
from probemon.ops.vllm import installed
from probemon.ops.vllm.channel import Channel
from probemon.ops.vllm.client import VllmClient
from probemon.ops.vllm.engine_run import process_metrics
from probemon.ops.vllm.installed import check_vllm
from probemon.ops.vllm.messages import RuleMet
from probemon.ops.vllm.remote import RemoteScores
from probemon.ops.vllm.request_log import LOST
from probemon.ops.vllm.routes import SERVED, Routes, ServedEngine
from probemon.ops.vllm.row_ends import check_stoppable, force_end
from probemon.ops.vllm.serve import check_more, server_arguments
from probemon.tracking.recording import LAST
from probemon.util.files import sha256

TOKEN = "a token of the tests"


@pytest.fixture
def file(tmp_path):
    grouped_packs.write(tmp_path / "pack", (), torch.bfloat16, sites=SITES)
    manifest = sha256(tmp_path / "pack" / "manifest.json")
    file = tmp_path / "watch.yaml"
    file.write_text(
        f"deployment: 1\npacks: [{{pack: pack, manifest_sha256: {manifest}}}]\nmetrics: {{concepts: [c1]}}\n"
        "rules: [{concepts: [c0], above: 0.1, action: stop, on_blind: pass}]\n"
    )
    return file


@pytest.fixture
def served(file):
    with VllmClient(file) as client:
        metrics = process_metrics(client.deployment, client.manager.pack)
        client.run.follow(metrics)
        ready, sock = threading.Event(), open_socket("127.0.0.1", 0)
        port = sock.getsockname()[1]
        SERVED.append(ServedEngine(client, metrics, TOKEN, all_names("127.0.0.1", []), "tiny", Limits(), ready.set))
        engine = Starlette(routes=[Route("/v1/models", lambda http: PlainTextResponse("vLLM's own"))])
        app = Routes(engine)
        app.stop = app.cut = lambda: None
        server = make_server(app, lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(30)
            yield SimpleNamespace(client=client, port=port, channel=Channel(client.receiver.address, 1000))
        finally:
            server.should_exit = True
            thread.join(30)
            sock.close()
            SERVED.clear()


def event_at(request):
    """Fields of an event of the concept c0 at column 2."""
    event = {"concept": "c0", "name": "c0", "path": ["c0"], "row": 0, "column": 2, "token_id": 7, "score": 0.5}
    return {**event, "above": 0.1, "for_tokens": 1, "value": 0.5, "request": request, "reading": []}


def ask(served, path, token=TOKEN, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    given = {"Authorization": f"Bearer {token}", **headers}
    connection.request("GET", path, headers=given)
    answer = connection.getresponse()
    status, content = answer.status, answer.read()
    connection.close()
    return status, content


def test_route_reports_a_whole_answer_and_leaves_vllms_routes_alone(served, file):
    assert ask(served, "/v1/models") == (200, b"vLLM's own")
    status, content = ask(served, "/probemon/readyz")
    assert status == 503 and "no worker has said that it begins" in json.loads(content)["why"]
    client, channel = served.client, served.channel
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6], "chatcmpl-7-00000000"))
    channel.send(lambda sequence: RuleMet(sequence, event_at("chatcmpl-7-00000000"), "stop", True))
    channel.send(lambda sequence: step_of(client, sequence, [2], [7], "chatcmpl-7-00000000"))
    assert client.wait(lambda: client.n_steps == 2, 5)
    assert json.loads(ask(served, "/probemon/readyz")[1])["status"] == "ready"
    [about] = json.loads(ask(served, "/probemon/requests")[1])["requests"]
    assert about == {
        "request": "chatcmpl-7",
        "running": True,
        "n_prompt": 2,
        "n_cached": 0,
        "n_columns": 3,
        "stopped_at": 2,
    }
    told = json.loads(ask(served, "/probemon/requests/chatcmpl-7")[1])
    assert told["request"] == "chatcmpl-7"
    [told] = told["choices"]
    assert [token["position"] for token in told["tokens"]] == [0, 1, 2]
    assert [token["phase"] for token in told["tokens"]] == ["prompt", "prompt", "generated"]
    assert told["tokens"][2]["fired"] == client.log_of("chatcmpl-7").as_message().tokens.scores.fired(2).tolist()
    assert [event["action"] for event in told["events"]] == ["stop"]
    choice = {"index": 0, "token_ids": [7, 8]}
    reply = {"id": "chatcmpl-7", "prompt_token_ids": [5, 6], "choices": [choice]}
    remote = RemoteScores(f"http://127.0.0.1:{served.port}", file, token=TOKEN)
    result = remote.result(reply)
    assert result.coverage.unseen == ("", "", "", LAST)
    answer = SimpleNamespace(index=0, token_ids=[7, 8])
    here = client.result(SimpleNamespace(request_id="chatcmpl-7", prompt_token_ids=[5, 6], outputs=[answer]))
    assert np.array_equal(result.scores.values, here.scores.values)
    with pytest.raises(ConfigError, match="return_token_ids"):
        remote.result({"id": "chatcmpl-7", "choices": [{"index": 0}]})
    with pytest.raises(AlignmentError, match="404"):
        remote.result({**reply, "id": "chatcmpl-8"})
    text = ask(served, "/probemon/metrics")[1].decode()
    assert 'probemon_tokens_total{phase="prompt",unseen=""} 2.0' in text
    assert 'probemon_tokens_total{phase="generated",unseen=""} 1.0' in text
    assert 'probemon_events_total{action="stop"} 1.0' in text and 'probemon_fired_total{concept="c1"}' in text
    channel.close()


def test_every_prompt_and_choice_of_a_completion_has_its_own_result(served, file):
    client, channel = served.client, served.channel
    channel.send(lambda sequence: hello_of(client, sequence))
    own = {f"{j}_cmpl-9-{i}-0000000{i}": [5 + i, 6, 7 + j] for i in range(2) for j in range(2)}
    own |= {"cmpl-8-0-00000000": [5, 6, 7], "cmpl-8-1-00000001": [6, 6, 7]}
    for request, ids in own.items():
        channel.send(lambda sequence, r=request, ids=ids: step_of(client, sequence, [0, 1, 2], ids, r))
    channel.n_dropped += 1  # the first step of the next one
    channel.send(lambda sequence: step_of(client, sequence, [2], [7], "cmpl-7-0-00000000"))
    assert client.wait(lambda: client.n_steps == 7, 5)
    remote = RemoteScores(f"http://127.0.0.1:{served.port}", file, token=TOKEN)

    def reply_of(name, *rows):
        choices = [{"index": k, "prompt_token_ids": ids[:2], "token_ids": ids[2:]} for k, ids in enumerate(rows)]
        return {"id": name, "object": "text_completion", "choices": choices}

    result = remote.result(reply_of("cmpl-8", [5, 6, 7, 1], [6, 6, 7, 1]))
    assert result.coverage.unseen == ("", "", "", LAST) * 2
    rows = [[5, 6, 7, 1], [5, 6, 8, 1], [6, 6, 7, 1], [6, 6, 8, 1]]
    result = remote.result(reply_of("cmpl-9", *rows))
    assert result.coverage.unseen == ("", "", "", LAST) * 4
    assert result.token_id.reshape(4, 4).tolist() == rows
    with pytest.raises(AlignmentError, match="404"):
        remote.result(reply_of("cmpl-9", *reversed(rows)))
    assert remote.result(reply_of("cmpl-7", [5, 6, 7, 1]), timeout_seconds=0).coverage.unseen == (LOST, LOST, "", LAST)
    channel.send(lambda sequence: ended_of(sequence, "cmpl-8-0-00000000", 3))
    assert client.wait(lambda: not client.log_of("cmpl-8-0").under_way, 5)
    with pytest.raises(AlignmentError, match="the engine ran 3 tokens, the output has 2"):
        remote.result(reply_of("cmpl-8", [5, 6, 7]))
    channel.close()


def test_reply_waits_for_scores_that_arrive_later(served, file):
    client, channel = served.client, served.channel
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6], "chatcmpl-7-00000000"))
    assert client.wait(lambda: client.n_steps == 1, 5)
    late = threading.Timer(
        0.5, lambda: channel.send(lambda sequence: step_of(client, sequence, [2], [7], "chatcmpl-7-00000000"))
    )
    late.start()
    remote = RemoteScores(f"http://127.0.0.1:{served.port}", file, token=TOKEN)
    reply = {"id": "chatcmpl-7", "prompt_token_ids": [5, 6], "choices": [{"index": 0, "token_ids": [7, 8]}]}
    assert remote.result(reply).coverage.unseen == ("", "", "", LAST)
    late.join()
    channel.close()


def test_wrong_token_host_or_origin_is_refused(served):
    assert ask(served, "/probemon/healthz", token="other")[0] == 200
    for path in ("/probemon/requests", "/probemon/metrics", "/probemon/pack", "/probemon/events"):
        assert ask(served, path, token="other")[0] == 401
        assert ask(served, path, Host="evil.example")[0] == 400
        assert ask(served, path, Origin="http://evil.example")[0] == 403
    assert ask(served, "/probemon/nothing")[0] == 404
    served.channel.close()


def test_events_are_streamed_as_they_come(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", "/probemon/events", headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    assert b"hello" in answer.read1()
    client, channel = served.client, served.channel
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6], "cmpl-1-0-00000000"))
    seen = b""
    while seen.count(b"event: token") < 2:
        seen += answer.read1()
    assert b'"request": "cmpl-1-0"' in seen
    connection.close()
    channel.close()


def test_rules_abort_answers_of_the_engine_that_the_server_has(file):
    aborted, ready = [], threading.Event()

    class Engine:
        async def abort(self, request, internal):
            aborted.append((request, internal))

    with VllmClient(file, stops="abort") as client, open_socket("127.0.0.1", 0) as sock:
        SERVED.append(ServedEngine(client, None, None, all_names("127.0.0.1", []), "tiny", Limits(), ready.set))
        app = Starlette(middleware=[Middleware(Routes)])  # as vLLM adds it
        app.state.engine_client = Engine()
        app.stop = app.cut = lambda: None
        server = make_server(app, lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(30)
            channel = Channel(client.receiver.address, 1000)
            channel.send(lambda sequence: RuleMet(sequence, event_at("cmpl-1-0-abc"), "stop", False))
            assert wait_for(lambda: aborted == [("cmpl-1-0-abc", True)])
            channel.close()
        finally:
            server.should_exit = True
            thread.join(30)
            SERVED.clear()


def test_vllm_command_line_has_the_routes_and_the_key():
    arguments = server_arguments("model", "tiny", "127.0.0.1", 8000, "key", ["--max-model-len", "64"])
    assert arguments[0] == "model" and arguments[-2:] == ["--max-model-len", "64"]
    assert arguments[arguments.index("--middleware") + 1] == "probemon.ops.vllm.routes.Routes"
    assert arguments[arguments.index("--api-key") + 1] == "key"
    assert arguments[1:3] == ["--served-model-name", "tiny"]


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ("--api-key=x", "--api-key"),
        ("--worker-cls", "--worker-cls"),
        ("--worker-cl", "--worker-cls"),
        ("--additional_config", "--additional-config"),
        ("--additional-config.probemon.stop=false", "--additional-config"),
        ("--api-server-count", "--api-server-count"),
        ("-asc", "--api-server-count"),
    ],
)
def test_options_that_serve_sets_itself_are_refused_in_any_spelling(given, option):
    with pytest.raises(ConfigError, match=f"which is {option}: "):
        check_more(["--max-model-len", "64", given])
    check_more(["--max-model-len", "64", "--", "--host-more", "x"])


def test_missing_or_untested_vllm_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setattr(installed, "_PACKAGES", ("probemon-is-no-vllm",))
    with pytest.raises(MissingExtra, match=r"vllm_env\.sh"):
        check_vllm()
    monkeypatch.setattr(installed, "_PACKAGES", ("torch",))  # which is there, and of no version that was tried
    with pytest.raises(UnsupportedModel, match=r"only 0\.32\.0, 0\.33\.0: .*--untried-version"):
        check_vllm()


def test_forced_end_samples_the_end_token_for_its_sequences_only():
    logits = torch.randn(5, 11)
    before = logits.clone()
    force_end(logits, [1, 3], {0: 2, 1: 2, 3: 7})
    assert logits.argmax(dim=1)[[1, 3]].tolist() == [2, 7]
    assert logits.softmax(dim=1)[[1, 3], [2, 7]].tolist() == [1, 1]
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])
    for rows, eos in (([5], {5: 1}), ([2], {}), ([2], {2: None})):
        with pytest.raises(ConfigError, match="a stop could not be made"):
            force_end(logits, rows, eos)


@pytest.mark.parametrize(
    ("field", "value"), [("ignore_eos", True), ("min_tokens", 3), ("structured_outputs", object())]
)
def test_request_that_could_not_be_stopped_is_refused(field, value):
    params = SimpleNamespace(ignore_eos=False, min_tokens=0, structured_outputs=None)
    check_stoppable(params)
    setattr(params, field, value)
    with pytest.raises(ConfigError, match=field.partition("_")[0]):
        check_stoppable(params)


def test_serve_and_check_commands_are_registered():
    assert {command.callback.__name__ for command in vllm.registered_commands} == {"serve", "check"}

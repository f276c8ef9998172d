"""Clients that leave, stall or are too many; pages that subscribe, lag and return; requests that are kept."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import openai
import pytest
from test_answers import CHAT, GREEDY, collected, prompt_ids, stream, watched

from probemon.monitor.health import Health
from probemon.ops.server.canary import ServedCanary
from probemon.ops.server.limits import Limits
from probemon.ops.server.token_objects import Told
from running_server import LIMITS, Running, eventually


class Turnstile:
    """Lets the host run so many more forwards; counts them."""

    def __init__(self, model):
        self.n, self.allowed = 0, threading.Semaphore(0)
        self.handle = model.register_forward_pre_hook(self.before)

    def before(self, module, args):
        assert self.allowed.acquire(timeout=30)
        self.n += 1

    def let(self, n):
        for _ in range(n):
            self.allowed.release()

    def open(self):
        self.handle.remove()
        self.let(10_000)


@contextmanager
def turnstile(served):
    held = Turnstile(served.model)
    try:
        yield held
    finally:
        held.open()


def post(server, ask):
    body = json.dumps(ask).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode(), body


def ask_and_leave(server, held, ask, n_tokens):
    """A client that has gone once so many tokens of its answer were run."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    head, body = post(server, ask)
    connection.sendall(head + body)
    held.let(n_tokens)
    eventually(lambda: held.n == n_tokens)
    connection.close()
    time.sleep(0.2)  # the loop hears of it


def is_idle(server):
    page = server.get("/v1/probemon/requests")["requests"]
    return not any(request["running"] for request in page)


class Page:
    """A reader of the events."""

    def __init__(self, server, after=None):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        headers = {"Authorization": f"Bearer {server.token}"} | ({"Last-Event-ID": str(after)} if after else {})
        self.connection.request("GET", "/v1/probemon/events", headers=headers)
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200 and self.answer.headers["content-type"].startswith("text/event-stream")
        self.last_id = 0
        self.hello = self.next()[1]

    def next(self):
        kind = data = None
        while line := self.answer.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                data = json.loads(value)
            elif name == "id":
                assert int(value) > self.last_id
                self.last_id = int(value)
        return (kind, data) if kind else self.next()

    def until(self, kind):
        events = [self.next()]
        while events[-1][0] != kind:
            events.append(self.next())
        return events

    def close(self):
        self.answer.close()
        self.connection.close()


@contextmanager
def page(server, after=None):
    reader = Page(server, after)
    try:
        yield reader
    finally:
        reader.close()


@pytest.mark.parametrize("streamed", [True, False])
def test_leaving_client_ends_its_generation_within_two_tokens(server, served, streamed):
    expected = collected(stream(server, probemon={}))
    with turnstile(served) as held:
        ask = {"model": "tiny", "messages": CHAT, "max_tokens": 40, **GREEDY, "stream": streamed}
        ask_and_leave(server, held, ask, 5)
        held.let(30)
        eventually(lambda: is_idle(server))
        assert held.n <= 5 + 2
    [newest] = server.get("/v1/probemon/requests")["requests"][:1]
    assert newest["finish_reasons"] == ["cancelled"]
    assert collected(stream(server, probemon={})) == expected


def test_every_request_has_a_line_in_the_log_and_its_id_in_a_header(served, caplog):
    """Also one whose client left while it waited, and one that the server's end cut."""
    caplog.set_level("INFO", "probemon")
    running = Running(served, replace(LIMITS, at_once=1), drain_seconds=0)
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 2}
    answered = running.ask("POST", "/v1/chat/completions", body)
    assert json.loads(answered.content)["id"] == answered.headers["probemon-request"]
    with turnstile(served):
        streams = [stream(running, max_tokens=2)]
        eventually(lambda: b"probemon_requests_running 1" in running.ask("GET", "/metrics").content)
        streams += [stream(running, max_tokens=2) for _ in range(2)]
        streams[1].close()
        eventually(lambda: b"probemon_requests_waiting 1" in running.ask("GET", "/metrics").content)
        running.server.should_exit = True
        running.thread.join(20)
    running.close()
    outcomes = [record.outcome for record in caplog.records if hasattr(record, "request")]
    assert outcomes == ["answered", *["cancelled"] * 3]
    assert len({record.request for record in caplog.records if hasattr(record, "request")}) == 4
    assert streams[0].response.headers["probemon-request"] in {record.request for record in caplog.records}


def test_every_choice_of_a_client_that_left_is_reported_as_cancelled(server, served):
    with turnstile(served) as held, page(server) as reader:
        ask_and_leave(server, held, {"model": "tiny", "messages": CHAT, "max_tokens": 4, "n": 3, "seed": 0}, 2)
        held.let(30)
        ends = [reader.until("end")[-1][1] for _ in range(3)]
    assert [(end["choice"], end["finish_reason"]) for end in ends] == [(at, "cancelled") for at in range(3)]
    assert ends[0]["summary"] is not None and all(end["summary"] is None and end["text"] == "" for end in ends[1:])
    eventually(lambda: is_idle(server))
    record = server.get(f"/v1/probemon/requests/{ends[0]['request']}")
    for choice, end in zip(record["choices"], ends, strict=True):
        assert {name: choice[name] for name in ("text", "finish_reason", "summary")}.items() <= end.items()


def test_too_many_requests_get_429_with_retry_after(server, served):
    with turnstile(served) as held:
        streams = [stream(server, max_tokens=2) for _ in range(LIMITS.at_once)]
        eventually(lambda: b"probemon_requests_running 2" in server.ask("GET", "/metrics").content)
        streams += [stream(server, max_tokens=2) for _ in range(LIMITS.queue)]
        with pytest.raises(openai.RateLimitError) as raised:
            stream(server)
        assert raised.value.code == "queue_full" and int(raised.value.response.headers["retry-after"]) >= 1
        streams[-1].close()  # who waits may leave, too, and makes room
        eventually(lambda: b"probemon_requests_waiting 2" in server.ask("GET", "/metrics").content)
        streams[-1] = stream(server, max_tokens=2)
        held.let(100)
        assert [collected(one)[3] for one in streams] == ["length"] * len(streams)


def test_client_that_does_not_read_blocks_nobody_and_is_cut_off(served, caplog):
    limits = Limits(max_tokens=100, at_once=2, waiting_bytes=1, stalled_seconds=1)
    running = Running(served, limits)
    try:
        running.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of every connection
        connection = socket.create_connection(("127.0.0.1", running.port))
        ask = {"model": "tiny", "messages": CHAT, "max_tokens": 60, "stream": True, "n": 8, "probemon": {"top_k": 50}}
        head, body = post(running, ask)
        connection.sendall(head + body)
        assert collected(stream(running))[3] == "length"

        def is_counted():  # idle is also a server that has not read the request yet
            metrics = running.ask("GET", "/metrics").content
            return b'{outcome="stalled"} 1.0' in metrics or b'{outcome="cancelled"} 1.0' in metrics

        eventually(is_counted, 30)
        eventually(lambda: is_idle(running), 30)
        assert collected(stream(running))[3] == "length"
        own = connection.getsockname()
        eventually(lambda: own not in [other.client for other in running.server.server_state.connections])
        sent = b""
        while part := connection.recv(65536):
            sent += part
        assert sent and not sent.endswith(b"0\r\n\r\n")  # not ended, but cut off
        connection.close()
    finally:
        running.close()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_reused_connection_is_not_cut_off(served):
    running = Running(served, patience_seconds=0.2)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        for _ in range(12):
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            time.sleep(0.1)
        connection.close()
    finally:
        running.close()


def test_failed_answer_that_nobody_reads_frees_its_thread(served, monkeypatch):
    def broken(self, *arguments, **options):
        told(self, *arguments, **options)
        raise RuntimeError("no more")

    running = Running(served, Limits(max_tokens=100, at_once=1, waiting_bytes=1, stalled_seconds=1))
    try:
        told = Told.summary
        monkeypatch.setattr(Told, "summary", broken)
        failing = stream(running, probemon={"top_k": 50})
        eventually(lambda: running.served is served and is_idle(running), 30)
        with pytest.raises(openai.APIError, match=r"the server failed \(RuntimeError\): its log has more") as raised:
            collected(failing)
        [newest] = running.get("/v1/probemon/requests")["requests"]
        assert running.get(f"/v1/probemon/requests/{newest['request']}")["error"] == raised.value.message
        metrics = running.ask("GET", "/metrics").content.decode()
        assert 'probemon_answers_total{finish_reason="error"} 1' in metrics
        monkeypatch.setattr(Told, "summary", told)
        assert collected(stream(running))[3] == "length"
    finally:
        running.close()


def test_connection_with_an_incomplete_request_is_cut_off(served):
    running = Running(served, patience_seconds=0.5)
    try:
        for beginning in (
            b"",
            b"GET / HTTP/1.1\r\nHost: loc",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he",
        ):
            with socket.create_connection(("127.0.0.1", running.port), timeout=20) as slow:
                slow.sendall(beginning)
                answer = b""
                with suppress(ConnectionResetError):
                    while part := slow.recv(4096):
                        answer += part
                assert (b'"ok"' in answer) == beginning.endswith(b"GET /he")
        assert collected(stream(running))[3] == "length"
    finally:
        running.close()


def test_page_receives_what_client_and_record_contain(server):
    with page(server) as reader:
        assert reader.hello["n_running"] == 0 and reader.hello["subscribers"] >= 1 and len(reader.hello["boot"]) == 16
        rule = {"concept": "c5", "above": 0.2, "action": "record"}
        options = {"rules": [rule], "prompt": True}
        text, tokens, events, _, summary, _ = collected(stream(server, probemon=options))
        heard = reader.until("end")
    assert heard[0][0] == "begin" and heard[0][1]["kind"] == "chat" and heard[0][1]["messages"] == CHAT
    assert heard[0][1]["options"]["probemon"] == options
    name = heard[0][1]["request"]
    assert all(content["request"] == name for _, content in heard)
    assert [{k: v for k, v in c.items() if k != "request"} for kind, c in heard if kind == "token"] == tokens
    assert [{k: v for k, v in c.items() if k != "request"} for kind, c in heard if kind == "rule"] == events != []
    assert heard[-1][1] == {
        "request": name,
        "choice": 0,
        "finish_reason": "length",
        "text": text,
        "summary": summary,
    }
    record = server.get(f"/v1/probemon/requests/{name}")
    assert record["prompt_tokens"] + record["choices"][0]["tokens"] == tokens
    assert record["choices"][0] | {"tokens": []} == {
        "text": text,
        "finish_reason": "length",
        "tokens": [],
        "events": events,
        "summary": summary,
    }
    assert record["messages"] == CHAT and record["request"] == name


def test_page_receives_tokens_of_requests_without_probemon_options(server, served):
    with page(server) as reader:
        collected(stream(server))
        heard = [content for kind, content in reader.until("end") if kind == "token"]
    result = watched(served, prompt_ids(served))
    assert [token["position"] for token in heard] == result.position[result.tokens_of(0, "generated")].tolist()
    assert all(len(token["top"]) == 3 for token in heard[:-1])


def test_page_opened_during_an_answer_finds_its_start_in_the_record(server, served):
    with turnstile(served) as held:
        answer = stream(server, max_tokens=6)
        held.let(3)
        eventually(lambda: held.n == 3)
        with page(server) as reader:
            [running] = [one for one in server.get("/v1/probemon/requests")["requests"] if one["running"]]
            before = server.get(f"/v1/probemon/requests/{running['request']}")["choices"][0]["tokens"]
            held.let(100)
            heard = reader.until("end")
    after = [content["position"] for kind, content in heard if kind == "token"]
    n = len(prompt_ids(served))
    assert {*after, *(token["position"] for token in before)} == set(range(n, n + 6)) and before and after
    assert collected(answer)[3] == "length"


def test_returning_page_gets_missed_events_or_a_gap_event(server):
    with page(server) as reader:
        collected(stream(server))
        reader.until("end")
        seen = reader.last_id
    collected(stream(server))
    with page(server, after=seen) as reader:
        missed = reader.until("end")
        assert missed[0][0] == "begin" and reader.last_id == seen + len(missed)
        assert reader.hello["last_id"] == seen
    for _ in range(4):  # 14 events each: over the 64 that are kept
        collected(stream(server))
    with page(server, after=seen) as reader:
        [(kind, gap), *rest] = reader.until("gap")
        newest = server.ask("GET", "/metrics")
        assert newest.status == 200 and kind == "gap" and rest == []
        assert gap["from_id"] == seen + 1 and gap["n_dropped"] == gap["to_id"] - gap["from_id"] + 1
        assert reader.last_id == gap["to_id"]
        kept = [reader.next() for _ in range(LIMITS.kept_events)]
        assert len(kept) == LIMITS.kept_events and kept[-1][0] == "end"


def test_page_with_an_unknown_event_id_starts_at_new_events(server):
    with page(server, after=10**12) as reader:
        collected(stream(server))
        assert reader.next()[0] == "begin"


def test_two_pages_receive_the_same_events(server):
    with page(server) as one, page(server) as other:
        collected(stream(server))
        assert one.until("end") == other.until("end")


def test_forgotten_request_is_reported_and_memory_is_bounded(server):
    first = server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1)
    assert server.get(f"/v1/probemon/requests/{first.id}")["request"] == first.id
    for _ in range(LIMITS.kept_requests):
        server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1)
    answer = server.ask("GET", f"/v1/probemon/requests/{first.id}")
    assert answer.status == 404 and json.loads(answer.content)["error"]["code"] == "request_forgotten"
    assert len(server.get("/v1/probemon/requests")["requests"]) == LIMITS.kept_requests


def test_pack_route_numbers_concepts_as_the_tokens_do(server, served):
    told, pack = server.get("/v1/probemon/pack"), served.manager.pack
    assert (told["model"], told["pack"], len(told["concepts"])) == ("tiny", pack.name, pack.n_probes)
    for probe, concept in enumerate(told["concepts"]):
        assert concept["id"] == pack.concepts[probe]["id"] and concept["level"] == pack.tree.level[probe]
        assert concept["parents"] == [int(parent) for parent in pack.tree.parents(probe)]
        assert concept["threshold"] == pytest.approx(0.3) and concept["precision"] is None


def test_server_that_cannot_see_is_not_ready(served, monkeypatch):
    running = Running(served)
    try:
        assert running.ask("GET", "/readyz").status == 200
        monkeypatch.setattr("probemon.ops.server.app._SIGHT_SECONDS", 0.0)
        ready = running.get("/readyz")  # by the canary
        assert ready["ok"] and {check["state"] for check in ready["checks"]} == {"ok"}
        assert {"hooks", "tokens", "states", "canary"} <= {check["name"] for check in ready["checks"]}
        layer = served.model.model.layers[1]
        handle = layer.register_forward_hook(lambda module, args, output: output.roll(1, -1))
        answer = running.ask("GET", "/readyz")
        monkeypatch.setattr("probemon.ops.server.app._SIGHT_SECONDS", 1000.0)
        collected(stream(running))  # tokens are scored, and mends nothing
        handle.remove()
        assert running.ask("GET", "/readyz").status == 503  # a failure, too, counts for a while
        monkeypatch.setattr("probemon.ops.server.app._BLIND_SECONDS", 0.0)
        blind = json.loads(answer.content)
        assert answer.status == 503 and (blind["status"], blind["ok"]) == ("blind", False)
        stranger = json.loads(running.ask("GET", "/readyz", Authorization=None).content)  # is told no details
        assert "why" not in stranger and all(set(check) == {"name", "state"} for check in stranger["checks"])
        (failed,) = [check for check in blind["checks"] if check["state"] == "failed"]
        assert failed["name"] == "canary" and "than when the server began" in failed["what"] and failed["remedy"]
        assert failed["what"] in blind["why"]
        assert running.ask("GET", "/readyz").status == 200
        monkeypatch.setattr("probemon.ops.server.app._SIGHT_SECONDS", 0.0)
        monkeypatch.setattr(layer, "_call_impl", layer.forward)  # past every hook
        answer = running.ask("GET", "/readyz")
        assert answer.status == 503 and b"could not be watched" in answer.content
        assert running.ask("GET", "/healthz").status == 200
        failed = running.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": CHAT})
        assert failed.status == 500 and json.loads(failed.content)["error"]["code"] == "answer_failed"
    finally:
        running.close()


@pytest.mark.parametrize(
    "changes, param",
    [
        ({"probemon": {"concepts": ["whale"]}}, "probemon.concepts[0]"),
        ({"probemon": {"rules": [{"concept": "whale", "above": 0.5}]}}, "probemon.rules[0]"),
        ({"probemon": {"rules": [{"concept": "c1", "aggregate": "median"}]}}, "probemon.rules[0].aggregate"),
        ({"probemon": {"rules": [{"concept": "*", "above": 0.5}] * 2}}, "probemon.rules"),
        ({"messages": [{"role": "user", "content": "a " * 200}]}, "messages"),
        ({"max_tokens": 40, "messages": [{"role": "user", "content": "a " * 70}]}, "messages"),
    ],
)
def test_request_that_does_not_fit_pack_or_model_is_refused_before_it_queues(server, changes, param):
    answer = server.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": CHAT, **changes})
    assert answer.status == 400 and json.loads(answer.content)["error"]["param"] == param


def test_prompt_ids_outside_the_vocabulary_are_refused(server):
    answer = server.ask("POST", "/v1/completions", {"model": "tiny", "prompt": [10**6]})
    assert answer.status == 400 and json.loads(answer.content)["error"]["param"] == "prompt"


def test_ending_server_is_not_ready_and_waits_for_no_canary(served, monkeypatch):
    running, looks, may_end = Running(served, drain_seconds=2), threading.Event(), threading.Event()

    def look(canary):
        looks.set()
        assert may_end.wait(30)
        return Health(())

    monkeypatch.setattr("probemon.ops.server.app._SIGHT_SECONDS", 0.0)
    monkeypatch.setattr(ServedCanary, "look", look)
    with ThreadPoolExecutor() as pool:
        ready = pool.submit(running.ask, "GET", "/readyz")
        assert looks.wait(10)
        running.server.should_exit = True
        answer = ready.result(10)
        may_end.set()
    running.close()
    assert answer.status == 503 and json.loads(answer.content) == {"status": "ending"}


@pytest.mark.parametrize("drain_seconds", [0, 30])
def test_end_lets_answers_finish_or_tells_each_client_that_it_is_cut(served, caplog, drain_seconds):
    """Streams under way and waiting, and one whole answer: all end, and the server is gone at once."""
    running, ends = Running(served, replace(LIMITS, at_once=1), drain_seconds=drain_seconds), {}

    def ask(name, streams):
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 0, "stream": streams}
        ends[name] = running.ask("POST", "/v1/chat/completions", body)

    with turnstile(served) as held:
        clients = []
        for name, streams in (("under way", True), ("waits", True), ("whole", False)):
            clients.append(threading.Thread(target=ask, args=(name, streams)))
            clients[-1].start()
            held.let(4 if name == "under way" else 0)
            n = len(clients)
            eventually(lambda n=n: len(running.get("/v1/probemon/requests")["requests"]) == n)
        eventually(lambda: held.n == 4)
        began = time.monotonic()
        running.server.should_exit = True
        if drain_seconds:
            held.let(10_000)
        for client in clients:
            client.join(20)
        assert time.monotonic() - began < 10
    running.close()
    for name in ("under way", "waits"):
        chunks = [json.loads(line[6:]) for line in ends[name].content.decode().split("\n\n")[:-2]]
        assert ends[name].content.endswith(b"data: [DONE]\n\n")
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk.get("choices", ())]
        errors = [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
        assert reasons[-1] == ("length" if drain_seconds else "error") and not any(reasons[:-1])
        assert errors == ([] if drain_seconds else ["the server has ended before the answer: ask again"])
    assert ends["whole"].status == (200 if drain_seconds else 503)
    assert not caplog.records

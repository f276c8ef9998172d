"""A key may do what its roles say, as often as its limits say, and reads its own requests; what is kept is bounded."""

import asyncio
import gc
import http.client
import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from test_answers import CHAT, collected, stream
from test_deployed import parts, served_by  # noqa: F401
from test_guard import BODY, ROUTES
from test_traffic import turnstile

from probemon.errors import ConfigError
from probemon.ops.server import app
from probemon.ops.server.generator import Job
from probemon.ops.server.keys import NOBODY, Key, Quotas, read_keys
from probemon.ops.server.limits import Limits
from probemon.ops.server.records import Records
from probemon.ops.server.subscribers import EventRing
from running_server import LIMITS, Running, eventually

TEXT = """
# who may ask
alice    alices-secret-key  ask            per_minute=60 places=1
bob      bobs-secret-key--  ask
reviewer reviewers-key----  read            places=1
both     key-of-two-roles-  ask,read
scraper  scrapers-key-----  metrics
root     roots-key--------  admin
"""
KEYS = {key.name: key for key in read_keys(TEXT, "keys")}
MAY = {  # the roles that a route is for; none: any key
    "/v1/chat/completions": ("ask",),
    "/v1/completions": ("ask",),
    "/v1/probemon/events": ("ask", "read"),
    "/v1/probemon/requests": ("ask", "read"),
    "/v1/probemon/requests/x": ("ask", "read"),
    "/metrics": ("metrics",),
    "/v1/probemon/reload": ("admin",),
}


@contextmanager
def running_with_keys(served, **limits):
    running = Running(served, replace(LIMITS, **limits), keys=list(KEYS.values()), token=KEYS["alice"].secret)
    try:
        yield running
    finally:
        running.close()


def ask_as(server, name, method, path, body=None):
    return server.ask(method, path, body, Authorization=f"Bearer {KEYS[name].secret}")


def answered(server, name, text="Hi"):
    """Id of a request that this key asked, and that has ended."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = ask_as(server, name, "POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.content
    return json.loads(answer.content)["id"]


def test_file_of_keys_says_roles_and_limits():
    assert KEYS["alice"] == Key("alices-secret-key", "alice", frozenset({"ask"}), 60, 1)
    assert KEYS["both"].roles == {"ask", "read"} and KEYS["both"].reads is None and KEYS["bob"].reads == "bob"
    assert all(KEYS["root"].may(role) for role in ("ask", "read", "metrics", "admin"))
    assert read_keys("# one\n\njust-one-key-alone\n", "keys") == (Key("just-one-key-alone"),)
    assert "secret" not in repr(KEYS["alice"])


@pytest.mark.parametrize(
    "line, words",
    [
        ("alice alices-secret-key", "line 2: give NAME KEY ROLE,ROLE"),
        ("alice short ask", "the API key has 5 characters"),
        ("alice alices-secret-key asks", "the third word has a role that is none: roles are ask, read, metrics, admin"),
        ("alice alices-secret-key ask,", "the third word has a role"),
        ("alice ask-as-a-role-and-words alices-secret-key", "the third word has a role"),
        ("alice a-key-of-some-length ask alices-secret-key", "a word after the roles is no limit"),
        ("al/ice alices-secret-key ask", "the name may have"),
        ("alice alices-secret-key ask per_minute=0", "give per_minute=N or places=N, each once, from 1 to 999999"),
        ("alice alices-secret-key ask places=²", "give per_minute=N or places=N"),
        ("alice alices-secret-key ask places=1 places=2", "give per_minute=N or places=N"),
        ("alice alices-secret-key ask rate=1", "give per_minute=N or places=N"),
        (f"alice alices-secret-key ask places={'9' * 5000}", "give per_minute=N or places=N"),
        ("bob another-secret-key ask\nbob alices-secret-key ask", "line 3: the name or the key stands above already"),
        ("bob alices-secret-key ask\nalice alices-secret-key ask", "line 3: the name or the key stands above"),
        ("", "keys has no key"),
    ],
)
def test_bad_file_of_keys_is_refused_without_showing_a_key(line, words):
    with pytest.raises(ConfigError) as raised:
        read_keys(f"# keys\n{line}", "keys")
    assert words in str(raised.value) and "secret-key" not in str(raised.value)


def test_each_key_reaches_the_routes_of_its_roles_alone(served):
    with running_with_keys(served) as server:
        for method, path in [*ROUTES, ("POST", "/v1/probemon/reload")]:
            for name, key in KEYS.items():
                roles = ("admin",) if method == "DELETE" and "requests" in path else MAY.get(path)
                method = "HEAD" if path == "/v1/probemon/events" else method
                answer = ask_as(server, name, method, path, {} if method == "POST" else None)
                may = roles is None or bool(key.roles & {*roles, "admin"})
                assert (answer.status != 403) is may, (name, method, path)
                if not may and method != "HEAD":
                    error = json.loads(answer.content)["error"]
                    assert error["code"] == "role" and f"key {name} has the role" in error["message"]


def test_key_that_only_asks_sees_its_own_requests_on_every_route(served):
    with running_with_keys(served) as server:
        readers = {name: follow(server, name) for name in ("alice", "bob", "reviewer")}
        asked = {name: answered(server, name, f"Words of {name}") for name in ("alice", "bob", "both")}
        for name in ("alice", "bob"):
            content = ask_as(server, name, "GET", "/v1/probemon/requests").content
            assert [one["request"] for one in json.loads(content)["requests"]] == [asked[name]]
            for other, request in asked.items():
                answer = ask_as(server, name, "GET", f"/v1/probemon/requests/{request}")
                assert answer.status == (200 if other == name else 404)
                assert name == other or b"Words of" not in answer.content
        for name in ("reviewer", "both", "root"):
            content = ask_as(server, name, "GET", "/v1/probemon/requests").content
            listed = [(one["request"], one["key"]) for one in json.loads(content)["requests"]]
            assert listed == [(asked[key], key) for key in ("both", "bob", "alice")]
        for name, (connection, stream_of) in readers.items():
            seen = {}
            while seen.get("n_ends", 0) < (3 if name == "reviewer" else 1):
                for kind, data in next(stream_of):
                    if kind == "begin":
                        seen[data["key"]] = data["request"]
                    seen["n_ends"] = seen.get("n_ends", 0) + (kind == "end")
            del seen["n_ends"]
            assert seen == (asked if name == "reviewer" else {name: asked[name]})
            connection.close()
        connection, stream_of = follow(server, "bob", last_event_id=0)  # also what is read again
        begun = [data for _ in range(2) for kind, data in next(stream_of) if kind == "begin"]
        assert [one["key"] for one in begun] == ["bob"]
        connection.close()


def stream_of_client(client):
    return client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2, stream=True)


def follow(server, name, last_event_id=None, told=False):
    """An open stream of events and its blocks, after `hello`, which is told."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"Authorization": f"Bearer {KEYS[name].secret}"}
    if last_event_id is not None:
        headers["Last-Event-ID"] = str(last_event_id)
    connection.request("GET", "/v1/probemon/events", headers=headers)
    response = connection.getresponse()

    def blocks():
        text = b""
        while True:
            text += response.read1(65536)
            done, end, text = text.rpartition(b"\n\n")
            events = []
            for block in (done + end).split(b"\n\n"):
                fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
                if b"data" in fields:
                    events.append((fields[b"event"].decode(), json.loads(fields[b"data"])))
            yield events

    own = blocks()
    [(kind, hello)] = next(own)
    assert kind == "hello"
    return (connection, own, hello) if told else (connection, own)


def test_places_and_rate_of_one_key_leave_the_others_alone(served):
    with running_with_keys(served) as server, turnstile(served) as held:
        one = stream(server, max_tokens=2)
        for _ in range(KEYS["alice"].per_minute):  # which do not count against its rate
            refused = ask_as(server, "alice", "POST", "/v1/chat/completions", BODY)
            assert refused.status == 429 and json.loads(refused.content)["error"]["code"] == "key_places_full"
        assert int(refused.headers["retry-after"]) >= 1
        held.open()
        collected(one)
        assert answered(server, "bob")
        eventually(lambda: b"probemon_requests_running 0" in ask_as(server, "scraper", "GET", "/metrics").content)
        assert answered(server, "alice")


def test_rate_counts_the_last_minute_and_says_when_to_come_back(monkeypatch):
    now, quotas, key = [100.0], Quotas(), Key("a-secret-of-someone", "a", per_minute=4)
    monkeypatch.setattr("probemon.ops.server.keys.time.monotonic", lambda: now[0])
    quotas.take(key, 1)
    now[0] += 20
    quotas.take(key, 3)
    for n, seconds in ((1, 40), (2, 60)):
        with pytest.raises(app.RequestRefused, match="asked for 4 answers in a minute, and may for 4") as raised:
            quotas.take(key, n)
        assert raised.value.retry_after_seconds == pytest.approx(seconds) and raised.value.status == 429
    with pytest.raises(app.RequestRefused, match="ask for fewer at once") as raised:
        quotas.take(key, 5)
    assert raised.value.status == 400  # it would never be let in
    quotas.take(NOBODY, 100)
    now[0] += 40
    quotas.take(key, 1)
    with pytest.raises(app.RequestRefused):
        quotas.take(key, 1)


def test_choices_and_refused_requests_count_against_the_rate(served):
    with running_with_keys(served) as server:
        many = ask_as(server, "alice", "POST", "/v1/chat/completions", {**BODY, "n": 16})
        assert many.status == 200
        long = {**BODY, "messages": [{"role": "user", "content": "a " * 200}]}  # refused once it is tokenised
        statuses = [ask_as(server, "alice", "POST", "/v1/chat/completions", {**long, "n": 16}).status for _ in range(3)]
        assert statuses == [400, 400, 429]
        assert answered(server, "bob")


def test_streams_of_a_key_that_only_asks_leave_room_for_others(served):
    with running_with_keys(served, subscribers=6) as server, ExitStack() as stack:
        # by its places, by half of all for those that only ask, by its places
        for name, most in (("alice", 1), ("bob", 2), ("reviewer", 1)):
            for _ in range(most):
                stack.callback(follow(server, name)[0].close)
            refused = ask_as(server, name, "GET", "/v1/probemon/events")
            assert refused.status == 429
        stack.callback(follow(server, "both")[0].close)


def test_numbers_of_a_key_that_only_asks_are_its_own(served):
    with running_with_keys(served, kept_events=8) as server:
        connection, _ = follow(server, "bob")
        connection.close()
        for _ in range(3):
            answered(server, "both")
        with turnstile(served):
            running = stream_of_client(server.client.with_options(api_key=KEYS["both"].secret))
            eventually(lambda: b"probemon_requests_running 1" in ask_as(server, "scraper", "GET", "/metrics").content)
            connection, _, hello = follow(server, "bob", last_event_id=0, told=True)
            assert (hello["last_id"], hello["n_running"], hello["n_waiting"]) == (0, 0, 0)
            other, _, hello = follow(server, "reviewer", told=True)
            assert hello["n_running"] == 1 and hello["last_id"] > 8
            other.close()
        collected(running)
        answered(server, "bob")
        own, blocks, _ = follow(server, "bob", last_event_id=0, told=True)
        kinds = [kind for kind, _ in next(blocks)]
        assert kinds[0] == "begin" and "gap" not in kinds  # nothing of its own was lost
        connection.close()
        own.close()


def test_without_records_a_page_sees_what_happens_and_nothing_is_kept(served):
    with running_with_keys(served, kept_requests=0) as server:
        answered(server, "bob")
        assert json.loads(ask_as(server, "root", "GET", "/v1/probemon/requests").content) == {"requests": []}
        deaf, _ = follow(server, "bob")  # holds events that it does not read
        answered(server, "bob", "again")
        connection, stream_of = follow(server, "reviewer", last_event_id=0)
        request = answered(server, "bob", "second")
        events = []
        while not events or events[-1][0] != "end":
            events += next(stream_of)
        assert [data["messages"][0]["content"] for kind, data in events if kind == "begin"] == ["second"]
        gone = ask_as(server, "root", "GET", f"/v1/probemon/requests/{request}")
        assert gone.status == 404 and b"this server keeps none" in gone.content
        connection.close()
        deaf.close()
        gc.collect()
        eventually(lambda: not any(type(one) is Job for one in gc.get_objects()))


def test_without_records_the_ring_keeps_what_a_reader_has_not_read_and_no_more():
    async def kept():
        ring = EventRing(Limits(kept_requests=0))
        ring.publish("token", {"n": 0})
        numbers = [len(ring._events)]
        fast, slow = ring.subscribe(None, dict), ring.subscribe(None, dict)
        for n in range(3):
            ring.publish("token", {"n": n})
            assert ring.read(fast).count(b"event: token") == 1
        numbers.append(len(ring._events))
        assert ring.read(slow).count(b"event: token") == 3
        ring.publish("token", {"n": 4})
        numbers.append(len(ring._events))
        ring.leave(fast)
        ring.leave(slow)
        return [*numbers, len(ring._events), ring.last_id, ring.n_lost]

    assert asyncio.run(kept()) == [0, 3, 1, 0, 5, 0]


def test_events_and_records_end_with_their_minutes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limits = Limits(kept_minutes=2)
    ring, records = EventRing(limits), Records(limits)
    content = {"created": 1, "kind": "completion", "prompt": "a", "choices": []}
    running = records.begin("running", dict(content))
    records.end(records.begin("old", dict(content)))
    ring.publish("end", {"request": "old"})
    now[0] += 100
    records.end(records.begin("new", dict(content)))
    ring.publish("end", {"request": "new"})
    now[0] += 20
    records.forget_old()
    ring.forget_old()
    assert [one["request"] for one in records.list()] == ["new", "running"]
    assert [event.text for event in ring._events] == [b'id: 2\nevent: end\ndata: {"request": "new"}\n\n']
    now[0] += 1000
    assert records.get("new") is None and [one["request"] for one in records.list()] == ["running"]
    records.end(running)


def test_admin_deletes_requests_with_their_events(served):
    with running_with_keys(served) as server:
        first, second, third = (answered(server, "bob", text) for text in ("first", "second", "third"))
        with turnstile(served):
            running = stream(server, max_tokens=2)
            eventually(lambda: b"probemon_requests_running 1" in ask_as(server, "scraper", "GET", "/metrics").content)
            newest = json.loads(ask_as(server, "root", "GET", "/v1/probemon/requests").content)["requests"][0]
            refused = ask_as(server, "root", "DELETE", f"/v1/probemon/requests/{newest['request']}")
            assert refused.status == 409 and b"has not ended" in refused.content
        collected(running)
        assert ask_as(server, "root", "DELETE", f"/v1/probemon/requests/{newest['request']}").status == 200
        deleted = ask_as(server, "root", "DELETE", f"/v1/probemon/requests/{second}")
        assert json.loads(deleted.content) == {"n_deleted": 1}
        assert ask_as(server, "root", "DELETE", f"/v1/probemon/requests/{second}").status == 404
        connection, stream_of = follow(server, "reviewer", last_event_id=0)
        events = next(stream_of)
        assert {data["request"] for _, data in events} == {first, third}
        connection.close()
        assert ask_as(server, "root", "DELETE", "/v1/probemon/requests/").status == 404  # an empty id is not all
        assert json.loads(ask_as(server, "root", "DELETE", "/v1/probemon/requests").content) == {"n_deleted": 2}
        assert json.loads(ask_as(server, "root", "GET", "/v1/probemon/requests").content) == {"requests": []}


@pytest.mark.parametrize("keeps", [False, True])
def test_user_and_metadata_are_kept_only_on_request(served, monkeypatch, keeps):
    monkeypatch.setattr(served, "keep_metadata", keeps)
    with running_with_keys(served) as server:
        given = {"user": "u-17", "metadata": {"ticket": "4"}}
        answer = ask_as(server, "bob", "POST", "/v1/chat/completions", {**BODY, **given})
        request = json.loads(answer.content)["id"]
        record = json.loads(ask_as(server, "bob", "GET", f"/v1/probemon/requests/{request}").content)
        assert {name: record["options"][name] for name in given if name in record["options"]} == (
            given if keeps else {}
        )


def test_admin_reloads_the_deployment_file(parts):  # noqa: F811
    served = served_by(parts, {"concepts": ["c1"], "above": 0.1, "action": "record", "on_blind": "pass"})
    with running_with_keys(served) as server:
        path = served.holding.now.deployment.path
        before, text = served.holding.now.deployment.sha256, path.read_text()
        path.write_text(text.replace("0.1", "0.2"))
        answer = ask_as(server, "root", "POST", "/v1/probemon/reload", {})
        assert answer.status == 200 and json.loads(answer.content)["sha256"] not in (None, before)
        path.write_text("nonsense: [")
        answer = ask_as(server, "root", "POST", "/v1/probemon/reload", {})
        assert answer.status == 400 and b"the previous file still applies" in answer.content
        assert answered(server, "bob")

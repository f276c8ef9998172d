"""Requests without the right host, origin, token, content type or size are refused on every route."""

import json
import socket

import pytest

from probemon.ops.server.guard import HEADERS
from running_server import Running

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/probemon/pack"),
    ("GET", "/v1/probemon/concepts/x"),
    ("GET", "/v1/probemon/events"),
    ("GET", "/v1/probemon/requests"),
    ("GET", "/openapi.json"),
    ("DELETE", "/v1/probemon/requests"),
    ("GET", "/v1/probemon/requests/x"),
    ("DELETE", "/v1/probemon/requests/x"),
    ("POST", "/v1/probemon/reload"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models/tiny"),
]
OPEN = [("GET", "/"), ("GET", "/page/index.html"), ("GET", "/healthz"), ("GET", "/readyz")]
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def ask(server, method, path, **headers):
    return server.ask(method, path, {} if method == "POST" else None, **headers)


def test_tested_routes_are_all_routes(server):
    paths = {route.path for route in server.app._app.routes}
    listed = {
        path.replace("/tiny", "/{name:path}").replace("/x", "/{name}").replace("/0", "/{index}") for _, path in ROUTES
    }
    assert paths <= listed | {"/", "/page/{name}", "/healthz", "/readyz"}


@pytest.mark.parametrize("method, path", [*ROUTES, *OPEN])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "[::2]", None]
)
def test_foreign_host_header_is_refused(server, method, path, host):
    answer = ask(server, method, path, Host=host)
    assert answer.status == 400


@pytest.mark.parametrize("method, path", [*ROUTES, *OPEN])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://"])
def test_foreign_origin_is_refused(server, method, path, origin):
    answer = ask(server, method, path, Origin=origin)
    assert answer.status == 403 and json.loads(answer.content)["error"]["code"] == "origin"
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method, path", ROUTES)
@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", "Basic {token}", "Bearer {token}x", "Bearer \xff"])
def test_request_without_the_right_token_is_unauthorised(server, method, path, given):
    given = given and given.format(token=server.token)
    answer = ask(server, method, path, Authorization=given)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("method, path", OPEN)
def test_open_routes_need_no_token_and_reveal_no_secret(server, method, path):
    answer = ask(server, method, path, Authorization=None)
    assert answer.status == 200 and server.token.encode() not in answer.content


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
def test_content_type_that_a_form_can_send_is_refused(server, path, kind):
    assert server.ask("POST", path, BODY, Content_Type=kind).status == 415


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_server_on_all_addresses_accepts_only_the_address_it_was_reached_at(served, host):
    running = Running(served, host=host)
    try:
        own = f"127.0.0.1:{running.port}"
        for method, path in [*ROUTES[2:3], ROUTES[4], *OPEN]:
            assert running.ask(method, path, Host=own, Origin=f"http://{own}").status == 200
            assert running.ask(method, path, Host=own, Origin="http://127.0.0.1").status == 403
            for other in ("evil.example", "127.0.0.2", "localhost", "127.0.0.1.evil.example"):
                assert running.ask(method, path, Host=f"{other}:{running.port}").status == 400
        assert running.ask("GET", "/v1/models", Authorization=None).status == 401
    finally:
        running.close()


def test_own_host_names_and_origin_are_accepted(server):
    for name in ("localhost", "127.0.0.1", "LOCALHOST", "[::1]"):
        host = f"{name}:{server.port}"
        answer = server.ask("POST", "/v1/chat/completions", BODY, Host=host, Origin=f"http://{host.lower()}")
        assert answer.status == 200


@pytest.mark.parametrize("method, path", [*ROUTES[2:5], ROUTES[-2], *OPEN])
def test_every_response_has_the_security_headers(server, method, path):
    for headers in ({}, {"Host": "evil.example"}):
        answer = ask(server, method, path, **headers)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_body_over_the_limit_is_refused_with_or_without_a_length(server):
    body = json.dumps({**BODY, "user": "a" * server.limits.body_bytes}).encode()
    for _ in range(5):  # a client that still sends its body sees the answer
        assert server.ask("POST", "/v1/chat/completions", body + b" " * (20 << 20)).status == 413
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    answer = server.ask("POST", "/v1/chat/completions", chunked, Content_Length=None, Transfer_Encoding="chunked")
    assert answer.status == 413
    answer = server.ask("POST", "/v1/chat/completions", b"", Content_Length=str(10**30))
    assert answer.status in (400, 413)  # no length that HTTP knows


@pytest.mark.parametrize("name", ["..%2f__init__.py", "../../serving/app.py", "..%2F..%2Fapp.py", "%00", "nothing.js"])
def test_no_file_outside_the_page_folder_is_served(server, name):
    answer = server.ask("GET", f"/page/{name}")
    assert answer.status == 404 and b"import" not in answer.content


def test_bytes_that_are_no_request_get_the_error_object(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"


def test_head_request_of_events_ends_and_takes_no_subscriber(server):
    answer = server.ask("HEAD", "/v1/probemon/events")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert not answer.content and b"probemon_subscribers 0.0" in server.ask("GET", "/metrics").content


def test_server_without_a_token_still_checks_host_and_origin(served):
    running = Running(served, token=None)
    try:
        assert running.ask("GET", "/v1/models", Authorization=None).status == 200
        assert running.ask("GET", "/v1/models", Authorization=None, Host="evil.example").status == 400
        assert running.ask("GET", "/v1/models", Authorization=None, Origin="http://evil.example").status == 403
    finally:
        running.close()

"""What a hostile client sends is refused or cut off, each alone and all at once, and the server goes on answering.

Hosts, origins, keys, types and sizes are in `test_guard.py`, clients that stall or leave in `test_traffic.py`, bodies
in `test_requests.py`.
"""

import os
import re
import socket
import time
from contextlib import ExitStack

import pytest
from test_answers import CHAT, collected, stream

from running_server import LIMITS, Running, eventually


def exchange(server, data):
    """Send bytes; what came until the server closed or was silent for a second."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.settimeout(3)
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionError):
            pass
        return answer


def head(server, start, *more, connection="close"):
    lines = [
        start,
        f"Host: 127.0.0.1:{server.port}",
        f"Connection: {connection}",
        f"Authorization: Bearer {server.token}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def statuses(answer):
    return [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d{3})", answer, re.MULTILINE)]


@pytest.mark.parametrize(
    "start, more, status",
    [
        ("GET /v1/models HTTP/1.1", ("Host: evil.example",), 400),  # two of them
        ("GET /v1/models HTTP/1.1", ("Authorization: Bearer another",), 401),
        ("GET http://evil.example/v1/models HTTP/1.1", (), 404),
        ("GET /v1/models HTTP/1.1", ("X: " + "a" * (1 << 20),), 400),
        ("GET /" + "a" * 200_000 + " HTTP/1.1", (), 400),
        ("TRACE /v1/models HTTP/1.1", ("Content-Type: application/json",), 405),
        ("OPTIONS /v1/chat/completions HTTP/1.1", ("Origin: http://evil.example",), 403),
        ("GET /v1/probemon/events HTTP/1.0 HTTP/1.1", (), 400),
        ("GET //v1/models HTTP/1.1", (), 404),
        ("GET /v1/../v1/models HTTP/1.1", (), 404),
        ("POST /v1/chat/completions HTTP/1.1", ("Content-Type: application/json", "Transfer-Encoding: gzip"), 400),
        ("POST /v1/chat/completions HTTP/1.1", ("Content-Type: application/json", "Content-Length: -1"), 400),
    ],
)
def test_odd_request_is_refused(server, start, more, status):
    (got,) = set(statuses(exchange(server, head(server, start, *more))))
    assert got == status


def test_key_in_the_address_does_not_count_and_is_not_told_back(server):
    answer = server.ask("GET", f"/v1/models?token={server.token.replace(' ', '+')}", Authorization=None)
    assert answer.status == 401 and server.token.encode() not in answer.content


def test_websocket_is_not_begun(server):
    more = ("Upgrade: websocket", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13")
    answer = exchange(server, head(server, "GET /v1/probemon/pack HTTP/1.1", *more, connection="Upgrade"))
    assert statuses(answer) == [200]  # as if it had not been asked for


def test_flood_of_half_requests_and_readers_ends_and_leaves_nothing(served):
    server = Running(served, patience_seconds=1.0)
    try:
        expected = collected(stream(server, temperature=0, max_tokens=8))[0]
        n_before = len(os.listdir("/proc/self/fd"))
        body = head(
            server, "POST /v1/chat/completions HTTP/1.1", "Content-Type: application/json", "Content-Length: 500"
        )
        reader = head(server, "GET /v1/probemon/events HTTP/1.1")
        with ExitStack() as stack:
            for data, n in ((b"GET /v1/models HT", 60), (body + b'{"model"', 40), (reader, LIMITS.subscribers + 6)):
                for _ in range(n):
                    one = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    one.sendall(data)
            begun = time.monotonic()
            assert server.ask("GET", "/healthz").status == 200 and time.monotonic() - begun < 5
            assert server.ask("GET", "/v1/probemon/events").status == 429
            assert collected(stream(server, temperature=0, max_tokens=8))[0] == expected
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= n_before, seconds=30)
        assert server.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": CHAT}).status == 200
    finally:
        server.close()

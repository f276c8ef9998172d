"""Guard: what every request has to pass before it reaches a route, and the headers that every answer bears.

app = Guard(app, hosts={"127.0.0.1", "localhost", "[::1]"}, token="...", body_bytes=1 << 20)

A page of another site can reach a server on this machine: by a name that it resolves to 127.0.0.1 (so the Host is
checked), by a form or a script of its own (so the Origin is, and bodies have to be JSON, which no form can send). What
is not in `_OPEN` needs the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from probemon.errors import RequestRefused
from probemon.ops.server.answers import error_object

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/healthz", "/readyz")  # and what is below /page/: they hold nothing of anybody's
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """`hosts`: the names by which the server may be called, in small letters; `token` None: none is asked for.

    `stop()`: ends the streams that do not end by themselves, before the server ends.
    """

    def __init__(
        self,
        app: App,
        *,
        hosts: Collection[str],
        token: str | None,
        body_bytes: int,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._app, self._hosts, self._body_bytes = app, frozenset(hosts), body_bytes
        self.stop = stop
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send = _with_headers(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await answer(send, *refusal)
            return
        n_received = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal n_received
            part = await receive()
            n_received += len(part.get("body") or b"")
            if n_received > self._body_bytes:
                message, code = self._too_large()
                raise RequestRefused(message, status=413, code=code)
            return part

        await self._app(scope, counted, send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Return status, message and code of why a request is not let in; None where it is."""
        headers = _Headers(scope)
        host = (headers.only("host") or "").lower()
        matched = _HOST.fullmatch(host)
        if matched is None or not (matched[1] in self._hosts or matched[1] == _address_reached(scope)):
            return 400, f"this server is not called {host!r:.100}: see probemon serve --allow-host", "host"
        origin = headers.values("origin")
        if origin and [one.lower() for one in origin] not in ([f"http://{host}"], [f"https://{host}"]):
            return 403, f"pages of {', '.join(origin)!r:.100} may not ask this server", "origin"
        if not self._is_open(scope["path"]) and not self._has_token(headers):
            return 401, "give the token that the server printed, as Authorization: Bearer", "token"
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            kind = (headers.only("content-type") or "").split(";")[0].strip().lower()
            if kind != "application/json":
                return 415, f"the body is {kind!r:.100}: send Content-Type: application/json", "content_type"
        length = headers.only("content-length") or "0"
        if not length.isdigit() or int(length[:20]) > self._body_bytes:
            return 413, *self._too_large()
        return None

    def _is_open(self, path: str) -> bool:
        return path in _OPEN or path.startswith("/page/")

    def _has_token(self, headers: _Headers) -> bool:
        if self._token is None:
            return True
        kind, _, given = (headers.only("authorization") or "").partition(" ")
        return hmac.compare_digest(given.strip().encode(), self._token) and kind.lower() == "bearer"

    def _too_large(self) -> tuple[str, str]:
        return f"the body has more than {self._body_bytes:,} bytes: shorten it", "body_too_large"


def _address_reached(scope: Scope) -> str | None:
    """Return the address of this machine at which a request came, as a Host has it.

    It is a name of the server, wherever that listens: a site that has its own name lead here can give no other.
    """
    try:
        address = ipaddress.ip_address((scope.get("server") or ("",))[0].partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return f"[{address}]" if address.ipv4_mapped is None else str(address.ipv4_mapped)


class _Headers:
    """The headers of a request, names in small letters."""

    def __init__(self, scope: Scope) -> None:
        self._given = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def values(self, name: str) -> list[str]:
        return [value for given, value in self._given if given == name]

    def only(self, name: str) -> str | None:
        """Return the one header of this name; None where there is none, or several."""
        values = self.values(name)
        return values[0] if len(values) == 1 else None


async def answer(send: Send, status: int, message: str, code: str) -> None:
    """Send an error. The connection stays: closed now, a client that still sends its body would not see the answer."""
    body = json.dumps(error_object(message, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sent

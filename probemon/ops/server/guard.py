"""Checks requests before they reach a route, and adds headers to responses.

Pages of other sites can reach a local server, so Host and Origin are checked. Bodies must be JSON, which no form can
send. Paths outside `_OPEN` need a key; what it may do, routes check (`check_may`).
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from probemon.errors import RequestRefused
from probemon.ops.server.answers import error_object
from probemon.ops.server.keys import NOBODY, STRANGER, Key, key_of

LOG = logging.getLogger("probemon")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/healthz", "/readyz")  # also /page/...: nothing private
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
    """`hosts`: lowercase; `keys`: of clients; none: not required.

    `stop()`: ends streams that never end by themselves; `cut()`: ends all others.
    """

    def __init__(
        self,
        app: App,
        *,
        hosts: Collection[str],
        keys: Collection[Key],
        body_bytes: int,
        stop: Callable[[], None] = lambda: None,
        cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._app, self._hosts, self._body_bytes = app, frozenset(hosts), body_bytes
        self.stop, self.cut = stop, cut
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send = _with_headers(send)
        key = self._key(_Headers(scope))
        scope.setdefault("state", {})["key"] = key or STRANGER  # who reaches only open paths
        refusal = self._refusal(scope, key)
        if refusal is not None:
            LOG.info("%s %.100r refused: %s", scope["method"], scope["path"], refusal[2], extra={"outcome": refusal[2]})
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

    def _refusal(self, scope: Scope, key: Key | None) -> tuple[int, str, str] | None:
        """Return status, message and code; None if the request is let in."""
        headers = _Headers(scope)
        host = (headers.only("host") or "").lower()
        matched = _HOST.fullmatch(host)
        if matched is None or not (matched[1] in self._hosts or matched[1] == _address_reached(scope)):
            return 400, f"this server is not called {host!r:.100}: see probemon serve --allow-host", "host"
        origin = headers.values("origin")
        if origin and [one.lower() for one in origin] not in ([f"http://{host}"], [f"https://{host}"]):
            return 403, f"pages of {', '.join(origin)!r:.100} may not ask this server", "origin"
        if key is None and not self._is_open(scope["path"]):
            return 401, "give the server's API key as Authorization: Bearer", "token"
        if scope["method"] not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            kind = (headers.only("content-type") or "").split(";")[0].strip().lower()
            if kind != "application/json":
                return 415, f"the body is {kind!r:.100}: send Content-Type: application/json", "content_type"
        length = headers.only("content-length") or "0"
        if not length.isdigit() or int(length[:20]) > self._body_bytes:
            return 413, *self._too_large()
        return None

    def lets_in(self, scope: Scope) -> bool:
        """True if a request has a key, or none is required."""
        return self._key(_Headers(scope)) is not None

    def _is_open(self, path: str) -> bool:
        return path in _OPEN or path.startswith("/page/")

    def _key(self, headers: _Headers) -> Key | None:
        if not self._keys:
            return NOBODY
        kind, _, credentials = (headers.only("authorization") or "").partition(" ")
        return key_of(self._keys, credentials.strip()) if kind.lower() == "bearer" else None

    def _too_large(self) -> tuple[str, str]:
        return f"the body has more than {self._body_bytes:,} bytes: shorten it", "body_too_large"


def check_may(state: Any, *roles: str) -> Key:
    """Return the key of a request (`http.state`). Raises `RequestRefused` if it has none of the roles."""
    key: Key = state.key
    if not key.may(*roles):
        raise RequestRefused(
            f"key {key.name} has the role {', '.join(sorted(key.roles))}; this route is for {' or '.join(roles)}",
            status=403,
            code="role",
        )
    return key


def _address_reached(scope: Scope) -> str | None:
    """Return the local address that was reached, as a Host header has it.

    It is always accepted: pages under a foreign name cannot send it.
    """
    try:
        address = ipaddress.ip_address((scope.get("server") or ("",))[0].partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return f"[{address}]" if address.ipv4_mapped is None else str(address.ipv4_mapped)


class _Headers:
    """Header names are in lowercase."""

    def __init__(self, scope: Scope) -> None:
        self._given = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def values(self, name: str) -> list[str]:
        return [value for header, value in self._given if header == name]

    def only(self, name: str) -> str | None:
        """Return the header; None if there is none, or several."""
        values = self.values(name)
        return values[0] if len(values) == 1 else None


async def answer(send: Send, status: int, message: str, code: str) -> None:
    """Send an error. The connection stays open, so that clients still sending see it."""
    body = json.dumps(error_object(message, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            missing = [
                (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in present
            ]
            message = {**message, "headers": [*message["headers"], *missing]}
        await send(message)

    return sent

"""Cuts off connections that never complete a request's head, or never take what was sent.

uvicorn.Config(app, http=impatient_protocol(seconds=30))

uvicorn would keep either, and its file descriptor, without limit.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from probemon.ops.server.answers import error_object

ABORT = "probemon.abort"  # in a scope's extensions: cuts the connection off
_BUSY = object()


def impatient_protocol(seconds: float) -> type:
    """Return uvicorn's HTTP protocol; it checks its connection every `seconds`, and its own errors are JSON."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        _look: asyncio.TimerHandle | None = None
        _idle_after: Any = None  # the last request when it was idle

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            routes = self.app

            async def app(scope: Any, receive: Any, send: Any) -> None:
                scope.setdefault("extensions", {})[ABORT] = self.transport.abort
                await routes(scope, receive, send)

            self.app = app

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look = self.loop.call_later(seconds, self._cut_if_idle)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            body = json.dumps(error_object(f"{msg}: this is no HTTP/1.1 request", code="invalid_http")).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.close()

        def _cut_if_idle(self) -> None:
            """Cut the connection off if it was idle at two checks, without a request between."""
            idle = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
            if idle and self.cycle is self._idle_after:
                self.transport.abort()
                return
            self._idle_after = self.cycle if idle else _BUSY
            self._look = self.loop.call_later(seconds, self._cut_if_idle)

    return Impatient

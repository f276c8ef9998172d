"""Connections that keep nobody waiting: who never ends a request's head, or never takes what was sent, is cut off.

uvicorn.Config(app, http=impatient_protocol(seconds=30))
scope["extensions"][ABORT]()               # in a request: its client takes nothing, so its connection goes

uvicorn waits for the head of a request for ever, and a connection that it closes stays until all that was sent is
taken. Either would hold a file descriptor for as long as a client likes.
"""

from __future__ import annotations

import asyncio
from typing import Any

ABORT = "probemon.abort"  # what cuts a request's connection off at once, among the extensions of its scope
_BUSY = object()


def impatient_protocol(seconds: float) -> type:
    """Return uvicorn's HTTP protocol, which looks every `seconds` at what its connection does."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        _look: asyncio.TimerHandle | None = None
        _idle_after: Any = None  # the request after which nothing was asked when it was last looked at

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

        def _cut_if_idle(self) -> None:
            """Cut it where no request is being answered, or it is closing, and no other was since the last look."""
            idle = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
            if idle and self.cycle is self._idle_after:
                self.transport.abort()
                return
            self._idle_after = self.cycle if idle else _BUSY
            self._look = self.loop.call_later(seconds, self._cut_if_idle)

    return Impatient

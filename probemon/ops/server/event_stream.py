"""A text/event-stream response that ends when the client leaves or stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

from starlette.types import Receive, Scope, Send

from probemon.errors import RequestRefused
from probemon.ops.server.connections import ABORT

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # no buffering by proxies
]


class EventStream:
    """An ASGI response. `on_end()` is called once, even if it never began."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        *,
        on_end: Callable[[], None] = lambda: None,
        stalled_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._chunks, self._on_end, self._stalled_seconds = chunks, on_end, stalled_seconds
        self._headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in (headers or {}).items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send chunks until the client leaves, or takes nothing for `stalled_seconds`."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_end()
            for task in (sending, leaving):
                task.cancel()
            results = await asyncio.gather(sending, leaving, return_exceptions=True)
        if isinstance(results[0], TimeoutError):
            scope["extensions"][ABORT]()
            await asyncio.sleep(0)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, (TimeoutError, OSError)):
                raise result

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                if chunk:
                    await self._send_body(send, chunk, more_body=True)
        await self._send_body(send, b"", more_body=False)

    async def _send_body(self, send: Send, body: bytes, *, more_body: bool) -> None:
        async with asyncio.timeout(self._stalled_seconds):  # unlike wait_for, it makes no task
            await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone or sends too much."""
    with suppress(RequestRefused):
        while (await receive())["type"] != "http.disconnect":
            pass

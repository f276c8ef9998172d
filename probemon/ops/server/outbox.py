"""Outbox: what one request's answer consists of, from the thread that generates it to the loop that sends it.

outbox = Outbox(most_bytes=1 << 20, stalled_seconds=30)
outbox.put(piece, n_bytes=120)             # the thread that generates; Stalled where nobody reads for too long
async for piece in outbox: ...             # the loop, up to finish()
outbox.leave()                             # the reader has gone
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any


class Stalled(Exception):
    """The reader of an answer has read nothing for too long."""


class Outbox:
    """Made in the loop that reads. At most `most_bytes` wait for it; then `put` waits, `stalled_seconds` long."""

    def __init__(self, most_bytes: int, stalled_seconds: float) -> None:
        self._most_bytes, self._stalled_seconds = most_bytes, stalled_seconds
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._changed = threading.Condition()  # guards what follows
        self._pieces: deque[tuple[Any, int]] = deque()
        self._n_bytes, self._finished, self._left = 0, False, False

    @property
    def left(self) -> bool:
        """Whether the reader has gone."""
        return self._left

    def put(self, piece: Any, n_bytes: int, *, wait: bool = True) -> None:
        """Add a piece; nothing where the reader has gone. Raises `Stalled`; without `wait` nothing is waited for."""
        with self._changed:
            has_room = not wait or self._changed.wait_for(
                lambda: self._left or self._n_bytes < self._most_bytes, self._stalled_seconds
            )
            if not has_room:
                raise Stalled
            if not self._left:
                self._pieces.append((piece, n_bytes))
                self._n_bytes += n_bytes
        self._wake()

    def finish(self) -> None:
        """Say that there will be no more."""
        with self._changed:
            self._finished = True
        self._wake()

    def leave(self) -> None:
        """Say that nobody reads any more: what waits is forgotten, and so is what comes."""
        with self._changed:
            self._left = True
            self._pieces.clear()
            self._changed.notify_all()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            self._news.clear()
            with self._changed:
                pieces, self._n_bytes = [piece for piece, _ in self._pieces], 0
                self._pieces.clear()
                finished = self._finished or self._left
                self._changed.notify_all()
            for piece in pieces:
                yield piece
            if finished:
                return
            await self._news.wait()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is closed: the server has ended
            self._left = True

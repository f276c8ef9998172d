"""Passes one answer from the generating thread to the server's loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any


class Stalled(Exception):
    """The reader has read nothing for too long."""


class Outbox:
    """Created in the loop that reads. With `most_bytes` queued, `put` waits up to `stalled_seconds`."""

    def __init__(self, most_bytes: int, stalled_seconds: float) -> None:
        self._most_bytes, self._stalled_seconds = most_bytes, stalled_seconds
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._changed = threading.Condition()  # guards the fields below
        self._pieces: deque[tuple[Any, int]] = deque()
        self._n_bytes, self._finished, self._left = 0, False, False

    @property
    def left(self) -> bool:
        """True if the reader has gone."""
        return self._left

    def put(self, piece: Any, n_bytes: int, *, wait: bool = True) -> None:
        """Add a piece, unless the reader has gone. Raises `Stalled`; with `wait=False` it never waits."""
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
        """End after the queued pieces."""
        with self._changed:
            self._finished = True
        self._wake()

    def cut(self, piece: Any) -> None:
        """End with one more piece: what is not read yet is dropped, and nothing more is taken."""
        with self._changed:
            if not (self._left or self._finished):
                self._pieces.clear()
                self._pieces.append((piece, 0))
            self._left = True
            self._changed.notify_all()
        self._wake()

    def leave(self) -> None:
        """Drop all pieces: the reader has gone."""
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

"""EventRing: what happens on a server, kept for a while, and read by subscribers who may be slow, leave and come back.

ring = EventRing(limits)
ring.publish("token", {...})                       # any thread; never waits for a subscriber
subscriber = ring.subscribe(after=17, hello=dict)  # in the server's loop; after: the last id that was received
async for chunk in subscriber.chunks(): ...        # bytes of text/event-stream
ring.leave(subscriber)
ring.close()                                       # ends what subscribers read: the server ends

There is one ring for all: a subscriber is a place in it, so that one who never reads costs nothing. Who is further
behind than what is kept is told by a `gap` how many events it lost, and which.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from probemon.errors import RequestRefused
from probemon.ops.server.limits import Limits

_RETRY_MILLISECONDS = 1000
_PING_SECONDS = 15.0  # of silence, after which a comment keeps the connection
# Before the newest events are sent: to few pages soon, to many several together, since each sending takes time from
# the generation.
_WAIT_SECONDS, _WAIT_SECONDS_BY_SQUARE, _MOST_WAIT_SECONDS = 0.004, 0.0002, 0.5


class EventRing:
    """`boot`: of this server, at random, by which a client knows that ids began anew."""

    def __init__(self, limits: Limits) -> None:
        self.boot = secrets.token_hex(8)
        self.closed = False
        self.n_lost = 0  # events that subscribers lost, over all of them
        self._limits = limits
        self._lock = threading.Lock()  # guards what follows
        self._events: deque[bytes] = deque()
        self._first_id, self._n_bytes = 1, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscribers: list[Subscriber] = []
        self._wake_is_due = False

    @property
    def last_id(self) -> int:
        """Return the id of the newest event, 0 before the first."""
        return self._first_id + len(self._events) - 1

    @property
    def n_subscribers(self) -> int:
        """Return how many there are."""
        return len(self._subscribers)

    def n_behind(self) -> int:
        """Return how many events are lost to subscribers who have not read far enough yet to be told."""
        with self._lock:
            return sum(max(0, self._first_id - one.next_id) for one in self._subscribers)

    def publish(self, kind: str, content: Mapping[str, Any] | str) -> None:
        """Add an event; `content` may be JSON already."""
        text = content if isinstance(content, str) else json.dumps(content, allow_nan=False)
        with self._lock:
            event = f"id: {self.last_id + 1}\nevent: {kind}\ndata: {text}\n\n".encode()
            self._events.append(event)
            self._n_bytes += len(event)
            while len(self._events) > self._limits.kept_events or (
                self._n_bytes > self._limits.kept_events_bytes and len(self._events) > 1
            ):
                self._n_bytes -= len(self._events.popleft())
                self._first_id += 1
            if self._subscribers and not self._wake_is_due and self._loop is not None:
                self._wake_is_due = True
                wait = min(_MOST_WAIT_SECONDS, _WAIT_SECONDS + _WAIT_SECONDS_BY_SQUARE * len(self._subscribers) ** 2)
                _call_in(self._loop, self._loop.call_later, wait, self._wake)

    def subscribe(self, after: int | None, hello: Callable[[], Mapping[str, Any]]) -> Subscriber:
        """Return a subscriber, in the loop that asks, for the events after an id, or from now on.

        `hello()`: what it is told first, beside the ring's own. Raises `RequestRefused`.
        """
        if len(self._subscribers) >= self._limits.subscribers:
            raise RequestRefused(
                f"{len(self._subscribers)} pages are subscribed, as many as may be: close one",
                status=429,
                code="too_many_subscribers",
            )
        with self._lock:
            self._loop = asyncio.get_running_loop()
            newest = self.last_id
            subscriber = Subscriber(self, newest + 1 if after is None or after > newest else after + 1, hello)
            self._subscribers.append(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Forget a subscriber."""
        with self._lock:
            self._subscribers.remove(subscriber)
            self.n_lost += max(0, self._first_id - subscriber.next_id)  # it will not be told any more

    def read(self, subscriber: Subscriber) -> bytes:
        """Return what is new for a subscriber, with the gap before it."""
        with self._lock:
            oldest, chunks = self._first_id, list[bytes]()
            if subscriber.next_id < oldest:
                gap = {
                    "n_dropped": oldest - subscriber.next_id,
                    "from_id": subscriber.next_id,
                    "to_id": oldest - 1,
                }
                self.n_lost += gap["n_dropped"]
                chunks.append(f"id: {oldest - 1}\nevent: gap\ndata: {json.dumps(gap)}\n\n".encode())
                subscriber.next_id = oldest
            chunks += islice(self._events, subscriber.next_id - oldest, None)
            subscriber.next_id = self.last_id + 1
        return b"".join(chunks)

    def close(self) -> None:
        """End the streams of all subscribers, in the server's loop."""
        self.closed = True
        self._wake()

    # -- inside ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._lock:
            self._wake_is_due = False
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber.news.set()


class Subscriber:
    """A place in the ring. It alone reads from there."""

    def __init__(self, ring: EventRing, next_id: int, hello: Callable[[], Mapping[str, Any]]) -> None:
        self.next_id, self.news = next_id, asyncio.Event()
        self._ring, self._hello = ring, hello

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield `hello`, and then events as they come, several together; a comment where none come for long."""
        ring = self._ring
        hello = {"boot": ring.boot, "last_id": self.next_id - 1, "subscribers": ring.n_subscribers, **self._hello()}
        yield f"retry: {_RETRY_MILLISECONDS}\nevent: hello\ndata: {json.dumps(hello)}\n\n".encode()
        while not ring.closed:
            self.news.clear()
            chunk = ring.read(self)
            if chunk:
                yield chunk
                continue
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await self.news.wait()
            except TimeoutError:
                yield b": nothing new\n\n"


def _call_in(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    """Have a loop make a call; one that is closed has nobody left to tell."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(*call)

"""Events of a server, kept for a while for subscribers that may be slow, leave and come back.

Subscribers are positions in one ring, so slow ones cost nothing. One that falls too far behind gets a `gap`: how many
events it lost. A key that may not read all has a ring of its own, whose ids tell nothing of others.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from probemon.errors import RequestRefused
from probemon.ops.server.keys import Key, check_places
from probemon.ops.server.limits import Limits

_RETRY_MILLISECONDS = 1000
_PING_SECONDS = 15.0
# Longer with many pages, since sending takes time from generation.
_WAIT_SECONDS, _WAIT_SECONDS_BY_SQUARE, _MOST_WAIT_SECONDS = 0.004, 0.0002, 0.5


class Event(NamedTuple):
    """An event as it is sent, and its request; `at`: seconds of the monotonic clock."""

    text: bytes
    request: str
    at: float


class EventRing:
    """`boot`: random, so that clients notice when ids restart."""

    def __init__(self, limits: Limits, boot: str = "") -> None:
        self.boot = boot or secrets.token_hex(8)
        self.closed = False
        self.n_lost = 0
        self._limits = limits
        self._lock = threading.Lock()  # guards the fields below
        self._events: deque[Event] = deque()
        self._first_id, self._n_bytes = 1, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscribers: list[Subscriber] = []
        self._wake_is_due = False

    @property
    def last_id(self) -> int:
        """Id of the newest event; 0 before the first."""
        return self._first_id + len(self._events) - 1

    @property
    def n_subscribers(self) -> int:
        """Number of subscribers."""
        return len(self._subscribers)

    def names(self) -> list[str]:
        """Return the names of its subscribers' keys."""
        with self._lock:
            return [one.name for one in self._subscribers]

    def n_behind(self) -> int:
        """Return how many events are lost, not yet reported by a `gap`."""
        with self._lock:
            return sum(max(0, self._first_id - one.next_id) for one in self._subscribers)

    def publish(self, kind: str, content: Mapping[str, Any] | str, request: str = "") -> None:
        """Add an event of a request; `content` may be JSON already."""
        text = content if isinstance(content, str) else json.dumps(content, allow_nan=False)
        with self._lock:
            event = f"id: {self.last_id + 1}\nevent: {kind}\ndata: {text}\n\n".encode()
            self._events.append(Event(event, request, time.monotonic()))
            self._n_bytes += len(event)
            while len(self._events) > self._limits.kept_events or (
                self._n_bytes > self._limits.kept_events_bytes and len(self._events) > 1
            ):
                self._drop_oldest()
            self._drop_read()
            if self._subscribers and not self._wake_is_due and self._loop is not None:
                self._wake_is_due = True
                wait = min(_MOST_WAIT_SECONDS, _WAIT_SECONDS + _WAIT_SECONDS_BY_SQUARE * len(self._subscribers) ** 2)
                _call_in(self._loop, self._loop.call_later, wait, self._wake)

    def subscribe(self, after: int | None, hello: Callable[[], Mapping[str, Any]], name: str = "") -> Subscriber:
        """Return a subscriber, with its key's name, to the events after an id; None, or without records: new ones.

        Call it in the server's loop. `hello()`: fields of the first event. Raises `RequestRefused` beyond the limit.
        """
        _check_room(self.n_subscribers, self._limits.subscribers)
        with self._lock:
            self._loop = asyncio.get_running_loop()
            newest = self.last_id
            if after is None or after > newest or not self._limits.kept_requests:
                after = newest
            subscriber = Subscriber(self, after + 1, hello, name)
            self._subscribers.append(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a subscriber."""
        with self._lock:
            self._subscribers.remove(subscriber)
            self.n_lost += max(0, self._first_id - subscriber.next_id)
            self._drop_read()

    def read(self, subscriber: Subscriber) -> bytes:
        """Return the new events, after a gap if some are lost."""
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
            chunks += [event.text for event in islice(self._events, subscriber.next_id - oldest, None)]
            subscriber.next_id = self.last_id + 1
            self._drop_read()
        return b"".join(chunks)

    def forget_old(self) -> None:
        """Drop events older than `kept_minutes`."""
        if self._limits.kept_minutes:
            oldest = time.monotonic() - 60 * self._limits.kept_minutes
            with self._lock:
                while self._events and self._events[0].at <= oldest:
                    self._drop_oldest()

    def delete(self, requests: Collection[str]) -> None:
        """Empty the events of these requests; ids stay."""
        with self._lock:
            for at, event in enumerate(self._events):
                if event.request in requests:
                    self._n_bytes -= len(event.text)
                    self._events[at] = event._replace(text=b"")

    def close(self) -> None:
        """End all streams, in the server's loop."""
        self.closed = True
        self._wake()

    # -- inside ----------------------------------------------------------------------------------

    def _drop_oldest(self) -> None:
        self._n_bytes -= len(self._events.popleft().text)
        self._first_id += 1

    def _drop_read(self) -> None:
        """Without records, drop what every subscriber has read."""
        if not self._limits.kept_requests:
            unread = min((one.next_id for one in self._subscribers), default=self.last_id + 1)
            while self._events and self._first_id < unread:
                self._drop_oldest()

    def _wake(self) -> None:
        with self._lock:
            self._wake_is_due = False
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber.news.set()


class Rings:
    """A ring of all events, and one for each key that reads only its own; made at its first subscriber."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._all = limits, EventRing(limits)
        self._own: dict[str, EventRing] = {}

    @property
    def boot(self) -> str:
        """That of the server."""
        return self._all.boot

    @property
    def n_subscribers(self) -> int:
        """Number of subscribers."""
        return sum(ring.n_subscribers for ring in self._rings())

    @property
    def n_lost(self) -> int:
        """Events that subscribers lost."""
        return sum(ring.n_lost for ring in self._rings())

    def n_behind(self) -> int:
        """Return how many events are lost, not yet reported by a `gap`."""
        return sum(ring.n_behind() for ring in self._rings())

    def publish(self, kind: str, content: Mapping[str, Any] | str, request: str, owner: str) -> None:
        """Add an event of a key's request; `content` may be JSON already."""
        text = content if isinstance(content, str) else json.dumps(content, allow_nan=False)
        self._all.publish(kind, text, request)
        own = self._own.get(owner)
        if own is not None:
            own.publish(kind, text, request)

    def subscribe(self, after: int | None, hello: Callable[[], Mapping[str, Any]], key: Key) -> Subscriber:
        """Return a subscriber to what a key may read, as `EventRing.subscribe` does.

        Keys that read only their own have at most half of the places. Raises `RequestRefused`.
        """
        if key.reads is None:
            ring = self._all
        else:
            ring = self._own.get(key.reads) or EventRing(self._limits, self.boot)
            self._own[key.reads] = ring
            _check_room(sum(one.n_subscribers for one in self._own.values()), max(1, self._limits.subscribers // 2))
        check_places(key, (name for one in self._rings() for name in one.names()), "streams of events")
        _check_room(self.n_subscribers, self._limits.subscribers)
        return ring.subscribe(after, hello, key.name)

    def forget_old(self) -> None:
        """Drop events older than `kept_minutes`."""
        for ring in self._rings():
            ring.forget_old()

    def delete(self, requests: Collection[str]) -> None:
        """Empty the events of these requests."""
        for ring in self._rings():
            ring.delete(requests)

    def close(self) -> None:
        """End all streams, in the server's loop."""
        for ring in self._rings():
            ring.close()

    def _rings(self) -> list[EventRing]:
        return [self._all, *list(self._own.values())]


class Subscriber:
    """A position in the ring."""

    def __init__(self, ring: EventRing, next_id: int, hello: Callable[[], Mapping[str, Any]], name: str) -> None:
        self.name, self.next_id, self.news = name, next_id, asyncio.Event()
        self._ring, self._hello = ring, hello

    def leave(self) -> None:
        """Take it out of its ring."""
        self._ring.leave(self)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield `hello`, then events as they come."""
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


def _check_room(n_subscribers: int, most: int) -> None:
    if n_subscribers >= most:
        raise RequestRefused(
            "as many pages are subscribed as may be: close one, or try again later",
            status=429,
            code="too_many_subscribers",
        )


def _call_in(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    """Schedule a call; a closed loop ignores it."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(*call)

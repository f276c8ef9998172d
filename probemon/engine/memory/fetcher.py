"""Fetcher loads probes in a background thread.

    fetcher = Fetcher(arena.fetch, [arena.lock])
    fetcher.ask([3, 4, 5])          # does not wait
    fetcher.wait()                  # until all are loaded

A fork waits until nothing is being loaded: the child could not release another thread's lock. It gets a new thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

_FETCHERS: weakref.WeakSet[Fetcher] = weakref.WeakSet()
_MAKING = threading.Lock()
_FORKING = ExitStack()


class Fetcher:
    """Calls `fetch(probes)` in a thread. `locks`: taken by `fetch` and readers."""

    def __init__(self, fetch: Callable[[list[int]], None], locks: Sequence[Any] = ()) -> None:
        self._fetch, self._locks = fetch, locks
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._wanted: dict[int, None] = {}
        self._error: Exception | None = None
        self._begin()
        with _MAKING:
            _FETCHERS.add(self)

    def _begin(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="probemon paging")
        self._running: Future[None] | None = None

    def ask(self, probes: Iterable[int]) -> None:
        """Request these after earlier requests."""
        with self._lock:
            self._wanted.update(dict.fromkeys(probes))
            if self._wanted and (self._running is None or self._running.done()):
                self._running = self._pool.submit(self._run)

    def _run(self) -> None:
        while True:
            with self._loading:
                with self._lock:
                    if not self._wanted:
                        self._running = None
                        return
                    wanted, self._wanted = list(self._wanted), {}
                try:
                    self._fetch(wanted)
                except Exception as error:  # any: a step must not go on as if its weights were coming
                    self._error = error

    def take_error(self) -> Exception | None:
        """Return and clear the background error."""
        error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raise and clear the background error."""
        if (error := self.take_error()) is not None:
            raise error

    def wait(self) -> None:
        """Wait until everything is loaded."""
        self.ask(())  # requests from before a fork
        while (running := self._running) is not None:
            running.result()


def _before_fork() -> None:
    _FORKING.enter_context(_MAKING)
    fetchers = list(_FETCHERS)
    # `_loading` first: loading takes the arena's lock.
    locks = (
        [fetcher._loading for fetcher in fetchers]
        + [lock for fetcher in fetchers for lock in fetcher._locks]
        + [fetcher._lock for fetcher in fetchers]
    )
    for lock in {id(lock): lock for lock in locks}.values():
        _FORKING.enter_context(lock)


def _in_child() -> None:
    for fetcher in list(_FETCHERS):
        fetcher._begin()
    _FORKING.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_FORKING.close, after_in_child=_in_child)

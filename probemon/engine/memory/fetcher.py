"""Fetcher loads probes in a thread of its own, while the host model goes on.

    fetcher = Fetcher(arena.fetch, [arena.lock])
    fetcher.ask([3, 4, 5])          # at once; what is asked for meanwhile is loaded in one go
    fetcher.wait()                  # for all that was asked for

A process may fork meanwhile. The child has no thread but the one that forked, so a fetcher begins anew there. A lock
that another thread held would never be released in it, so forking waits until nothing is being loaded.
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
_FORKING = ExitStack()  # what is held while the process forks


class Fetcher:
    """Calls `fetch(probes)` in a thread, and keeps its error. `locks`: those that `fetch` and readers take."""

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
        """Ask for these, in this order, after what is wanted already."""
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
                except Exception as error:  # whatever it is, a step must not go on as if its weights were coming
                    self._error = error

    def take_error(self) -> Exception | None:
        """Return the error of a load in the background, once."""
        error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raise the error of a load in the background, once."""
        if (error := self.take_error()) is not None:
            raise error

    def wait(self) -> None:
        """Wait until all that was asked for is loaded."""
        self.ask(())  # what was wanted when the process forked
        while (running := self._running) is not None:
            running.result()


def _before_fork() -> None:
    """Hold every lock, so that nothing is loaded and nobody reads slots."""
    _FORKING.enter_context(_MAKING)
    fetchers = list(_FETCHERS)
    # Who loads takes the lock of the arena, so nobody may be loading when that is taken here.
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

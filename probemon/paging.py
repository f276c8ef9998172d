"""Fetcher: probes loaded in the background, in a thread of its own, while the host model goes on.

    fetcher = Fetcher(arena.fetch)
    fetcher.ask([3, 4, 5])          # at once; what is asked for meanwhile is loaded in one go
    fetcher.wait()                  # until nothing is wanted any more
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor


class Fetcher:
    """One thread that calls `fetch(probes)` with what was asked for; an error is kept for `raise_error`."""

    def __init__(self, fetch: Callable[[list[int]], None]) -> None:
        self._fetch = fetch
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="probemon paging")
        self._lock = threading.Lock()
        self._wanted: dict[int, None] = {}
        self._running: Future[None] | None = None
        self._error: Exception | None = None

    def ask(self, probes: Iterable[int]) -> None:
        """Want these, in this order, after what is wanted already."""
        with self._lock:
            self._wanted.update(dict.fromkeys(probes))
            if self._wanted and (self._running is None or self._running.done()):
                self._running = self._pool.submit(self._run)

    def _run(self) -> None:
        while True:
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
        """What a load in the background met, once."""
        error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raise it, once."""
        if (error := self.take_error()) is not None:
            raise error

    def wait(self) -> None:
        """Until nothing is wanted any more."""
        while (running := self._running) is not None:
            running.result()

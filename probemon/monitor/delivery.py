"""Delivery: batches to a sink from a thread of its own, so that a slow sink never slows the step.

with manager.attach(model, tokenizer, followers=[Delivery(JsonLinesSink("scores.jsonl"), max_batches=64)]) as run: ...

delivery = Delivery(sink)
delivery.start(concepts=[c["id"] for c in pack.concepts])
delivery.put(batch)                        # never waits, never raises for the sink's faults
delivery.close(timeout_seconds=30.0)       # delivers what is queued, closes the sink
delivery.stats()                           # SinkStats(n_written, n_dropped, n_queued, error), in tokens
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probemon.core.scores import Scores, TokenBatch
from probemon.errors import ConfigError, SinkFailed
from probemon.monitor.failures import as_exception
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.sinks import Sink
from probemon.util.checks import check_count

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

LOG = logging.getLogger("probemon")


@dataclass(frozen=True)
class SinkStats:
    """Tokens put into a `Delivery`; the three numbers always add up. `error`: what ended the sink, or None.

    The sink has taken `n_written`; `n_dropped` found no room, or no sink any more, or were in a file that was removed
    when the sink failed; `n_queued` wait or are in its hands.
    """

    n_written: int
    n_dropped: int
    n_queued: int
    error: BaseException | None


class Delivery(Follower):
    """Delivers batches of one run to one sink from a thread of its own. A sink that is given to a run as it is has one.

    Any thread may call `put`; the order of each is kept. At most `max_batches` wait, the one in the sink's hands
    included; what finds no room is dropped and counted. An error of the sink closes it: `stats().error` keeps the
    error, and everything after it counts as dropped.
    """

    kind = "a sink"

    def __init__(self, sink: Sink, *, max_batches: int = 1024) -> None:
        if not is_sink(sink):
            raise ConfigError(f"a sink has open, write and close, {sink!r} has not: see probemon.monitor.sinks")
        self.sink = self._sink = sink
        self._concepts: list[str] = []
        self._max_batches = check_count("max_batches", max_batches, least=1)
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[TokenBatch] = deque()
        self._n_written = self._n_dropped = self._n_queued = 0
        self._error: BaseException | None = None
        self._closing = self._over = False  # over: the sink is closed, or was given up
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self, concepts: Sequence[str]) -> None:
        """Open the sink, which is told the ids of the pack's `concepts`, in a thread of its own."""
        self._concepts, self._process = list(concepts), os.getpid()
        self._thread = threading.Thread(target=self._deliver, name=f"probemon {type(self._sink).__name__}", daemon=True)
        self._thread.start()

    def began(self, run: MonitorRun) -> None:
        """Start with a run."""
        if self._thread is not None:
            raise ConfigError(f"this {type(self._sink).__name__} was added before: a sink receives one run, once")
        self.start([concept["id"] for concept in run.manager.pack.concepts])

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Queue a batch."""
        self.put(batch.as_tokens(scores))

    def finish(self, failed: bool) -> None:
        """Deliver what is queued and close the sink. Raises what ended it."""
        self.close()
        stats = self.stats()
        if stats.error is not None:
            raise as_exception(stats.error)
        if stats.n_dropped:
            n_tokens = stats.n_written + stats.n_dropped
            LOG.warning("a sink was too slow: %d of %d tokens were dropped", stats.n_dropped, n_tokens)

    def put(self, batch: TokenBatch) -> None:
        """Queue a batch, or count it as dropped; returns at once."""
        self._check_process()
        with self._changed:
            if self._closing or self._error is not None or len(self._queue) >= self._max_batches:
                self._n_dropped += len(batch)
            else:
                self._queue.append(batch)
                self._n_queued += len(batch)
                self._changed.notify_all()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Deliver what is queued, close the sink, stop the thread. A second call does nothing.

        When the time passes first, what is left counts as dropped (a batch in the sink's hands too, though the sink may
        still take it) and `stats().error` is a `SinkFailed`. Called by the sink itself, it returns at once.
        """
        self._check_process()
        with self._changed:
            if os.getpid() != self._process or self._thread is None:
                return
            self._closing = True
            self._changed.notify_all()
            if threading.current_thread() is self._thread or self._changed.wait_for(
                lambda: self._over, timeout_seconds
            ):
                return
            self._over = True
            late = (
                f"{type(self._sink).__name__} did not finish within {timeout_seconds} seconds, {self._n_queued} tokens"
                " given up"
            )
            self._fail(SinkFailed(f"{late}: give close() more time, or use a faster sink"))

    def _check_process(self) -> None:
        """Fail at once in a forked child, which has no thread of ours, and leave the file to the parent."""
        if os.getpid() != self._process and self._error is None:
            self._fail(
                SinkFailed(
                    f"{type(self._sink).__name__} was begun in another process, which forked: attach it in the process"
                    " that generates"
                )
            )

    def stats(self) -> SinkStats:
        """Return what became of the tokens that were put."""
        with self._changed:
            return SinkStats(self._n_written, self._n_dropped, self._n_queued, self._error)

    def _deliver(self) -> None:
        try:
            try:
                self._sink.open(self._concepts)
                while (batch := self._next()) is not None:
                    self._sink.write(batch)
                    self._written(batch)
            except BaseException as error:  # SystemExit in a callback, too: nobody else would count what is queued
                self._fail(error)
            self._sink.close()
        except BaseException as error:
            self._fail(error)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _next(self) -> TokenBatch | None:
        """Wait for the oldest batch, which stays in the queue until it is written; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue[0] if self._queue else None

    def _written(self, batch: TokenBatch) -> None:
        with self._changed:
            if self._error is None:  # else it was given up, and counted, meanwhile
                self._queue.popleft()
                self._n_queued -= len(batch)
                self._n_written += len(batch)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            if getattr(self._sink, "lost", False):
                self._n_dropped, self._n_written = self._n_dropped + self._n_written, 0
            self._n_dropped += self._n_queued
            self._n_queued = 0
            self._queue.clear()


def is_sink(given: Any) -> bool:
    """Whether something has the three methods of a sink."""
    return all(callable(getattr(given, name, None)) for name in ("open", "write", "close"))

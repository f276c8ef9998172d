"""Delivery: passes batches to a sink in a thread, so that a slow sink never slows a step.

with manager.attach(model, tokenizer, followers=[Delivery(sink, max_batches=64)]) as run: ...

delivery = Delivery(sink)
delivery.start(concepts=[c["id"] for c in pack.concepts])
delivery.put(batch)                        # never waits or raises
delivery.close(timeout_seconds=30.0)
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probemon.core.scores import Scores, TokenBatch
from probemon.errors import ConfigError, SinkFailed
from probemon.monitor.failures import as_exception
from probemon.monitor.followers import Batch, Follower, Listener
from probemon.monitor.sinks import Sink
from probemon.util.checks import check_count

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

LOG = logging.getLogger("probemon")


@dataclass(frozen=True)
class SinkStats:
    """Numbers of tokens.

    `n_dropped`: queue full, sink closed, or in a file that failed
    `n_queued`: waiting or being written
    `error`: what ended the sink
    """

    n_written: int
    n_dropped: int
    n_queued: int
    error: BaseException | None


class Delivery(Follower):
    """Delivers one run to one sink.

    Any thread may `put`; each thread's order is kept. Batches beyond `max_batches`, or after an error of the sink
    (`stats().error`), are dropped and counted.
    """

    kind = "a sink"

    def __init__(self, sink: Sink, *, max_batches: int = 1024) -> None:
        if not is_sink(sink):
            raise ConfigError(f"a sink has open, write and close, {sink!r} has not: see probemon.monitor.sinks")
        self.sink = self._sink = sink
        self._concepts: list[str] = []
        self._functions: list[str] = []
        self._max_batches = check_count("max_batches", max_batches, least=1)
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[TokenBatch] = deque()
        self._n_written = self._n_dropped = self._n_queued = 0
        self._error: BaseException | None = None
        self._closing = self._over = False  # over: closed or abandoned
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self, concepts: Sequence[str]) -> None:
        """Open the sink in a thread. `concepts`: ids."""
        self._concepts, self._process = list(concepts), os.getpid()
        self._thread = threading.Thread(target=self._deliver, name=f"probemon {type(self._sink).__name__}", daemon=True)
        self._thread.start()

    def began(self, run: MonitorRun) -> None:
        """Start."""
        if self._thread is not None:
            raise ConfigError(f"this {type(self._sink).__name__} was added before: a sink receives one run, once")
        self._functions = run.function_names
        self.start([*(concept["id"] for concept in run.manager.pack.concepts), *self._functions])

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Queue a batch."""
        self.put(batch.as_tokens(scores, self._functions))

    def finish(self, failed: bool) -> None:
        """Deliver the queue and close the sink. Raises the sink's error."""
        self.close()
        stats = self.stats()
        if stats.error is not None:
            raise as_exception(stats.error)
        if stats.n_dropped:
            n_tokens = stats.n_written + stats.n_dropped
            LOG.warning("a sink was too slow: %d of %d tokens were dropped", stats.n_dropped, n_tokens)

    def put(self, batch: TokenBatch) -> None:
        """Queue or drop a batch, without waiting."""
        self._check_process()
        with self._changed:
            if self._closing or self._error is not None or len(self._queue) >= self._max_batches:
                self._n_dropped += len(batch)
            else:
                self._queue.append(batch)
                self._n_queued += len(batch)
                self._changed.notify_all()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Deliver the queue, close the sink, stop the thread. The sink may call it.

        After the timeout the rest counts as dropped, and `stats().error` is a `SinkFailed`.
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
        """Fail in a forked child, which lacks the thread."""
        if os.getpid() != self._process and self._error is None:
            self._fail(
                SinkFailed(
                    f"{type(self._sink).__name__} was started in another process, which forked: attach it in the"
                    " process that generates"
                )
            )

    def stats(self) -> SinkStats:
        """Return the statistics."""
        with self._changed:
            return SinkStats(self._n_written, self._n_dropped, self._n_queued, self._error)

    def _deliver(self) -> None:
        try:
            try:
                self._sink.open(self._concepts)
                while (batch := self._next()) is not None:
                    self._sink.write(batch)
                    self._written(batch)
            except BaseException as error:  # also SystemExit, so that the queue is counted
                self._fail(error)
            self._sink.close()
        except BaseException as error:
            self._fail(error)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _next(self) -> TokenBatch | None:
        """Return the oldest batch, which stays queued until written; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue[0] if self._queue else None

    def _written(self, batch: TokenBatch) -> None:
        with self._changed:
            if self._error is None:  # else counted as dropped already
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
    """True if it has the methods of a sink."""
    return all(callable(getattr(given, name, None)) for name in ("open", "write", "close"))


def as_follower(
    candidate: Any, present: Iterable[Follower], lend: Callable[[Any], Any] = lambda listener: listener
) -> Follower:
    """Return `candidate` as a follower.

    That is itself, a `Delivery` for a sink, or a `Listener` for a callable `(placed, scores)`, which is first passed
    through `lend`. Raises `ConfigError` for anything else, or if it is already among `present`.
    """
    for one in present:
        if one is candidate:
            raise ConfigError(f"this {type(candidate).__name__} follows this run already: give it once")
        if isinstance(one, Delivery) and one.sink is candidate:
            raise ConfigError(f"this {type(candidate).__name__} was added before: a sink receives one run, once")
    if isinstance(candidate, Follower):
        return candidate
    if is_sink(candidate):
        return Delivery(candidate)
    if callable(candidate) and not isinstance(candidate, type):
        return Listener(lend(candidate))
    raise ConfigError(
        f"{candidate!r:.80} cannot follow a run: give a Follower, a sink (with open, write and close) or a callable"
        " that takes (placed, scores)"
    )

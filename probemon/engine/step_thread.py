"""StepThread makes steps in a thread alongside the model, for weights mapped from a file.

outcome = StepThread().begin(lambda: way.evaluate(plan, inputs, retained, keep)).wait()

The kernels release the GIL, also while they wait for a disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from probemon.engine.outcome import Outcome


@dataclass(frozen=True)
class ThreadedStep:
    """A step in the thread."""

    future: Future[Outcome]

    def wait(self) -> Outcome:
        """Return the outcome when ready, or raise the step's error."""
        return self.future.result()


class StepThread:
    """Makes steps in one thread."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def begin(self, make: Callable[[], Outcome]) -> ThreadedStep:
        """Begin a step."""
        if self._pool is None or self._process != os.getpid():  # a forked child has no threads
            self._pool, self._process = ThreadPoolExecutor(1, thread_name_prefix="probemon step"), os.getpid()
        return ThreadedStep(self._pool.submit(make))

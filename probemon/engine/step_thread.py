"""StepThread makes steps beside the host model, in a thread: for weights that are mapped from a file.

thread = StepThread()
step = thread.begin(lambda: way.evaluate(plan, inputs, retained, keep))     # waits for nothing
outcome = step.wait()

What multiplies weights lets go of the interpreter, also while it waits for a disk, so that the host's next layers run
meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from probemon.engine.outcome import Outcome


@dataclass(frozen=True)
class ThreadedStep:
    """Waits for a step that the thread is at."""

    future: Future[Outcome]

    def wait(self) -> Outcome:
        """Return the outcome, once it is there. Raises what the step raised."""
        return self.future.result()


class StepThread:
    """Makes steps one after another, in a thread that begins with the first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def begin(self, make: Callable[[], Outcome]) -> ThreadedStep:
        """Begin a step."""
        if self._pool is None or self._process != os.getpid():  # a child that was forked has none of its threads
            self._pool, self._process = ThreadPoolExecutor(1, thread_name_prefix="probemon step"), os.getpid()
        return ThreadedStep(self._pool.submit(make))

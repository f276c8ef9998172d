"""Asks a judge a few questions at a time, each with a time limit.

Workers are daemons that end when nothing waits, so a hanging judge keeps no process alive.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from probemon.errors import JudgeFailed
from probemon.monitor.rules import Verdict
from probemon.util.checks import shown

RULINGS = ("pass", "stop")
FAILURES = LATE, ERROR, NOT_ASKED, ABANDONED = ("late", "error", "not asked", "abandoned")
_LOOK_SECONDS = 0.2  # between looks whether an answer is still wanted
_LONGEST = 500


class Asked:
    """A question on its way; its first verdict counts.

    - `ask()`: asks the judge, in the context of the creator, so that traces belong together
    - `join(verdict)`: called before the verdict is visible; must be quick
    - `tell()`: called after that, in the same thread and context
    """

    def __init__(
        self,
        ask: Callable[[], Any],
        *,
        within: float,
        on_failure: str,
        join: Callable[[Verdict], None],
        tell: Callable[[], None],
    ) -> None:
        self._ask, self._on_failure, self._join, self._tell = ask, on_failure, join, tell
        self._begun = time.monotonic()
        self.deadline = self._begun + within
        self.within = within
        self.verdict: Verdict | None = None
        self._context = contextvars.copy_context()
        self._known, self._deciding, self.told = threading.Event(), threading.Lock(), threading.Event()

    def answer(self) -> None:
        """Ask the judge, unless there is a verdict already."""
        if self.verdict is None:
            self._context.run(self._answer)

    def _answer(self) -> None:
        try:
            ruling, reason = read_answer(self._ask())
        except BaseException as error:  # SystemExit, too: there would never be a verdict
            if time.monotonic() >= self.deadline:  # a judge with its own timeout raises then
                self.fail(LATE, f"no answer within {self.within:g} seconds")
            self.fail(ERROR, str(error) if isinstance(error, JudgeFailed) else f"{type(error).__name__}: {error}")
            return
        if time.monotonic() > self.deadline:
            self.fail(LATE, f"it answered {ruling!r} after more than {self.within:g} seconds")
        else:
            self._decide(ruling, "", reason)

    def fail(self, failure: str, reason: str) -> None:
        """Give the verdict of `on_failure`, unless there is one."""
        self._decide(self._on_failure, failure, reason)

    def wait(self, until: float, abandoned: Callable[[], bool] | None = None) -> bool:
        """Wait until a time of the monotonic clock; return True if there is a verdict.

        `abandoned()`: True if the answer is not wanted any more; it passes then.
        """
        if abandoned is not None:
            while until - time.monotonic() > _LOOK_SECONDS and not self._known.wait(_LOOK_SECONDS):
                if abandoned():
                    self._decide(RULINGS[0], ABANDONED, "nobody waits for the answer any more")
        return self._known.wait(max(0.0, until - time.monotonic()))

    def _decide(self, ruling: str, failure: str, reason: str) -> None:
        with self._deciding:
            if self.verdict is not None:
                return
            verdict = Verdict(ruling, failure, reason[:_LONGEST], time.monotonic() - self._begun)
            self._join(verdict)
            self.verdict = verdict
            self._known.set()
        try:
            self._context.copy().run(self._tell)  # a copy: the worker may be in it
        finally:
            self.told.set()


class Desk:
    """At most `n_workers` threads ask; at most `max_waiting` questions wait."""

    def __init__(self, n_workers: int, max_waiting: int) -> None:
        self._n_workers, self._max_waiting = n_workers, max_waiting
        self._lock = threading.Lock()  # guards the fields below
        self._n_working, self._waiting = 0, deque[Asked]()

    def put(self, asked: Asked) -> bool:
        """Queue a question; False if too many wait."""
        with self._lock:
            if self._n_working < self._n_workers:
                try:
                    threading.Thread(target=self._work, args=(asked,), name="probemon judge", daemon=True).start()
                except RuntimeError:  # the process may have no more threads
                    return False
                self._n_working += 1
                return True
            # some have timed out
            self._waiting = deque(one for one in self._waiting if one.verdict is None)
            if len(self._waiting) >= self._max_waiting:
                return False
            self._waiting.append(asked)
            return True

    def _work(self, asked: Asked) -> None:
        following: Asked | None = asked
        while following is not None:
            following.answer()
            with self._lock:
                following = self._waiting.popleft() if self._waiting else None
                self._n_working -= following is None


def read_answer(answer: object) -> tuple[str, str]:
    """Return ruling and reason of an answer. Raises `JudgeFailed`."""
    ruling, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    if not isinstance(ruling, str) or ruling not in RULINGS or not isinstance(reason, str):
        raise JudgeFailed(f"the judge answered {shown(answer)}: it returns 'stop' or 'pass', or one of these and why")
    return ruling, reason

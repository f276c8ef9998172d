"""Desk: questions to a judge, a few at a time, each with a limit after which its answer does not count.

desk = Desk(n_workers=2, max_waiting=16)
asked = Asked(lambda: judge(question), within=2.0, on_failure="stop", join=join, tell=tell)
if not desk.put(asked):                    # as many wait as may
    asked.fail(NOT_ASKED, "...")
asked.wait(until=asked.deadline)           # whether there is a verdict by then
asked.fail(LATE, "...")                    # changes nothing where there is one
asked.verdict

A worker is a daemon, which ends when nothing waits: a judge that hangs keeps one worker, and no process, from ending.
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
FAILURES = LATE, ERROR, NOT_ASKED = ("late", "error", "not asked")
_LONGEST = 500  # characters of a reason


class Asked:
    """A question on its way, whose first verdict holds.

    `ask()`: puts it to the judge and returns the answer. It is called in the context of who made this, so that what
    traces the calls of a judge finds the span that they belong to.
    `join(verdict)`: is called at once, before anybody sees that there is a verdict, and may not take long.
    `tell()`: is called after that, in the thread that has the verdict, and in that context.
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
        except BaseException as error:  # SystemExit, too: nobody else would say that there is no verdict
            if time.monotonic() >= self.deadline:  # a judge that keeps its own time raises when that is over
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

    def wait(self, until: float) -> bool:
        """Wait for a verdict, at most until a time of the monotonic clock; return whether there is one."""
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
    """At most `n_workers` threads ask, and at most `max_waiting` questions wait for one of them."""

    def __init__(self, n_workers: int, max_waiting: int) -> None:
        self._n_workers, self._max_waiting = n_workers, max_waiting
        self._lock = threading.Lock()  # guards what follows
        self._n_working, self._waiting = 0, deque[Asked]()

    def put(self, asked: Asked) -> bool:
        """Take a question, or return False at once where too many wait."""
        with self._lock:
            if self._n_working < self._n_workers:
                try:
                    threading.Thread(target=self._work, args=(asked,), name="probemon judge", daemon=True).start()
                except RuntimeError:  # the process may have no more threads
                    return False
                self._n_working += 1
                return True
            # Of those that wait, some have had their time.
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
    """Return the ruling and the reason of a judge's answer. Raises `JudgeFailed`."""
    ruling, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    if not isinstance(ruling, str) or ruling not in RULINGS or not isinstance(reason, str):
        raise JudgeFailed(f"the judge answered {shown(answer)}: it returns 'stop' or 'pass', or one of these and why")
    return ruling, reason

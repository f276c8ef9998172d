"""Signals that end a command: SIGTERM and SIGHUP, as an exit that lets the command take away what is half written; and
the first SIGINT of a block that ends by itself when it is told to.

    install()
    try:
        code = run()
    finally:
        settle()
    sys.exit(received() or code)

    with on_interrupt(watching.interrupt): ...

The handler raises `SystemExit`, at whatever Python runs at that moment. Where compiled code has called Python back
(numba does while it compiles), an exception cannot go on: Python drops it, and the command would too. It is then
raised again a little later, and `received` says that any error on the way came of it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_AGAIN_SECONDS = 1.0  # an error that follows a dropped exit has ended the command by then, with all that it takes away
_pending: list[threading.Timer] = []
_received: list[int] = []


class _Ended(SystemExit):
    """Raised by the handler."""


def install() -> None:
    """Set the handlers, where nobody has set others. Python allows it on the main thread alone; elsewhere nothing is
    set."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


def received() -> int:
    """The exit status by the signal that came, 0 where none did."""
    return 128 + _received[0] if _received else 0


@contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at the first SIGINT (Ctrl-C) of the block; the next one is a `KeyboardInterrupt` as ever.

    Nothing is set on other threads than the main one, nor where SIGINT is ignored or somebody else's.
    """

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()

    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def settle() -> None:
    """The command is over: an exit that was dropped is not raised again."""
    while _pending:
        _pending.pop().cancel()


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise _Ended(128 + number)


class _Unraisable:
    """Python's hook for exceptions that it drops."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    def __call__(self, dropped: Any) -> None:
        if not issubclass(dropped.exc_type, (_Ended, KeyboardInterrupt)):
            self._otherwise(dropped)
            return
        number = _received[-1] if issubclass(dropped.exc_type, _Ended) else signal.SIGINT
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        _pending.append(again)
        again.start()

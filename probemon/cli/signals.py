"""Signals that end a command: SIGTERM and SIGHUP exit with clean-up; the first SIGINT may end a block gently.

    install()
    try:
        code = run()
    finally:
        settle()
    sys.exit(received() or code)

    with on_interrupt(watching.interrupt): ...

The handler raises `SystemExit`. Python drops it in a callback from compiled code (as while numba compiles), so it is
raised again later; `received` then explains other errors.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_AGAIN_SECONDS = 1.0  # until other errors have ended the command
_pending: list[threading.Timer] = []
_received: list[int] = []


class _Ended(SystemExit):
    """Raised by the handler."""


def install() -> None:
    """Replace default handlers, on the main thread only."""
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
    """Exit status of the signal, or 0."""
    return 128 + _received[0] if _received else 0


@contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at the block's first SIGINT (Ctrl-C); the next is a `KeyboardInterrupt`.

    Does nothing on other threads or if SIGINT has another handler.
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


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process where a signal ends the block, without Python's finalisation.

    For a block that has closed all it opened: finalisation of a loaded model takes seconds, and aborts the process if a
    thread still computes.
    """
    try:
        yield
    except (_Ended, KeyboardInterrupt) as ended:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(signal.SIGINT + 128 if isinstance(ended, KeyboardInterrupt) else received())


def settle() -> None:
    """Cancel pending exits."""
    while _pending:
        _pending.pop().cancel()


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise _Ended(128 + number)


class _Unraisable:
    """Hook for exceptions that Python drops."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    def __call__(self, dropped: Any) -> None:
        if not issubclass(dropped.exc_type, (_Ended, KeyboardInterrupt)):
            self._otherwise(dropped)
            return
        number = _received[-1] if issubclass(dropped.exc_type, _Ended) else signal.SIGINT
        timer = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        _pending.append(timer)
        timer.start()

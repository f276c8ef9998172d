"""Failures: what callbacks, sinks and threads of the background raised while the generation went on.

failures = Failures()
failures.call("a listener", listener, placed, scores)      # never raises what `listener` raises
failures.add("a sink", error)
failures.raise_first()                                     # CallbackFailed, if there was one
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from probemon.errors import CallbackFailed

LOG = logging.getLogger("probemon")
MAX_KEPT = 1000  # of what may come with every token

# Calls a callback of the user's, and keeps what it raises for the end: what it is, the function, its arguments.
Guard = Callable[..., None]


class Failures:
    """`errors`: the first 1,000 of `n_errors`."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.n_errors = 0

    def call(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """Call a callback of the user's, which must not spoil the generation: what it raises is kept for the end."""
        try:
            function(*arguments)
        except Exception as error:
            self.add(what, error)

    def add(self, what: str, error: BaseException) -> None:
        """Keep and log what `what` raised."""
        kept = as_exception(error)
        self.n_errors += 1
        if len(self.errors) < MAX_KEPT:
            self.errors.append(kept)
        LOG.error("%s failed, the generation went on: %s: %s", what, type(kept).__name__, kept)

    def raise_first(self) -> None:
        """Raise `CallbackFailed` from the first error, if there is one."""
        what = f"{self.n_errors} callbacks or sinks failed while the generation went on"
        raise_first_of(self.errors, what, remedy='. callback_errors="report" only reports them')


def raise_first_of(errors: list[Exception], what: str, *, remedy: str = "") -> None:
    """Raise `CallbackFailed` from the first of some errors, if there is one; `what` says how many of whose they are."""
    if errors:
        first = errors[0]
        raise CallbackFailed(f"{what}, the first with {type(first).__name__}: {first}{remedy}", errors) from first


def as_exception(error: BaseException) -> Exception:
    """Return the error itself, or one that names it where `except Exception` would not catch it."""
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def raise_error(error: Exception) -> None:
    """Raise it, where a callable is asked for."""
    raise error

"""Errors of callbacks, sinks and background threads, kept while the generation goes on.

failures.call("a listener", listener, placed, scores)      # never raises
failures.raise_first()                                     # CallbackFailed, if there was an error
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from probemon.errors import CallbackFailed

LOG = logging.getLogger("probemon")
MAX_KEPT = 1000

# Calls a user's callback and keeps its error: label, function, arguments.
Guard = Callable[..., None]


class Failures:
    """`errors`: the first 1,000 of `n_errors`."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.n_errors = 0

    def call(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """Call a callback and keep its error."""
        try:
            function(*arguments)
        except Exception as error:
            self.add(what, error)

    def add(self, what: str, error: BaseException) -> None:
        """Keep and log an error; `what` names its source."""
        exception = as_exception(error)
        self.n_errors += 1
        if len(self.errors) < MAX_KEPT:
            self.errors.append(exception)
        LOG.error("%s failed, the generation went on: %s: %s", what, type(exception).__name__, exception)

    def raise_first(self) -> None:
        """Raise `CallbackFailed` from the first error, if any."""
        what = f"{self.n_errors} callbacks or sinks failed while the generation went on"
        raise_first_of(self.errors, what, remedy='. callback_errors="report" only reports them')


def raise_first_of(errors: list[Exception], what: str, *, remedy: str = "") -> None:
    """Raise `CallbackFailed` from the first error, if any."""
    if errors:
        first = errors[0]
        raise CallbackFailed(f"{what}, the first with {type(first).__name__}: {first}{remedy}", errors) from first


def as_exception(error: BaseException) -> Exception:
    """Return the error, wrapped if it is not an `Exception`."""
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def raise_error(error: Exception) -> None:
    """Raise `error`."""
    raise error

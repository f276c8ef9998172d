"""Callables of a user's, kept by a run alone.

    calls = LentCalls()
    action = calls.lend(lambda event: run.stop())      # is called as the lambda is, for as long as `calls` is there

The hooks on a model hold what a run does, and an action often refers to its run. Held by the hooks it would keep the
run for ever, also one that was dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class _Kept:
    call: Callable[..., Any]


@dataclass(frozen=True)
class _Lent:
    kept: weakref.ref[_Kept]

    def __call__(self, *args: Any) -> Any:
        kept = self.kept()
        return None if kept is None else kept.call(*args)


class LentCalls:
    """Keeps callables, and lends what calls them while it is there and does nothing afterwards."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def lend(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `call`."""
        self._kept.append(_Kept(call))
        return _Lent(weakref.ref(self._kept[-1]))

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


@dataclass(frozen=True, eq=False)
class _Lent:
    kept: weakref.ref[_Kept]

    def __call__(self, *args: Any) -> Any:
        kept = self.kept()
        return None if kept is None else kept.call(*args)


class LentCalls:
    """Keeps callables, and lends what calls them while it is there and does nothing afterwards."""

    def __init__(self) -> None:
        self._kept: list[tuple[_Kept, _Lent]] = []

    def lend(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `call`: the same each time, as rules that are the same go on with their streaks."""
        for kept, lent in self._kept:
            if kept.call == call:
                return lent
        kept = _Kept(call)
        self._kept.append((kept, _Lent(weakref.ref(kept))))
        return self._kept[-1][1]

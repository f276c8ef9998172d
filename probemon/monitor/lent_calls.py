"""Lets hooks call a user's callables without keeping them alive.

    action = LentCalls().lend(lambda event: run.stop())

An action often refers to its run; hooks that held it would keep a dropped run alive.
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
        holder = self.kept()
        return None if holder is None else holder.call(*args)


class LentCalls:
    """Holds callables and returns weak wrappers of them."""

    def __init__(self) -> None:
        self._kept: list[tuple[_Kept, _Lent]] = []

    def lend(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper, the same for equal callables, so that equal rules stay equal."""
        for holder, lent in self._kept:
            if holder.call == call:
                return lent
        holder = _Kept(call)
        self._kept.append((holder, _Lent(weakref.ref(holder))))
        return self._kept[-1][1]

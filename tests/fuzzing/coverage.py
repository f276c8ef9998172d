"""Which branches of some modules an input takes: pairs of lines, one after the other in a function.

edges = Edges([probemon.packs.manifest, probemon.packs.files])
sys.settrace(edges.trace)
edges.fresh()                                   # how many pairs were never seen before this input
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any

Trace = Callable[[FrameType, str, Any], Any]


class Edges:
    """Line pairs seen so far. Functions of other modules run untraced."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._files = {module.__file__: number for number, module in enumerate(modules)}
        self.seen: set[tuple[int, int, int]] = set()
        self._before = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        number = self._files.get(frame.f_code.co_filename)
        if number is None:
            return None
        last, seen = 0, self.seen

        def line(frame: FrameType, event: str, argument: Any) -> Trace:
            nonlocal last
            if event == "line":
                seen.add((number, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line

    def fresh(self) -> int:
        """How many pairs are new since this was last asked."""
        n = len(self.seen) - self._before
        self._before = len(self.seen)
        return n

"""WatchedThreads: watch all threads, or only the attaching one.

threads = WatchedThreads(one_thread=True)
threads.attach()
threads.in_other                     # True in an unwatched thread
threads.silence                      # why nothing was watched, and a remedy
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter


class WatchedThreads:
    """`one_thread`: watch only the attaching thread."""

    def __init__(self, one_thread: bool) -> None:
        self.one_thread, self._here = one_thread, threading.local()  # not an id, which may be reused
        # of generate() calls from before attaching, or called on the class
        self.n_unwatched = 0
        self.layers_alone = Counter[str]()  # runs outside of a forward, by site
        self.ran_in_other = False  # in an unwatched thread
        self._before: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def attach(self) -> None:
        """Attach in this thread."""
        self._here.attached = True
        self._before = weakref.WeakSet(threading.enumerate())

    @property
    def n_alone(self) -> int:
        """Forwards without their decoder; sites may share them."""
        return max(self.layers_alone.values(), default=0)

    @property
    def attached_here(self) -> bool:
        """True in the attaching thread."""
        return hasattr(self._here, "attached")

    @property
    def was_there(self) -> bool:
        """True in other, older threads, maybe inside a forward."""
        return not self.attached_here and threading.current_thread() in self._before

    @property
    def in_other(self) -> bool:
        """True in an unwatched thread."""
        return self.one_thread and not self.attached_here

    @property
    def silence(self) -> tuple[str, str]:
        """Return a predicate ("ran nothing ...") and a remedy."""
        if not self.one_thread:
            return "ran nothing while it was watched", "Attach to the very model that generates, not to a copy."
        predicate = "ran nothing in the one thread that is watched (one_thread)"
        if self.ran_in_other:
            remedy = "Attach in the thread that generates, or without one_thread=True."
            return f"{predicate}; it ran in another, whose forwards are not counted", remedy
        return predicate, "Attach to the very model that generates, not to a copy, and in the thread that generates."

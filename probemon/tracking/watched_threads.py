"""WatchedThreads: whose forwards a run watches: those of every thread, or of the one that attached it.

threads = WatchedThreads(one_thread=True)
threads.attach()                     # in the thread that enters the block of the run
threads.in_other                     # in any thread: whether what it runs is not watched
threads.silence                      # what is known where nothing that is watched ran, and what to do
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter


class WatchedThreads:
    """`one_thread`: only what the thread generates that attaches."""

    def __init__(self, one_thread: bool) -> None:
        self.one_thread, self._here = one_thread, threading.local()  # no number, which is another thread's later
        # Forwards of every generate() that cannot be followed: it began before, was looked up before, or was called on
        # the class.
        self.n_unwatched = 0
        self.layers_alone = Counter[str]()  # by site, how often its layer ran outside of a forward of the decoder
        self.ran_in_other = False  # whether the host ran in a thread that is not watched, as far as is known
        self._before: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def attach(self) -> None:
        """Begin, in the calling thread."""
        self._here.attached = True
        self._before = weakref.WeakSet(threading.enumerate())

    @property
    def n_alone(self) -> int:
        """How many forwards ran layers without their decoder: of one several sites may tell."""
        return max(self.layers_alone.values(), default=0)

    @property
    def attached_here(self) -> bool:
        """Whether the calling thread is the one that attached."""
        return hasattr(self._here, "attached")

    @property
    def was_there(self) -> bool:
        """Whether the calling thread is another one, and older: it may have been inside a forward then."""
        return not self.attached_here and threading.current_thread() in self._before

    @property
    def in_other(self) -> bool:
        """Whether the calling thread is not watched."""
        return self.one_thread and not self.attached_here

    @property
    def silence(self) -> tuple[str, str]:
        """What a host of which nothing was watched did, as a sentence goes on after its name, and the remedy."""
        if not self.one_thread:
            return "ran nothing while it was watched", "Attach to the very model that generates, not to a copy."
        what = "ran nothing in the one thread that is watched (one_thread)"
        if self.ran_in_other:
            remedy = "Attach in the thread that generates, or without one_thread=True."
            return f"{what}; it ran in another, whose forwards are not counted", remedy
        return what, "Attach to the very model that generates, not to a copy, and in the thread that generates."

"""Companion: what reads more of the forwards that a run watches, beside its probes.

companion = make(model, guard)                      # given to a run as `companion=make`; it is `run.routing` there
score = companion.beside(score)                     # reads the states of `companion.sites` before they are scored
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from probemon.core.memory_reads import MemoryReads
from probemon.tracking.decoder_hooks import ScoreTokens
from probemon.tracking.recording import Recording


class Companion(Protocol):
    """Reads more of the forwards that a run watches, beside the probes."""

    @property
    def sites(self) -> Sequence[Any]:
        """Return the sites that it reads."""

    def beside(self, score: ScoreTokens) -> ScoreTokens:
        """Return `score` with its own reading of the tokens' states before it."""

    def reads(self, recording: Recording, first: int, n: int) -> MemoryReads | None:
        """Return what memories read at `n` entries of a recording, from the `first` on: of the newest batch alone.

        None where it watches no memory.
        """

    def ended(self, recording: Recording) -> None:
        """Note that a generation has ended."""

    def open(self, *, one_thread: bool) -> None:
        """Begin with the run, in the thread that enters it. `one_thread`: that thread alone is watched."""

    def close(self) -> Sequence[Exception]:
        """End with the run; return what went wrong in the background."""

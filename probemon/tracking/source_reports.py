"""Reports of a token source: forward times, gaps, ends."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from probemon.core.scores import Gap
from probemon.tracking.recording import Recording


class ForwardTime(NamedTuple):
    """Seconds of a forward: in our hooks (`inside`) and in total (`whole`); its prompt and generated tokens."""

    inside: float
    whole: float
    n_prompt: int
    n_generated: int


class SourceReports(Protocol):
    """Receives reports in the thread that generates."""

    def forward(self, time: ForwardTime) -> None:
        """A forward ended, and its tokens are scored."""

    def gap(self, gap: Gap) -> None:
        """Columns ran unseen, whether reported or raised."""

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """A `generate()`, hand loop or request ended, with `error` if it failed."""

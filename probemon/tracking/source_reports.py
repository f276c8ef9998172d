"""What a source of tokens reports beside them: how long forwards took, what was missed, what ended."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from probemon.core.scores import Gap
from probemon.tracking.recording import Recording


class ForwardTime(NamedTuple):
    """Seconds that one forward of the model took in our hooks (`inside`), and altogether with these (`whole`); how many
    tokens of prompts, and generated ones, it ran.
    """

    inside: float
    whole: float
    n_prompt: int
    n_generated: int


class SourceReports(Protocol):
    """Hears what a source of tokens reports, in the thread that generates. Every `Follower` of a run does."""

    def forward(self, time: ForwardTime) -> None:
        """A forward of the model ended, and its tokens are scored."""

    def gap(self, gap: Gap) -> None:
        """Columns were run that our hooks did not see, whether that is reported or raised."""

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """A generation ended: a `generate()`, a loop by hand or a request, by `error` or as it should."""

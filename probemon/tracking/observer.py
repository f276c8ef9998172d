"""Observer: is told what a watcher does beside handing on tokens: how long forwards took, what was missed, what ended.

class Slowest(Observer):
    def forward(self, time): self.seconds = max(self.seconds, time.inside)

Watcher(model, sites, score, observer=Slowest())
"""

from __future__ import annotations

from typing import NamedTuple

from probemon.core.scores import Gap
from probemon.tracking.recording import Recording


class ForwardTime(NamedTuple):
    """Seconds that one forward of the host took in our hooks (`inside`), and altogether with these (`whole`); how many
    tokens of prompts, and generated ones, it ran.
    """

    inside: float
    whole: float
    n_prompt: int
    n_generated: int


class Observer:
    """Does nothing; override what is of interest. All of it is called in the thread that generates."""

    def forward(self, time: ForwardTime) -> None:
        """A forward of the host ended, and its tokens are scored."""

    def gap(self, gap: Gap) -> None:
        """Columns were run that our hooks did not see, whether that is reported or raised."""

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """A generation ended: a `generate()`, a loop by hand or a request, by `error` or as it should."""

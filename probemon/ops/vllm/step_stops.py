"""The rows of the present batch that end: set by the worker, read by a logits processor."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepStops:
    """`rows`: of this step's logits, each to end with the token sampled now.

    `installed`: set by the processor; a worker that stops raises without it.
    """

    rows: list[int] = field(default_factory=list)
    installed: bool = False


STOPS = StepStops()  # a worker has one model runner

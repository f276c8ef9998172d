"""StepStops: which rows of the batch that is sampled now are to end; the worker writes it, a logits processor reads it.

STOPS.rows = [2]                        # in `execute_model`, once the step's tokens are scored
for row in STOPS.rows: ...              # in the processor: row i of the logits is request i of the batch
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepStops:
    """`rows`: of the logits of this step, each to end with the token that is sampled now.

    `installed`: set by the processor once it is part of the sampler; a worker that is to stop raises without it.
    """

    rows: list[int] = field(default_factory=list)
    installed: bool = False


STOPS = StepStops()  # of this process: a worker has one model runner

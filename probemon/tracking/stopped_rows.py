"""StoppedRows: a stopping criterion for rows that an action stopped.

model.generate(**inputs, stopping_criteria=StoppingCriteriaList([StoppedRows(watcher)]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from probemon.errors import UnsupportedDecoding
from probemon.tracking.token_source import TokenSource


class StoppedRows(StoppingCriteria):
    """Raises `UnsupportedDecoding` in an unwatched generation."""

    def __init__(self, watcher: TokenSource) -> None:
        self._watcher = watcher

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return the rows to end, bool [B]."""
        if self._watcher.current() is None:
            raise UnsupportedDecoding(
                "run.stopping_criteria is of a run that does not watch this generate(): its rules would never stop it."
                " Call the model that is attached, inside the with block"
            )
        return self._watcher.stopped(torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device))

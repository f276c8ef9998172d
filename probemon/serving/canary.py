"""Canary: a short generation through our taps, which shows that the server still sees what its host runs.

canary = Canary(served)                    # the first look, with which later ones are compared; Blind
canary.look()                              # Blind where tokens are unseen, or their scores are others
"""

from __future__ import annotations

import numpy as np
import torch

from probemon.core.scores import Scores
from probemon.errors import Blind
from probemon.serving.served import Served

_TEXT = "The canary sings of ships and whales."
_N_TOKENS = 2
_MOST_DIFFERENCE = 1e-3  # of a score: kernels of a GPU may add up in another order


class Canary:
    """Made once the host is loaded."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._ids = torch.tensor([list(served.tokenizer(_TEXT)["input_ids"])], device=served.model.device)
        self._first = self._scores()

    def look(self) -> None:
        """Run the canary. Raises `Blind`."""
        scores, first = self._scores(), self._first
        if not np.array_equal(scores.ptr, first.ptr) or not np.array_equal(scores.probes, first.probes):
            raise Blind("the canary's active concepts are others than when the server began: start it again")
        difference = float(np.abs(scores.values - first.values).max(initial=0.0))
        if not difference <= _MOST_DIFFERENCE:
            raise Blind(f"the canary's scores are {difference:.2g} off those of the server's beginning: start it again")

    def _scores(self) -> Scores:
        served = self._served
        try:
            with served.manager.attach(served.model, served.tokenizer, one_thread=True) as run:
                out = served.model.generate(
                    input_ids=self._ids,
                    attention_mask=torch.ones_like(self._ids),
                    max_new_tokens=_N_TOKENS,
                    min_new_tokens=_N_TOKENS,
                    do_sample=False,
                    num_beams=1,
                    **served.padding,
                )
            result = run.result(out)
        except Exception as error:
            raise Blind(f"the canary could not be watched: {type(error).__name__}: {error}") from error
        unseen = {reason for reason in result.coverage.unseen[:-1] if reason}  # the last is never run
        if unseen or len(result) != self._ids.shape[1] + _N_TOKENS:
            raise Blind(f"tokens of the canary were not seen: {', '.join(sorted(unseen))}")
        return result.scores

"""Draws: the random numbers of one answer, its own also where several answers are drawn at the same time.

draws = Draws(seed=7, device=model.device)
model.generate(do_sample=True, logits_processor=LogitsProcessorList([draws]), stopping_criteria=[ends])
draws.end_step()                     # by the criterion: the token has been drawn
draws.close()                        # however it ended

torch has one generator of random numbers for all threads, and `generate` takes no other. So each answer has a state of
its own, which is put into that generator for the moment in which a token is drawn.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import LogitsProcessor

_DRAWING = threading.Lock()  # held by the answer whose token is drawn


class Draws(LogitsProcessor):
    """Draws the tokens that `torch.manual_seed(seed)` before `generate` would have drawn; without a seed, others each
    time.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._device = device
        generator = torch.Generator(device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        self._state, self._before = generator.get_state(), None
        self._held = False

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Put the answer's own numbers in place; the scores stay as they are."""
        _DRAWING.acquire()
        self._held = True
        self._before = self._get()
        self._set(self._state)
        return scores

    def end_step(self) -> None:
        """Keep how far the numbers were used, and give the others theirs back."""
        if self._held:
            self._state = self._get()
            self.close()

    def close(self) -> None:
        """Give the others their numbers back, where they have not got them."""
        if self._held:
            self._set(self._before)
            self._held = False
            _DRAWING.release()

    def _get(self) -> Any:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)

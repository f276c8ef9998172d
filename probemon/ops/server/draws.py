"""Random numbers of one answer, independent of concurrent answers.

torch has one generator for all threads, so each answer installs its state while a token is drawn.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import LogitsProcessor

_DRAWING = threading.Lock()  # held while a token is drawn


class Draws(LogitsProcessor):
    """Draws as after `torch.manual_seed(seed)`; without a seed, at random."""

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
        """Install the answer's state; return the scores unchanged."""
        _DRAWING.acquire()
        self._held = True
        self._before = self._get()
        self._set(self._state)
        return scores

    def end_step(self) -> None:
        """Save the answer's state and restore the previous one."""
        if self._held:
            self._state = self._get()
            self.close()

    def close(self) -> None:
        """Restore the previous state, if necessary."""
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

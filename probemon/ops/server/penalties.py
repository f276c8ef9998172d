"""OpenAI's penalties and biases of single tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Changes logits: minus `presence` if the answer has the token, minus `frequency` for each time, plus its bias.

    https://platform.openai.com/docs/guides/text-generation (frequency and presence penalties). `n_prompt`: tokens that
    are not the answer's; `bias`: by token id.
    """

    def __init__(self, n_prompt: int, *, presence: float, frequency: float, bias: Mapping[int, float]) -> None:
        self._n_prompt, self._presence, self._frequency = n_prompt, presence, frequency
        self._ids, self._biases = list(bias), list(bias.values())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Return the changed logits [B, V] of the answers [B, T] so far."""
        written = input_ids[:, self._n_prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        scores = scores - self._frequency * counts - self._presence * (counts > 0)
        if self._ids:
            scores[:, self._ids] += torch.tensor(self._biases, dtype=scores.dtype, device=scores.device)
        return scores

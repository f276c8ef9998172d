"""A hand-written decode loop, followed like `generate()`.

with run.generating(from_column=ids.shape[1]) as loop:
    out = model(ids, past_key_values=cache)
    while True:
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        if loop.sampled(ids, ended=token[:, 0] == eos).all():
            break
        out = model(token, past_key_values=cache)
result = run.result(ids)
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from probemon.errors import AlignmentError, ConfigError, UnsupportedDecoding
from probemon.host.internals import generates_of_thread
from probemon.tracking.generation import Generation

Sampled = Callable[[Generation, Tensor, Tensor, bool], Tensor]


class HandLoop:
    """Reports samples to the run; made by `run.generating`."""

    def __init__(self, generation: Generation, sampled: Sampled, current: Callable[[], Generation | None]) -> None:
        self._generation, self._sampled, self._current = generation, sampled, current
        self.ids: Tensor | None = None  # last argument of `sampled`
        self._ended: Tensor | None = None

    def sampled(self, ids: Tensor, ended: Tensor | None = None) -> Tensor:
        """Take the sequence `ids [B, L]` after each sample; return the rows that end, bool `[B]`.

        Call it before the next forward. `ended [B]`: the loop's own ends; stopped rows are added. Scores and rules of
        earlier forwards are complete on return. Raises `ConceptRaised` for the action "raise", `AlignmentError` unless
        `ids` grow by one column.
        """
        generation, previous = self._generation, self.ids
        if self._current() is not generation:
            raise ConfigError("loop.sampled is for the block of run.generating, in the thread that opened it")
        if (
            not isinstance(ids, Tensor)
            or ids.dim() != 2
            or ids.dtype not in (torch.int64, torch.int32)
            or ids.device.type == "meta"
        ):
            raise ConfigError(f"ids is {described(ids)}: give the token ids of the whole sequence, [rows, columns]")
        expected = generation.prompt.columns + 1 if previous is None else previous.shape[1] + 1
        if ids.shape[1] != expected or (previous is not None and len(ids) != len(previous)):
            raise AlignmentError(
                f"ids have shape {tuple(ids.shape)}, expected {expected}"
                f" columns{'' if previous is None else f' of {len(previous)} rows'}: loop.sampled is called once for"
                " each new column, with the whole sequence"
            )
        if previous is not None and not torch.equal(ids[:, :-1], previous):
            raise UnsupportedDecoding(
                "a row goes on from another sequence than it had (beams, or tokens that were edited): which token a"
                " hidden state belongs to would be a guess. Generate with num_beams in generate(), which is followed"
            )
        if self._ended is not None and bool(self._ended.all()):
            raise AlignmentError(
                "every row has ended, and the loop goes on: leave it where loop.sampled(...).all() says so"
            )
        if ended is None:
            ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        elif not isinstance(ended, Tensor) or tuple(ended.shape) != (len(ids),) or ended.dtype != torch.bool:
            raise ConfigError(f"ended is {described(ended)}: give a bool for each of {len(ids)} rows")
        self._ended = ended if self._ended is None else ended | self._ended.to(ended.device)
        self.ids = ids.detach().clone()
        self._ended = self._sampled(generation, ids, self._ended, True)
        generation.take_sampled(ids.detach().cpu().numpy())
        return self._ended.clone()


def generate_around(decoder: nn.Module) -> tuple[FrameType, Any] | None:
    """Return frame and model of this thread's `generate()` with `decoder`, or None."""
    for frame, model in generates_of_thread():
        if any(module is decoder for module in model.modules()):
            return frame, model
    return None


def described(value: Any) -> str:
    """Describe a value for an error."""
    return (
        f"a tensor {value.dtype} of shape {tuple(value.shape)} on {value.device.type}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )

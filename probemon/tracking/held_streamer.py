"""HeldStreamer: shows a token only after its own score, so that a stop hides its cause.

    streamer = run.hold(TextStreamer(tokenizer))
    model.generate(**inputs, streamer=streamer)
    streamer.withheld                       # generated ids that were not shown

The last token is never scored, and only `show_last` shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from probemon.errors import ConfigError
from probemon.tracking.generation import Generation

LOG = logging.getLogger("probemon")


class HeldStreamer(BaseStreamer):
    """Wraps the user's streamer; one sequence."""

    def __init__(self, streamer: Any, current: Callable[[], Generation | None], show_last: bool) -> None:
        self._streamer, self._current, self._show_last = streamer, current, show_last
        self._generation: Generation | None = None
        self._waiting: list[Tensor] = []
        self._column = 0  # of the first waiting token
        self.withheld: list[int] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt, then tokens."""
        generation = self._current()
        if generation is None:
            raise ConfigError(
                "a held streamer shows tokens whose scores are known, and no run watches this generate(): use it inside"
                " the with block"
            )
        if generation is not self._generation:
            if value.dim() > 1 and len(value) > 1:
                raise ConfigError(
                    f"a held streamer shows one sequence, this generate() has {len(value)}: score a batch without a"
                    " streamer"
                )
            if generation.by_hand and (value.shape[-1] != generation.prompt.columns or generation.ids is not None):
                raise ConfigError(
                    f"a held streamer is given the prompt first, {generation.prompt.columns} ids, and then token by"
                    f" token what was sampled; this is {tuple(value.shape)}. Put the prompt before the first"
                    " loop.sampled"
                )
            self._generation, self._waiting, self.withheld = generation, [], []
            self._column = generation.prompt.columns
            generation.on_failure.append(self.failed)
            self._streamer.put(value)
            return
        self._waiting.extend(value.reshape(-1).split(1))
        self._show(generation)

    def end(self) -> None:
        """Show scored tokens, and end."""
        generation = self._generation
        if generation is None:
            raise ConfigError("a held streamer ends after it was given a prompt: this one was given nothing")
        self._show(generation)
        if (
            self._show_last
            and generation.showable_columns() == self._column
            and len(self._waiting) == 1
            and generation.stop_column is None
        ):
            self._streamer.put(self._waiting.pop())
        generation.on_failure.remove(self.failed)
        self._keep_back()
        self._streamer.end()

    def _keep_back(self) -> None:
        self.withheld = [int(token) for token in self._waiting]
        self._waiting = []

    def failed(self) -> None:
        """End the inner streamer, whose reader would wait for ever."""
        self._keep_back()
        try:
            self._streamer.end()
        except Exception:  # generate()'s error matters more
            LOG.exception("%s.end() failed", type(self._streamer).__name__)

    def _show(self, generation: Generation) -> None:
        while self._waiting and self._column < generation.showable_columns():
            self._streamer.put(self._waiting.pop(0))
            self._column += 1

"""HeldStreamer: a streamer that shows a token only once its own score is known, so that a stop hides what caused it.

    streamer = run.hold(TextStreamer(tokenizer))
    model.generate(**inputs, streamer=streamer)
    streamer.withheld                       # ids that were generated and not shown

A token's score comes with the forward that reads it, one step after it was sampled. The last token generated is never
read, so it is never shown, unless `show_last` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from probemon.errors import ConfigError
from probemon.running import Generation


class HeldStreamer(BaseStreamer):
    """Between `generate` and the user's own streamer. One sequence, as every streamer of transformers'."""

    def __init__(self, streamer: Any, current: Callable[[], Generation | None], show_last: bool) -> None:
        self._streamer, self._current, self._show_last = streamer, current, show_last
        self._waiting: list[Tensor] = []
        self._begun = False
        self._column = 0  # of the first token that waits
        self.withheld: list[int] = []

    def put(self, value: Tensor) -> None:
        """The prompt first, then tokens as they are generated."""
        generation = self._generation()
        if not self._begun:
            self._begun, self._waiting, self.withheld = True, [], []
            self._column = generation.prompt.columns
            self._streamer.put(value)
            return
        self._waiting.extend(value.reshape(-1).split(1))
        self._show(generation.scored_columns)

    def end(self) -> None:
        """`generate` is done: shows what is scored and no more."""
        generation = self._generation()
        self._show(generation.scored_columns)
        if self._show_last and generation.stop_column is None and len(self._waiting) == 1:
            self._streamer.put(self._waiting.pop())
        self.withheld = [int(token) for token in self._waiting]
        self._begun, self._waiting = False, []
        self._streamer.end()

    def _show(self, end: int) -> None:
        stop = self._generation().stop_column
        while self._waiting and self._column < (end if stop is None else min(end, stop)):
            self._streamer.put(self._waiting.pop(0))
            self._column += 1

    def _generation(self) -> Generation:
        generation = self._current()
        if generation is None:
            raise ConfigError("a held streamer shows tokens whose scores are known, and no run watches this generate(): use it inside the with block")
        return generation

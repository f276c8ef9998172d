"""stream: tokens with their scores while a model generates.

    for event in manager.stream(model, tokenizer, [{"role": "user", "content": "..."}], max_new_tokens=40):
        print(event.token, [concept.path for concept in event.leading(3)])

`generate()` runs in a thread; leaving the loop (or closing the generator) stops it at its next token. A token's
scores come with the forward that reads it, one step after it was sampled; the last one is never read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.align import Placed
from probemon.errors import ConfigError
from probemon.pack import ProbePack
from probemon.record import LAST
from probemon.result import ConceptScore, Result, leading
from probemon.types import GENERATED, PHASES, Coverage, Scores

if TYPE_CHECKING:
    from probemon.manager import DynamicProbeManager


@dataclass(frozen=True)
class TokenEvent:
    """One token: `position` in the sequence, `token` its text, `phase` "prompt" or "generated", `scores` (one state).

    `unseen` is "" or the reason why there are no scores. The last event bears the `result` of the whole sequence.
    """

    position: int
    token_id: int
    token: str
    phase: str
    scores: Scores
    pack: ProbePack
    result: Result | None = None

    @property
    def unseen(self) -> str:
        """"" or why this token has no scores."""
        return self.scores.coverage.unseen[0]

    @property
    def coverage(self) -> Coverage:
        """What was looked at."""
        return self.scores.coverage

    def leading(self, k: int = 3) -> list[ConceptScore]:
        """The firing concepts by strength, at most `k`, none above or below a stronger one of the list."""
        return leading(self.pack, self.scores, 0, k)


def encode(tokenizer: Any, messages: str | Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """A batch of one for `generate`: a chat through the tokenizer's template, a plain text as it is."""
    if isinstance(messages, str):
        return dict(tokenizer(messages, return_tensors="pt"))
    return dict(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True))


def stream(
    manager: DynamicProbeManager, model: Any, tokenizer: Any, messages: str | Sequence[Mapping[str, str]], *,
    include_prompt: bool = False, strict: bool = False, **generate: Any,
) -> Iterator[TokenEvent]:  # fmt: skip
    """Events of one sequence; `generate`: arguments of `model.generate`. What it raises is raised here."""
    if tokenizer is None:
        raise ConfigError("stream needs the model's tokenizer to encode the messages")
    if generate.get("num_return_sequences") not in (None, 1):
        raise ConfigError("stream follows one sequence: attach and use run.result for several")
    if generate.get("num_beams") not in (None, 1):
        raise ConfigError("stream follows one sequence, beams are many until the end: attach and use run.result")
    run = manager.attach(model, tokenizer, strict=strict)
    inputs = {name: value.to(model.device) for name, value in encode(tokenizer, messages).items()}
    arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    run.listen(lambda placed, scores: arrived.put(("tokens", (placed, scores))))
    return _events(run, model, {**inputs, **generate}, arrived, include_prompt)


def _events(
    run: Any, model: Any, arguments: dict[str, Any], arrived: queue.SimpleQueue[tuple[str, Any]], include_prompt: bool
) -> Iterator[TokenEvent]:
    def work() -> None:
        try:
            with run:
                arrived.put(("done", model.generate(**arguments)))
        except BaseException as error:  # the consumer raises it
            arrived.put(("error", error))

    thread = threading.Thread(target=work, name="probemon-stream", daemon=True)
    thread.start()
    try:
        while True:
            kind, what = arrived.get()
            if kind == "error":
                raise what
            if kind == "done":
                yield _last(run, what)
                return
            placed, scores = what
            if placed.phase == GENERATED or include_prompt:
                for i in range(len(placed)):
                    yield _event(run, placed, scores, i)
    finally:
        run.stop()
        thread.join()


def _event(run: Any, placed: Placed, scores: Scores, i: int) -> TokenEvent:
    token_id = int(placed.ids[i])
    return TokenEvent(
        int(placed.columns[i]), token_id, run.tokenizer.decode([token_id]), PHASES[placed.phase],
        scores.take(np.array([i])), run.manager.pack,
    )  # fmt: skip


def _last(run: Any, out: Any) -> TokenEvent:
    result = run.result(out)
    i = len(result) - 1
    assert result.coverage.unseen[i] == LAST
    token_id = int(result.token_id[i])
    return TokenEvent(
        int(result.position[i]), token_id, run.tokenizer.decode([token_id]), PHASES[result.phase[i]],
        result.scores.take(np.array([i])), run.manager.pack, result,
    )  # fmt: skip

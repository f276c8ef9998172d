"""Yields tokens with their scores while a model generates.

    for event in manager.stream(model, tokenizer, [{"role": "user", "content": "..."}], max_new_tokens=40):
        print(event.token, [concept.path for concept in event.leading(3)])

    async for event in manager.stream_async(model, tokenizer, messages, max_new_tokens=40):
        ...

`generate()` runs in a thread, waits while `max_waiting` batches are unread, and stops when the generator is closed.
Scores come one step after a token is sampled; the last token has none.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from probemon.core.aggregate import Doubles
from probemon.core.memory_reads import Reading, with_texts
from probemon.core.scores import GENERATED, PHASES, Coverage, Scores
from probemon.errors import ChatRefused, ConfigError
from probemon.host.chat_forms import check_said
from probemon.host.chat_template import render
from probemon.host.text_tokens import ids_of
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.result import ConceptScore, Result, leading, ranked
from probemon.monitor.run import MonitorRun
from probemon.packs.group import AnyPack
from probemon.tracking.generate_call import read_call
from probemon.tracking.recording import LAST
from probemon.util.checks import check_count, check_mappings


@dataclass(frozen=True)
class TokenEvent:
    """One token.

    `phase`: "prompt" or "generated"
    `result`: only on the last event
    `reading`: top memory reads, with a follower `Routing`
    `functions`: its number by name of a function probe, NaN without one
    """

    position: int
    token_id: int
    token: str
    phase: str
    scores: Scores
    pack: AnyPack
    result: Result | None = None
    reading: tuple[Reading, ...] = ()
    functions: Mapping[str, float] = field(default_factory=dict)

    @property
    def unseen(self) -> str:
        """Return why there are no scores, or ""."""
        return self.scores.coverage.unseen[0]

    @property
    def coverage(self) -> Coverage:
        """Return its coverage."""
        return self.scores.coverage

    def leading(self, k: int = 3, above: Doubles | None = None) -> list[ConceptScore]:
        """Return at most `k` firing concepts by strength, the lowest of each path. `above [P]`: further thresholds; inf
        excludes.
        """
        return leading(self.pack, self.scores, 0, k, above, **self._where)

    def ranked(self, k: int = 3, above: Doubles | None = None) -> list[ConceptScore]:
        """Return the `k` best concepts, for packs without thresholds."""
        return ranked(self.pack, self.scores, 0, k, above, **self._where)

    @property
    def _where(self) -> dict[str, Any]:
        return {"position": self.position, "token_id": self.token_id, "token": self.token}


def encode(tokenizer: Any, messages: str | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch of one for `generate`; messages go through the chat template. Raises `ConfigError`."""
    if isinstance(messages, str):
        ids = ids_of(tokenizer, messages)
    else:
        check_mappings("messages", messages)
        try:
            check_said(messages, None)
            ids = render(tokenizer, messages, add_generation_prompt=True).ids
        except ChatRefused as error:
            raise ConfigError(str(error)) from error
    input_ids = torch.tensor([ids], dtype=torch.int64)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def stream(
    run: MonitorRun, model: Any, messages: str | Sequence[Mapping[str, Any]], **options: Any
) -> Iterator[TokenEvent]:
    """Yield the events of one sequence. Raises as `model.generate`.

    `options`: see `manager.stream`
    """
    return _events(_Generating(run, model, messages, **options))


def stream_async(
    run: MonitorRun, model: Any, messages: str | Sequence[Mapping[str, Any]], **options: Any
) -> AsyncIterator[TokenEvent]:
    """Yield the same without blocking the event loop."""
    return _async_events(_Generating(run, model, messages, **options))


def _events(generating: _Generating) -> Iterator[TokenEvent]:
    generating.start()
    try:
        while (events := generating.take()) is not None:
            yield from events
    finally:
        generating.close()


async def _async_events(generating: _Generating) -> AsyncIterator[TokenEvent]:
    generating.start()
    try:
        while (events := await asyncio.to_thread(generating.take)) is not None:
            for event in events:
                yield event
    finally:
        # Closing wakes a thread that still waits in take().
        generating.stop()
        await asyncio.shield(asyncio.to_thread(generating.close))


class _Reader(Follower):
    """Passes tokens to a stream while it exists."""

    kind = "a stream"

    def __init__(self, put: weakref.WeakMethod[Any]) -> None:
        self._put = put

    def scored(self, batch: Batch, scores: Scores) -> None:
        if (put := self._put()) is not None:
            put(batch, scores)


class _Generating:
    """A watched `generate()` in a thread, with a bounded buffer."""

    def __init__(
        self,
        run: MonitorRun,
        model: Any,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        include_prompt: bool = False,
        max_waiting: int = 64,
        prepare: Callable[[MonitorRun], object] | None = None,
        **generate: Any,
    ) -> None:
        max_waiting = check_count(
            "max_waiting",
            max_waiting,
            least=1,
            remedy="it counts batches of tokens that wait for the reader, so give 1 or more",
        )
        self._run = run
        self._run.follow(_Reader(weakref.WeakMethod(self._put)))
        self._prepare = prepare
        self._model, self._include_prompt, self._max_waiting = model, include_prompt, max_waiting
        self._arguments = {
            name: value.to(model.device) for name, value in encode(run.tokenizer, messages).items()
        } | generate
        if generate.get("num_return_sequences") not in (None, 1):
            raise ConfigError("stream follows one sequence: attach and use run.result for several")
        # The generation config may ask for several sequences, too.
        prompt = read_call(self._run.model, (), self._arguments)
        if prompt.n_beams > 1 or prompt.n_sequences > 1:
            raise ConfigError(
                f"stream follows one sequence, {prompt.n_beams} beams and {prompt.n_sequences} sequences are asked for:"
                " attach and use run.result"
            )
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Batch, Scores]] = deque()
        self._out: Any = None
        self._error: BaseException | None = None
        self._done = self._over = self._closed = False
        # The caller's context, so that tracing finds the enclosing span.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._generate,), name="probemon-stream", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[TokenEvent] | None:
        """Return the next events, None after the last; raise errors of `generate`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._done or self._closed)
            if self._closed or self._over:
                return None
            if self._waiting:
                batch, scores = self._waiting.popleft()
                self._changed.notify_all()
                return [self._event(batch, scores, i) for i in range(len(batch.placed))]
            self._over = True
            if self._error is not None:
                raise self._error
        return [self._last()]

    def stop(self) -> None:
        """End this `generate` at its next token."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join()

    def _generate(self) -> None:
        try:
            with self._run:
                if self._prepare is not None:
                    self._prepare(self._run)
                if not self._closed:
                    self._out = self._model.generate(**self._arguments)
        except BaseException as error:  # the reader raises it
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _put(self, batch: Batch, scores: Scores) -> None:
        if self._closed:
            self._run.stop_mine(cancelled=True)
        elif batch.placed.phase == GENERATED or self._include_prompt:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) < self._max_waiting or self._closed)
                self._waiting.append((batch, scores))
                self._changed.notify_all()

    def _event(self, batch: Batch, scores: Scores, i: int) -> TokenEvent:
        placed, reads = batch.placed, batch.reads
        token_id = int(placed.ids[i])
        return TokenEvent(
            int(placed.columns[i]),
            token_id,
            self._run.tokenizer.decode([token_id]),
            PHASES[placed.phase],
            scores.take(np.array([i])),
            self._run.manager.pack,
            reading=() if reads is None else tuple(with_texts(reads.of(i), self._run.tokenizer)),
            functions={name: float(one.values[i]) for name, one in batch.functions.items()},
        )

    def _last(self) -> TokenEvent:
        result = self._run.result(self._out)
        i = len(result) - 1
        assert result.coverage.unseen[i] == LAST
        token_id = int(result.token_id[i])
        return TokenEvent(
            int(result.position[i]),
            token_id,
            self._run.tokenizer.decode([token_id]),
            PHASES[result.phase[i]],
            result.scores.take(np.array([i])),
            self._run.manager.pack,
            result,
        )

"""Shows each token of an answer once its score is known, so that a stop hides its cause.

async for piece in hold(client, engine.generate(prompt, params, "my-request")):
    print(piece.text, end="")

A token's score comes with the next step, so one token is held. The last one is never run, and shown only with
`show_last`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from probemon.errors import ConfigError
from probemon.monitor.rules import Event
from probemon.ops.vllm.client import VllmClient
from probemon.ops.vllm.request_log import RequestLog
from probemon.util.token_texts import TokenTexts


@dataclass(frozen=True)
class HeldPiece:
    """Tokens with known scores. The last piece is `finished`, with the `event` that stopped it and the number of
    hidden tokens.
    """

    ids: tuple[int, ...]
    text: str
    finished: bool = False
    event: Event | None = None
    n_withheld: int = 0


async def hold(
    client: VllmClient,
    outputs: AsyncIterator[Any],
    *,
    delta: bool = False,
    show_last: bool = False,
    wait_seconds: float = 10.0,
) -> AsyncIterator[HeldPiece]:
    """Yield the pieces of one answer of `AsyncLLM.generate`. Raises `ConfigError` without a tokenizer.

    - `delta`: outputs have the new tokens only (`RequestOutputKind.DELTA`)
    - `wait_seconds`: for a score; without one, nothing more is shown
    """
    tokenizer = client.tokenizer
    if tokenizer is None:
        raise ConfigError("held answers are texts: set client.tokenizer")
    texts = TokenTexts(
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    )
    answer, ids, n_shown = _Answer(client), list[int](), 0
    async for output in outputs:
        if len(output.outputs) != 1:
            raise ConfigError(f"one answer is held at a time, this request has {len(output.outputs)}: give n=1")
        new = list(output.outputs[0].token_ids)
        ids = [*ids, *new] if delta else new
        answer.grow(output.request_id, list(output.prompt_token_ids or ()), ids)
        n_known = await answer.n_known(wait_seconds)
        if n_known > n_shown:
            shown_ids = ids[n_shown:n_known]
            n_shown = n_known
            yield HeldPiece(tuple(shown_ids), "".join(map(texts.add, shown_ids)))
    log = answer.log()
    stopped = log is not None and log.stop_column is not None
    if show_last and not stopped and ids and n_shown == len(ids) - 1:
        n_shown += 1
        yield HeldPiece((ids[-1],), texts.add(ids[-1]))
    yield HeldPiece((), texts.finish(), True, None if log is None else log.stop_event, len(ids) - n_shown)


class _Answer:
    """The tokens of an answer, and its log; names may repeat."""

    def __init__(self, client: VllmClient) -> None:
        self._client, self._request, self._ids, self._n_prompt = client, "", list[int](), 0
        self._n_same: dict[str, int] = {}

    def grow(self, request: str, prompt: list[int], ids: list[int]) -> None:
        """Set prompt and generated tokens."""
        self._request, self._n_prompt, self._ids = request, len(prompt), [*prompt, *ids]

    def log(self) -> RequestLog | None:
        """Return the newest log with the answer's tokens."""
        for log in self._client.logs_of(self._request):
            n_same = self._n_same.get(log.request, 0)
            if n_same >= 0 and log.n_prompt == self._n_prompt and log.first_difference(self._ids, n_same) is None:
                self._n_same[log.request] = min(len(self._ids), log.n_columns)
                return log
            self._n_same[log.request] = -1
        return None

    async def n_known(self, wait_seconds: float) -> int:
        """Return how many generated tokens may be shown, once that is known."""
        n_run = len(self._ids) - 1

        def ready() -> bool:
            log = self.log()
            done = log is not None and (log.n_columns >= n_run or log.n_showable < log.n_columns)
            return done or self._client.mismatch is not None

        if n_run > self._n_prompt and not ready():
            await asyncio.to_thread(self._client.wait, ready, wait_seconds)
        self._client.check()
        log = self.log()
        if log is None:
            return 0
        if log.stop_column is not None:  # all before it ran; an abort may come before the token that met the rule
            n_run = max(n_run, min(log.stop_column, len(self._ids)))
        return max(0, min(log.n_showable, n_run) - self._n_prompt)

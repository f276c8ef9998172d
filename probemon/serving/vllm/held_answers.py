"""hold: an answer as it comes, each token once its own score is known, so that a stop hides what caused it.

async for piece in hold(client, engine.generate(prompt, params, "my-request")):
    print(piece.text, end="")
piece.event, piece.n_withheld               # of the last piece: which rule stopped it, and what is not shown

A token's score comes with the step that reads it, before the token after it: what is held is one token. The last one is
never run, so it is not shown, unless `show_last` asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from probemon.core.token_texts import TokenTexts
from probemon.errors import ConfigError
from probemon.monitor.rules import Event
from probemon.serving.vllm.client import VllmClient


@dataclass(frozen=True)
class Held:
    """Tokens whose scores are known: their `ids` and `text`. The last piece of an answer is `finished`, and says which
    `event` stopped it, where a rule did, and how many tokens were generated and are not shown.
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
) -> AsyncIterator[Held]:
    """Yield the pieces of one answer. `outputs`: what `AsyncLLM.generate` yields, one answer to a request.

    `delta`: each of them has the new tokens alone (`RequestOutputKind.DELTA`). A token whose score does not come within
    `wait_seconds`, or that has none, ends what is shown. Raises `ConfigError` without a tokenizer.
    """
    tokenizer = client.tokenizer
    if tokenizer is None:
        raise ConfigError("held answers are texts: set client.tokenizer")
    texts = TokenTexts(
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    )
    ids, n_shown, n_prompt, request = list[int](), 0, 0, ""
    async for output in outputs:
        if len(output.outputs) != 1:
            raise ConfigError(f"one answer is held at a time, this request has {len(output.outputs)}: give n=1")
        new = list(output.outputs[0].token_ids)
        ids = [*ids, *new] if delta else new
        n_prompt, request = len(output.prompt_token_ids or ()), output.request_id
        n_known = await _known(client, request, n_prompt, len(ids) - 1, wait_seconds)
        if n_known > n_shown:
            some = ids[n_shown:n_known]
            n_shown = n_known
            yield Held(tuple(some), "".join(map(texts.add, some)))
    log = client.log_of(request)
    stopped = log is not None and log.stop_column is not None
    if show_last and not stopped and ids and n_shown == len(ids) - 1:
        n_shown += 1
        yield Held((ids[-1],), texts.add(ids[-1]))
    event = next((one for one in reversed(client.events) if log is not None and one.request == log.request), None)
    yield Held((), texts.finish(), True, event if stopped else None, len(ids) - n_shown)


async def _known(client: VllmClient, request: str, n_prompt: int, n_run: int, wait_seconds: float) -> int:
    """Return how many generated tokens may be shown, of `n_run` that the host has run by now."""

    def shown() -> int:
        log = client.log_of(request)
        return 0 if log is None else min(log.n_showable - n_prompt, n_run)

    def ready() -> bool:
        log = client.log_of(request)
        return log is not None and (log.n_columns >= n_prompt + n_run or log.n_showable < log.n_columns)

    if n_run > 0 and not ready():
        await asyncio.to_thread(client.wait, ready, wait_seconds)
    return max(0, shown())

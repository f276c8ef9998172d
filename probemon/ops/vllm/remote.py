"""Scores of `probemon vllm serve`, over HTTP.

scores = RemoteScores("http://127.0.0.1:8000", "watch.yaml", token="...")
reply = openai_client.chat.completions.create(..., extra_body={"return_token_ids": True})
result = scores.result(reply)                   # row i is choice i
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from probemon.errors import AlignmentError, ConfigError
from probemon.monitor.result import Result
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.vllm.messages import RequestScores, unpack
from probemon.ops.vllm.request_log import END_SECONDS, RequestLog, is_cut_short
from probemon.ops.vllm.request_names import names_of_choices
from probemon.tracking.recording import RecordedTokens

_TIMEOUT_SECONDS = 30.0  # of one request
_PAUSE_SECONDS = 0.05  # between requests


class RemoteScores:
    """`address`: without /v1. `deployment`: the server's file."""

    def __init__(
        self, address: str, deployment: str | Path, *, token: str | None = None, tokenizer: Any = None
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"address is {address!r}: give that of the server, such as http://127.0.0.1:8000")
        self._address, self._token, self._tokenizer = address.rstrip("/"), token, tokenizer
        self._deployment = Deployment.read(deployment)
        self._pack = self._deployment.open_packs()

    def result(self, reply: Any, *, timeout_seconds: float = 10.0) -> Result:
        """Return the scores of a reply with token ids, an OpenAI object or its JSON.

        Waits up to `timeout_seconds`. Raises `AlignmentError`.
        """
        content = reply if isinstance(reply, Mapping) else reply.model_dump()
        choices = content["choices"]
        if not choices:
            raise AlignmentError("the reply has no choices")
        began = time.monotonic()
        while True:
            seconds = time.monotonic() - began
            first: AlignmentError | None = None
            for names in names_of_choices(content["id"], content.get("object", ""), len(choices)):
                try:
                    logs = [self._log(names[choice["index"]]) for choice in choices]
                    result = self._result(content, logs)
                except AlignmentError as error:
                    first = first or error
                    continue
                if seconds >= timeout_seconds or all(
                    _is_complete(log, choice, seconds)
                    for (log, _), choice in zip(logs, _with_prompts(content), strict=True)
                ):
                    return result
                break
            else:
                assert first is not None
                if seconds >= min(END_SECONDS, timeout_seconds):
                    raise first
            time.sleep(_PAUSE_SECONDS)

    def _result(self, content: Mapping[str, Any], logs: list[tuple[RequestLog, bool]]) -> Result:
        parts, watches = list[RecordedTokens](), list[tuple[int, int, int]]()
        deployments: dict[int, str | None] = {}
        for row, (choice, (log, lost)) in enumerate(zip(_with_prompts(content), logs, strict=True)):
            prompt, ids = choice["prompt_token_ids"], choice.get("token_ids")
            if prompt is None or ids is None:
                raise ConfigError(
                    'this reply has no ids of tokens: ask for them by extra_body={"return_token_ids": True}'
                )
            cut_short = is_cut_short(choice.get("finish_reason"), choice.get("stop_reason"))
            every = np.array([*prompt, *ids], dtype=np.int64)
            parts.append(log.tokens(every, len(prompt), lost=lost, cut_short=cut_short))
            watches += [(row, *one) for one in log.watched_from()]
            deployments |= log.deployments
        tokens = RecordedTokens.join(parts, self._pack.n_probes)
        names = (content["id"],) * len(logs)
        result = Result(self._pack, self._tokenizer, tokens, requests=names, watches=tuple(watches))
        result.deployments = deployments
        return result

    def _log(self, request: str) -> tuple[RequestLog, bool]:
        """Return a log, and whether messages were lost."""
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        http_request = urllib.request.Request(f"{self._address}/probemon/requests/{request}/scores", headers=headers)
        try:
            with urllib.request.urlopen(http_request, timeout=_TIMEOUT_SECONDS) as answer:
                message = unpack(answer.read())
        except urllib.error.HTTPError as error:
            raise AlignmentError(
                f"the server has no scores of request {request!r} ({error.code}: {error.read()[:200]!r}): it keeps"
                " those of its newest that have ended (--keep-requests)"
            ) from error
        except OSError as error:
            raise ConfigError(f"no server answers at {self._address}: {error}") from error
        assert isinstance(message, RequestScores)
        return RequestLog.of(message, self._pack.n_probes), message.lost


def _with_prompts(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return choices with prompt ids, which a chat has once."""
    whole = content.get("prompt_token_ids")
    return [{**choice, "prompt_token_ids": choice.get("prompt_token_ids") or whole} for choice in content["choices"]]


def _is_complete(log: RequestLog, choice: Mapping[str, Any], seconds: float) -> bool:
    """True if all has come. `seconds`: waited so far."""
    n_run = len(choice["prompt_token_ids"]) + max(0, len(choice["token_ids"]) - 1)
    return log.is_whole(n_run, with_end=seconds < END_SECONDS)

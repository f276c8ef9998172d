"""Concepts in the replies of vLLM's OpenAI server, where a request has a `probemon` object: as `probemon serve` gives.

    replies = Replies(client, limits)
    await replies(app, scope, receive, send)          # of /v1/chat/completions or /v1/completions

vLLM is asked for the ids of tokens, by which their scores are found. Text is never held back: in a stream, a token's
concepts come with the next chunk, and the last ones with the reason to finish.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from probemon.core.hierarchy import Mask
from probemon.core.scores import GENERATED, PHASES, PROMPT, Scores
from probemon.errors import RequestRefused
from probemon.monitor.result import Result
from probemon.ops.server.answers import error_object
from probemon.ops.server.guard import App, Receive, Scope, Send
from probemon.ops.server.limits import Limits
from probemon.ops.server.requests import RequestedWatch, read_watch
from probemon.ops.server.served import shown_probes
from probemon.ops.server.token_objects import Told
from probemon.ops.vllm.client import VllmClient
from probemon.ops.vllm.request_log import RequestLog
from probemon.ops.vllm.request_names import names_of_request
from probemon.util.token_texts import TokenTexts

PATHS = ("/v1/chat/completions", "/v1/completions")
_WAIT_SECONDS = 5.0  # for the last scores of a reply
_NO_IDS = "vLLM gave no ids of tokens for this answer, so whose scores it has is unknown"


class Replies:
    """`client`: with a tokenizer."""

    def __init__(self, client: VllmClient, limits: Limits) -> None:
        self._client, self._limits = client, limits

    async def __call__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by vLLM's `app`, with concepts if they were asked for."""
        body = await _body_of(receive)
        wanted = None
        if b'"probemon"' in body:
            try:
                asked = json.loads(body)
                wanted = asked.pop("probemon", None) if isinstance(asked, dict) else None
            except (ValueError, RecursionError):  # vLLM says what is wrong
                wanted = None
        if wanted is None:
            await app(scope, _replayed(body, receive), send)
            return
        try:
            reply = _Reply(self._client, read_watch(wanted, self._limits), asked)
        except RequestRefused as error:
            content = json.dumps(error_object(str(error), error.param, code=error.code)).encode()
            await _send_whole(send, error.status, content)
            return
        body = json.dumps({**asked, "return_token_ids": True}).encode()
        headers = [one for one in scope["headers"] if one[0] != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await app(scope, _replayed(body, receive), _Rewriter(reply, send))


class _Rewriter:
    """Takes what vLLM sends, and sends it with concepts."""

    def __init__(self, reply: _Reply, send: Send) -> None:
        self._reply, self._send = reply, send
        self._start: Any = None
        self._kind, self._body = "", b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
            self._kind = kind if message["status"] == 200 else ""
            if self._kind == "application/json":
                self._start = message  # with the length of another body
            else:
                await self._send(message)
        elif message["type"] != "http.response.body" or self._kind not in ("application/json", "text/event-stream"):
            await self._send(message)
        elif self._kind == "application/json":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                content = await self._whole(self._body)
                kept = [one for one in self._start["headers"] if one[0].lower() != b"content-length"]
                length = (b"content-length", str(len(content)).encode())
                await self._send({**self._start, "headers": [*kept, length]})
                await self._send({"type": "http.response.body", "body": content})
        else:
            *events, self._body = (self._body + message.get("body", b"")).split(b"\n\n")
            more = message.get("more_body", False)
            for one in events:
                await self._event(one)
            if not more or not events:
                await self._send({**message, "body": b"" if more else self._body})

    async def _whole(self, body: bytes) -> bytes:
        try:
            return json.dumps(await self._reply.whole(json.loads(body))).encode()
        except Exception as error:  # an answer without concepts is better than none
            self._reply.failed(error)
            return body

    async def _event(self, event: bytes) -> None:
        _, found, data = event.partition(b"data: ")
        if not found or data == b"[DONE]":
            await self._give(event)
            return
        try:
            for content in _halves(json.loads(data)):
                await self._give(b"data: " + json.dumps(await self._reply.chunk(content)).encode())
        except Exception as error:
            self._reply.failed(error)
            await self._give(event)

    async def _give(self, event: bytes) -> None:
        await self._send({"type": "http.response.body", "body": event + b"\n\n", "more_body": True})


class _Reply:
    """A request with a `probemon` object, and its choices so far."""

    def __init__(self, client: VllmClient, watch: RequestedWatch, asked: Mapping[str, Any]) -> None:
        if watch.rules or watch.hold:
            param = "probemon.rules" if watch.rules else "probemon.hold"
            raise RequestRefused(f"{param}: inside vLLM the server's deployment has the rules; leave it out", param)
        if asked.get("echo"):
            raise RequestRefused("echo is true, and vLLM leaves an echo out where ids of tokens are asked for", "echo")
        self.client, self.watch = client, watch
        self._ends_at: float | None = None
        self._is_beams = bool(asked.get("use_beam_search"))
        self.shown = shown_probes(client.manager, watch)
        self._asked_ids = bool(asked.get("return_token_ids"))
        self.n = _count(asked.get("n"))
        prompt = asked.get("prompt")
        many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        self._n_prompts = len(prompt or ()) if many else 1
        self._choices: dict[int, _Choice] = {}

    async def whole(self, content: dict[str, Any]) -> dict[str, Any]:
        """Add concepts to a reply."""
        for choice in content.get("choices", ()):
            one = self._choice(content, choice)
            answer = choice.get("message", choice)
            one.take(choice, _text_of(choice))
            await one.wait(self._seconds_left())
            answer["probemon"] = await asyncio.to_thread(one.whole)
        return self._without_ids(content)

    async def chunk(self, content: dict[str, Any]) -> dict[str, Any]:
        """Add what is known by now to a chunk of a stream."""
        for choice in content.get("choices", ()):
            one = self._choice(content, choice)
            told = choice.get("delta", choice)
            one.take(choice, _text_of(choice))
            ends = choice.get("finish_reason") is not None
            if ends:
                await one.wait(self._seconds_left())
                found = await asyncio.to_thread(one.whole)
                told["probemon_summary"] = found.pop("summary")
            else:
                found = {"tokens": one.tokens(), "events": one.events()}
            if any(found.values()):
                told["probemon"] = found
        return self._without_ids(content)

    def failed(self, error: Exception) -> None:
        """Keep an error: health says so."""
        self.client.failures.add("concepts in a reply", error)

    def _seconds_left(self) -> float:
        """Return how long this reply may still wait for scores, all choices together."""
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + (0.0 if self._is_beams else _WAIT_SECONDS)
        return max(0.0, self._ends_at - now)

    def _choice(self, content: Mapping[str, Any], choice: Mapping[str, Any]) -> _Choice:
        index = choice["index"]
        if index not in self._choices:
            chat = "chat" in content.get("object", "")
            names = names_of_request(content["id"], chat=chat, n_prompts=self._n_prompts, n=self.n)
            self._choices[index] = _Choice(self, index, names[index] if index < len(names) else content["id"])
        one = self._choices[index]
        prompt = choice.get("prompt_token_ids") or content.get("prompt_token_ids")
        if prompt and not one.prompt:
            one.begin(prompt)
        elif not one.prompt and self._n_prompts == 1:  # a stream gives it once, with its first choice
            one.begin(next((other.prompt for other in self._choices.values() if other.prompt), ()))
        return one

    def _without_ids(self, content: dict[str, Any]) -> dict[str, Any]:
        if not self._asked_ids:
            for one in (content, *content.get("choices", ())):
                for name in ("token_ids", "prompt_token_ids"):
                    one.pop(name, None)
        return content


class _Choice:
    """One answer: the ids and text that vLLM sent, and which of its tokens were told of."""

    def __init__(self, reply: _Reply, index: int, name: str) -> None:
        self._client, self._watch, self._index, self._name = reply.client, reply.watch, index, name
        shown: Mask | None = reply.shown
        self._told = Told(reply.client.manager.pack, reply.watch.top_k, shown)
        self.prompt: list[int] = []
        self._ids, self._text, self._joined = list[int](), "", ""
        self._n_same_text, self._is_text = 0, True  # characters that are those of the tokens, and whether all are
        tokenizer = reply.client.tokenizer
        self._texts = TokenTexts(
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        )
        self._spans: list[tuple[int, int]] = []
        tells_prompt = reply.watch.prompt and index % reply.n == 0  # once for all answers to a prompt
        self._n_told, self._n_events, self._n_same = (0 if tells_prompt else -1), 0, 0
        self._log_found: RequestLog | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Take the ids of the prompt."""
        self.prompt = list(prompt)

    def take(self, choice: Mapping[str, Any], text: str) -> None:
        """Take the next ids and text."""
        new = list(choice.get("token_ids") or ())
        self._ids += new
        self._text += text
        for token_id in new:
            begin = len(self._joined)
            self._joined += self._texts.add(token_id)
            self._spans.append((begin, len(self._joined)))
        if choice.get("finish_reason") is not None and self._spans:
            self._joined += self._texts.finish()
            self._spans[-1] = (self._spans[-1][0], len(self._joined))
        begin, end = self._n_same_text, min(len(self._text), len(self._joined))
        self._is_text, self._n_same_text = self._is_text and self._text[begin:end] == self._joined[begin:end], end

    async def wait(self, seconds: float) -> None:
        """Wait until the scores of all tokens that ran are here, or the engine has no more."""
        n_run = len(self.prompt) + max(0, len(self._ids) - 1)

        def ready() -> bool:
            log = self.log()
            return self._client.mismatch is not None or (log is not None and log.is_whole(n_run, with_end=False))

        if self._ids and not ready():
            await asyncio.to_thread(self._client.wait, ready, seconds)

    def log(self) -> RequestLog | None:
        """Return the newest log with these tokens."""
        ids = [*self.prompt, *self._ids]
        if self._log_found is not None and self._log_found.first_difference(ids, self._n_same) is None:
            self._n_same = min(len(ids), self._log_found.n_columns)
            return self._log_found
        for log in self._client.logs_of(self._name):
            if log.n_prompt == len(self.prompt) and log.first_difference(ids) is None:
                self._log_found = log
                return log
        return None

    def tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that became known."""
        n_prompt, ids, log = len(self.prompt), [*self.prompt, *self._ids], self.log()
        first = self._n_told if self._n_told >= 0 else n_prompt
        end = min(len(ids) - (len(ids) > n_prompt), 0 if log is None else log.n_columns)
        told: list[dict[str, Any]] = []
        if log is not None and end > first:
            columns, _, scores = log.since(first)
            told = [self._token(scores, i, at, ids[at]) for i, at in enumerate(columns.tolist()) if at < end]
        self._n_told = max(first, end)
        return told

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        log = self.log()
        met = [] if log is None else list(log.events)
        new, self._n_events = met[self._n_events :], len(met)
        return [self._told.event(event, self._index, action) for event, action in new]

    def whole(self) -> dict[str, Any]:
        """Return the other tokens, with scores or why they have none, the other events, and the summary."""
        if not self._ids:  # hidden reasoning, for one
            return {"tokens": [], "events": self.events(), "summary": None, "why": _NO_IDS}
        ids, result, log = [*self.prompt, *self._ids], self.result(), self.log()
        first = self._n_told if self._n_told >= 0 else len(self.prompt)
        tokens = [self._token(result.scores, at, at, ids[at]) for at in range(first, len(ids))]
        event, events = None if log is None else log.stop_event, self.events()
        stopped = None if event is None else self._told.event(event, self._index, "stop")
        self._n_told = len(ids)
        return {"tokens": tokens, "events": events, "summary": self._told.summary(result, stopped, 0)}

    def result(self) -> Result:
        """Return what is known by now."""
        return self._client.result_of_log(self._name, self.log(), [*self.prompt, *self._ids], len(self.prompt))

    # -- inside ----------------------------------------------------------------------------------

    def _token(self, scores: Scores, i: int, at: int, token_id: int) -> dict[str, Any]:
        n_prompt = len(self.prompt)
        if at < n_prompt:
            text, span = str(self._client.tokenizer.decode([token_id])), None
        else:
            begin, end = self._spans[at - n_prompt]
            text, span = self._joined[begin:end], (begin, end) if self._is_text else None
        return self._told.token(
            scores,
            i,
            choice=self._index,
            position=at,
            token_id=token_id,
            text=text,
            span=span,
            phase=PHASES[PROMPT if at < n_prompt else GENERATED],
        )


# -- inside --------------------------------------------------------------------------------------


def _halves(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a chunk whose choices end as two: its text, which is not held back for the last scores, and the end."""
    choices = content.get("choices", ())
    if not any(choice.get("finish_reason") is not None and _text_of(choice) for choice in choices):
        return [content]
    text, end = content, copy.deepcopy(content)
    for choice in text["choices"]:
        choice["finish_reason"] = None
    for choice in end["choices"]:
        choice.get("delta", choice)["content" if "delta" in choice else "text"] = ""
        choice["token_ids"] = []
    return [{**text, **({"usage": None} if "usage" in text else {})}, end]


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, whole or of a chunk."""
    said = choice.get("message", choice.get("delta"))
    return str((choice.get("text") if said is None else said.get("content")) or "")


def _count(n: Any) -> int:
    """Return the number of answers, which vLLM also takes as a text."""
    try:
        return max(1, int(float(n)))
    except (TypeError, ValueError, OverflowError):  # none, or vLLM refuses it
        return 1


async def _body_of(receive: Receive) -> bytes:
    parts = list[bytes]()
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body, then what comes after it: that the client has left."""
    given: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Any:
        return next(given, None) or await receive()

    return again


async def _send_whole(send: Send, status: int, content: bytes) -> None:
    headers: Sequence[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})

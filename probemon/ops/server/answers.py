"""Answers in OpenAI's format: a stream of chunks, or one object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from probemon.ops.server.answering import Ending, Piece
from probemon.ops.server.generator import Failure, Job
from probemon.ops.server.logprobs import ToldLogprob, completion_logprobs

DONE = b"data: [DONE]\n\n"
_OBJECTS = {
    ("chat", True): "chat.completion.chunk",
    ("chat", False): "chat.completion",
    ("completion", True): "text_completion",
    ("completion", False): "text_completion",
}


class Answers:
    """Makes OpenAI's objects, with concepts if the request asked for them."""

    def __init__(self, job: Job) -> None:
        request = job.prepared.request
        self._job, self._chat, self._watched = job, request.kind == "chat", request.probemon is not None
        self._include_usage = request.include_usage
        self._n_prompt_tokens = sum(len(ids) for ids in job.prepared.prompts)
        n_choices = len(job.prepared.prompts) * request.n
        self._endings: list[Ending | None] = [None] * n_choices
        self._begun = [False] * n_choices
        self._tokens: list[list[Any]] = [[] for _ in range(n_choices)]
        self._events: list[list[Any]] = [[] for _ in range(n_choices)]
        self._prompts = [""] * n_choices  # texts before those of the answers, with `echo`
        self._gives_logprobs = request.n_top_logprobs is not None
        self._logprobs: list[list[tuple[ToldLogprob, int]]] = [[] for _ in range(n_choices)]

    # -- a stream --------------------------------------------------------------------------------

    def chunks(self, told: Piece | Ending) -> bytes:
        """Return the chunk of a piece or ending."""
        if isinstance(told, Ending):
            self._endings[told.choice] = told
            extra_fields = {"probemon_summary": told.summary} if self._watched else {}
            return self._chunk(told.choice, extra_fields, told.finish_reason)
        logprobs = self._read(told)
        extra_fields = {"probemon": {"tokens": self._moved(told), "events": told.events}} if self._watched else {}
        texts = {"reasoning_content": told.reasoning, "content": told.prompt + told.text}
        delta = {name: text for name, text in texts.items() if text} | extra_fields
        return self._chunk(told.choice, delta, None, logprobs) if delta or logprobs else b""

    def last_chunks(self) -> bytes:
        """Return the end of the stream."""
        if not self._include_usage:
            return DONE
        return _data({**self._head(True), "choices": [], "usage": self._usage()}) + DONE

    def cut_chunks(self) -> bytes:
        """Return the end of a stream that failed."""
        open_choices = [choice for choice, ending in enumerate(self._endings) if ending is None]
        return b"".join(self._chunk(choice, {}, "error") for choice in open_choices) + DONE

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        logprobs: Sequence[tuple[ToldLogprob, int]] = (),
    ) -> bytes:
        if self._chat:
            first = {} if self._begun[choice] else {"role": "assistant", "content": ""}
            answer: dict[str, Any] = {"delta": {**first, **delta}}
        else:
            answer = {"text": delta.pop("content", ""), **delta}
        self._begun[choice] = True
        values = self._logprobs_object(logprobs) if logprobs else None
        chunk = {"index": choice, **answer, "logprobs": values, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return _data({**self._head(True), "choices": [chunk], **usage})

    # -- one object ------------------------------------------------------------------------------

    def add(self, told: Piece | Ending) -> None:
        """Collect a piece or ending."""
        if isinstance(told, Ending):
            self._endings[told.choice] = told
            return
        self._logprobs[told.choice] += self._read(told)
        if self._watched:
            self._tokens[told.choice] += self._moved(told)
            self._events[told.choice] += told.events

    def whole(self) -> dict[str, Any]:
        """Return the answers as one object."""
        return {**self._head(False), "choices": [self._choice(i) for i in range(len(self._endings))]} | {
            "usage": self._usage()
        }

    def _choice(self, choice: int) -> dict[str, Any]:
        ending = self._endings[choice]
        assert ending is not None
        concepts = {"tokens": self._tokens[choice], "events": self._events[choice], "summary": ending.summary}
        extra_fields: dict[str, Any] = {"probemon": concepts} if self._watched else {}
        if ending.reasoning is not None:
            extra_fields["reasoning_content"] = ending.reasoning or None
        answer: dict[str, Any] = (
            {"message": {"role": "assistant", "content": ending.text, "refusal": None, **extra_fields}}
            if self._chat
            else {"text": self._prompts[choice] + ending.text, **extra_fields}
        )
        logprobs = self._logprobs_object(self._logprobs[choice]) if self._gives_logprobs else None
        return {"index": choice, **answer, "logprobs": logprobs, "finish_reason": ending.finish_reason}

    # -- both ------------------------------------------------------------------------------------

    def _read(self, piece: Piece) -> list[tuple[ToldLogprob, int]]:
        """Keep the text of the prompt; return log probabilities, and where the texts of their tokens begin."""
        self._prompts[piece.choice] += piece.prompt
        begin = len(self._prompts[piece.choice])
        return [*((one, 0) for one in piece.prompt_logprobs), *((one, begin) for one in piece.logprobs)]

    def _moved(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the tokens of a piece, with places in the whole text."""
        begin = len(self._prompts[piece.choice])
        if not begin:
            return piece.tokens
        return [
            token if token["start"] is None else {**token, "start": token["start"] + begin, "end": token["end"] + begin}
            for token in piece.tokens
        ]

    def _logprobs_object(self, logprobs: Sequence[tuple[ToldLogprob, int]]) -> dict[str, Any]:
        if self._chat:
            return {"content": [one.chat() for one, _ in logprobs], "refusal": None}
        return completion_logprobs(logprobs)

    def _head(self, stream: bool) -> dict[str, Any]:
        request = self._job.prepared.request
        return {
            "id": self._job.id,
            "object": _OBJECTS[request.kind, stream],
            "created": self._job.created,
            "model": request.model,
        }

    def _usage(self) -> dict[str, int]:
        n_answer = sum(ending.n_tokens for ending in self._endings if ending is not None)
        return {
            "prompt_tokens": self._n_prompt_tokens,
            "completion_tokens": n_answer,
            "total_tokens": self._n_prompt_tokens + n_answer,
        }


def error_object(
    message: str, param: str | None = None, *, code: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """Return an error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure_object(failure: Failure) -> dict[str, Any]:
    """Return the error object of a failed answer."""
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    return error_object(failure.message, failure.param, code="answer_failed", kind=kind)


def failure_chunk(failure: Failure) -> bytes:
    """Return the error that ends a stream."""
    return _data(failure_object(failure))


def _data(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"

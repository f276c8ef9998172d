"""Queues requests and answers them in threads."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from probemon.errors import ProbemonError, RequestRefused
from probemon.ops.server.answering import Answering, Ending, Piece
from probemon.ops.server.counts import Counts
from probemon.ops.server.keys import NOBODY, Key, Quotas, check_places
from probemon.ops.server.limits import Limits
from probemon.ops.server.outbox import Outbox, Stalled
from probemon.ops.server.records import Records
from probemon.ops.server.served import Prepared, Served
from probemon.ops.server.subscribers import Rings
from probemon.ops.telemetry.metrics import ProcessMetrics

LOG = logging.getLogger("probemon")
_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}


@dataclass(frozen=True)
class Failure:
    """Why an answer failed. `param`: at fault; `status`: of HTTP."""

    message: str
    param: str | None = None
    status: int = 500


class Job:
    """One request. `id`: also of its answer and link; `created`: Unix time; `metadata`: kept in its record."""

    def __init__(
        self,
        prepared: Prepared,
        outbox: Outbox,
        rings: Rings,
        records: Records,
        key: Key,
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        request = prepared.request
        self.id, self.created = _PREFIX[request.kind] + secrets.token_hex(12), int(time.time())
        self.prepared, self.outbox, self.key = prepared, outbox, key
        self._publish = partial(rings.publish, request=self.id, owner=key.name)
        self._records = records
        self._n_bytes = 0  # noted, not sent
        prompt_fields: dict[str, Any] = (
            {"messages": list(request.said)}
            if request.kind == "chat"
            else {"prompt": request.prompts[0] if len(request.prompts) == 1 else list(request.prompts)}
        )
        self._about = {"request": self.id, "created": self.created, "kind": request.kind, **prompt_fields}
        self._about["options"] = {**request.options, **metadata}
        if key.name:
            self._about["key"] = key.name
        n_choices = len(prepared.prompts) * request.n
        optional_fields: dict[str, Any] = {"prompt_tokens": []} if prepared.watch.prompt else {}
        texts = {"text": ""} | ({} if prepared.marks is None else {"reasoning": ""})
        empty: list[dict[str, Any]] = [
            {**texts, "finish_reason": None, "tokens": [], "events": [], "summary": None} for _ in range(n_choices)
        ]
        self._content = {**self._about, **optional_fields, "choices": empty}
        self._record = records.begin(self.id, self._content, key.name)

    @property
    def cancelled(self) -> bool:
        """True if the client left."""
        return self.outbox.left

    def begin(self) -> None:
        """Publish that the answer begins."""
        self._publish("begin", self._about)

    def note(self, choice: int, tokens: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        """Report to subscribers and records."""
        content = self._content["choices"][choice]
        for kind, entries in (("token", tokens), ("rule", events)):
            for entry in entries:
                text = json.dumps(entry, allow_nan=False)
                answer_entries = content["tokens" if kind == "token" else "events"]
                to = self._content["prompt_tokens"] if entry.get("phase") == "prompt" else answer_entries
                self._records.add(self._record, to, entry, len(text))
                self._publish(kind, f'{{"request": "{self.id}", {text[1:]}')
                self._n_bytes += len(text)

    def send(self, piece: Piece) -> None:
        """Send to the client. Raises `Stalled`."""
        choice = self._content["choices"][piece.choice]
        for name, text in (("text", piece.text), ("reasoning", piece.reasoning)):
            if text:
                self._records.add_text(self._record, choice, name, text)
        n_bytes, self._n_bytes = self._n_bytes + piece.n_characters, 0
        self.outbox.put(piece, n_bytes)

    def end(self, ending: Ending) -> None:
        """Report an answer's end."""
        texts = {"text": ending.text} | ({} if ending.reasoning is None else {"reasoning": ending.reasoning})
        values = {**texts, "finish_reason": ending.finish_reason, "summary": ending.summary}
        self._records.set(self._record, self._content["choices"][ending.choice], values)
        self._publish("end", {"request": self.id, "choice": ending.choice, **values})
        self.outbox.put(ending, 0)

    def fail(self, failure: Failure) -> None:
        """Report a failure."""
        for choice in self._content["choices"]:
            if choice["finish_reason"] is None:
                self._records.set(self._record, choice, {"finish_reason": "error"})
        self._records.set(self._record, self._content, {"error": failure.message})
        self._publish("error", {"request": self.id, "message": failure.message})
        self.outbox.put(failure, 0, wait=False)

    def cut(self, failure: Failure) -> None:
        """Tell the client a failure, and end the answer at its next token."""
        self._publish("error", {"request": self.id, "message": failure.message})
        self.outbox.cut(failure)

    def finish(self) -> None:
        """End the request; unfinished answers are cancelled."""
        for at, choice in enumerate(self._content["choices"]):
            if choice["finish_reason"] is None:
                texts = {name: choice[name] for name in ("text", "reasoning") if name in choice}
                values = {**texts, "finish_reason": "cancelled", "summary": None}
                self._records.set(self._record, choice, values)
                self._publish("end", {"request": self.id, "choice": at, **values})
        self._records.end(self._record)
        self.outbox.finish()


class Generator:
    """Answers requests in order, `at_once` at a time."""

    def __init__(
        self,
        served: Served,
        rings: Rings,
        records: Records,
        limits: Limits,
        metrics: ProcessMetrics | None = None,
    ) -> None:
        self.served, self.counts = served, Counts()
        self._metrics = metrics
        self._rings, self._records, self._limits = rings, records, limits
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._quotas = Quotas()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"probemon-serve-{number}", daemon=True)
            for number in range(limits.at_once)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_running(self) -> int:
        """Requests being answered."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Waiting requests."""
        return self.load(None)["n_waiting"]

    def load(self, reads: str | None) -> dict[str, int]:
        """Return `n_running` and `n_waiting` of a key; None: of all."""
        with self._changed:
            running, waiting = (
                sum(not job.cancelled and reads in (None, job.key.name) for job in jobs)
                for jobs in (self._running, self._waiting)
            )
        return {"n_running": running, "n_waiting": waiting}

    def admit(self, key: Key, n_answers: int) -> None:
        """Count a request against its key's rate, unless it has no place anyway. Raises `RequestRefused`."""
        with self._changed, self._counting_refusals():
            self._check_room(key)
            self._quotas.take(key, n_answers)

    def _check_room(self, key: Key) -> None:
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._end(job, "cancelled")
        if len(self._waiting) >= self._limits.queue or self._closed:
            raise RequestRefused(
                f"{len(self._waiting)} requests wait, as many as may: try again later", status=429, code="queue_full"
            )
        check_places(key, (job.key.name for job in (*self._waiting, *self._running)), "requests")

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except RequestRefused:
            self.counts.requests["refused"] += 1
            raise

    def submit(self, prepared: Prepared, outbox: Outbox, key: Key = NOBODY) -> Job:
        """Queue a request. Raises `RequestRefused` if too many wait, or beyond the key's places."""
        with self._changed:
            with self._counting_refusals():
                self._check_room(key)
            metadata = prepared.request.metadata_fields if self.served.keep_metadata else {}
            job = Job(prepared, outbox, self._rings, self._records, key, metadata)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def retry_after_seconds(self) -> int:
        """Return when a refused client may retry."""
        return max(1, round(self.counts.mean_seconds))

    def cut(self) -> None:
        """End all requests: their clients are told that the server has ended."""
        with self._changed:
            self._closed = True
            jobs = (*self._waiting, *self._running)
            self._changed.notify_all()
        for job in jobs:
            job.cut(Failure("the server has ended before the answer: ask again", status=503))

    def close(self, timeout_seconds: float = 4.0) -> None:
        """End running answers at their next token, and cancel waiting ones."""
        with self._changed:
            self._closed = True
            for job in (*self._waiting, *self._running):
                job.outbox.leave()
            self._changed.notify_all()
        end = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            left = [*self._waiting, *self._running]  # those that run do not come to their end
            self._running.clear()
        for job in left:
            self._end(job, "cancelled")

    # -- inside ----------------------------------------------------------------------------------

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            job = self._waiting.popleft()
            self._running.add(job)
            return job

    def _work(self) -> None:
        while self._work_once():  # a local name here would keep the last job
            pass

    def _work_once(self) -> bool:
        job = self._next()
        if job is not None:
            begun, outcome = time.monotonic(), "failed"
            try:
                self._answer(job)
                outcome = "cancelled" if job.cancelled else "answered"
            except Stalled:
                outcome = "stalled"
                job.outbox.leave()
                job.fail(Failure("the client did not read for too long"))
            except RequestRefused as error:
                outcome = "refused"
                job.fail(Failure(str(error), error.param, error.status))
            except Exception as error:
                LOG.exception("request %s failed", job.id)
                kind = type(error).__name__
                own = isinstance(error, ProbemonError)  # the text of another may tell of the machine
                what = f"{kind}: {error}" if own else f"the server failed ({kind}): its log has more on {job.id}"
                job.fail(Failure(what))
            finally:
                with self._changed:
                    is_mine = job in self._running
                    self._running.discard(job)
                if is_mine:
                    self._end(job, outcome, time.monotonic() - begun)
        return job is not None

    def _end(self, job: Job, outcome: str, seconds: float = 0.0) -> None:
        job.finish()
        self.counts.ended(outcome, seconds)
        about = {"request": job.id, "key": job.key.name or None, "outcome": outcome, "seconds": round(seconds, 3)}
        LOG.info("request %s %s in %.1f s", job.id, outcome, seconds, extra=about)

    def _answer(self, job: Job) -> None:
        if job.cancelled:
            return
        job.begin()
        prepared, request = job.prepared, job.prepared.request
        for at, (ids, max_tokens) in enumerate(zip(prepared.prompts, prepared.max_tokens, strict=True)):
            for number in range(request.n):
                answering = Answering(
                    self.served,
                    prepared,
                    ids,
                    choice=at * request.n + number,
                    max_tokens=max_tokens,
                    seed=None if request.seed is None else request.seed + number,
                    tell_prompt=prepared.watch.prompt and number == 0,
                    listener=job,
                    followers=[] if self._metrics is None else [self._metrics.for_request(job.id)],
                )
                try:
                    ending = answering.run()
                except BaseException:
                    self.counts.failed()
                    raise
                self.counts.told(len(ids), ending)
                job.end(ending)
                if job.cancelled:
                    return

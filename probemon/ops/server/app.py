"""The server's routes, as an ASGI application.

app = make_app(served, limits, keys=[Key("...")], hosts={"127.0.0.1", "localhost"})

OpenAI's /v1/chat/completions, /v1/completions and /v1/models; /v1/probemon/... for the page; /healthz, /readyz,
/metrics.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from probemon.errors import ProbemonError, RequestRefused
from probemon.monitor.health import Health
from probemon.ops.server.answering import Ending, Piece
from probemon.ops.server.answers import Answers, error_object, failure_chunk, failure_object
from probemon.ops.server.canary import ServedCanary
from probemon.ops.server.concept_card import about_concept, find_index
from probemon.ops.server.event_stream import EventStream, wait_for_disconnect
from probemon.ops.server.generator import Failure, Generator, Job
from probemon.ops.server.guard import Guard, check_may
from probemon.ops.server.keys import Key
from probemon.ops.server.limits import Limits
from probemon.ops.server.metrics import ServerMetrics, process_metrics
from probemon.ops.server.openapi import openapi
from probemon.ops.server.outbox import Outbox
from probemon.ops.server.page_files import page_files
from probemon.ops.server.parameters import route_remedy
from probemon.ops.server.records import Records
from probemon.ops.server.requests import read_request
from probemon.ops.server.served import Served
from probemon.ops.server.subscribers import Rings
from probemon.ops.server.token_objects import about_pack
from probemon.util.counted import counted

LOG = logging.getLogger("probemon")
_REQUEST = "probemon-request"  # header of an answer: its id, known before the first token
_CUT_TO = "probemon-max-tokens"  # header of an answer that may not be as long as it was asked for
_SIGHT_SECONDS, _BLIND_SECONDS = 30.0, 5.0  # how long a canary's result counts, and how long its failure
_FORGETTING_SECONDS = 10.0


def make_app(served: Served, limits: Limits, *, keys: Collection[Key], hosts: Collection[str]) -> Guard:
    """Return the application; without keys, everyone may do everything. Raises `Blind` if the canary is not seen."""
    routes = _Routes(served, limits)
    app = routes.app()
    return Guard(app, hosts=hosts, keys=keys, body_bytes=limits.body_bytes, stop=routes.stop, cut=routes.cut)


class _Routes:
    """One method per route."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self._served, self._limits = served, limits
        self._canary = ServedCanary(served)
        self._rings, self._records = Rings(limits), Records(limits)
        self._by_boot = {"probemon-boot": self._rings.boot}
        process = process_metrics(served)
        self._generator = Generator(served, self._rings, self._records, limits, process)
        self._metrics = None if process is None else ServerMetrics(self._generator, self._rings, process)
        about = {**about_pack(served.manager.pack, served.name), "max_tokens": limits.max_tokens}
        self._pack = json.dumps(about, allow_nan=False).encode()
        self._page, self._created = page_files(), int(time.time())
        self._looking, self._looked_at, self._health = asyncio.Lock(), -math.inf, Health(())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", partial(self._complete, "chat"), methods=["POST"]),
                Route("/v1/completions", partial(self._complete, "completion"), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/probemon/pack", self._about_pack),
                Route("/v1/probemon/concepts/{name}", self._about_concept),
                Route("/v1/probemon/events", self._events),
                Route("/v1/probemon/requests", self._list_requests),
                Route("/v1/probemon/requests", self._delete_requests, methods=["DELETE"]),
                Route("/v1/probemon/requests/{name}", self._request),
                Route("/v1/probemon/requests/{name}", self._delete_requests, methods=["DELETE"]),
                Route("/v1/probemon/reload", self._reload, methods=["POST"]),
                Route("/healthz", self._healthy),
                Route("/readyz", self._ready),
                Route("/metrics", self._show_metrics),
                Route("/openapi.json", self._describe),
                Route("/", self._file),
                Route("/page/{name}", self._file),
            ],
            exception_handlers={RequestRefused: self._refused, HTTPException: _no_route},
            lifespan=self._life,
        )

    def stop(self) -> None:
        """End the event streams."""
        self._rings.close()

    def cut(self) -> None:
        """End all answers."""
        self._generator.cut()

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        telemetry = self._served.telemetry
        if telemetry is not None:
            telemetry.open()
        forgetting = asyncio.ensure_future(self._forget())
        yield
        forgetting.cancel()
        await asyncio.to_thread(self._generator.close)
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)

    # -- OpenAI's --------------------------------------------------------------------------------

    async def _complete(self, kind: str, http: HttpRequest) -> Any:
        key = check_may(http.state, "ask")
        try:
            body = await asyncio.wait_for(http.body(), self._limits.stalled_seconds)
        except TimeoutError:
            raise RequestRefused("the body did not come: send it at once", status=408, code="timeout") from None
        except ClientDisconnect:
            return Response(status_code=499)  # the client left
        request = read_request(kind, body, self._limits)
        self._generator.admit(key, request.n * max(1, len(request.prompts)))
        prepared = await asyncio.to_thread(self._served.prepare, request)
        if len(traceparents := http.headers.getlist("traceparent")) == 1:
            prepared = replace(prepared, traceparent=traceparents[0])
        outbox = Outbox(self._limits.waiting_bytes, self._limits.stalled_seconds)
        job = self._generator.submit(prepared, outbox, key)
        headers = {_REQUEST: job.id} | ({} if prepared.cut_to is None else {_CUT_TO: str(prepared.cut_to)})
        if request.stream:
            seconds = self._limits.stalled_seconds
            return EventStream(_chunks(job), on_end=outbox.leave, stalled_seconds=seconds, headers=headers)
        leaving = asyncio.ensure_future(wait_for_disconnect(http.receive))
        leaving.add_done_callback(lambda _: outbox.leave())
        try:
            answer = await _whole(job)
            answer.headers.update(headers)
            return answer
        finally:
            leaving.cancel()

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self._served.name:
            raise RequestRefused(f"there is no model {name!r:.100} here", "model", status=404, code="model_not_found")
        return JSONResponse(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        return {"id": self._served.name, "object": "model", "created": self._created, "owned_by": "probemon"}

    # -- the page's ------------------------------------------------------------------------------

    async def _about_pack(self, http: HttpRequest) -> Response:
        return Response(self._pack, media_type="application/json", headers=self._by_boot)

    async def _about_concept(self, http: HttpRequest) -> Response:
        pack = self._served.manager.pack
        index = find_index(http.path_params["name"], pack)
        return JSONResponse(await asyncio.to_thread(about_concept, pack, index), headers=self._by_boot)

    async def _events(self, http: HttpRequest) -> Any:
        key = check_may(http.state, "ask", "read")
        if http.method == "HEAD":  # it would never end
            return Response(media_type="text/event-stream")
        last_event_id = http.headers.get("last-event-id")
        after = (
            int(last_event_id)
            if last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) < 16
            else None
        )
        subscriber = self._rings.subscribe(after, partial(self._generator.load, key.reads), key)
        return EventStream(
            subscriber.chunks(),
            on_end=subscriber.leave,
            stalled_seconds=self._limits.stalled_seconds,
        )

    async def _list_requests(self, http: HttpRequest) -> Response:
        key = check_may(http.state, "ask", "read")
        return JSONResponse({"requests": self._records.list(key.reads)}, headers=self._by_boot)

    async def _request(self, http: HttpRequest) -> Response:
        key, name = check_may(http.state, "ask", "read"), http.path_params["name"]
        content = await asyncio.to_thread(self._records.get, name, key.reads)
        if content is None:
            raise self._forgotten(name)
        return Response(content, media_type="application/json", headers=self._by_boot)

    async def _delete_requests(self, http: HttpRequest) -> Response:
        check_may(http.state, "admin")
        name = http.path_params.get("name")
        names = self._records.delete(name)
        if name is not None and not names:
            if self._records.is_running(name):
                message = f"request {name!r:.100} has not ended: delete it afterwards"
                raise RequestRefused(message, status=409, code="request_running")
            raise self._forgotten(name)
        self._rings.delete(names)
        return JSONResponse({"n_deleted": len(names)})

    def _forgotten(self, name: str) -> RequestRefused:
        number, minutes = self._limits.kept_requests, self._limits.kept_minutes
        time_limit = f", for {counted(minutes, 'minute')}" if minutes else ""
        what = f"its newest {number}{time_limit}" if number else "none"
        return RequestRefused(
            f"request {name!r:.100} is not kept: this server keeps {what}, and none from before it was started",
            status=404,
            code="request_forgotten",
        )

    async def _forget(self) -> None:
        """Drop what is too old, for ever."""
        while True:
            await asyncio.sleep(_FORGETTING_SECONDS)
            self._records.forget_old()
            self._rings.forget_old()

    async def _file(self, http: HttpRequest) -> Response:
        name = http.path_params.get("name", "index.html")
        file = self._page.get(name)
        if file is None:
            raise RequestRefused(f"there is no file {name!r:.100} of the page", status=404, code="not_found")
        return Response(file.content, headers={"content-type": file.content_type})

    # -- for those who run it --------------------------------------------------------------------

    async def _healthy(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, http: HttpRequest) -> Response:
        async with self._looking:
            # Scored answers prove nothing: the weights may be others.
            counts_for = _SIGHT_SECONDS if self._health.ok else _BLIND_SECONDS
            if time.monotonic() - self._looked_at > counts_for:
                self._health, self._looked_at = await asyncio.to_thread(self._canary.look), time.monotonic()
            health = self._health
        circuit = self._served.circuit
        if circuit is not None and circuit.pausing:  # after the pause, an answer has to try
            health = health.with_checks([circuit.check()])
        if self._served.drift is not None:  # never worse than a warning
            health = health.with_checks([self._served.drift.check()])
        about = health.as_dict()
        if not http.state.key.may("read", "metrics"):  # checks may tell what others talk about
            about["checks"] = [{name: check[name] for name in ("name", "state")} for check in about["checks"]]
        elif not health.ok:
            about["why"] = str(health)
        return JSONResponse({"status": "ready" if health.ok else "blind", **about}, 200 if health.ok else 503)

    async def _reload(self, http: HttpRequest) -> Response:
        check_may(http.state, "admin")
        holding = self._served.holding
        try:
            reloaded = await asyncio.to_thread(holding.reload)
        except (ProbemonError, OSError) as error:
            raise RequestRefused(f"not reloaded, the previous file still applies: {error}", code="reload") from error
        sha256 = None if holding.now.deployment is None else holding.now.deployment.sha256
        return JSONResponse({"sha256": sha256, "n_only_rules": reloaded.to_rules, "n_unchanged": reloaded.to_nothing})

    async def _show_metrics(self, http: HttpRequest) -> Response:
        check_may(http.state, "metrics")
        if self._metrics is None:
            missing = "metrics need prometheus-client: pip install 'probemon[metrics]'"
            raise RequestRefused(missing, status=501, code="missing_extra")
        body, content_type = self._metrics.text(http.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _describe(self, http: HttpRequest) -> Response:
        return JSONResponse(openapi())

    def _refused(self, http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        key: Key = http.state.key
        about = {"key": key.name or None, "outcome": error.code or "refused"}
        LOG.info("%s %.100r refused with status %d", http.method, http.url.path, error.status, extra=about)
        kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
        content = error_object(str(error), error.param, code=error.code, kind=kind)
        seconds = error.retry_after_seconds
        later = self._generator.retry_after_seconds() if seconds is None else max(1, math.ceil(seconds))
        headers = {"retry-after": str(later)} if error.status == 429 else {}
        return JSONResponse(content, status_code=error.status, headers=headers)


async def _chunks(job: Job) -> AsyncGenerator[bytes]:
    answers = Answers(job)
    async for part in job.outbox:
        if isinstance(part, Failure):
            yield failure_chunk(part)
            yield answers.cut_chunks()
            return
        yield answers.chunks(part)
    if not job.cancelled:
        yield answers.last_chunks()


async def _whole(job: Job) -> Response:
    answers = Answers(job)
    async for part in job.outbox:
        if isinstance(part, Failure):
            return JSONResponse(failure_object(part), status_code=part.status)
        assert isinstance(part, (Piece, Ending))
        answers.add(part)
    if job.cancelled:  # the client left
        return JSONResponse(error_object("the request was cancelled", code="cancelled"), status_code=499)
    return JSONResponse(answers.whole())


async def _no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    remedy = route_remedy(http.url.path) if error.status_code == 404 else ""
    content = error_object(f"{http.method} {http.url.path!r:.100}: {error.detail}{remedy}", code=code)
    return JSONResponse(content, status_code=error.status_code, headers=error.headers)

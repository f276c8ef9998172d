"""The server's routes, as an ASGI application.

app = make_app(served, limits, token="...", hosts={"127.0.0.1", "localhost"})

OpenAI's /v1/chat/completions, /v1/completions and /v1/models; /v1/probemon/... for the page; /healthz, /readyz,
/metrics.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from probemon.errors import RequestRefused
from probemon.monitor.health import Health
from probemon.ops.server.answering import Ending, Piece
from probemon.ops.server.answers import Answers, error_object, failure_chunk, failure_object
from probemon.ops.server.canary import ServedCanary
from probemon.ops.server.concept_card import about_concept, find_index
from probemon.ops.server.event_stream import EventStream, wait_for_disconnect
from probemon.ops.server.generator import Failure, Generator, Job
from probemon.ops.server.guard import Guard
from probemon.ops.server.limits import Limits
from probemon.ops.server.metrics import ServerMetrics, process_metrics
from probemon.ops.server.outbox import Outbox
from probemon.ops.server.page_files import page_files
from probemon.ops.server.records import Records
from probemon.ops.server.requests import read_request
from probemon.ops.server.served import Served
from probemon.ops.server.subscribers import EventRing
from probemon.ops.server.token_objects import about_pack

_SIGHT_SECONDS = 30.0  # how long a canary's result counts


def make_app(served: Served, limits: Limits, *, token: str | None, hosts: Collection[str]) -> Guard:
    """Return the application. Raises `Blind` if the canary is not seen."""
    routes = _Routes(served, limits)
    app = routes.app()
    return Guard(app, hosts=hosts, token=token, body_bytes=limits.body_bytes, stop=routes.stop, cut=routes.cut)


class _Routes:
    """One method per route."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self._served, self._limits = served, limits
        self._canary = ServedCanary(served)
        self._ring, self._records = EventRing(limits), Records(limits)
        self._by_boot = {"probemon-boot": self._ring.boot}
        process = process_metrics(served)
        self._generator = Generator(served, self._ring, self._records, limits, process)
        self._metrics = None if process is None else ServerMetrics(self._generator, self._ring, process)
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
                Route("/v1/probemon/requests/{name}", self._request),
                Route("/healthz", self._healthy),
                Route("/readyz", self._ready),
                Route("/metrics", self._show_metrics),
                Route("/", self._file),
                Route("/page/{name}", self._file),
            ],
            exception_handlers={RequestRefused: self._refused, HTTPException: _no_route},
            lifespan=self._life,
        )

    def stop(self) -> None:
        """End the event streams."""
        self._ring.close()

    def cut(self) -> None:
        """End all answers."""
        self._generator.cut()

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        telemetry = self._served.telemetry
        if telemetry is not None:
            telemetry.open()
        yield
        await asyncio.to_thread(self._generator.close)
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)

    # -- OpenAI's --------------------------------------------------------------------------------

    async def _complete(self, kind: str, http: HttpRequest) -> Any:
        try:
            body = await asyncio.wait_for(http.body(), self._limits.stalled_seconds)
        except TimeoutError:
            raise RequestRefused("the body did not come: send it at once", status=408, code="timeout") from None
        except ClientDisconnect:
            return Response(status_code=499)  # the client left
        request = read_request(kind, body, self._limits)
        prepared = await asyncio.to_thread(self._served.prepare, request)
        outbox = Outbox(self._limits.waiting_bytes, self._limits.stalled_seconds)
        job = self._generator.submit(prepared, outbox)
        if request.stream:
            return EventStream(_chunks(job), on_end=outbox.leave, stalled_seconds=self._limits.stalled_seconds)
        leaving = asyncio.ensure_future(wait_for_disconnect(http.receive))
        leaving.add_done_callback(lambda _: outbox.leave())
        try:
            return await _whole(job)
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
        if http.method == "HEAD":  # it would never end
            return Response(media_type="text/event-stream")
        last_event_id = http.headers.get("last-event-id")
        after = (
            int(last_event_id)
            if last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) < 16
            else None
        )
        subscriber = self._ring.subscribe(after, self._load)
        return EventStream(
            subscriber.chunks(),
            on_end=partial(self._ring.leave, subscriber),
            stalled_seconds=self._limits.stalled_seconds,
        )

    def _load(self) -> dict[str, int]:
        return {"n_running": self._generator.n_running, "n_waiting": self._generator.n_waiting}

    async def _list_requests(self, http: HttpRequest) -> Response:
        return JSONResponse({"requests": self._records.list()}, headers=self._by_boot)

    async def _request(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        content = await asyncio.to_thread(self._records.get, name)
        if content is None:
            raise RequestRefused(
                f"request {name!r:.100} is not kept: this server keeps its newest {self._limits.kept_requests}, and"
                " none from before it was started",
                status=404,
                code="request_forgotten",
            )
        return Response(content, media_type="application/json", headers=self._by_boot)

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
            if not self._health.ok or time.monotonic() - self._looked_at > _SIGHT_SECONDS:
                self._health, self._looked_at = await asyncio.to_thread(self._canary.look), time.monotonic()
            health = self._health
        circuit = self._served.circuit
        if circuit is not None and circuit.pausing:  # after the pause, an answer has to try
            health = health.with_checks([circuit.check()])
        if health.ok:
            return JSONResponse({"status": "ready", **health.as_dict()})
        return JSONResponse({"status": "blind", "why": str(health), **health.as_dict()}, status_code=503)

    async def _show_metrics(self, http: HttpRequest) -> Response:
        if self._metrics is None:
            missing = "metrics need prometheus-client: pip install 'probemon[metrics]'"
            raise RequestRefused(missing, status=501, code="missing_extra")
        body, content_type = self._metrics.text(http.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    def _refused(self, http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
        content = error_object(str(error), error.param, code=error.code, kind=kind)
        headers = {"retry-after": str(self._generator.retry_after_seconds())} if error.status == 429 else {}
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
    content = error_object(f"{http.method} {http.url.path!r:.100}: {error.detail}", code=code)
    return JSONResponse(content, status_code=error.status_code, headers=error.headers)

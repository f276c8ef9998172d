"""Routes below /probemon/ of vLLM's OpenAI server.

SERVED.append(ServedEngine(client, metrics, token, names))        # before the server is made
vllm serve ... --middleware probemon.ops.vllm.routes.Routes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from probemon.core.scores import PHASES
from probemon.errors import RequestRefused
from probemon.ops.server.answers import error_object
from probemon.ops.server.connections import ABORT
from probemon.ops.server.event_stream import EventStream
from probemon.ops.server.guard import Guard, Receive, Scope, Send
from probemon.ops.server.keys import Key
from probemon.ops.server.limits import Limits
from probemon.ops.server.subscribers import EventRing
from probemon.ops.server.token_objects import Told, about_pack
from probemon.ops.telemetry.metrics import ProcessMetrics
from probemon.ops.vllm.client import ABORT as ABORT_ROWS
from probemon.ops.vllm.client import VllmClient
from probemon.ops.vllm.event_fields import event_of
from probemon.ops.vllm.messages import Message, RequestHead, RuleMet, StepTokens, pack
from probemon.ops.vllm.replies import PATHS, Replies
from probemon.ops.vllm.request_log import RequestLog
from probemon.ops.vllm.request_names import name_of

PREFIX = "/probemon"


@dataclass(frozen=True)
class ServedEngine:
    """Content of the routes. `metrics`: None without the extra. `ready()`: called once the server answers."""

    client: VllmClient
    metrics: ProcessMetrics | None
    token: str | Collection[str] | None
    hosts: Collection[str]
    name: str
    limits: Limits
    ready: Callable[[], None] = lambda: None


SERVED: list[ServedEngine] = []  # vLLM creates its middleware by name, with the application alone


class Routes:
    """ASGI middleware for /probemon/; the rest is vLLM's."""

    def __init__(self, app: Any) -> None:
        [served] = SERVED
        routes = _Routes(served)
        self._app, self._ready, self._client = app, served.ready, served.client
        self._replies = Replies(served.client, served.limits)
        tokens = [served.token] if isinstance(served.token, str) else served.token or ()
        keys = [Key(token) for token in tokens]
        self._own = Guard(routes.app(), hosts=served.hosts, keys=keys, body_bytes=served.limits.body_bytes)
        self._stop = routes.stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, partial(self._lifespan, send, scope))
        elif scope["type"] == "http" and scope["path"].startswith(f"{PREFIX}/"):
            path = scope["path"].removeprefix(PREFIX)
            extensions = {ABORT: lambda: None, **scope.get("extensions", {})}
            inner_scope = {**scope, "path": path, "raw_path": path.encode(), "extensions": extensions}
            await self._own(inner_scope, receive, send)
        elif (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"] in PATHS
            and self._own.lets_in(scope)  # else vLLM refuses it
        ):
            await self._replies(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, send: Send, scope: Scope, message: Any) -> None:
        if message["type"] == "lifespan.startup.complete" and self._client.stops == ABORT_ROWS:
            self._client.abort_with(scope["app"].state.engine_client)
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            self._ready()
        elif message["type"].startswith("lifespan.shutdown"):
            self._stop()


class _Routes:
    """One method per route."""

    def __init__(self, served: ServedEngine) -> None:
        self._served, self._client = served, served.client
        self._told = Told(served.client.manager.pack, top_k=3, shown=None)
        self._ring = EventRing(served.limits)
        self._pack = json.dumps(about_pack(served.client.manager.pack, served.name), allow_nan=False).encode()
        self._client.add_reader(self._publish)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/healthz", self._healthy),
                Route("/readyz", self._ready),
                Route("/metrics", self._metrics),
                Route("/pack", self._about_pack),
                Route("/events", self._events),
                Route("/requests", self._list),
                Route("/requests/{name}", self._request),
                Route("/requests/{name}/scores", self._scores),
            ],
            exception_handlers={RequestRefused: _refused, HTTPException: _no_route},
        )

    def stop(self) -> None:
        """End the streams of events."""
        self._ring.close()

    async def _healthy(self, http: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, http: Request) -> Response:
        health = self._client.health()
        status = {"status": "ready"} if health.ok else {"status": "blind", "why": str(health)}
        return JSONResponse({**status, **health.as_dict()}, status_code=200 if health.ok else 503)

    async def _metrics(self, http: Request) -> Response:
        if self._served.metrics is None:
            missing = "metrics need prometheus-client: pip install 'probemon[metrics]'"
            raise RequestRefused(missing, status=501, code="missing_extra")
        body, content_type = self._served.metrics.text(http.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _about_pack(self, http: Request) -> Response:
        return Response(self._pack, media_type="application/json")

    async def _events(self, http: Request) -> Any:
        last_event_id = http.headers.get("last-event-id")
        after = (
            int(last_event_id)
            if last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) < 16
            else None
        )
        subscriber = self._ring.subscribe(after, lambda: {"n_steps": self._client.n_steps})
        return EventStream(
            subscriber.chunks(),
            on_end=partial(self._ring.leave, subscriber),
            stalled_seconds=self._served.limits.stalled_seconds,
        )

    async def _list(self, http: Request) -> Response:
        logs = reversed(self._client.requests())
        return JSONResponse({"requests": [_about(log) for log in logs]})

    async def _request(self, http: Request) -> Response:
        name = http.path_params["name"]
        logs = self._client.logs_of_reply(name) or self._client.logs_of(name)[:1]
        if not logs:
            raise self._forgotten(name)
        choices = [self._choice(i, log) for i, log in enumerate(logs)]
        return JSONResponse({"request": name, "choices": choices})

    def _choice(self, index: int, log: RequestLog) -> dict[str, Any]:
        columns, ids, scores = log.seen_scores()
        tokens = [self._token(scores, i, log, int(columns[i]), int(ids[i]), index) for i in range(len(columns))]
        events = [self._told.event(event, index, action) for event, action in list(log.events)]
        return {"index": index, **_about(log), "tokens": tokens, "events": events}

    async def _scores(self, http: Request) -> Response:
        return Response(
            pack(self._log(http).as_message(self._client.receiver.n_lost)), media_type="application/msgpack"
        )

    # -- inside ----------------------------------------------------------------------------------

    def _log(self, http: Request) -> RequestLog:
        name = http.path_params["name"]
        log = self._client.log_of(name) or self._client.log_of(f"{name}-0")  # a completion's first prompt
        if log is None:
            raise self._forgotten(name)
        return log

    def _forgotten(self, name: str) -> RequestRefused:
        return RequestRefused(
            f"request {name!r:.100} is not kept: the newest {self._served.limits.kept_requests} that ended are",
            status=404,
            code="request_forgotten",
        )

    def _publish(self, message: Message) -> None:
        if isinstance(message, RuleMet):
            event = event_of(message.event)
            entry = {"request": name_of(event.request), **self._told.event(event, 0, message.action)}
            self._ring.publish("rule", entry)
        elif isinstance(message, StepTokens) and self._ring.n_subscribers:
            for i, (column, token_id) in enumerate(zip(message.columns.tolist(), message.ids.tolist(), strict=True)):
                head = message.requests[int(message.of_request[i])]
                token = self._token(message.scores, i, head, column, token_id)
                self._ring.publish("token", {"request": name_of(head.request), **token})

    def _token(
        self, scores: Any, i: int, of: RequestLog | RequestHead, column: int, token_id: int, choice: int = 0
    ) -> dict[str, Any]:
        tokenizer = self._client.tokenizer
        return self._told.token(
            scores,
            i,
            choice=choice,
            position=column,
            token_id=token_id,
            text="" if tokenizer is None else str(tokenizer.decode([token_id])),
            span=None,
            phase=PHASES[column >= of.n_prompt],
        )


def _about(log: RequestLog) -> dict[str, Any]:
    return {
        "request": name_of(log.request),
        "running": log.under_way,
        "n_prompt": log.n_prompt,
        "n_cached": log.n_cached,
        "n_columns": log.n_columns,
        "stopped_at": log.stop_column,
    }


def _refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return JSONResponse(error_object(str(error), error.param, code=error.code), status_code=error.status)


def _no_route(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content = error_object(f"{http.method} {PREFIX}{http.url.path!r:.100}: {error.detail}", code="not_found")
    return JSONResponse(content, status_code=error.status_code)

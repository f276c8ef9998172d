"""The server's description in OpenAPI 3.1, made from the models of request bodies.

openapi()["paths"]["/v1/chat/completions"]
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from probemon import __version__
from probemon.ops.server.requests import BODIES

_REF = "#/components/schemas/"
_JSON, _EVENTS = "application/json", "text/event-stream"
_ASKED = {
    "/v1/chat/completions": ("chat", "Answers a chat."),
    "/v1/completions": ("completion", "Continues texts."),
}
# What requests other than GET do. For keys with the role "admin".
_CHANGES = {
    "/v1/probemon/requests": ("delete", "Forgets all ended requests."),
    "/v1/probemon/requests/{name}": ("delete", "Forgets an ended request."),
    "/v1/probemon/reload": ("post", "Reads the deployment file again."),
}
# What a GET of a route is, and its kind.
_SHOWN = {
    "/v1/models": ("The model.", _JSON),
    "/v1/models/{name}": ("The model, by name.", _JSON),
    "/v1/probemon/pack": ("The concepts of the pack; tokens have their places in its list.", _JSON),
    "/v1/probemon/concepts/{name}": ("What one of them learned, where it fires, how it is calibrated.", _JSON),
    "/v1/probemon/events": ("Events of all requests. Last-Event-ID continues a stream.", _EVENTS),
    "/v1/probemon/requests": ("The newest requests.", _JSON),
    "/v1/probemon/requests/{name}": ("A request with its answers.", _JSON),
    "/healthz": ("The process answers.", _JSON),
    "/readyz": ("The probes see the model; 503 if not.", _JSON),
    "/metrics": ("Metrics for Prometheus.", "text/plain"),
    "/openapi.json": ("This description.", _JSON),
}
_PUBLIC = ("/healthz", "/readyz")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the parameter, such as messages[0].content"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def openapi() -> dict[str, Any]:
    """Return the description."""
    _, models = models_json_schema([(body, "validation") for body in BODIES.values()], ref_template=_REF + "{model}")
    schemas = {name: _with_nulls(schema) for name, schema in models["$defs"].items()}
    paths = {path: {"post": _asking(kind, summary)} for path, (kind, summary) in _ASKED.items()}
    paths |= {path: {"get": _showing(path, *about)} for path, about in _SHOWN.items()}
    for path, (method, summary) in _CHANGES.items():
        paths.setdefault(path, {})[method] = _showing(path, summary, _JSON)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "probemon serve",
            "version": __version__,
            "description": "OpenAI's API with the concepts of every token. In bodies, null counts as absent.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas, "Error": _ERROR},
        },
    }


def _asking(kind: str, summary: str) -> dict[str, Any]:
    body = {"schema": {"$ref": _REF + BODIES[kind].__name__}}
    content = {_JSON: {"schema": {"type": "object"}}, _EVENTS: {"schema": {"type": "string"}}}
    cut = {"description": "the most tokens of an answer, if fewer than were asked for", "schema": {"type": "integer"}}
    name = {"description": "the id under which its record is kept", "schema": {"type": "string"}}
    answer = {"description": "OpenAI's object, or its chunks with stream=true.", "content": content}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {_JSON: body}},
        "responses": {
            "200": {**answer, "headers": {"Probemon-Request": name, "Probemon-Max-Tokens": cut}},
            **_errors(),
        },
    }


def _showing(path: str, summary: str, kind: str) -> dict[str, Any]:
    found = {"description": summary, "content": {kind: {"schema": {"type": "object" if kind == _JSON else "string"}}}}
    shown: dict[str, Any] = {"summary": summary, "responses": {"200": found, **_errors()}}
    if path in _PUBLIC:
        shown["security"] = []
    if "{name}" in path:
        shown["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return shown


def _errors() -> dict[str, Any]:
    return {"default": {"description": "An error.", "content": {_JSON: {"schema": {"$ref": _REF + "Error"}}}}}


def _with_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a model; each property that is not required may be null."""
    required = schema.get("required", [])
    properties = {name: _nullable(one, name in required) for name, one in schema.get("properties", {}).items()}
    return {**{name: one for name, one in schema.items() if name != "title"}, "properties": properties}


def _nullable(schema: dict[str, Any], required: bool) -> dict[str, Any]:
    plain = {name: one for name, one in schema.items() if name != "title" and (name, one) != ("default", None)}
    kinds = plain.get("anyOf", [])
    if required or {"type": "null"} in kinds or not {*plain} - {"description"}:
        return plain
    about: dict[str, Any] = {name: plain.pop(name) for name in ("description", "default") if name in plain}
    return {"anyOf": [*(kinds or [plain]), {"type": "null"}], **about}

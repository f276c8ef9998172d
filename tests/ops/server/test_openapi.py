"""The description of the API is valid OpenAPI, and describes the routes and bodies that the server takes."""

import json

import jsonschema
import pytest
from test_requests import CHAT, LIMITS, TEXT

from probemon.errors import RequestRefused
from probemon.ops.server.openapi import openapi
from probemon.ops.server.requests import read_request

FULL = {
    "stop": ["a"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {"3": -1.5},
    "stop_token_ids": [3],
    "temperature": 0.5,
    "store": False,
    "max_tokens": None,
    "probemon": {"concepts": None, "rules": [{"concept": "a", "above": 0.5}], "hold": True},
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"}, {"role": "assistant"}]
BODIES = [
    ("chat", CHAT),
    ("chat", {**CHAT, **FULL, "logprobs": True, "top_logprobs": 3, "tools": [{"type": "function"}]}),
    ("chat", {**CHAT, "messages": PARTS}),
    ("completion", {**TEXT, **FULL, "logprobs": 0, "echo": True}),
    *(("completion", {**TEXT, "prompt": prompt}) for prompt in (["a", "b"], [1, 2], [[1], [2]])),
    ("chat", {**CHAT, "temperature": 3}),
    ("chat", {**CHAT, "temperature": "hot"}),
    ("chat", {**CHAT, "stop": [""]}),
    ("chat", {**CHAT, "messages": []}),
    ("chat", {**CHAT, "messages": [{"role": "root", "content": "a"}]}),
    ("chat", {**CHAT, "messages": [{"role": "user", "content": 3}]}),
    ("chat", {**CHAT, "response_format": {"type": "json_object"}}),
    ("chat", {**CHAT, "tool_choice": "required"}),
    ("chat", {**CHAT, "probemon": {"hold": 1}}),
    ("chat", {**CHAT, "probemon": {"rules": [{"concept": "a", "abov": 1}]}}),
    ("chat", {**CHAT, "unknown": 1}),
    ("chat", {**CHAT, "n": True}),
    ("completion", {**TEXT, "prompt": [-1]}),
    ("completion", {**TEXT, "echo": "yes"}),
    ("completion", {"model": "m"}),
]


def test_description_is_valid_openapi_and_names_every_route(server):
    described = server.get("/openapi.json")
    assert described == json.loads(json.dumps(openapi()))
    routes = [(route.path.replace(":path", ""), route.methods - {"HEAD"}) for route in server.app._app.routes]
    own = {(path, method.lower()) for path, methods in routes for method in methods}
    told = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert told == own - {("/", "get"), ("/page/{name}", "get")}
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert server.ask("GET", "/openapi.json", Authorization=None).status == 401
    pytest.importorskip("openapi_spec_validator").validate(described)


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_described_bodies_are_those_that_are_taken(kind, body):
    described = openapi()
    name = {"chat": "ChatRequest", "completion": "CompletionRequest"}[kind]
    schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    try:
        read_request(kind, json.dumps(body).encode(), LIMITS)
        taken = True
    except RequestRefused:
        taken = False
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == taken

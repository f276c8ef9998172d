"""Concepts in replies: another application answers in vLLM's place, and a channel tells what a worker would."""

from __future__ import annotations

import http.client
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from test_client import hello_of, step_of
from test_engine_watch import SITES, states_of
from test_routes import event_at

import grouped_packs
from probemon.ops.server.limits import Limits
from probemon.ops.server.server import make_server, open_socket
from probemon.ops.vllm.channel import Channel
from probemon.ops.vllm.client import VllmClient
from probemon.ops.vllm.messages import RuleMet
from probemon.ops.vllm.routes import SERVED, Routes, ServedEngine
from probemon.tracking.recording import LAST

PROMPT, ANSWER = [5, 6], [7, 8, 9]
WORDS = {5: "<five>", 6: "<six>", 7: "Wha", 8: "les", 9: " swim"}


class Tokenizer:
    def decode(self, ids, **_):
        return "".join(WORDS[token] for token in ids)


@pytest.fixture
def key():
    return None


@pytest.fixture
def served(tmp_path, key):
    """A server whose application answers by `answer`, which a test sets; `seen`: the bodies that it was asked."""
    grouped_packs.write(tmp_path / "pack", (), torch.bfloat16, sites=SITES)
    with VllmClient(packs=[str(tmp_path / "pack")], tokenizer=Tokenizer()) as client:
        own = SimpleNamespace(
            client=client, channel=Channel(client.receiver.address, 1000), seen=[], answer=None, key=key
        )
        own.channel.send(lambda sequence: hello_of(client, sequence))

        async def create(http):
            own.seen.append(await http.json())
            return own.answer(own.seen[-1])

        ready, sock = threading.Event(), open_socket("127.0.0.1", 0)
        SERVED.append(ServedEngine(client, None, own.key, ["127.0.0.1"], "tiny", Limits(), ready.set))
        paths = ("/v1/chat/completions", "/v1/completions")
        app = Routes(Starlette(routes=[Route(path, create, methods=["POST"]) for path in paths]))
        app.stop = app.cut = lambda: None
        server = make_server(app, lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        own.port = sock.getsockname()[1]
        try:
            assert ready.wait(30)
            yield own
        finally:
            server.should_exit = True
            thread.join(30)
            sock.close()
            own.channel.close()
            SERVED.clear()


def post(served, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    status, content = answer.status, answer.read()
    connection.close()
    return status, content


def run(served, name, ids=(*PROMPT, *ANSWER), columns=None):
    """Send the scores of an answer, whose last token is never run."""
    columns = list(range(len(ids) - 1)) if columns is None else columns
    served.channel.send(lambda sequence: step_of(served.client, sequence, columns, [ids[at] for at in columns], name))


def as_expected(served, tokens, choice=0):
    """Whether these are the tokens of the answer, each with the concepts that its state has."""
    scores = served.client.manager.score_tokens(states_of("a", range(len(PROMPT) + len(ANSWER))))
    ids, ends = [*PROMPT, *ANSWER], [3, 6, 11]
    for token in tokens:
        at = token["position"]
        assert (token["choice"], token["token_id"], token["text"]) == (choice, ids[at], WORDS[ids[at]])
        if at >= len(PROMPT):
            assert token["end"] == ends[at - len(PROMPT)] == token["start"] + len(token["text"])
        if at == len(ids) - 1:
            assert token["unseen"] == LAST and token["top"] == []
            continue
        assert token["unseen"] is None and token["fired"] == scores.fired(at).tolist()
        assert [probe for probe, *_ in token["top"]] and token["n_active"] == len(scores.active(at))
        values = dict(zip(scores.active(at).tolist(), scores.active_scores(at).tolist(), strict=True))
        assert all(score == pytest.approx(values[probe], abs=1e-6) for probe, score, _ in token["top"])
    return [token["position"] for token in tokens]


def test_whole_reply_has_the_concepts_of_each_choice(served):
    def answer(asked):
        assert asked["return_token_ids"] is True and "probemon" not in asked
        for i in range(2):
            run(served, f"{i}_chatcmpl-1-0000000{i}")
        message = {"role": "assistant", "content": "Whales swim"}
        choices = [{"index": i, "message": dict(message), "finish_reason": "stop", "token_ids": ANSWER} for i in (0, 1)]
        reply = {"id": "chatcmpl-1", "object": "chat.completion", "prompt_token_ids": PROMPT, "choices": choices}
        return JSONResponse(reply)

    served.answer = answer
    body = {"model": "tiny", "messages": [], "n": 2, "probemon": {"prompt": True}}
    status, content = post(served, "/v1/chat/completions", body)
    reply = json.loads(content)
    assert status == 200 and "prompt_token_ids" not in reply
    for i, choice in enumerate(reply["choices"]):
        told = choice["message"]["probemon"]
        assert as_expected(served, told["tokens"], i) == ([0, 1, 2, 3, 4] if i == 0 else [2, 3, 4])
        assert told["events"] == [] and told["summary"]["coverage"]["unseen"] == 1
        leading = told["summary"]["leading"]
        assert all(concept["path"][-1] == concept["concept"] or concept["name"] for concept in leading)
        assert "token_ids" not in choice
    status, content = post(served, "/v1/chat/completions", {**body, "return_token_ids": True})
    assert json.loads(content)["choices"][0]["token_ids"] == ANSWER


def test_stream_has_each_token_once_and_the_summary_with_the_reason_to_finish(served):
    def answer(asked):
        async def chunks():
            head = {"id": "chatcmpl-2", "object": "chat.completion.chunk"}
            first = {**head, "prompt_token_ids": PROMPT, "choices": [{"index": 0, "delta": {"role": "assistant"}}]}
            yield f"data: {json.dumps(first)}\n\n"
            name = "chatcmpl-2-00000000"
            for i, token in enumerate(ANSWER):
                run(served, name, columns=[0, 1] if i == 0 else [len(PROMPT) + i - 1])
                if i == 1:
                    served.channel.send(lambda sequence: RuleMet(sequence, event_at(name), "record", False))
                ends = "length" if i == 2 else None
                one = {"index": 0, "delta": {"content": WORDS[token]}, "finish_reason": ends, "token_ids": [token]}
                text = f"data: {json.dumps({**head, 'choices': [one]})}\n\n"
                yield text[:20]
                yield text[20:]
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    served.answer = answer
    body = {"model": "tiny", "messages": [], "stream": True, "probemon": {"top_k": 2}}
    status, content = post(served, "/v1/chat/completions", body)
    lines = content.decode().strip().split("\n\n")
    assert status == 200 and lines[-1] == "data: [DONE]"
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]
    tokens = [token for delta in deltas for token in delta.get("probemon", {}).get("tokens", [])]
    assert as_expected(served, tokens) == [2, 3, 4]
    assert all(len(token["top"]) <= 2 for token in tokens)
    events = [event for delta in deltas for event in delta.get("probemon", {}).get("events", [])]
    assert [(event["position"], event["action"]) for event in events] == [(2, "record")]
    assert "".join(delta.get("content", "") for delta in deltas) == "Whales swim"
    assert "probemon_summary" in deltas[-1] and not any("probemon_summary" in delta for delta in deltas[:-1])
    assert b"token_ids" not in content


def test_completions_of_several_prompts_are_matched_by_prompt_and_answer(served):
    prompts = [[5, 6], [6, 5]]

    def answer(asked):
        for prompt in (0, 1):
            for i in (0, 1):
                run(served, f"{i}_cmpl-3-{prompt}-0000000{i}", (*prompts[prompt], *ANSWER))
        choices = [
            {"index": 2 * prompt + i, "text": "Whales swim", "token_ids": ANSWER, "prompt_token_ids": prompts[prompt]}
            for prompt in (0, 1)
            for i in (0, 1)
        ]
        return JSONResponse({"id": "cmpl-3", "object": "text_completion", "choices": choices})

    served.answer = answer
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "probemon": {"prompt": True}}
    reply = json.loads(post(served, "/v1/completions", body)[1])
    for choice in reply["choices"]:
        tokens = choice["probemon"]["tokens"]
        prompt = prompts[choice["index"] // 2] if choice["index"] % 2 == 0 else []
        assert [token["token_id"] for token in tokens] == [*prompt, *ANSWER]
        assert [bool(token["unseen"]) for token in tokens] == [False] * (len(prompt) + 2) + [True]
    told = json.loads(_get(served, "/probemon/requests/cmpl-3"))
    assert [(one["index"], one["request"]) for one in told["choices"]] == [
        (0, "0_cmpl-3-0"),
        (1, "1_cmpl-3-0"),
        (2, "0_cmpl-3-1"),
        (3, "1_cmpl-3-1"),
    ]


def reply_of(served, path="/v1/completions", **body):
    return json.loads(post(served, path, {"model": "tiny", "prompt": "a", "probemon": {}, **body})[1])


def completion(name, n=1, **more):
    """What vLLM answers to one prompt."""
    choice = {"text": "Whales swim", "token_ids": ANSWER, "prompt_token_ids": PROMPT, "finish_reason": "stop", **more}
    choices = [{"index": i, **choice} for i in range(n)]
    return JSONResponse({"id": name, "object": "text_completion", "choices": choices})


@pytest.mark.parametrize("key", ["the key"])
def test_request_without_the_key_reaches_vllm_unread(served):
    """vLLM refuses it; names of concepts are not for strangers."""
    served.answer = lambda asked: JSONResponse({"error": "unauthorised"}, status_code=401)
    body = {"model": "tiny", "prompt": "a", "probemon": {"concepts": ["no such"]}}
    assert post(served, "/v1/completions", body) == (401, b'{"error":"unauthorised"}')
    assert served.seen == [body]


def test_answer_without_ids_or_with_an_error_of_ours_still_arrives(served, monkeypatch):
    served.answer = lambda asked: completion("cmpl-6", token_ids=None, prompt_token_ids=None)
    [choice] = reply_of(served)["choices"]
    assert choice["text"] == "Whales swim" and choice["probemon"]["tokens"] == []
    assert "no ids of tokens" in choice["probemon"]["why"]
    monkeypatch.setattr("probemon.ops.vllm.replies._Choice.whole", lambda self: 1 / 0)
    served.answer = lambda asked: completion("cmpl-7")
    run(served, "cmpl-7-0-00000000")
    [choice] = reply_of(served)["choices"]
    assert choice["text"] == "Whales swim" and "probemon" not in choice
    assert served.client.failures.n_errors == 1


def test_every_event_of_a_reply_is_told_and_the_first_step_may_stop_it(served):
    n = 1500  # more than the client keeps of all requests

    def answer(asked):
        name = "cmpl-8-0-00000000"
        served.channel.send(lambda sequence: RuleMet(sequence, event_at(name), "stop", True))  # before its tokens
        run(served, name, columns=[0, 1, 2])
        for _ in range(n):
            served.channel.send(lambda sequence: RuleMet(sequence, event_at(name), "record", False))
        run(served, name, columns=[3])
        return completion("cmpl-8")

    served.answer = answer
    told = reply_of(served)["choices"][0]["probemon"]
    assert len(told["events"]) == n + 1 and told["summary"]["stopped_by"]["position"] == 2
    log = served.client.log_of("cmpl-8-0")
    assert (log.stop_column, log.n_showable) == (2, 2)


def test_scores_that_do_not_come_are_awaited_once_for_a_reply_and_not_for_beams(served, monkeypatch):
    monkeypatch.setattr("probemon.ops.vllm.replies._WAIT_SECONDS", 0.4)
    served.answer = lambda asked: completion("cmpl-9", n=4)
    for body, most in (({"n": 4}, 1.2), ({"n": 4, "use_beam_search": True}, 0.4)):
        begin = time.perf_counter()
        choices = reply_of(served, **body)["choices"]
        assert time.perf_counter() - begin < most
        assert all(token["unseen"] for choice in choices for token in choice["probemon"]["tokens"])


def test_numbers_as_texts_echoes_and_bodies_nested_too_deeply(served):
    def answer(asked):
        for i in range(2):
            run(served, f"{i}_cmpl-10-0-00000000")
        return completion("cmpl-10", n=2)

    served.answer = answer
    for choice in reply_of(served, n="2")["choices"]:
        assert [bool(token["unseen"]) for token in choice["probemon"]["tokens"]] == [False, False, True]
    assert reply_of(served, echo=True)["error"]["param"] == "echo"
    n_seen = len(served.seen)
    deep = b'{"prompt": "a", "probemon": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert post(served, "/v1/completions", deep)[0] == 500  # of the application, which parses it as vLLM does
    assert len(served.seen) == n_seen and reply_of(served, n=2)["choices"]


def _get(served, path):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", path)
    content = connection.getresponse().read()
    connection.close()
    return content


def test_requests_without_concepts_and_errors_pass_unchanged(served):
    served.answer = lambda asked: JSONResponse({"error": "vLLM's own"}, status_code=400)
    body = {"model": "tiny", "messages": []}
    assert post(served, "/v1/chat/completions", {**body, "probemon": {}}) == (400, b'{"error":"vLLM\'s own"}')
    assert post(served, "/v1/chat/completions", body) == (400, b'{"error":"vLLM\'s own"}')
    assert served.seen == [{**body, "return_token_ids": True}, body]
    for wrong, param in (({"rules": [{"concept": "c0"}]}, "rules"), ({"hold": True}, "hold"), ({"k": 1}, "k")):
        status, content = post(served, "/v1/chat/completions", {**body, "probemon": wrong})
        assert status == 400 and param in json.loads(content)["error"]["message"]
    status, content = post(served, "/v1/chat/completions", {**body, "probemon": {"concepts": ["no such"]}})
    assert status == 400 and "no such" in json.loads(content)["error"]["message"]


def test_answer_whose_scores_do_not_come_has_the_reason_at_each_token(served, monkeypatch):
    monkeypatch.setattr("probemon.ops.vllm.replies._WAIT_SECONDS", 0.1)
    choice = {"index": 0, "text": "Whales swim", "token_ids": ANSWER, "prompt_token_ids": PROMPT}
    served.answer = lambda asked: JSONResponse({"id": "cmpl-4", "object": "text_completion", "choices": [choice]})
    reply = json.loads(post(served, "/v1/completions", {"model": "tiny", "prompt": "a", "probemon": {}})[1])
    tokens = reply["choices"][0]["probemon"]["tokens"]
    assert [token["position"] for token in tokens] == [2, 3, 4] and all(token["unseen"] for token in tokens)

"""A client receives what a worker sends over a real socket: results of an engine that chunks, preempts and drafts."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_engine_watch import HOST, SITES, states_of

import grouped_packs
from probemon.core.scores import GENERATED, PROMPT
from probemon.errors import AlignmentError, ConfigError
from probemon.serving.vllm.channel import Channel
from probemon.serving.vllm.client import ABORT, NOT_RUN, STOP_ROWS, VllmClient
from probemon.serving.vllm.engine_watch import EngineWatch
from probemon.serving.vllm.held_answers import hold
from probemon.serving.vllm.messages import Hello, RequestHead, StepTokens, WorkerSettings
from probemon.serving.vllm.request_log import LOST, RequestLog
from probemon.serving.vllm.request_names import name_of, names_of_output
from probemon.serving.vllm.rows import CACHED
from probemon.serving.vllm.watched import open_manager
from probemon.tracking.recording import GAP, LAST
from simulated_engine import SimulatedEngine


@pytest.fixture
def folder(tmp_path):
    grouped_packs.write(tmp_path / "pack", (), torch.bfloat16, sites=SITES)
    return str(tmp_path / "pack")


@pytest.fixture
def client(folder):
    with VllmClient(packs=[folder], cascade={"keep_top_k": 3}) as made:
        yield made


def hello_of(client, sequence=0):
    fields = {"pid": 1, "vllm": "0.32.0", "way": "auxiliary", "runner": "v1", "compiled": False, "pack": "p"}
    more = {"n_probes": client.manager.pack.n_probes, "sites": SITES, "sha256": client.settings.sha256}
    return Hello(sequence=sequence, **fields, **more, host=vars(HOST), canary={})


def serve(client, engine, rules=()):
    """Let a worker's watch score the requests of a simulated engine, and send it all to the client."""
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    watch = EngineWatch(open_manager(client.settings), client.settings, HOST, channel, torch.nn.Identity())
    for rule in rules:
        watch.run.on(**rule)
    for step in engine.run():
        watch.begin_step(step.scheduled)
        bounds = zip(step.rows.requests, step.rows.starts[:-1], step.rows.starts[1:], strict=True)
        parts = [states_of(name, step.rows.positions[begin:end]) for name, begin, end in bounds]
        parts.append(states_of("padding", [0]))  # a step of no rows has some, too
        watch.step(step.rows, step.drafts, {site: torch.cat([part[site] for part in parts]) for site in SITES})
        watch.settle(step.accepted)
    watch.close()
    return channel


def output_of(engine, request, n_outputs=1):
    """What vLLM's front end returns of a simulated request."""
    ids, n_prompt = engine.final(request), len(request.prompt)
    index, _, name = request.name.rpartition("_")
    answer = SimpleNamespace(index=int(index or 0), token_ids=ids[n_prompt:])
    return SimpleNamespace(
        request_id=name, prompt_token_ids=ids[:n_prompt], outputs=[answer], num_cached_tokens=request.n_cached
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [0, 4])
def test_every_token_has_the_scores_of_its_state_or_the_reason_why_not(client, seed, drafts):
    engine = SimulatedEngine(random.Random(seed), drafts=drafts)
    channel = serve(client, engine)
    assert channel.n_dropped == 0
    n_compared = 0
    for request in engine.requests:
        output = output_of(engine, request)
        result = client.result(output)
        ids, n_prompt = engine.final(request), len(request.prompt)
        assert result.token_id.tolist() == ids and result.position.tolist() == list(range(len(ids)))
        if not request.begun:
            assert set(result.coverage.unseen) == {NOT_RUN}
            continue
        assert result.phase.tolist() == [PROMPT if i < n_prompt else GENERATED for i in range(len(ids))]
        reasons = list(result.coverage.unseen)
        assert [i for i, reason in enumerate(reasons) if reason == CACHED] == sorted(
            {*range(request.n_cached), *request.reused}
        )
        assert reasons[-1] == LAST or len(ids) == n_prompt
        assert GAP not in reasons[: max(request.run, default=-1) + 1]
        hidden = states_of(request.name, range(len(ids)))
        everything = client.manager.score_all(hidden).numpy()
        for t in np.flatnonzero(result.coverage.seen):
            active = result.scores.active(int(t))
            assert np.array_equal(result.scores.active_scores(int(t)), everything[t, active])
            n_compared += 1
    assert n_compared > 20
    assert client.health().ok, str(client.health())
    assert client.result([output_of(engine, one) for one in engine.requests]).requests == tuple(
        name_of(one.name).rpartition("_")[2] for one in engine.requests
    )


def test_another_token_than_was_run_is_an_error(client):
    engine = SimulatedEngine(random.Random(1))
    serve(client, engine)
    request = next(one for one in engine.requests if len(one.run) > 3)
    output = output_of(engine, request)
    output.prompt_token_ids[max(i for i in request.run if i < len(request.prompt))] += 1
    with pytest.raises(AlignmentError, match=r"position \d+: the output has token"):
        client.result(output)


def test_a_request_that_never_came_is_an_error_and_one_that_was_forgotten_too(client):
    answer = SimpleNamespace(index=0, token_ids=[3])
    output = SimpleNamespace(request_id="none", prompt_token_ids=[1, 2], outputs=[answer])
    with pytest.raises(AlignmentError, match="none of its tokens came"):
        client.result(output, timeout_seconds=0)


def step_of(client, sequence, columns, ids, request="a-00000000", n_prompt=2):
    n = len(columns)
    scores = client.manager.score_tokens(states_of("a", columns))
    head = RequestHead(request, 0, n_prompt, 0)
    columns, ids = np.array(columns, dtype=np.int64), np.array(ids, dtype=np.int64)
    none = np.zeros(n, dtype=np.int32)
    phases = (columns >= n_prompt).astype(np.int8)
    return StepTokens(sequence, sequence, 0.0, 0.0, (head,), none, columns, ids, phases, none, {0: ""}, scores)


def test_what_a_dropped_message_had_is_unseen_for_that_reason_and_health_says_so(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6]))
    channel.n_dropped += 1  # the step of column 2
    channel.send(lambda sequence: step_of(client, sequence, [3], [8]))
    assert client.wait(lambda: client.n_steps == 2, 5)
    output = SimpleNamespace(
        request_id="a", prompt_token_ids=[5, 6], outputs=[SimpleNamespace(index=0, token_ids=[7, 8, 9])]
    )
    result = client.result(output, timeout_seconds=0)
    assert result.coverage.unseen == ("", "", LOST, "", LAST)
    assert [check.state for check in client.health().checks if check.name == "channel"] == ["failed"]
    channel.close()


def test_a_worker_that_watches_something_else_makes_the_client_unhealthy(client):
    channel = Channel(client.receiver.address, 1000)
    other = hello_of(client)
    other = Hello(**{**vars(other), "sha256": "0" * 64})
    channel.send(lambda sequence: other)
    assert client.wait(lambda: client.receiver.failure is not None, 5) or client.receiver.failure is not None
    assert not client.health().ok and "another engine" in str(client.health())
    channel.close()


def test_bytes_that_are_no_message_end_nothing(client):
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(client.receiver.address)
    socket.send(b"\x80\x04cos\nsystem\n")
    channel = Channel(client.receiver.address, 10)
    channel.send(lambda sequence: hello_of(client, sequence))
    assert client.wait(lambda: client.hello is not None, 5)
    assert isinstance(client.receiver.failure, ConfigError)
    channel.close()
    socket.close(linger=0)
    context.term()


def test_the_last_of_a_column_counts_and_drafts_behind_the_end_are_dropped(client):
    log = RequestLog(RequestHead("a-00000000", 0, 2, 0), client.manager.pack.n_probes)
    for columns, ids in (([0, 1], [5, 6]), ([2, 3], [7, 1]), ([3], [8]), ([4, 5], [9, 9])):
        log.add(step_of(client, 0, columns, ids), np.arange(len(columns)))
    tokens = log.tokens(np.array([5, 6, 7, 8, 4]), 2, lost=False)
    assert tokens.scores.coverage.unseen == ("", "", "", "", LAST)
    again = states_of("a", [3])
    assert tokens.scores.top(3) == client.manager.score_tokens(again).top(0)


def test_many_small_pieces_are_what_one_large_one_is(client):
    n = 600
    one, many = (RequestLog(RequestHead("a-00000000", 0, 2, 0), client.manager.pack.n_probes) for _ in range(2))
    message = step_of(client, 0, range(n), range(n))
    one.add(message, np.arange(n))
    for i in range(n):
        many.add(message, np.array([i]))
    ids = np.arange(n + 1)
    assert many.n_tokens == n and many.n_columns == n
    assert np.array_equal(many.tokens(ids, 2, lost=False).scores.values, one.tokens(ids, 2, lost=False).scores.values)


def test_only_the_newest_requests_are_kept_where_that_is_asked_for(folder):
    with VllmClient(packs=[folder], keep_requests=2) as client:
        channel = Channel(client.receiver.address, 1000)
        for i in range(5):
            channel.send(lambda sequence, i=i: step_of(client, sequence, [0], [5], f"r{i}-00000000"))
        assert client.wait(lambda: client.n_steps == 5, 5)
        assert [log.request for log in client.requests()] == ["r3-00000000", "r4-00000000"]
        assert client.log_of("r0") is None and client.log_of("r4").n_tokens == 1
        channel.close()


def test_names_of_vllm_are_told_apart():
    assert name_of("chatcmpl-1-0a1b2c3d") == "chatcmpl-1" and name_of("a-b") == "a-b"
    assert names_of_output("x", 1, 2) == ("1_x",) and names_of_output("x", 0, 1) == ("x", "0_x")


def test_arguments_of_the_engine_name_what_is_watched_and_refuse_another_worker(client, folder):
    arguments = client.engine_arguments(max_model_len=64, additional_config={"mine": 1})
    assert arguments["max_model_len"] == 64 and arguments["additional_config"]["mine"] == 1
    assert WorkerSettings.of_config(arguments["additional_config"]) == client.settings
    assert "logits_processors" not in arguments and arguments["async_scheduling"] is False
    with pytest.raises(ConfigError, match="worker_cls is 'other'"):
        client.engine_arguments(worker_cls="other")
    with pytest.raises(ConfigError, match="stops is 'maybe'"):
        VllmClient(packs=[folder], stops="maybe")


def deployment_of(folder, tmp_path, action):
    from probemon.core.files import sha256

    pack = tmp_path / "pack"
    file = tmp_path / "watch.yaml"
    file.write_text(
        f"deployment: 1\npacks: [{{pack: {pack}, manifest_sha256: {sha256(pack / 'manifest.json')}}}]\n"
        f"rules: [{{concepts: [c0], above: 0.3, action: {action}, on_blind: pass}}]\n"
    )
    return file


@pytest.mark.parametrize(("action", "stops"), [("stop", True), ("record", False)])
def test_an_engine_gets_the_processor_that_stops_where_a_rule_does(folder, tmp_path, action, stops):
    with VllmClient(deployment_of(folder, tmp_path, action)) as client:
        assert client.settings.stop == stops
        assert client.engine_arguments().get("logits_processors") == ([STOP_ROWS] if stops else None)


def test_a_held_answer_ends_before_the_token_that_met_the_rule_and_others_before_their_last(folder, tmp_path):
    class Letters:
        def decode(self, ids, **more):
            return "".join(chr(97 + i % 26) for i in ids)

    file, aborted = deployment_of(folder, tmp_path, "stop"), []
    with VllmClient(file, tokenizer=Letters(), stops=ABORT) as client:
        client.abort_with(aborted.append)
        engine = SimulatedEngine(random.Random(8))
        serve(client, engine)

        async def ask(request):
            async def outputs():
                output = output_of(engine, request)
                ids = output.outputs[0].token_ids
                for n in range(1, len(ids) + 1):
                    output.outputs[0].token_ids = ids[:n]
                    output.request_id = request.name
                    yield output

            return [piece async for piece in hold(client, outputs(), wait_seconds=0.5)]

        n_stopped = 0
        for request in engine.requests:
            ids, n_prompt = engine.final(request), len(request.prompt)
            if len(ids) == n_prompt or request.reused:
                continue
            pieces = asyncio.run(ask(request))
            column = client.log_of(request.name).stop_column
            end = len(ids) - 1 if column is None else column
            shown = [token for piece in pieces for token in piece.ids]
            assert shown == ids[n_prompt:end] and pieces[-1].finished
            assert "".join(piece.text for piece in pieces) == Letters().decode(shown)
            assert pieces[-1].n_withheld == len(ids) - end
            assert (pieces[-1].event is None) == (column is None)
            n_stopped += column is not None
        assert n_stopped and set(aborted) == {event.request for event in client.events}

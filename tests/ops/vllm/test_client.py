"""A client receives what a worker sends over a real socket, from an engine that chunks, preempts and drafts."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_engine_watch import HOST, SITES, states_of

import grouped_packs
from probemon import KeepStates, ProbePack, function_probe
from probemon.core.scores import GENERATED, PROMPT
from probemon.errors import AlignmentError, ConfigError, DeploymentError
from probemon.monitor.followers import Follower
from probemon.monitor.sinks import MemorySink
from probemon.ops.vllm.channel import Channel
from probemon.ops.vllm.client import ABORT, FIXED_NAMES, NOT_KNOWN, NOT_RUN, STOP_ROWS, VllmClient
from probemon.ops.vllm.engine_watch import EngineWatch
from probemon.ops.vllm.held_answers import hold
from probemon.ops.vllm.messages import Ended, Hello, RequestHead, RuleMet, StepTokens, WorkerSettings
from probemon.ops.vllm.request_log import LATE, LOST, RequestLog
from probemon.ops.vllm.request_names import name_of, names_of_choices, names_of_output
from probemon.ops.vllm.rows import CACHED
from probemon.ops.vllm.watched import open_manager
from probemon.tracking.recording import GAP, LAST
from simulated_engine import SimulatedEngine


@pytest.fixture(autouse=True)
def closed_channels(monkeypatch):
    """Close what a test that fails leaves open: zmq would wait for it for ever."""
    made, begin = [], Channel.__init__

    def noted(self, *arguments):
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Channel, "__init__", noted)
    yield
    for channel in made:
        channel.close()


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
def test_every_token_has_its_scores_or_the_reason_why_not(client, seed, drafts):
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


def test_followers_of_a_client_hear_what_its_results_have(folder):
    heard, events, ended = {}, [], []

    class Diary(Follower):
        def began(self, run):
            self.run = run

        def scored(self, batch, scores):
            assert {batch.placed.phase} <= {PROMPT, GENERATED}
            for i, column in enumerate(batch.placed.columns.tolist()):
                heard[batch.recording.request, column] = scores.take(np.array([i]))

        def event(self, event, action):
            events.append((event, action))

        def ended(self, recording, error):
            ended.append(recording.request)

    class Broken(Follower):
        def forward(self, time):
            raise ValueError("broken")

    diary, sink = Diary(), MemorySink()
    engine = SimulatedEngine(random.Random(1))
    with VllmClient(packs=[folder], cascade={"keep_top_k": 3}, followers=[sink, Broken(), diary]) as client:
        serve(client, engine, [{"concept": "c0", "above": 0.1, "action": "record"}])
        outputs = [output_of(engine, one) for one in engine.requests if one.begun]
        results = [client.result(output) for output in outputs]
        assert wait_for(lambda: len(ended) == len(engine.requests))
        assert client.run.followers[1] is diary and diary.run is client.run
        [check] = [check for check in client.health().checks if check.name == "callbacks"]
    n_compared = 0
    for request, result in zip([one for one in engine.requests if one.begun], results, strict=True):
        for t in np.flatnonzero(result.coverage.seen).tolist():
            scores = heard.pop((request.name, t))
            assert np.array_equal(scores.active(0), result.scores.active(t))
            assert np.array_equal(scores.active_scores(0), result.scores.active_scores(t))
            n_compared += 1
    assert n_compared > 20 and all(scores.coverage.unseen[0] for scores in heard.values())
    assert [event for event, _ in events] == client.events and events
    assert sum(len(batch) for batch in sink.batches) >= n_compared
    assert check.state == "failed" and "ValueError: broken" in check.what


def test_refused_follower_of_a_client_closes_those_before_it(folder):
    class Sink(MemorySink):
        closed = False

        def close(self):
            self.closed = True

    class Refusing(Follower):
        def began(self, run):
            raise ValueError("refused")

    for last, error in ((Refusing(), ValueError), (None, ConfigError)):
        sink = Sink()
        with pytest.raises(error):
            VllmClient(packs=[folder], followers=[sink, last or sink])
        assert sink.closed


def test_followers_of_hidden_states_are_refused_by_a_client(folder, tmp_path):
    site = ProbePack.open(folder).sites[0]
    for one in (function_probe(len, site, "length"), KeepStates(tmp_path / "states")):
        with pytest.raises(ConfigError, match="stay in the worker"):
            VllmClient(packs=[folder], followers=[one])


def test_output_with_another_token_than_was_run_is_an_error(client):
    engine = SimulatedEngine(random.Random(1))
    serve(client, engine)
    request = next(one for one in engine.requests if len(one.run) > 3)
    output = output_of(engine, request)
    output.prompt_token_ids[max(i for i in request.run if i < len(request.prompt))] += 1
    with pytest.raises(AlignmentError, match=r"position \d+: the output has token"):
        client.result(output, timeout_seconds=0)


def test_request_that_never_arrived_or_was_forgotten_is_an_error(client):
    answer = SimpleNamespace(index=0, token_ids=[3])
    output = SimpleNamespace(request_id="none", prompt_token_ids=[1, 2], outputs=[answer])
    with pytest.raises(AlignmentError, match="none of its tokens came"):
        client.result(output, timeout_seconds=0)


def answer_of(request, prompt, ids, **more):
    answer = SimpleNamespace(index=0, token_ids=ids, **more)
    return SimpleNamespace(request_id=request, prompt_token_ids=prompt, outputs=[answer])


def ended_of(sequence, request, n_columns):
    return Ended(sequence, request, 0, n_columns, 0, 0, -1)


def met_of(sequence, request, column, action):
    event = {"concept": "c0", "name": "c0", "path": ["c0"], "row": 0, "column": column, "token_id": 7, "score": 0.5}
    more = {"above": 0.1, "for_tokens": 1, "value": 0.5, "request": request, "reading": []}
    return RuleMet(sequence, {**event, **more}, action, action == "stop")


def wait_for(ready):
    end = time.monotonic() + 5
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
    return ready()


def step_of(client, sequence, columns, ids, request="a-00000000", n_prompt=2, n_cached=0):
    n = len(columns)
    scores = client.manager.score_tokens(states_of("a", columns))
    head = RequestHead(request, 0, n_prompt, n_cached)
    columns, ids = np.array(columns, dtype=np.int64), np.array(ids, dtype=np.int64)
    none = np.zeros(n, dtype=np.int32)
    phases = (columns >= n_prompt).astype(np.int8)
    return StepTokens(sequence, sequence, 0.0, 0.0, (head,), none, columns, ids, phases, none, {0: ""}, scores)


def test_tokens_of_a_dropped_message_are_unseen_and_health_fails(client):
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


def test_worker_with_other_settings_makes_the_client_unhealthy(client):
    channel = Channel(client.receiver.address, 1000)
    other = hello_of(client)
    other = Hello(**{**vars(other), "sha256": "0" * 64})
    channel.send(lambda sequence: other)
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6]))
    channel.send(lambda sequence: hello_of(client, sequence))
    assert client.wait(lambda: client.n_hellos == 2, 5)
    assert client.log_of("a") is None and client.n_steps == 0
    with pytest.raises(ConfigError, match="create both again"):
        client.result(answer_of("a", [5, 6], [7]))
    assert wait_for(lambda: "another engine" in str(client.health())) and not client.health().ok
    channel.close()


def test_bytes_that_are_not_a_message_are_recorded_and_ignored(client):
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(client.receiver.address)
    socket.send(b"\x80\x04cos\nsystem\n")
    channel = Channel(client.receiver.address, 10)
    channel.send(lambda sequence: hello_of(client, sequence))
    assert client.wait(lambda: client.hello is not None, 5)
    end = time.monotonic() + 5  # they came by two sockets, in any order
    while client.receiver.failure is None and time.monotonic() < end:
        time.sleep(0.01)
    assert isinstance(client.receiver.failure, ConfigError)
    channel.close()
    socket.close(linger=0)
    context.term()


def test_last_token_at_a_position_counts_and_later_drafts_are_dropped(client):
    log = RequestLog(RequestHead("a-00000000", 0, 2, 0), client.manager.pack.n_probes)
    for columns, ids in (([0, 1], [5, 6]), ([2, 3], [7, 1]), ([3], [8]), ([4, 5], [4, 9])):
        log.add(step_of(client, 0, columns, ids), np.arange(len(columns)))
    tokens = log.tokens(np.array([5, 6, 7, 8, 4]), 2, lost=False)
    assert tokens.scores.coverage.unseen == ("", "", "", "", LAST)
    again = states_of("a", [3])
    assert tokens.scores.top(3) == client.manager.score_tokens(again).top(0)


def test_many_small_messages_equal_one_large_one(client):
    n = 600
    one, many = (RequestLog(RequestHead("a-00000000", 0, 2, 0), client.manager.pack.n_probes) for _ in range(2))
    message = step_of(client, 0, range(n), range(n))
    one.add(message, np.arange(n))
    for i in range(n):
        many.add(message, np.array([i]))
    ids = np.arange(n + 1)
    assert many.n_tokens == n and many.n_columns == n
    assert np.array_equal(many.tokens(ids, 2, lost=False).scores.values, one.tokens(ids, 2, lost=False).scores.values)


def test_newest_ended_requests_and_all_running_ones_are_kept(folder):
    with VllmClient(packs=[folder], keep_requests=2) as client:
        channel = Channel(client.receiver.address, 1000)
        for i in range(5):
            channel.send(lambda sequence, i=i: step_of(client, sequence, [0, 1], [5, 6], f"r{i}-00000000"))
        for i in (3, 0, 4):
            channel.send(lambda sequence, i=i: ended_of(sequence, f"r{i}-00000000", 2))
        assert client.wait(lambda: client.log_of("r3") is None and client.n_steps == 5, 5)
        assert client.wait(lambda: not client.log_of("r4").under_way, 5)
        assert [name_of(log.request) for log in client.requests()] == ["r0", "r1", "r2", "r4"]
        assert client.result(answer_of("r1", [5, 6], [7])).coverage.unseen == ("", "", LAST)
        channel.close()


def test_lost_end_messages_keep_at_most_twice_as_many_requests(folder):
    with VllmClient(packs=[folder], keep_requests=2) as client:
        channel = Channel(client.receiver.address, 1000)
        for i in range(30):
            channel.send(lambda sequence, i=i: step_of(client, sequence, [0, 1], [5, 6], f"r{i}-00000000"))
            channel.n_dropped += 1  # its end
        assert client.wait(lambda: client.n_steps == 30, 5)
        assert [name_of(log.request) for log in client.requests()] == ["r25", "r26", "r27", "r28", "r29"]
        channel.close()


def test_engine_running_more_tokens_is_an_error_unless_the_answer_was_cut(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2, 3, 4], [5, 6, 7, 7, 7]))
    channel.send(lambda sequence: ended_of(sequence, "a-00000000", 5))
    assert client.result(answer_of("a", [5, 6], [7, 7, 7, 8])).coverage.unseen[-1] == LAST
    for part in ([7], [7, 7, 7]):  # the last of several pieces, whose tokens others have, too
        with pytest.raises(AlignmentError, match=r"ran 5 tokens, the output has .*RequestOutputKind\.FINAL_ONLY"):
            client.result(answer_of("a", [5, 6], part), timeout_seconds=0)
    with pytest.raises(AlignmentError, match="position 2: the output has token 8"):
        client.result(answer_of("a", [5, 6], [8]), timeout_seconds=0)
    for how in ({"finish_reason": "abort"}, {"finish_reason": "stop", "stop_reason": "."}):
        assert client.result(answer_of("a", [5, 6], [7, 7], **how)).coverage.unseen == ("", "", "", LAST)
        with pytest.raises(AlignmentError, match="the output has 2"):
            client.result(answer_of("a", [5, 6], [], **how), timeout_seconds=0)
    channel.close()


def test_drafts_accepted_after_the_end_are_not_missing_tokens(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: dataclasses.replace(hello_of(client, sequence), n_ahead=2))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2, 3, 4], [5, 6, 7, 7, 7]))
    channel.send(lambda sequence: ended_of(sequence, "a-00000000", 5))
    assert client.result(answer_of("a", [5, 6], [7, 7])).coverage.unseen == ("", "", "", LAST)
    with pytest.raises(AlignmentError, match="the output has 2"):
        client.result(answer_of("a", [5, 6], [7]), timeout_seconds=0)
    channel.close()


def test_result_is_matched_by_tokens_among_requests_of_one_name(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    for own, ids in (("a-00000000", [5, 6, 7]), ("a-00000001", [5, 6, 8])):
        channel.send(lambda sequence, own=own, ids=ids: step_of(client, sequence, [0, 1, 2], ids, own))
        channel.send(lambda sequence, own=own: ended_of(sequence, own, 3))
    assert client.wait(lambda: len(client.requests()) == 2 and not client.requests()[1].under_way, 5)
    assert client.result(answer_of("a", [5, 6], [7, 1])).coverage.unseen[2] == ""
    # The third of the name: its scores are on their way while those of the others are there.
    late = threading.Timer(
        0.3, lambda: channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2], [5, 6, 8], "a-00000002", 2, 1))
    )
    late.start()
    output = answer_of("a", [5, 6], [8, 1])
    output.num_cached_tokens = 1
    assert client.result(output).coverage.unseen == ("", "", "", LAST)
    late.join()
    late = threading.Timer(
        0.3, lambda: channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2], [5, 6, 9], "a-00000003"))
    )
    late.start()
    assert client.result(answer_of("a", [5, 6], [9, 1])).coverage.unseen == ("", "", "", LAST)
    late.join()
    channel.close()


def test_cached_tokens_of_an_identical_request_are_not_taken_for_this_one(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2], [5, 6, 7], n_cached=1))
    channel.send(lambda sequence: ended_of(sequence, "a-00000000", 3))
    assert client.wait(lambda: any(not log.under_way for log in client.requests()), 5)
    output = answer_of("a", [5, 6], [7, 1])
    output.num_cached_tokens = 0  # its own messages were dropped
    with pytest.raises(AlignmentError, match="none of its tokens came"):
        client.result(output, timeout_seconds=0.1)
    output.num_cached_tokens = 1
    assert client.result(output).coverage.unseen == ("", "", "", LAST)
    channel.close()


def test_requests_without_unique_names_are_refused(client, monkeypatch):
    monkeypatch.setenv(FIXED_NAMES, "1")
    with pytest.raises(ConfigError, match="could not be told apart"):
        client.engine_arguments()
    monkeypatch.setenv(FIXED_NAMES, "0")
    assert client.engine_arguments()


@pytest.mark.parametrize("dropped", [False, True])
def test_answer_keeps_its_scores_when_a_newer_request_begins_alike(client, dropped):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2, 3], [5, 6, 7, 8]))
    channel.send(lambda sequence: ended_of(sequence, "a-00000000", 4))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2], [5, 6, 7], "a-00000001"))
    channel.n_dropped += dropped  # its fourth token, another one
    channel.send(lambda sequence: ended_of(sequence, "a-00000001", 3 + dropped))
    assert client.wait(lambda: len(client.requests()) == 2 and not client.requests()[1].under_way, 5)
    assert client.result(answer_of("a", [5, 6], [7, 8, 9])).coverage.unseen == ("", "", "", "", LAST)
    if not dropped:
        assert client.result(answer_of("a", [5, 6], [7, 9])).coverage.unseen == ("", "", "", LAST)
    channel.close()


def test_request_whose_first_message_was_dropped_reports_it_as_lost(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.n_dropped += 1  # the step of columns 0 and 1
    channel.send(lambda sequence: step_of(client, sequence, [2], [7]))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6], "b-00000000"))
    channel.send(lambda sequence: step_of(client, sequence, [3], [8], "b-00000000"))
    channel.send(lambda sequence: ended_of(sequence, "a-00000000", 3))
    channel.send(lambda sequence: ended_of(sequence, "b-00000000", 4))
    channel.n_dropped += 1  # of something later
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6], "c-00000000"))
    assert client.wait(lambda: client.n_steps == 4, 5)
    assert client.result(answer_of("a", [5, 6], [7, 8])).coverage.unseen == (LOST, LOST, "", LAST)
    assert client.result(answer_of("b", [5, 6], [7, 8, 9])).coverage.unseen == ("", "", GAP, "", LAST)
    assert client.log_of("a").as_message(client.receiver.n_lost).lost
    assert not client.log_of("b").as_message(client.receiver.n_lost).lost
    channel.close()


def test_loss_at_the_end_is_reported_without_a_later_message(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6]))
    channel.n_dropped += 2  # the step of column 2, and the end
    assert client.wait(lambda: client.n_steps == 1, 5)
    assert client.result(answer_of("a", [5, 6], [7, 8]), timeout_seconds=0.1).coverage.unseen == ("", "", LATE, LAST)
    assert client.result(answer_of("b", [5, 6], []), timeout_seconds=0).coverage.unseen == (NOT_RUN, NOT_RUN)
    channel.send(lambda sequence: step_of(client, sequence, [0, 1], [5, 6], "c-00000000"))
    assert client.wait(lambda: client.n_steps == 2, 5)
    assert client.result(answer_of("a", [5, 6], [7, 8]), timeout_seconds=0.1).coverage.unseen == ("", "", LOST, LAST)
    assert client.result(answer_of("b", [5, 6], []), timeout_seconds=0).coverage.unseen == (NOT_KNOWN, NOT_KNOWN)
    channel.close()


def test_worker_that_reads_no_step_makes_the_client_unhealthy(client):
    channel = Channel(client.receiver.address, 1000)
    channel.send(lambda sequence: hello_of(client, sequence))
    watch = EngineWatch(open_manager(client.settings), client.settings, HOST, channel, torch.nn.Identity())
    for step in SimulatedEngine(random.Random(1)).run():
        watch.begin_step(step.scheduled)
        watch.lose(list(step.scheduled.num_scheduled_tokens), AlignmentError("no states"))
    watch.close()
    assert wait_for(lambda: "ended without any readable token" in str(client.health())) and not client.health().ok
    channel.close()


def test_new_engine_ends_the_running_requests(client):
    channel = Channel(client.receiver.address, 1000)
    for i in range(2):
        channel.send(lambda sequence: hello_of(client, sequence))
        channel.send(lambda sequence, i=i: step_of(client, sequence, [0, 1], [5, 6], f"a-0000000{i}"))
    assert client.wait(lambda: client.n_steps == 2, 5)
    assert [log.under_way for log in client.requests()] == [False, True]
    channel.close()


def test_abort_uses_vllms_own_id_and_keeps_its_errors(folder):
    class Engine:
        def __init__(self):
            self.aborted = []

        async def abort(self, request, internal=False):
            self.aborted.append((request, internal))
            if len(self.aborted) == 2:
                raise OSError("the engine is gone")

    class Synchronous:
        def abort(self, request):
            pass

    async def main():
        with VllmClient(packs=[folder], stops=ABORT) as client:
            with pytest.raises(ConfigError, match="give an AsyncLLM"):
                client.abort_with(Synchronous())
            engine = Engine()
            client.abort_with(engine)
            channel = Channel(client.receiver.address, 1000)
            for action, own in (("record", "a"), ("stop", "1_a"), ("stop", "b")):
                channel.send(lambda sequence, a=action, own=own: met_of(sequence, f"{own}-00000000", 2, a))
            while len(engine.aborted) < 2 or not client.failures.n_errors:
                await asyncio.sleep(0.01)
            assert engine.aborted == [("1_a-00000000", True), ("b-00000000", True)]
            assert "gone" in str(client.failures.errors[0])
            channel.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_stop_after_the_engines_loop_ended_is_kept_as_a_failure(folder):
    class Engine:
        async def abort(self, request, internal):
            raise AssertionError(request)

    async def main(client):
        client.abort_with(Engine())

    with warnings.catch_warnings(), VllmClient(packs=[folder], stops=ABORT) as client:
        warnings.simplefilter("error")  # a coroutine that nobody awaits
        asyncio.run(main(client))
        channel = Channel(client.receiver.address, 1000)
        channel.send(lambda sequence: met_of(sequence, "a-00000000", 2, "stop"))
        end = time.monotonic() + 5
        while not client.failures.n_errors and time.monotonic() < end:
            time.sleep(0.01)
        assert "closed" in str(client.failures.errors[0])
        channel.close()


def test_request_names_of_vllm_are_told_apart():
    assert name_of("chatcmpl-1-0a1b2c3d") == "chatcmpl-1" and name_of("a-b") == "a-b"
    assert names_of_output("x", 1, 2) == ("1_x",) and names_of_output("x", 0, 1) == ("x", "0_x")
    assert list(names_of_choices("x", "chat.completion", 1)) == [["x"]]
    assert list(names_of_choices("x", "chat.completion", 2)) == [["0_x", "1_x"]]
    assert list(names_of_choices("x", "text_completion", 1)) == [["x-0"]]
    assert list(names_of_choices("x", "text_completion", 4)) == [
        ["x-0", "x-1", "x-2", "x-3"],
        ["0_x-0", "1_x-0", "2_x-0", "3_x-0"],
        ["0_x-0", "1_x-0", "0_x-1", "1_x-1"],
    ]


def test_engine_arguments_carry_the_settings_and_refuse_another_worker(client, folder):
    arguments = client.engine_arguments(max_model_len=64, additional_config={"mine": 1})
    assert arguments["max_model_len"] == 64 and arguments["additional_config"]["mine"] == 1
    assert WorkerSettings.of_config(arguments["additional_config"]) == client.settings
    assert not {"logits_processors", "async_scheduling"} & arguments.keys()
    with pytest.raises(ConfigError, match="worker_cls is 'other'"):
        client.engine_arguments(worker_cls="other")
    with pytest.raises(ConfigError, match="stops is 'maybe'"):
        VllmClient(packs=[folder], stops="maybe")


def deployment_of(folder, tmp_path, action):
    from probemon.util.files import sha256

    pack = tmp_path / "pack"
    file = tmp_path / "watch.yaml"
    file.write_text(
        f"deployment: 1\npacks: [{{pack: {pack}, manifest_sha256: {sha256(pack / 'manifest.json')}}}]\n"
        f"rules: [{{concepts: [c0], above: 0.3, action: {action}, on_blind: pass}}]\n"
    )
    return file


@pytest.mark.parametrize(("action", "stops"), [("stop", True), ("record", False)])
def test_engine_gets_the_stop_processor_only_if_a_rule_stops(folder, tmp_path, action, stops):
    with VllmClient(deployment_of(folder, tmp_path, action)) as client:
        assert client.settings.stop == stops
        assert client.engine_arguments().get("logits_processors") == ([STOP_ROWS] if stops else None)


def test_drift_of_a_deployment_is_refused_by_name(folder, tmp_path):
    file = deployment_of(folder, tmp_path, "record")
    file.write_text(file.read_text() + "drift: {}\n")
    with pytest.raises(DeploymentError, match=r"watch.yaml, line 4: drift: inside vLLM nothing compares"):
        VllmClient(file)


def test_held_answer_ends_before_the_token_that_met_the_rule(folder, tmp_path):
    class Letters:
        def decode(self, ids, **more):
            return "".join(chr(97 + i % 26) for i in ids)

    class Engine:
        async def abort(self, request, internal):
            aborted.add(request)

    file, aborted = deployment_of(folder, tmp_path, "stop"), set()

    async def ask(client, engine, request):
        async def outputs():
            output = output_of(engine, request)
            ids = output.outputs[0].token_ids
            for n in range(1, len(ids) + 1):
                output.outputs[0].token_ids = ids[:n]
                output.request_id = request.name
                yield output

        return [piece async for piece in hold(client, outputs(), wait_seconds=0.5)]

    async def main(client):
        client.abort_with(Engine())
        engine = SimulatedEngine(random.Random(8))
        await asyncio.to_thread(serve, client, engine)
        n_stopped = 0
        for request in engine.requests:
            ids, n_prompt = engine.final(request), len(request.prompt)
            if len(ids) == n_prompt or request.reused:
                continue
            pieces = await ask(client, engine, request)
            column = client.log_of(request.name).stop_column
            end = len(ids) - 1 if column is None else column
            shown = [token for piece in pieces for token in piece.ids]
            assert shown == ids[n_prompt:end] and pieces[-1].finished
            assert "".join(piece.text for piece in pieces) == Letters().decode(shown)
            assert pieces[-1].n_withheld == len(ids) - end
            assert (pieces[-1].event is None) == (column is None)
            n_stopped += column is not None
        assert n_stopped
        while aborted != {event.request for event in client.events}:  # the loop comes to the last ones next
            await asyncio.sleep(0.01)

    with VllmClient(file, tokenizer=Letters(), stops=ABORT) as client:
        asyncio.run(asyncio.wait_for(main(client), 60))


def held(client, request, prompt, ids):
    """What is shown of an answer that comes token by token."""

    async def ask():
        async def outputs():
            for n in range(1, len(ids) + 1):
                yield answer_of(request, prompt, ids[:n])

        return [piece async for piece in hold(client, outputs(), wait_seconds=0.2)]

    return asyncio.run(ask())


def test_held_answer_names_the_event_that_stopped_it_and_no_later_one(folder):
    with VllmClient(packs=[folder], tokenizer=SimpleNamespace(decode=lambda ids, **more: "x" * len(ids))) as client:
        channel = Channel(client.receiver.address, 1000)
        channel.send(lambda sequence: hello_of(client, sequence))
        channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2], [5, 6, 7]))
        for column, action in ((3, "record"), (3, "stop"), (3, "stop"), (3, "record"), (4, "record")):
            channel.send(lambda sequence, c=column, a=action: met_of(sequence, "a-00000000", c, a))
        channel.send(lambda sequence: step_of(client, sequence, [3, 4], [8, 9]))
        assert client.wait(lambda: client.n_steps == 2, 5)
        assert [action for _, action in client.actions] == ["record", "stop", "stop", "record", "record"]
        pieces = held(client, "a", [5, 6], [7, 8, 9])
        assert [token for piece in pieces for token in piece.ids] == [7]
        assert pieces[-1].event is list(client.actions)[1][0] and pieces[-1].n_withheld == 2
        channel.close()


def test_aborted_answer_shows_all_before_the_stop_if_the_abort_came_before_its_token(folder):
    """With asynchronous scheduling a rule is told of a token that the front end has not got yet."""
    with VllmClient(packs=[folder], tokenizer=SimpleNamespace(decode=lambda ids, **more: "x" * len(ids))) as client:
        channel = Channel(client.receiver.address, 1000)
        channel.send(lambda sequence: hello_of(client, sequence))
        channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2, 3], [5, 6, 7, 8]))
        channel.send(lambda sequence: met_of(sequence, "a-00000000", 4, "stop"))
        channel.send(lambda sequence: step_of(client, sequence, [4], [9]))
        assert client.wait(lambda: client.n_steps == 2, 5)
        for tokens in ([7, 8], [7, 8, 9], [7, 8, 9, 9]):
            pieces = held(client, "a", [5, 6], tokens)
            assert [token for piece in pieces for token in piece.ids] == [7, 8]
            assert pieces[-1].n_withheld == len(tokens) - 2
        channel.close()


def test_held_answer_needs_the_scores_of_its_own_tokens(folder):
    with VllmClient(packs=[folder], tokenizer=SimpleNamespace(decode=lambda ids, **more: "x" * len(ids))) as client:
        channel = Channel(client.receiver.address, 1000)
        channel.send(lambda sequence: hello_of(client, sequence))
        channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]))
        channel.send(lambda sequence: ended_of(sequence, "a-00000000", 5))
        assert client.wait(lambda: client.n_steps == 1, 5)
        assert [piece.ids for piece in held(client, "a", [5, 6], [7, 8, 9])] == [(7,), (8,), ()]
        assert [piece.ids for piece in held(client, "a", [5, 6], [7, 8, 1, 1])] == [(7,), ()]
        assert [piece.ids for piece in held(client, "a", [5, 5], [7, 8, 9])] == [()]
        channel.close()


def test_held_answer_shows_nothing_after_a_dropped_message(folder):
    with VllmClient(packs=[folder], tokenizer=SimpleNamespace(decode=lambda ids, **more: "x" * len(ids))) as client:
        channel = Channel(client.receiver.address, 1000)
        channel.send(lambda sequence: hello_of(client, sequence))
        channel.send(lambda sequence: step_of(client, sequence, [0, 1, 2], [5, 6, 7]))
        channel.n_dropped += 1  # that a rule stopped it at column 3
        channel.send(lambda sequence: step_of(client, sequence, [3], [8]))
        assert client.wait(lambda: client.n_steps == 2, 5)
        assert [piece.ids for piece in held(client, "a", [5, 6], [7, 8, 9])] == [(7,), ()]
        for own, before in (("b-00000000", 1), ("c-00000000", 0)):  # or at a token of its prompt
            channel.n_dropped += before
            channel.send(lambda sequence, own=own: step_of(client, sequence, [0], [5], own))
            channel.n_dropped += 1 - before
            channel.send(lambda sequence, own=own: step_of(client, sequence, [1, 2], [6, 7], own))
        assert client.wait(lambda: client.n_steps == 6, 5)
        for name in "bc":
            assert [piece.ids for piece in held(client, name, [5, 6], [7, 8])] == [()]
        channel.close()

"""Requests of an engine get the scores of a document with the same hidden states, and the client gets all of them."""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grouped_packs
from conftest import HIDDEN
from probemon import DynamicProbeManager, ProbePack
from probemon.core.scores import GENERATED, ModelState
from probemon.ops.vllm.engine_watch import EngineWatch
from probemon.ops.vllm.messages import Ended, RuleMet, StepTokens, WorkerSettings, pack, unpack
from probemon.ops.vllm.rows import CACHED, StepRows
from simulated_engine import SimulatedEngine

HOST = ModelState("Simulated", "float32", (), (), (), (), "", ("cpu",), 1)
SITES = ("resid_post.1", "resid_post.2")


class Sent:
    """In the place of a channel: what was sent, as the client reads it."""

    def __init__(self):
        self.messages, self.n_sent, self.n_dropped = [], 0, 0

    def send(self, make):
        self.messages.append(unpack(pack(make(len(self.messages)))))
        self.n_sent += 1

    def close(self):
        pass


@pytest.fixture
def probes(tmp_path):
    grouped_packs.write(tmp_path / "pack", (), torch.bfloat16, sites=SITES)
    return ProbePack.open(tmp_path / "pack")


def states_of(name, columns):
    """Hidden states that a request has at some columns, by site."""
    rows = []
    for column in columns:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {int(column)}".encode()))
        rows.append(torch.randn(len(SITES), HIDDEN, generator=generator))
    stacked = torch.stack(rows) if rows else torch.zeros(0, len(SITES), HIDDEN)
    return {site: stacked[:, i] for i, site in enumerate(SITES)}


def served(manager, engine, rules=(), stop=False, padding=3):
    """What a client is told of an engine's requests, and the rows that were to end, by request and column."""
    sent = Sent()
    settings = WorkerSettings(packs=("p",), sites=SITES, stop=stop)
    watch = EngineWatch(manager, settings, HOST, sent, torch.nn.Identity())
    if rules:
        for rule in rules:
            watch.run.on(**rule)
    to_end = []
    for step in engine.run():
        watch.begin_step(step.scheduled)
        parts = [
            states_of(name, step.rows.positions[begin:end])
            for name, begin, end in zip(step.rows.requests, step.rows.starts, step.rows.starts[1:], strict=False)
        ]
        states = {
            site: torch.cat([*(part[site] for part in parts), torch.full((padding, HIDDEN), float("nan"))])
            for site in SITES
        }
        for i in watch.step(step.rows, step.drafts, states):
            to_end.append((step.rows.requests[i], int(step.rows.positions[step.rows.starts[i + 1] - 1])))
        watch.settle(step.accepted)
    watch.close()
    return sent.messages, to_end, watch


def told_of(messages, name):
    """Column, token, phase and scores of a request, in the order in which they came."""
    found = []
    for message in messages:
        if isinstance(message, StepTokens):
            for i, of in enumerate(message.of_request.tolist()):
                if message.requests[of].request == name:
                    found.append((int(message.columns[i]), int(message.ids[i]), int(message.phases[i]), message, i))
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafts", [0, 4])
def test_engine_scores_equal_those_of_a_document(probes, seed, drafts):
    manager = DynamicProbeManager(probes, keep_top_k=3, max_loaded_probes=9)
    engine = SimulatedEngine(random.Random(seed), drafts=drafts)
    messages, _, watch = served(manager, engine)
    ends = {message.request: message for message in messages if isinstance(message, Ended)}
    n_compared = 0
    for request in engine.requests:
        found = told_of(messages, request.name)
        tokens, n_prompt = engine.final(request), len(request.prompt)
        assert [column for column, *_ in found] == list(range(len(found)))
        assert [token for _, token, *_ in found] == tokens[: len(found)]
        cached = set(range(request.n_cached)) if found else set()
        if request.begun:
            assert ends[request.name].n_columns == len(found)
            assert ends[request.name].n_cached == len(cached) + len(request.reused)
        unseen = {column for column, _, _, message, i in found if message.scores.coverage.unseen[i]}
        assert unseen == cached | request.reused
        for column, _, _, message, i in found:
            assert message.scores.coverage.unseen[i] == (CACHED if column in unseen else "")
        if request.reused or not found:
            continue
        hidden = states_of(request.name, range(len(found)))
        expected = manager.score_tokens(hidden, min(n_prompt, len(found)))
        for t, (_, _, phase, message, i) in enumerate(found):
            assert phase == (GENERATED if t >= n_prompt else 0)
            if t in unseen:
                continue
            assert message.scores.active(i).tolist() == expected.active(t).tolist()
            assert message.scores.active_scores(i).tolist() == expected.active_scores(t).tolist()
            assert message.scores.fired(i).tolist() == expected.fired(t).tolist()
            n_compared += 1
    assert n_compared > 20
    assert not watch.requests.recordings
    assert watch.run.n_failures == 0


def test_stop_rule_ends_its_sequence_at_the_token_that_met_it(probes):
    manager = DynamicProbeManager(probes)
    engine = SimulatedEngine(random.Random(5))
    rule = {"concept": "c0", "above": 0.4, "action": "stop"}
    messages, to_end, _ = served(manager, engine, [rule], stop=True)
    met = {(one.event["request"], one.event["column"]) for one in messages if isinstance(one, RuleMet)}
    assert met and all(one.stopping for one in messages if isinstance(one, RuleMet))
    first = {}
    for name, column in met:
        first[name] = min(column, first.get(name, column))
    # It is asked again at every step, for this engine does not end it.
    assert {name: min(c for n, c in to_end if n == name) for name, _ in to_end} == first
    ends = {message.request: message.stop_column for message in messages if isinstance(message, Ended)}
    assert {name: column for name, column in ends.items() if column >= 0} == first
    above = {
        (request.name, column)
        for request in engine.requests
        for column, _, phase, message, i in told_of(messages, request.name)
        if phase == GENERATED and message.scores.column(manager.pack.find("c0"))[i] > 0.4
    }
    assert met == {(name, column) for name, column in above if (name, column - 1) not in above}


def test_request_with_an_adapter_is_reported_as_unseen(probes):
    sent = Sent()
    watch = EngineWatch(
        DynamicProbeManager(probes), WorkerSettings(packs=("p",), sites=SITES), HOST, sent, torch.nn.Identity()
    )
    new = SimpleNamespace(
        req_id="a", prompt_token_ids=[1, 2], num_computed_tokens=0, lora_request=SimpleNamespace(lora_name="x")
    )
    none = SimpleNamespace(resumed_req_ids=set(), all_token_ids={})
    watch.begin_step(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new], scheduled_cached_reqs=none))
    rows = StepRows(("a",), np.array([0, 2]), np.array([1, 2]), np.array([0, 1]))
    watch.step(rows, {}, states_of("a", [0, 1]))
    [message] = sent.messages
    assert all("LoRA" in reason for reason in message.scores.coverage.unseen)
    assert watch.run.n_gaps == 0
    watch.close()


def test_mismatching_tokens_make_only_their_request_unseen(probes):
    sent = Sent()
    watch = EngineWatch(
        DynamicProbeManager(probes), WorkerSettings(packs=("p",), sites=SITES), HOST, sent, torch.nn.Identity()
    )
    new = [SimpleNamespace(req_id=name, prompt_token_ids=[1, 2], num_computed_tokens=0) for name in "ab"]
    none = SimpleNamespace(resumed_req_ids=set(), all_token_ids={})
    watch.begin_step(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new, scheduled_cached_reqs=none))
    rows = StepRows(("a", "b"), np.array([0, 2, 4]), np.array([1, 9, 1, 2]), np.array([0, 1, 0, 1]))
    watch.step(rows, {}, states_of("a", [0, 1, 2, 3]))
    [message] = sent.messages
    reasons = message.scores.coverage.unseen
    assert [bool(reason) for reason in reasons] == [True, True, False, False]
    assert "its prompt has 2" in reasons[0]
    assert watch.run.n_gaps == 1
    watch.close()


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_audited_tokens_of_requests_are_the_sampled_ones(probes, rate):
    manager = DynamicProbeManager(probes, keep_top_k=0, audit_rate=rate, load_threshold=0.9)
    engine = SimulatedEngine(random.Random(2))
    messages, _, _ = served(manager, engine)
    n_tokens = n_audited = 0
    for request in engine.requests:
        found = told_of(messages, request.name)
        if request.reused or not found:
            continue
        every = manager.score_all(states_of(request.name, range(len(found)))).numpy()
        for t, (_, _, _, message, i) in enumerate(found):
            coverage = message.scores.coverage
            if t < request.n_cached:
                assert not coverage.audited[i]
                continue
            n_tokens, n_audited = n_tokens + 1, n_audited + int(coverage.audited[i])
            firing = int((every[t] > manager.pack.alert_threshold.numpy()).sum())
            assert coverage.firing[i] == (firing if coverage.audited[i] else 0)
            missed = firing - len(message.scores.fired(i))
            assert coverage.firing_missed[i] == (missed if coverage.audited[i] else 0)
    assert n_tokens > 50
    assert n_audited == n_tokens if rate == 1.0 else 0.1 * n_tokens < n_audited < 0.6 * n_tokens


def test_scoring_error_makes_its_step_unseen_and_ends_nothing(probes, monkeypatch):
    manager = DynamicProbeManager(probes)
    sent = Sent()
    watch = EngineWatch(manager, WorkerSettings(packs=("p",), sites=SITES), HOST, sent, torch.nn.Identity())
    new = [SimpleNamespace(req_id=name, prompt_token_ids=[1, 2], num_computed_tokens=0) for name in "ab"]
    none = SimpleNamespace(resumed_req_ids=set(), all_token_ids={})
    watch.begin_step(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new, scheduled_cached_reqs=none))
    rows = StepRows(("a", "b"), np.array([0, 2, 4]), np.array([1, 2, 1, 2]), np.array([0, 1, 0, 1]))
    with monkeypatch.context() as broken:
        broken.setattr(manager, "score_prompt", lambda *_, **__: 1 / 0)
        watch.step(rows, {}, states_of("a", [0, 1, 2, 3]))
    rows = StepRows(("a", "b"), np.array([0, 1, 2]), np.array([3, 4]), np.array([2, 2]))
    watch.step(rows, {}, states_of("a", [4, 5]))
    first, second = sent.messages
    assert all("ZeroDivisionError" in reason for reason in first.scores.coverage.unseen)
    assert second.scores.coverage.unseen == ("", "")
    assert watch.run.n_failures == 1
    watch.close()


def test_worker_keeps_a_bounded_number_of_scores_and_sends_all(probes, monkeypatch):
    monkeypatch.setattr("probemon.ops.vllm.requests._KEEP_TOKENS", 5)
    sent = Sent()
    watch = EngineWatch(
        DynamicProbeManager(probes), WorkerSettings(packs=("p",), sites=SITES), HOST, sent, torch.nn.Identity()
    )
    new = [SimpleNamespace(req_id="a", prompt_token_ids=[1], num_computed_tokens=0)]
    none = SimpleNamespace(resumed_req_ids=set(), all_token_ids={})
    watch.begin_step(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new, scheduled_cached_reqs=none))
    for column in range(20):
        watch.step(StepRows(("a",), np.array([0, 1]), np.array([1]), np.array([column])), {}, states_of("a", [column]))
        assert watch.requests.recordings[0].n_kept == min(5, column + 1)
    assert [column for column, *_ in told_of(sent.messages, "a")] == list(range(20))
    watch.close()

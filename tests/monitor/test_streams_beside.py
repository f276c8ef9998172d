"""Concurrent streams on one model keep their own rules, sinks and counts."""

import asyncio
import inspect
import logging
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from arrangements import tokenizer
from conftest import PAD
from probemon import DynamicProbeManager
from probemon.errors import ConceptRaised, ConfigError, UnsupportedDecoding
from probemon.monitor.breaker import Breaker
from probemon.monitor.sinks import MemorySink
from probemon.ops.budget import Budget
from probemon.ops.telemetry.metrics import ProcessMetrics

GREEDY = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
RULED, OTHER = "w1 w5 w9", "w44 w17 w9"


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


def highest(manager, model, text):
    """Return the highest score of each probe at the generated tokens of a stream `[P]`, and its tokens."""
    events = list(manager.stream(model, tokenizer(), text, **GREEDY))
    scores = np.zeros(manager.pack.n_probes)
    for event in events[:-1]:
        np.maximum.at(scores, event.scores.active(0), event.scores.active_scores(0))
    return scores, [event.token_id for event in events]


@pytest.fixture
def of_the_other(manager, model):
    """A concept and a threshold that a token of OTHER exceeds and none of RULED does, and the tokens of both."""
    (ruled, ruled_ids), (other, other_ids) = (highest(manager, model, text) for text in (RULED, OTHER))
    probe = int(np.argmax(other - ruled))
    assert other[probe] - ruled[probe] > 0.01
    return manager.pack.concepts[probe]["id"], float((ruled[probe] + other[probe]) / 2), ruled_ids, other_ids


@pytest.mark.parametrize("action", ["stop", "raise"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["stream", "stream_async"])
def test_stream_rules_sinks_and_counts_cover_its_own_answer_only(manager, model, of_the_other, action, asynchronous):
    concept, above, ruled_ids, other_ids = of_the_other
    kept, runs = MemorySink(), []

    def prepare(run):
        run.on(concept, above=above, action=action)
        run.follow(kept)
        runs.append(run)

    def metrics():
        return ProcessMetrics(registry=CollectorRegistry())

    def tokens_counted(found):
        lines = [line for line in found.text()[0].decode().splitlines() if line.startswith("probemon_tokens_total")]
        return sum(float(line.split()[-1]) for line in lines)

    alone = 0.0
    for text in (RULED, OTHER):
        found = metrics()
        list(manager.stream(model, tokenizer(), text, followers=[found], **GREEDY))
        alone += tokens_counted(found)
    found = metrics()
    options = {"followers": [found], **GREEDY}
    if asynchronous:

        async def read(text, **more):
            return [e async for e in manager.stream_async(model, tokenizer(), text, max_waiting=1, **more, **options)]

        async def both():
            return await asyncio.gather(read(RULED, prepare=prepare), read(OTHER))

        ruled, other = asyncio.run(both())
    else:
        first = manager.stream(model, tokenizer(), RULED, prepare=prepare, max_waiting=1, **options)
        ruled = [next(first)]  # it runs, with its rule
        other = list(manager.stream(model, tokenizer(), OTHER, **options))
        ruled += list(first)
    assert [event.token_id for event in ruled] == ruled_ids and [event.token_id for event in other] == other_ids
    (run,) = runs
    assert not run.events and len(run.recordings) == 1
    assert {batch.generation for batch in kept.batches} == {0} and len(kept) == 3 + len(ruled) - 1  # all but the last
    assert tokens_counted(found) == alone > 0
    with pytest.raises(ConceptRaised) if action == "raise" else nullcontext():  # it is met where it is asked
        list(manager.stream(model, tokenizer(), OTHER, prepare=prepare, **GREEDY))
    assert runs[-1].events


def test_other_threads_neither_end_nor_disturb_a_stream_with_a_rule(manager, model, of_the_other):
    concept, above, ruled_ids, _ = of_the_other
    for run_beside in (
        lambda: model(torch.tensor([[1, 5, 9]])),
        lambda: model.generate(torch.tensor([[1, 5, 9]]), num_beams=3, **GREEDY),
        lambda: [model(torch.tensor([[1, 5, 9, 13][:n]])) for n in (2, 3, 4)],  # a decode loop without a cache
    ):
        stream = manager.stream(
            model, tokenizer(), RULED, prepare=lambda run: run.on(concept, above=above), max_waiting=1, **GREEDY
        )
        first = next(stream)
        run_beside()
        assert [event.token_id for event in (first, *stream)] == ruled_ids


def test_thread_that_generates_under_another_run_is_warned(manager, model, caplog):
    """Without one_thread a run watches every thread, which is meant of one that watches a process, and not of these."""
    ids, attached = torch.tensor([[1, 5, 9]]), threading.Barrier(2, timeout=60)

    def work(one_thread):
        with manager.attach(model, one_thread=one_thread):
            attached.wait()
            model.generate(ids, **GREEDY)

    for one_thread, n_told in ((True, 0), (False, 1)):
        caplog.clear()
        thread = threading.Thread(target=work, args=(one_thread,))
        with caplog.at_level(logging.WARNING), manager.attach(model, one_thread=one_thread) as run:
            run.on("c5", above=0.99)
            thread.start()
            attached.wait()
            thread.join()
            model.generate(ids, **GREEDY)
        assert sum("one_thread=True" in record.message for record in caplog.records) == n_told


def test_run_that_starts_during_another_threads_forward_fails_nobody(manager, model):
    inside, attached, failed, generated = threading.Event(), threading.Event(), [], []
    ids = torch.tensor([[1, 5, 9]])

    def wait(module, args):
        inside.set()
        attached.wait(30)

    def work():
        try:
            model(ids)
            generated.append(model.generate(ids.flip(1), **GREEDY))
        except Exception as error:
            failed.append(error)

    handle = model.model.layers[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(30)
    with manager.attach(model) as run:
        run.on("c5", above=0.99)
        attached.set()
        thread.join()
        handle.remove()
        out = model.generate(ids, **GREEDY)
        late = []

        def outside():
            try:
                model.model.forward(ids)  # by a thread that began after the run, so in no forward of before
            except UnsupportedDecoding as error:
                late.append(error)

        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
    assert len(late) == 1
    assert failed == [] and len(run.result(out)) == out.shape[1]
    assert len(run.result(generated[0])) == generated[0].shape[1]  # what that thread runs from then on is watched


def test_stream_takes_the_options_of_attach(manager, model):
    runs, breaker = [], Breaker()
    options = {"followers": [Budget(ms=1e4)], "breaker": breaker, "keep_tokens": 4, "callback_errors": "report"}
    events = list(manager.stream(model, tokenizer(), OTHER, prepare=runs.append, **options, **GREEDY))
    [run] = runs
    assert run.follower(Budget).tokens.total() > 4 and run.breaker is not None
    assert 4 <= events[-1].result.coverage.seen.sum() < len(events)  # of the others scores were forgotten
    taken = inspect.signature(manager.attach).parameters
    assert {*options, "on_gap", "strict", "one_thread", "model", "tokenizer"} == taken.keys()


@pytest.mark.parametrize(
    ("name", "meant"), [("folowers", "followers"), ("keep_token", "keep_tokens"), ("prepar", "prepare")]
)
def test_misspelt_stream_option_is_refused_with_the_nearest(manager, model, name, meant):
    with pytest.raises(ConfigError, match=rf"neither a stream nor generate\(\) takes '{name}', did you mean '{meant}'"):
        manager.stream(model, tokenizer(), OTHER, **{name: 5}, **GREEDY)

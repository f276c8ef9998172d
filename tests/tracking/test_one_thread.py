"""A one_thread run sees only its own thread; others may generate with separate runs."""

import threading

import numpy as np
import pytest
import torch

from conftest import n_hooks
from probemon import DynamicProbeManager
from probemon.errors import ConfigError, UnsupportedDecoding
from probemon.tracking.watched_threads import WatchedThreads

PROMPTS = [torch.tensor([[1, 5, 9, 14, 20]]), torch.tensor([[1, 33, 8]])]
GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}


def watched(manager, model, ids, rules, **attach):
    met = []
    with manager.attach(model, **attach) as run:
        for concept in rules:
            run.on(concept, above=0.1, action=lambda event: met.append((event.concept, event.column)))
        out = model.generate(ids, **GREEDY)
    return run.result(out), met, len(run.recordings)


def test_one_thread_runs_see_only_their_own_generation(model, pack):
    manager, rules = DynamicProbeManager(pack), (["c5", "c7"], ["c9"])
    alone = [watched(manager, model, ids, own) for ids, own in zip(PROMPTS, rules, strict=True)]
    before, gate, made = n_hooks(model), threading.Barrier(2, timeout=60), {}

    def work(i):
        gate.wait()  # both attach, generate and detach at the same time, many times
        for _ in range(5):
            made.setdefault(i, []).append(watched(manager, model, PROMPTS[i], rules[i], one_thread=True))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (result, met, _) in enumerate(alone):
        assert len(made[i]) == 5 and met
        for own_result, own_met, n_recordings in made[i]:
            assert n_recordings == 1 and own_met == met
            assert np.array_equal(own_result.token_id, result.token_id)
            assert np.array_equal(own_result.scores.probes, result.scores.probes)
            assert np.array_equal(own_result.scores.values, result.scores.values)
            assert own_result.coverage.unseen == result.coverage.unseen
    assert n_hooks(model) == before


def test_forwards_of_other_threads_are_not_recorded(model, pack):
    with DynamicProbeManager(pack).attach(model, one_thread=True) as run:
        run.on("c5", above=0.1, action="stop")

        def work():
            model.generate(PROMPTS[0], **GREEDY)
            model(PROMPTS[1])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert run.recordings == []
        out = model.generate(PROMPTS[1], **GREEDY)
    assert len(run.recordings) == 1 and len(run.result(out)) == out.shape[1]


def test_one_thread_run_refuses_other_threads_loops_and_batching(model, pack):
    raised = []
    with DynamicProbeManager(pack).attach(model, one_thread=True) as run:

        def work():
            try:
                run.generating(from_column=3).__enter__()
            except ConfigError as error:
                raised.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(UnsupportedDecoding, match="one_thread"):
            model.generate_batch([[1, 5, 9]], max_new_tokens=2)
    assert len(raised) == 1 and "one_thread" in raised[0]


def test_reused_thread_number_is_a_different_thread():
    threads, numbers, others = WatchedThreads(one_thread=True), [], []

    def attach():
        threads.attach()
        numbers.append(threading.get_ident())

    def look():
        if threading.get_ident() in numbers:
            others.append(threads.in_other)

    for work in (attach, *[look] * 50):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert others and all(others)

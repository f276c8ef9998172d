"""Tokens from the prefix cache have the scores of the forward that filled it: random requests against a dictionary."""

from __future__ import annotations

import itertools
import random
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grouped_packs
from conftest import HIDDEN
from probemon import DynamicProbeManager, ProbePack
from probemon.core.scores import ModelState
from probemon.ops.vllm.engine_watch import EngineWatch
from probemon.ops.vllm.kept_scores import KeptScores
from probemon.ops.vllm.messages import RuleMet, StepTokens, WorkerSettings, pack, unpack
from probemon.ops.vllm.rows import CACHED, StepRows

HOST = ModelState("Simulated", "float32", (), (), (), (), "", ("cpu",), 1)
SITES = ("resid_post.1", "resid_post.2")
BLOCK = 4


class Sent:
    """In the place of a channel: what was sent, as the client reads it."""

    def __init__(self):
        self.messages = []
        self.n_sent = self.n_dropped = 0

    def send(self, make):
        self.messages.append(unpack(pack(make(len(self.messages)))))

    def close(self):
        pass


def states_of(ids):
    """Hidden states of a text's tokens, as a decoder has them: each depends on all tokens before it."""
    rows = []
    for end in range(1, len(ids) + 1):
        generator = torch.Generator().manual_seed(zlib.crc32(str(ids[:end]).encode()))
        rows.append(torch.randn(len(SITES), HIDDEN, generator=generator))
    stacked = torch.stack(rows)
    return {site: stacked[:, i] for i, site in enumerate(SITES)}


class Prefixes:
    """vLLM's prefix cache in plain Python: whole blocks by all their tokens, the newest `n_blocks`."""

    def __init__(self, n_blocks):
        self.n_blocks, self.blocks = n_blocks, []

    def hit(self, ids):
        n = 0
        while n + BLOCK < len(ids) and tuple(ids[: n + BLOCK]) in self.blocks:
            n += BLOCK
        return n

    def put(self, ids):
        for end in reversed(range(BLOCK, len(ids) + 1, BLOCK)):  # the last block goes first
            key = tuple(ids[:end])
            if key in self.blocks:
                self.blocks.remove(key)
            self.blocks.append(key)
        del self.blocks[: -self.n_blocks]


@pytest.fixture
def manager(tmp_path):
    grouped_packs.write(tmp_path / "pack", (), torch.bfloat16, sites=SITES)
    return DynamicProbeManager(ProbePack.open(tmp_path / "pack"), keep_top_k=3, max_loaded_probes=9)


def asked(watch, name, prompt, output, n_cached, chunk):
    """Run a request alone: its prompt in chunks after the cached tokens, then token by token; the last is never run."""
    ids = prompt + output
    none = SimpleNamespace(resumed_req_ids=set(), all_token_ids={})
    new = [SimpleNamespace(req_id=name, prompt_token_ids=prompt, num_computed_tokens=n_cached)]
    hidden = states_of(ids)
    bounds = [*range(n_cached, len(prompt), chunk), *range(len(prompt), len(ids))]
    for begin, end in itertools.pairwise(bounds):
        watch.begin_step(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new, scheduled_cached_reqs=none))
        rows = StepRows((name,), np.array([0, end - begin]), np.array(ids[begin:end]), np.arange(begin, end))
        watch.step(rows, {}, {site: hidden[site][begin:end] for site in SITES})
        new = []


def over(watch, name):
    none = SimpleNamespace(resumed_req_ids=set(), all_token_ids={})
    watch.begin_step(SimpleNamespace(finished_req_ids={name}, scheduled_new_reqs=[], scheduled_cached_reqs=none))


def told_of(messages, name):
    """(token, scores, place in them) by column."""
    return {
        int(column): (int(message.ids[i]), message.scores, i)
        for message in messages
        if isinstance(message, StepTokens)
        for i, column in enumerate(message.columns)
        if message.requests[message.of_request[i]].request == name
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n_blocks", [6, 40])
def test_cached_tokens_have_the_scores_of_the_forward_that_ran_them(manager, seed, n_blocks):
    rng, sent, prefixes = random.Random(seed), Sent(), Prefixes(n_blocks)
    kept = KeptScores(BLOCK, n_blocks)
    settings = WorkerSettings(packs=("p",), sites=SITES)
    watch = EngineWatch(manager, settings, HOST, sent, torch.nn.Identity(), kept=kept)
    texts, ran, n_cached_seen = [[rng.randrange(9) for _ in range(13)]], {}, 0
    for number in range(30):
        before = rng.choice(texts)
        prompt = before[: rng.randrange(1, len(before) + 1)] + [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
        output = [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
        name, ids, n_cached = f"r{number}-00000000", prompt + output, prefixes.hit(prompt)
        asked(watch, name, prompt, output, n_cached, chunk=rng.choice([1, 3, 8]))
        told, expected = told_of(sent.messages, name), manager.score_tokens(states_of(ids), len(prompt))
        assert list(told) == list(range(len(ids) - 1))
        for column, (token, scores, i) in told.items():
            assert token == ids[column]
            assert scores.coverage.unseen[i] == ""
            assert scores.coverage.from_cache[i] == (column < n_cached)
            found = scores.active(i).tolist(), scores.active_scores(i).tolist(), scores.fired(i).tolist()
            if column < n_cached:  # exactly as when it ran, be it in a prompt or in an answer
                assert found == ran[tuple(ids[: column + 1])]
                n_cached_seen += 1
            else:
                assert found == (
                    expected.active(column).tolist(),
                    expected.active_scores(column).tolist(),
                    expected.fired(column).tolist(),
                )
                ran[tuple(ids[: column + 1])] = found
        over(watch, name)
        prefixes.put(ids[:-1])
        texts.append(ids)
        assert len(kept) <= n_blocks
    assert n_cached_seen > 30
    watch.close()


def test_blocks_of_running_requests_stay_and_the_first_of_a_text_goes_last(manager):
    scores = manager.score_tokens(states_of(list(range(8))))
    kept = KeptScores(BLOCK, 3)
    kept.add("a", 0, list(range(8)), scores)  # two blocks, running
    for name in "bcd":
        kept.add(name, 0, [ord(name)] * 8, scores)
        kept.release(name)

    def found(request, ids):
        seen = kept.find(request, 0, ids, manager.pack.n_probes, CACHED).coverage.seen.tolist()
        kept.release(request)
        return [all(seen[at : at + BLOCK]) for at in range(0, len(seen), BLOCK)]

    assert found("e", list(range(8))) == [True, True]
    assert found("f", [ord("d")] * 8) == [True, False]
    assert found("g", [ord("c")] * 8) == [False, False]
    assert len(kept) == 3
    n_bytes = kept.nbytes
    for name in "hijkl":
        kept.add(name, 0, [ord(name)] * 8, scores)
        kept.release(name)
    assert kept.nbytes <= n_bytes * 2


def test_block_with_an_unseen_token_or_after_a_hole_is_not_kept(manager):
    scores = manager.score_tokens(states_of(list(range(12))))
    n_probes = manager.pack.n_probes
    kept = KeptScores(BLOCK, 10)
    kept.add("a", 0, list(range(12)), scores.take(np.array([0, 1, 2, 3, 4, -1, 6, 7, 8, 9, 10, 11]), {5: "lost"}))
    unseen = kept.find("b", 0, list(range(12)), n_probes, CACHED).coverage.unseen
    assert unseen == ("",) * 4 + (CACHED,) * 4 + ("",) * 4
    kept.add("c", 0, [7, 7, 7], scores.take(np.arange(3)))
    kept.add("c", 4, [7] * 4, scores.take(np.arange(4)))  # column 3 is missing
    assert kept.find("d", 0, [7] * 8, n_probes, CACHED).coverage.unseen == (CACHED,) * 8
    assert kept.find("e", 0, list(range(6)), n_probes, CACHED).coverage.unseen == ("",) * 4 + (CACHED,) * 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_blocks_filled_in_the_same_step_are_seen_whatever_the_order_of_rows(manager, order):
    """vLLM gives a request a hit on blocks that another one fills in this very step."""
    sent, prompt = Sent(), list(range(12))
    settings = WorkerSettings(packs=("p",), sites=SITES)
    watch = EngineWatch(manager, settings, HOST, sent, torch.nn.Identity(), kept=KeptScores(BLOCK, 10))
    watch.run.on(concept="c0", above=0.4, within="prompt")
    none = SimpleNamespace(resumed_req_ids=set(), all_token_ids={})
    cached = {"a": 0, "b": 8, "c": 12}  # c goes on from the last block, which a and b fill
    prompts = {"a": prompt, "b": prompt, "c": [*prompt, 5, 6]}
    new = [SimpleNamespace(req_id=n, prompt_token_ids=prompts[n], num_computed_tokens=cached[n]) for n in "abc"]
    watch.begin_step(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new, scheduled_cached_reqs=none))
    names = ["abc"[i] for i in order]
    runs = [(name, list(range(cached[name], len(prompts[name])))) for name in names]
    columns = [column for _, own in runs for column in own]
    starts = np.cumsum([0, *(len(own) for _, own in runs)])
    hidden = states_of(prompts["c"])
    ids = [prompts["c"][column] for column in columns]
    rows = StepRows(tuple(names), starts, np.array(ids), np.array(columns))
    watch.step(rows, {}, {site: hidden[site][columns] for site in SITES})
    expected = manager.score_tokens(hidden)
    for name in "abc":
        told = told_of(sent.messages, name)
        assert list(told) == list(range(len(prompts[name])))
        for column, (_, scores, i) in told.items():
            assert scores.coverage.unseen[i] == "" and scores.coverage.from_cache[i] == (column < cached[name])
            assert scores.active_scores(i).tolist() == expected.active_scores(column).tolist()
    events = [message.event for message in sent.messages if isinstance(message, RuleMet)]
    met = {name: [event["column"] for event in events if event["request"] == name] for name in "abc"}
    assert met["a"] and met["a"] == met["b"] == met["c"][: len(met["a"])]
    for name in "abc":
        over(watch, name)
    watch.close()


def test_block_that_ran_again_without_scores_is_dropped(manager):
    scores = manager.score_tokens(states_of([1] * BLOCK))
    kept, unseen = KeptScores(BLOCK, 10), scores.take(np.full(BLOCK, -1), dict.fromkeys(range(BLOCK), "lost"))
    kept.add("a", 0, [5] * BLOCK, scores)
    kept.add("b", 0, [5] * BLOCK, unseen)
    assert kept.n_unknown("c", [5] * BLOCK) == 1
    kept.release("a")
    assert kept.find("d", 0, [5] * BLOCK, manager.pack.n_probes, CACHED).coverage.unseen == (CACHED,) * BLOCK
    assert len(kept) == 0 and kept.nbytes == 0


def test_newest_forward_replaces_a_kept_block(manager):
    """The weights may have changed: vLLM then empties its cache, and runs the text again."""
    first, second = (manager.score_tokens(states_of([seed] * BLOCK)) for seed in (1, 2))
    kept = KeptScores(BLOCK, 10)
    kept.add("a", 0, [5] * BLOCK, first)
    kept.add("b", 0, [5] * BLOCK, second)
    for name in "ab":
        found = kept.find(f"{name}2", 0, [5] * BLOCK, manager.pack.n_probes, CACHED)
        assert found.values.tolist() == second.values.tolist()
        kept.release(name)


def test_rule_on_prompts_is_met_by_cached_tokens(manager):
    sent = Sent()
    settings = WorkerSettings(packs=("p",), sites=SITES)
    watch = EngineWatch(manager, settings, HOST, sent, torch.nn.Identity(), kept=KeptScores(BLOCK, 10))
    watch.run.on(concept="c0", above=0.4, within="prompt")
    prompt = list(range(12))
    for name, n_cached in (("a", 0), ("b", 8)):
        asked(watch, name, prompt, [1, 2], n_cached, chunk=5)
        over(watch, name)
    events = [message.event for message in sent.messages if isinstance(message, RuleMet)]
    met = {name: [event["column"] for event in events if event["request"] == name] for name in "ab"}
    assert met["a"] == met["b"] and any(column < 8 for column in met["a"])
    watch.close()

"""A function's numbers are those of one plain forward over each finished text, at the token that they say, and its
rules, sinks and errors are those of a concept.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
import warnings

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from conftest import EOS, PAD
from probemon import DynamicProbeManager, JsonLinesSink, MemorySink, ParquetSink, function_probe
from probemon.core.scores import GENERATED
from probemon.errors import CallbackFailed, ConceptRaised, ConfigError
from probemon.monitor.function_probes import FunctionProbe
from probemon.ops.judges.escalation import Escalate

SITE = "resid_post.2"  # the pack reads resid_post.1
PROMPTS = torch.tensor([[5, 6, 7, 8], [PAD, PAD, 9, 10]])
MASK = (PROMPTS != PAD).long()
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


def first_value(hidden):
    return torch.sigmoid(hidden[:, 0].float())


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


def expected_of(model, out, row, pad, site=SITE):
    """The function's number at each position of a row run alone in fp64, NaN at padding and the last token."""
    taken = []
    layer = model.model.layers[int(site[-1])]
    handle = layer.register_forward_hook(lambda module, given, out: taken.append(out[0] if type(out) is tuple else out))
    model.double()
    with torch.no_grad():
        model(out[row : row + 1, pad:])
    model.float()
    handle.remove()
    numbers = torch.sigmoid(taken[0].reshape(-1, taken[0].shape[-1])[:, 0]).numpy()
    return np.concatenate([np.full(pad, np.nan), numbers[:-1], [np.nan]])


def check_result(model, result, out, pads, site=SITE):
    found = result.functions["first"]
    for row, pad in enumerate(pads):
        expected = expected_of(model, out, row, pad, site)
        at = np.flatnonzero(result.row == row)
        assert np.allclose(found.values[at], expected[result.position[at]], atol=1e-5, equal_nan=True)
        assert all(bool(text) == math.isnan(value) for text, value in zip(found.unseen, found.values, strict=True))
    assert np.isfinite(found.values).sum() == len(result) - len(pads)


@pytest.mark.parametrize("site", [SITE, "resid_post.1"])
@pytest.mark.parametrize("sampled", [False, True])
def test_numbers_are_those_of_a_plain_forward(manager, model, site, sampled):
    torch.manual_seed(3)
    probe = function_probe(first_value, site, "first")
    with manager.attach(model, followers=[probe]) as run:
        out = model.generate(PROMPTS, attention_mask=MASK, **{**GREEDY, "do_sample": sampled})
    result = run.result(out)
    check_result(model, result, out, (0, 2), site)
    assert probe.n_tokens == 4 + 2 + 2 * 5 and probe.n_unseen == 0
    check = next(check for check in run.health().checks if check.name == "function first")
    assert check.state == "ok" and "16 of 16 tokens have a number" in check.what


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_numbers_follow_beams_and_accepted_drafts(manager, model, how):
    torch.manual_seed(1)
    n_seen, probe = [], function_probe(lambda hidden: n_seen.append(len(hidden)) or first_value(hidden), SITE, "first")
    ids = PROMPTS if "num_beams" in how else PROMPTS[:1]
    with manager.attach(model, followers=[probe]) as run:
        config = GenerationConfig(**{**GREEDY, "max_new_tokens": 9, **how})
        out = model.generate(ids, attention_mask=(ids != PAD).long(), generation_config=config)
    each = how.get("num_return_sequences", 1)
    check_result(model, run.result(out), out, [pad for pad in (0, 2)[: len(ids)] for _ in range(each)])
    if "num_beams" not in how:
        assert sum(n_seen) == out.shape[1] - 1  # each token once, rejected drafts never
    assert sum(n_seen) == probe.n_tokens


def test_second_turn_and_joined_pieces_keep_the_numbers(manager, model):
    probe = function_probe(first_value, SITE, "first")
    with manager.attach(model, followers=[probe]) as run:
        out = model.generate(PROMPTS[:1], **{**GREEDY, "max_new_tokens": 300}, return_dict_in_generate=True)
        longer = torch.cat([out.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        out = model.generate(longer, past_key_values=out.past_key_values, **GREEDY)
    check_result(model, run.result(out), out, (0,))
    assert np.isnan(run.result(out).before(3).functions["first"].values).sum() == 0


def test_forgotten_tokens_say_so(manager, model):
    probe = function_probe(first_value, SITE, "first")
    with manager.attach(model, followers=[probe], keep_tokens=20) as run:
        out = model.generate(PROMPTS[:1], **{**GREEDY, "max_new_tokens": 100})
    result, expected = run.result(out), expected_of(model, out, 0, 0)
    found = result.functions["first"]
    kept = ~np.isnan(found.values)
    assert found.unseen == result.coverage.unseen and 20 <= kept.sum() < 100
    assert np.allclose(found.values[kept], expected[kept], atol=1e-5)


def test_rules_are_met_as_those_of_a_concept(manager, model):
    def generate(**rule):
        action = rule.pop("action", "record")
        probe = function_probe(first_value, SITE, "first", threshold=rule.pop("threshold", None))
        with manager.attach(model, followers=[probe]) as run:
            run.on("first", action=action, **rule)
            out = model.generate(PROMPTS, attention_mask=MASK, **{**GREEDY, "max_new_tokens": 12, "eos_token_id": EOS})
        return run, out, run.result(out)

    run, out, result = generate(above=0.0, within="any")
    values = result.functions["first"].values
    generated = values[(result.phase == GENERATED) & np.isfinite(values)]
    above = float(np.sort(generated)[len(generated) // 2])
    for kwargs in ({"above": above}, {"threshold": above}, {"above": above, "for_tokens": 2}):
        run, out, result = generate(**kwargs)
        scores, expected = result.functions["first"].values, set()
        for row in (0, 1):
            at = np.flatnonzero((result.row == row) & (result.phase == GENERATED))[:-1]
            streak = 0
            for i in at:
                streak = streak + 1 if scores[i] > np.float64(above) else 0
                if streak == kwargs.get("for_tokens", 1):
                    expected.add((row, int(result.position[i])))
        assert {(event.row, event.column) for event in run.events} == expected and expected
        event = run.events[0]
        assert (event.name, event.path, event.above) == ("first", ("first",), above)
        assert event.score == scores[result.at(event.row, event.column)]
    run, out, result = generate(above=above, action="stop")
    first = {row: min(e.column for e in run.events if e.row == row) for row in {e.row for e in run.events}}
    for row, column in first.items():
        assert (out[row, column + 2 :] == PAD).all()
    assert first
    with pytest.raises(ConceptRaised, match="first"):
        generate(above=above, action="raise")
    run, _, result = generate(above=above, aggregate="max", within="any")
    assert {event.aggregate for event in run.events} == {"max"}


def test_rules_of_functions_and_concepts_keep_separate_streaks(manager, model):
    probe = function_probe(first_value, SITE, "first")
    concept = manager.pack.concepts[0]["id"]
    with manager.attach(model, followers=[probe]) as run:
        run.on(concept, above=0.0, for_tokens=2, action="record")
        run.on("first", above=0.0, for_tokens=3, action="record")
        model.generate(PROMPTS[:1], **GREEDY)
    assert [(event.concept, event.column) for event in run.events] == [(concept, 5), ("first", 6)]


def test_blind_tokens_and_judges_are_those_of_rules(manager, model):
    def fails_at_the_end(hidden):
        return torch.full((len(hidden),), float("nan") if len(hidden) == 1 else 0.5)

    judged = []
    probe = function_probe(fails_at_the_end, SITE, "first")
    with manager.attach(model, followers=[probe]) as run:
        run.on("first", above=0.9, on_blind="record", action="record")
        model.generate(PROMPTS[:1], **GREEDY)
    assert [event.blind for event in run.events] == ["first returned nan"] * 5

    def judge(*case):
        judged.append(case)
        return "stop"

    with manager.attach(model, followers=[function_probe(first_value, SITE, "first")]) as run:
        run.on("first", above=0.0, for_tokens=2, action=Escalate(judge, 20.0, "hold", "raise"))
        model.generate(PROMPTS[:1], **GREEDY)
    assert len(judged) == 1 and run.events[0].verdict.ruling == "stop"


def test_sinks_and_tables_have_its_numbers(manager, model, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    probe, memory = function_probe(first_value, SITE, "first", threshold=0.5), MemorySink()
    sinks = [JsonLinesSink(tmp_path / "s.jsonl"), ParquetSink(tmp_path / "s.parquet"), memory]
    with manager.attach(model, followers=[*sinks, probe]) as run:
        out = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    result = run.result(out)
    values = result.functions["first"].values
    expected = {
        (int(result.row[i]), int(result.position[i])): values[i] for i in range(len(result)) if values[i] == values[i]
    }
    table = result.to_arrow(texts=True).to_pylist()
    assert {(one["row"], one["position"]): one["score"] for one in table if one["concept"] == "first"} == expected
    for one in table:
        if one["concept"] == "first":
            assert one["path"] == "first" and one["threshold"] == 0.5 and one["fired"] == (one["score"] > 0.5)
    others = [one for one in table if one["concept"] != "first"]
    assert len(others) == len(result.scores.values)
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert {
        (one["row"], one["position"]): np.float32(score)
        for one in lines
        for name, score in one["scores"]
        if name == "first"
    } == expected
    assert all(("first" in one["fired"]) == (expected[one["row"], one["position"]] > 0.5) for one in lines)
    rows = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert {(one["row"], one["position"]): one["score"] for one in rows if one["concept"] == "first"} == expected
    n_probes = manager.pack.n_probes + 1
    for batch in memory.batches:
        coverage = batch.scores.coverage
        assert (coverage.active + coverage.dropped + coverage.not_reached == n_probes).all()
    streamed = [
        event.functions["first"] for event in manager.stream(
            model, _Tokenizer(), "text", followers=[function_probe(first_value, SITE, "first")], **GREEDY
        ) if event.functions
    ]  # fmt: skip
    assert np.allclose(streamed, values[(result.row == 0) & (result.phase == GENERATED)][:-1])


class _Tokenizer:
    """Encodes every text as the first prompt."""

    def __call__(self, text, **options):
        return {"input_ids": PROMPTS[0].tolist()}

    def encode(self, text, **options):
        return PROMPTS[0].tolist()

    def decode(self, ids, **options):
        return str(ids)


def raises(hidden):
    raise ValueError("no number today")


@pytest.mark.parametrize(
    "fn, reason, raised",
    [
        (raises, "first raised ValueError", "no number today"),
        (lambda hidden: hidden[:, :2], "first raised ConfigError", r"first returned \[4, 2\] for 4 hidden states"),
        (lambda hidden: [0.5], "first raised ConfigError", r"first returned \[1\] for 4"),
        (lambda hidden: "loud", "first raised ConfigError", "first returned 'loud'"),
        (lambda hidden: np.full(len(hidden), np.nan), "first returned nan", None),
        (lambda hidden: torch.full((len(hidden),), 1.5), "first is not from 0 to 1", None),
    ],
)
def test_function_that_fails_is_named_and_ends_nothing(manager, model, caplog, fn, reason, raised):
    plain = model.generate(PROMPTS[:1], **GREEDY)
    caplog.set_level(logging.CRITICAL, logger="probemon")
    probe = function_probe(fn, SITE, "first")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with manager.attach(model, followers=[probe], callback_errors="report") as run:
            run.on("first", above=0.6)
            out = model.generate(PROMPTS[:1], **GREEDY)
    result = run.result(out)
    assert torch.equal(out, plain) and not run.events and result.coverage.n_unseen == 1
    unseen = result.functions["first"].unseen[:-1]
    is_silent = not any(unseen[i] for i in result.tokens_of(0, "generated")[:-1])  # the rule is of the answer
    assert is_silent or "so 1 rule could not be asked of them" in str(told[0].message)
    n_wrong = sum(text == reason for text in unseen)
    assert unseen[0] == reason and set(unseen) <= {reason, ""}
    assert (probe.n_unseen, probe.why_unseen, probe.n_tokens) == (n_wrong, {reason: n_wrong}, 9)
    check = next(check for check in run.health().checks if check.name == "function first")
    assert check.state != "ok" and reason in check.what
    assert bool(run.failures) == (raised is not None)
    if raised is not None:
        assert re.search(raised, str(run.failures[0]))
        with (
            pytest.raises(CallbackFailed, match=raised),
            manager.attach(model, followers=[function_probe(fn, SITE, "first")]),
        ):
            assert torch.equal(model.generate(PROMPTS[:1], **GREEDY), plain)


def test_function_changes_neither_states_nor_sampling(manager, model):
    def changes(hidden):
        torch.rand(7)
        hidden.zero_()
        return torch.rand(len(hidden))

    def generate(followers):
        torch.manual_seed(5)
        with manager.attach(model, followers=followers) as run:
            out = model.generate(PROMPTS, attention_mask=MASK, **{**GREEDY, "do_sample": True})
        return out, run.result(out).scores.values

    out, scores = generate([])
    with_function, its_scores = generate([function_probe(changes, "resid_post.1", "first")])
    assert torch.equal(out, with_function) and np.array_equal(scores, its_scores)


def test_slow_calls_are_counted(manager, model):
    def slow(hidden):
        time.sleep(0.02 if len(hidden) > 1 else 0)
        return first_value(hidden)

    probe = function_probe(slow, SITE, "first", budget_ms=15)
    with manager.attach(model, followers=[probe]) as run:
        model.generate(PROMPTS[:1], **GREEDY)
    check = next(check for check in run.health().checks if check.name == "function first")
    assert probe.n_slow >= 1 and probe.n_calls == 6 and probe.slowest_seconds >= 0.02
    assert check.state == "warning" and "over 15 ms" in check.what and "make the function faster" in check.remedy


def test_unusable_functions_and_rules_are_refused(manager, model):
    for given, message in [
        ((None, SITE, "first"), "fn is given None"),
        ((first_value, 3, "first"), "site is 3"),
        ((first_value, SITE, " "), "give a name"),
    ]:
        with pytest.raises(ConfigError, match=message):
            function_probe(*given)
    for more in ({"threshold": 1.0}, {"budget_ms": 0}):
        with pytest.raises(ConfigError, match=next(iter(more))):
            function_probe(first_value, SITE, "first", **more)
    taken = manager.pack.concepts[0]["id"]
    with pytest.raises(ConfigError, match="give the function another name"):
        manager.attach(model, followers=[function_probe(first_value, SITE, taken)])
    two = [function_probe(first_value, SITE, "first") for _ in range(2)]
    with pytest.raises(ConfigError, match="two functions are called 'first'"):
        manager.attach(model, followers=two)
    with manager.attach(model, followers=[two[0]]) as run:
        for rule, message in [
            ({}, "no alert threshold.* give above"),
            ({"aggregate": "trained", "above": 0.5}, "was not trained"),
            ({"aggregate": "z:pack", "above": 2.0}, "calibration text"),
            ({"rate": 0.01}, "has no alert sets"),
        ]:
            with pytest.raises(ConfigError, match=message):
                run.on("first", **rule)
        for rule in ({"all_of": [taken, "first"]}, {"concept": [taken, "first"]}):
            with pytest.raises(ConfigError, match="'first' is a function, which takes rules by its name alone"):
                run.on(**rule, above=0.5)
    assert isinstance(two[0], FunctionProbe)

"""The fields of a rule mean what plain Python over the scores of a full result says."""

import dataclasses
import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.core.aggregate import parse
from probemon.errors import ConceptRaised, ConfigError, RuleError
from probemon.monitor.rule_spec import FIELDS, WITHIN, RuleSpec
from probemon.ops.deployment.deployment import schema
from probemon.tracking.generation import Generation

PROMPTS = torch.tensor([[PAD, PAD, 7, 13, 11, 2, 8], [3, 5, 8, 9, 21, 13, 4]])
MASK = (PROMPTS != PAD).long()
GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def manager(tmp_path_factory, model):
    return DynamicProbeManager(make_pack(tmp_path_factory.mktemp("rules") / "pack", model))


def scores_of(manager, model, out, mask):
    """The score of every probe at every real column but the last, by a full forward: {(row, column): [P]}."""
    found = {}
    for row in range(len(out)):
        begin = int((mask[row] == 0).sum())
        ids = out[row : row + 1, begin:-1]
        states = model(ids, output_hidden_states=True).hidden_states
        hidden = {site: states[int(site.split(".")[1]) + 1][0] for site in manager.pack.sites}
        scores = manager.score_all(hidden if len(hidden) > 1 else next(iter(hidden.values()))).numpy()
        found |= {(row, begin + i): scores[i] for i in range(len(scores))}
    return found


class Thinking:
    """A tokenizer in which these tokens begin and end reasoning."""

    def __init__(self, begin, end):
        self.ids = {"<think>": begin, "</think>": end}

    def convert_tokens_to_ids(self, name):
        return self.ids.get(name)

    def convert_ids_to_tokens(self, id):
        return {id: name for name, id in self.ids.items()}.get(id)


def met(manager, scores, conditions, for_tokens, within, aggregate, n_prompt, out, tokenizer):
    """Where a rule is met, by plain Python: {(row, column)}."""
    places, (begin, end) = set(), tokenizer.ids.values()
    for row in {row for row, _ in scores}:
        thinks = {}
        for column in range(out.shape[1]):
            # A mark in the prompt counts at its end, where the template stands.
            earlier = [int(id) for id in out[row, n_prompt - 3 : column] if id in (begin, end)]
            is_mark = int(out[row, column]) in (begin, end)
            thinks[column] = None if is_mark else earlier[-1:] == [begin]
        streak, running = 0, [parse(aggregate).begin() if aggregate else None for _ in conditions]
        for column in sorted(column for of_row, column in scores if of_row == row):
            if ("prompt" if column < n_prompt else "generated") not in WITHIN[within]:
                continue
            if within in ("reasoning", "reply") and thinks[column] != (within == "reasoning"):
                continue
            over = True
            for at, (probe, above) in enumerate(conditions):
                value = float(scores[row, column][probe])
                if aggregate:
                    running[at], values = parse(aggregate).add(running[at], np.array([value]))
                    value = float(values[0])
                over = over and value > above
            streak = streak + 1 if over else 0
            if streak == for_tokens:
                places.add((row, column))
    return places


@torch.no_grad()
@pytest.mark.parametrize("within", list(WITHIN))
@pytest.mark.parametrize(
    ("n_concepts", "for_tokens", "aggregate"), [(1, 1, None), (1, 2, "ema:0.5"), (2, 1, None), (3, 2, "max")]
)
def test_events_equal_those_of_plain_python(manager, model, within, n_concepts, for_tokens, aggregate):
    rng, n_met = np.random.default_rng(n_concepts), 0
    ids = [concept["id"] for concept in manager.pack.concepts]
    wanted = [[int(one) for one in rng.choice(len(ids), n_concepts, replace=False)] for _ in range(12)]
    bar = 0.45 if n_concepts == 1 else 0.3
    plain = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    spoken = plain[1, 7:].tolist()
    tokenizer = Thinking(13, next(id for at, id in enumerate(spoken) if at > 1 and id not in spoken[:at]))
    assert 13 in PROMPTS[1] and 13 not in spoken
    with manager.attach(model, tokenizer) as run:
        for probes in wanted:
            named = [ids[probe] for probe in probes]
            fields = {"all_of": named} if n_concepts > 1 else {"concept": named[0]}
            run.on(**fields, above=bar, for_tokens=for_tokens, aggregate=aggregate, within=within, action="record")
        out = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    scores = scores_of(manager, model, out, MASK)
    for probes in wanted:
        conditions = [(one, bar) for one in probes]
        expected = met(manager, scores, conditions, for_tokens, within, aggregate, PROMPTS.shape[1], out, tokenizer)
        same = [
            event
            for event in run.events
            if event.concept == ids[probes[0]] and event.also == tuple(ids[one] for one in probes[1:])
        ]
        assert {(event.row, event.column) for event in same} == expected and len(same) == len(expected)
        n_met += len(expected)
    assert n_met > (0 if within == "reasoning" else 3)


@torch.no_grad()
def test_part_is_known_of_a_short_prompt_if_other_ids_are_not(manager, model, monkeypatch):
    monkeypatch.setattr(Generation, "ids_before", lambda *_: ())  # as of another engine's requests
    with manager.attach(model, Thinking(13, 60)) as run:
        run.on("c*", above=0.0, within="reasoning", action="record")
        model.generate(torch.tensor([[5, 13]]), **GREEDY)
    assert {event.column for event in run.events} >= {2}


def test_rules_on_reasoning_need_a_tokenizer_that_marks_it(manager, model):
    with manager.attach(model) as run, pytest.raises(ConfigError, match="has no token such as <think>"):
        run.on("c1", above=0.5, within="reasoning")


@torch.no_grad()
def test_part_of_an_answer_is_known_if_its_prompt_came_from_a_cache(manager, model):
    from transformers import DynamicCache

    prompt = torch.tensor([[3, 5, 8, 9, 21, 13, 4]])  # ends with reasoning begun
    events = {}
    for cached in (0, 6):
        cache = DynamicCache()
        if cached:
            model(prompt[:, :cached], past_key_values=cache)
        with manager.attach(model, Thinking(13, 60)) as run:
            run.on("c*", above=0.0, within="reasoning", action="record")
            run.on("c*", above=0.0, within="reply", action="record")
            model.generate(prompt, past_key_values=cache, **GREEDY)
        events[cached] = [(event.concept, event.column) for event in run.events]
    assert events[0] == events[6] and events[0]


@torch.no_grad()
def test_prompt_rule_stops_a_sequence_at_its_first_generated_token(manager, model):
    scores = scores_of(manager, model, torch.cat([PROMPTS, PROMPTS[:, :1]], 1), MASK)
    highest = {row: np.max([scores[row, column] for column in range(2, 7)], axis=0) for row in (0, 1)}
    probe = int(np.argmax(highest[1] - highest[0]))
    concept, above = manager.pack.concepts[probe]["id"], float(highest[0][probe] + highest[1][probe]) / 2
    with manager.attach(model) as run:
        run.on(concept, above=above, within="prompt")
        out = model.generate(PROMPTS, attention_mask=MASK, **{**GREEDY, "eos_token_id": 60})
    assert (out[1, 8:] == PAD).all() and (out[0, 8:] != PAD).any()
    assert {event.row for event in run.events} == {1} and all(event.column < 7 for event in run.events)
    with manager.attach(model) as run, pytest.raises(ConceptRaised, match="was over"):
        run.on(concept, above=above, within="prompt", action="raise")
        model.generate(PROMPTS, attention_mask=MASK, **GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("on_blind", ["pass", "stop"])
def test_prompt_from_a_cache_is_reported_as_unevaluated(manager, model, on_blind):
    from transformers import DynamicCache

    cache = DynamicCache()
    first = model.generate(PROMPTS[1:], past_key_values=cache, **GREEDY)
    warned = pytest.warns(UserWarning, match=r"tokens that rules are asked of have no scores.*1 rule")
    with warned, manager.attach(model) as run:
        run.on("c1", above=0.99, within="prompt", action="record", on_blind=on_blind)
        model.generate(first, past_key_values=cache, **GREEDY)


def test_probe_zero_is_named_by_its_number(manager):
    assert [rule.probe for rule in RuleSpec(0, above=0.5).rules(manager.pack)] == [0]
    assert [rule.probes for rule in RuleSpec(all_of=[0, "c1"], above=0.5).rules(manager.pack)] == [(0, 1)]


def test_rule_survives_json_and_matches_its_schema():
    spec = RuleSpec(all_of=["a", "b"], above=0.5, for_tokens=2, within="any", action="record", aggregate="mean")
    fields = json.loads(json.dumps(spec.to_dict()))
    assert RuleSpec.from_dict(fields) == dataclasses.replace(spec, all_of=("a", "b"))
    jsonschema.validate(fields, RuleSpec.schema())
    for name, value in {"action": print, "on_blind": print, "concept": re.compile("a")}.items():
        with pytest.raises(RuleError, match="which JSON cannot hold") as caught:
            RuleSpec(**{"concept": "a", name: value}).to_dict()
        assert caught.value.field == name
    assert set(RuleSpec.schema()["properties"]) == set(FIELDS)
    assert set(schema()["properties"]["rules"]["items"]["properties"]) == {*FIELDS, "concepts", "judge"} - {"concept"}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({}, "concept", "concept is missing"),
        ({"concept": "a", "all_of": ["a", "b"]}, "all_of", "both given"),
        *[
            ({"concept": concept}, "concept", "give an id, a name or a number")
            for concept in ("", " ", [], ["a", None], 1.5, True, float("nan"), {}, b"a")
        ],
        ({"all_of": ["a", None]}, "all_of", "give an id, a name or a number"),
        ({"all_of": np.array(["a", "b"])}, "all_of", "two concepts or more"),
        ({"concept": "a", "aggregate": "z:last:" + "9" * 5000}, "aggregate", "too many"),
        ({1: 2}, "1", "a rule has no 1"),
        (None, "", "give a mapping"),
        (["concept"], "", "give a mapping"),
        ({"all_of": ["a"]}, "all_of", "two concepts or more"),
        ({"all_of": "ab"}, "all_of", "two concepts or more"),
        ({"concept": "a", "within": "answers"}, "within", "'answer', 'reasoning', 'reply', 'prompt', 'any'"),
        ({"concept": "a", "above": -1}, "above", "above is -1"),
        ({"concept": "a", "above": 0.5, "rate": 0.1}, "rate", "give one of them"),
        ({"concept": "a", "for_tokens": 0}, "for_tokens", "for_tokens is 0"),
        ({"concept": "a", "action": "halt"}, "action", "'record', 'stop', 'raise'"),
        ({"concept": "a", "on_blind": "halt"}, "on_blind", "'pass', 'record'"),
        ({"concept": "a", "aggregate": "median"}, "aggregate", "median"),
        ({"concept": "a", "withn": "any"}, "withn", "did you mean 'within'"),
    ],
)
def test_invalid_rule_field_is_named(fields, field, said):
    with pytest.raises(RuleError, match=re.escape(said)) as caught:
        RuleSpec.from_dict(fields)
    assert caught.value.field == field and isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"alert_set": "none"}, "alert_set"), ({"rate": 0.0100000001}, "rate"), ({"aggregate": "mean"}, "above")],
)
def test_thresholds_that_a_pack_lacks_are_named_by_their_field(model, tmp_path, fields, field):
    pack = make_pack(tmp_path / "pack", model, alert_set="usual", alert_sets={"rate_0.01": torch.full((40,), 0.25)})
    assert RuleSpec("c1", rate=0.01).rules(pack)[0].above == 0.25
    with pytest.raises(RuleError) as caught:
        RuleSpec("c1", **fields).rules(pack)
    assert caught.value.field == field


def test_rule_fields_are_read_in_two_files_only():
    """In what holds and in what asks a rule. (A judge has a time `within` which it answers.)"""
    root, own = Path(__file__).parents[2] / "probemon", {"monitor/rule_spec.py", "monitor/rule_panel.py"}
    source = {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for path in root.rglob("*.py")
        if path.parent.name != "judges"
    }
    for name in ("within", "all_of"):
        named = {file for file, text in source.items() if re.search(rf"(rule|spec|one|self)\.{name}\b", text)}
        assert named <= own, named

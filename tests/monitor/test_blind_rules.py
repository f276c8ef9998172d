"""At a token that our hooks did not see, a rule does what its on_blind says: pass, stop, raise or call."""

import warnings

import pytest
import torch

from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.errors import ConceptRaised, ConfigError, UnsupportedDecoding

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
GREEDY = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
UNSEEN = (7, 8)  # the columns in whose forwards our hook at a layer is away


@pytest.fixture
def model():
    model = make_model()
    hooks, saved = model.model.layers[1]._forward_hooks, {}

    def before(module, args, kwargs):
        column = int(kwargs["position_ids"][0, -1])
        if column == UNSEEN[0]:
            saved.update(hooks)
            hooks.clear()
        elif column == UNSEEN[-1] + 1:
            hooks.update(saved)

    model.model.register_forward_pre_hook(before, with_kwargs=True)
    return model


@pytest.fixture
def manager(model, tmp_path):
    return DynamicProbeManager(make_pack(tmp_path / "pack", model))


def test_unseen_token_stops_its_sequence(manager, model):
    with manager.attach(model, on_gap="report") as run:
        run.on(["c9", "c10"], above=0.9999999, on_blind="stop")
        out = model.generate(PROMPT, **GREEDY)
    assert out.shape[1] - 1 == UNSEEN[0] + 1  # the token sampled meanwhile is still in it


def test_unseen_token_raises_with_the_reason(manager, model):
    with manager.attach(model, on_gap="report") as run:
        run.on("c9", above=0.9999999, on_blind="raise")
        with pytest.raises(ConceptRaised, match=r"is not known at row 0, column 7: the host did not run") as raised:
            model.generate(PROMPT, **GREEDY)
    assert raised.value.event.blind and raised.value.event.column == UNSEEN[0]


def test_unseen_token_calls_the_callback_and_keeps_the_streak(manager, model):
    blind, met = [], []
    with manager.attach(model, on_gap="report") as run:
        run.on("c9", above=0.0, for_tokens=4, action=met.append, on_blind=blind.append)
        out = model.generate(PROMPT, **GREEDY)[0]
    assert [event.column for event in blind] == list(UNSEEN) and not any(event.blind for event in met)
    assert [event.token_id for event in blind] == out[list(UNSEEN)].tolist()
    assert [event.column for event in met] == [10]  # 5, 6, 9, 10


def test_only_rules_that_pass_are_warned_about(manager, model):
    with warnings.catch_warnings(record=True) as caught, manager.attach(model, on_gap="report") as run:
        warnings.simplefilter("always")
        run.on("c9", above=0.9999999)
        run.on("c10", above=0.9999999, on_blind=lambda event: None)
        model.generate(PROMPT, **GREEDY)
        run.__exit__(None, None, None)
    assert "so 1 rule could not be asked of them" in " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize(("at_first", "then"), [("pass", "stop"), ("record", "pass")])
def test_rules_that_passed_unseen_tokens_are_warned_about_after_an_update(manager, model, at_first, then):
    with warnings.catch_warnings(record=True) as caught, manager.attach(model, on_gap="report") as run:
        warnings.simplefilter("always")
        run.update(rules=[{"concept": "c9", "above": 0.9999999, "on_blind": at_first}])
        model.generate(PROMPT, **GREEDY)
        run.update(rules=[{"concept": "c9", "above": 0.9999999, "on_blind": then}])
        run.__exit__(None, None, None)
    told = " ".join(str(one.message) for one in caught)
    assert ("so 1 rule could not be asked of them" in told) == (at_first == "pass")


def test_invalid_on_blind_is_refused(manager, model):
    with manager.attach(model, on_gap="report") as run:
        with pytest.raises(ConfigError, match="on_blind is 'halt'"):
            run.on("c9", above=0.5, on_blind="halt")
        run.on("c9", above=0.9999999, action=lambda event: None, on_blind="stop")
        with pytest.raises(UnsupportedDecoding, match="cannot end one beam"):
            model.generate(PROMPT, num_beams=2, **GREEDY)
    assert torch.equal(model.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))

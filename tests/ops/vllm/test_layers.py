"""Hidden states of layers inside an engine: which tensor belongs to which layer, and wrong ones are detected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import grouped_packs
from conftest import make_model
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError, Blind, ConfigError, UnsupportedModel
from probemon.ops.vllm.engine_canary import (
    canary_prompts,
    canary_way,
    judge,
    judge_alone,
    judge_scores,
    reference_states,
)
from probemon.ops.vllm.layer_states import AUXILIARY, HOOKS, LayerStates

SITES = ("resid_post.2", "resid_post.0")  # not ascending: the order is the packs'


class Adds(nn.Module):
    """A layer as vLLM has them: it hands on what it adds, and the stream without that."""

    def __init__(self, i):
        super().__init__()
        self.i = i

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return torch.full_like(residual, 10.0**self.i), residual


class Engine(nn.Module):
    """A model of vLLM's kind, with auxiliary states where they are asked for."""

    def __init__(self, n=3):
        super().__init__()
        self.layers, self.asked = nn.ModuleList(Adds(i) for i in range(n)), ()

    def set_aux_hidden_state_layers(self, layers):
        self.asked = layers

    def forward(self, hidden):
        residual, taken = None, []
        for i, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual)
            if i + 1 in self.asked:
                taken.append(hidden + residual)
        return taken


def runner_of(model, n=3):
    config = SimpleNamespace(get_total_num_hidden_layers=lambda: n)
    return SimpleNamespace(get_model=lambda: model, model_config=config, use_aux_hidden_state_outputs=False)


@pytest.mark.parametrize("auxiliary", [True, False])
def test_each_site_has_the_residual_stream_after_its_layer(auxiliary):
    model = Engine()
    runner = runner_of(model)
    states = LayerStates.put_on(runner, SITES, eager=not auxiliary, auxiliary=lambda _: auxiliary)
    assert states.way == (AUXILIARY if auxiliary else HOOKS)
    for start in (0.5, 0.25):  # a second step has its own
        taken = model(torch.full((4, 2), start))
        found = states.of_step(SimpleNamespace(aux_hidden_states=taken if auxiliary else None))
        assert {site: tensor.unique().tolist() for site, tensor in found.items()} == {
            "resid_post.2": [111 + start],
            "resid_post.0": [1 + start],
        }
    assert runner.use_aux_hidden_state_outputs == auxiliary


def test_hooks_are_refused_if_the_model_is_compiled():
    with pytest.raises(UnsupportedModel, match="Engine has no auxiliary hidden states"):
        LayerStates.put_on(runner_of(Engine()), SITES, eager=False, auxiliary=lambda _: False)


def test_missing_layer_is_refused():
    with pytest.raises(UnsupportedModel, match=r"read resid_post.3, Engine has layers 0\.\.2"):
        LayerStates.put_on(runner_of(Engine()), ("resid_post.3",), eager=True, auxiliary=lambda _: True)


@pytest.mark.parametrize("taken", [None, [], [torch.zeros(1, 1)]])
def test_step_with_fewer_states_than_layers_is_an_error(taken):
    states = LayerStates.put_on(runner_of(Engine()), SITES, eager=True, auxiliary=lambda _: True)
    with pytest.raises(AlignmentError, match="2 layers were asked for"):
        states.of_step(SimpleNamespace(aux_hidden_states=taken))


def test_step_that_ran_no_hook_is_an_error():
    states = LayerStates.put_on(runner_of(Engine()), SITES, eager=True, auxiliary=lambda _: False)
    with pytest.raises(AlignmentError, match="without reaching"):
        states.of_step(None)


# -- the canary ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    model = make_model()
    prompts = list(canary_prompts(model.config.vocab_size).values())
    return reference_states(model, prompts), model, prompts


def test_reference_equals_transformers_hidden_states_of_each_layer(reference):
    states, model, prompts = reference
    with torch.no_grad():
        of_each = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in prompts]
    assert len(states) == model.config.num_hidden_layers
    for layer in range(len(states) - 1):  # the last entry of transformers' is normalised
        assert torch.equal(states[layer], torch.cat([hidden[layer + 1][0].float() for hidden in of_each]))


def test_states_of_the_right_layer_pass(reference):
    states, *_ = reference
    figures = judge({"resid_post.1": states[1] * (1 + 1e-5), "resid_post.0": states[0]}, states, 1e-3)
    assert figures["resid_post.1"]["nearest_layer"] == 1
    assert figures["resid_post.1"]["relative_l2"] == pytest.approx(1e-5, rel=0.01)


def test_states_of_another_layer_are_detected(reference):
    states, *_ = reference
    with pytest.raises(Blind, match=r"for resid_post.1 are those of layer 0"):
        judge({"resid_post.1": states[0]}, states, None)


def test_states_of_other_weights_are_detected(reference):
    states, *_ = reference
    with pytest.raises(Blind, match="apart from those of transformers"):
        judge({"resid_post.1": states[1] * 1.01}, states, 1e-3)


def test_scores_of_other_rows_are_detected_where_a_version_is_untried(reference, tmp_path):
    states, *_ = reference
    grouped_packs.write(tmp_path / "pack", (), torch.float32, sites=("resid_post.1",))
    manager = DynamicProbeManager(str(tmp_path / "pack"))
    figures = judge_scores(manager, {"resid_post.1": states[1] * (1 + 1e-6)}, states)
    assert figures["score_difference_max"] < 1e-3
    with pytest.raises(Blind, match="this version of vLLM is not read right"):
        judge_scores(manager, {"resid_post.1": states[1].roll(1, 0)}, states)


@pytest.mark.parametrize("spoil", ["nan", "same", "twice"])
def test_nan_constant_or_repeated_states_are_detected_without_a_reference(reference, spoil):
    states, *_ = reference
    taken = {"resid_post.0": states[0].clone(), "resid_post.1": states[1].clone()}
    if spoil == "nan":
        taken["resid_post.0"][3, 1] = float("nan")
    elif spoil == "same":
        taken["resid_post.0"][:] = taken["resid_post.0"][0]
    else:
        taken["resid_post.1"] = taken["resid_post.0"]
    with pytest.raises(Blind):
        judge_alone(taken)
    judge_alone({"resid_post.0": states[0], "resid_post.1": states[1]})


def test_weights_are_compared_if_a_copy_fits_and_auto_gives_way():
    fits, too_large = (7, 10), (9, 10)  # bytes of weights, and free
    assert canary_way("auto", *fits, None) == canary_way("weights", *fits, None) == ("weights", "")
    assert canary_way("weights", *fits, "gptq") == ("weights", "")
    way, why = canary_way("auto", *fits, "fp8")
    assert way == "layers" and "quantised (fp8)" in why
    way, why = canary_way("auto", *too_large, None)
    assert way == "layers" and "transformers' copy of the weights takes" in why
    with pytest.raises(ConfigError, match="compare the layers alone"):
        canary_way("weights", *too_large, None)
    for asked in ("layers", "off"):
        assert canary_way(asked, *too_large, "fp8") == (asked, "")

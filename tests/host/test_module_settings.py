"""Module settings that change hidden states are detected; what forwards or training keep on modules is not."""

import copy

import pytest
import torch
from accelerate import hooks
from torch import nn
from transformers import LlamaForCausalLM

import architectures
from conftest import HIDDEN, PAD, make_model
from probemon.host.changes import ModelMarks
from probemon.host.internals import names_in_methods
from probemon.host.model import find_layers

IDS = torch.tensor([[1, 44, 3, 17, 8, 44, 3, 5, 9, 11, 60, 33]])
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
OF_TORCH = set(vars(nn.Module()))
# Of every kind of norm, position, attention, activation and expert some.
ARCHITECTURES = "falcon gemma3_text gpt2 granite mixtral t5"


def states_of(model):
    seen = []

    def keep(module, args, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in find_layers(model)[1]]
    decoded = {"decoder_input_ids": IDS[:, 2:9]} if model.config.is_encoder_decoder else {}
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False, **decoded)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(seen)


class Scaled(nn.Module):
    """Another module in the place of one, which gives something else."""

    def __init__(self, inner):
        super().__init__()
        object.__setattr__(self, "inner", inner)

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return out * 0.7 if isinstance(out, torch.Tensor) else tuple(part * 0.7 for part in out)


def other_than(value):
    """Another value of its kind; the same where there is none to think of."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value * 0.5 + 0.3
    if callable(value) and not isinstance(value, type | nn.Module):
        return lambda *args, **kwargs: value(*args, **kwargs) * 0.7
    return value


def possible_changes(model):
    """Yield a name, the dictionary and the key of everything that a user may put something else at: of each class, its
    first module. What its forwards assign themselves is left out.
    """
    known = set()
    for module in model.modules():
        kind = type(module)
        kept = [vars(module), module._buffers, module._modules]
        config = vars(module).get("config")
        for held in [*kept, *([] if config is None or id(config) in known else [vars(config)])]:
            known.add(id(config))
            for name, value in list(held.items()):
                of_config = held is not vars(module) and name.startswith("_")  # how it is loaded, and what it returns
                if of_config or (kind, name) in known or name in OF_TORCH or name in names_in_methods(kind).assigned:
                    continue
                if isinstance(value, nn.Module) and next(value.parameters(), None) is None:
                    yield f"{kind.__name__}.{name}", held, name, Scaled(value)
                elif isinstance(value, torch.Tensor) and value.is_floating_point():
                    yield f"{kind.__name__}.{name}", held, name, value * 2 + 1
                elif other_than(value) is not value:
                    yield f"{kind.__name__}.{name}", held, name, other_than(value)
                if held is not vars(module) or not isinstance(value, nn.Module):
                    known.add((kind, name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES.split())
def test_every_setting_that_changes_states_is_detected(name):
    known = architectures.architectures()
    if name not in known:
        pytest.skip("this transformers has it not")
    model = architectures.build(name, known[name]).eval()
    before, marks, n = states_of(model), ModelMarks(model), 0
    mark = marks.now()
    for what, held, key, value in possible_changes(model):
        kept = held[key]
        held[key] = value
        try:
            states = states_of(model)
            changes = states.shape != before.shape or not torch.equal(states, before)
        except Exception:  # it runs no more
            changes = False
        if changes:
            assert marks.now().differs(mark) and marks.now().changes(mark), what
        held[key] = kept
        if changes:
            assert not marks.now().differs(mark), what
        n += changes
    model.train()
    assert torch.equal(states_of(model), before) or marks.now().differs(mark)
    assert n > 2


def run_in_all_ways(model):
    decoded = {"decoder_input_ids": IDS[:, 2:9]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        model.generate(IDS, **GREEDY)
        model.generate(IDS.repeat(2, 3), **GREEDY)
        model(input_ids=IDS, **decoded)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * (HIDDEN // 4),
        "long_factor": [4.0] * (HIDDEN // 4),
        "original_max_position_embeddings": 16,
        "factor": 2.0,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_recomputed_rope_frequencies_are_no_change(rope):
    config = copy.deepcopy(make_model().config)
    config.max_position_embeddings, config.rope_parameters = 16, {"rope_theta": 1e4, **ROPES[rope]}
    model = LlamaForCausalLM(config).eval()
    marks = ModelMarks(model)
    mark, frequencies = marks.now(), model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(IDS.repeat(1, 3))
    assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies), "they were not made anew"
    run_in_all_ways(model)
    assert marks.now().changes(mark) == []
    with torch.no_grad():
        model.model.rotary_emb.original_inv_freq.mul_(2)
    assert marks.now().changes(mark) == ["model.rotary_emb.original_inv_freq was written to"]


def test_training_and_saving_a_model_without_dropout_is_no_change(tmp_path):
    model = make_model()
    marks = ModelMarks(model)
    mark = marks.now()
    model.train()
    enable = "activation_checkpointing_enable" if hasattr(model, "activation_checkpointing_enable") else None
    getattr(model, enable or "gradient_checkpointing_enable")()
    model.enable_input_require_grads()
    model(input_ids=IDS, labels=IDS).loss.backward()
    model.config.use_cache, model.config.pad_token_id = False, 3
    model.generation_config.max_new_tokens = 3
    model.requires_grad_(False)
    model.save_pretrained(tmp_path)
    model.note = "of a user"
    model.eval()
    assert marks.now().changes(mark) == []


def wrap_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")


HELPERS = {
    "compile": lambda model: model.compile(backend="eager"),
    "compiled layers": wrap_layers,
    "compiled forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "accelerate's hook": lambda model: hooks.add_hook_to_module(model.model, hooks.ModelHook()),
    "static cache": lambda model: model.generate(IDS, cache_implementation="static", **GREEDY),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("helper", HELPERS)
def test_running_a_model_in_another_way_is_no_change(helper):
    model = make_model()
    marks = ModelMarks(model)
    mark = marks.now()
    HELPERS[helper](model)
    with torch.no_grad():
        model(IDS)
    assert marks.now().changes(mark) == []


class Remote(nn.Module):
    """As code on a hub may be: it counts and keeps in containers, and reads what nobody may have set."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scales = inner, [1.0, 1.0]
        self.stats, self.hist, self.cache = {"n": 0}, [], {}
        self.n_calls = 0

    def forward(self, x):
        self.stats["n"] += 1
        self.hist.append(x.shape[1])
        self.cache.setdefault(x.shape[1], torch.ones(x.shape[1]))
        count(self)
        return self.scaled(x)

    def scaled(self, x):
        return self.inner(x) * self.scales[0] * getattr(self, "gain", 1.0) * getattr(self, f"{self.kind}_gain", 1.0)

    @property
    def kind(self):
        return "first" if not hasattr(self, "other_kind") else self.other_kind


def count(module):
    module.n_calls += 1


def remote_model():
    model = make_model()
    model.model.layers[0].mlp = Remote(model.model.layers[0].mlp)
    return model


def capture_as_attribute(model):
    model.model.layers[0].register_forward_hook(lambda module, args, out: setattr(module, "activation", out))


def capture_in_a_list(model):
    model.model.layers[0].mlp.acts = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: module.acts.append(out.detach()))


def count_operations(model):
    def add(module, args, out):
        module.total_ops += 1

    for module in model.modules():
        module.register_buffer("total_ops", torch.zeros(1, dtype=torch.float64))
        module.register_buffer("total_params", torch.zeros(1), persistent=False)
        if not module._modules:
            module.register_forward_hook(add)


COUNTING = [lambda model: None, capture_as_attribute, capture_in_a_list, count_operations]


@pytest.mark.parametrize("put", COUNTING, ids=["nothing", "attribute", "list", "buffers"])
def test_counters_of_forwards_and_hooks_are_no_change(put):
    model = remote_model()
    put(model)
    marks = ModelMarks(model)
    mark = marks.now()
    run_in_all_ways(model)
    assert model.model.layers[0].mlp.hist and marks.now().changes(mark) == [] and not marks.now().differs(mark)
    model.model.layers[0].mlp.scales[0] = 2.0  # a container that no forward changes
    assert marks.now().changes(mark) == ["model.layers.0.mlp.scales was (1.0, 1.0), is (2.0, 1.0)"]
    model.model.layers[0].mlp.scales[0], model.model.layers[0].mlp.hist = 1.0, []
    assert marks.now().changes(mark) == ["model.layers.0.mlp.hist was replaced"]


ABSENT_BEFORE = {
    "config.is_causal was absent, is False": lambda model: setattr(model.config, "is_causal", False),
    "model.layers.0.mlp.gain was absent, is 3.0": lambda model: setattr(model.model.layers[0].mlp, "gain", 3.0),
    "model.layers.0.mlp.first_gain was absent, is 3.0": lambda model: setattr(
        model.model.layers[0].mlp, "first_gain", 3.0
    ),
    "model.layers.0.mlp.other_kind was absent, is 'x'": lambda model: setattr(
        model.model.layers[0].mlp, "other_kind", "x"
    ),
}


@pytest.mark.parametrize("said", ABSENT_BEFORE)
def test_newly_added_settings_are_detected(said):
    model = remote_model()
    marks = ModelMarks(model)
    mark = marks.now()
    ABSENT_BEFORE[said](model)
    assert marks.now().changes(mark) == [said] and mark.changes(marks.now()) != []


def test_changed_class_of_a_module_is_detected():
    class Sub(Remote):
        def forward(self, x):
            return x

    model = remote_model()
    marks = ModelMarks(model)
    mark, part = marks.now(), model.model.layers[0].mlp
    part.__class__ = Sub
    assert marks.now().changes(mark)[0].endswith("mlp was Remote, is " + Sub.__qualname__)
    part.__class__ = Remote
    assert marks.now().changes(mark) == []
    Remote.__call__ = lambda self, x: x
    try:
        [said] = marks.now().changes(mark)
    finally:
        del Remote.__call__
    assert "Remote.__call__ was Module._wrapped_call_impl, is " in said and marks.now().changes(mark) == []


def test_all_attributes_count_if_a_module_has_its_own_forward():
    """Its code is none of the class's."""
    model = remote_model()
    part = model.model.layers[0].mlp
    part.strength = 1.0
    marks = ModelMarks(model)
    mark = marks.now()
    part.strength = 2.0
    assert marks.now().changes(mark) == []
    part.strength, part.forward = 1.0, lambda x: x * part.strength
    mark = marks.now()
    part.strength = 2.0
    assert marks.now().changes(mark) == ["model.layers.0.mlp.strength was 1.0, is 2.0"]

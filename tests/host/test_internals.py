"""Each undocumented library feature that probemon.host.internals uses exists; a failure names what was dropped."""

import copy
import inspect
import weakref
from argparse import Namespace
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from conftest import HIDDEN, LAYERS, OLDEST, PAD, make_model
from probemon.host import internals
from probemon.util.shadow import shadow

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
PROMPT = torch.tensor([[1, 44, 3, 17, 8]])
PADDED = torch.tensor([[PAD, 1, 5, 9, 13]])
SHORT = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
newer = pytest.mark.skipif(OLDEST, reason="continuous batching of transformers 5.0 is refused by name")


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def owner():
    return Namespace(open=True)


# -- torch ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_wrapper_is_removed(model):
    assert internals.uncompiled(torch.compile(model)) is internals.uncompiled(model) is model, (
        "torch.compile's wrapper: no _orig_mod"
    )


def test_registered_hook_is_found_with_the_hooks_after_it():
    layer, run = nn.Linear(2, 2), []
    handles = [layer.register_forward_hook(lambda *args, n=n: run.append(n)) for n in range(3)]
    before = layer.register_forward_pre_hook(run.append)
    first = layer.register_forward_hook(lambda *args: run.append("first"), prepend=True)
    assert internals.hook_of(layer, before) == run.append
    for hook in internals.hooks_after(layer, handles[0]):
        hook()
    assert run == [1, 2] and len(internals.hooks_after(layer, first)) == 3
    handles[0].remove()
    assert internals.hook_of(layer, handles[0]) is None and internals.hooks_after(layer, handles[0]) == []


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.n_calls = 2.0, 0
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("kept", torch.ones(2))

    def forward(self, x):
        def grow():
            self.register_buffer("table", torch.ones(len(x)), persistent=False)

        self.n_calls += 1
        grow()
        return x * self.scale


class Keeps(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.kept


def test_attributes_assigned_in_methods_are_found_in_their_code():
    names = internals.names_in_methods(Counts)
    assert {"n_calls", "table"} <= names.assigned and not {"scale", "kept"} & names.assigned
    assert names.mention("scale") and not names.mention("activation")
    assert internals.own_attributes(Counts()) == ["scale", "n_calls"]
    assert internals.temporary_buffers(Counts()) == ["table"]
    assert internals.keeps_statistics(nn.BatchNorm1d(2)) and not internals.keeps_statistics(nn.LayerNorm(2))


def test_rope_kinds_that_recompute_frequencies_are_recognised():
    rope = nn.Module()
    assert internals.remade_frequencies(rope) == []
    for kind, names in {
        "default": [],
        "dynamic": ["inv_freq"],
        "longrope": ["inv_freq"],
    }.items():
        rope.rope_type = kind
        assert internals.remade_frequencies(rope) == names
    rope.rope_type = {"sliding_attention": "default", "full_attention": "dynamic"}
    assert internals.remade_frequencies(rope) == ["full_attention_inv_freq"]


@pytest.mark.parametrize("name", ["_call_impl", "forward", internals.COMPILED_CALL])
def test_replaced_call_methods_are_seen_under_our_patches(name, stack, owner):
    layer = nn.Linear(2, 2)
    before = internals.own_methods(layer)
    setattr(layer, name, lambda *args: torch.zeros(1))
    changed = internals.own_methods(layer)
    assert {key for key in before if before[key] is not changed[key]} == {name}
    assert torch.equal(layer(torch.ones(1, 2)), torch.zeros(1)), "a call does not go through it"
    shadow(stack, owner, layer, name, lambda original, *args: original(*args))
    assert internals.own_methods(layer) == changed
    if name != "_call_impl":
        layer.compile(backend="eager")
        assert internals.own_methods(layer)[internals.COMPILED_CALL] is not changed[internals.COMPILED_CALL]


@pytest.mark.parametrize("name", [internals.COMPILED_CALL, "forward"])
def test_compiled_modules_are_recognised(name):
    layer = nn.Linear(2, 2)
    assert internals.compiled_attributes(layer) == []
    if name == "forward":
        layer.forward = torch.compile(layer.forward, backend="eager")
    else:
        layer.compile(backend="eager")
    assert internals.compiled_attributes(layer) == [name], f"torch: no {name} with _torchdynamo_orig_callable"


@pytest.mark.filterwarnings("ignore")
def test_graphs_compiled_without_hooks_are_discarded():
    layer, seen = nn.Linear(2, 2), []
    layer.compile(backend="eager")
    try:
        torch._dynamo.config.skip_nnmodule_hook_guards = True
        layer(torch.ones(1, 2))
        internals.forget_hook_free_graphs()
        assert not torch._dynamo.config.skip_nnmodule_hook_guards, "dynamo: no skip_nnmodule_hook_guards that is kept"
        layer.register_forward_hook(lambda *_: seen.append(1))
        layer(torch.ones(1, 2))
    finally:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()
    assert seen == [1], "dynamo: a graph from before a hook runs again after a reset"


def test_static_address_is_marked():
    tensor = torch.zeros(2)
    internals.keep_address(tensor)
    assert getattr(tensor, "_dynamo_static_input_type", None), "dynamo: mark_static_address marks nothing"


def test_backward_pass_is_recognised():
    passes = []

    def part(x):
        passes.append(internals.in_backward())
        return x * x

    checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert passes == [False, True], "autograd: _current_graph_task_id does not tell a backward pass"


def test_dropout_modules_are_recognised():
    for dropout in (nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()):
        assert internals.is_dropout(dropout), f"torch: {type(dropout).__name__} is no _DropoutNd"
    assert not internals.is_dropout(nn.LPPool1d(2.0, 3))


def test_child_is_the_modules_own(lora):
    wrapped = lora.get_base_model().model.layers[0].self_attn.q_proj
    assert internals.child(wrapped, "base_layer") is wrapped.base_layer, "torch: modules are not in _modules"
    assert internals.child(wrapped, "weight") is None
    assert internals.child(wrapped.base_layer, "base_layer") is None


def test_named_weights_equal_named_parameters(model):
    weights = internals.named_weights(model)
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys(), "torch: parameters are not in _parameters and _modules"
    assert all(weights[name] is expected[name] for name in weights)


def test_all_modules_equal_modules(lora):
    assert internals.all_modules(lora) == list(lora.modules()), "torch: modules are not in _modules, in their order"


def test_adapter_switches_show_which_are_on(lora):
    tuners = [module for module in lora.modules() if "lora_A" in module._modules]
    on = internals.adapter_switches(tuners)
    assert tuners and all(map(internals.switches_adapters, tuners)), "PEFT: no _disable_adapters"
    with lora.disable_adapter():
        assert internals.adapter_switches(tuners) != on, "PEFT: _disable_adapters is not what a layer has off"
    assert internals.adapter_switches(tuners) == on


def test_adaption_prompt_is_recognised_by_its_class():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        make_model(), peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    )
    found = [type(m) for m in adapted.modules() if internals.is_adaption_prompt_class(type(m))]
    assert len(found) == 1, "PEFT: its class has another name"


def test_stored_tensors_show_a_replaced_one():
    layer, table = nn.Linear(2, 2, bias=False), nn.Module()
    table.register_buffer("values", torch.ones(2))
    stored = internals.stored_tensors(layer)
    layer.weight = nn.Parameter(torch.ones(2, 2))
    assert stored["weight"] is layer.weight, "torch: _parameters is no live dict"
    assert internals.stored_tensors(table)["values"] is table.values, "torch: no _buffers"


def test_members_compare_equal_until_one_is_replaced():
    changes = {
        "a child": lambda host: setattr(host, "0", nn.Linear(2, 2)),
        "a child that is gone": lambda host: host.pop(1),
        "one more, in a leaf": lambda host: host[0].add_module("more", nn.ReLU()),
        "a parameter": lambda host: setattr(host[0], "weight", nn.Parameter(torch.ones(2, 2))),
        "a parameter that is gone": lambda host: setattr(host[0], "bias", None),
        "a parametrization": lambda host: nn.utils.parametrizations.weight_norm(host[0]),
        "tied weights": lambda host: setattr(host[0], "weight", host[1].weight),
        "modules that change places": lambda host: host._modules.update({"0": host[1], "1": host[0]}),
        "a buffer": lambda host: setattr(host[0], "kept", torch.zeros(2)),
        "a buffer that is gone": lambda host: delattr(host[0], "kept"),
    }
    for what, change in changes.items():
        host, beside = nn.Sequential(Keeps(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
        host[0].register_buffer("kept", torch.ones(2))
        host[0].register_buffer("n_calls", torch.ones(2))  # of somebody who counts
        host[0].register_buffer("made_anew", torch.ones(2), persistent=False)
        members = internals.Members([host, beside])
        assert members.modules == [*host.modules(), beside]
        assert len(members.weights) == 7 and members.weights[-1] is host[0].kept
        host[0].made_anew = torch.zeros(2)
        assert members.same([host, beside]) and not members.same([host]) and not members.same([beside, host])
        change(host)
        assert not members.same([host, beside]), f"torch: {what} is not seen in _modules, _parameters and _buffers"


def test_write_marks_change_with_every_write():
    layer = nn.Linear(2, 2)
    tensors = [layer.weight, layer.bias]
    before = internals.write_marks(tensors)
    with torch.no_grad():
        layer.weight.add_(1)
    written = internals.write_marks(tensors)
    assert written[0] != before[0] and written[1] == before[1], "torch: _version does not count writes in place"


def test_forward_hooks_are_recognised():
    layer = nn.Linear(2, 2)
    assert not internals.has_forward_hooks(layer)
    handle = layer.register_forward_hook(lambda *_: None)
    assert internals.has_forward_hooks(layer), "torch: forward hooks are not in _forward_hooks"
    handle.remove()
    assert not internals.has_forward_hooks(layer)


def test_wrapping_tensors_are_recognised():
    two = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert internals.is_wrapping_tensor(two), "torch: tensors around others have no __tensor_flatten__"
    assert not internals.is_wrapping_tensor(torch.ones(2))


def test_operators_are_intercepted():
    def run(operator, args, kwargs):
        return operator(*args, **kwargs) + 1 if operator is torch.ops.aten.mul.Tensor else operator(*args, **kwargs)

    with internals.intercept_operators(run):
        assert (torch.ones(1) * torch.ones(1)).tolist() == [2.0], "torch: TorchDispatchMode does not see operators"
    assert (torch.ones(1) * torch.ones(1)).tolist() == [1.0]


@pytest.mark.parametrize("name", ["randn.default", "randint.low", "bernoulli.default", "normal_.default"])
def test_random_operators_take_a_generator(name):
    packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    variant = internals.with_generator(operator)
    arguments = [argument.name for argument in variant._schema.arguments]
    assert "generator" in arguments, f"torch: no overload of {name} with a generator by _overloadname and _schema"
    assert internals.with_generator(torch.ops.aten.mul.Tensor) is None


# -- transformers: models and generate() ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_graph_compiled_by_generate_is_discarded():
    model, made = make_model(), []
    calls = model.get_compiled_call
    model.get_compiled_call = lambda config: made.append(calls(config)) or made[-1]
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", fullgraph=False)
    config._compile_all_devices = True
    model.generate(PROMPT, **SHORT, cache_implementation="static", compile_config=config)
    torch.compiler.reset()
    assert made, "transformers: generate() compiles by another method than get_compiled_call"
    assert internals.forget_generates_graph(model), "transformers: what generate() compiled is not in _compiled_call"
    assert not internals.forget_generates_graph(model)


def test_attention_implementation_has_a_name():
    model = make_model()
    model.set_attn_implementation("eager")
    assert internals.attention_kind(model.config) == "eager", "transformers: no _attn_implementation"
    model.set_attn_implementation("sdpa")
    assert internals.attention_kind(model.config) == "sdpa"


def test_stateful_models_are_recognised(model):
    assert internals.is_stateful(MambaForCausalLM), "transformers: no _is_stateful"
    assert not internals.is_stateful(model)


def test_tensor_parallel_size_defaults_to_one(model):
    assert hasattr(type(model), "tp_size"), "transformers: models have no tp_size"
    assert internals.tensor_parallel_size(model) == 1
    assert internals.tensor_parallel_size(SimpleNamespace(tp_size=2)) == 2


def test_checkpoint_function_of_a_layer_is_the_one_it_calls():
    model, ran = make_model(), []
    layer = model.model.layers[1]
    assert internals.checkpoint_function(layer) is None
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    function = internals.checkpoint_function(layer)
    internals.set_checkpoint_function(layer, lambda what, *args: ran.append(what) or function(what, *args))
    model.train()(PROMPT, use_cache=False)
    assert len(ran) == 1


def test_generation_config_has_the_calls_options(model):
    config = internals.generation_config(model, GenerationConfig(num_beams=2), {"max_new_tokens": 7})
    assert (config.num_beams, config.max_new_tokens) == (2, 7), "transformers: _prepare_generation_config"
    assert config.pad_token_id == model.generation_config.pad_token_id


def test_prepared_inputs_show_ids_and_mask(stack, owner):
    model, seen = make_model(), []

    def around(original, *args, **kwargs):
        seen.append((args[0] if args else kwargs["input_ids"], kwargs["attention_mask"]))
        return original(*args, **kwargs)

    internals.patch_prepared_inputs(stack, owner, model, around)
    model.generate(PADDED, attention_mask=(PADDED != PAD).long(), **SHORT)
    shapes = [(tuple(ids.shape), tuple(mask.shape)) for ids, mask in seen]
    assert shapes == [((1, n), (1, n)) for n in (5, 6, 7)], "transformers: generate() calls it otherwise"


def test_stopping_criteria_are_called_at_every_token(stack, owner):
    model, widths = make_model(), []

    def around(original, *args, **kwargs):
        criteria = original(*args, **kwargs)
        criteria.append(lambda ids, scores, **_: widths.append(ids.shape[1]) or torch.zeros(len(ids), dtype=torch.bool))
        return criteria

    internals.patch_stopping_criteria(stack, owner, model, around)
    model.generate(PROMPT, **SHORT)
    assert widths == [6, 7, 8], "transformers: generate() does not ask what _get_stopping_criteria gives"


def test_expanded_inputs_show_the_prompt(stack, owner):
    model, seen = make_model(), []

    def around(original, *args, **kwargs):
        ids, given = original(*args, **kwargs)
        seen.append((tuple(ids.shape), given["attention_mask"].shape[0]))
        return ids, given

    internals.patch_expanded_inputs(stack, owner, model, around)
    model.generate(PADDED, attention_mask=(PADDED != PAD).long(), num_beams=3, **SHORT)
    assert seen == [((3, 5), 3)], "transformers: _expand_inputs_for_generation is called otherwise"


@pytest.mark.filterwarnings("ignore")
def test_patched_compiled_call_is_what_generate_runs(stack, owner):
    from transformers import CompileConfig

    model, ran = make_model(), []

    def around(original, *args, **kwargs):
        return lambda *args, **kwargs: ran.append(kwargs["input_ids"].shape[1]) or model(*args, **kwargs)

    internals.patch_compiled_call(stack, owner, model, around)
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True
    model.generate(PROMPT, **SHORT, cache_implementation="static", compile_config=config)
    assert set(ran) >= {1}, "transformers: generate() does not run what get_compiled_call gives"


def test_running_generate_is_found_on_the_stack():
    model, seen = make_model(), []
    model.model.register_forward_pre_hook(
        lambda *_: seen.append([owner is model for _, owner in internals.generates_of_thread()])
    )
    model.generate(PROMPT, **SHORT)
    model(PROMPT)
    assert seen == [[True]] * 3 + [[]], "transformers: generate() is no frame of that name with a `self`"


def test_drafting_is_recognised_on_the_stack():
    model, seen = make_model(), []
    model.model.register_forward_pre_hook(lambda *_: seen.append(internals.proposes_tokens()))
    model.generate(PROMPT, **SHORT)
    assert set(seen) == {False}
    seen.clear()
    criterion = lambda ids, scores, **_: seen.append(("criterion", internals.proposes_tokens())) or False  # noqa: E731
    draft = make_model()
    draft.register_forward_pre_hook(lambda *_: seen.append(("draft", internals.proposes_tokens())))
    generate, draft.generate = (
        draft.generate,
        lambda *args, **kwargs: seen.append(("asked", internals.proposes_tokens())) or generate(*args, **kwargs),
    )
    model.generate(PROMPT, **SHORT, assistant_model=draft, stopping_criteria=[criterion])
    assert ("asked", True) in seen and ("asked", False) not in seen, "transformers: no `get_candidates` asks for drafts"
    assert ("criterion", True) not in seen and ("draft", True) not in seen  # these are in a generate() of their own


# -- transformers: caches ------------------------------------------------------------------------


def test_decoder_cache_is_found_in_an_encoder_decoder_cache():
    own = DynamicCache()
    assert internals.decoder_cache(EncoderDecoderCache(own, DynamicCache())) is own, "no self_attention_cache"
    assert internals.decoder_cache(own) is own


@pytest.fixture
def cache(model):
    with torch.no_grad():
        return internals.cache_among(model(PROMPT, use_cache=True))


@pytest.mark.parametrize("name", internals.CACHE_NAMES)
def test_cache_is_found_by_the_name_of_each_version(model, cache, name):
    assert internals.cache_among({"input_ids": PROMPT, "cache": None, name: cache}) is cache
    assert internals.CACHE_NAME in inspect.signature(model.model.forward).parameters, "transformers: another name"
    assert isinstance(cache, DynamicCache), "transformers: outputs hold their cache by another name"
    with torch.no_grad():
        assert internals.cache_among(model(PROMPT, use_cache=False)) is None


def test_caches_of_recurrent_layers_count_no_columns(cache):
    both = EncoderDecoderCache(cache, DynamicCache())
    assert all(map(internals.counts_columns, (cache, both, DynamicCache()))) and not internals.counts_columns(None)
    assert internals.recurrent_state_among({internals.CACHE_NAME: cache}) is None
    config = MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=2)
    with torch.no_grad():
        out = MambaForCausalLM(config).eval()(PROMPT, use_cache=True)
    state = internals.recurrent_state_among(out)
    assert state is not None and state is internals.cache_among(out), "transformers: its state counts its tokens"


def test_caches_have_layers(cache):
    assert len(internals.cache_layers(cache)) == LAYERS, "transformers: caches have no list `layers`"
    assert internals.cache_layers(object()) == []


def test_cache_layers_have_keys_and_values(cache):
    kept = internals.keys_and_values(internals.cache_layers(cache)[-1])
    assert kept is not None, "transformers: layers of a cache have no keys and values [B, H, columns, D]"
    assert [x.shape[2] for x in kept] == [5, 5] and not torch.equal(*kept)
    assert internals.keys_and_values(internals.cache_layers(DynamicCache())) is None


def test_sliding_cache_layers_are_recognised(cache):
    assert internals.keeps_every_column(internals.cache_layers(cache)[0])
    windows = DynamicCache(config=MistralConfig(sliding_window=4, num_hidden_layers=1))
    assert not internals.keeps_every_column(internals.cache_layers(windows)[0]), "transformers: no is_sliding"


def test_tensors_of_a_cache_layer_are_found(cache):
    layer = internals.cache_layers(cache)[0]
    tensors = {id(tensor) for tensor in internals.tensors_of(layer)}
    assert {id(layer.keys), id(layer.values)} <= tensors, "transformers: a layer's tensors are not its attributes"
    assert not any(map(internals.tensors_of, internals.cache_layers(DynamicCache())))
    if not OLDEST:
        config = MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=2)
        state = internals.cache_among(MambaForCausalLM(config).eval()(PROMPT, use_cache=True))
        assert internals.tensors_of(internals.cache_layers(state)[0]), "transformers: recurrent layers show no tensors"


# -- transformers: continuous batching -----------------------------------------------------------


@pytest.fixture(scope="module")
def batches():
    """One `generate_batch` of two prompts and their copies: its manager, and what it was at each packed forward."""
    from transformers import ContinuousBatchingConfig

    model, seen = make_model(), SimpleNamespace(batches=[], outputs=[], manager=None)
    opened = model.init_continuous_batching

    def init(*args, **kwargs):
        manager = seen.manager = opened(*args, **kwargs)
        seen.followed = internals.can_follow_batches(manager), internals.compiles_batches(manager)
        seen.cache = internals.batch_cache(manager)
        deliver = lambda original, outputs: seen.outputs.extend(outputs) or original(outputs)  # noqa: E731
        internals.patch_delivery(ExitStack(), Namespace(open=True), manager, deliver)
        return manager

    def packed(module, args, kwargs):
        manager = seen.manager
        batch = internals.requests_in_batch(manager)
        seen.batches.append(
            SimpleNamespace(
                ids=[request.state.request_id for request in batch],
                tokens=sum(request.query_length for request in batch) == kwargs["cu_seq_lens_q"].tolist()[len(batch)],
                cache=internals.batch_cache(manager) is kwargs["cache"],
                thread=internals.runs_in_this_thread(manager),
                left=[internals.has_left_queues(manager, request.state.request_id) for request in batch],
                gone=internals.has_left_queues(manager, "nobody"),
                shared=[internals.may_share_columns(manager, n) for n in (4, 5)],
                state=weakref.ref(batch[0].state)(),
            )
        )

    model.init_continuous_batching = init
    model.model.register_forward_pre_hook(packed, with_kwargs=True)
    model.generate_batch(
        inputs=[[1, 44, 3, 17, 8], [1, 5]],
        generation_config=GenerationConfig(
            max_new_tokens=4, do_sample=True, pad_token_id=PAD, eos_token_id=60, num_return_sequences=2
        ),
        continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=64),
        progress_bar=False,
    )
    assert seen.batches, "transformers: generate_batch opens no manager by init_continuous_batching"
    seen.asked = [batch for batch in seen.batches if not any(map(internals.is_warm_up, batch.ids))]
    return seen


@newer
def test_batching_managers_can_be_followed(batches):
    assert batches.followed[0], "no continuous_batching_config.cuda_graph_booleans or output_router.deliver_batch"
    assert not internals.can_follow_batches(SimpleNamespace(continuous_batching_config=None))


@newer
def test_compiled_batches_are_recognised(batches):
    assert batches.followed[1] is False
    config = copy.copy(batches.manager.continuous_batching_config)
    config.decode_compile_config = object()
    assert internals.compiles_batches(SimpleNamespace(continuous_batching_config=config))


@newer
def test_finished_outputs_pass_through_deliver_batch(batches):
    ended = [output for output in batches.outputs if output.is_finished()]
    assert len(ended) == 4, "transformers: outputs do not pass deliver_batch"
    assert sorted(len(output.prompt_ids) for output in ended) == [2, 2, 5, 5]


@newer
def test_attention_before_paging_is_kept():
    model = make_model()
    model.set_attn_implementation("eager")
    manager = model.init_continuous_batching(generation_config=GenerationConfig(pad_token_id=PAD, eos_token_id=60))
    assert internals.attention_kind(model.config) == "paged|eager", "transformers: paged attention has another name"
    assert internals.attention_before_batches(manager) == "eager", "transformers: managers keep no _original_attn_impl"


@newer
def test_cache_of_a_batch_is_that_of_its_forward(batches):
    assert batches.cache is None, "transformers: a manager has a batch_processor before it runs"
    assert all(batch.cache for batch in batches.batches), "transformers: no batch_processor.cache that forwards get"


@newer
def test_requests_of_a_batch_are_those_of_its_forward(batches):
    assert all(batch.tokens for batch in batches.batches), "transformers: requests_in_batch is of another forward"
    assert len({name for batch in batches.asked for name in batch.ids}) == 4


@newer
def test_batches_run_in_their_managers_thread(batches):
    assert all(batch.thread for batch in batches.batches), "transformers: managers have no _generation_thread"
    assert not internals.runs_in_this_thread(batches.manager)


@newer
def test_cancelled_requests_are_recognised(batches):
    assert all(batch.gone for batch in batches.batches), "transformers: schedulers have no request_is_cancelled"
    assert not any(left for batch in batches.asked for left in batch.left)


@newer
def test_shared_cache_pages_are_recognised(batches):
    assert batches.asked[0].shared[1] is False
    manager = SimpleNamespace(
        batch_processor=SimpleNamespace(cache=SimpleNamespace(use_prefix_sharing=True)),
        continuous_batching_config=batches.manager.continuous_batching_config,
    )
    assert [internals.may_share_columns(manager, n) for n in (4, 5)] == [True, False], "no page_size"
    assert isinstance(batches.asked[0].shared[0], bool), "transformers: caches have no use_prefix_sharing"


@newer
def test_preempted_requests_know_their_prompt(batches):
    state = batches.asked[0].state
    assert internals.preempted_prompt_length(state) == 0
    again = state.create_equivalent_initial_request()
    assert internals.preempted_prompt_length(again) == len(state.initial_tokens), "no _true_initial_tokens"


@newer
def test_request_can_be_ended_at_its_next_token(batches):
    state = batches.asked[0].state.create_equivalent_initial_request()
    state.status = type(state.status).DECODING
    internals.end_at_next_token(state)
    assert state.update_and_check_completion(5, None), "transformers: requests do not end by _new_tokens_limit"


@newer
def test_forked_requests_name_their_parent(batches):
    names = {name for batch in batches.asked for name in batch.ids}
    parents = [internals.parent_of(name) for name in names]
    assert sorted(parent is None for parent in parents) == [False, False, True, True], "no __child# in forks' ids"
    assert {parent for parent in parents if parent is not None} < names


@newer
def test_warm_up_requests_are_recognised(batches):
    from transformers.generation.continuous_batching import requests

    status = type(batches.asked[0].state.status).PREFILLING
    made = requests.create_warmup_future_states(1, status, 2, 3, MagicMock())
    assert internals.is_warm_up(made[0].state.request_id), "transformers: ids of warm-ups begin with another word"
    assert not any(map(internals.is_warm_up, batches.asked[0].ids))


# -- accelerate and PEFT -------------------------------------------------------------------------


def test_offloaded_modules_are_recognised():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(make_model(), execution_device=torch.device("cpu"))
    assert any(map(internals.has_accelerate_hook, model.modules())), "accelerate: offloaded modules have no _hf_hook"
    assert not any(map(internals.has_accelerate_hook, make_model().modules()))


@pytest.fixture
def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(make_model(), config).eval()


def test_peft_type_is_added_once():
    from peft.utils.peft_types import PeftType

    added = internals.add_peft_type("PROBEMON_TEST")
    assert internals.add_peft_type("PROBEMON_TEST") is added and internals.add_peft_type("LORA") is PeftType.LORA
    assert PeftType("PROBEMON_TEST") is PeftType.PROBEMON_TEST is added in list(PeftType) and added == "PROBEMON_TEST"
    assert copy.deepcopy(added) is added and isinstance(added, PeftType)


def test_tuner_layers_are_recognised(lora):
    wrapped = lora.get_base_model().model.layers[0].self_attn
    assert internals.is_tuner_class(type(wrapped.q_proj)), "PEFT: layers have no active_adapters, disable_adapters"
    assert wrapped.q_proj.active_adapters == ["default"] and wrapped.q_proj.merged_adapters == []
    assert not internals.is_tuner_class(type(wrapped.k_proj))


def test_adapters_by_sequence_are_found(lora):
    layer, seen = lora.get_base_model().model.layers[0].self_attn.q_proj, []
    layer.base_layer.register_forward_hook(lambda *_: seen.append(internals.adapters_by_row(layer)))
    rows = PROMPT.repeat(2, 1)
    lora(rows, adapter_names=["default", "__base__"])
    lora(rows)
    assert seen[0] == ("default", "__base__"), "PEFT: adapter_names come by no partial in _forward_pre_hooks"
    assert seen[-1] == ()


def test_modules_wrapped_by_adapters_are_found(lora):
    host = lora.get_base_model()
    q_proj, head = host.model.layers[0].self_attn.q_proj, host.lm_head
    assert internals.wrapped_by_adapter(q_proj) is q_proj.base_layer, "PEFT: no base_layer, or no adapter_layer_names"
    assert internals.wrapped_by_adapter(head) is head.original_module, "PEFT: no original_module, or no set_adapter"
    assert internals.wrapped_by_adapter(host.model.layers[0]) is None


def test_parameter_names_lose_their_wrappers(lora):
    bare = {name for name, _ in make_model().named_parameters()}
    host = lora.get_base_model()
    host.model.layers[1].mlp = torch.compile(host.model.layers[1].mlp, backend="eager")
    names = {internals.without_wrappers(name) for name, _ in host.named_parameters()}
    assert bare <= names, f"PEFT or torch.compile wrap by other names: {sorted(bare - names)[:3]}"


@pytest.fixture
def xlora(tmp_path):
    peft = pytest.importorskip("peft")
    folders = {}
    for i in range(2):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        peft.get_peft_model(make_model(), config).save_pretrained(tmp_path / str(i))
        folders[str(i)] = str(tmp_path / str(i))
    base = make_model()
    base.config.use_cache = False
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=HIDDEN, xlora_depth=1, adapters=folders)
    return peft.get_peft_model(base, config).eval()


def test_xlora_is_found_from_its_layers(xlora):
    found = {internals.xlora_behind(module) for module in xlora.get_base_model().modules()} - {None}
    assert found == {xlora.base_model}, "PEFT: X-LoRA does not replace its layers' forward, or keeps no .model"


def test_xlora_classifier_returns_scalings(xlora):
    classifier = internals.xlora_classifier(xlora.base_model)
    shapes = []
    classifier.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    with torch.no_grad():
        xlora(PROMPT)
    assert shapes == [(1, 5, int(classifier.n_layers), 2)], "PEFT: scalings are no [B, T, layers, adapters]"
    assert int(classifier.n_classes) == 2


def test_xloras_preliminary_pass_is_recognised(xlora):
    host, passes = xlora.get_base_model(), []
    layer = next(module for module in host.modules() if internals.xlora_behind(module) is not None)
    host.model.register_forward_pre_hook(lambda *_: passes.append(internals.xlora_rehearses(xlora.base_model, layer)))
    with torch.no_grad():
        xlora(PROMPT)
    assert passes == [True, False], "PEFT: X-LoRA runs without adapters first, and says so by disable_adapters"


def test_model_that_masks_padding_itself_is_recognised():
    config = T5GemmaConfig(
        **{part: {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9} for part in ("encoder", "decoder")}
    )
    with torch.device("meta"):
        assert internals.masks_padding(T5GemmaForConditionalGeneration(config))
    assert not internals.masks_padding(make_model())

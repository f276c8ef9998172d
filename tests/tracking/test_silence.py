"""Silence is real: changed prompts, padding read as text, bypassed hooks and unwatched runs are reported."""

import copy
import threading
import types
import warnings
from contextlib import ExitStack, nullcontext

import peft
import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    FNetConfig,
    FNetForMaskedLM,
    GenerationConfig,
    RwkvConfig,
    RwkvForCausalLM,
    StoppingCriteria,
)

from conftest import OLDEST, PAD, make_model, make_pack
from hears import hears
from probemon import DynamicProbeManager
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.ltm import attach_memory
from probemon.errors import AlignmentError, UnsupportedDecoding
from probemon.monitor.sinks import MemorySink

IDS = torch.tensor([[1, 44, 3, 17, 8, 9, 10, 11]])
GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def manager(tmp_path):
    return DynamicProbeManager(make_pack(tmp_path / "pack", make_model()), keep_top_k=0)


def ruled(run, events):
    run.on(0, above=0.0, action=events.append)
    return run


@pytest.mark.parametrize(
    "change", [lambda ids: ids[:, -5:], lambda ids: torch.cat([ids[:, :3], ids], dim=1)], ids=["shorter", "longer"]
)
def test_wrapped_generate_that_changes_the_prompt_is_an_error(manager, change):
    model, events = make_model(), []
    original = model.generate
    model.generate = types.MethodType(lambda self, ids, **settings: original(change(ids), **settings), model)
    with manager.attach(model) as run, pytest.raises(AlignmentError):
        ruled(run, events)
        model.generate(IDS, **GREEDY)
    assert not events


def test_wrapped_generate_that_changes_nothing_is_tracked(manager):
    model, events = make_model(), []
    original = model.generate
    model.generate = types.MethodType(lambda self, ids, **settings: original(ids, **settings), model)
    with manager.attach(model) as run:
        ruled(run, events)
        out = model.generate(IDS, **GREEDY)
    assert [event.column for event in events] == [8] and run.result(out).phase.tolist() == [0] * 8 + [1] * 4


@pytest.mark.parametrize("masked", [True, False])
def test_prompt_that_ends_in_padding_is_refused(manager, masked):
    """Its first token would be read off the padding. Without a mask, transformers makes one of the padding's ids."""
    ids = IDS.repeat(2, 1)
    ids[1, 5:] = 0
    given = {"attention_mask": (ids != 0).long()} if masked else {}
    with (
        manager.attach(model := make_model()),
        pytest.raises(UnsupportedDecoding, match=r"row 1 ends in padding.*padding_side"),
    ):
        model.generate(ids, pad_token_id=0, **given, **GREEDY)


def hosts_without_masks():
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=3, pad_token_id=0)
    yield RwkvForCausalLM(
        RwkvConfig(attention_hidden_size=16, context_length=64, bos_token_id=1, eos_token_id=None, **sizes)
    ).eval()
    yield FNetForMaskedLM(FNetConfig(max_position_embeddings=64, **sizes)).eval()


def test_padding_that_the_decoder_does_not_mask_is_refused(tmp_path):
    for at, model in enumerate(hosts_without_masks()):
        manager = DynamicProbeManager(make_pack(tmp_path / str(at), model))
        ids = torch.tensor([[1, 44, 3, 17, 8], [1, 21, 0, 0, 0]])
        with manager.attach(model) as run, torch.no_grad():
            for padded in (ids, ids.flip(1)):
                with pytest.raises(UnsupportedDecoding, match="mask"):
                    model(input_ids=padded, attention_mask=(padded != 0).long())
            model(input_ids=ids[:1], attention_mask=torch.ones_like(ids[:1]))
        assert len(run.result(ids[:1])) == 5


def past_the_hooks(model):
    return lambda: model.model.forward(IDS, use_cache=False)


def by_another_decoder(model):
    other = make_model()
    other.model.layers = model.model.layers
    return lambda: other.generate(IDS, **GREEDY)


@pytest.mark.parametrize("way", [past_the_hooks, by_another_decoder])
def test_layers_run_outside_the_decoder_are_reported(manager, way, caplog):
    model, sink = make_model(), MemorySink()
    act = way(model)
    with torch.no_grad(), manager.attach(model):
        act()
        act()
    assert caplog.text.count("outside of a forward of LlamaModel") == 1
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedDecoding, match="outside of a forward"),
        manager.attach(model) as run,
    ):
        run.follow(sink)
        act()


@pytest.mark.parametrize("way", [past_the_hooks, by_another_decoder])
def test_health_counts_forwards_that_ran_layers_outside_the_decoder(two_sites, way):
    """Once each, at however many sites; few beside what was seen are a warning, and all there was is a failure."""
    model = make_model()
    act, many = way(model), IDS.repeat(40, 40)[:, :100]
    with torch.no_grad(), DynamicProbeManager(two_sites).attach(model) as run:
        act()
        act()
        [gaps] = [check for check in run.health().checks if check.name == "gaps"]
        n = 2 if way is past_the_hooks else 2 * GREEDY["max_new_tokens"]
        assert gaps.state == "failed" and gaps.what == f"{n} forwards ran layers outside of the decoder that is watched"
        model(many)
        [gaps] = [check for check in run.health().checks if check.name == "gaps"]
        assert gaps.state == "warning"


@pytest.mark.parametrize("broken", ["before the first layer", "after the last"])
@pytest.mark.parametrize("way", ["plain", "generate"])
def test_layers_run_after_a_failed_forward_do_not_belong_to_it(manager, way, broken):
    model = make_model()
    part = model.model.embed_tokens if broken == "before the first layer" else model.model.norm

    def fails_in_a_forward():
        handle = part.register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            model(IDS) if way == "plain" else model.generate(IDS, **GREEDY)
        handle.remove()

    with manager.attach(model) as run, torch.no_grad():
        fails_in_a_forward()
        model.model.forward(IDS + 1)
        model(IDS[:, :5])
    with pytest.raises(AlignmentError):
        run.result(IDS)
    assert not run.result(IDS[:, :5]).coverage.n_unseen
    events = []
    with (
        pytest.raises(UnsupportedDecoding, match="ran outside of a forward"),
        manager.attach(model) as run,
        torch.no_grad(),
    ):
        fails_in_a_forward()
        ruled(run, events)
        model.model.forward(IDS + 1)
    assert not events


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")
def test_gradient_checkpointing_reruns_add_no_token(manager, caplog):
    model = make_model()
    model.gradient_checkpointing_enable()
    model.train()
    with manager.attach(model) as run:
        ruled(run, [])
        with run.generating(from_column=8) as loop:
            loss = model(IDS, use_cache=False).logits.sum()
            loop.sampled(torch.cat([IDS, IDS[:, :1]], dim=1))
        loss.backward()
    assert not caplog.text


@pytest.mark.filterwarnings("default")
def test_run_with_rules_that_watched_nothing_warns(manager):
    model = make_model()
    other, sink = copy.deepcopy(model), MemorySink()
    with pytest.warns(UserWarning, match="0 rules and 1 sink set.*not to a copy"), manager.attach(other) as run:
        run.follow(sink)
        model.generate(IDS, **GREEDY)
    with pytest.warns(UserWarning, match="1 rule and 0 sinks set"), manager.attach(other) as run:
        ruled(run, [])
        model.generate(IDS, **GREEDY)
    with warnings.catch_warnings(), manager.attach(model) as run:  # nothing was set that could have told
        warnings.simplefilter("error")
    assert not sink.batches


def test_tokens_that_no_rule_was_evaluated_on_are_counted(manager):
    model, events = make_model(), []
    steps = iter(range(100))

    def spoil(module, args, output):
        return output * float("nan") if next(steps) in (2, 3) else output

    hook = model.model.layers[1].register_forward_hook(spoil)
    with (
        pytest.warns(
            UserWarning,
            match=(
                r"2 of 3 generated tokens have no scores, so 1 rule could not be asked of them \(hidden state is not"
                r" finite: 2\)"
            ),
        ),
        manager.attach(model) as run,
    ):
        ruled(run, events)
        model.generate(IDS, **GREEDY)
    hook.remove()
    assert len(events) == 1


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:.*adapters.*are active:UserWarning"
)
def test_adapter_changed_between_turns_is_reported(manager):
    """What an earlier turn put into the cache, and its scores, are of the adapter that was on then."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model(), config, adapter_name="one")
    model.add_adapter("two", config)
    model.eval()
    cache = DynamicCache()
    with manager.attach(model) as run:
        first = model.generate(input_ids=IDS, past_key_values=cache, **GREEDY)
        second = model.generate(input_ids=torch.cat([first, IDS[:, :1]], dim=1), past_key_values=cache, **GREEDY)
        model.set_adapter("two")
        third = model.generate(input_ids=torch.cat([second, IDS[:, :1]], dim=1), past_key_values=cache, **GREEDY)
        model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("two", 3.0)
        fourth = model.generate(
            input_ids=torch.cat([third, IDS[:, :1]], dim=1), past_key_values=DynamicCache(), **GREEDY
        )
        again = model.generate(input_ids=torch.cat([fourth, IDS[:, :1]], dim=1), **GREEDY)
        model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("two", 1.0)
    assert run.result(fourth).host != run.result(third).host and not run.result(again).model_changed
    assert not run.result(second).model_changed
    assert run.result(third).host.adapters == ("two",) and run.result(third).model_changed


@pytest.fixture
def two_adapters():
    """A host with the adapters "one", which is on, and "two"."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model(), config, adapter_name="one")
    model.add_adapter("two", config)
    return model.eval()


ADAPTED = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:.*adapters.*are active:UserWarning"
)


@ADAPTED
def test_adapter_switched_and_switched_back_is_reported(manager, two_adapters):
    """At the end the host is what it was, and some tokens are of another."""
    with torch.no_grad(), manager.attach(two_adapters) as run:
        run.follow(lambda placed, scores: two_adapters.set_adapter("two" if placed.columns.max() == 8 else "one"))
        switched = two_adapters.generate(input_ids=IDS, **GREEDY)
        ids, cache = IDS, DynamicCache()
        with run.generating(from_column=IDS.shape[1]) as loop:
            out = two_adapters(ids, past_key_values=cache)
            for disables in (True, False):
                token = out.logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, token], dim=1)
                loop.sampled(ids)
                with two_adapters.disable_adapter() if disables else nullcontext():
                    out = two_adapters(token, past_key_values=cache)
    assert two_adapters.active_adapter == "one"
    assert run.result(switched).host.adapters == ("one",) and run.result(switched).model_changed
    assert run.result(ids).model_changed


def host_check(run):
    [check] = [check for check in run.health().checks if check.name == "host"]
    return check.state, check.what


@ADAPTED
def test_health_reports_model_changes_between_and_within_generations(manager, two_adapters):
    with torch.no_grad(), manager.attach(two_adapters, keep_tokens=8) as run:
        for _ in range(2):
            two_adapters.generate(input_ids=IDS, **GREEDY)
        assert host_check(run) == ("ok", "no weights, adapters or settings of the model are known to have changed")
        two_adapters.set_adapter("two")
        two_adapters.generate(input_ids=IDS, **GREEDY)
        said = "changed once after the attach, between generations or documents (adapters was ('one',), is ('two',);"
        assert said in host_check(run)[1] and "and within none" in host_check(run)[1]
        two_adapters.get_base_model().model.layers[0].mlp.down_proj.weight.mul_(3)
        two_adapters.generate(input_ids=IDS, **GREEDY)
        two_adapters.generate(input_ids=IDS, **GREEDY)
        state, between = host_check(run)
        assert state == "ok" and "changed 2 times after the attach" in between and not run.health().wrong
        switch = [True]
        run.follow(lambda placed, scores: two_adapters.set_adapter("one") if switch and switch.pop() else None)
        switched = two_adapters.generate(input_ids=IDS, **GREEDY)
        within = host_check(run)
        said = "weights, adapters or settings of the model changed within a generation or a document"
        assert within[0] == "warning" and within[1].startswith(f"{said} (adapters was ('two',), is ('one',);")
        kept = run.recordings[-1]
        two_adapters.generate(input_ids=IDS + 1, **GREEDY)
        assert kept not in run.recordings and host_check(run) == within
    assert host_check(run) == within and switched.shape[0] == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("entered", [False, True])
def test_model_replaced_before_its_first_generation_is_reported(tmp_path, strict, entered):
    """Whether that is before the block of the run or in it."""
    model, other = make_model(), make_model(seed=1)
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model))
    with torch.no_grad(), ExitStack() as stack:
        run = manager.attach(model, strict=strict)
        if entered:
            stack.enter_context(run)
            assert host_check(run) == ("ok", "no weights, adapters or settings of the model are known to have changed")
        model.load_state_dict(other.state_dict())
        if not entered:
            stack.enter_context(run)
        model.generate(input_ids=IDS, **GREEDY)
        state, what = host_check(run)
    assert state == ("warning" if strict else "ok") and "changed once after the attach" in what


@ADAPTED
def test_change_in_a_forgotten_turn_stays_known_for_later_turns(manager, two_adapters):
    with torch.no_grad(), manager.attach(two_adapters, keep_tokens=4) as run:
        cache = DynamicCache()
        first = two_adapters.generate(input_ids=IDS, past_key_values=cache, **GREEDY)
        two_adapters.set_adapter("two")
        second = torch.cat([first, IDS[:, :1]], dim=1)
        second = two_adapters.generate(input_ids=second, past_key_values=cache, **{**GREEDY, "max_new_tokens": 9})
        [recording] = run.recordings
        assert recording.n_forgotten and recording.model_changed and run.result(second).model_changed
        recording.forget(recording.n_kept, keep_ids=0)
        assert recording.earlier is None and recording.model_changed and host_check(run)[0] == "warning"


@ADAPTED
def test_adapter_scale_changed_within_a_generation_is_reported(manager, two_adapters):
    """No weight is written to, and the same adapter stays on."""
    layer = next(module for module in two_adapters.modules() if hasattr(module, "base_layer"))
    with manager.attach(two_adapters) as run:
        same = two_adapters.generate(input_ids=IDS, **GREEDY)
        run.follow(lambda placed, scores: layer.scaling.update(one=3.0))
        scaled = two_adapters.generate(input_ids=IDS, **GREEDY)
    assert [run.result(out, generation=n).model_changed for n, out in enumerate((same, scaled))] == [False, True]


def exchange_adapters(layers):
    layers[0].set_adapter("two")
    layers[1].set_adapter("one")


def exchange_scales(layers):
    layers[0].scaling, layers[1].scaling = layers[1].scaling, layers[0].scaling


IN_SINGLE_LAYERS = {
    "q_proj.adapters was ('one',), is ()": lambda layers: layers[0].enable_adapters(False),
    "q_proj.adapters was ('one',), is ('two',)": exchange_adapters,
    "q_proj.scaling['one'] was 4.0, is 5.0": exchange_scales,
    "q_proj.merged_adapters was (), is ('one',)": lambda layers: (layers[2].unmerge(), layers[0].merge()),
}


@ADAPTED
@pytest.mark.filterwarnings("ignore:.*this model's weights are others")
@pytest.mark.parametrize("said", IN_SINGLE_LAYERS)
def test_adapters_changed_in_single_layers_are_reported(manager, two_adapters, said):
    """Names, scales and what is merged stay what they were, over the whole host."""
    layers = [module for module in two_adapters.modules() if hasattr(module, "base_layer")]
    layers[1].set_adapter("two")
    layers[1].scaling["one"] = 5.0
    layers[0].scaling["two"] = layers[1].scaling["two"] = 4.0
    layers[2].merge()
    cache = DynamicCache()
    with manager.attach(two_adapters) as run:
        first = two_adapters.generate(input_ids=IDS, past_key_values=cache, **GREEDY)
        IN_SINGLE_LAYERS[said](layers)
        two_adapters.generate(input_ids=IDS + 1, **GREEDY)
        assert f"model.layers.0.self_attn.{said}" in host_check(run)[1]
        second = torch.cat([first, IDS[:, :1]], dim=1)
        second = two_adapters.generate(input_ids=second, past_key_values=cache, **GREEDY)
    assert run.result(second).model_changed


@ADAPTED
def test_adapters_run_by_sequence_are_named_and_their_changes_reported(manager, two_adapters):
    """Neither row runs the adapter that is active."""
    layer, by_row = next(module for module in two_adapters.modules() if hasattr(module, "base_layer")), ["two"] * 2
    with manager.attach(two_adapters) as run:
        hosts = []
        for scale in (4.0, 4.0, 9.0):
            layer.scaling["two"] = scale
            two_adapters.generate(input_ids=IDS.repeat(2, 1), adapter_names=by_row, **GREEDY)
            hosts.append(run.recordings[-1].host)
        said = host_check(run)[1]
    assert hosts[0] == hosts[1] != hosts[2] and hosts[0].adapters == ("two", "two")
    assert hosts[0].adapter_scales == (("two", 4.0),) and hosts[2].adapter_scales == (("two", 4.0), ("two", 9.0))
    assert "scaling['two'] was 4.0, is 9.0" in said


@ADAPTED
def test_scale_of_an_unused_adapter_is_reported_when_changed(manager, two_adapters):
    layer = next(module for module in two_adapters.modules() if hasattr(module, "base_layer"))
    with manager.attach(two_adapters) as run:
        two_adapters.generate(input_ids=IDS, **GREEDY)
        layer.set_scale("two", 9.0)
        two_adapters.generate(input_ids=IDS, **GREEDY)
        assert "scaling['two'] was 4.0, is 36.0" in host_check(run)[1]


@ADAPTED
@pytest.mark.filterwarnings("ignore:.*this model's weights are others")
@pytest.mark.parametrize("attached_in_the_block", [True, False])
def test_merged_adapter_of_disabled_layers_is_not_reported_as_a_change(manager, two_adapters, attached_in_the_block):
    """PEFT takes it out of the weights in the first forward, within the generation."""
    two_adapters.merge_adapter()
    with ExitStack() as stack:
        if attached_in_the_block:
            stack.enter_context(two_adapters.disable_adapter())
        run = stack.enter_context(manager.attach(two_adapters))
        if not attached_in_the_block:
            stack.enter_context(two_adapters.disable_adapter())
        out = two_adapters.generate(input_ids=IDS, **GREEDY)
        host = run.result(out).host
        assert not run.result(out).model_changed and host_check(run)[0] == "ok"
    assert (host.adapters, host.adapters_disabled, host.adapters_merged) == ((), ("one",), ())


@ADAPTED
def test_adapter_changed_within_a_document_or_request_is_reported(manager, two_adapters):
    host, cache = two_adapters.get_base_model(), DynamicCache()
    with torch.no_grad(), manager.attach(two_adapters) as run:
        two_adapters(IDS, past_key_values=DynamicCache())
        two_adapters(IDS[:, :2], past_key_values=cache)
        two_adapters.set_adapter("two")
        two_adapters(IDS[:, 2:], past_key_values=cache)
    assert [run.result(IDS, generation=n).model_changed for n in (0, 1)] == [False, True]
    if OLDEST:  # continuous batching is refused there
        return
    batching = {"generation_config": GenerationConfig(max_new_tokens=4, eos_token_id=60, pad_token_id=PAD)}
    batching["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
        max_batch_tokens=16, page_size=4, num_blocks=16
    )
    changed = []
    for switches in (False, True):
        with manager.attach(two_adapters) as run:
            if switches:
                run.follow(lambda placed, scores: two_adapters.set_adapter("one"))
            outputs = host.generate_batch(IDS.tolist(), progress_bar=False, **batching)
        changed.append(run.result(outputs).model_changed)
    assert changed == [False, True]


def test_weights_written_between_turns_are_reported(manager):
    host, cache, layer = make_model(), DynamicCache(), "model.layers.0.mlp.down_proj"
    with manager.attach(host) as run:
        first = host.generate(IDS, past_key_values=cache, **GREEDY)
        second = host.generate(torch.cat([first, IDS[:, :1]], dim=1), past_key_values=cache, **GREEDY)
        with torch.no_grad():
            host.get_submodule(layer).weight.mul_(2)
        third = host.generate(torch.cat([second, IDS[:, :1]], dim=1), past_key_values=cache, **GREEDY)
        host.get_submodule(layer).weight = torch.nn.Parameter(host.get_submodule(layer).weight.detach() / 2)
        fourth = host.generate(torch.cat([third, IDS[:, :1]], dim=1), **GREEDY)
    assert [run.result(out).model_changed for out in (first, second, third, fourth)] == [False, False, True, False]
    cache = DynamicCache()
    with torch.no_grad(), manager.attach(host) as run:
        host(IDS[:, :2], past_key_values=cache)
        host.get_submodule(layer).weight.mul_(2)
        host(IDS[:, 2:], past_key_values=cache)
    assert run.result(IDS).model_changed


class Half(torch.nn.Module):
    def forward(self, x):
        return x / 2


def on_no_grad(change):
    def changed(host):
        with torch.no_grad():
            change(host)

    return changed


SETTINGS = {
    "model.layers.1.input_layernorm.variance_epsilon was 1e-06, is 0.1": lambda host: setattr(
        host.model.layers[1].input_layernorm, "variance_epsilon", 0.1
    ),
    "model.layers.0.self_attn.scaling was 0.35": lambda host: setattr(host.model.layers[0].self_attn, "scaling", 1.0),
    "model.rotary_emb.inv_freq was written to": on_no_grad(lambda host: host.model.rotary_emb.inv_freq.mul_(2)),
    "model.rotary_emb.attention_scaling was 1.0, is 2.0": lambda host: setattr(
        host.model.rotary_emb, "attention_scaling", 2.0
    ),
    "model.layers.2.mlp.act_fn was SiLU": lambda host: setattr(host.model.layers[2].mlp, "act_fn", Half()),
    "model.layers.2.mlp.forward was absent, is ": lambda host: setattr(
        host.model.layers[2].mlp, "forward", lambda x: x / 2
    ),
    "config._attn_implementation was 'sdpa', is 'eager'": lambda host: host.set_attn_implementation("eager"),
    "config.rope_parameters was": lambda host: host.config.rope_parameters.update(rope_theta=1e6),
    "config.rms_norm_eps was 1e-06, is 0.1": lambda host: setattr(host.config, "rms_norm_eps", 0.1),
    "model.layers.0.self_attn.training was False, is True": lambda host: host.train(),
}


@pytest.mark.parametrize("said", SETTINGS)
@pytest.mark.parametrize("strict", [False, True])
def test_setting_changed_between_turns_is_reported_by_name(manager, said, strict):
    """No weight is written to: every other look would find the same host."""
    host, cache = make_model(), DynamicCache()
    host.model.layers[0].self_attn.attention_dropout = 0.5  # which acts in training alone
    with manager.attach(host, strict=strict) as run:
        first = host.generate(IDS, past_key_values=cache, **GREEDY)
        second = host.generate(torch.cat([first, IDS[:, :1]], dim=1), past_key_values=cache, **GREEDY)
        assert host_check(run) == ("ok", "no weights, adapters or settings of the model are known to have changed")
        SETTINGS[said](host)
        fresh = host.generate(IDS + 1, **GREEDY)
        between = host_check(run)
        assert between[0] == ("warning" if strict else "ok") and said in between[1]
        third = host.generate(torch.cat([second, IDS[:, :1]], dim=1), past_key_values=cache, **GREEDY)
    assert [run.result(out).model_changed for out in (first, second, fresh, third)] == [False, False, False, True]
    within = host_check(run)
    assert within[0] == "warning" and said in within[1]


@ADAPTED
def test_changes_of_a_routed_adapter_or_memory_are_reported(manager):
    """They are no modules of the host, and its states follow from them as from its own weights."""

    def learn(bem):
        with torch.no_grad():
            for update in bem.updates.parameters():
                update.add_(0.5)

    def turn(host, ids, cache):
        return host.generate(torch.cat([ids, IDS[:, :1]], dim=1), past_key_values=cache, **GREEDY)

    host, cache = make_model(), DynamicCache()
    with attach_bem(host, BemConfig(rank=2, sites=("o",))) as bem, manager.attach(host) as run:
        first = turn(host, IDS, cache)
        second = turn(host, first, cache)
        learn(bem)
        third = turn(host, second, cache)
        run.follow(lambda placed, scores: learn(bem))
        fourth = turn(host, IDS, DynamicCache())
    assert [run.result(out).model_changed for out in (first, second, third, fourth)] == [False, False, True, True]
    host, cache = make_model(), DynamicCache()
    with manager.attach(host) as run:
        with attach_memory(host, layer=0, slots=4, segment=3):
            first = turn(host, IDS, cache)
            second = turn(host, first, cache)
        third = turn(host, second, cache)
    assert [run.result(out).model_changed for out in (first, second, third)] == [False, False, True]


@ADAPTED
def test_adaption_prompt_is_named_while_it_is_on(manager):
    adapted = peft.get_peft_model(
        make_model(), peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM")
    ).eval()
    with pytest.warns(UserWarning), manager.attach(adapted) as run:
        on = adapted.generate(input_ids=IDS, **GREEDY)
        with adapted.disable_adapter():
            off = adapted.generate(input_ids=IDS + 1, **GREEDY)
    assert run.result(on).host.adapters == ("adaption_prompt",) and run.result(off).host.adapters == ()


def test_token_masked_by_a_later_turn_stays_a_token(manager, model):
    """It was run and scored, and what came right after it read it."""
    cache = DynamicCache()
    with manager.attach(model) as run:
        first = model.generate(IDS, past_key_values=cache, **GREEDY)
        scored = run.result(first)
        mask = torch.ones_like(first)
        mask[0, 2] = 0
        second = model.generate(first, attention_mask=mask, past_key_values=cache, **GREEDY)
    result = run.result(second)
    assert result.position.tolist() == list(range(second.shape[1]))
    at, was = result.at(0, 2), scored.at(0, 2)
    assert result.scores.active_scores(at).tolist() == scored.scores.active_scores(was).tolist() != []


@pytest.mark.parametrize("guard_last", [True, False])
def test_sequence_stopped_by_one_run_has_ended_for_all(manager, guard_last):
    """Whichever was attached first: what follows is padding, which no run scores and no rule is asked of."""
    model, columns = make_model(), []
    ids = torch.tensor([[1, 9, 5, 6, 7], [8, 9, 5, 6, 7]])
    settings = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    with manager.attach(model) as run:
        result = run.result(model.generate(ids, **settings))
    at = (result.row == 0) & (result.position == 6)
    above = float(result.scores.take(at.nonzero()[0]).active_scores(0).max()) - 1e-4
    concept = int(
        result.scores.take(at.nonzero()[0]).active(0)[result.scores.take(at.nonzero()[0]).active_scores(0).argmax()]
    )
    with manager.attach(model) as first, manager.attach(model) as last:
        guard, audit = (last, first) if guard_last else (first, last)
        audit.on(0, above=0.0, for_tokens=1, action=lambda event: columns.append((event.row, event.column)))
        guard.on(concept, above=above, action="stop")
        out = model.generate(ids, **settings)
    positions = [
        [one.position[(one.row == row) & (one.phase == 1)].tolist() for row in (0, 1)]
        for one in (guard.result(out), audit.result(out))
    ]
    assert positions[0] == positions[1] and len(positions[0][0]) < 8
    assert guard.result(out).coverage.totals() == audit.result(out).coverage.totals()


def test_run_that_ends_while_another_thread_generates_warns(manager):
    model, begun, go_on = make_model(), threading.Event(), threading.Event()

    class Pausing(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            begun.set()
            assert go_on.wait(60)
            return torch.zeros(len(ids), dtype=torch.bool)

    other = threading.Thread(target=lambda: model.generate(IDS, **GREEDY, stopping_criteria=[Pausing()]))
    with (
        pytest.warns(UserWarning, match="1 generations of other threads were under way when this run ended"),
        manager.attach(model) as run,
    ):
        run.follow(MemorySink())
        other.start()
        assert begun.wait(60)
    go_on.set()
    other.join()


def test_stopping_criteria_of_an_unwatched_generate_are_an_error(manager):
    model, other = make_model(), make_model(seed=3)
    with manager.attach(model) as run:
        ruled(run, [])
        model.generate(IDS, **GREEDY, stopping_criteria=run.stopping_criteria)
        with pytest.raises(UnsupportedDecoding, match="does not watch this generate"):
            other.generate(IDS, **GREEDY, stopping_criteria=run.stopping_criteria)
    with pytest.raises(UnsupportedDecoding, match="does not watch this generate"):
        model.generate(IDS, **GREEDY, stopping_criteria=run.stopping_criteria)


def test_token_at_a_cached_padding_position_is_refused(manager):
    model, cache = make_model(), DynamicCache()
    ids = torch.tensor([[0, 0, 9, 13, 7], [0, 0, 9, 13, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    longer, one = torch.cat([ids, torch.tensor([[3], [4]])], 1), torch.ones(2, 1, dtype=torch.long)
    with manager.attach(model) as run:
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1, do_sample=False)
        with pytest.raises(AlignmentError, match=r"row 0: column 1 is a token .* was padding when the cache was made"):
            model.generate(
                longer, attention_mask=torch.cat([mask[[1, 0]], one], 1), past_key_values=copy.deepcopy(cache), **GREEDY
            )
        out = model.generate(longer, attention_mask=torch.cat([mask, one], 1), past_key_values=cache, **GREEDY)
    kept = run.result(out)
    assert kept.coverage.n_unseen == 2 and (kept.row == 0).sum() == 8 and (kept.row == 1).sum() == 9


class Louder(torch.nn.Module):
    """A layer, or a block of one, with something around it that was put there later."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        given = self.inner(*args, **kwargs)
        return (given[0] + 1, *given[1:]) if isinstance(given, tuple) else given + 1


def exchange(layers):
    layers[0], layers[1] = layers[1], layers[0]


def wrap(layers):
    layers[1] = Louder(layers[1])


def rotate(decoder):
    decoder.layers = torch.nn.ModuleList([*list(decoder.layers)[1:], decoder.layers[0]])


@pytest.mark.parametrize("way", ["generate", "loop", "document"])
@pytest.mark.parametrize(
    "change",
    [
        lambda decoder: exchange(decoder.layers),
        lambda decoder: decoder.layers.__delitem__(0),
        rotate,
        lambda decoder: wrap(decoder.layers),
    ],
    ids=["exchanged", "removed", "rotated", "wrapped"],
)
def test_moved_layer_is_not_read_as_the_one_of_its_site(manager, change, way):
    """Its hook runs on, and its states are those of another depth than the pack was made for."""
    host, gaps = make_model(), []
    for told in ({}, {"on_gap": "report", "followers": [hears(gap=gaps.append)]}):
        with manager.attach(host, **told) as run, torch.no_grad():
            before = list(host.model.layers)
            host(IDS[:, :3])
            change(host.model)
            try:
                with nullcontext() if told else pytest.raises(AlignmentError, match="put in its place"):
                    if way == "generate":
                        out = host.generate(IDS, use_cache=False, **GREEDY)
                    elif way == "loop":
                        with run.generating(from_column=IDS.shape[1]):
                            host(out := IDS, use_cache=False)
                    else:
                        host(out := IDS, use_cache=False)
            finally:
                host.model.layers = torch.nn.ModuleList(before)
    assert gaps and run.result(out).coverage.n_unseen == out.numel()
    assert run.result(IDS[:, :3]).coverage.n_unseen == 0


def exchange_parts(layers, name):
    layers[0]._modules[name], layers[1]._modules[name] = layers[1]._modules[name], layers[0]._modules[name]


def wrap_part(layers, name):
    layers[1]._modules[name] = Louder(layers[1]._modules[name])


@pytest.mark.parametrize("change", [exchange_parts, wrap_part])
@pytest.mark.parametrize("site", ["mlp_out.1", "attn_out.1"])
def test_moved_block_of_a_layer_is_not_read_as_the_one_of_its_site(tmp_path, site, change):
    host, name = make_model(), "mlp" if site == "mlp_out.1" else "self_attn"
    manager = DynamicProbeManager(make_pack(tmp_path / "blocks", host, sites=(site,)))
    with manager.attach(host, on_gap="report") as run, torch.no_grad():
        host(IDS[:, :3])
        change(host.model.layers, name)
        host(IDS, use_cache=False)
    assert run.result(IDS[:, :3]).coverage.n_unseen == 0
    assert run.result(IDS).coverage.n_unseen == IDS.numel()


@pytest.mark.parametrize("site", ["mlp_out.1", "attn_out.1"])
def test_block_compiled_in_place_is_still_read(tmp_path, site):
    host, name = make_model(), "mlp" if site == "mlp_out.1" else "self_attn"
    manager = DynamicProbeManager(make_pack(tmp_path / "blocks", host, sites=(site,)))
    with manager.attach(host) as run, torch.no_grad():
        layer = host.model.layers[1]
        layer._modules[name] = torch.compile(layer._modules[name], backend="eager")
        host(IDS)
    assert run.result(IDS).coverage.n_unseen == 0


def test_layer_compiled_in_place_is_still_read(manager):
    host = make_model()
    with manager.attach(host) as run, torch.no_grad():
        host.model.layers[1] = torch.compile(host.model.layers[1], backend="eager")
        host(IDS)
    assert run.result(IDS).coverage.n_unseen == 0

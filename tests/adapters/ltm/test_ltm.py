"""The model with memory slots: every way of running it equals one forward, or is refused."""

import copy
import subprocess
import sys
import threading
from contextlib import ExitStack

import numpy as np
import peft
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StoppingCriteria, StoppingCriteriaList

import architectures
from arrangements import tokenizer
from conftest import OLDEST
from probemon.adapters.ltm import LtmConfig, LtmForCausalLM, attach_memory, export_memory, import_memory, memory_of
from probemon.adapters.ltm.cache import memory_layer
from probemon.adapters.ltm.config import MemoryShape
from probemon.adapters.ltm.memory import SlotMemory
from probemon.errors import ConfigError, ModelMismatch, UnsupportedDecoding, UnsupportedModel
from probemon.host.internals import CACHE_NAME
from slot_hosts import slot_host
from slot_oracle import SlotOracle

CUTS = ([1] * 40, [7, 1, 1, 13, 6, 12], [6] * 6 + [4], [5, 5, 30])
PLAIN = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None}
CLOSE = 2e-5  # of logits up to 6; two orders of summation differ by a third of that


def make(**settings):
    model = slot_host(**{"adaptive_mass": 0.9, "decay": 0.97, **settings})
    with torch.no_grad():
        for memory in model.memories.values():
            memory.surprise_weight.fill_(0.7)
    return model


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 61, (3, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def whole(model, ids, **more):
    return model(ids, use_cache=False, **more).logits


@torch.no_grad()
def in_pieces(model, ids, cuts, mask=None, cache=None):
    logits, at = [], 0
    for n in cuts:
        more = {} if mask is None else {"attention_mask": mask[:, : at + n]}
        out = model(ids[:, at : at + n], past_key_values=cache, use_cache=True, **more)
        cache, at = out.past_key_values, at + n
        logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 7, "segment": 6},
        {"slots": 40, "segment": 5, "compression": 1.0},
        {"slots": 3, "segment": 6, "adaptive_mass": 0.6, "decay": 0.8},
        {"slots": 1, "segment": 1},
    ],
)
def test_module_equals_the_memory_in_plain_python(sizes):
    memory = SlotMemory(MemoryShape(16, memory_dim=5, **sizes)).double().eval()
    with torch.no_grad():
        memory.surprise_weight.fill_(1.3)
        memory.write_gate.weight.mul_(4)
        hidden = torch.randn(1, 37, 16, dtype=torch.float64)
        out = memory(hidden, None, torch.ones(1, 37, dtype=torch.bool))
    oracle = SlotOracle(memory)
    updates, reads = oracle.forward(hidden[0].numpy())
    # The module keeps strengths and takes its softmax in fp32.
    np.testing.assert_allclose(out.update[0].numpy(), updates, atol=1e-5)
    np.testing.assert_allclose(out.reads[0].numpy(), reads, atol=1e-5)
    held = [-1 if slot is None else slot[4] for slot in oracle.slots]
    assert out.state.position[0].tolist() == held
    replaced = out.state.history[0, :, 6]
    assert replaced[~replaced.isnan()].tolist() == oracle.n_replaced[-8:]
    assert sum(oracle.n_replaced) > 0 or sizes["slots"] == 40


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"{len(cuts)} pieces")
def test_forward_in_pieces_equals_one_forward(model, ids, cuts):
    logits, cache = in_pieces(model, ids, cuts)
    assert (logits - whole(model, ids)).abs().max() < CLOSE
    # the memory itself, its statistics too, is that of one forward
    with torch.no_grad():
        state = memory_of(model(ids, use_cache=True).past_key_values)[1]
    for name, one in vars(state).items():
        torch.testing.assert_close(getattr(memory_of(cache)[1], name), one, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_output_does_not_depend_on_later_tokens_or_other_sequences(model, ids):
    before = whole(model, ids)
    changed = ids.clone()
    changed[:, 25:] = 7
    assert torch.equal(whole(model, changed)[:, :25], before[:, :25])
    changed = ids.clone()
    changed[1] = 7
    after = whole(model, changed)
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and not torch.equal(after[1], before[1])


@pytest.mark.parametrize("cuts", [[45], [1] * 45, [3, 2, 40], [11, 34]], ids=lambda cuts: f"{len(cuts)} pieces")
def test_left_padding_changes_nothing(model, ids, cuts):
    padding = (5, 0, 3)
    rows = torch.full((3, 45), 0)
    mask = torch.zeros(3, 45, dtype=torch.long)
    for row, n in enumerate(padding):
        rows[row, n : n + 40], mask[row, n:] = ids[row], 1
        rows[row, n + 40 :] = 9  # shorter paddings are followed by more tokens
    logits, _ = in_pieces(model, rows, cuts, mask)
    assert logits.isfinite().all()
    expected = whole(model, ids)
    for row, n in enumerate(padding):
        assert (logits[row, n : n + 40] - expected[row]).abs().max() < CLOSE


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "3 beams"])
def test_cached_generation_equals_uncached(model, ids, options):
    with_cache = model.generate(ids, **PLAIN, **options)
    without = model.generate(ids, use_cache=False, **PLAIN, **options)
    assert torch.equal(with_cache, without)


def test_second_turn_continues_from_the_memory(model, ids):
    cache = DynamicCache(config=model.config)
    first = model.generate(ids, past_key_values=cache, **PLAIN)
    both = torch.cat([first, ids[:, :3]], dim=1)
    options = {"attention_mask": torch.ones_like(both), **PLAIN}  # what was generated may look like padding
    assert torch.equal(model.generate(both, past_key_values=cache, **options), model.generate(both, **options))


def test_auto_classes_load_a_saved_model(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is LtmForCausalLM and type(AutoConfig.from_pretrained(tmp_path)) is LtmConfig
    assert torch.equal(whole(again, ids), whole(model, ids))


def test_model_loads_by_folder_in_a_fresh_process(model, tmp_path):
    """Also one that imports nothing of the host itself: a worker, a training that is given a name."""
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    code = "import sys; from probemon.host.loading import load_model; print(load_model(sys.argv[1], 'cpu', print)[0])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "LtmForCausalLM" in done.stdout, done.stderr


def test_zero_memory_output_equals_the_model_with_its_window_alone(ids):
    model = make()
    for memory in model.memories.values():
        torch.nn.init.zeros_(memory.output.weight)
    alone = make(memory_layers=())
    alone.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(whole(model, ids), whole(alone, ids))


def test_eager_attention_equals_sdpa(model, ids):
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert (whole(eager, ids) - whole(model, ids)).abs().max() < CLOSE


def test_gradients_with_checkpointing_equal_those_without(ids):
    gradients = []
    for checkpointing in (False, True):
        model = make().train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        model(ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.memories[1].parameters())
    assert (gradients[0] - gradients[1]).abs().max() < 1e-6 * gradients[0].abs().max()


def test_detach_every_stops_gradients_at_that_distance(ids):
    def reaches(**settings):
        model = make(memory_layers=[1], num_hidden_layers=2, **settings).train()
        embeds = model.model.embed_tokens(ids).detach().requires_grad_()
        model(inputs_embeds=embeds, use_cache=False).logits[:, 39].square().sum().backward()
        return embeds.grad[:, :6].abs().sum()

    assert reaches(decay=1.0) > 0 and reaches(detach_every=1) == 0


def test_cached_sequences_can_be_repeated_selected_and_reset(model, ids):
    _, cache = in_pieces(model, ids, [20])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0]))
    rows = ids[[2, 0]]
    with torch.no_grad():
        out = model(rows[:, 20:], past_key_values=cache).logits
    assert (out - whole(model, rows)[:, 20:]).abs().max() < CLOSE
    cache.reset()
    assert (in_pieces(model, ids, [40], cache=cache)[0] - whole(model, ids)).abs().max() < CLOSE


def test_reducing_slots_changes_a_read_by_at_most_the_removed_share(model, ids):
    _, cache = in_pieces(model, ids, [40])
    state, memory = memory_of(cache)[1], model.memories[1]
    queries = torch.randn(3, 50, 8)
    value, p = memory.read(queries, state)
    grown = state.grown(19)
    assert torch.allclose(memory.read(queries, grown)[0], value, atol=1e-6)
    assert torch.allclose(memory.read(queries, grown.reduced(7, memory.shape.decay))[0], value, atol=1e-6)
    reduced = state.reduced(4, memory.shape.decay)
    strongest = state.effective(memory.shape.decay).argsort(1, descending=True)[:, 4:]
    dropped = p[..., 1:].gather(2, strongest[:, None].expand(-1, 50, -1)).sum(-1)
    moved = (memory.read(queries, reduced)[0] - value).norm(dim=-1)
    # What is left is scaled up by the dropped mass, too: each part moves by at most that.
    assert (moved <= 2 * dropped * state.values.norm(dim=-1).max() + 1e-6).all() and (moved > 1e-4).any()
    assert reduced.position[0].tolist() == [
        position for i, position in enumerate(state.position[0].tolist()) if i not in strongest[0].tolist()
    ]
    model.reduce_slots(4, cache)
    assert memory_of(cache)[0].n_slots == 4
    with torch.no_grad():
        assert model(ids[:, :9], past_key_values=cache).logits.isfinite().all()


def test_exported_memory_continues_in_another_model_of_equal_weights(model, ids, tmp_path):
    _, cache = in_pieces(model, ids, [25])
    path = export_memory(model, cache, tmp_path / "memory.safetensors")
    again = import_memory(copy.deepcopy(model), path)
    with torch.no_grad():
        expected, logits = (model(ids[:, 25:], past_key_values=c).logits for c in (cache, again))
    assert torch.equal(logits, expected)
    other = make()
    other.lm_head.weight.data[0, 0] += 1
    with pytest.raises(ModelMismatch, match="another model"):
        import_memory(other, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="cannot be read"):
        import_memory(model, path)
    with pytest.raises(ConfigError, match="holds no memory"):
        export_memory(model, DynamicCache(config=model.config), tmp_path / "none.safetensors")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_exported_memory_needs_the_same_adapters_at_the_same_strength(model, ids, tmp_path):
    """What is in no tensor counts: how strongly an adapter is on, by its layers, and its settings."""
    host = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["o_proj"])).eval()
    own = host.get_base_model()
    with torch.no_grad():
        cache = own(ids[:, :25], use_cache=True).past_key_values
    path = export_memory(own, cache, tmp_path / "memory.safetensors")
    layers = [module for module in own.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    import_memory(own, path)
    for module in layers:
        module.set_scale("default", 3.0)
    with pytest.raises(ModelMismatch, match="another model"):
        import_memory(own, path)
    for module in layers:
        module.set_scale("default", 1.0)
    import_memory(own, path)
    host.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").eval()
    import_memory(loaded.get_base_model(), path)
    host.peft_config["default"].lora_alpha = 90
    with pytest.raises(ModelMismatch, match="another model"):
        import_memory(own, path)


def test_export_is_refused_if_other_layers_keep_no_memory(ids, tmp_path):
    host = llama()
    with attach_memory(host, 1, slots=5, segment=6), torch.no_grad():
        cache = host(ids, use_cache=True).past_key_values
        with pytest.raises(ConfigError, match="layer 0 of this cache keeps no memory"):
            export_memory(host, cache, tmp_path / "memory.safetensors")
    assert not list(tmp_path.iterdir())


def test_unsupported_operations_are_refused_by_name(model, ids):
    _, cache = in_pieces(model, ids, [40])
    with pytest.raises(UnsupportedDecoding, match="removed from a memory"):
        cache.crop(-1)
    gap = torch.ones(3, 40, dtype=torch.long)
    gap[0, 5] = 0
    for mask, words in ((gap, "not padding before"), (gap[:, None, None].bool(), "one column"), (gap[:, :7], "column")):
        with pytest.raises(UnsupportedDecoding, match=words):
            model(ids, attention_mask=mask)
    packed = torch.arange(20).repeat(2)[None]
    with pytest.raises(UnsupportedDecoding, match="packed rows"):
        model(ids[:1], position_ids=packed)
    with pytest.raises(ValueError, match=r"[Ss]tateful|assisted"):
        model.generate(ids[:1], assistant_model=make(), **PLAIN)
    with pytest.raises(UnsupportedDecoding, match="DynamicCache"):
        model.generate(ids, cache_implementation="static", **PLAIN)
    used = DynamicCache(config=model.config)
    for layer in used.layers:
        layer.update(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8))
    with pytest.raises(UnsupportedDecoding, match="has not read all of them"):
        memory_layer(used, 0)
    with pytest.raises(UnsupportedDecoding, match="a row has one memory"):
        model.generate_batch(ids.tolist(), max_new_tokens=2)
    with pytest.raises(ConfigError, match="there is no memory"):
        make().get_memory_stats()
    with pytest.raises(ConfigError, match="compression"):
        LtmConfig(compression=0.0)


def test_memory_does_not_grow_with_the_sequence(model, ids):
    sizes = {memory_of(in_pieces(model, ids.repeat(1, n), [40 * n])[1])[1].n_bytes for n in (1, 5)}
    assert len(sizes) == 1


def llama():
    from conftest import make_model

    return make_model().eval()


def test_untrained_attached_memory_changes_nothing_and_detaches_cleanly(ids):
    host = llama()
    before = {name: value.clone() for name, value in host.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in host.modules()]
    expected, text = whole(host, ids), host.generate(ids, **PLAIN, num_beams=2)
    with attach_memory(host, 1, slots=5, segment=6, memory_dim=8) as attached:
        assert torch.equal(whole(host, ids), expected)
        assert torch.equal(host.generate(ids, **PLAIN, num_beams=2), text)
        assert attached.get_memory_stats()["occupied"] == 1.0
        torch.nn.init.normal_(attached.memory.output.weight)
        changed = whole(host, ids)
        assert not torch.equal(changed, expected)
        for cuts in CUTS[:2]:
            assert (in_pieces(host, ids, cuts)[0] - changed).abs().max() < 1e-4
        assert torch.equal(
            host.generate(ids, **PLAIN, num_beams=3), host.generate(ids, use_cache=False, **PLAIN, num_beams=3)
        )
        padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), ids], dim=1)
        mask = torch.cat([torch.zeros(3, 4, dtype=torch.long), torch.ones_like(ids)], dim=1)
        assert (whole(host, padded, attention_mask=mask)[:, 4:] - changed).abs().max() < 1e-4
        with pytest.raises(UnsupportedDecoding, match="a row has one memory"):
            host.generate_batch(ids.tolist(), max_new_tokens=2)
    assert torch.equal(whole(host, ids), expected)
    assert "init_continuous_batching" not in vars(host)
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in host.modules()] == hooks


@pytest.mark.parametrize("attach", [False, True])
def test_memory_statistics_have_a_row_for_each_sequence_of_the_newest_forward(ids, attach):
    """As docs/memory-and-routing.md has it: of beams and of a row that ended early, too."""
    host = llama() if attach else make()
    prompt, greedy = ids[:2, :20], {**PLAIN, "eos_token_id": None}
    end = 1 + next(at for at in range(22, 30) if host.generate(prompt, **greedy)[0, at] not in ids[:2, :20])
    eos = int(host.generate(prompt, **greedy)[0, end - 1])
    with ExitStack() as stack:
        shown = stack.enter_context(attach_memory(host, 1, slots=5, segment=6)) if attach else host
        beams = host.generate(prompt, **greedy, num_beams=3)
        assert {one["row"] for one in shown.get_memory_stats()["memories"]} == set(range(6))
        early = host.generate(prompt, **{**greedy, "eos_token_id": eos})
        assert early.shape[1] > end and int(early[0, end - 1]) == eos  # padding follows
        for text in (beams[0], beams[1], early[0, :end]):
            host(text[None], use_cache=True)
            for one in shown.get_memory_stats()["memories"]:
                assert (one["row"], one["n_tokens"]) == (0, len(text)) and one["provenance"]
                assert all(int(text[slot["position"]]) == slot["token"] for slot in one["provenance"])


OTHER_HOSTS = [  # architecture, layer, what its refusal says; "" where the memory is that of one forward
    ("gpt_neox", 0, ""),  # which calls the cache of a layer its past
    ("gpt_neox_japanese", 1, ""),
    ("phi", 1, ""),
    ("gemma2", 1, ""),
    ("falcon_h1", 0, ""),
    ("jamba", 1, ""),
    ("recurrent_gemma", 2, ""),  # which gives it without a name
    ("jamba", 0, "keep keys"),
    ("mamba", 0, "keep keys"),
    ("mamba2", 1, "keep keys"),
    ("falcon_mamba", 0, "keep keys"),
    ("recurrent_gemma", 0, "keep keys"),
    ("minimax", 1, "keeps nothing of its tokens"),
    ("gemma3n_text", 0, "one stream"),
    ("hy_v4", 1, "one stream"),
    ("prophetnet", 0, "one stream"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(OLDEST, reason="transformers 5.0 has other caches")
@pytest.mark.parametrize(("name", "layer", "refusal"), OTHER_HOSTS)
def test_attached_memory_equals_one_forward_or_is_refused(name, layer, refusal):
    host = architectures.build(name, "causal").eval()
    prompt = torch.tensor([[1, 44, 3, 17, 8, 9, 21, 5]])
    with attach_memory(host, layer, slots=6, segment=4) as attached:
        torch.manual_seed(1)
        torch.nn.init.normal_(attached.memory.output.weight)
        if refusal:
            with pytest.raises((UnsupportedModel, UnsupportedDecoding), match=refusal):
                host.generate(prompt, **PLAIN)
            return
        out = host.generate(prompt, **PLAIN, return_dict_in_generate=True, output_logits=True)
        expected = whole(host, out.sequences[:, :-1])[:, 7:]
        assert (torch.stack(out.logits, dim=1) - expected).abs().max() < 1e-3 * expected.abs().max()
        assert attached.get_memory_stats()["memories"][0]["n_tokens"] == 27


@pytest.mark.parametrize("return_dict", [True, False])
def test_cache_that_does_not_reach_the_layer_is_an_error(ids, return_dict):
    host = llama()
    host.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, CACHE_NAME: None}), with_kwargs=True
    )
    with attach_memory(host, 1):
        with pytest.raises(UnsupportedModel, match=r"does not pass it to layer 1.*use_cache=False"):
            host.model(ids, use_cache=True, return_dict=return_dict)
        host.model(ids, use_cache=False, return_dict=return_dict)
        host(ids, use_cache=False, output_hidden_states=True, output_attentions=True)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_attached_memory_is_unchanged_by_gradient_checkpointing(ids):
    host = llama().train()
    with attach_memory(host, 1, slots=5, segment=6) as attached:
        torch.nn.init.normal_(attached.memory.output.weight)
        expected = whole(host, ids)
        host.gradient_checkpointing_enable()
        logits = host(ids, past_key_values=DynamicCache(config=host.config)).logits  # the layers put it aside
        assert (logits - expected).abs().max() < CLOSE


@pytest.mark.parametrize("kind", list(CheckpointImpl))
def test_recomputed_layer_uses_the_mask_of_its_own_forward(ids, kind):
    """Two batches, of which only one is padded, before one backward pass that runs the memory again."""
    host = llama().train()
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    with attach_memory(host, 1, slots=5, segment=6) as attached:
        torch.nn.init.normal_(attached.memory.output.weight)
        found, n_calls = [], []
        handle = attached.memory.register_forward_pre_hook(lambda *_: n_calls.append(1))
        for again in (False, True):
            if again:
                host.model.layers[1] = checkpoint_wrapper(host.model.layers[1], checkpoint_impl=kind)
            attached.memory.zero_grad()
            loss = [host(ids, attention_mask=one, use_cache=False).logits.square().mean() for one in (mask, None)]
            sum(loss).backward()
            found.append([p.grad.clone() for p in attached.memory.parameters() if p.grad is not None])
        handle.remove()
    assert len(n_calls) == 2 + 4 and len(found[0]) == len(found[1]) > 3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class Moved(torch.autograd.graph.saved_tensors_hooks):
    """What is saved is copied, and copied again when it is wanted, as offloaded activations are."""

    def __init__(self):
        super().__init__(torch.clone, torch.clone)


@pytest.mark.parametrize("kind", list(CheckpointImpl))
def test_recomputed_layer_with_a_moved_input_is_refused(ids, kind):
    """Where an input lay, another one may lie by now."""
    host = llama().train()
    with attach_memory(host, 1, slots=5, segment=6):
        host.model.layers[1] = checkpoint_wrapper(host.model.layers[1], checkpoint_impl=kind)
        for _ in range(5):
            with Moved():
                losses = [host(ids, use_cache=False).logits.square().mean() for _ in range(2)]
            with pytest.raises(UnsupportedDecoding, match="keep the layer's input where it was"):
                sum(losses).backward()


def test_attached_memory_in_two_threads_answers_as_alone(ids):
    host, mask = llama(), torch.ones_like(ids)
    mask[:, :7] = 0
    with attach_memory(host, 1, slots=5, segment=6) as attached, torch.no_grad():
        torch.nn.init.normal_(attached.memory.output.weight)
        alone = [host(ids, attention_mask=one).logits for one in (mask, None)]
        meet, found = threading.Barrier(2, timeout=60), {}

        def run(i, one):
            with torch.no_grad():
                found[i] = host(ids, attention_mask=one).logits

        def wait_for_the_other(*_):
            meet.wait()

        handle = host.model.layers[0].register_forward_pre_hook(wait_for_the_other)
        threads = [threading.Thread(target=run, args=pair) for pair in enumerate((mask, None))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handle.remove()
    assert all(torch.equal(found[i], alone[i]) for i in (0, 1)) and not torch.equal(*alone)


def test_attached_memory_refuses_packed_sequences(ids):
    host, length = llama(), ids.shape[1]
    packed = torch.cat([torch.arange(20), torch.arange(length - 20)])[None].expand_as(ids)
    ones = torch.zeros_like(ids)  # each token a sequence of its own
    lengths = torch.tensor([0, 20, length])
    with attach_memory(host, 1):
        for given in ({"position_ids": packed}, {"position_ids": ones}, {"cu_seq_lens_q": lengths}):
            for use_cache in (False, True):
                with pytest.raises(UnsupportedDecoding, match="packed rows"):
                    host(ids, use_cache=use_cache, **given)
        _, cache = in_pieces(host, ids, [20])
        with pytest.raises(UnsupportedDecoding, match="packed rows"):
            host(ids[:, 20:], past_key_values=cache, position_ids=packed[:, 20:])
        mask = torch.ones_like(ids)
        mask[:, :7] = 0
        host(
            ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        )  # as generate() gives them
        with pytest.raises(UnsupportedDecoding, match="outside of a forward of its decoder"):
            x = torch.zeros(1, 3, host.config.hidden_size)
            host.model.layers[1](x, position_embeddings=host.model.rotary_emb(x, torch.arange(3)[None]))


def test_attached_memory_refuses_unsupported_layers(ids):
    host = llama()
    _, cache = in_pieces(host, ids, [20])
    with attach_memory(host, 1), pytest.raises(UnsupportedDecoding, match="has not read all of them"):
        host(ids[:, 20:], past_key_values=cache)
    with attach_memory(host, 1):
        _, cache = in_pieces(host, ids, [20])
    host(ids[:, 20:22], past_key_values=cache)
    with attach_memory(host, 1), pytest.raises(UnsupportedDecoding, match="has not read all of them"):
        host(ids[:, 22:], past_key_values=cache)
    with attach_memory(host, 1):
        _, cache = in_pieces(host, ids, [20])
        kept = copy.deepcopy(cache)
        host(ids[:, 20:], past_key_values=cache)
        host(ids[:, 20:], past_key_values=copy.deepcopy(kept))
    with attach_memory(host, 1), pytest.raises(UnsupportedDecoding, match="written by another memory"):
        host(ids[:, 20:], past_key_values=kept)
    with pytest.raises(ConfigError, match="layer"):
        attach_memory(host, 3)
    with attach_memory(host, 1), pytest.raises(ConfigError, match="has a memory already"):
        attach_memory(host, 1)
    with pytest.raises(UnsupportedModel, match="memory_layers"):
        attach_memory(make(), 1)


def test_memory_cannot_be_detached_during_generation(ids):
    class Detach(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            with pytest.raises(UnsupportedDecoding, match="1 generate"):
                attached.detach()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    host = llama()
    with attach_memory(host, 1) as attached:
        torch.nn.init.normal_(attached.memory.output.weight)
        expected = host.generate(ids, **PLAIN)
        assert torch.equal(host.generate(ids, stopping_criteria=StoppingCriteriaList([Detach()]), **PLAIN), expected)
    assert not attached.open

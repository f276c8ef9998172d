"""Modes that a model cannot run correctly are refused, as an oracle on the unwatched model decides, and no others.

A sample of `scripts/benchmarks/architectures.py`, which runs every architecture in every mode; and trying a twin leaves
no trace.
"""

import copy
import json
import threading
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import architectures
from conftest import OLDEST, n_hooks
from corpora import make_tokenizer
from probemon import DynamicProbeManager
from probemon.errors import UnsupportedDecoding, UnsupportedModel
from probemon.host import abilities
from probemon.host.model import find_layers, is_encoder_decoder, site_module
from probemon.host.twin import own_randomness, shrunken, twin
from probemon.lab.corpora.state_reader import StateReader
from probemon.lab.corpora.windows import Reading

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(OLDEST, reason="transformers 5.0 has other faults"),
]
RESULTS = Path(__file__).parents[2] / "docs/benchmarks/architectures.json"
# Where the hosts differ most; each pair is judged by its own bare host, and must be what the sweep found.
SAMPLE = {
    "llama": ("greedy", "beams", "second turn", "gap", "second turn, gap", "plain, in pieces", "plain, gap"),
    "mistral": ("greedy", "gap", "second turn, gap", "plain, gap"),
    "lfm2": ("gap", "second turn, gap"),
    "mamba": ("greedy", "beams", "second turn"),
    "mamba2": ("beams", "second turn"),
    "falcon_mamba": ("second turn",),
    "jamba": ("beams", "second turn", "chunked", "plain, token by token", "plain, in pieces"),
    "bamba": ("beams", "chunked", "plain, token by token"),
    "minimax": ("greedy", "beams", "second turn", "plain, in pieces"),
    "recurrent_gemma": ("greedy", "beams", "second turn"),
    "falcon_h1": ("beams", "second turn", "chunked", "plain, in pieces"),
    "rwkv": ("greedy", "no cache"),
    "gpt_neo": ("beams", "static cache"),
    "doge": ("greedy", "no cache", "corpus"),
    "gpt2": ("greedy", "prompt lookup"),
    "mixtral": ("beams", "chunked", "corpus"),
    "t5": ("greedy", "beams"),
    "bart": ("greedy", "chunked"),
}
REFUSED = {  # what must be: the findings that this table began with
    "mistral": ("gap", "second turn, gap", "plain, gap"),
    "lfm2": ("gap", "second turn, gap"),
    "mamba": ("second turn",),
    "mamba2": ("second turn",),
    "falcon_mamba": ("second turn",),
    "jamba": ("second turn", "chunked", "plain, in pieces"),
    "bamba": ("plain, token by token",),
    "minimax": ("beams",),
    "recurrent_gemma": ("greedy", "beams", "second turn"),
    "doge": ("greedy", "no cache"),
    "rwkv": ("greedy", "no cache"),
    "gpt_neo": ("static cache",),
    "bart": ("greedy",),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_mode_is_exact_or_refused_if_the_unwatched_model_is_wrong(name, tmp_path):
    host = architectures.Host(name, architectures.architectures()[name], tmp_path)
    stored = json.loads(RESULTS.read_text())["architectures"][name]["modes"]
    for mode in SAMPLE[name]:
        entry = host.try_mode(mode)
        assert entry["outcome"] != "wrong", (name, mode, entry)
        assert (entry["outcome"] == "refused") == (mode in REFUSED.get(name, ())), (name, mode, entry)
        if entry["outcome"] == "refused":
            assert (
                entry["host"] > 1e-2
                and "whose own answer is wrong" in entry["reason"]
                and name.replace("_", "")[:4] in entry["reason"].lower()
            )
        assert entry["outcome"] == stored[mode]["outcome"], (name, mode, entry)


def host_of(name, **changes):
    return architectures.build(name, architectures.architectures()[name])


def manager_of(model, folder):
    return DynamicProbeManager(architectures.make_pack(folder / "pack", model))


def test_bamba_forward_on_a_cache_needs_position_ids(tmp_path):
    model, ids = host_of("bamba"), torch.tensor([[1, 44, 3, 17, 8, 44]])
    manager = manager_of(model, tmp_path)
    with manager.attach(model) as run, torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        with pytest.raises(
            UnsupportedDecoding, match=r"without position_ids is not supported for BambaForCausalLM.*Give position_ids"
        ):
            model(ids[:, 4:5], past_key_values=cache, use_cache=True)
        cache = model(ids[:, :4], use_cache=True).past_key_values
        for column in (4, 5):
            model(
                ids[:, column : column + 1],
                past_key_values=cache,
                position_ids=torch.tensor([[column]]),
                use_cache=True,
            )
    expected, _ = architectures.Oracle(model, manager).forward(ids[0].tolist(), None)
    result = run.result(ids)
    assert result.position.tolist() == list(range(6)) and result.coverage.n_unseen == 0
    for i in range(6):
        at = torch.as_tensor(result.scores.active(i))
        assert (torch.as_tensor(result.scores.active_scores(i)) - expected[i, at]).abs().max() < 1e-5


def test_concurrent_generations_are_refused_if_modules_hold_the_state(tmp_path):
    model, ids = host_of("recurrent_gemma"), torch.tensor([[1, 44, 3, 17, 8]])
    refusals, inside = [], threading.Event()

    class Beside(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if not inside.is_set():
                inside.set()
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            return scores

    def other():
        try:
            model.generate(ids + 1, max_new_tokens=2, do_sample=False)
        except UnsupportedDecoding as refusal:
            refusals.append(str(refusal))

    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    alone = model.generate(ids, **options)
    mixed = model.generate(ids, **options, logits_processor=LogitsProcessorList([Beside()]))
    assert (
        not refusals and (torch.stack(alone.logits[:2]) - torch.stack(mixed.logits[:2])).abs().max() > 0.1
    )  # the bare host is wrong
    inside.clear()
    with manager_of(model, tmp_path).attach(model) as run:
        watched = model.generate(ids, **options, logits_processor=LogitsProcessorList([Beside()]))
    assert (
        len(refusals) == 1 and "inside its modules" in refusals[0] and torch.equal(watched.sequences, alone.sequences)
    )
    assert run.result(watched.sequences).coverage.n_unseen == 1


@pytest.mark.parametrize("name", ["cpmant", "hy_v4", "qwen4_exp_text", "gemma3n_text"])
def test_sites_without_hidden_states_are_refused_when_attached(name, tmp_path):
    model = host_of(name)
    manager, before = manager_of(model, tmp_path), n_hooks(model)
    with pytest.raises(
        UnsupportedModel, match=r"resid_post\.0 of \w+ is not a stream of hidden states.*Choose another site"
    ):
        manager.attach(model)
    assert n_hooks(model) == before


# Of decoders, and of encoders alone: these add the stream inside of what they call their attention.
WITH_STREAM = [
    "bloom",
    "bert",
    "roberta",
    "roberta-prelayernorm",
    "big_bird",
    "git",
    "xlm-roberta-xl",
    "MPNet",
    "ConvBert",
]
WITHOUT = [
    "llama",
    "gpt2",
    "gpt_neox",
    "falcon",
    "phi",
    "gemma3_text",
    "olmo2",
    "mixtral",
    "jamba",
    "bart",
    "DistilBert",
]


def any_host(name):
    if name in architectures.architectures():
        return host_of(name)
    config = shrunken(getattr(transformers, f"{name}Config")())
    return getattr(transformers, f"{name}ForMaskedLM")(config).eval()


@pytest.mark.parametrize("name", [*WITH_STREAM, *WITHOUT])
def test_block_output_is_read_only_if_it_excludes_the_residual_stream(name):
    """With matrices and biases of zero it gives zeros, or is refused, online and in corpora."""
    host, given = any_host(name), {}
    _, layers = find_layers(host)
    for site in (f"{kind}.{at}" for kind in ("attn_out", "mlp_out") for at in range(len(layers))):
        try:
            abilities.Abilities(host).check_streams([site])
        except UnsupportedModel as refusal:
            assert "has none of" in str(refusal) or (name in WITH_STREAM and "adds the residual stream" in str(refusal))
            with pytest.raises(UnsupportedModel):
                StateReader(host, make_tokenizer(), [site], Reading())
            continue
        block = site_module(layers, site)
        block.register_forward_hook(
            lambda module, args, out, site=site: given.update({site: (out[0] if isinstance(out, tuple) else out) * 1})
        )
        with torch.no_grad():
            for parameter_name, parameter in block.named_parameters():
                if parameter.dim() > 1 or parameter_name.endswith("bias"):
                    parameter.zero_()
    ids = torch.tensor([[1, 44, 3, 17]])
    with torch.no_grad():
        host(**({"decoder_input_ids": ids} if is_encoder_decoder(host) else {}), input_ids=ids)
    assert not any(hidden.any() for hidden in given.values())
    assert any(site.startswith("attn_out") for site in given) is (name in WITHOUT)


def test_mlp_out_is_refused_if_the_layer_sums_several_parts():
    """Two parts are told by experts, by their names, or as modules of one class; a mixer beside one is none."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "global_head_dim": 8, "num_global_key_value_heads": 1}
    moe = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.AutoConfig.for_model(
        "gemma4_text", **sizes, **heads, **moe, layer_types=kinds, hidden_size_per_layer_input=0
    )
    host = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match=r"has experts besides mlp and adds up .*\. Read resid_post\.1"):
        abilities.Abilities(host).check_streams(["resid_post.0", "mlp_out.1"])
    with pytest.raises(UnsupportedModel, match="has experts besides mlp"):
        StateReader(host, make_tokenizer(), ["mlp_out.0"], Reading())
    abilities.Abilities(host).check_streams(["resid_post.1", "attn_out.1"])
    for name, second in (("feed_forward", torch.nn.Linear(16, 16)), ("twin", "mlp"), ("twins", "mlps")):
        host = host_of("llama")
        mlp = host.model.layers[0].mlp
        part = {"mlp": mlp, "mlps": torch.nn.ModuleList([mlp])}[second] if isinstance(second, str) else second
        host.model.layers[0].add_module(name, copy.deepcopy(part))
        with pytest.raises(UnsupportedModel, match=f"has {name} besides mlp"):
            abilities.Abilities(host).check_streams(["mlp_out.0"])
        abilities.Abilities(host).check_streams(["mlp_out.1"])


def test_capability_check_leaves_no_trace_and_ignores_its_surroundings(monkeypatch):
    model = host_of("recurrent_gemma")

    def states():
        return [module.conv1d_state for module in model.modules() if hasattr(module, "conv1d_state")]

    model(torch.tensor([[1, 5, 9]]), use_cache=True)
    before, kept = torch.random.get_rng_state(), [state.clone() for state in states()]
    monkeypatch.setattr(abilities, "_BY_KIND", {})
    monkeypatch.setattr(abilities, "_BY_MODEL", type(abilities._BY_MODEL)())
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.device("meta"):
            tried = abilities.Abilities(model)
            tried.check_generate({"steps", "no cache"})
            with pytest.raises(UnsupportedDecoding, match="use_cache=False, or num_beams=1"):
                tried.check_generate({"steps", "beams"})
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(torch.random.get_rng_state(), before) and torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(states(), kept, strict=True))


def draws():
    return [
        torch.rand(4),
        torch.randn(4),
        torch.randint(9, (4,)),
        torch.randperm(9),
        torch.empty(4).normal_(),
        torch.empty(4).uniform_(),
        torch.bernoulli(torch.full((4,), 0.5)),
    ]


def test_random_draws_of_a_twin_do_not_depend_on_the_global_state():
    before = torch.random.get_rng_state()
    with own_randomness(3):
        first = draws()
    with own_randomness(3):
        second = draws()
    assert torch.equal(torch.random.get_rng_state(), before) and all(map(torch.equal, first, second))
    assert not torch.equal(first[0], torch.rand(4))


def test_stateful_model_without_a_twin_is_refused_untested_modes(monkeypatch):
    model = host_of("mamba2")
    monkeypatch.setattr(abilities, "shrunken", lambda *given: 1 / 0)
    monkeypatch.setattr(abilities, "_BY_MODEL", type(abilities._BY_MODEL)())
    tried = abilities.Abilities(model)
    tried.check_generate({"steps", "padded"})
    tried.check_streams(["resid_post.0"])
    with pytest.raises(UnsupportedDecoding, match="no tiny copy of it could be made"):
        tried.check_generate({"steps", "beams"})
    abilities.Abilities(host_of("llama")).check_generate({"steps", "beams", "turn"})


def test_small_configuration_has_every_kind_of_layer():
    from transformers import Gemma3TextConfig, JambaConfig, Zamba2Config

    small = shrunken(Gemma3TextConfig())
    assert (
        set(small.layer_types) == {"sliding_attention", "full_attention"}
        and small.hidden_size == 32
        and small.vocab_size == 97
    )
    assert (
        len(small.layer_types) == small.num_hidden_layers == 3
        and small.sliding_window == 64
        and shrunken(small, 8).sliding_window == 8
    )
    assert {"linear_attention", "hybrid"} == set(shrunken(Zamba2Config()).layers_block_type)
    assert set(JambaConfig().layers_block_type) == set(shrunken(JambaConfig()).layers_block_type)
    model = twin(type(host_of("jamba")), shrunken(JambaConfig()))
    assert sum(p.numel() for p in model.parameters()) < 200_000 and all(
        p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters()
    )


@pytest.mark.parametrize("heads", [(2, 8, 16), (4, 16, 16), (1, 4, 16)], ids="{0[0]} times".format)
def test_small_mamba2_configuration_has_matching_heads(heads):
    expand, n_heads, head = heads
    config = transformers.Mamba2Config(
        hidden_size=64, expand=expand, num_heads=n_heads, head_dim=head, n_groups=1, state_size=8
    )
    small = shrunken(config)
    assert small.hidden_size == 32 and small.expand == expand and small.num_heads * small.head_dim == 32 * expand
    twin(transformers.Mamba2ForCausalLM, small)


def test_error_beyond_a_window_is_refused_if_the_window_will_be_crossed(tmp_path):
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 97, "initializer_range": 0.5}
    model = GPTNeoForCausalLM(GPTNeoConfig(attention_types=[[["global", "local"], 1]], window_size=16, **sizes)).eval()
    manager, ids = manager_of(model, tmp_path), torch.tensor([[1, 44, 3, 17, 8]])
    options = {"cache_implementation": "static", "do_sample": False, "eos_token_id": 97, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for n_new in (3, 16):
        bare = model.generate(ids, max_new_tokens=n_new, **options)
        truth = model(bare.sequences[:, :-1], use_cache=False).logits[0, -n_new:]
        wrong = (torch.cat(bare.logits) - truth).abs().max() > 1e-2
        assert wrong == (n_new == 16)
        with manager.attach(model):
            if wrong:
                with pytest.raises(UnsupportedDecoding, match="a static cache is not supported for GPTNeoForCausalLM"):
                    model.generate(ids, max_new_tokens=n_new, **options)
            else:
                model.generate(ids, max_new_tokens=n_new, **options)


def test_empty_cache_is_not_a_second_turn(tmp_path):
    model, ids = host_of("jamba"), torch.tensor([[1, 44, 3, 17, 8]])
    with manager_of(model, tmp_path).attach(model) as run:
        out = model.generate(ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=3, do_sample=False)
    assert run.result(out).coverage.n_unseen == 1


def test_model_with_its_own_generate_is_refused_by_name(tmp_path):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in LAYER.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(vocab_size=97, d_model=16, num_mel_bins=8, max_source_positions=50, **sizes, **tokens)
    model = WhisperForConditionalGeneration(config).eval()
    with (
        manager_of(model, tmp_path).attach(model),
        pytest.raises(UnsupportedDecoding, match="WhisperForConditionalGeneration has its own generate"),
    ):
        model.generate(torch.randn(1, 8, 100), max_new_tokens=3)


def test_model_that_depends_on_earlier_inputs_is_refused_for_corpora():
    from transformers import BigBirdConfig, BigBirdForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    for kind in ("block_sparse", "original_full"):
        config = BigBirdConfig(vocab_size=97, attention_type=kind, block_size=4, initializer_range=0.5, **sizes)
        model = BigBirdForCausalLM(config).eval()
        long = torch.randint(5, 90, (1, 64))
        first, _, again = (model(ids, use_cache=False).logits for ids in (long, long[:, :5], long))
        if kind == "block_sparse":
            assert (first - again).abs().max() > 1e-2
            with pytest.raises(UnsupportedModel, match="depends on what it read before"):
                StateReader(model, make_tokenizer(), ["resid_post.0"], Reading())
        else:
            assert torch.equal(first, again)
            StateReader(model, make_tokenizer(), ["resid_post.0"], Reading())


def test_padding_is_refused_if_its_embedding_matters():
    """A fresh host's is zero, and hides what padding does; that of a trained one need not be."""
    for name, wrong in (("recurrent_gemma", True), ("mamba", False), ("llama", False)):
        model = host_of(name)
        with torch.no_grad():
            model.get_input_embeddings().weight[0].normal_(0, 0.3)
        ids, options = torch.tensor([[1, 44, 3, 17, 8]]), {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
        options |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": 97}
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
        alone, beside = (model.generate(x, attention_mask=(x != 0).long(), **options).logits[0] for x in (ids, padded))
        assert ((alone - beside).abs().max() / alone.abs().max() > 1e-2) == wrong, name
        if wrong:
            with pytest.raises(UnsupportedDecoding, match="a left-padded batch is not supported for Recurrent"):
                abilities.Abilities(model).check_generate({"padded"})
        else:
            abilities.Abilities(model).check_generate({"padded"})


@pytest.mark.parametrize("use_bias", [False, True])
def test_padding_is_refused_if_a_bias_lets_it_into_the_convolution(use_bias):
    """It shows in the prompt alone: what is generated comes after as many tokens as the convolution remembers."""
    config = transformers.Mamba2Config(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=2, state_size=6,
        pad_token_id=0, eos_token_id=None, use_bias=use_bias,
    )  # fmt: skip
    with own_randomness(0), torch.no_grad():
        model = transformers.Mamba2ForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.5)
            elif "in_proj" in name:
                weight.mul_(8)
        ids = torch.tensor([[11, 7, 23]])
        padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
        alone, beside = (model(x, attention_mask=(x != 0).long()).logits[0, -3:] for x in (ids, padded))
    assert ((alone - beside).abs().max() > 0.05 * alone.abs().max()) == use_bias
    if use_bias:
        with pytest.raises(UnsupportedDecoding, match="padding before its tokens is not supported for Mamba2"):
            abilities.Abilities(model).check_generate({"padded"})
    else:
        abilities.Abilities(model).check_generate({"padded"})


def test_padding_is_refused_even_if_outputs_depend_on_later_tokens():
    with pytest.raises(UnsupportedDecoding, match="left-padded batch is not supported for Doge"):
        abilities.Abilities(host_of("doge")).check_generate({"padded"}, 30)
    abilities.Abilities(host_of("doge")).check_generate({"steps", "beams"}, 30)  # as it runs


def test_sparse_attention_is_tested_beyond_its_number_of_tokens():
    """With two heads many choices are ties, which fall out by how long the row is."""
    config = host_of("deepseek_v32").config
    config.index_topk, config.index_n_heads = 16, 2
    model = twin(transformers.DeepseekV32ForCausalLM, config)
    short, long = torch.randint(5, 90, (1, 40)), torch.randint(5, 90, (1, 60))
    both = torch.cat([torch.cat([short, torch.zeros_like(long[:, :20])], dim=1), long])
    mask = torch.ones_like(both)
    mask[0, 40:] = 0
    alone = model(short, attention_mask=torch.ones_like(short), use_cache=False).logits[0]
    beside = model(both, attention_mask=mask, use_cache=False).logits[0, :40]
    assert (alone - beside).abs().max() > 1e-2
    assert abilities.Abilities(model).takes_padding(12) and not abilities.Abilities(model).takes_padding(40)


def test_decoder_prompt_padding_is_refused_if_the_model_counts_it(tmp_path):
    prompt = {"decoder_input_ids": torch.tensor([[0, 0, 9, 8], [3, 4, 9, 8]]), "max_new_tokens": 2, "do_sample": False}
    prompt["decoder_attention_mask"] = (prompt["decoder_input_ids"] != 0).long()
    ids = torch.tensor([[1, 44, 3, 17, 8], [5, 9, 13, 7, 21]])
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in LAYER.items()}
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=97, d_model=16, **sizes)).eval()
    with (
        manager_of(bart, tmp_path / "bart").attach(bart),
        pytest.raises(UnsupportedDecoding, match="decoder_input_ids is not supported for Bart"),
    ):
        bart.generate(ids, **prompt)
    t5 = host_of("t5")  # by relative positions: those of what comes after the padding
    with manager_of(t5, tmp_path / "t5").attach(t5):
        t5.generate(ids, decoder_start_token_id=0, **prompt)
        with pytest.raises(UnsupportedDecoding, match="masked columns between decoder_input_ids"):
            t5.generate(ids, decoder_start_token_id=1, **prompt)


LAYER = {"layers": 2, "attention_heads": 2, "ffn_dim": 16}

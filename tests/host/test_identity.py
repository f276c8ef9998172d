"""Whether a host is what it was, and the one that a pack was made on: weights, settings, and what is on it beside, by
value and not by name.
"""

import copy
import warnings

import numpy as np
import peft
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    RobertaConfig,
    RobertaForCausalLM,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    XGLMConfig,
    XGLMForCausalLM,
)

from conftest import make_model, make_pack
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.ltm import LtmConfig, LtmForCausalLM, attach_memory
from probemon.errors import HostMismatch
from probemon.host import fingerprint as fingerprints
from probemon.host.changes import HostMarks
from probemon.host.compatibility import check_host, host_problems
from probemon.host.fingerprint import fingerprint
from probemon.host.identity import changed, host_identity, stated_host
from probemon.host.model import unwrap
from probemon.packs.group import PackGroup

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def filled(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def lora(seed):
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    filled([p for p in model.parameters() if p.requires_grad], seed)
    return model, model


def bem(seed):
    model = make_model()
    on = attach_bem(model, BemConfig(rank=2, sites=("o",)))
    filled(on.parameters(), seed)
    return model, on


def memory(seed):
    model = make_model()
    on = attach_memory(model, layer=0, slots=4, segment=3)
    filled(on.memory.parameters(), seed)
    return model, on


@pytest.mark.parametrize("put_on", [lora, bem, memory])
def test_another_adapter_of_the_same_name_is_another_host(put_on):
    (first, _on), (same, _same), (other, _other) = put_on(1), put_on(1), put_on(2)
    assert host_identity(first) == host_identity(same)
    [difference] = changed(host_identity(first), host_identity(other))
    assert difference.startswith("the weights of its adapters were adapter-sums:")
    [adapters] = changed(host_identity(make_model()), host_identity(first))
    assert adapters.startswith("its adapters were none, now ")


def of_settings(config):
    host = make_model()
    torch.manual_seed(1)
    return peft.get_peft_model(host, config).eval()


TARGETS = {"target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        tuple(peft.FourierFTConfig(n_frequency=20, scaling=scaling, **TARGETS) for scaling in (100.0, 900.0)),
        tuple(peft.FourierFTConfig(n_frequency=20, random_loc_seed=seed, **TARGETS) for seed in (1, 2)),
        tuple(peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=8, topk=k, **TARGETS) for k in (2, 4)),
        tuple(peft.HRAConfig(r=4, apply_GS=gram, **TARGETS) for gram in (False, True)),
        tuple(peft.LoraConfig(r=4, lora_alpha=alpha, init_lora_weights=False, **TARGETS) for alpha in (4, 32)),
        tuple(peft.LoraConfig(r=4, trainable_token_indices=rows, **TARGETS) for rows in ([3, 5], [7, 9])),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by an older name
def test_an_adapter_of_the_same_tensors_and_other_settings_is_another(one, other, tmp_path):
    """Of seeds and scales no tensor tells. An adapter that is saved and loaded is the same."""
    first, second = of_settings(one), of_settings(other)
    tensors = dict(first.named_parameters())
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor) * 0.2)
        for name, tensor in second.named_parameters():
            tensor.copy_(tensors[name])
    assert changed(host_identity(first), host_identity(second))
    first.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_model(), tmp_path).eval()
    assert not changed(host_identity(first), host_identity(again))
    assert stated_host(first, "m") == stated_host(again, "m") != stated_host(second, "m")


def test_adapters_that_are_off_and_another_dtype_do_not_count():
    model, _ = lora(1)
    before = host_identity(model)
    assert host_identity(unwrap(model)) == before
    model.add_adapter("beside", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    assert host_identity(model) == before
    half = host_identity(model.to(torch.bfloat16))
    assert changed(before, half) == ["its dtype was float32, now bfloat16"]
    model.set_adapter("beside")
    assert host_identity(model)["adapter_weights"] != before["adapter_weights"]


def test_a_memory_that_adds_nothing_or_is_off_is_no_part_of_the_host():
    bare = host_identity(make_model())
    model, on = memory(1)
    with on:
        assert host_identity(model) != bare
        on.memory.closed = True
        assert host_identity(model) == bare
    assert host_identity(model) == bare


def test_a_memory_of_the_hosts_own_that_is_closed_makes_another_host():
    torch.manual_seed(0)
    model = LtmForCausalLM(LtmConfig()).eval()
    marks, before = HostMarks(model), host_identity(model)
    mark = marks.now()
    assert not marks.now().differs(mark)
    [held] = model.memories.values()
    held.closed = True
    assert marks.now().differs(mark)
    assert changed(before, host_identity(model)) == ["its adapters were none, now closed memory"]


@pytest.mark.parametrize("put_on", [lora, bem, memory])
def test_a_pack_tells_another_adapter_of_the_same_name(put_on, tmp_path):
    (first, _on), (same, _same), (other, _other) = put_on(1), put_on(1), put_on(2)
    pack = make_pack(tmp_path / "pack", make_model(), host=stated_host(first, "tiny"))
    assert host_problems(pack, same, strict=True) == host_problems(pack, first, strict=True) == []
    with pytest.raises(HostMismatch, match=r"others of these names \(adapter-sums:"):
        check_host(pack, other, strict=True)
    with pytest.warns(UserWarning, match="others of these names"):
        check_host(pack, other, strict=False)
    with pytest.raises(HostMismatch, match=r"adapters \[\] are active"):
        check_host(pack, make_model(), strict=True)
    named = {key: value for key, value in pack.manifest["host"].items() if key != "adapter_weights"}
    older = make_pack(tmp_path / "older", make_model(), host=named)
    assert host_problems(older, other, strict=False) == []
    [problem] = host_problems(older, other, strict=True)
    assert "records no weights of the adapters" in problem


def with_settings(change):
    config = make_model().config
    change(config)
    model = type(make_model())(config).eval()
    model.load_state_dict(make_model().state_dict())
    return model


@pytest.mark.parametrize(
    "name, change",
    [
        ("rope_parameters.rope_theta is 1000000.0", lambda config: config.rope_parameters.update(rope_theta=1e6)),
        ("rope_parameters.attention_factor is 2.0", lambda config: config.rope_parameters.update(attention_factor=2.0)),
        ("rms_norm_eps is 0.1", lambda config: setattr(config, "rms_norm_eps", 0.1)),
    ],
)
def test_a_pack_tells_other_settings_of_the_same_weights(name, change, tmp_path):
    model, other = make_model(), with_settings(change)
    pack = make_pack(tmp_path / "pack", model, host=stated_host(model, "tiny"))
    with pytest.raises(HostMismatch, match=name):
        check_host(pack, other, strict=True)
    with pytest.warns(UserWarning, match=name):
        check_host(pack, other, strict=False)
    model.config.pad_token_id, model.config.use_cache = 9, False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_host(pack, model.to(torch.bfloat16), strict=True)
    named = {key: value for key, value in pack.manifest["host"].items() if key != "settings"}
    older = make_pack(tmp_path / "older", model, host=named)
    assert host_problems(older, other, strict=False) == []
    with pytest.raises(HostMismatch, match="records no settings of its host"):
        check_host(older, other, strict=True)


NAMES = ["tiny-llama", "org/Tiny-Llama", "/models/tiny-llama/", "/hub/models--org--tiny-llama/snapshots/0a1b", ""]


@pytest.mark.parametrize("called, same", [*((name, True) for name in NAMES), ("org/other", False), ("/m/base", False)])
def test_a_pack_of_unknown_weights_is_for_the_model_that_it_names(called, same, tmp_path):
    model = make_model()
    model.config._name_or_path = model.name_or_path = called
    pack = make_pack(tmp_path / "pack", model, host={"model_id": "my-org/tiny-llama"})
    problems = host_problems(pack, model, strict=False)
    assert bool(problems) is not same and all(f"this model is called {called}:" in problem for problem in problems)
    with pytest.raises(HostMismatch, match="records no fingerprint" if same else "this model is called"):
        check_host(pack, model, strict=True)


def test_every_value_of_a_host_is_in_its_fingerprint():
    """One value of each tensor at a time, anywhere in it; two rows that change places; codes that are no parameters."""
    model, generator = make_model(), torch.Generator().manual_seed(0)
    model.model.layers[1].register_buffer("codes", torch.arange(40, dtype=torch.int32).view(5, 8) << 20)
    before = fingerprint(model)
    assert fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == before
    tensors = [*model.model.parameters(), model.model.layers[1].codes]
    seen = {before}
    for tensor in tensors:
        flat = tensor.data.view(-1)
        for at in torch.randint(len(flat), (5,), generator=generator).tolist():
            was = flat[at].clone()
            flat[at] = was + 1
            seen.add(fingerprint(model))
            flat[at] = was
    assert len(seen) > 4 * len(tensors) and fingerprint(model) == before
    weight = model.model.embed_tokens.weight.data
    weight[[3, 4]] = weight[[4, 3]]
    assert fingerprint(model) not in seen


def bart():
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=61, **sizes, **heads)
    torch.manual_seed(0)
    return BartForConditionalGeneration(config).eval()


def t5gemma(**of_encoder):
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    module = {**sizes, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder={**module, **of_encoder}, decoder=module)).eval()


@pytest.mark.parametrize("make", [bart, t5gemma])
def test_an_encoder_is_of_its_host_and_heads_are_not(make, tmp_path):
    model, other = make(), make()
    base, encoder = model.base_model, other.get_encoder()
    pack = make_pack(tmp_path / "pack", model, host=stated_host(model, "tiny"))
    assert fingerprint(model) == fingerprint(base) == fingerprint(other.to(torch.bfloat16))
    assert host_problems(pack, other, strict=True) == []
    lora = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    assert fingerprint(lora) == fingerprint(model)
    with torch.no_grad():
        next(p for p in encoder.layers.parameters() if p.dim() == 2)[1, 2] += 1
    with pytest.raises(HostMismatch, match="weights are others"):
        check_host(pack, other, strict=True)


def test_settings_of_an_encoder_that_has_a_configuration_of_its_own_are_of_its_host(tmp_path):
    model, other = t5gemma(), t5gemma(rms_norm_eps=0.1)
    pack = make_pack(tmp_path / "pack", model, host=stated_host(model, "tiny"))
    with pytest.raises(HostMismatch, match=r"encoder.rms_norm_eps is 0.1"):
        check_host(pack, other, strict=True)
    assert changed(host_identity(model), host_identity(other))


def roberta(padding):
    torch.manual_seed(0)
    return RobertaForCausalLM(
        RobertaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            is_decoder=True,
            pad_token_id=padding,
        )
    ).eval()


def xglm(padding):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2}
    return XGLMForCausalLM(XGLMConfig(**sizes, pad_token_id=padding)).eval()


@pytest.mark.parametrize("make", [roberta, xglm])
def test_where_a_host_counts_positions_from_is_of_it(make, tmp_path):
    """What the configuration calls padding once a host is made changes nothing."""
    model, other = make(1), make(2)
    other.load_state_dict(model.state_dict())
    pack = make_pack(tmp_path / "pack", model, host=stated_host(model, "tiny"))
    model.config.pad_token_id = 2
    assert host_problems(pack, model, strict=True) == []
    ids = torch.tensor([[7, 8, 9]])
    assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-3)
    [problem] = host_problems(pack, other, strict=True)
    assert "padding_idx is [2] and was [1]" in problem


def nllb_moe(**settings):
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_experts": 4, "vocab_size": 61}
    torch.manual_seed(0)
    return NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes, **heads, **settings)).eval()


@pytest.mark.parametrize(
    "changed_setting", [{"moe_token_dropout": 0.7}, {"normalize_router_prob_before_dropping": True}]
)
def test_settings_that_are_called_like_those_of_training_count_where_states_depend_on_them(changed_setting, tmp_path):
    model, other = nllb_moe(), nllb_moe(**changed_setting)
    pack = make_pack(tmp_path / "pack", model, host=stated_host(model, "tiny"))
    [problem] = host_problems(pack, other, strict=True)
    assert next(iter(changed_setting)) in problem
    assert host_problems(pack, nllb_moe(dropout=0.7, decoder_layerdrop=0.5), strict=True) == []


def test_a_fingerprint_is_of_values_wherever_they_lie():
    """Also of a view that begins between eight bytes; against sums over a whole table, filled up, by numpy."""
    host, n = make_model().bfloat16(), 3 * 4096 // 2 + 5
    values = torch.randn(n + 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = np.zeros(4 * 4096, np.uint8)
    bits[: 2 * n] = values[1:].view(torch.uint8).numpy()
    table = bits.view(np.int64).reshape(4, 512)
    for tensor in (values[1:], values[1:].clone(), values[1:].float()):
        host.model.extra = torch.nn.Module()
        host.model.extra.register_buffer("table", tensor)
        (sums,) = [found for name, found in fingerprints._of_weights(host) if name == "extra.table"]
        assert sums == f"({n},) ".encode() + np.concatenate([table.sum(axis=0), table.sum(axis=1)]).tobytes()


def test_a_fingerprint_copies_no_weight():
    host = make_model().bfloat16()
    host.model.register_buffer("table", torch.ones((1 << 20) + 5, dtype=torch.bfloat16))
    with torch.profiler.profile(profile_memory=True) as seen:
        fingerprint(host)
    taken = max(event.cpu_memory_usage for event in seen.events())
    assert 4096 <= taken < host.model.table.nbytes / 100


def test_weights_are_read_once_for_all_packs_and_not_for_packs_that_state_none(tmp_path, monkeypatch):
    model, read = make_model(), []
    monkeypatch.setattr("probemon.host.compatibility.fingerprint", lambda host: read.append(host) or fingerprint(host))
    imported = make_pack(tmp_path / "imported", model, name="imported", host={})
    assert host_problems(imported, model, strict=False) == [] and read == []
    packs = [make_pack(tmp_path / name, model, name=name) for name in ("a", "b")]
    other = make_pack(tmp_path / "c", make_model(seed=1), name="c")
    problems = host_problems(PackGroup([*packs, imported, other]), model, strict=True)
    assert read == [model] and [problem.split()[0] for problem in problems] == ["imported", "c"]

"""A model's identity depends on the values of its weights, settings and adapters, and not on their names."""

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
from probemon.errors import ModelMismatch
from probemon.host import fingerprint as fingerprints
from probemon.host.changes import ModelMarks
from probemon.host.compatibility import check_host, model_problems
from probemon.host.fingerprint import fingerprint
from probemon.host.identity import changed, manifest_host, model_identity
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
def test_adapter_with_other_weights_changes_the_identity(put_on):
    (first, _on), (same, _same), (other, _other) = put_on(1), put_on(1), put_on(2)
    assert model_identity(first) == model_identity(same)
    [difference] = changed(model_identity(first), model_identity(other))
    assert difference.startswith("the weights of its adapters were adapter-sums:")
    [adapters] = changed(model_identity(make_model()), model_identity(first))
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
def test_adapter_with_other_settings_changes_the_identity(one, other, tmp_path):
    """Of seeds and scales no tensor tells. An adapter that is saved and loaded is the same."""
    first, second = of_settings(one), of_settings(other)
    tensors = dict(first.named_parameters())
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor) * 0.2)
        for name, tensor in second.named_parameters():
            tensor.copy_(tensors[name])
    assert changed(model_identity(first), model_identity(second))
    first.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_model(), tmp_path).eval()
    assert not changed(model_identity(first), model_identity(again))
    assert manifest_host(first, "m") == manifest_host(again, "m") != manifest_host(second, "m")


def test_inactive_adapters_do_not_change_the_identity():
    model, _ = lora(1)
    before = model_identity(model)
    assert model_identity(unwrap(model)) == before
    model.add_adapter("beside", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    assert model_identity(model) == before
    half = model_identity(model.to(torch.bfloat16))
    assert changed(before, half) == ["its dtype was float32, now bfloat16"]
    model.set_adapter("beside")
    assert model_identity(model)["adapter_weights"] != before["adapter_weights"]


def test_inactive_memory_does_not_change_the_identity():
    bare = model_identity(make_model())
    model, on = memory(1)
    with on:
        assert model_identity(model) != bare
        on.memory.closed = True
        assert model_identity(model) == bare
    assert model_identity(model) == bare


def test_closing_a_built_in_memory_changes_the_identity():
    torch.manual_seed(0)
    model = LtmForCausalLM(LtmConfig()).eval()
    marks, before = ModelMarks(model), model_identity(model)
    mark = marks.now()
    assert not marks.now().differs(mark)
    [held] = model.memories.values()
    held.closed = True
    assert marks.now().differs(mark)
    assert changed(before, model_identity(model)) == ["its adapters were none, now closed memory"]


@pytest.mark.parametrize("put_on", [lora, bem, memory])
def test_pack_detects_another_adapter_of_the_same_name(put_on, tmp_path):
    (first, _on), (same, _same), (other, _other) = put_on(1), put_on(1), put_on(2)
    pack = make_pack(tmp_path / "pack", make_model(), host=manifest_host(first, "tiny"))
    assert model_problems(pack, same, strict=True) == model_problems(pack, first, strict=True) == []
    with pytest.raises(ModelMismatch, match=r"others of these names \(adapter-sums:"):
        check_host(pack, other, strict=True)
    with pytest.warns(UserWarning, match="others of these names"):
        check_host(pack, other, strict=False)
    with pytest.raises(ModelMismatch, match=r"adapters \[\] are active"):
        check_host(pack, make_model(), strict=True)
    named = {key: value for key, value in pack.manifest["host"].items() if key != "adapter_weights"}
    older = make_pack(tmp_path / "older", make_model(), host=named)
    assert model_problems(older, other, strict=False) == []
    [problem] = model_problems(older, other, strict=True)
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
def test_pack_detects_other_settings_with_the_same_weights(name, change, tmp_path):
    model, other = make_model(), with_settings(change)
    pack = make_pack(tmp_path / "pack", model, host=manifest_host(model, "tiny"))
    with pytest.raises(ModelMismatch, match=name):
        check_host(pack, other, strict=True)
    with pytest.warns(UserWarning, match=name):
        check_host(pack, other, strict=False)
    model.config.pad_token_id, model.config.use_cache = 9, False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_host(pack, model.to(torch.bfloat16), strict=True)
    named = {key: value for key, value in pack.manifest["host"].items() if key != "settings"}
    older = make_pack(tmp_path / "older", model, host=named)
    assert model_problems(older, other, strict=False) == []
    with pytest.raises(ModelMismatch, match="records no settings of its model"):
        check_host(older, other, strict=True)


NAMES = ["tiny-llama", "org/Tiny-Llama", "/models/tiny-llama/", "/hub/models--org--tiny-llama/snapshots/0a1b", ""]


@pytest.mark.parametrize("called, same", [*((name, True) for name in NAMES), ("org/other", False), ("/m/base", False)])
def test_pack_without_a_fingerprint_checks_the_models_name(called, same, tmp_path):
    model = make_model()
    model.config._name_or_path = model.name_or_path = called
    pack = make_pack(tmp_path / "pack", model, host={"model_id": "my-org/tiny-llama"})
    problems = model_problems(pack, model, strict=False)
    assert bool(problems) is not same and all(f"this model is called {called}:" in problem for problem in problems)
    with pytest.raises(ModelMismatch, match="records no fingerprint" if same else "this model is called"):
        check_host(pack, model, strict=True)


def test_every_weight_value_changes_the_fingerprint():
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
def test_fingerprint_includes_the_encoder_and_not_the_head(make, tmp_path):
    model, other = make(), make()
    base, encoder = model.base_model, other.get_encoder()
    pack = make_pack(tmp_path / "pack", model, host=manifest_host(model, "tiny"))
    assert fingerprint(model) == fingerprint(base) == fingerprint(other.to(torch.bfloat16))
    assert model_problems(pack, other, strict=True) == []
    lora = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    assert fingerprint(lora) == fingerprint(model)
    with torch.no_grad():
        next(p for p in encoder.layers.parameters() if p.dim() == 2)[1, 2] += 1
    with pytest.raises(ModelMismatch, match="weights are others"):
        check_host(pack, other, strict=True)


def test_settings_of_an_encoder_configuration_change_the_identity(tmp_path):
    model, other = t5gemma(), t5gemma(rms_norm_eps=0.1)
    pack = make_pack(tmp_path / "pack", model, host=manifest_host(model, "tiny"))
    with pytest.raises(ModelMismatch, match=r"encoder.rms_norm_eps is 0.1"):
        check_host(pack, other, strict=True)
    assert changed(model_identity(model), model_identity(other))


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
def test_position_offset_of_a_model_is_part_of_its_identity(make, tmp_path):
    """What the configuration calls padding once a host is made changes nothing."""
    model, other = make(1), make(2)
    other.load_state_dict(model.state_dict())
    pack = make_pack(tmp_path / "pack", model, host=manifest_host(model, "tiny"))
    model.config.pad_token_id = 2
    assert model_problems(pack, model, strict=True) == []
    ids = torch.tensor([[7, 8, 9]])
    assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-3)
    [problem] = model_problems(pack, other, strict=True)
    assert "padding_idx is [2] and was [1]" in problem


def nllb_moe(**settings):
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_experts": 4, "vocab_size": 61}
    torch.manual_seed(0)
    return NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes, **heads, **settings)).eval()


@pytest.mark.parametrize(
    "changed_setting", [{"moe_token_dropout": 0.7}, {"normalize_router_prob_before_dropping": True}]
)
def test_settings_named_like_training_count_if_states_depend_on_them(changed_setting, tmp_path):
    model, other = nllb_moe(), nllb_moe(**changed_setting)
    pack = make_pack(tmp_path / "pack", model, host=manifest_host(model, "tiny"))
    [problem] = model_problems(pack, other, strict=True)
    assert next(iter(changed_setting)) in problem
    assert model_problems(pack, nllb_moe(dropout=0.7, decoder_layerdrop=0.5), strict=True) == []


def test_fingerprint_depends_on_values_not_on_storage():
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


def test_fingerprint_copies_no_weight():
    host = make_model().bfloat16()
    host.model.register_buffer("table", torch.ones((1 << 20) + 5, dtype=torch.bfloat16))
    with torch.profiler.profile(profile_memory=True) as seen:
        fingerprint(host)
    taken = max(event.cpu_memory_usage for event in seen.events())
    assert 4096 <= taken < host.model.table.nbytes / 100


def test_weights_are_read_once_for_all_packs_that_need_them(tmp_path, monkeypatch):
    model, read = make_model(), []
    monkeypatch.setattr("probemon.host.compatibility.fingerprint", lambda host: read.append(host) or fingerprint(host))
    imported = make_pack(tmp_path / "imported", model, name="imported", host={})
    assert model_problems(imported, model, strict=False) == [] and read == []
    packs = [make_pack(tmp_path / name, model, name=name) for name in ("a", "b")]
    other = make_pack(tmp_path / "c", make_model(seed=1), name="c")
    problems = model_problems(PackGroup([*packs, imported, other]), model, strict=True)
    assert read == [model] and [problem.split()[0] for problem in problems] == ["imported", "c"]

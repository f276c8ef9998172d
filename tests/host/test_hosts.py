"""Models other than plain decoders: encoder-decoders, wrappers, adapters, and layers in unusual places."""

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from arrangements import manager_for
from conftest import LAYERS, PAD, make_model
from oracle import check
from probemon.errors import UnsupportedDecoding, UnsupportedModel
from probemon.host.fingerprint import fingerprint
from probemon.host.model import find_layers, model_state, unwrap

ENCODED = torch.tensor([[1, 5, 9, 13, 7], [1, 44, 3, PAD, PAD]])
GREEDY = {
    "max_new_tokens": 6,
    "do_sample": False,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "attention_mask": (ENCODED != PAD).long(),
}


@pytest.fixture(scope="module")
def t5():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": 2,
        "initializer_factor": 0.5,
    }
    return AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", decoder_start_token_id=60, pad_token_id=PAD, eos_token_id=2, **sizes)
    ).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"num_beams": 2},
        {"decoder_input_ids": [[30, 31], [32, 33]]},
        {"decoder_input_ids": [[60, 31], [60, 33]]},
    ],
    ids=str,
)
def test_decoder_tokens_of_an_encoder_decoder_are_scored_exactly(t5, options, tmp_path):
    manager = manager_for(t5, tmp_path)
    given = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in options.items()}
    with manager.attach(t5) as run:
        out = t5.generate(ENCODED, **GREEDY, **given)
    n_prompt = {"[[30, 31], [32, 33]]": 3, "[[60, 31], [60, 33]]": 2}.get(str(options.get("decoder_input_ids")), 1)
    for row, line in enumerate(out.tolist()):
        assert line[0] == 60
        check(
            manager,
            t5,
            run.result(out),
            row,
            line,
            0,
            [(n_prompt, len(line) - n_prompt - 1)],
            ENCODED[row][ENCODED[row] != PAD].tolist(),
        )


def test_decoder_prompt_padding_follows_the_decoders_own_mask(t5, tmp_path):
    """What is padding is told by the decoder's own mask, not by the encoder's."""
    manager = manager_for(t5, tmp_path)
    ids, mask = torch.tensor([[PAD, 60, 31], [60, 32, 33]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with manager.attach(t5) as run:
        out = t5.generate(ENCODED, **GREEDY, decoder_input_ids=ids, decoder_attention_mask=mask)
    result = run.result(out)
    assert result.position[result.row == 0].tolist()[0] == 1
    for row, first in enumerate((1, 0)):
        check(
            manager,
            t5,
            result,
            row,
            out[row].tolist(),
            first,
            [(3 - first, 5)],
            ENCODED[row][ENCODED[row] != PAD].tolist(),
        )


def test_encoder_is_not_watched_and_unsupported_modes_are_refused(t5, tmp_path):
    manager = manager_for(t5, tmp_path)
    with manager.attach(t5) as run:
        t5.get_encoder()(ENCODED)
        with pytest.raises(UnsupportedDecoding, match="chunked prefill of an encoder-decoder"):
            t5.generate(ENCODED, **GREEDY, prefill_chunk_size=2)
        with pytest.raises(UnsupportedDecoding, match="DynamicCache"):
            t5.generate(ENCODED, **GREEDY, past_key_values=DynamicCache())
        out = t5.generate(ENCODED, **GREEDY, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert len(run.recordings) == 1 and run.result(out).coverage.n_unseen == 2


def test_plain_forward_of_an_encoder_decoder_is_a_document(t5, tmp_path):
    manager, ids = manager_for(t5, tmp_path), torch.tensor([[60, 31, 8, 9]])
    with manager.attach(t5) as run, torch.no_grad():
        t5(input_ids=ENCODED[:1], decoder_input_ids=ids)
    check(manager, t5, run.result(ids), 0, ids[0].tolist(), 0, [(4, 0)], ENCODED[0].tolist())


@pytest.mark.parametrize(
    "name, layers",
    [
        ("bert", "encoder.layer"),
        ("distilbert", "transformer.layer"),
        ("roberta", "encoder.layer"),
        ("t5", "block"),
        ("llama", "layers"),
    ],
)
def test_layers_are_found_in_every_architecture(name, layers):
    sizes = {
        "vocab_size": 61,
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    sizes |= {
        "distilbert": {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24},
        "t5": {"d_model": 16, "num_heads": 2, "num_decoder_layers": 4},
    }.get(name, {})
    model = AutoModel.from_config(AutoConfig.for_model(name, **sizes))
    base, found = find_layers(model)
    assert found is base.get_submodule(layers) and len(found) == 4


def test_ambiguous_layers_are_refused():
    model = make_model()
    model.model.others = nn.ModuleList([nn.Identity() for _ in range(LAYERS)])
    with pytest.raises(UnsupportedModel, match="one list of 3 layers in LlamaModel, found 2"):
        find_layers(model)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_wrappers_are_unwrapped_and_adapters_keep_the_fingerprint():
    from peft import LoraConfig, get_peft_model

    model = make_model()
    before = fingerprint(model)
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), adapter_name="one"
    )
    wrapped = torch.compile(adapted, backend="eager")
    assert unwrap(wrapped) is model and fingerprint(model) == before
    assert model_state(model).adapters == ("one",) and model_state(model).adapters_merged == ()
    adapted.merge_adapter()
    assert fingerprint(model) != before and model_state(model).adapters_merged == ("one",)


def test_offloading_keeps_the_fingerprint(tmp_path):
    from accelerate import cpu_offload

    model = make_model()
    before = fingerprint(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert fingerprint(model) == before and {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_modules_with_packed_weights_are_reported_as_quantised():
    model = make_model()
    assert model_state(model).quantisation == ""
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert model_state(quantised).quantisation == "DynamicQuantizedLinear"


class Two:
    """A host with the adapters A and B, whose targets may differ, and what it answers with each."""

    IDS = torch.tensor([[1, 44, 3, 17, 8]])

    def __init__(self, targets=(("q_proj", "v_proj"), ("q_proj", "v_proj")), **options):
        def config(targets):
            return peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, **options)

        self.model = peft.get_peft_model(make_model(), config(targets[0]), adapter_name="A").eval()
        self.model.add_adapter("B", config(targets[1]))
        for module in self.model.modules():
            if "modules_to_save" in vars(module).get("_modules", {}):
                for name, scale in (("A", 2.0), ("B", 3.0)):
                    module.modules_to_save[name].weight.data.mul_(scale)
        with self.model.disable_adapter():
            self.answers = {(): self.logits()}
        for active in (("A",), ("B",), ("A", "B")):
            if active == ("A", "B") and options.get("modules_to_save"):
                continue
            self.active(*active)
            self.answers[active] = self.logits()

    def active(self, *names):
        self.model.base_model.set_adapter(list(names))

    def merge(self, *names):
        self.model.base_model.merge_adapter(list(names))

    def unmerge(self):
        self.model.base_model.unmerge_adapter()

    def scale(self, name, value):
        for module in self.model.modules():
            if hasattr(module, "base_layer"):
                module.set_scale(name, value)

    def enable(self, on):
        for module in self.model.modules():
            if "_disable_adapters" in vars(module):
                module.enable_adapters(on)

    def logits(self):
        with torch.no_grad():
            return self.model(self.IDS).logits

    def ran(self):
        """Which adapters ran, by what they answered."""
        answer = self.logits()
        [names] = [names for names, known in self.answers.items() if torch.allclose(answer, known, atol=1e-4)]
        return names


STEPS = {
    "both": [("active", "A", "B")],
    "one of two merged": [("active", "A", "B"), ("merge", "A")],
    "the other of two merged": [("active", "A", "B"), ("merge", "B")],
    "merged while another is active": [("active", "A"), ("merge", "B")],
    "both merged": [("active", "A", "B"), ("merge", "A", "B")],
    "unmerged": [("active", "A", "B"), ("merge", "A"), ("unmerge",)],
    "merged, then another is set": [("active", "A"), ("merge", "A"), ("active", "B")],
    "merged, then disabled": [("active", "A", "B"), ("merge", "A"), ("enable", False)],
    "disabled and enabled": [("active", "B"), ("enable", False), ("enable", True)],
    "disabled": [("active", "B"), ("enable", False)],
    "not scaled any more": [("active", "A", "B"), ("scale", "A", 0.0)],
}
KINDS = {"LoRA": {}, "DoRA": {"use_dora": True}, "other targets": {"targets": (("q_proj",), ("o_proj",))}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_model_state_names_the_adapters_that_ran(options, steps):
    """The oracle is what the model answers: where some are merged, PEFT runs these alone in that layer."""
    two = Two(**options)
    for name, *arguments in steps:
        getattr(two, name)(*arguments)
    if ("scale", "A", 0.0) in steps:  # a DoRA's magnitude acts still
        state = model_state(two.model.get_base_model())
        assert state.adapters == ("A", "B") and ("A", 0.0) in state.adapter_scales
        return
    ran = two.ran()
    state = model_state(two.model.get_base_model())
    assert state.adapters == ran and {name for name, _ in state.adapter_scales} == set(ran)
    assert set(state.adapters_merged) <= set(ran) and not set(state.adapters_disabled) & set(ran)


@pytest.mark.filterwarnings("ignore")
def test_fully_saved_module_of_an_adapter_runs_along_with_a_merged_one():
    two = Two(modules_to_save=["down_proj"])
    two.active("B")
    assert (two.ran(), model_state(two.model.get_base_model()).adapters) == (("B",), ("B",))
    two.merge("A")  # B's own down_proj runs still
    state = model_state(two.model.get_base_model())
    assert state.adapters == ("A", "B") and state.adapters_merged == ("A",)


@pytest.mark.filterwarnings("ignore")
def test_deleted_weighted_or_partly_disabled_adapters_are_named_as_they_run():
    two = Two()
    two.model.add_weighted_adapter(["A", "A"], [0.5, 0.5], "W", combination_type="linear")
    two.active("W")
    assert model_state(two.model.get_base_model()).adapters == ("W",)
    two.model.delete_adapter("W")
    assert model_state(two.model.get_base_model()).adapters == two.ran() != ("W",)
    two.active("A", "B")
    layers = [module for module in two.model.modules() if hasattr(module, "base_layer")]
    layers[0].enable_adapters(False)
    state = model_state(two.model.get_base_model())
    assert state.adapters == ("A", "B") and state.adapters_disabled == ()

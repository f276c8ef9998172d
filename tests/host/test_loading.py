"""A model loaded by name has all its weights and adapters, and slow number formats are named."""

import time

import peft
import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration

from conftest import make_model
from corpora import make_tokenizer
from probemon.errors import ConfigError
from probemon.host.loading import load_model, slow_number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_number_format_that_runs_slowly_is_named_as_slow(dtype):
    def least_seconds(number):
        layer, states = nn.Linear(1024, 1024, bias=False, dtype=number), torch.randn(512, 1024).to(number)
        taken = []
        for _ in range(5):
            begin = time.process_time()  # other work on the machine falls on neither
            layer(states)
            taken.append(time.process_time() - begin)
        return min(taken)

    with torch.inference_mode():
        times = least_seconds(dtype) / least_seconds(torch.float32)
    said = slow_number(make_model().to(dtype))
    assert said == (str(dtype).removeprefix("torch.") if times > 1.7 else ""), times


def saved(folder, model):
    make_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def loaded(folder):
    return load_model(folder, "cpu", print)[0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by an older name
def test_adapter_loaded_by_name_equals_its_peft_model_or_is_refused(tmp_path):
    base, ids = saved(tmp_path / "base", make_model()), torch.tensor([[5, 6, 7, 8, 9, 10]])
    for kind, more in {
        "lora": {},
        "dora": {"use_dora": True},
        "bias": {"bias": "all"},
        "saved": {"modules_to_save": ["embed_tokens"]},
    }.items():
        model = peft.get_peft_model(
            loaded(base), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **more)
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        folder = saved(tmp_path / kind, model.eval())
        try:
            one = loaded(folder)
        except ConfigError as error:
            assert kind == "dora" and "lora_magnitude_vector" in str(error) and "random" in str(error)
            continue
        with torch.no_grad():
            truth, got = (one(ids, output_hidden_states=True).hidden_states for one in (model, one))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(truth, got, strict=True))


def test_model_with_missing_or_unused_weights_is_refused(tmp_path):
    model = make_model()
    with pytest.raises(ConfigError, match=r"lacks 1 weight of a .*, such as lm_head\.weight, which would be random"):
        loaded(saved(tmp_path / "base", model.model))
    size = {"vocab_size": 64, "d_model": 16, "max_position_embeddings": 64}
    layers = {
        f"{part}_{name}": n
        for part in ("encoder", "decoder")
        for name, n in {"layers": 1, "ffn_dim": 16, "attention_heads": 2}.items()
    }
    whole = BartForConditionalGeneration(BartConfig(**size, **layers))
    with pytest.raises(ConfigError, match="BartForConditionalGeneration, which has an encoder"):
        loaded(saved(tmp_path / "bart", whole))

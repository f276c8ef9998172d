"""Left-padded sequences have the positions of generate() in training and evaluation."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bem_oracle import VOCAB, make_host, randomise
from bem_toys import imitation_error
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.distil import distil
from probemon.adapters.bem.evaluation.held_out import measure
from probemon.adapters.bem.losses import adapter_losses, recorded_codes
from probemon.adapters.bem.training import evaluate
from probemon.errors import UnsupportedModel

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8}
IDS = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
PROMPTS = {"input_ids": IDS, "attention_mask": MASK}


def adapter(host, seed=1, **changes):
    settings = {**SMALL, "level": "token", "token_limit": 7, "auto_limits": (5, 100), "spectral_cap": None, **changes}
    return randomise(attach_bem(host, BemConfig(**settings)), seed=seed)


def other_host(kind):
    torch.manual_seed(0)
    both = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "init_std": 0.5}
    wide = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
    config = {
        "biogpt": {**both, **wide, "intermediate_size": 24, "initializer_range": 0.5},
        "opt": {**both, **wide, "word_embed_proj_dim": 16, "ffn_dim": 24},
        "xglm": {**both, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2},
    }[kind]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["biogpt", "opt", "xglm"])
def test_padded_sequences_use_the_positions_of_generate(kind):
    host = other_host(kind)
    alone = [{"input_ids": IDS[:1, 2:]}, {"input_ids": IDS[1:]}]
    labels = IDS.masked_fill(MASK == 0, -100)
    with adapter(host, sites=("o",)) as bem:
        rows = [{**row, "labels": row["input_ids"]} for row in alone]
        padded = {**PROMPTS, "labels": labels}
        assert abs(evaluate(host, [padded]) - evaluate(host, rows)) < 1e-5
        assert abs(measure(bem, [padded], [0, 1]).adapter.loss - measure(bem, rows, [0, 1]).adapter.loss) < 1e-5
        assert abs(float(adapter_losses(bem, padded).terms["lm"]) - evaluate(host, rows)) < 1e-5
        seen = [distil(bem, batches) for batches in ([PROMPTS], alone)]
        for name in seen[0].factors:
            first, second = (lora.dense(name) for lora in seen)
            assert (first - second).abs().max() < 1e-4 * first.abs().max()
        with recorded_codes(bem) as codes:
            for row in alone:
                host(**row, use_cache=False)
        experts = torch.zeros(2, 6, 3)
        experts[0, 2:], experts[1] = (code.adaptive()[0].detach() for code in codes)
        assert imitation_error(bem, [{**PROMPTS, "expert_codes": experts}]) < 1e-8


def test_decoder_without_position_ids_is_refused_with_padding(monkeypatch):
    with adapter(make_host()) as bem:
        monkeypatch.setattr(bem.host.model, "forward", lambda input_ids, attention_mask, use_cache: None)
        with pytest.raises(UnsupportedModel, match="without padding"):
            imitation_error(bem, [{**PROMPTS, "expert_codes": torch.zeros(2, 6, 3)}])

"""Tiny random hosts with routers: mixtures of experts, and a BEM adapter."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import EOS, HIDDEN, LAYERS, PAD
from probemon.adapters.bem import BemConfig, attach_bem

SIZES = {
    "vocab_size": 61, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD,
    "initializer_range": 0.5,
}  # fmt: skip
KINDS = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1],
    "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
}  # fmt: skip
PROMPT = torch.tensor([[1, 44, 3, 17, 8]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


def packed(texts):
    """Sequences `[1, L]` behind one another in a row, as a forward takes them."""
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in texts])[None]
    return {"input_ids": torch.cat(texts, dim=1), "position_ids": positions, "use_cache": False}


def make_moe(kind="mixtral", seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})).eval()


def make_bem(model, **settings):
    bem = attach_bem(
        model, BemConfig(**{"rank": 4, "chunk_tokens": 4, "prefix_tokens": 8, "width": 8, "token_limit": 9, **settings})
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in bem.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    return bem

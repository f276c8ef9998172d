"""Tiny random hosts with recurrent layers, and what they themselves keep of the tokens before."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import PAD
from probemon.host.internals import cache_among

SSM = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_expand": 2}
SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": PAD, "bos_token_id": 1,
         "eos_token_id": None}  # fmt: skip
HYBRID = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
HOSTS = {
    "mamba": {"state_size": 5, "intermediate_size": 32, "time_step_rank": 3},
    "falcon_mamba": {"state_size": 5, "intermediate_size": 32, "time_step_rank": 3},
    "mamba2": {"state_size": 6, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "falcon_h1": {**HYBRID, **SSM, "mamba_d_ssm": 32, "mamba_chunk_size": 4, "ssm_in_multiplier": 0.9,
                  "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.3]},
    "bamba": {**HYBRID, **SSM, "mamba_chunk_size": 4, "attn_layer_indices": [1]},
    "jamba": {**HYBRID, "mamba_d_state": 5, "mamba_dt_rank": 3, "attn_layer_period": 2, "attn_layer_offset": 1,
              "num_experts": 1, "num_experts_per_tok": 1, "use_mamba_kernels": False},
}  # fmt: skip
FURTHER = {
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
               "num_mem_blocks": 1, "adapter_rank": 4, "attention_head_dim": 16, "num_attention_heads": 2,
               "num_key_value_heads": 2, "intermediate_size": 24, "chunk_size": 4, "mamba_d_state": 6,
               "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 4, "mamba_headdim": 8},
    "nemotron_h": {**HYBRID, "num_hidden_layers": 4, "hybrid_override_pattern": "M*M-", "mamba_num_heads": 4,
                   "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 4},
    "granitemoehybrid": {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
                         "shared_intermediate_size": 8, "mamba_chunk_size": 4, "mamba_n_heads": 4, "mamba_d_head": 8,
                         "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_expand": 2},
}  # fmt: skip
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": PAD}


def make_host(kind, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **{**HOSTS, **FURTHER}[kind], **changes})
    host = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in host.named_parameters():
            if weight.dim() > 1 and "A_log" not in name:
                weight.normal_(0, 0.3)
    return host


def cache_in(out):
    """The cache of a forward's output, by whichever name."""
    return cache_among(out)


def cache_of(host):
    """What the host's forwards are given as their cache, newest last, and the hook that notes it."""
    given = []

    def keep(module, args, kwargs):
        cache = cache_among(kwargs)
        if cache is not None:
            given.append(cache)

    return given, host.base_model.register_forward_pre_hook(keep, with_kwargs=True)


def states_alone(host, ids, layer):
    """The state that the host itself keeps after each token of one text, `[T, K]`: one forward of each beginning."""
    states = []
    for stop in range(1, len(ids) + 1):
        with torch.no_grad():
            cache = cache_in(host(torch.tensor([ids[:stop]]), use_cache=True))
        states.append(cache.layers[layer].recurrent_states[0][0].flatten().double())
    return torch.stack(states)

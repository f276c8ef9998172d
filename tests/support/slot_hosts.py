"""Tiny random hosts with memory slots, their weights large enough that what is read shows."""

import torch

from probemon.adapters.ltm import LtmConfig, LtmForCausalLM

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "memory_dim": 8,
         "sliding_window": 5, "segment_size": 6, "memory_slots": 7, "memory_layers": [0, 1]}  # fmt: skip


def slot_host(**changes):
    """A host of these sizes, but for `changes`; the same each time."""
    torch.manual_seed(0)
    host = LtmForCausalLM(LtmConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in host.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(1.5)
    return host

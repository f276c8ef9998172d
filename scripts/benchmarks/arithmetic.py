"""Which bf16 arithmetic this machine has: processors round sums of bf16 products differently, and then the demo model
writes other words.

arithmetic()                    # "5f2c...": the same where the demo's hidden states are the same bit for bit
"""

from __future__ import annotations

import hashlib

import torch

_TEXT = "Tell me about whales and the ships that hunted them."


def arithmetic() -> str:
    """Return a name for how the demo model computes here, by one thread: the start of a hash of its hidden states."""
    from probemon import bundled

    model, tokenizer = bundled.load_bundled()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ids = tokenizer(_TEXT, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            prompt = model(ids, output_hidden_states=True)
            token = model(ids[:, :1], output_hidden_states=True)  # one token takes another way through the libraries
    finally:
        torch.set_num_threads(before)
    states = [state.view(torch.int16) for output in (prompt, token) for state in output.hidden_states]
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()[:16]

"""The trained host that comes with probemon: associative recall beyond its window, learnt by scripts/ltm_recall.py."""

from __future__ import annotations

from pathlib import Path

from probemon.adapters.ltm.model import LtmForCausalLM

RECALL = Path(__file__).parent / "recall"


def recall_host() -> LtmForCausalLM:
    """Return the trained host: pairs of key and value, then filler, then "? key", to which it answers the value.

    Tokens: 0 padding, 1 "?", 2-17 keys, 18-33 values, 34-49 filler. What it recalls, and how it was trained, is in
    docs/memory-hosts.md.
    """
    model: LtmForCausalLM = LtmForCausalLM.from_pretrained(RECALL).eval()
    return model

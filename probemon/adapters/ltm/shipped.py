"""The trained model that comes with probemon, by scripts/ltm_recall.py."""

from __future__ import annotations

from pathlib import Path

from probemon.adapters.ltm.model import LtmForCausalLM

RECALL = Path(__file__).parent / "recall"


def recall_host() -> LtmForCausalLM:
    """Return the trained model: it answers the value after key-value pairs, filler and "? key".

    See docs/memory-and-routing.md. Tokens: 0 padding, 1 "?", 2-17 keys, 18-33 values, 34-49 filler.
    """
    model: LtmForCausalLM = LtmForCausalLM.from_pretrained(RECALL).eval()
    return model

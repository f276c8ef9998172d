"""Model with long-term memory slots that can be watched.

    from probemon.adapters.ltm import LtmConfig, LtmForCausalLM, attach_memory, recall_host

    model = recall_host()                           # the trained model that comes with probemon
    out = model.generate(ids, return_dict_in_generate=True)
    model.get_memory_stats()                        # contents of its slots, and how they are read
    with attach_memory(other_model, layer=1):       # a memory on a layer of another model
        ...

Importing this registers "probemon_ltm" with `AutoModelForCausalLM` and `AutoConfig`.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from probemon.adapters.ltm.attached import AttachedMemory, attach_memory
from probemon.adapters.ltm.cache import memory_of
from probemon.adapters.ltm.config import LtmConfig
from probemon.adapters.ltm.model import LtmForCausalLM, LtmModel
from probemon.adapters.ltm.saved import export_memory, import_memory

RECALL = Path(__file__).parent / "recall"  # made by scripts/ltm_recall.py
__all__ = [
    "AttachedMemory",
    "LtmConfig",
    "LtmForCausalLM",
    "LtmModel",
    "attach_memory",
    "export_memory",
    "import_memory",
    "memory_of",
    "recall_host",
]

AutoConfig.register(LtmConfig.model_type, LtmConfig, exist_ok=True)
AutoModel.register(LtmConfig, LtmModel, exist_ok=True)
AutoModelForCausalLM.register(LtmConfig, LtmForCausalLM, exist_ok=True)


def recall_host() -> LtmForCausalLM:
    """Return the trained model that comes with probemon: it answers the value after key-value pairs, filler, "? key".

    See docs/memory-and-routing.md. Tokens: 0 padding, 1 "?", 2-17 keys, 18-33 values, 34-49 filler.
    """
    model: LtmForCausalLM = LtmForCausalLM.from_pretrained(RECALL).eval()
    return model

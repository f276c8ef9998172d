"""A host by name.

model, tokenizer = load_model("demo", "cpu", print)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from probemon.errors import ConfigError


def load_model(name: str, device: str, say: Callable[[str], None], dtype: str = "auto") -> tuple[Any, Any]:
    """Return `(model, tokenizer)`, in eval mode on `device`; `dtype` "auto" is that of its files.

    Raises `ConfigError` where nothing of that name can be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    kinds: dict[str, Any] = {
        "auto": "auto",
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
    }
    if dtype not in kinds:
        raise ConfigError(f"dtype is {dtype!r}: give one of {', '.join(kinds)}")
    logging.disable_progress_bar()
    if name == "demo":
        from probemon.bundled import load_bundled

        model, tokenizer = load_bundled(torch.bfloat16 if dtype == "auto" else kinds[dtype], say=say)
        return model.to(device), tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=kinds[dtype])
        return model.eval().to(torch.device(device)), tokenizer
    except Exception as error:  # a damaged folder fails in as many ways as there are readers
        where = "a folder" if Path(name).exists() else "neither a folder nor a model that can be fetched"
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name!r} is {where} and cannot be loaded: {first_line}") from error

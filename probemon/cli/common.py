"""What the commands that run a host have in common: its threads, its windows, and the host by name.

    use_threads(2)
    model, tokenizer = load_aloud("demo", "cpu")
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from probemon.cli.terminal import terminal
from probemon.errors import ConfigError
from probemon.offline.windows import Window

MORE_PACKS = "Another pack, beside PACK in one run; may be repeated. NAME=PACK gives one a name of your own, where two have the same."


def use_threads(threads: int) -> None:
    """Set torch's threads; 0 leaves what it chose. Raises `ConfigError`."""
    import torch

    if threads < 0:
        raise ConfigError(f"--threads is {threads}: give 1 or more, or 0 for what torch chooses")
    if threads:
        torch.set_num_threads(threads)


def load_aloud(name: str, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """`load_model` that says on standard error what takes long."""
    from rich.text import Text

    aside = terminal(error=True)
    with aside.status(Text(f"loading {name}")) if aside.is_terminal else nullcontext():
        return load_model(name, device, aside.print, dtype=dtype)


def load_model(name: str, device: str, say: Callable[[str], None], dtype: str = "auto") -> tuple[Any, Any]:
    """`(model, tokenizer)`, in eval mode on `device`; `dtype` "auto": what its files have. Raises `ConfigError` where nothing of that name can be loaded."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    kinds: dict[str, Any] = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
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
        raise ConfigError(f"{name!r} is {where} and cannot be loaded: {(str(error).strip().splitlines() or [type(error).__name__])[0]}") from error


def window_of(n_tokens: int, overlap: int) -> Window | None:
    """The window that --window and --overlap ask for; None for the default one. Raises `ConfigError`."""
    if n_tokens == 0:
        if overlap >= 0:
            raise ConfigError(f"--overlap is {overlap}: give --window too")
        return None
    return Window(n_tokens, n_tokens // 8 if overlap == -1 else overlap)

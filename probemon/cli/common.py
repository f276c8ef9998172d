"""What several commands do alike: they run a host with threads, windows and a prompt, and show progress.

use_threads(2)
model, tokenizer = load_aloud("demo", "cpu")
with progress_bar("import", unit="probe") as bar: ...
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from probemon.cli.terminal import terminal
from probemon.errors import ConfigError
from probemon.host.loading import load_model
from probemon.offline.windows import Window


def check_generation(prompt: str, max_new_tokens: int) -> None:
    """Raise `ConfigError` where there is nothing to say to the model, or nothing to generate."""
    if not prompt.strip():
        raise ConfigError("the prompt is empty: say something with --prompt")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {max_new_tokens}: give 1 or more")


def chat_messages(tokenizer: Any, prompt: str) -> Any:
    """Return the prompt as a chat of one message, or as it is where the tokenizer has no chat template."""
    return [{"role": "user", "content": prompt}] if getattr(tokenizer, "chat_template", None) else prompt


def pack_for(model: str, pack: str | None) -> str:
    """Return the PACK that was given, the shipped one where MODEL is demo. Raises `ConfigError` for other models."""
    if pack is None and model != "demo":
        raise ConfigError("PACK is missing: only the model 'demo' has one that comes with probemon")
    return "demo" if pack is None else pack


def use_threads(threads: int) -> None:
    """Set torch's threads; 0 leaves what it chose. Raises `ConfigError`."""
    import torch

    if threads < 0:
        raise ConfigError(f"--threads is {threads}: give 1 or more, or 0 for what torch chooses")
    if threads:
        torch.set_num_threads(threads)


def load_aloud(name: str, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Call `load_model`, and say on standard error what takes long."""
    from rich.text import Text

    aside = terminal(error=True)
    with aside.status(Text(f"loading {name}")) if aside.is_terminal else nullcontext():
        return load_model(name, device, aside.print, dtype=dtype)


def window_of(n_tokens: int, overlap: int) -> Window | None:
    """Return the window that --window and --overlap ask for, None for the default one. Raises `ConfigError`."""
    if n_tokens == 0:
        if overlap >= 0:
            raise ConfigError(f"--overlap is {overlap}: give --window too")
        return None
    return Window(n_tokens, n_tokens // 8 if overlap == -1 else overlap)


def progress_bar(label: str, *, total: float | None = None, unit: str = "doc", postfix: str = "") -> Any:
    """Return a tqdm bar on standard error, shown on a terminal alone; `postfix` is "{postfix}" to show one."""
    from tqdm import tqdm

    counts = "{n:.0f}/{total_fmt} {unit} " if unit else ""
    return tqdm(
        total=total,
        unit=unit,
        desc=label,
        disable=None,
        dynamic_ncols=True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| " + counts + "[{elapsed}<{remaining}" + postfix + "]",
    )

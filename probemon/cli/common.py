"""What the commands that run a host have in common: its threads, its windows, and the host by name.

use_threads(2)
model, tokenizer = load_aloud("demo", "cpu")
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from probemon.cli.terminal import terminal
from probemon.errors import ConfigError
from probemon.host.loading import load_model
from probemon.offline.windows import Window

MORE_PACKS = (
    "Another pack, beside PACK in one run; may be repeated. NAME=PACK gives one a name of your own, where two have the"
    " same."
)


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


def window_of(n_tokens: int, overlap: int) -> Window | None:
    """The window that --window and --overlap ask for; None for the default one. Raises `ConfigError`."""
    if n_tokens == 0:
        if overlap >= 0:
            raise ConfigError(f"--overlap is {overlap}: give --window too")
        return None
    return Window(n_tokens, n_tokens // 8 if overlap == -1 else overlap)

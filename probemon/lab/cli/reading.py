"""The window that --window and --overlap ask for."""

from __future__ import annotations

from probemon.errors import ConfigError
from probemon.lab.corpora.windows import Window


def window_of(n_tokens: int, overlap: int) -> Window | None:
    """None for the default window. Raises `ConfigError`."""
    if n_tokens == 0:
        if overlap >= 0:
            raise ConfigError(f"--overlap is {overlap}: give --window too")
        return None
    return Window(n_tokens, n_tokens // 8 if overlap == -1 else overlap)

"""The API key that clients of a server give: one of your own, or one that is drawn at each start."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from probemon.errors import ConfigError

VARIABLE = "PROBEMON_API_KEY"
_BYTES, _LEAST = 32, 16

ApiKey = Annotated[
    str,
    typer.Option(
        metavar="KEY",
        envvar=VARIABLE,
        help="The key that clients give, the same at every start. On the command line other users of the machine may"
        " see it: give the variable, or --api-key-file. Default: one is drawn and printed.",
    ),
]
ApiKeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="A file that holds the key, and no more.")]


def drawn_key() -> str:
    """Return a new key."""
    return secrets.token_urlsafe(_BYTES)


def api_key_of(key: str, file: Path | None, *, no_token: bool) -> tuple[str | None, bool]:
    """Return the key, None without one, and whether it was drawn. Raises `ConfigError` for a key that is no key."""
    options = {"--api-key": bool(key), "--api-key-file": file is not None, "--no-token": no_token}
    given = [name for name, is_given in options.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} (or {VARIABLE}) and {given[1]} are given: give one of the two")
    if no_token:
        return None, False
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read as a key ({error}): give a file of text") from error
    elif not key:
        return drawn_key(), True
    if len(key) < _LEAST or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the API key has {len(key)} characters, or some that a header cannot hold: give {_LEAST} or more, letters,"
            " digits and marks, without spaces"
        )
    return key, False

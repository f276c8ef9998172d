"""The API keys that clients of a server give: your own, or one that is drawn at each start."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from probemon.errors import ConfigError
from probemon.ops.server.keys import Key, check_secret, read_keys

VARIABLE = "PROBEMON_API_KEY"
_BYTES = 32

ApiKey = Annotated[
    str,
    typer.Option(
        metavar="KEY",
        envvar=VARIABLE,
        help="The key that clients give, the same at every start. On the command line other users of the machine may"
        " see it: give the variable, or --api-key-file. Default: one is drawn and printed.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file with the key alone, or, for probemon serve, with a line NAME KEY ROLE,ROLE for each: ask, read,"
        " metrics, admin; then per_minute=N and places=N if you like.",
    ),
]


def drawn_key() -> str:
    """Return a new key."""
    return secrets.token_urlsafe(_BYTES)


def api_keys_of(key: str, file: Path | None, *, no_token: bool) -> tuple[tuple[Key, ...], bool]:
    """Return the keys, none with `no_token`, and whether one was drawn. Raises `ConfigError` for what is no key."""
    options = {"--api-key": bool(key), "--api-key-file": file is not None, "--no-token": no_token}
    given = [name for name, is_given in options.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} (or {VARIABLE}) and {given[1]} are given: give one of the two")
    if no_token:
        return (), False
    if file is None:
        return (Key(check_secret(key)),) if key else (Key(drawn_key()),), not key
    try:
        return read_keys(file.read_text(encoding="utf-8-sig"), file.name), False
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a key ({error}): give a file of text") from error


def api_key_of(key: str, file: Path | None, *, no_token: bool) -> tuple[str | None, bool]:
    """Return the one key of a server that knows no roles, None without one, and whether it was drawn.

    Raises `ConfigError`, also for a file with keys of roles.
    """
    keys, is_drawn = api_keys_of(key, file, no_token=no_token)
    if any(one.name for one in keys):
        raise ConfigError(f"{file} has keys with roles, which vLLM's server has not: give a file with one key alone")
    return (keys[0].secret if keys else None), is_drawn

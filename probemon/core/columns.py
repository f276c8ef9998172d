"""Columns shared by score tables."""

from __future__ import annotations

from typing import Any

from probemon.errors import ConfigError

# "name": text with few distinct values, dictionary-encoded unless a file grows by rows.
COLUMNS = {
    "row": "int32",
    "position": "int32",
    "token_id": "int32",
    "phase": "name",
    "concept": "name",
    "level": "int16",
    "score": "float32",
}
_KINDS = ("name", "int32", "int16", "float32")


def arrow_fields(pa: Any, *names: str) -> dict[str, Any]:
    """Return the Arrow types of columns. Raises `ConfigError` for an unknown one. `pa`: pyarrow."""
    other = [name for name in names if name not in COLUMNS]
    if other:
        raise ConfigError(f"no shared column is called {other[0]!r}: there are {', '.join(COLUMNS)}")
    for name in names:
        if COLUMNS[name] not in _KINDS:
            raise ConfigError(f"{name!r} is of {COLUMNS[name]!r}: expected one of {', '.join(_KINDS)}")
    name_type = pa.dictionary(pa.int32(), pa.string())
    return {name: name_type if COLUMNS[name] == "name" else pa.type_for_alias(COLUMNS[name]) for name in names}

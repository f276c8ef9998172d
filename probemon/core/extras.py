"""Optional packages, imported where they are needed.

pa = import_arrow("ParquetSink")        # pyarrow, with pa.parquet
"""

from __future__ import annotations

from typing import Any

from probemon.errors import MissingExtra


def import_arrow(needed_by: str) -> Any:
    """Import pyarrow with its parquet. Raises `MissingExtra` that says what needs it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(f"{needed_by} needs pyarrow: pip install 'probemon[corpus]'") from error
    return pyarrow

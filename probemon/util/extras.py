"""Optional packages, imported on use.

pa = import_arrow("ParquetSink")        # pyarrow, with pa.parquet
ipython = import_ipython("show")        # IPython, with IPython.display
"""

from __future__ import annotations

from typing import Any

from probemon.errors import MissingExtra


def import_arrow(needed_by: str) -> Any:
    """Import pyarrow with its parquet. Raises `MissingExtra`."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(f"{needed_by} needs pyarrow: pip install 'probemon[corpus]'") from error
    return pyarrow


def import_ipython(needed_by: str) -> Any:
    """Import IPython with its display. Raises `MissingExtra`."""
    try:
        import IPython.display
    except ImportError as error:
        raise MissingExtra(f"{needed_by} needs IPython, which every notebook has: pip install ipykernel") from error
    return IPython

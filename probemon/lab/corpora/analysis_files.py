"""Columns of the tables of an analysis; atomic reading and writing of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from probemon.core.columns import arrow_fields
from probemon.core.scores import COUNTS
from probemon.errors import ConfigError
from probemon.host.chat_forms import PARTS
from probemon.util.extras import import_arrow
from probemon.util.first_sentence import first_sentence

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = ("scores", "documents", "summary", "concepts")
COUNTED = (*(name for name in COUNTS if name != "shed"), "far")  # an analysis has no latency budget
ROWS_PER_GROUP = 1 << 18


def arrow() -> Any:
    """Import pyarrow. Raises `MissingExtra`."""
    return import_arrow("an analysis is kept in parquet, which")


def schemas() -> dict[str, pa.Schema]:
    """Return the columns of each table."""
    pa = arrow()
    i64, i32, i16, f32, f64, text = pa.int64(), pa.int32(), pa.int16(), pa.float32(), pa.float64(), pa.string()
    name = pa.dictionary(i32, text)
    per_document = {"document": i64, "doc_id": name}
    columns = {
        "scores": per_document
        | arrow_fields(pa, "position")
        | {"start": i32, "end": i32}
        | arrow_fields(pa, "token_id")
        | {"token": name}
        | arrow_fields(pa, "concept", "level", "score")
        | {"turn": i32, "part": name},
        "documents": {"document": i64, "doc_id": text, "reason": text}
        | dict.fromkeys(("n_chars", "n_tokens", "n_unseen", "n_rows", *COUNTED), i64)
        | {"text": text},
        "summary": per_document
        | arrow_fields(pa, "concept", "level")
        | {"n_tokens": i32, "max_score": f32, "max_position": i32, "mean_score": f64},
        "concepts": {"concept": text, "name": text, "level": i16, "parents": pa.list_(text), "path": pa.list_(text)}
        | {
            "watched": pa.bool_(),
            "alert_threshold": f32,
            "precision": f64,
            "n_documents": i64,
            "n_tokens": i64,
            "max_score": f32,
            "score_sum": f64,
            "n_by_part": pa.list_(i64, len(PARTS)),
        },
    }
    return {table: pa.schema(kinds) for table, kinds in columns.items()}


def read_table(path: Path, columns: Sequence[str] | None = None, filters: Any = None) -> pa.Table:
    """Raises `ConfigError` if the table is missing or damaged."""
    pa = arrow()
    try:
        return pa.parquet.read_table(path, columns=None if columns is None else list(columns), filters=filters)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is missing or damaged ({first_sentence(error)}): make the analysis again") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block succeeds."""
    # Several processes may write the same file.
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_table(path: Path, table: pa.Table) -> int:
    """Write a table and return its size in bytes."""
    with replacing(path) as stream:
        arrow().parquet.write_table(table, stream, compression="zstd", row_group_size=ROWS_PER_GROUP)
        return stream.tell()


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object, or None if there is no file. Raises `ConfigError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): make the analysis again in another folder") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not an object: make the analysis again in another folder")
    return content


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as stream:
        stream.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

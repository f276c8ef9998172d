"""Reads rows of example files: JSON lines, parquet, YAML, and what `probemon.util.row_files` reads."""

from __future__ import annotations

import difflib
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from probemon.errors import ConfigError, TrainingError
from probemon.util.extras import import_arrow
from probemon.util.file_kinds import BEGIN_BYTES, ONE_OBJECT, is_spread_json, kind_of, kind_of_bytes, remedy_of
from probemon.util.first_sentence import first_sentence
from probemon.util.row_files import DOCUMENTS, class_names, opened, reads, rows_of, suffixes, with_class_names
from probemon.util.strict_json import RepeatedKey, loads
from probemon.util.yaml_text import read_yaml

_JSON, _YAML = (".jsonl", ".ndjson", ".json"), (".yaml", ".yml")
_LIST_SEPARATOR, _LISTS = ";", ("label", "labels", "not", "present", "absent", "unsure")  # in cells of a table
Source = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


def read_rows(
    sources: Source | Sequence[str | os.PathLike[str]], encoding: str = "utf-8"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with where it is. `encoding`: of texts without a byte order mark. Raises `TrainingError`."""
    if isinstance(sources, (str, os.PathLike)):
        yield from _of_file(Path(sources), encoding)
        return
    if isinstance(sources, Mapping) or not isinstance(sources, Iterable):
        raise TrainingError(f"examples are {type(sources).__name__}: give files, or an iterable of dicts")
    for i, item in enumerate(sources):
        if isinstance(item, (str, os.PathLike)):
            yield from _of_file(Path(item), encoding)
        else:
            yield _mapping(item, f"example {i}")


def _mapping(item: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(item, Mapping):
        raise TrainingError(f"{where} is {type(item).__name__}: give an object with 'text' and 'labels', or a pair")
    return where, item


def _of_file(path: Path, encoding: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.exists():
        raise TrainingError(_no_such_file(path))
    suffix, _ = suffixes(path)
    try:
        if kind := reads(path):
            is_table = kind not in DOCUMENTS
            for where, row in rows_of(path, encoding=encoding):
                if isinstance(row, ConfigError):
                    raise row
                yield where, {**row, **_lists(row)} if is_table else row
            return
        if path.is_dir():
            raise TrainingError(f"{path} is a folder: give its files")
        _check_kind(path, suffix)
        if suffix in _YAML:
            yield from _yaml(path)
        elif suffix == ".parquet":
            for i, row in enumerate(_parquet(path)):
                yield f"{path.name}, row {i + 1}", {**row, **_lists(row)}
        elif suffix in _JSON:
            yield from _json_lines(path, encoding)
        else:
            raise TrainingError(f"{path.name}: its kind is unknown: give .jsonl, .csv, .tsv, .parquet or .yaml")
    except UnicodeDecodeError as error:
        name, remedy = error.encoding.upper(), "give --encoding latin-1, or another"
        raise TrainingError(f"{path.name} is not {name}: {error.reason} at byte {error.start}: {remedy}") from None
    except ConfigError as error:
        raise TrainingError(str(error)) from error
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_kind(path: Path, suffix: str) -> None:
    """Raise `TrainingError` for a file of another kind than its suffix."""
    if suffix == ".parquet":
        return  # its reader reports errors
    with opened(path) as stream:
        begin = stream.read(BEGIN_BYTES)
    if suffix in _JSON and is_spread_json(begin):
        raise TrainingError(f"{path.name} is {ONE_OBJECT}")
    if kind := kind_of_bytes(begin) if suffixes(path)[1] else kind_of(path):
        remedy = remedy_of(kind) or "write its rows as .jsonl"
        raise TrainingError(f"{path.name} is {kind}, not a table of texts: {remedy}")


def _no_such_file(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link that leads nowhere: mend it, or give the file itself"
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"no such file: {path}{f', did you mean {path.parent / near[0]}?' if near else ''}"


def _json_lines(path: Path, encoding: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with io.TextIOWrapper(opened(path, encoding), "utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{path.name}, line {number}"
                try:
                    value = loads(line)
                except UnicodeEncodeError as error:
                    half = ascii(error.object[error.start])[1:-1]
                    raise TrainingError(
                        f"{where} has {half}, half of a surrogate pair, which is not a character: write both halves,"
                        " or leave it out"
                    ) from None
                except RepeatedKey as error:
                    raise TrainingError(f"{where}: {error}") from None
                except RecursionError:
                    raise TrainingError(f"{where} is nested too deeply: give one object a line") from None
                except ValueError as error:
                    raise TrainingError(f"{where} is not JSON ({error}): give one object a line") from None
                yield _mapping(value, where)


def _yaml(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    value = read_yaml(path.read_text(encoding="utf-8-sig"), path.name, TrainingError).value
    value = value.get("concepts") if isinstance(value, Mapping) else value
    if not isinstance(value, list):
        raise TrainingError(f"{path.name}: give a list of concepts, or a list under 'concepts'")
    for i, item in enumerate(value):
        where, row = _mapping(item, f"{path.name}, concept {i + 1}")
        if "id" not in row:
            raise TrainingError(f"{where} has no 'id'")
        yield where, {"examples": [], **row}


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    arrow = import_arrow("reading parquet")
    try:
        file = arrow.parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise TrainingError(f"{path.name} is not parquet: {first_sentence(error)}") from None
    _check_columns(file.schema_arrow.names, path.name)
    classes = class_names(file.schema_arrow.metadata)
    for batch in file.iter_batches(1024):
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:  # reported by the caller
            raise
        except (ValueError, OverflowError) as error:  # such as a date after the year 9999, or an unknown time zone
            raise TrainingError(
                f"{path.name} holds values that cannot be read ({first_sentence(error)}): leave such columns out"
            ) from None
        yield from (with_class_names(row, classes) for row in rows)


def _check_columns(names: Sequence[str], where: str) -> None:
    duplicates = [name for name, n in Counter(names).items() if n > 1]
    if duplicates:
        raise TrainingError(f"{where} has two columns {duplicates[0]!r}: rename one")


def _lists(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """The cells with labels, split."""
    return {
        key: [part.strip() for part in row[key].split(_LIST_SEPARATOR) if part.strip()]
        for key in _LISTS
        if isinstance(row.get(key), str)
    }

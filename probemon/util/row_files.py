"""Reads rows from tables in text, JSON documents, Arrow files, folders of `datasets` and inspect-ai logs.

    if reads(path):                                # "CSV", "a folder of datasets", ...; "" for other files
        for where, row in rows_of(path):
            ...                                    # "mails.csv, row 1", {"text": "Hello", "label": "spam"}
    with opened(path, "latin-1") as stream:        # bytes of UTF-8, decompressed

- tables in text: separator and byte order mark are found, cells stay texts, empty cells are left out of a row
- `.eval` of inspect-ai: a sample is a row, and nothing is unpacked to disk
- numbers of a ClassLabel become its names
- `.gz` and `.zst`: decompressed to at most 200 times their size (or 64 MiB)
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from probemon.errors import ConfigError, ProbemonError
from probemon.util import file_kinds
from probemon.util.extras import import_arrow
from probemon.util.first_sentence import first_sentence
from probemon.util.strict_json import loads

Row = tuple[str, Mapping[str, Any] | ConfigError]  # an error is of this row alone
MOST_TIMES, ALWAYS_BYTES = 200, 64 << 20  # against decompression bombs; texts grow some ten times
MOST_TEXT = 1 << 30  # characters of a JSON document, a line or a cell
_CSV, _TSV, _ARRAY, _OBJECT, _FEATHER, _ARROW = "CSV", "TSV", "a JSON array", "one JSON object", "Feather", "Arrow"
_LOG, _FOLDER = "an inspect-ai log", "a folder of datasets"
DOCUMENTS = (_ARRAY, _OBJECT, _LOG)  # kinds whose values have types
_JSON, _PLAIN = (".jsonl", ".ndjson", ".json"), (".txt", ".text", ".md", ".rst", ".tex")
_ELSEWHERE = (*_PLAIN, ".yaml", ".yml", ".ipynb", ".parquet")  # JSON in these is a text, or means something else
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "pipes"}
_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}  # byte order marks
_LOG_BEGIN = re.compile(rb'\{\s*"version":\s*\d+,\s*"status":\s*"\w+",\s*"eval":\s*\{')
_IN_CHUNKS = re.compile(r"_epoch_\d+/sample\.json$")  # what a sample has besides lists of messages and events
_LINE_OF_SEVERAL = re.compile(rb"[^\n]*\]\s*\n\s*\S")  # an array that is only the first row of JSON lines


def reads(path: Path) -> str:
    """Return the kind of a file or folder that `rows_of` reads, or ""."""
    if not path.is_file():
        return _FOLDER if path.is_dir() and file_kinds.dataset_folder(path) else ""
    (suffix, packed), begin = suffixes(path), _begin(path)
    if suffix in (".csv", ".tsv"):
        return suffix[1:].upper()
    if not packed and suffix == ".eval" and begin.startswith(b"PK"):
        return _LOG
    is_arrow = begin.startswith((b"ARROW1\0\0", b"FEA1\0")) or "Arrow stream" in file_kinds.kind_of_bytes(begin)
    if not packed and (is_arrow or suffix in (".feather", ".arrow")):
        return _FEATHER if suffix == ".feather" or begin.startswith(b"FEA1") else _ARROW
    return _document_kind(suffix, begin)


def rows_of(path: Path, *, encoding: str = "utf-8") -> Iterator[Row]:
    """Read rows, each with where it is; a bad row is an error instead. `encoding`: of texts without a byte order mark.

    Raises `ConfigError` where no further row can be read.
    """
    check_encoding(encoding)
    try:
        kind = reads(path)
        if kind in (_CSV, _TSV):
            yield from _table(path, "\t" if kind == _TSV else ",", encoding)
        elif kind in (_FEATHER, _ARROW):
            yield from _numbered(path.name, _arrow(path, path.name))
        elif kind == _FOLDER:
            yield from _folder(path)
        elif kind == _LOG and path.suffix.lower() == ".eval":
            yield from _log(path)
        elif kind in (_ARRAY, _OBJECT, _LOG):
            yield from _document(path, kind, encoding)
        else:
            raise ConfigError(f"{path} holds no rows that can be read: give .csv, .json, .arrow or .eval")
    except OSError as error:
        what = f"{error.filename or path} cannot be read ({error.strerror or error})"
        raise ConfigError(f"{what}: check that it is there, and its permissions") from error


def check_encoding(encoding: str) -> None:
    """Raise `ConfigError` for what is no encoding of texts."""
    try:
        "".encode(encoding)
    except LookupError:
        raise ConfigError(f"{encoding!r} is no encoding of texts: give --encoding latin-1, cp1252 or another") from None


def suffixes(path: Path) -> tuple[str, str]:
    """Return the suffix of a file without that of its compression, and that of its compression or ""."""
    packed = path.suffix.lower() if path.suffix.lower() in (".gz", ".zst") else ""
    return Path(path.stem if packed else path.name).suffix.lower(), packed


def _begin(path: Path) -> bytes:
    """First bytes, as UTF-8 if a mark says what they are."""
    try:
        with _opened(path) as stream:
            begin = bytes(stream.read(file_kinds.BEGIN_BYTES))
    except (OSError, ProbemonError):  # reported by `rows_of`
        return b""
    mark = next(filter(begin.startswith, _MARKS), b"")
    return begin[len(mark) :].decode(_MARKS[mark], "ignore").encode() if mark else begin


def _document_kind(suffix: str, begin: bytes) -> str:
    begin, is_json = file_kinds.without_mark(begin), suffix == ".json"
    is_line = suffix in _JSON and _LINE_OF_SEVERAL.match(begin)
    if (is_json and begin.startswith(b"[")) or (file_kinds.begins_array(begin) and not is_line):
        return "" if suffix in _ELSEWHERE else _ARRAY
    if is_json and _LOG_BEGIN.match(begin):
        return _LOG
    is_object = file_kinds.begins_json(begin) and file_kinds.is_spread_json(begin)  # {\rtf is no JSON
    return _OBJECT if is_object and suffix not in _ELSEWHERE else ""


def opened(path: Path, encoding: str = "utf-8") -> BinaryIO:
    """Open a text, also by gzip or zstd, as bytes of UTF-8. `encoding`: of a text without a byte order mark.

    Raises `MissingExtra`; reading raises `ConfigError` over the bound, and `UnicodeDecodeError`.
    """
    stream: BinaryIO = recoded(_opened(path), encoding)
    return stream


def recoded(stream: Any, encoding: str) -> Any:
    """Return a text as bytes of UTF-8: see `opened`."""
    mark = next(filter(stream.peek(4).startswith, _MARKS), b"")
    encoding = _MARKS.get(mark, encoding)
    if encoding == "utf-8":
        return stream
    stream.read(len(mark))
    return io.BufferedReader(_Recoded(stream, encoding))


def _opened(path: Path) -> Any:
    _, packed = suffixes(path)
    if packed == ".gz":
        return io.BufferedReader(_Unpacked(gzip.GzipFile(path), path.stat().st_size, path.name))
    return _open_zstd(path) if packed else path.open("rb")


def _open_zstd(path: Path) -> io.BufferedReader:
    try:
        stream = importlib.import_module("compression.zstd").ZstdFile(path)  # Python 3.14
    except ImportError:
        stream = import_arrow(f"reading {path.name}").input_stream(str(path), compression="zstd")
    return io.BufferedReader(_Unpacked(stream, path.stat().st_size, path.name))


class _Recoded(io.RawIOBase):
    """A text as bytes of UTF-8."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._text, self._left = io.TextIOWrapper(stream, encoding, newline=""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises `UnicodeDecodeError`."""
        self._left = self._left or self._text.read(len(buffer)).encode()
        data, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._text.close()
        super().close()


class _Unpacked(io.RawIOBase):
    """Decompressed bytes, up to a bound."""

    def __init__(self, stream: Any, compressed: int, name: str) -> None:
        self._stream, self._name, self._read = stream, name, 0
        self._most = max(ALWAYS_BYTES, MOST_TIMES * compressed)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._read

    def readinto(self, buffer: Any) -> int:
        """Raises `ConfigError` over the bound, and for damaged data."""
        try:
            data = self._stream.read(len(buffer))
        except Exception as error:  # each library has its own
            reason = first_sentence(error)
            raise ConfigError(f"{self._name} cannot be decompressed ({reason}): fetch or compress it again") from error
        buffer[: len(data)] = data
        self._read += len(data)
        if self._read > self._most:
            what = f"{self._name} decompresses to more than {MOST_TIMES} times its size"
            raise ConfigError(f"{what}: decompress it yourself, if that is right")
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


@contextmanager
def _text(path: Path, encoding: str, newline: str = "") -> Iterator[TextIO]:
    with _opened(path) as stream:
        mark = next(filter(stream.peek(4).startswith, _MARKS), b"")
        stream.read(len(mark))
        try:
            yield io.TextIOWrapper(stream, _MARKS.get(mark, encoding), newline=newline)
        except UnicodeDecodeError as error:
            place = stream.tell() - len(error.object) + error.start
            remedy = "give --encoding latin-1, or another" if error.encoding == "utf-8" else "give another --encoding"
            raise ConfigError(f"{path.name} is not {error.encoding.upper()} at byte {place}: {remedy}") from None


def _table(path: Path, usual: str, encoding: str) -> Iterator[Row]:
    if kind := file_kinds.kind_of_bytes(_begin(path)):
        remedy = file_kinds.remedy_of(kind) or "give .csv or .jsonl"
        raise ConfigError(f"{path.name} is {kind}, and no table in text: {remedy}")
    with _text(path, encoding) as stream:
        separator = _separator(stream.read(1 << 16), usual)
    csv.field_size_limit(MOST_TEXT)  # csv's default is too low for long texts
    number, header, names, where = 0, list[str](), list[str](), f"{path.name}, header"
    with _text(path, encoding) as stream:
        try:
            for cells in filter(None, csv.reader(stream, delimiter=separator, strict=True)):
                if not number:
                    header, names = cells, _columns(cells, path.name)
                elif len(cells) != len(header):
                    counts = f"{len(cells)} cells, and the header has {len(header)}"
                    yield where, ConfigError(f"{where} has {counts}: quote texts that hold {_SEPARATORS[separator]}")
                elif any(cells):
                    values = zip(names, cells[len(header) - len(names) :], strict=True)
                    yield where, {name: cell for name, cell in values if cell}
                number += 1
                where = f"{path.name}, row {number}"
        except csv.Error as error:
            raise ConfigError(f"{where} is cut ({error}): close its quotes, and write those in a cell twice") from None
    if not number:
        raise ConfigError(f"{path.name} is empty: give a header, and a row a line")


def _separator(sample: str, usual: str) -> str:
    """Return what separates most columns of the header, and the same number in the first rows."""

    def fitness(separator: str) -> tuple[bool, float, int]:
        widths = list[int]()
        with suppress(csv.Error):  # quotes do not stand at this separator, or the sample ends in one
            records = csv.reader(io.StringIO(sample, newline=""), delimiter=separator, strict=True)
            for cells in islice(filter(None, records), 20):
                widths.append(len(cells))
        width = widths[0] if widths else 0
        return width > 1, widths.count(width) / len(widths) if width > 1 else 0.0, width

    return max(sorted(_SEPARATORS, key=lambda separator: separator != usual), key=fitness)


def _columns(header: Sequence[str], name: str) -> list[str]:
    """Return the names of columns, without an index that pandas wrote."""
    if any("\0" in cell for cell in header):
        raise ConfigError(f"{name} has NULs in its header: give --encoding utf-16-le, if it is UTF-16 without its mark")
    names = [cell.strip() for cell in header]
    names = names[1:] if names[0] == "" else names
    if not names or "" in names:
        raise ConfigError(f"{name} has columns without a name: name each in the first line")
    return _unlike(names, name)


def _unlike(names: list[str], where: str) -> list[str]:
    for name, n in Counter(names).items():
        if n > 1:
            raise ConfigError(f"{where} has two columns {name!r}: rename one")
    return names


def _document(path: Path, kind: str, encoding: str) -> Iterator[Row]:
    name, unit = path.name, "row"
    with _text(path, encoding) as stream:
        text = stream.read(MOST_TEXT + 1)
    if len(text) > MOST_TEXT:
        raise ConfigError(f"{name} has more than {MOST_TEXT:,} characters in one JSON document: write JSON lines")
    value = _parsed(text, name)
    if isinstance(value, dict):
        if kind != _LOG and not isinstance(value.get("samples"), list):
            yield name, value
            return
        value, unit = value.get("samples"), "sample"
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{name} is {_LOG} without samples: give one of an evaluation that has ended")
    for number, item in enumerate(value, 1):
        yield _object(item, f"{name}, {unit} {number}")


def _parsed(text: str | bytes, where: str) -> Any:
    try:
        return loads(text if isinstance(text, str) else text.decode())
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "it is nested too deeply"
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ConfigError(f"{where} has {half}, half of a surrogate pair: write both halves, or leave it out") from None
    except ValueError as error:  # a repeated key, or a very long number
        raise ConfigError(f"{where}: {first_sentence(error)}") from None
    raise ConfigError(f"{where} is not valid JSON ({reason}): mend it, or write one object a line")


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {type(value).__name__}, not an object: give objects of fields")
    return where, value


def _log(path: Path) -> Iterator[Row]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}  # the last of a name counts
            samples = [name for name in members if name.startswith("samples/") and name.endswith(".json")]
            if any(map(_IN_CHUNKS.search, samples)):
                raise ConfigError(f"{path.name} has samples in chunks: give the log that it was converted from")
            for name in samples:
                where = f"{path.name}, {name}"
                yield _object(_parsed(_member(path, archive, members[name], where), where), where)
    except (zipfile.BadZipFile, RuntimeError, struct.error) as error:  # RuntimeError: encrypted, or an unknown method
        reason = first_sentence(error)
        raise ConfigError(f"{path.name} is no whole {_LOG[3:]} ({reason}): write it by inspect log convert") from error
    if not samples:
        raise ConfigError(f"{path.name} is {_LOG} without samples: give one of an evaluation that has ended")


def _member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> bytes:
    stream: Any = None
    if member.compress_type == 93 and not hasattr(zipfile, "ZIP_ZSTANDARD"):  # which Python 3.14 reads
        pa = import_arrow(f"reading {path.name}, whose samples are compressed by zstd,")
        with path.open("rb") as file:
            file.seek(member.header_offset)
            lengths = struct.unpack("<26xHH", file.read(30))  # of its name and of what follows that
            file.seek(sum(lengths), io.SEEK_CUR)
            stream = pa.CompressedInputStream(pa.BufferReader(file.read(member.compress_size)), "zstd")
    compressed = min(member.compress_size, path.stat().st_size)
    with io.BufferedReader(_Unpacked(stream or archive.open(member), compressed, where)) as unpacked:
        return unpacked.read()


def _numbered(name: str, rows: Iterator[Mapping[str, Any]]) -> Iterator[Row]:
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


def _arrow(path: Path, name: str, classes: Mapping[str, Sequence[str]] | None = None) -> Iterator[Mapping[str, Any]]:
    pa, begin = import_arrow(f"reading {name}"), _begin(path)
    if begin.startswith(b"FEA1"):  # whole columns, and newer pyarrow does not read it
        raise ConfigError(f"{name} is Feather of version 1: write it again by pyarrow.feather.write_feather")
    try:
        with pa.OSFile(str(path)) as source:
            is_file = begin.startswith(b"ARROW1")
            file = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            names = {**class_names(file.schema.metadata), **(classes or {})}
            _unlike(file.schema.names, name)
            for batch in map(file.get_batch, range(file.num_record_batches)) if is_file else file:
                batch.validate(full=True)  # a damaged file would be read outside of its bounds
                for start in range(0, batch.num_rows, 1024):
                    yield from (with_class_names(row, names) for row in batch.slice(start, 1024).to_pylist())
    except ConfigError:
        raise
    except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a date after the year 9999
        raise ConfigError(f"{name} cannot be read ({first_sentence(error)}): write its rows as .parquet") from error


def _folder(folder: Path) -> Iterator[Row]:
    name, splits = folder.resolve().name, folder / "dataset_dict.json"
    for split in _entries(splits, "splits") if splits.is_file() else [""]:
        part, where = folder / split, f"{name}/{split}" if split else name
        classes = _classes(_described(part / "dataset_info.json", "features"))
        files = _entries(part / "state.json", "_data_files")
        rows = chain.from_iterable(_arrow(part / file, f"{where}/{file}", classes) for file in files)
        yield from _numbered(where, ({"split": split, **row} for row in rows) if split else rows)


def _described(path: Path, key: str) -> Any:
    value = _parsed(path.read_bytes(), str(path))
    return value.get(key) if isinstance(value, dict) else None


def _entries(path: Path, key: str) -> list[str]:
    """Return the entries of its folder that a description lists; none may lead out of the folder."""
    listed = _described(path, key)
    entries: list[Any] = [entry.get("filename") if isinstance(entry, dict) else entry for entry in listed or ()]
    bad = [name for name in entries if not isinstance(name, str) or name in ("", "..") or name != Path(name).name]
    if bad or not isinstance(listed, list):
        raise ConfigError(f"{path} does not list what is in its folder: save the folder again by save_to_disk")
    return entries


def class_names(schema_metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Return the names of the classes of each ClassLabel, or list of them, that `datasets` wrote."""
    try:
        return _classes(json.loads((schema_metadata or {})[b"huggingface"])["info"]["features"])
    except (ValueError, LookupError, TypeError, RecursionError):  # written by others
        return {}


def with_class_names(row: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """Return a row with names in place of the numbers of classes. -1, which stands for no class, becomes None."""
    return {column: _named(value, names[column]) if column in names else value for column, value in row.items()}


def _classes(features: Any) -> dict[str, list[str]]:
    found = {}
    for column, kind in features.items() if isinstance(features, dict) else ():
        while isinstance(kind, list) or (isinstance(kind, dict) and "feature" in kind):  # a list of it
            kind = kind["feature"] if isinstance(kind, dict) else kind[0] if kind else None
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" and isinstance(kind.get("names"), list):
            found[column] = kind["names"]
    return found


def _named(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    if not isinstance(value, int) or value >= len(names):
        return value
    return names[value] if value >= 0 else None

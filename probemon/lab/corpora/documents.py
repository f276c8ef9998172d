"""Reads documents from files, folders, standard input or iterables. A bad document has a reason; it does not raise.

    for document in read_documents("mails.jsonl"):  # also .txt, .parquet, a folder, "-", or an iterable of str or dict
        if not document.reason: ...document.id, document.text

- text files: a document a line; `id` is `name:line`
- `.jsonl`, `.ndjson`, `.json`: an object a line; `.parquet`: a row; `id` is the field of that name, else `name:line`
- a folder: all files below it in path order, without hidden names and linked folders. A text file is one document; `id`
  is its path
- `-`, and files of unknown suffix: JSON lines if they begin with an object, else text
- `.gz`, `.zst` and parquet row groups: decompressed to at most 200 times their size (or 64 MiB)
- an iterable of texts or dicts
- a row without a text may be a chat, in one of the forms of `probemon.host.chat_shapes`; see `Document.rendered`. Of
  several chats in a row (a pair, the samples of a log) each is a document
- `.csv`, `.tsv`, a JSON array, an indented object, `.arrow`, `.feather`, folders of `datasets`, logs of inspect-ai:
  see `probemon.util.row_files`
- refused: binary files; outside of a folder also YAML, HTML, source and the like
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from probemon.errors import ChatRefused, ConfigError
from probemon.host.chat_forms import check_said
from probemon.host.chat_parts import ChatPart, parts_of
from probemon.host.chat_shapes import FIELDS, chats_as, check_shape, shape_of
from probemon.host.chat_template import render
from probemon.util.checks import check_count
from probemon.util.extras import import_arrow
from probemon.util.file_kinds import (
    BEGIN_BYTES,
    ONE_ARRAY,
    ONE_OBJECT,
    begins_array,
    begins_json,
    dataset_folder,
    is_spread_json,
    kind_of,
    kind_of_bytes,
    remedy_of,
    without_mark,
)
from probemon.util.first_sentence import first_sentence
from probemon.util.harmless_text import is_unicode
from probemon.util.row_files import (
    ALWAYS_BYTES,
    MOST_TIMES,
    Row,
    check_encoding,
    opened,
    reads,
    recoded,
    rows_of,
    suffixes,
)
from probemon.util.strict_json import loads

MAX_CHARS = 2_000_000
# Compressed dictionaries of parquet columns are read whole; over the smaller bound, rows are read one by one.
MAX_DICTIONARY_BYTES, LARGE_DICTIONARY_BYTES = 16 << 20, 2 << 20
FURTHER = "cannot be read (further)"  # how the reason begins where the rest of a file is missing
OPENAI, UTF_8 = "OpenAI messages", "utf-8"
_MARK = "\ufeff".encode()  # byte order mark
_JSON = (".jsonl", ".ndjson", ".json")
_TABLES = (".csv", ".tsv")
_PLAIN = (".txt", ".text", ".md", ".rst", ".tex")
# Header and separators would be scored, and cells split at line breaks.
_NO_TABLES = "a table in text: write it as .jsonl or .parquet, or name it .txt if its lines are the documents"
_TEXTS = "write its texts as .txt or .jsonl"
# By suffix. The first kind are texts as a whole, not line by line.
_OF_LINES = {
    **dict.fromkeys((".yaml", ".yml"), "YAML"),
    **dict.fromkeys((".toml", ".ini", ".cfg"), "a file of settings"),
    **dict.fromkeys((".html", ".htm", ".xml", ".svg"), "a page with markup"),
    **dict.fromkeys((".py", ".js", ".ts", ".c", ".h", ".cc", ".cpp", ".java", ".go", ".rs", ".sh", ".css"), "source"),
    ".ipynb": "a notebook",
}
_OF_BYTES = {
    **dict.fromkeys((".safetensors", ".gguf", ".pt", ".pth", ".npy", ".npz", ".onnx"), "a file of tensors"),
    **dict.fromkeys((".pkl", ".pickle"), "a pickle"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".webp"), "a picture"),
}
Source = str | os.PathLike[str] | Iterable[Any]


@dataclass(frozen=True)
class Document:
    """A document.

    - `index`: position in the input.
    - `reason`: "" or why it cannot be scored.
    - `fields`: other fields of its row.
    - `chat`: messages and tools as JSON; `text` is "" until rendered. `shape`: its form in the file.
    - `chat_date`: date in the rendered text, or "".
    - `parts`: where each role speaks in the rendered text; empty if unknown, for the reason `unplaced`.
    """

    index: int
    id: str
    text: str
    reason: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    chat: str = field(default="", repr=False)
    chat_date: str = ""
    shape: str = ""
    parts: tuple[ChatPart, ...] = field(default=(), compare=False, repr=False)
    unplaced: str = field(default="", compare=False, repr=False)

    @property
    def said(self) -> str:
        """Its text, or its chat as JSON."""
        return self.chat or self.text

    def rendered(self, tokenizer: Any, date: str) -> Document:
        """Return a chat with its text in the tokenizer's template, for `date`. Raises `ChatRefused`."""
        row = json.loads(self.chat)
        if not getattr(tokenizer, "chat_template", None):
            raise ChatRefused("it is a chat, and this model's tokenizer has no chat template: give texts")
        chat = render(tokenizer, row["messages"], tools=row["tools"], date=date)
        rendered = replace(self, text=chat.text, chat_date=date if chat.reads_date else "")
        try:
            return replace(rendered, parts=tuple(_numbered(parts_of(chat), row.get("numbers"))))
        except ChatRefused as error:
            return replace(rendered, unplaced=str(error))


def _numbered(parts: Iterable[ChatPart], numbers: Sequence[int | None] | None) -> Iterator[ChatPart]:
    """Yield parts with the numbers that their messages have in the file, -1 for none."""
    for part in parts:
        number = part.turn if numbers is None else numbers[part.turn]
        yield replace(part, turn=-1 if number is None else number)


@dataclass(frozen=True)
class _Row:
    where: str
    text: Any = None
    id: Any = None
    reason: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    chat: str = ""
    shape: str = ""


@dataclass(frozen=True)
class Documents:
    """A source, and how it is read; iterating reads it, like `read_documents`.

    - `shape`: of `probemon.host.chat_shapes.SHAPES`, the form of all chats; "" recognises it row by row.
    - `encoding`: of texts without a byte order mark.
    """

    source: Source
    text_field: str = "text"
    id_field: str = "id"
    max_chars: int = MAX_CHARS
    shape: str = ""
    encoding: str = UTF_8

    def __post_init__(self) -> None:
        check_shape(self.shape)
        check_encoding(self.encoding)
        most = check_count("max_chars", self.max_chars, least=1, remedy="give 1 or more characters")
        object.__setattr__(self, "max_chars", most)

    def __iter__(self) -> Iterator[Document]:
        return _read(self)


def read_documents(
    source: Source,
    *,
    text_field: str = "text",
    id_field: str = "id",
    max_chars: int = MAX_CHARS,
    shape: str = "",
    encoding: str = UTF_8,
) -> Iterator[Document]:
    """Read the documents of a source, in order. Raises `ConfigError` for a missing file or column.

    `shape`, `encoding`: see `Documents`.
    """
    return iter(Documents(source, text_field, id_field, max_chars, shape, encoding))


def _read(documents: Documents) -> Iterator[Document]:
    source, text_field = documents.source, documents.text_field
    if isinstance(source, (str, os.PathLike)):
        rows = _of_path(os.fspath(source), documents)
    elif hasattr(source, "columns") and hasattr(source, "shape"):  # a data frame yields its column names
        raise ConfigError(
            f"documents are a {type(source).__name__}: give its rows, dicts with {text_field!r} (pandas:"
            " df.to_dict('records'), polars: df.to_dicts())"
        )
    elif isinstance(source, (bytes, Mapping)) or not isinstance(source, Iterable):
        raise ConfigError(
            f"documents are {type(source).__name__}: give a path, '-', or an iterable of texts or of dicts with"
            f" {text_field!r}"
        )
    else:
        rows = (row for i, item in enumerate(source) for row in _of_item(item, str(i), documents))
    return (_document(i, row, text_field, documents.max_chars) for i, row in enumerate(rows))


def count_documents(source: Source) -> int | None:
    """Estimate the number of documents, for a progress bar; None if unknown."""
    if not isinstance(source, (str, os.PathLike)):
        return len(source) if isinstance(source, Sized) else None
    path = Path(source)
    if os.fspath(source) == "-" or _zipped(path):
        return None
    if reads(path):
        return None
    if path.is_dir():
        files, left_out = _files(path)
        return sum(_count_file(file, alone=False) for file in files) + len(left_out)
    return _count_file(path, alone=True)


def _document(index: int, row: _Row, text_field: str, max_chars: int) -> Document:
    text, reason = row.chat or row.text, row.reason
    if not reason and not isinstance(text, str):
        reason = f"no field {text_field!r}" if text is None else f"{text_field!r} is {type(text).__name__}, not a text"
    if not reason and not text:
        reason = "empty"
    if not reason and len(text) > max_chars:
        reason = f"longer than {max_chars} characters ({len(text)})"
    if not reason and not is_unicode(text):
        reason = "not valid Unicode (a lone surrogate)"
    try:
        name = row.where if row.id is None else str(row.id)
    except Exception as error:  # unprintable
        name, reason = row.where, reason or f"its id cannot be written ({type(error).__name__})"
    name = name if is_unicode(name) else name.encode("utf-8", "backslashreplace").decode()
    if reason or row.chat:
        return Document(index, name, "", reason, row.fields, "" if reason else row.chat, shape=row.shape)
    return Document(index, name, text, reason, row.fields)


def _of_item(item: Any, where: str, how: Documents) -> Iterator[_Row]:
    """Yield the documents of a row: one, but for several chats."""
    if isinstance(item, str):
        yield _Row(where, item)
        return
    if not isinstance(item, Mapping):
        yield _Row(where, reason=f"neither a text nor an object: {type(item).__name__}")
        return
    shape = how.shape or (shape_of(item) if item.get(how.text_field) is None else "")
    if shape and (shape != OPENAI or "messages" not in item):
        yield from _of_chats(item, where, how, shape)
        return
    chat, reason = _chat(item, how.text_field)
    left_out = (how.text_field, how.id_field, *(("messages", "tools") if chat else ()))
    rest = {key: value for key, value in item.items() if key not in left_out}
    yield _Row(where, item.get(how.text_field), item.get(how.id_field), reason, rest, chat, OPENAI if chat else "")


def _of_chats(item: Mapping[str, Any], where: str, how: Documents, shape: str) -> Iterator[_Row]:
    rest = {key: value for key, value in item.items() if key != how.id_field and key not in FIELDS[shape]}
    try:
        chats = chats_as(shape, item)
    except ChatRefused as error:
        yield _Row(where, None, item.get(how.id_field), f"read as {shape}: {error}", rest, shape=shape)
        return
    for at, chat in enumerate(chats):
        part = chat.part or (str(at + 1) if len(chats) > 1 else "")
        name, number = item.get(how.id_field), f"/{part}" if part else ""
        try:
            chat_row = {"messages": chat.messages, "tools": chat.tools}
            if chat.numbers != list(range(len(chat.messages))):
                chat_row["numbers"] = chat.numbers
            said = json.dumps(chat_row, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            yield _Row(f"{where}{number}", None, name, f"its messages cannot be written as JSON ({error})", rest)
            continue
        own = {**rest, "part": chat.part} if chat.part else rest
        yield _Row(f"{where}{number}", None, None if name is None else f"{name}{number}", "", own, said, shape)


def _chat(item: Mapping[str, Any], text_field: str) -> tuple[str, str]:
    """Return the chat of a row as JSON, and the reason why it is refused."""
    messages, tools = (_listed(item.get(name)) for name in ("messages", "tools"))
    if not isinstance(messages, list):
        alone = text_field != "messages" and item.get(text_field) is None
        return "", "'messages' is a text: give a list of messages" if alone and isinstance(messages, str) else ""
    if text_field != "messages" and item.get(text_field) is not None:
        return "", f"it has 'messages' and {text_field!r}: give only one of them"
    try:
        check_said(messages)
        if tools is not None and not isinstance(tools, list):
            raise ChatRefused(f"'tools' is {type(tools).__name__}: give a list of objects")
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            return "", "empty"
        return json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False), ""
    except ChatRefused as error:
        return "", str(error)
    except (TypeError, ValueError, RecursionError) as error:
        return "", f"its messages cannot be written as JSON ({error})"


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


def _of_path(source: str, how: Documents) -> Iterator[_Row]:
    if source == "-":
        return _standard_input(how)
    path = Path(source)
    if reads(path):
        return _of_rows(path, how)
    if path.is_dir():
        files, left_out = _files(path)
        if not files:
            why = f" that can be read ({next(iter(left_out.values()))})" if left_out else ""
            raise ConfigError(f"{path} holds no files{why}: give a folder of documents")
        return _folder(path, files, left_out, how)
    if not path.is_file():
        if path.is_symlink():
            raise ConfigError(f"{path} is a link that leads nowhere: mend it, or give the file itself")
        raise ConfigError(f"{path} is neither a file nor a folder: give the documents to read, or - for standard input")
    refused = _no_documents(path)
    if refused:
        raise ConfigError(f"{path} is {refused}")
    if kind := _OF_LINES.get(_suffix(path)):
        raise ConfigError(
            f"{path} is {kind}, and each line is a document: write its texts as .jsonl, name it .txt if its lines are"
            " the documents, or give its folder, in which each file is one document"
        )
    if _kind(path) == "parquet":
        _parquet_columns(path, how)
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    return _file(path, path.name, how)


def _of_rows(path: Path, how: Documents) -> Iterator[_Row]:
    """Read rows of a table, a JSON document, an Arrow file, a folder of `datasets` or a log."""
    rows = rows_of(path, encoding=how.encoding)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path} has no rows: there is nothing to read")
    row = first[1]
    if isinstance(row, ConfigError):
        raise row
    if how.text_field not in row and not shape_of(row):
        raise ConfigError(
            f"{path} has no field {how.text_field!r}, it has {', '.join(map(str, row))[:200]}: name the field of the"
            " texts"
        )
    return _readable(path, itertools.chain([first], rows), how)


def _readable(path: Path, rows: Iterator[Row], how: Documents) -> Iterator[_Row]:
    try:
        for where, item in rows:
            if isinstance(item, ConfigError):
                yield _Row(_place(where), reason=str(item))
            else:
                yield from _of_item(item, _place(where), how)
    except ConfigError as error:  # earlier rows stay
        yield _Row(path.name, reason=f"{FURTHER}: {error}")


def _place(where: str) -> str:
    """Return where a row is, as ids of documents have it."""
    return where.replace(", row ", ":").replace(", line ", ":").replace(", ", "/")


def _files(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the files below a folder, and unreadable entries with reasons."""
    paths, left_out = [], dict[Path, str]()

    def unreadable(error: OSError) -> None:
        left_out[Path(error.filename)] = f"cannot be read: {error.strerror}"

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out |= {
            Path(root, name): "a link to a folder, which is not followed: give that folder too"
            for name in folders
            if Path(root, name).is_symlink()
        }
        saved = [Path(root, name) for name in folders if dataset_folder(Path(root, name))]
        paths += saved  # one source each
        folders[:] = [name for name in folders if Path(root, name) not in saved]
        for path in (Path(root, name) for name in names if not name.startswith(".")):
            if path.is_file():
                paths.append(path)
            else:
                left_out[path] = "a link to nothing" if path.is_symlink() else "not a file"
    return paths, left_out


def _folder(folder: Path, files: list[Path], left_out: Mapping[Path, str], how: Documents) -> Iterator[_Row]:
    for path in sorted([*files, *left_out], key=lambda path: path.relative_to(folder).parts):
        where = path.relative_to(folder).as_posix()
        if path in left_out:
            yield _Row(where, reason=left_out[path])
        elif reads(path):
            try:
                for row in _of_rows(path, how):
                    yield replace(row, where=f"{where}{row.where.removeprefix(path.name)}")
            except ConfigError as error:
                yield _Row(where, reason=str(error))
        elif refused := _no_documents(path):
            yield _Row(where, reason=refused)
        elif _kind(path) != "text":
            yield from _file(path, where, how)
        else:
            yield _whole(path, where, how)


def _whole(path: Path, where: str, how: Documents) -> _Row:
    try:
        with opened(path, how.encoding) as stream:
            data = stream.read(4 * how.max_chars + 1)
    except Exception as error:
        return _Row(where, reason=f"cannot be read: {error}")
    return (
        _too_long(where, how.max_chars) if len(data) > 4 * how.max_chars else _decoded(data.removeprefix(_MARK), where)
    )


def _file(path: Path, where: str, how: Documents) -> Iterator[_Row]:
    try:
        if _kind(path) == "parquet":
            yield from _parquet(path, where, how)
            return
        with opened(path, how.encoding) as stream:
            yield from _lines(stream, where, _kind(path) == "json", how)
    except Exception as error:  # earlier rows stay
        yield _Row(where, reason=f"{FURTHER}: {error}")


def _kind(path: Path) -> str:
    """By suffix, or else by first bytes."""
    kinds = {
        **dict.fromkeys((*_PLAIN, *_OF_LINES), "text"),
        ".parquet": "parquet",
        **dict.fromkeys(_JSON, "json"),
        **dict.fromkeys(_TABLES, "table"),
    }
    return kinds.get(_suffix(path)) or ("json" if begins_json(_begin(path)) else "text")


def _begin(path: Path) -> bytes:
    try:
        with opened(path) as stream:
            return bytes(stream.read(BEGIN_BYTES))
    except Exception:  # reported elsewhere
        return b""


def _suffix(path: Path) -> str:
    return suffixes(path)[0]


def _no_documents(path: Path) -> str:
    """Return why a file's lines are not documents, or ""."""
    kind = _kind(path)
    if kind in ("table", "parquet"):
        return _NO_TABLES if kind == "table" else ""
    if kind_name := _OF_BYTES.get(_suffix(path)):
        return f"{kind_name}, and no text: {_TEXTS}"
    begin, suffix = _begin(path), _suffix(path)
    if kind == "json" and is_spread_json(begin):
        return ONE_OBJECT
    if suffix == ".json" and without_mark(begin).startswith(b"["):  # in .jsonl, only that line is bad
        return ONE_ARRAY
    if suffix not in (*_JSON, *_PLAIN, *_OF_LINES) and begins_array(begin):
        return ONE_ARRAY
    # Otherwise valid lines by chance would be scored.
    binary_kind = kind_of_bytes(begin) if _zipped(path) else kind_of(path)
    return binary_kind and f"{binary_kind}, and no text: {remedy_of(binary_kind) or _TEXTS}"


def _zipped(path: Path) -> bool:
    return bool(suffixes(path)[1])


def _most_bytes(compressed: int) -> int:
    return max(ALWAYS_BYTES, MOST_TIMES * compressed)


def _standard_input(how: Documents) -> Iterator[_Row]:
    stream: Any = recoded(sys.stdin.buffer, how.encoding)
    begin = stream.peek(1)  # in a terminal, waits for a line
    if kind := kind_of_bytes(begin):
        kind = kind.split(",")[0]
        raise ConfigError(f"standard input is {kind}, and no text: {remedy_of(kind) or _TEXTS}")
    if begins_array(begin):
        raise ConfigError(f"standard input is {ONE_ARRAY}")
    if is_spread_json(begin):
        raise ConfigError(f"standard input is {ONE_OBJECT}")
    yield from _lines(stream, "stdin", begins_json(begin), how)


def _lines(stream: BinaryIO, where: str, as_json: bool, how: Documents) -> Iterator[_Row]:
    # Up to four bytes a character, six in JSON (\uXXXX), and other fields.
    limit = how.max_chars * (8 if as_json else 4) + 65536
    number = 0
    while line := stream.readline(limit):
        number += 1
        at = f"{where}:{number}"
        if len(line) == limit and not line.endswith(b"\n"):
            while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield _too_long(at, how.max_chars)
            continue
        if number == 1:
            line = line.removeprefix(_MARK)
        if not line.strip():
            continue
        if not as_json:
            yield _decoded(line.rstrip(b"\r\n"), at)
            continue
        try:
            item = loads(line.decode(), halves=True)  # lone surrogates get a separate reason
        except UnicodeDecodeError as error:
            yield _Row(
                at, reason=f"not UTF-8 (byte {error.start}: {error.reason}): give its encoding (--encoding latin-1)"
            )
        except (ValueError, RecursionError) as error:
            yield _Row(at, reason=f"not valid JSON ({error})")
        else:
            if isinstance(item, dict):
                yield from _of_item(item, at, how)
            else:
                yield _Row(at, reason=f"not a JSON object: {type(item).__name__}")


def _decoded(data: bytes, where: str) -> _Row:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return _Row(
            where, reason=f"not UTF-8 (byte {error.start}: {error.reason}): give its encoding (--encoding latin-1)"
        )
    if "\0" in text:  # UTF-16 without its mark may be valid UTF-8
        return _Row(where, reason=f"not a text (a NUL at character {text.index(chr(0))}): UTF-16, perhaps")
    return _Row(where, text)


def _too_long(where: str, max_chars: int) -> _Row:
    return _Row(where, reason=f"longer than {max_chars} characters")


def _parquet_file(path: Path) -> Any:
    pa = import_arrow("reading parquet")
    try:
        return pa.parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a parquet file that can be read: {first_sentence(error)}") from error


def _parquet_columns(path: Path, how: Documents) -> list[str]:
    names = _parquet_file(path).schema_arrow.names
    of_chats = {name for names_of in FIELDS.values() for name in names_of}
    if how.text_field not in names and not of_chats.intersection(names):
        raise ConfigError(
            f"{path} has no column {how.text_field!r}, it has {', '.join(names)}: name the column of the texts"
        )
    if how.id_field != "id" and how.id_field not in names:
        raise ConfigError(
            f"{path} has no column {how.id_field!r}, it has {', '.join(names)}: name the column of the ids"
        )
    texts = (how.text_field, how.id_field, "messages", "tools", "concepts")
    read = [name for name in names if name in (texts if how.text_field in names else (*texts, *of_chats))]
    for name, n in Counter(read).items():
        if n > 1:
            raise ConfigError(f"{path} has two columns {name!r}: rename one")
    return read


def _parquet(path: Path, where: str, how: Documents) -> Iterator[_Row]:
    columns, number, file = _parquet_columns(path, how), 0, _parquet_file(path)
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group)
        chunks = [
            chunk
            for chunk in map(rows.column, range(rows.num_columns))
            if chunk.path_in_schema.split(".")[0] in columns
        ]
        reason = next(filter(None, map(_too_large, chunks)), "")
        if reason:
            yield _Row(f"{where}:{number + 1}", reason=f"{rows.num_rows} rows cannot be read: {reason}")
            number += rows.num_rows
            continue
        size = 1 if any(_dictionary_bytes(chunk) > LARGE_DICTIONARY_BYTES for chunk in chunks) else 256
        for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=columns):
            for item in batch.to_pylist():
                number += 1
                yield from _of_item(item, f"{where}:{number}", how)


def _too_large(chunk: Any) -> str:
    """Return why a column of a row group is not read, or ""."""
    if chunk.total_uncompressed_size > _most_bytes(chunk.total_compressed_size):
        return (
            f"{chunk.path_in_schema} decompresses to {chunk.total_uncompressed_size:,} bytes, more than {MOST_TIMES}"
            " times its size"
        )
    if _dictionary_bytes(chunk) > MAX_DICTIONARY_BYTES:
        return (
            f"the dictionary of {chunk.path_in_schema} has {_dictionary_bytes(chunk):,} bytes, at most"
            f" {MAX_DICTIONARY_BYTES:,} are read. Write the file without dictionaries"
        )
    return ""


def _dictionary_bytes(chunk: Any) -> int:
    return (
        chunk.data_page_offset - chunk.dictionary_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None
        else 0
    )


def _count_file(path: Path, alone: bool) -> int:
    kind = _kind(path)
    if kind == "parquet":
        try:
            return int(_parquet_file(path).metadata.num_rows)
        except ConfigError:
            return 1
    if (kind == "text" and not alone) or _zipped(path):
        return 1
    lines, last = 0, b"\n"
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")

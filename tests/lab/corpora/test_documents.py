"""Documents are read from every supported source; a bad one is reported with its reason and stops nothing."""

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from probemon.errors import ConfigError, TrainingError
from probemon.lab.corpora.documents import count_documents, read_documents
from probemon.lab.training.example_files import read_rows


def told(source, **options):
    return [(d.index, d.id, d.text, d.reason) for d in read_documents(source, **options)]


def test_each_line_of_text_is_a_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\n  \ntwö\n\ufeffthree".encode())  # a mark is one at the beginning alone
    assert told(path) == [(0, "a.txt:1", "one", ""), (1, "a.txt:4", "twö", ""), (2, "a.txt:5", "\ufeffthree", "")]
    assert count_documents(path) == 5  # lines: what a progress bar expects at most


def test_json_lines_have_ids_and_other_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "id": 7, "concepts": ["x"]}\n\n{"text": "two"}\n', encoding="utf-8")
    found = list(read_documents(path))
    assert [(d.index, d.id, d.text, dict(d.fields)) for d in found] == [
        (0, "7", "one", {"concepts": ["x"]}),
        (1, "a.jsonl:3", "two", {}),
    ]
    path.write_text('{"body": "one", "key": "k"}\n', encoding="utf-8")
    assert told(path, text_field="body", id_field="key") == [(0, "k", "one", "")]


def test_compressed_files_are_read(tmp_path):
    for name, text in (("a.jsonl.gz", '{"text": "one"}\n'), ("a.txt.gz", "one\n")):
        with gzip.open(tmp_path / name, "wt", encoding="utf-8") as stream:
            stream.write(text)
        assert told(tmp_path / name) == [(0, f"{name}:1", "one", "")]
        assert count_documents(tmp_path / name) is None


def test_parquet_rows_are_documents(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "two"], "id": [5, 6, None], "other": [1, 2, 3]}), path)
    assert told(path) == [(0, "5", "one", ""), (1, "6", "", "no field 'text'"), (2, "a.parquet:3", "two", "")]
    assert count_documents(path) == 3
    with pytest.raises(ConfigError, match=r"no column 'body', it has text, id, other"):
        read_documents(path, text_field="body")
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="not a parquet file"):
        read_documents(path)


def test_duplicate_columns_and_keys_are_refused_alike(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["text", "text"]), path)
    with pytest.raises(ConfigError, match=r"a\.parquet has two columns 'text': rename one"):
        read_documents(path)
    (document,) = read_documents(tmp_path)
    assert document.text == "" and "two columns 'text'" in document.reason


def test_messages_given_as_a_string_are_a_bad_document():
    rows = [{"messages": "[]"}, {"messages": "[]", "text": "one"}]
    assert [d.reason for d in read_documents(rows)] == ["'messages' is a text: give a list of messages", ""]
    assert told(rows, text_field="messages")[0] == (0, "0", "[]", "")


def test_dangling_link_is_reported(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="loop is a link that leads nowhere: mend it, or give the file itself"):
        read_documents(tmp_path / "loop")


def test_folder_reads_every_file_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("line\nline", encoding="utf-8")
    (tmp_path / "a.md").write_text("two", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n', encoding="utf-8")
    (tmp_path / "d.parquet").write_bytes(b"broken")
    (tmp_path / ".hidden").write_text("no", encoding="utf-8")
    (tmp_path / "e.dat").write_bytes(b"\x88PNG\xff")
    found = told(tmp_path)
    assert [(i, name, text) for i, name, text, _ in found] == [
        (0, "a.md", "two"),
        (1, "b/one.txt", "line\nline"),
        (2, "c.jsonl:1", "three"),
        (3, "d.parquet", ""),
        (4, "e.dat", ""),
    ]
    assert "not a parquet file" in found[3][3] and found[4][3].startswith("not UTF-8 (byte 0")
    assert count_documents(tmp_path) == 5


def test_iterables_may_hold_texts_and_objects():
    rows = ["one", {"text": "two", "id": "b"}, 3, {"id": "d"}, {"text": 5}, None]
    assert told(iter(rows)) == [
        (0, "0", "one", ""),
        (1, "b", "two", ""),
        (2, "2", "", "neither a text nor an object: int"),
        (3, "d", "", "no field 'text'"),
        (4, "4", "", "'text' is int, not a text"),
        (5, "5", "", "neither a text nor an object: NoneType"),
    ]
    assert count_documents(rows) == 6 and count_documents(iter(rows)) is None


def test_whitespace_alone_is_a_document():
    assert told(["", " ", "\n"]) == [(0, "0", "", "empty"), (1, "1", " ", ""), (2, "2", "\n", "")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a\xff"}', "not UTF-8 (byte 11"),
        (b'{"text": ', "not valid JSON"),
        (b"[1]", "not a JSON object: list"),
        (b'{"text": ""}', "empty"),
        (b'{"text": "\\ud800"}', "not valid Unicode"),
        (b'{"text": "' + b"x" * 41 + b'"}', "longer than 40 characters (41)"),
        (b'{"text": "' + b"x" * 100_000 + b'"}', "longer than 40 characters"),
        (b'{"a":' * 100_000, "longer than"),
        (b"[" * 40_000, "not valid JSON"),
    ],
)
def test_a_bad_line_has_its_reason_and_the_next_is_read(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b'\n{"text": "next", "id": "n"}\n')
    first, second = told(path, max_chars=40)
    assert first[:3] == (0, "a.jsonl:1", "") and first[3].startswith(reason)
    assert second == (1, "n", "next", "")


def test_undecodable_and_overlong_text_lines_are_bad_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\xff\n" + b"y" * 300_000 + b"\nnext\n")
    assert [(d[2], d[3][:20]) for d in told(path, max_chars=1000)] == [
        ("", "not UTF-8 (byte 1: i"),
        ("", "longer than 1000 cha"),
        ("next", ""),
    ]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "long.txt").write_text("z" * 9000, encoding="utf-8")
    (folder / "empty.txt").write_text("", encoding="utf-8")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-20])
    found = told(folder, max_chars=1000)
    assert found[-2:] == [
        (len(found) - 2, "empty.txt", "", "empty"),
        (len(found) - 1, "long.txt", "", "longer than 1000 characters"),
    ]
    assert found[-3][3].startswith("cannot be read")
    (folder / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00" + b"\x00" * 6 + b"not deflate at all")
    assert (
        "cannot be read" in told(folder, max_chars=1000)[0][3] and len(told(folder, max_chars=1000)) == len(found) + 1
    )
    alone = told(folder / "cut.jsonl.gz")
    assert alone[0][2] == "one" and alone[-1][3].startswith("cannot be read (further)")


def test_unprintable_id_is_reported():
    assert told([{"text": "a", "id": 10**5000}, "b"]) == [
        (0, "0", "", "its id cannot be written (ValueError)"),
        (1, "1", "b", ""),
    ]


def test_id_with_invalid_unicode_is_escaped():
    assert told([{"text": "a", "id": "\ud800x"}]) == [(0, "\\ud800x", "a", "")]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b'{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        (b'\xef\xbb\xbf\n {"text": "one"}\n', ["one"]),
        (b"one\n\ntwo\n", ["one", "two"]),
        (b"", []),
    ],
)
def test_standard_input_may_be_json_lines_or_text(monkeypatch, data, texts):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    assert [d.text for d in read_documents("-")] == texts
    assert count_documents("-") is None


@pytest.mark.parametrize("source", ["nowhere.txt", {"text": "a"}, b"bytes", 5])
def test_invalid_source_is_an_error_before_reading(source):
    with pytest.raises(ConfigError):
        read_documents(source)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="holds no files"):
        read_documents(tmp_path)


def test_missing_length_limit_is_an_error():
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigError, match="max_chars"):
            read_documents([], max_chars=wrong)


def test_documents_are_read_lazily(tmp_path):
    """So that a corpus is never held as a whole."""
    path = tmp_path / "a.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for i in range(10_000):
            stream.write(json.dumps({"text": f"document {i}"}) + "\n")
    reader = read_documents(path)
    assert next(reader).text == "document 0"
    with path.open("a", encoding="utf-8") as stream:  # read as it goes, so what is added meanwhile is seen
        stream.write('{"text": "last"}\n')
    assert list(reader)[-1].text == "last"


def damaged(data):
    """A compressed file cut short, and some with one byte changed."""
    whole = gzip.compress(data, mtime=0)
    yield whole[: len(whole) // 2]
    for at in range(0, len(whole), 5):
        yield whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]


def test_a_damaged_archive_in_a_folder_stops_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("before")
    (tmp_path / "c.txt").write_text("after")
    reasons = []
    for data in damaged(b"one two three four five six seven eight nine ten" * 3):
        (tmp_path / "b.txt.gz").write_bytes(data)
        found = told(tmp_path)
        assert [(d[1], d[2]) for d in found if d[1] != "b.txt.gz"] == [("a.txt", "before"), ("c.txt", "after")]
        reasons += [d[3] for d in found if d[1] == "b.txt.gz"]
    assert (
        len(reasons) > 10 and sum("cannot be read" in reason for reason in reasons) > len(reasons) / 2
    )  # some bytes of the header do not matter


def test_unreadable_folder_entries_are_bad_documents(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "texts"
    elsewhere.mkdir()
    (elsewhere / "x.txt").write_text("x")
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "file-link.txt").symlink_to(elsewhere / "x.txt")
    (folder / "folder-link").symlink_to(elsewhere)
    (folder / "nothing.txt").symlink_to(tmp_path / "gone")
    os.mkfifo(folder / "pipe")
    assert [(d[1], d[2], d[3]) for d in told(folder)] == [
        ("a.txt", "a", ""),
        ("file-link.txt", "x", ""),
        ("folder-link", "", "a link to a folder, which is not followed: give that folder too"),
        ("nothing.txt", "", "a link to nothing"),
        ("pipe", "", "not a file"),
    ]
    assert count_documents(folder) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's eyes")
def test_folder_without_read_permission_is_a_bad_document(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "secret").mkdir(mode=0)
    program = (
        "import os, sys; from probemon.lab.corpora.documents import read_documents; os.setuid(65534); print([(d.id,"
        " d.reason) for d in read_documents(sys.argv[1])])"
    )
    for folder in (tmp_path, *(above for above in tmp_path.parents if "pytest" in above.name or "popen" in above.name)):
        folder.chmod(0o755)  # pytest makes its folders for one user alone
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.stdout.strip() == "[('a.txt', ''), ('secret', 'cannot be read: Permission denied')]", done.stderr


def test_utf16_text_is_not_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("A dog.\nA cat.\n".encode("utf-16-le"))
    assert all(
        reason == "not a text (a NUL at character 1): UTF-16, perhaps" or text == ""
        for _, _, text, reason in told(tmp_path / "a.txt")
    )
    assert told(tmp_path)[0][3].startswith("not a text")


@pytest.mark.parametrize("suffix", [".yaml", ".YML", ".html", ".py", ".ipynb", ".toml"])
def test_source_code_is_one_document_in_a_folder_and_refused_alone(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match="each line is a document: write its texts"):
        read_documents(tmp_path / f"a{suffix}")
    (document,) = read_documents(tmp_path)
    assert (document.text, document.reason) == ("one\ntwo\n", "")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npy", ".pkl", ".png"])
def test_tensors_pickles_and_pictures_are_never_text(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match="and no text: write its texts"):
        read_documents(tmp_path / f"a{suffix}")
    (document,) = read_documents(tmp_path)
    assert document.text == "" and document.reason.endswith("and no text: write its texts as .txt or .jsonl")


def test_a_suffix_may_be_in_capitals(tmp_path):
    with gzip.open(tmp_path / "A.JSONL.GZ", "wt", encoding="utf-8") as stream:
        stream.write('{"text": "one"}\n')
    assert told(tmp_path / "A.JSONL.GZ") == [(0, "A.JSONL.GZ:1", "one", "")]


def test_missing_id_column_is_reported(tmp_path):
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="has no column 'key', it has text: name the column of the ids"):
        read_documents(tmp_path / "a.parquet", id_field="key")


def test_hugging_face_dataset_is_iterated():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"text": "one", "id": "a"}, {"text": "two", "id": "b"}])
    assert told(made) == [(0, "a", "one", ""), (1, "b", "two", "")] and count_documents(made) == 2


def test_duplicate_key_is_reported_and_stops_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "text": "two"}\n{"text": "three"}\n')
    (_, _, text, reason), (_, _, other, _) = told(path)
    assert (text, other) == ("", "three") and "'text' appears twice" in reason


def zipped(path, parts):
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for part in parts:
            stream.write(part)
    return path


@pytest.mark.parametrize("part", [b"a" * (1 << 20), b"\n" * (1 << 20)], ids=["one line", "blank lines"])
def test_archive_that_expands_excessively_is_reported_early(tmp_path, part, monkeypatch):
    monkeypatch.setattr("probemon.util.row_files.ALWAYS_BYTES", 1 << 20)
    monkeypatch.setattr("probemon.util.row_files.MOST_TIMES", 20)
    path = zipped(tmp_path / "a.txt.gz", [b"one\n", *[part] * 10])
    read, real = [], gzip.GzipFile.read

    def counting(stream, size=-1):
        data = real(stream, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(gzip.GzipFile, "read", counting)
    found = told(path)
    assert (
        found[0][2:] == ("one", "")
        and found[-1][3].startswith("cannot be read (further): a.txt.gz decompresses to more than 20 times its size")
        and len(found) == 2
    )
    assert 1 << 20 < sum(read) <= max(1 << 20, 20 * path.stat().st_size) + (1 << 17) < 10 << 20


def test_long_compressible_texts_are_read_completely(tmp_path):
    path = zipped(tmp_path / "a.txt.gz", [b"one two three\n" * 1000] * 30)
    assert len(told(path)) == 30_000


@pytest.mark.parametrize(
    "compression, size, words",
    [("zstd", 3_000_000, "decompresses to"), ("none", 3_000_000, "the dictionary of text has")],
)
def test_oversized_parquet_row_groups_are_reported_and_others_read(tmp_path, monkeypatch, compression, size, words):
    monkeypatch.setattr("probemon.lab.corpora.documents.ALWAYS_BYTES", 1 << 20)
    monkeypatch.setattr("probemon.lab.corpora.documents.MAX_DICTIONARY_BYTES", 1 << 20)
    path = tmp_path / "a.parquet"
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(
        path, schema, compression=compression, use_dictionary=True, dictionary_pagesize_limit=1 << 30
    ) as writer:
        for texts in (["one", "two"], ["a" * size] * 5, ["three"]):
            writer.write_table(pa.table({"text": texts}, schema=schema))
    found = told(path)
    assert [row[2] for row in found] == ["one", "two", "", "three"] and found[-1][1] == "a.parquet:8"
    assert found[2][1] == "a.parquet:3" and found[2][3].startswith("5 rows cannot be read") and words in found[2][3]


def test_rows_of_a_large_dictionary_are_read_one_by_one_equally(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {i % 7}" for i in range(50)], "id": list(range(50))}), path)
    whole = told(path)
    monkeypatch.setattr("probemon.lab.corpora.documents.LARGE_DICTIONARY_BYTES", 1)
    assert told(path) == whole and len(whole) == 50


@pytest.mark.parametrize("name", ["mails.csv", "mails.TSV", "mails.csv.gz"])
def test_rows_of_a_table_are_documents(tmp_path, name):
    (tmp_path / "folder").mkdir()
    path, separator = tmp_path / "folder" / name, "\t" if "TSV" in name else ";"
    rows = [["id", "text", "label"], ["7", "whales", "sea"], ["", "ships", ""]]
    data = "\n".join(separator.join(row) for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    (tmp_path / "folder/note.txt").write_text("sea")
    wanted = [("7", "whales"), (f"{name}:2", "ships")]
    assert [(i, text) for _, i, text, _ in told(path)] == wanted
    assert [dict(document.fields) for document in read_documents(path)] == [{"label": "sea"}, {}]
    assert [(i, text) for _, i, text, _ in told(tmp_path / "folder")] == [*wanted, ("note.txt", "sea")]
    with pytest.raises(ConfigError, match="has no field 'said', it has id, text, label: name the field of the texts"):
        list(read_documents(path, text_field="said"))


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("mails.bin", b"GGUF\x03\0\0\0\nwhales\n", "tensors of llama.cpp"),
        ("mails.pdf", b"%PDF-1.4\n1 0 obj\n<< /Type /Page >>\n\x80\nendobj\n", "a PDF"),
        ("mails.docx", b"PK\x03\x04\n\x80\nword\n", "a zip archive"),
        ("mails.rtf", b"{\\rtf1 whales\n}\n", "rich text"),
        ("mails.txt", gzip.compress(b"whales\n", mtime=0), "compressed by gzip"),
        ("mails", b"PAR1\nwhales\n", "parquet"),
    ],
)
def test_file_whose_lines_are_not_documents_is_refused(tmp_path, name, data, what):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / name
    path.write_bytes(data)
    (tmp_path / "folder/note.txt").write_text("ships")
    with pytest.raises(ConfigError, match=f"{name} is {what}"):
        list(read_documents(path))
    read = {document.id: document for document in read_documents(tmp_path / "folder")}
    assert len(read) == 2 and read["note.txt"].text == "ships" and what in read[name].reason


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("mails.json", b'[\n  {"text": "whales"},\n  {"text": "ships"}\n]\n', ["whales", "ships"]),
        ("mails.json.gz", gzip.compress(b'\xef\xbb\xbf[{"text": "whales"}]', mtime=0), ["whales"]),
        ("run.json", b'{\n  "text": "whales",\n  "n": [\n    1\n  ]\n}\n', ["whales"]),
    ],
)
def test_json_documents_are_read(tmp_path, name, data, texts):
    (tmp_path / name).write_bytes(data)
    assert [text for _, _, text, _ in told(tmp_path / name)] == texts
    assert [text for _, _, text, _ in told(tmp_path)] == texts


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("run.jsonl", b'{\n  "text": "whales"\n}\n{\n  "text": "ships"\n}\n'),
        ("mails.arrow", b"\xff\xff\xff\xff\x88\0\0\0\nwhales\n"),
    ],
)
def test_damaged_documents_are_an_error_alone_and_bad_in_a_folder(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    (tmp_path / "note.txt").write_text("ships")
    with pytest.raises(ConfigError, match=name):
        list(read_documents(tmp_path / name))
    read = {document.id: document for document in read_documents(tmp_path)}
    assert read["note.txt"].text == "ships" and len(read) == 2 and all(name in d.id for d in read.values() if d.reason)


def test_rows_before_a_damaged_one_stay(tmp_path):
    (tmp_path / "mails.csv").write_text('id,text\n1,whales\n2,ships,and more\n3,sea\n4,"open\n5,end')
    found = told(tmp_path / "mails.csv")
    assert [text for _, _, text, _ in found] == ["whales", "", "sea", ""]
    assert found[1][3].startswith("mails.csv, row 2 has 3 cells")
    assert "cannot be read (further)" in found[3][3] and "row 4" in found[3][3]


def archive(kind):
    """Two JSON lines in an archive or a table of some kind."""
    rows, packed = b'{"text": "whales"}\n{"text": "ships"}\n', io.BytesIO()
    if kind.startswith("tar"):
        with tarfile.open(fileobj=packed, mode="w:gz" if kind == "tar.gz" else "w", format=tarfile.USTAR_FORMAT) as out:
            entry = tarfile.TarInfo("rows.jsonl")
            entry.size = len(rows)
            out.addfile(entry, io.BytesIO(rows))
    elif kind == "orc":
        orc.write_table(pa.table({"text": ["whales", "ships"]}), packed)
    elif kind == "zip":
        with zipfile.ZipFile(packed, "w") as out:
            out.writestr("rows.jsonl", rows)
    elif kind == "sqlite":
        return b"SQLite format 3\0\x10\0\x01\x01\0\n" + rows
    else:
        made = {
            "bz2": lambda: bz2.compress(rows, 1),
            "xz": lambda: lzma.compress(rows),
            "lzma": lambda: lzma.compress(rows, lzma.FORMAT_ALONE),
            "7z": lambda: b"7z\xbc\xaf\x27\x1c\0\x04\n" + rows,
            "avro": lambda: b"Obj\x01\x04\x14avro.codec\n" + rows,
            "tgz": lambda: archive("tar.gz"),
        }
        return made[kind]()
    return packed.getvalue()


PACKED = {
    "tar.gz": "an archive of tar", "tar": "an archive of tar", "tgz": "(compressed by gzip|an archive of tar)",
    "zip": "a zip archive", "7z": "an archive of 7-Zip", "xz": "compressed by xz", "lzma": "compressed by lzma",
    "bz2": "compressed by bzip2",
}  # fmt: skip
TABLES = {"orc": "an ORC file", "avro": "an Avro file", "sqlite": "a database of SQLite"}


@pytest.mark.parametrize("kind", [*PACKED, *TABLES])
def test_archives_and_other_tables_are_named_with_a_remedy(tmp_path, kind):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / f"rows.{kind}"
    path.write_bytes(archive(kind))
    remedy = "unpack it" if kind in PACKED else "write its rows as .jsonl or .parquet"
    what = (PACKED | TABLES)[kind]
    with pytest.raises(ConfigError, match=rf"rows\.{kind} is {what}.*, and no text: {remedy}"):
        read_documents(path)
    (document,) = read_documents(tmp_path / "folder")
    assert document.text == "" and remedy in document.reason
    with pytest.raises(TrainingError, match=rf"^rows\.{kind} is {what}.*: {remedy}"):
        list(read_rows(path))


def test_text_starting_like_a_binary_table_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("ORCs march.\nOBJ.\n")
    assert [text for _, _, text, _ in told(tmp_path / "a.txt")] == ["ORCs march.", "OBJ."]


def test_an_archive_on_standard_input_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(archive("tar")))))
    with pytest.raises(ConfigError, match="standard input is an archive of tar, and no text: unpack it"):
        list(read_documents("-"))


@pytest.mark.parametrize("name", ["rows", "rows.gz", "rows.dat", "rows.jsonl.1"])
def test_file_without_a_known_suffix_is_recognised_by_its_beginning(tmp_path, name):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / name

    def written(data):
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        return path

    rows = b'\xef\xbb\xbf{"text": "whales"}\n{ "text": "ships", "id": 7}\n'
    wanted = [(0, f"{name}:1", "whales", ""), (1, "7", "ships", "")]
    assert told(written(rows)) == told(tmp_path / "folder") == wanted
    for data in (b'[\n {"text": "whales"}\n]\n', b'{\n "text": "whales"\n}\n'):
        assert [d[2] for d in told(written(data))] == ["whales"]
    assert [d[2] for d in told(written(b"{{cite}} whales\n[ships]\n"))] == ["{{cite}} whales", "[ships]"]
    assert [d[2] for d in told(tmp_path / "folder")] == ["{{cite}} whales\n[ships]\n"]


def test_txt_suffix_is_trusted(tmp_path):
    (tmp_path / "a.txt").write_text('{"text": "whales"}\n')
    assert told(tmp_path / "a.txt") == [(0, "a.txt:1", '{"text": "whales"}', "")]


def test_json_lines_with_a_truncated_first_line_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "wha\n{"text": "ships"}\n')
    assert [text for _, _, text, _ in told(tmp_path / "a.jsonl")] == ["", "ships"]


@pytest.mark.parametrize("save", ["a dataset", "a dict of them"])
def test_saved_datasets_folder_is_read_and_trained_on(tmp_path, save):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "whales", "label": "sea;sky"}, {"text": "ships", "label": "sea"}]
    dataset = datasets.Dataset.from_list(rows)
    place = tmp_path / "folder/saved"
    (dataset if save == "a dataset" else datasets.DatasetDict(train=dataset)).save_to_disk(str(place))
    (tmp_path / "folder/note.txt").write_text("sea")
    assert [text for _, _, text, _ in told(place)] == ["whales", "ships"]
    assert [text for _, _, text, _ in told(tmp_path / "folder")] == ["sea", "whales", "ships"]
    split = {} if save == "a dataset" else {"split": "train"}
    wanted = [{**split, "text": "whales", "label": ["sea", "sky"]}, {**split, "text": "ships", "label": ["sea"]}]
    assert [row for _, row in read_rows(place)] == wanted


@pytest.mark.parametrize(
    ("data", "encoding"), [("Äther\n".encode("latin-1"), "latin-1"), ("Äther\n".encode("utf-16"), "utf-8")]
)
def test_standard_input_is_read_in_its_encoding(monkeypatch, data, encoding):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    assert [document.text for document in read_documents("-", encoding=encoding)] == ["Äther"]


@pytest.mark.parametrize(
    "data", [b'[{"text": "whales"}]', b'\xef\xbb\xbf\n[\n  {"text": "whales"},\n  {"text": "ships"}\n]\n']
)
def test_json_array_on_standard_input_is_not_read_as_text(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    with pytest.raises(ConfigError, match="standard input is one JSON array"):
        list(read_documents("-"))


def test_text_starting_with_a_bracket_is_text(tmp_path, monkeypatch):
    data = b"[INST] whales\n[ships]\n"
    (tmp_path / "mails.txt").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    for source in (tmp_path / "mails.txt", "-"):
        assert [document.text for document in read_documents(source)] == ["[INST] whales", "[ships]"]

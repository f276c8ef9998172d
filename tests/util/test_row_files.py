"""Rows of tables in text, JSON documents, logs of inspect-ai, Arrow files, folders of `datasets`; opened texts."""

import gzip
import json
import re
import struct
import zipfile
import zlib

import pyarrow as pa
import pytest
from pyarrow import feather

from probemon.errors import ConfigError
from probemon.util import row_files
from probemon.util.row_files import class_names, opened, reads, rows_of, with_class_names

TWO = [{"text": "Hi", "label": "a"}, {"text": "Yo", "label": "b"}]
LOG = {"version": 2, "status": "success", "eval": {"task": "t"}, "samples": [{"id": 1, "epoch": 1}, {"id": 2}]}
BOMS = {"utf-8-sig": b"", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}


def written(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def rows(path, **options):
    return [row for _, row in rows_of(path, **options)]


def wheres(path):
    return [where for where, _ in rows_of(path)]


def refusal(path, **options):
    with pytest.raises(ConfigError) as raised:
        list(rows_of(path, **options))
    assert path.name in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def zip_of(members, method=93, flags=0):
    """A zip archive, as inspect-ai writes it: local headers with an extra field, the directory, its end."""
    body, directory = b"", b""
    for name, data in members.items():
        raw = zstd(data) if method == 93 else data
        common = struct.pack("<HHHHHIII", 20, flags, method, 0, 33, zlib.crc32(data), len(raw), len(data))
        ends = name.encode()
        directory += b"PK\1\2" + struct.pack("<H", 20) + common
        directory += struct.pack("<HHHHHII", len(ends), 0, 0, 0, 0, 0, len(body)) + ends
        body += b"PK\3\4" + common + struct.pack("<HH", len(ends), 4) + ends + b"\xfe\xca\0\0" + raw
    count = len(members)
    return body + directory + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body), 0)


# Tables in text


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_separators_and_line_ends_are_found(tmp_path, suffix, separator, end):
    lines = ["text label", "Hi a", "", "Yo b"]
    path = written(tmp_path / f"t.{suffix}", end.join(lines).replace(" ", separator))
    assert reads(path) == suffix.upper()
    assert list(rows_of(path)) == [(f"t.{suffix}, row 1", TWO[0]), (f"t.{suffix}, row 2", TWO[1])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('text;label\n"Hi, you";a\nYo, you, there;b\n', [("Hi, you", "a"), ("Yo, you, there", "b")]),
        ("text,label\nHi; you; there,a\nYo; you,b\n", [("Hi; you; there", "a"), ("Yo; you", "b")]),
        ('"text";"label"\n"a, ""b""; c";x\n', [('a, "b"; c', "x")]),
        ('text,label\n"two\nlines, and\r\nmore",a\n', [("two\nlines, and\r\nmore", "a")]),
        ('text\tlabel\n5" of it, | and; more\ta\n', [('5" of it, | and; more', "a")]),
        (' text , label \n " x",007\n', [(' " x"', "007")]),
        ('text,label\n"' + "long; " * 20_000 + '",a\n', [("long; " * 20_000, "a")]),
    ],
)
def test_cells_hold_separators_quotes_and_line_breaks(tmp_path, text, expected):
    assert rows(written(tmp_path / "t.csv", text)) == [{"text": text, "label": label} for text, label in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"id";"a, b"\n"1";"x, y"\n', {"id": "1", "a, b": "x, y"}),
        ("text, as said;label\nHi;a\nYo;b\n", {"text, as said": "Hi", "label": "a"}),
    ],
)
def test_a_header_may_hold_another_separator(tmp_path, text, expected):
    assert rows(written(tmp_path / "t.csv", text))[0] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text\nHi\nYo\n", [{"text": "Hi"}, {"text": "Yo"}]),
        (",text,label\n0,Hi,a\n1,,b\n", [{"text": "Hi", "label": "a"}, {"label": "b"}]),
        ("text,label\nHi,a\n,\nYo,b\n", TWO),
        ("text,label\n", []),
    ],
)
def test_an_index_empty_cells_and_empty_rows_are_left_out(tmp_path, text, expected):
    assert rows(written(tmp_path / "t.csv", text)) == expected


@pytest.mark.parametrize("codec", [*BOMS])
def test_marks_tell_the_encoding_whatever_is_given(tmp_path, codec):
    path = written(tmp_path / "t.csv", BOMS[codec] + "text,label\nÄ€😀,a\n".encode(codec))
    assert rows(path, encoding="latin-1") == [{"text": "Ä€😀", "label": "a"}]


def test_an_encoding_is_given(tmp_path):
    path = written(tmp_path / "t.csv", "text\nÄ\n".encode("latin-1"))
    assert rows(path, encoding="latin-1") == [{"text": "Ä"}]
    for unknown in ("latin-17", "hex"):
        with pytest.raises(ConfigError, match=f"'{unknown}' is no encoding of texts: give --encoding latin-1"):
            rows(path, encoding=unknown)


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, zstd])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("filler", [0, 70_001])
def test_the_byte_that_cannot_be_decoded_is_named(tmp_path, before, filler, pack):
    data = before + b"text\n" + b"x" * filler + b"\nH\xc4\n"
    suffix = {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}.get(pack(data)[:2], "")
    said = refusal(written(tmp_path / f"t.csv{suffix}", pack(data)))
    assert f"is not UTF-8 at byte {data.index(0xC4)}: give --encoding latin-1" in said


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd), (".ZST", zstd)])
def test_packed_tables(tmp_path, suffix, pack):
    path = written(tmp_path / f"t.tsv{suffix}", pack(b"text\tlabel\nHi\ta\nYo\tb\n"))
    assert (reads(path), rows(path)) == ("TSV", TWO)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("text,text\nHi,a\n", "two columns 'text': rename one"),
        ("text, text\nHi,a\n", "two columns 'text'"),
        ("text,,label\nHi,x,a\n", "columns without a name"),
        ('""\n0\n', "columns without a name"),
        ("", "is empty: give a header"),
        ("\n\n", "is empty: give a header"),
        ('text,label\nHi,a\n"Yo,b\n', r"row 2 is cut \(.*\): close its quotes"),
        ('text,label\n"Yo" there,b\n', r"row 1 is cut \(.*\): close its quotes"),
        ("text,label\nHi,a\n".encode("utf-16-le"), "NULs in its header: give --encoding utf-16-le"),
        (b"PK\3\4" + bytes(99), "is a zip archive, as .docx, .xlsx and .odt are, and no table in text: unpack it"),
    ],
)
def test_bad_tables_are_refused(tmp_path, data, said):
    assert re.search(said, refusal(written(tmp_path / "t.csv", data)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("text,label\nHi,a\nYo\n", "row 2 has 1 cells, and the header has 2: quote texts that hold commas"),
        ("text;label\nHi;a\nYo;b;c\n", "row 2 has 3 cells, and the header has 2: quote texts that hold semicolons"),
        ("text\nHi\nHi, you\n", "row 2 has 2 cells, and the header has 1"),
    ],
)
def test_row_of_other_cells_than_the_header_is_bad_alone(tmp_path, data, said):
    path = written(tmp_path / "t.csv", data + data.splitlines()[1] + "\n")
    good, bad, again = (row for _, row in rows_of(path))
    assert good == again and isinstance(bad, ConfigError) and said in str(bad)


def test_rows_before_a_bad_one_are_given(tmp_path):
    found = rows_of(written(tmp_path / "t.csv", "text,label\nHi,a\nYo\n"))
    assert next(found) == ("t.csv, row 1", TWO[0])


# JSON documents


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".dump", ""])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16"])
def test_arrays(tmp_path, suffix, indent, codec):
    path = written(tmp_path / f"t{suffix}", ("\n " + json.dumps(TWO, indent=indent)).encode(codec))
    assert reads(path) == "a JSON array"
    assert list(rows_of(path)) == [(f"t{suffix}, row 1", TWO[0]), (f"t{suffix}, row 2", TWO[1])]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".dump"])
def test_one_object_over_several_lines(tmp_path, suffix):
    path = written(tmp_path / f"t{suffix}", json.dumps({"text": "Hi", "n": [1]}, indent=1))
    assert reads(path) == "one JSON object"
    assert list(rows_of(path)) == [(path.name, {"text": "Hi", "n": [1]})]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd)])
@pytest.mark.parametrize(("value", "kind"), [(TWO, "a JSON array"), (TWO[0], "one JSON object")])
def test_packed_documents(tmp_path, suffix, pack, value, kind):
    path = written(tmp_path / f"t.json{suffix}", pack(json.dumps(value, indent=1).encode()))
    assert (reads(path), rows(path)) == (kind, value if isinstance(value, list) else [value])


@pytest.mark.parametrize("indent", [None, 2])
def test_a_log_in_json_gives_its_samples(tmp_path, indent):
    path = written(tmp_path / "log.json", json.dumps(LOG, indent=indent))
    assert reads(path) == "an inspect-ai log"
    assert list(rows_of(path)) == [("log.json, sample 1", {"id": 1, "epoch": 1}), ("log.json, sample 2", {"id": 2})]


def test_an_object_with_samples_is_a_log_whatever_its_name(tmp_path):
    assert wheres(written(tmp_path / "x.txt2", json.dumps({"a": 1, "samples": [{}]}, indent=1))) == ["x.txt2, sample 1"]


@pytest.mark.parametrize("samples", [{"samples": []}, {"samples": None}, {}])
def test_a_log_without_samples_is_refused(tmp_path, samples):
    log = {key: value for key, value in LOG.items() if key != "samples"} | samples
    assert "without samples: give one" in refusal(written(tmp_path / "log.json", json.dumps(log, indent=2)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1},\n {"b" 2}]', "not valid JSON (Expecting ':' delimiter at line 2, column 7)"),
        ('{\n"a": 1}\n{\n"a": 2}', "not valid JSON (Extra data at line 3, column 1): mend it, or write one object"),
        ('[{"a": 1}, "Hi"]', "t.json, row 2 is str, not an object"),
        ('[{"a": 1, "a": 2}]', "'a' appears twice"),
        ('[{"a": "\\ud83d"}]', "\\ud83d, half of a surrogate pair"),
        ("[" * 200_000, "nested too deeply"),
        ('[{"a": ' + "1" * 5000 + "}]", "4300 digits"),
        (b'[{"a": "\xff"}]', "not UTF-8 at byte 8"),
    ],
)
def test_bad_documents_are_refused(tmp_path, text, said):
    assert said in refusal(written(tmp_path / "t.json", text))


def test_documents_are_bounded(tmp_path, monkeypatch):
    path = written(tmp_path / "t.json", json.dumps(TWO))
    monkeypatch.setattr(row_files, "MOST_TEXT", len(json.dumps(TWO)))
    assert rows(path) == TWO
    monkeypatch.setattr(row_files, "MOST_TEXT", len(json.dumps(TWO)) - 1)
    assert "characters in one JSON document: write JSON lines" in refusal(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.jsonl", '{"text": "Hi"}\n{"text": "Yo"}\n'),
        ("t.json", '{"text": "Hi"}\n'),
        ("t.jsonl", '[{"text": "bad row"}]\n{"text": "Hi"}\n'),
        ("t.txt", '[{"text": "Hi"}]'),
        ("t.yaml", '[{"text": "Hi"}]'),
        ("t.ipynb", '{\n"cells": []\n}'),
        ("t.txt", "Hi"),
        ("t.md", "[link](to)"),
        ("t.parquet", b"PAR1"),
        ("t.eval", "eval"),
        ("t.jsonl.gz", gzip.compress(b'{"text": "Hi"}\n', mtime=0)),
        ("t.jsonl.zst", zstd(b'{"text": "Hi"}\n')),
        ("t.tar.zst", zstd(b"Hi")),
        ("t.zst", zstd(b"%PDF-1.7 ...")),
        ("empty", ""),
    ],
)
def test_other_files_are_read_elsewhere(tmp_path, name, data):
    path = written(tmp_path / name, data)
    assert reads(path) == ""
    assert "holds no rows that can be read" in refusal(path)


def test_folders_of_files_and_missing_files_are_read_elsewhere(tmp_path):
    assert [reads(tmp_path), reads(tmp_path / "none.csv")] == ["", ""]


# Logs of inspect-ai

MEMBERS = {
    "_journal/start.json": b"{}",
    "samples/1_epoch_1.json": b'{"id": 1, "messages": []}',
    "samples/b_epoch_1.json": '{"id": "ä"}'.encode(),
    "summaries.json": b"[]",
    "header.json": b"{}",
}


def deflated(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("method", ["deflate", "zstd", "stored"])
def test_samples_of_a_log(tmp_path, method):
    path = tmp_path / "log.eval"
    if method == "deflate":
        deflated(path, MEMBERS)
    else:
        path.write_bytes(zip_of(MEMBERS, 93 if method == "zstd" else 0))
    assert reads(path) == "an inspect-ai log"
    assert list(rows_of(path)) == [
        ("log.eval, samples/1_epoch_1.json", {"id": 1, "messages": []}),
        ("log.eval, samples/b_epoch_1.json", {"id": "ä"}),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_a_sample_of_several_zstd_frames_is_whole(tmp_path, monkeypatch):
    whole = zstd
    monkeypatch.setitem(globals(), "zstd", lambda data: whole(data[:9]) + whole(data[9:]))
    assert rows(written(tmp_path / "log.eval", zip_of(MEMBERS)))[0] == {"id": 1, "messages": []}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (zip_of({"header.json": b"{}"}), "without samples: give one"),
        (zip_of(MEMBERS)[:-30], "no whole inspect-ai log (File is not a zip file): write it by inspect log convert"),
        (
            zip_of({"samples/1_epoch_1/sample.json": b"{}", "samples/1_epoch_1/messages/0.json": b"[]"}),
            "in chunks: give the log",
        ),
        (zip_of(MEMBERS, method=14), "log.eval"),
        (zip_of(MEMBERS, method=77), "not supported"),
        (zip_of(MEMBERS, method=0, flags=1), "encrypted"),
        (zip_of({"samples/1.json": b'{"id": 1'}), "samples/1.json is not valid JSON (Expecting"),
        (zip_of({"samples/1.json": b"[1]"}), "samples/1.json is list, not an object"),
        (zip_of({"samples/1.json": b'{"\xff": 1}'}), "samples/1.json is not valid JSON (not UTF-8 at byte 2)"),
        (zip_of(MEMBERS).replace(b"\x28\xb5\x2f\xfd", b"\0\0\0\0"), "samples/1_epoch_1.json cannot be decompressed"),
    ],
)
def test_bad_logs_are_refused(tmp_path, data, said):
    assert said in refusal(written(tmp_path / "log.eval", data))


@pytest.mark.parametrize("method", ["deflate", "zstd"])
def test_samples_are_bounded(tmp_path, monkeypatch, method):
    bomb = {"samples/1.json": b'{"id": "' + b"x" * 1_000_000 + b'"}'}
    path = deflated(tmp_path / "b.eval", bomb) if method == "deflate" else written(tmp_path / "b.eval", zip_of(bomb))
    assert rows(path) == [{"id": "x" * 1_000_000}]
    monkeypatch.setattr(row_files, "ALWAYS_BYTES", 1000)
    assert "samples/1.json decompresses to more than 200 times its size" in refusal(path)


# Texts


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".ZST"])
@pytest.mark.parametrize(
    ("encoding", "mark", "given"),
    [
        ("utf-8", b"", "utf-8"),
        ("utf-8", b"\xef\xbb\xbf", "latin-1"),
        ("utf-16-le", b"\xff\xfe", "utf-8"),
        ("utf-16-be", b"\xfe\xff", "utf-8"),
        ("utf-16-le", b"", "utf-16-le"),
        ("latin-1", b"", "latin-1"),
    ],
)
def test_texts_are_opened_as_utf_8(tmp_path, suffix, encoding, mark, given):
    text = "Ein Wal singt.\r\nÄ\n" * 9000  # longer than a buffer
    data = mark + text.encode(encoding)
    pack = {"": bytes, ".gz": gzip.compress}.get(suffix, zstd)
    with opened(written(tmp_path / f"t.txt{suffix}", pack(data)), given) as stream:
        assert stream.read().removeprefix(b"\xef\xbb\xbf").decode() == text


@pytest.mark.parametrize(
    ("data", "said"), [(zstd(b"a" * 1000)[:-6], "cannot be decompressed"), (b"plain", "cannot be decompressed")]
)
def test_damaged_zstd_is_refused(tmp_path, data, said):
    with pytest.raises(ConfigError, match=said), opened(written(tmp_path / "t.jsonl.zst", data)) as stream:
        stream.read()


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_decompression_is_bounded(tmp_path, monkeypatch, pack):
    path = written(tmp_path / ("t.txt.zst" if pack is zstd else "t.txt.gz"), pack(b"x" * 1_000_000))
    with opened(path) as stream:
        assert stream.read() == b"x" * 1_000_000
    monkeypatch.setattr(row_files, "ALWAYS_BYTES", 1000)
    with opened(path) as stream, pytest.raises(ConfigError, match="decompresses to more than 200 times its size"):
        stream.read()


# Arrow


@pytest.mark.parametrize("suffix", [".feather", ".arrow", ".data"])
@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather(tmp_path, suffix, compression):
    path = tmp_path / f"t{suffix}"
    many = [{"text": f"text {i}", "n": i if i % 2 else None} for i in range(2500)]
    feather.write_feather(pa.Table.from_pylist(many), str(path), compression=compression, chunksize=2000)
    assert reads(path) == ("Feather" if suffix == ".feather" else "Arrow")
    assert rows(path) == many
    assert wheres(path)[::2499] == [f"t{suffix}, row 1", f"t{suffix}, row 2500"]


def stream_of(path, table):
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    return path


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "stream"])
def test_arrow_streams(tmp_path, name):
    path = stream_of(tmp_path / name, pa.Table.from_pylist(TWO))
    assert (reads(path), rows(path)) == ("Arrow", TWO)


def test_bad_arrow_is_refused(tmp_path):
    good = stream_of(tmp_path / "good.arrow", pa.Table.from_pylist(TWO)).read_bytes()
    assert "cut.arrow cannot be read" in refusal(written(tmp_path / "cut.arrow", good[:-100]))
    assert "cannot be read" in refusal(written(tmp_path / "no.feather", b"x" * 99))
    assert "cannot be read" in refusal(written(tmp_path / "empty.arrow", b""))
    twice = pa.table([["a"], ["b"]], names=["text", "text"])
    assert "two columns 'text': rename one" in refusal(stream_of(tmp_path / "two.arrow", twice))
    late = pa.table({"at": pa.array([1 << 60], pa.timestamp("s"))})
    assert "write its rows as .parquet" in refusal(stream_of(tmp_path / "late.arrow", late))
    text = stream_of(tmp_path / "text.arrow", pa.table({"text": ["x" * 77]})).read_bytes()
    place = text.rindex(struct.pack("<2i", 0, 77))  # its offsets; the first such bytes are the length of their buffer
    outside = text[:place] + struct.pack("<2i", 0, 1 << 30) + text[place + 8 :]
    assert "outside.arrow cannot be read" in refusal(written(tmp_path / "outside.arrow", outside))
    first = written(tmp_path / "v1.feather", b"FEA1\0\0\0\0" + bytes(99))
    assert reads(first) == "Feather"
    assert "Feather of version 1: write it again by pyarrow.feather.write_feather" in refusal(first)


# Folders of `datasets`


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    label, mood = datasets.ClassLabel(names=["ham", "spam"]), datasets.ClassLabel(names=["sad", "glad"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "moods": datasets.List(mood)})
    columns = {"text": ["a", "b", "c"], "label": [1, 0, -1], "moods": [[0, 1], [], None]}
    one = datasets.Dataset.from_dict(columns, features=features)
    one.save_to_disk(folder / "one", num_shards=2)
    one.to_parquet(folder / "one.parquet")
    one.select([]).save_to_disk(folder / "none")
    datasets.DatasetDict({"train": one, "a_test": one.select([1])}).save_to_disk(folder / "two")
    own = datasets.Dataset.from_dict({"split": ["own"]})
    datasets.DatasetDict({"train": own}).save_to_disk(folder / "own")
    return folder


SAVED = [
    {"text": "a", "label": "spam", "moods": ["sad", "glad"]},
    {"text": "b", "label": "ham", "moods": []},
    {"text": "c", "label": None, "moods": None},
]


def test_a_saved_dataset(saved):
    assert reads(saved / "one") == "a folder of datasets"
    assert list(rows_of(saved / "one")) == [(f"one, row {i}", row) for i, row in enumerate(SAVED, 1)]
    assert rows(saved / "none") == []


def test_splits_come_in_their_order(saved):
    assert reads(saved / "two") == "a folder of datasets"
    assert list(rows_of(saved / "two")) == [
        *((f"two/train, row {i}", {**row, "split": "train"}) for i, row in enumerate(SAVED, 1)),
        ("two/a_test, row 1", {**SAVED[1], "split": "a_test"}),
    ]
    assert list(rows_of(saved / "own")) == [("own/train, row 1", {"split": "own"})]


def test_the_current_folder_has_a_name(saved, monkeypatch):
    monkeypatch.chdir(saved / "two")
    assert wheres(row_files.Path())[0] == "two/train, row 1"


def test_an_arrow_file_and_a_parquet_of_datasets_name_their_classes(saved):
    parts = sorted((saved / "one").glob("*.arrow"))
    assert [row for part in parts for row in rows(part)] == SAVED
    names = class_names(pa.parquet.read_schema(saved / "one.parquet").metadata)
    assert names == {"label": ["ham", "spam"], "moods": ["sad", "glad"]}
    assert [with_class_names(row, names) for row in pa.parquet.read_table(saved / "one.parquet").to_pylist()] == SAVED


def test_the_folder_names_classes_that_its_files_do_not(saved, tmp_path):
    table = pa.Table.from_pylist([{"label": 1}])
    stream_of(tmp_path / "x.arrow", table)
    written(tmp_path / "state.json", '{"_data_files": [{"filename": "x.arrow"}]}')
    info = json.loads((saved / "one/dataset_info.json").read_text())
    written(tmp_path / "dataset_info.json", json.dumps(info))
    assert rows(tmp_path) == [{"label": "spam"}]


def huggingface(features):
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


CLASSES = {"names": ["x", "y"], "_type": "ClassLabel"}


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        (huggingface({"a": CLASSES, "b": {"dtype": "string", "_type": "Value"}}), {"a": ["x", "y"]}),
        (huggingface({"a": {"feature": CLASSES, "_type": "Sequence"}}), {"a": ["x", "y"]}),
        (huggingface({"a": {"feature": {"feature": CLASSES}}, "b": [CLASSES]}), {"a": ["x", "y"], "b": ["x", "y"]}),
        (huggingface({"a": {"_type": "ClassLabel"}, "b": [], "c": None, "d": {"x": CLASSES}}), {}),
        (huggingface(None), {}),
        (huggingface([1]), {}),
        ({b"huggingface": b"{"}, {}),
        ({b"huggingface": b"[]"}, {}),
        ({b"pandas": b"{}"}, {}),
        (None, {}),
    ],
)
def test_names_of_classes(metadata, names):
    assert class_names(metadata) == names


def test_numbers_without_a_name_stay():
    row = {"a": 2, "b": "x", "c": 0, "d": -1, "e": [1, [0, None]]}
    names = {name: ["x", "y"] for name in "abde"}
    assert with_class_names(row, names) == {"a": 2, "b": "x", "c": 0, "d": None, "e": ["y", ["x", None]]}


@pytest.mark.parametrize(
    "state", ["{}", "[]", '{"_data_files": [{}]}', '{"_data_files": [{"filename": "../x.arrow"}]}']
)
def test_a_folder_that_does_not_list_its_files_is_refused(tmp_path, state):
    folder = tmp_path / "in"
    stream_of(tmp_path / "x.arrow", pa.Table.from_pylist(TWO))
    written(folder / "dataset_info.json", "{}")
    written(folder / "state.json", state)
    assert "state.json does not list what is in its folder: save the folder again" in refusal(folder)


@pytest.mark.parametrize("split", ["..", "a/b", "", "/etc"])
def test_splits_do_not_lead_out_of_their_folder(tmp_path, split):
    written(tmp_path / "dataset_dict.json", json.dumps({"splits": [split]}))
    assert "does not list what is in its folder" in refusal(tmp_path)


def test_a_missing_part_is_named(tmp_path):
    written(tmp_path / "dataset_dict.json", '{"splits": ["train"]}')
    assert f"{tmp_path}/train/dataset_info.json cannot be read (No such file or directory)" in refusal(tmp_path)
    written(tmp_path / "dataset_dict.json", "{")
    assert "dataset_dict.json is not valid JSON" in refusal(tmp_path)

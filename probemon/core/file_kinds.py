"""Names what a file is, by its first bytes, for errors about files of another kind than was wanted.

    kind_of(path)                          # "a PDF", "tensors of llama.cpp (GGUF)"; "" for texts and what is unknown
    is_spread_json(b'{\n  "text": ...')    # True: one object over several lines, not an object a line
    dataset_folder(path)                   # what a folder of `datasets` is, and how to write it as parquet; or ""

Nothing that is read is run, and at most `BEGIN_BYTES` of a file are read, and the table of a zip archive.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

BEGIN_BYTES = 1 << 14
ONE_ARRAY = "one JSON array: write one object a line (jq -c '.[]' does)"
ONE_OBJECT = "one JSON object over several lines: write one object a line (jq -c . does)"
NPZ, NPY, TORCH, PICKLE = "arrays of NumPy (.npz)", "an array of NumPy (.npy)", "a file of torch.save (.pt)", "a pickle"
GGUF, SAFETENSORS = "tensors of llama.cpp (GGUF)", "tensors of safetensors"
_ZIP = b"PK\x03\x04"
_MARKS = {
    b"%PDF-": "a PDF",
    b"{\\rtf": "rich text",
    _ZIP: "a zip archive, as .docx, .xlsx and .odt are",
    b"\xd0\xcf\x11\xe0": "a document of an office, as .doc and .xls are",
    b"\x1f\x8b": "compressed by gzip, and its name does not end in .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\0": "compressed by xz",
    b"BZh91AY&SY": "compressed by bzip2",
    b"PAR1": "parquet, and its name does not end in .parquet",
    b"ARROW1": "an Arrow file",
    b"GGUF": GGUF,
    b"\x93NUMPY": NPY,
    b"\x89HDF\r\n": "HDF5",
    b"\x89PNG": "a picture (PNG)",
    b"\xff\xd8\xff": "a picture (JPEG)",
    b"GIF8": "a picture (GIF)",
    b"SQLite format 3\0": "a database of SQLite",
    b"\x7fELF": "a program (ELF)",
}


def kind_of(path: Path) -> str:
    """Return what a file is, or "" if its first bytes do not say it or cannot be read."""
    try:
        with path.open("rb") as stream:
            begin = stream.read(64)
            if begin.startswith(_ZIP):
                return _zip_kind(path)
    except (OSError, ValueError):
        return ""
    return kind_of_bytes(begin)


def kind_of_bytes(begin: bytes) -> str:
    """Return what a file is that begins with some bytes, or ""."""
    if begin[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return PICKLE
    if begin.startswith(b"\xff" * 4) and 0 < int.from_bytes(begin[4:8], "little") < 1 << 24:
        return "an Arrow stream, as `datasets` saves"
    if int.from_bytes(begin[:8], "little") < 1 << 32 and begin[8:10] == b'{"':
        return SAFETENSORS
    return next((kind for mark, kind in _MARKS.items() if begin.startswith(mark)), "")


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        names = []
    if names and all(name.endswith(".npy") for name in names):
        return NPZ
    return TORCH if any(name.endswith("/data.pkl") for name in names) else _MARKS[_ZIP]


def without_mark(begin: bytes) -> bytes:
    """Return the first bytes of a text without the mark of UTF-8 and blank lines."""
    return begin.removeprefix(b"\xef\xbb\xbf").lstrip()


def is_spread_json(begin: bytes) -> bool:
    """True if a text begins with a JSON object that goes on in the next line.

    The first of JSON lines may be cut off: then the next one begins an object.
    """
    first, newline, rest = without_mark(begin).partition(b"\n")
    following = rest.lstrip()
    return (
        first.startswith(b"{")
        and bool(newline and following)
        and not first.rstrip().endswith(b"}")
        and following[:1] in b'"}'  # a key, or the end
    )


def dataset_folder(path: Path) -> str:
    """Return what a folder that `datasets` saved is, with the remedy; "" for any other folder."""
    try:
        if (path / "dataset_dict.json").is_file():
            part = "['train']"
        elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            part = ""
        else:
            return ""
    except OSError:
        return ""
    return (
        "a folder of `datasets` (save_to_disk): write it as parquet, by"
        f" datasets.load_from_disk({str(path)!r}){part}.to_parquet({path.name + '.parquet'!r})"
    )

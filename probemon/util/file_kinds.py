"""Names the kind of a file by its first bytes, for error messages.

kind_of(path)                          # "a PDF", "tensors of llama.cpp (GGUF)"; "" for texts and unknown kinds
remedy_of("compressed by xz")          # what to do with such a file, or ""
dataset_folder(path)                   # what a folder of `datasets` is, and the remedy; or ""
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

BEGIN_BYTES = 1 << 14
ONE_ARRAY = "one JSON array: write one object a line (jq -c '.[]' does)"
ONE_OBJECT = "one JSON object over several lines: write one object a line (jq -c . does)"
NPZ, NPY, TORCH, PICKLE = "arrays of NumPy (.npz)", "an array of NumPy (.npy)", "a file of torch.save (.pt)", "a pickle"
GGUF, SAFETENSORS = "tensors of llama.cpp (GGUF)", "tensors of safetensors"
TAR, GZIP = "an archive of tar", "compressed by gzip, and its name does not end in .gz"
ZIP, LFS = "a zip archive, as .docx, .xlsx and .odt are", "a pointer of Git LFS, not the file itself"
_ZIP = b"PK\x03\x04"
_MARKS = {
    b"%PDF-": "a PDF",
    b"{\\rtf": "rich text",
    _ZIP: ZIP,
    b"version https://git-lfs.github.com/spec/": LFS,
    b"\xd0\xcf\x11\xe0": "a document of an office, as .doc and .xls are",
    b"\x1f\x8b": GZIP,
    b"\x1f\x9d": "compressed by compress",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"\xfd7zXZ\0": "compressed by xz",
    b"\x5d\0\0": "compressed by lzma",
    b"7z\xbc\xaf\x27\x1c": "an archive of 7-Zip",
    b"Rar!\x1a\x07": "an archive of RAR",
    b"PAR1": "parquet, and its name does not end in .parquet",
    b"ARROW1": "an Arrow file",
    b"FEA1": "an Arrow file (Feather)",
    b"Obj\x01": "an Avro file",
    b"GGUF": GGUF,
    b"\x93NUMPY": NPY,
    b"\x89HDF\r\n": "HDF5",
    b"\x89PNG": "a picture (PNG)",
    b"\xff\xd8\xff": "a picture (JPEG)",
    b"GIF8": "a picture (GIF)",
    b"SQLite format 3\0": "a database of SQLite",
    b"\x7fELF": "a program (ELF)",
    b"OggS\0": "sound (Ogg)",
    b"ID3\x03": "sound (MP3)",
    b"ID3\x04": "sound (MP3)",
    b"fLaC\0": "sound (FLAC)",
}
_BZIP2, _ORC, _RIFF = "compressed by bzip2", "an ORC file", "a picture, sound or video (RIFF)"
PACKED = ("compressed by ", "an archive of ", "a zip archive")
_ROWS = ("parquet", "an Arrow ", "an Avro ", _ORC, "HDF5", "a database ")
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # never in texts; \x1b may begin a colour


def kind_of(path: Path) -> str:
    """Return the kind of a file, or ""."""
    try:
        with path.open("rb") as stream:
            begin = stream.read(tarfile.BLOCKSIZE)
            if begin.startswith(_ZIP):
                return _zip_kind(path)
    except (OSError, ValueError):
        return ""
    return kind_of_bytes(begin)


def kind_of_bytes(begin: bytes) -> str:
    """Return the kind of a file with these first bytes, or ""."""
    if begin[:3] == b"BZh" and begin[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return _BZIP2
    if begin[:3] == b"ORC" and _CONTROL.search(begin):
        return _ORC
    if begin[:4] == b"RIFF" and begin[8:12] in (b"WEBP", b"WAVE", b"AVI "):
        return _RIFF
    if _is_tar(begin[: tarfile.BLOCKSIZE]):
        return TAR
    if begin[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return PICKLE
    if begin.startswith(b"\xff" * 4) and 0 < int.from_bytes(begin[4:8], "little") < 1 << 24:
        return "an Arrow stream, as `datasets` saves"
    if int.from_bytes(begin[:8], "little") < 1 << 32 and begin[8:10] == b'{"':
        return SAFETENSORS
    return next((kind for mark, kind in _MARKS.items() if begin.startswith(mark)), "")


def remedy_of(kind: str) -> str:
    """Return what to do with a file of a kind, or ""."""
    if kind.startswith(PACKED):
        return "unpack it, and give the files in it"
    if kind == LFS:
        return "fetch the file, by git lfs pull"
    return "write its rows as .jsonl or .parquet" if kind.startswith(_ROWS) else ""


def _is_tar(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        names = []
    if names and all(name.endswith(".npy") for name in names):
        return NPZ
    return TORCH if any(name.endswith("/data.pkl") for name in names) else ZIP


def without_mark(begin: bytes) -> bytes:
    """Remove a UTF-8 byte order mark and blank lines."""
    return begin.removeprefix(b"\xef\xbb\xbf").lstrip()


def begins_json(begin: bytes) -> bool:
    """True if a text begins with a JSON object, maybe cut off."""
    return re.match(rb'\{\s*(?:["}]|\Z)', without_mark(begin)) is not None


def begins_array(begin: bytes) -> bool:
    """True if a text begins with a JSON array of objects."""
    begin = without_mark(begin)
    return begin.startswith(b"[") and begins_json(begin[1:])


def is_spread_json(begin: bytes) -> bool:
    """True if a text begins with a JSON object over several lines, not with a cut JSON line."""
    first, newline, rest = without_mark(begin).partition(b"\n")
    following = rest.lstrip()
    return (
        first.startswith(b"{")
        and bool(newline and following)
        and not first.rstrip().endswith(b"}")
        and following[:1] in b'"}'
    )


def dataset_folder(path: Path) -> str:
    """Describe a folder that `datasets` saved, with the remedy; else ""."""
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

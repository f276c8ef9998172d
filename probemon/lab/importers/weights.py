"""Reads weights that others saved, and runs nothing in the file.

    state = load_state_dict(path)                          # {name: tensor} of a .pt (torch.save) or .safetensors file
    bank = load_bank(path)                                 # {concept: {name: tensor}}

A `.pt` is a zip of stored bytes and one pickle, read as data (`importers.pickles`). Memory holds at most three times
the file, and some 150 MB; for JSON thirty times the file.
"""

from __future__ import annotations

import io
import math
import reprlib
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.kinds import check_kind, file_kind, in_folder, read_by
from probemon.lab.importers.pickles import AGAIN, STORAGES, Global, Machine, Storage
from probemon.util.file_kinds import PICKLE, SAFETENSORS, TORCH, ZIP, kind_of
from probemon.util.first_sentence import first_sentence
from probemon.util.strict_json import RepeatedKey, loads

MAX_BYTES = 256 << 20
MAX_JSON_BYTES = 64 << 20
_MAX_PICKLE_BYTES = 2 << 20
_MAX_MEMBERS = 1 << 16
_MAX_DIMS = 8


def load_state_dict(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Tensor]:
    """Read tensors by name from a file of `torch.save(module.state_dict(), path)` or safetensors.

    Raises `ImportRefused` if the file is too large, damaged, holds code or is not a state dict.
    """
    state = load_plain(path, max_bytes)
    if not _are_tensors(state) or not state:
        raise ImportRefused(f"{path} holds {_describe(state)}, not tensors by name: save module.state_dict()")
    return state


def load_bank(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, dict[str, Tensor]]:
    """Read state dicts by name from one file. Raises as `load_state_dict`."""
    bank = load_plain(path, max_bytes)
    if not isinstance(bank, dict) or not bank:
        raise ImportRefused(
            f"{path} holds {_describe(bank)}, not state dicts by name: save {{concept: module.state_dict()}}"
        )
    n_bytes = 0
    for name, state in bank.items():
        if not isinstance(name, str) or not _are_tensors(state):
            raise ImportRefused(
                f"{path}: {name!r} holds {_describe(state)}, not tensors by name: save {{concept: module.state_dict()}}"
            )
        n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        if n_bytes > max_bytes:
            raise ImportRefused(
                f"{path} states the same tensors for more and more concepts, over {max_bytes:,} bytes in all: that is"
                " not a bank of probes"
            )
    return bank


def _are_tensors(state: Any) -> TypeGuard[dict[str, Tensor]]:
    return isinstance(state, dict) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    )


def load_plain(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read dicts, lists, tuples, texts, numbers and tensors. Raises as `load_state_dict`."""
    path = Path(path)
    size = check_file(path, max_bytes)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            check_kind(path, SAFETENSORS)
            return load_file(path)
        check_kind(path, TORCH, PICKLE, ZIP)
        with path.open("rb") as stream:
            data = stream.read(size)
        # Checked first: the zip's table takes ten times its size in memory.
        if data.count(b"PK\1\2") > _MAX_MEMBERS:
            raise ImportRefused(f"{path} has more than {_MAX_MEMBERS:,} members: it is not a file of torch.save")
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise _not_a_zip(path, data)
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            return _Reader(path, file, size).read()
    except ImportRefused:
        raise
    except Exception as error:  # a forged file can break anything
        first = first_sentence(error, 200)
        raise ImportRefused(f"{path} cannot be read ({type(error).__name__}: {first}): {AGAIN}") from error


def check_file(path: Path, max_bytes: int) -> int:
    """Return the size of a regular file. Raises `ImportRefused` for others, and above `max_bytes`."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise ImportRefused(
            f"{path} {'is not there' if missing else f'cannot be read ({error})'}: check the path"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        folder = f", but a folder: {in_folder(path) or 'check the path'}" if stat.S_ISDIR(status.st_mode) else ""
        raise ImportRefused(f"{path} is not a file{folder or ': check the path'}")
    if status.st_size > max_bytes:
        raise ImportRefused(
            f"{path} has {status.st_size:,} bytes, at most {max_bytes:,} are read: raise the bound if you trust it"
        )
    return status.st_size


class Folder:
    """An untrusted folder: gives no file outside of it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            kind = file_kind(self.path) if self.path.is_file() else ""
            what, other = (f"{kind}, ", f"{read_by(kind)}; or ") if kind else ("", "")
            raise ImportRefused(f"{path} is {what}not a folder: {other}give the one that holds the probes")
        self._real = self.path.resolve()

    def inside(self, *parts: str) -> Path:
        """Return a path in the folder. Raises `ImportRefused` if it is absolute, has `..`, or leads outside."""
        relative = "/".join(parts).replace("\\", "/")
        steps = relative.split("/")
        if not relative or "\0" in relative or ".." in steps or steps[0] == "" or ":" in steps[0]:
            raise ImportRefused(
                f"{self.path}: {relative!r} does not lie in this folder: a path is relative and has no '..'"
            )
        return self._check(self.path.joinpath(*steps))

    def _check(self, path: Path) -> Path:
        try:
            real = path.resolve()
            path.exists()  # raises if a name is too long, say
        except (OSError, RuntimeError, ValueError) as error:
            raise ImportRefused(f"{path} cannot be followed ({error})") from None
        if not real.is_relative_to(self._real):
            raise ImportRefused(
                f"{path} is a link that leads outside of {self.path}: copy the folder with the files that it links to"
                " (cp -rL)"
            )
        return path

    def files(self, *parts: str, suffix: str) -> list[Path]:
        """Return the files of a folder inside, by name."""
        folder = self.inside(*parts) if parts else self.path
        if not folder.is_dir():
            return []
        return [self._check(entry) for entry in sorted(folder.iterdir()) if entry.name.endswith(suffix)]

    def json(self, *parts: str) -> Any:
        """Read a JSON file inside, or None. NaN and infinities become None. Raises `ImportRefused`."""
        path = self.inside(*parts)
        if not path.exists() and not path.is_symlink():
            return None
        check_file(path, MAX_JSON_BYTES)
        try:
            return loads(path.read_bytes().decode("utf-8-sig"), constant=lambda _: None)
        except RepeatedKey as error:
            raise ImportRefused(f"{path}: {error}") from None
        except (OSError, RecursionError, ValueError) as error:
            raise ImportRefused(f"{path} is not valid JSON ({str(error)[:200]}): {AGAIN}") from None


def _describe(content: object) -> str:
    if isinstance(content, Mapping):
        return (
            "an empty dict"
            if not content
            else f"a dict of {type(next(iter(content.values()))).__name__} by {type(next(iter(content))).__name__}"
        )
    return f"a {type(content).__name__}"


def _not_a_zip(path: Path, data: bytes) -> ImportRefused:
    if not data or data.startswith(b"PK\3\4"):
        return ImportRefused(f"{path} is {'cut short or damaged: a zip without its end' if data else 'empty'}: {AGAIN}")
    try:
        Machine(path, lambda pid: None).run(data[:_MAX_PICKLE_BYTES])
    except ImportRefused as refused:
        return refused
    except Exception:
        pass
    what = f"{kind}, and not a" if (kind := kind_of(path)) else "not a"
    return ImportRefused(
        f"{path} is {what} file of torch.save (a zip since torch 1.6): load it where you trust it, and save its state"
        " dict again"
    )


class _Reader:
    """A `.pt` in a zip."""

    def __init__(self, path: Path, file: zipfile.ZipFile, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.stated_bytes = 0
        self.storages: dict[str, Storage] = {}
        names = [info.filename for info in file.infolist()]
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise ImportRefused(
                f"{path} has {len(pickles)} data.pkl among {len(names)} members: it is not a file of torch.save"
            )
        self.root = pickles[0].removesuffix("data.pkl")
        for info in file.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ImportRefused(f"{path}: {info.filename!r} is compressed, which torch.save never does: {AGAIN}")
        if sum(info.file_size for info in file.infolist()) > size:
            raise ImportRefused(f"{path}: its members overlap: {AGAIN}")

    def read(self) -> Any:
        info = self.file.getinfo(f"{self.root}data.pkl")
        if info.file_size > _MAX_PICKLE_BYTES:
            raise ImportRefused(
                f"{self.path}: its data.pkl has {info.file_size:,} bytes, at most {_MAX_PICKLE_BYTES:,} are read"
            )
        order = f"{self.root}byteorder"
        if order in self.file.namelist() and self.file.read(order) != b"little":
            raise ImportRefused(f"{self.path} was written on a big-endian machine: save it on a little-endian one")
        return Machine(self.path, self.storage, self.tensor).run(self.file.read(info))

    def storage(self, pid: Any) -> Storage:
        """Return the storage of a persistent id `("storage", kind, key, location, numel)`."""
        tag, kind, key, _, numel = pid
        name = kind.name.removeprefix("torch ") if isinstance(kind, Global) else None
        if tag != "storage" or name not in STORAGES or not isinstance(key, str) or not _is_count(numel):
            raise ImportRefused(f"{self.path} refers to {reprlib.repr(pid)}, which is not a storage of torch.save")
        if key not in self.storages:
            dtype = STORAGES[name]
            info = self.file.getinfo(f"{self.root}data/{key}")
            if info.file_size != numel * dtype.itemsize:
                raise ImportRefused(
                    f"{self.path}: storage {key} has {info.file_size:,} bytes, {numel} values of {dtype} are stated:"
                    f" {AGAIN}"
                )
            self.storages[key] = Storage(dtype, bytearray(self.file.read(info)), numel)
        storage = self.storages[key]
        if (storage.dtype, storage.numel) != (STORAGES[name], numel):
            raise ImportRefused(f"{self.path}: storage {key} is stated as two kinds: {AGAIN}")
        return storage

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
        """Make a contiguous tensor of a storage; a part is copied."""
        if (
            not isinstance(storage, Storage)
            or not _is_count(offset)
            or not isinstance(size, tuple)
            or not isinstance(stride, tuple)
        ):
            raise ImportRefused(f"{self.path}: a tensor is not described as torch.save does it: {AGAIN}")
        if len(size) != len(stride) or len(size) > _MAX_DIMS or not all(_is_count(value) for value in (*size, *stride)):
            raise ImportRefused(
                f"{self.path}: a tensor has size {reprlib.repr(size)} and strides {reprlib.repr(stride)}: {AGAIN}"
            )
        numel = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if numel else 0
        self.stated_bytes += numel * storage.dtype.itemsize
        if last >= max(storage.numel, 1) or self.stated_bytes > self.size:
            raise ImportRefused(
                f"{self.path}: tensors of size {size} state more than the {self.size:,} bytes of the file: {AGAIN}"
            )
        if not numel:
            return torch.empty(size, dtype=storage.dtype, device="cpu")
        tensor = torch.frombuffer(storage.data, dtype=storage.dtype).as_strided(size, stride, offset)
        return (
            tensor
            if numel == storage.numel and tensor.is_contiguous()
            else tensor.clone(memory_format=torch.contiguous_format)
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48

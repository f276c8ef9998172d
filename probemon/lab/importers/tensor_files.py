"""Tensors by name of a safetensors file, of an index of several, or of an .npz, each read when it is asked for.

    tensors = TensorFile(path)
    tensors["fc1.weight"], tensors.read        # the tensor, and the files that were read

Objects in an .npz are never loaded, and what is compressed may unpack to no more than the limit on a file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.foreign_files import MAX_BYTES, field, read_json, read_safetensors
from probemon.lab.importers.kinds import INDEX, NPZ, SAFETENSORS, check_kind, file_kind
from probemon.lab.importers.pickles import AGAIN
from probemon.lab.importers.weights import Folder, check_file

_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class TensorFile(Mapping[str, Tensor]):
    """Tensors by name, not kept. `read`: the files that were read so far. Raises `ImportRefused`."""

    def __init__(self, path: Path) -> None:
        check_file(path, MAX_BYTES)
        check_kind(path, SAFETENSORS, INDEX, NPZ)
        self._path, self._kind = path, file_kind(path)
        self.read = [path]
        self._shards: dict[str, Path] = {}
        if self._kind == INDEX:
            shards = field(read_json(path, INDEX), "weight_map", dict, path)
            folder = Folder(path.parent)
            for name in shards:
                self._shards[name] = folder.inside(field(shards, name, str, f"{path}: weight_map"))
            self._names = list(shards)
        elif self._kind == NPZ:
            self._names = [name.removesuffix(".npy") for name in self._guarded(self._members)]
        else:
            self._names = _names(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if self._kind == NPZ:
            tensor: Tensor = self._guarded(lambda: self._array(name))
            return tensor
        path = self._shards.get(name, self._path)
        if path not in self.read:
            self.read.append(path)
        tensors, _ = read_safetensors(path, lambda found: found == name)
        if name not in tensors:
            raise ImportRefused(f"{path} holds no tensor {name!r:.80}, which {self._path.name} says: {AGAIN}")
        return tensors[name]

    def _guarded(self, read: Any) -> Any:
        try:
            return read()
        except ImportRefused:
            raise
        except Exception as error:  # a forged file can break anything
            raise ImportRefused(
                f"{self._path} cannot be read ({type(error).__name__}: {str(error)[:150]}): {AGAIN}"
            ) from None

    def _members(self) -> list[str]:
        with zipfile.ZipFile(self._path) as file:
            return file.namelist()

    def _array(self, name: str) -> Tensor:
        with zipfile.ZipFile(self._path) as file, file.open(f"{name}.npy") as stream:
            size = file.getinfo(f"{name}.npy").file_size
            if size > MAX_BYTES:
                raise ImportRefused(f"{self._path}: {name!r:.80} has {size:,} bytes, at most {MAX_BYTES:,} are read")
            return _numbers(stream, f"{self._path}: {name!r:.80}", size)


def _names(path: Path) -> list[str]:
    names: list[str] = []

    def passed_over(name: str) -> bool:
        names.append(name)
        return False

    read_safetensors(path, passed_over)
    return names


def _numbers(stream: IO[bytes], what: str, size: int) -> Tensor:
    """Read an array of floats, of which a file has `size` bytes, header included."""
    shape, by_column, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise ImportRefused(f"{what} is an array of {str(dtype)[:40]}: expected floats of 16, 32 or 64 bits")
    if int(np.prod(shape, dtype=object)) * dtype.itemsize >= size:
        raise ImportRefused(f"{what} has fewer bytes than its shape {shape!r:.80} states: {AGAIN}")
    values = np.frombuffer(stream.read(), dtype).reshape(shape, order="F" if by_column else "C")
    return torch.from_numpy(np.array(values, dtype.newbyteorder("="), order="C"))

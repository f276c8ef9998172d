"""Tensors of an open safetensors file: small files are read, large ones mapped.

    tensors = HeldTensors(file, sha256=digest)
    tensors.described["w1"]              # shape and dtype, on meta
    level = tensors.read("level")        # a copy
    weights = tensors.all()              # in memory, or mapped read-only

The header is not parsed by safetensors, which maps the file: a truncation would end the process.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.dtypes import CODES
from probemon.errors import PackChanged, PackCorrupt, PackError
from probemon.packs.held_file import HeldFile
from probemon.util.strict_json import loads

# At most this is read and hashed, in about 0.1 s. Larger files are mapped: shared, and read as used.
IN_MEMORY_BYTES = 64 << 20
MAX_HEADER_BYTES = 4 << 20  # packs have a few thousand bytes
_MAX_DIMS, _MAX_SIZE = 8, 1 << 31


class HeldTensors:
    """Tensors by name, in file order. `sha256`: checked when all is read. Raises `PackCorrupt`."""

    def __init__(self, file: HeldFile, *, sha256: str | None = None) -> None:
        self.file = file
        self.in_memory = file.size <= IN_MEMORY_BYTES
        self._sha256 = file.expected = sha256
        self._offsets, self.described = _layout(file)
        self._lock = threading.Lock()
        self._all: dict[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor."""
        return self.read_rows([name], None, None)[name]

    def read_rows(self, names: Iterable[str], first: int | None, stop: int | None) -> dict[str, Tensor]:
        """Return copies of rows of tensors. Raises `PackChanged`."""
        tensors = self._all
        if tensors is not None and self.in_memory:
            return {name: tensors[name][first:stop].clone() for name in names}
        self.file.check()
        copies = {}
        for name in names:
            like = self.described[name]
            begin, end = (0, len(like)) if first is None or stop is None else (first, stop)
            raw = np.empty((end - begin) * _row_bytes(like), dtype=np.uint8)
            self.file.read_into(raw, self._offsets[name] + begin * _row_bytes(like))
            copies[name] = _as_tensor(raw, like.dtype, (end - begin, *like.shape[1:]))
        # a write updates the time before the bytes, so this read was clean
        self.file.check()
        return copies

    def read_soon(self, names: Iterable[str], runs: Iterable[tuple[int, int]]) -> None:
        """Advise the kernel to read ahead rows `first..stop - 1`."""
        large = [name for name in names if _row_bytes(self.described[name]) >= mmap.PAGESIZE]
        for first, stop in runs:
            for name in large:
                row_bytes = _row_bytes(self.described[name])
                self.file.read_soon(self._offsets[name] + first * row_bytes, (stop - first) * row_bytes)

    def all(self) -> dict[str, Tensor]:
        """Return every tensor. Raises `PackChanged`, and `PackCorrupt` for a wrong hash."""
        with self._lock:
            if self._all is None:
                self._all = self._read_all() if self.in_memory else self._mapped()
            else:
                self.check()
            return self._all

    def check(self) -> None:
        """Raise `PackChanged` if the file is still used and was written to."""
        if self._all is None or not self.in_memory:
            self.file.check()

    def _read_all(self) -> dict[str, Tensor]:
        try:
            raw: Any = np.empty(self.file.size, dtype=np.uint8)
        except MemoryError as error:
            raise self._no_memory() from error
        self.file.check()
        self.file.read_into(raw, 0)
        self.file.check()
        digest = None if self._sha256 is None else hashlib.sha256(raw).hexdigest()
        if digest is not None and digest != self._sha256:
            raise PackCorrupt(
                f"{self.file.path} was changed: sha256 {digest[:12]}..., the manifest says {str(self._sha256)[:12]}...:"
                " fetch the pack again"
            )
        self.file.close()
        return self._views(raw)

    def _mapped(self) -> dict[str, Tensor]:
        self.file.check()
        try:
            # Read-only: torch's private writable mapping is 200 times slower to read.
            raw = np.frombuffer(
                mmap.mmap(self.file.descriptor(), self.file.size, access=mmap.ACCESS_READ), dtype=np.uint8
            )
        except ValueError as error:
            raise PackChanged(
                f"{self.file.path} became shorter since the pack was opened: open the pack again"
            ) from error
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise PackError(
                    f"{self.file.path} cannot be mapped into memory ({error.strerror}): copy the pack to a local disk"
                ) from error
            raise self._no_memory() from error
        return self._views(raw)

    def _no_memory(self) -> PackError:
        return PackError(
            f"{self.file.path} does not fit into the memory that this process may take ({self.file.size:,} bytes):"
            " raise its limit (ulimit -v), or make the pack smaller (probemon quantize, probemon pack subset)"
        )

    def _views(self, raw: np.ndarray) -> dict[str, Tensor]:
        ends = {name: self._offsets[name] + like.numel() * like.element_size() for name, like in self.described.items()}
        return {
            name: _as_tensor(raw[self._offsets[name] : ends[name]], like.dtype, tuple(like.shape))
            for name, like in self.described.items()
        }


def _row_bytes(like: Tensor) -> int:
    return math.prod(like.shape[1:]) * like.element_size()


def _as_tensor(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    plain = {torch.bfloat16: np.int16}.get(dtype) or np.dtype(str(dtype).removeprefix("torch."))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(raw.view(plain).reshape(shape))
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


def _layout(file: HeldFile) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the tensors' offsets and meta tensors. As in safetensors, there are no gaps."""
    begin_of_data, entries = _entries(file)
    offsets, described, at = {}, {}, 0
    for begin, end, name, kind, shape in sorted(entries):
        if kind not in CODES:
            raise PackCorrupt(f"{file.path}: tensor {name!r:.80} has dtype {kind!r:.20}, which packs do not use")
        if (
            len(shape) > _MAX_DIMS
            or any(size >= _MAX_SIZE for size in shape)
            or math.prod(max(1, size) for size in shape) >= 1 << 60
        ):
            raise PackCorrupt(
                f"{file.path}: tensor {name} has shape {str(shape)[:80]}, those of a pack have at most {_MAX_DIMS}"
                f" dimensions under {_MAX_SIZE:,}: fetch the pack again"
            )
        dtype = CODES[kind]
        if begin != at or end - begin != math.prod(shape) * dtype.itemsize:
            raise PackCorrupt(
                f"{_damaged(file)} (the bytes of {name!r:.80} are not where they should be): fetch the pack again"
            )
        offsets[name], described[name], at = begin_of_data + begin, torch.empty(shape, dtype=dtype, device="meta"), end
    if begin_of_data + at != file.size:
        raise PackCorrupt(
            f"{_damaged(file)} (its tensors end at byte {begin_of_data + at:,} of {file.size:,}): fetch the pack again"
        )
    return offsets, described


def _entries(file: HeldFile) -> tuple[int, list[tuple[int, int, str, str, tuple[int, ...]]]]:
    """Return the data's offset, and of each tensor begin, end, name, dtype and shape. Raises `PackCorrupt`."""
    try:
        if file.size < 8:
            raise ValueError("it has no header")
        head = bytearray(8)
        file.read_into(head, 0)
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER_BYTES or 8 + length > file.size:
            raise ValueError(f"its header would have {length:,} bytes")
        text = bytearray(length)
        file.read_into(text, 8)
        header = loads(text.decode())
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        ):
            raise ValueError("its metadata are not texts by name")
        entries = []
        for name, entry in header.items():
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            if not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, begin, end)):
                raise ValueError(f"shape or offsets of {name!r:.80} are not whole numbers")
            entries.append((begin, end, str(name), str(entry["dtype"]), tuple(shape)))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, PackError):
            raise
        raise PackCorrupt(f"{_damaged(file)} ({str(error)[:200]}): fetch the pack again") from None
    return 8 + length, entries


def _damaged(file: HeldFile) -> str:
    return f"{file.path} cannot be read as safetensors"

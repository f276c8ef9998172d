"""Reads small GGUF files of plain numbers, such as control vectors; nothing in them is run.

    settings, tensors = read_gguf(path)           # {"general.architecture": "controlvector", ...}, {name: tensor}

Memory holds the file twice. Layout: docs/gguf.md of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.pickles import AGAIN
from probemon.lab.importers.weights import check_file

MAX_BYTES = 256 << 20
_MAX_COUNT = 1 << 16  # of tensors, and of settings
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # kinds of a value, for struct
_TEXT, _LIST = 8, 9
_FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
_MAX_DIMS = 4


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings (lists as None) and the tensors. Raises `ImportRefused`, also for quantised tensors."""
    check_file(path, MAX_BYTES)
    try:
        return _Reader(path).read()
    except ImportRefused:
        raise
    except (struct.error, UnicodeDecodeError, OSError, OverflowError, ValueError) as error:
        raise ImportRefused(f"{path} is a damaged GGUF file ({str(error)[:100]}): {AGAIN}") from None


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path, self._data, self._at, self._stated_bytes = path, bytearray(path.read_bytes()), 0, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._data[:4] != b"GGUF" or self._numbers("4xI") not in (2, 3):
            raise ImportRefused(
                f"{self._path} is not a GGUF file of version 2 or 3, little-endian: give one that package gguf wrote"
            )
        n_tensors, n_settings = self._numbers("Q"), self._numbers("Q")
        if max(n_tensors, n_settings) > _MAX_COUNT:
            raise ValueError(f"{n_tensors} tensors, {n_settings} settings")
        settings = {self._text(): self._value(self._numbers("I")) for _ in range(n_settings)}
        stated = [self._stated() for _ in range(n_tensors)]
        step = settings.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise ValueError(f"alignment {step!r}")
        begin = -(-self._at // step) * step
        return settings, {name: self._tensor(name, shape, kind, begin + at) for name, shape, kind, at in stated}

    def _numbers(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _bytes(self, n: int) -> bytes:
        if n > len(self._data) - self._at:
            raise ValueError("cut short")
        self._at += n
        return bytes(self._data[self._at - n : self._at])

    def _text(self) -> str:
        return self._bytes(self._numbers("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            raise ValueError(f"a value of kind {kind}")
        kind, n = self._numbers("I"), self._numbers("Q")
        if kind in _NUMBERS:
            self._bytes(n * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _TEXT:
            for _ in range(n):
                self._bytes(self._numbers("Q"))
        else:
            raise ValueError(f"a list of kind {kind}")
        return None

    def _stated(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self._text(), self._numbers("I")
        if n_dims > _MAX_DIMS:
            raise ValueError(f"{n_dims} dimensions")
        shape = tuple(self._numbers("Q") for _ in range(n_dims))[::-1]  # GGUF counts the fastest first
        return name, shape, self._numbers("I"), self._numbers("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, at: int) -> Tensor:
        if kind not in _FLOATS:
            raise ImportRefused(
                f"{self._path}: {name!r} is quantised or of whole numbers (kind {kind} of GGUF): read are fp16, bf16,"
                " fp32 and fp64"
            )
        dtype = _FLOATS[kind]
        size = math.prod(shape) * dtype.itemsize
        self._stated_bytes += size  # or a forged file states the same bytes many times
        if not size or at + size > len(self._data) or self._stated_bytes > len(self._data):
            raise ValueError(f"{name!r:.40} lies outside of the file, or is empty")
        return torch.frombuffer(self._data[at : at + size], dtype=dtype).reshape(shape)

"""Dtypes of files, weights, models and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from probemon.errors import ConfigError

Entry = TypeVar("Entry")

# By safetensors code.
CODES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8,
}  # fmt: skip
# By name in a pack's manifest.
WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
# By the names that users state a rounding by.
ROUNDINGS = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CODE_OF = {dtype: code for code, dtype in CODES.items()}
_INPUT = {dtype: dtype for dtype in FLOATS} | {torch.int8: torch.bfloat16}


def of_dtype(table: Mapping[torch.dtype, Entry], dtype: torch.dtype, what: str) -> Entry:
    """Return a dtype's entry. Raises `ConfigError` without one."""
    if dtype not in table:
        raise ConfigError(f"no {what} of {dtype} is known, only of {', '.join(map(str, table))}: use one of these")
    return table[dtype]


def code_of(dtype: torch.dtype) -> str:
    """Return a dtype's safetensors code. Raises `ConfigError`."""
    return of_dtype(_CODE_OF, dtype, "code in a safetensors file")


def input_dtype(weights: torch.dtype) -> torch.dtype:
    """Return the dtype of inputs for weights of a dtype: the same, bf16 for int8. Raises `ConfigError`."""
    return of_dtype(_INPUT, weights, "rounding of inputs for weights")

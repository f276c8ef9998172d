"""Argument checks, with one definition of whole numbers, numbers and shares.

    keep = check_count("keep_top_k", keep_top_k, least=0)  # accepts 3, np.int64(3); not True, 3.0, 10**30
    rate = check_number("audit_rate", audit_rate, low=0, high=1)  # accepts 0.5, np.float32(0.5); not NaN, "0.5"
    share = check_share("fdr", fdr)                                         # over 0, under 1

They return Python's own numbers. `remedy` says what to give.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.errors import ConfigError, ProbemonError, UnknownSetting, closest

if TYPE_CHECKING:
    from torch import Tensor

MOST = 2**63 - 1
LARGEST = float(np.finfo(np.float32).max)
_FINITE = float(np.finfo(np.float64).max)
_SHOWN = 60


def is_int(value: object) -> bool:
    """True for a whole number of 64 bits, not bool."""
    number = _number(value)
    return isinstance(number, int) and -MOST <= number <= MOST


def is_number(value: object) -> bool:
    """True for a finite number in fp32's range, not bool."""
    number = _number(value)
    # False for NaN; whole numbers are compared exactly.
    return number is not None and -LARGEST <= number <= LARGEST


def check_path(name: str, value: object) -> Path:
    """Return `value` as a path. Raises `ConfigError`."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(value, bytes):
        raise ConfigError(f"{name} is {shown(value)}: give a path, as text or as a pathlib.Path")
    return Path(value)


def check_count(
    name: str,
    value: object,
    *,
    least: int = 0,
    most: int = MOST,
    remedy: str | None = None,
    error: type[ProbemonError] = ConfigError,
) -> int:
    """Return `value` if it is a whole number from `least` to `most`, else raise `error`."""
    number = _number(value)
    if not isinstance(number, int) or not least <= number <= most:
        bound = "" if most == MOST else f", at most {most}"
        raise error(f"{name} is {shown(value)}: {remedy or f'give a whole number, {least} or more'}{bound}")
    return number


def check_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
    infinite: bool = False,
    remedy: str = "give a number",
    error: type[ProbemonError] = ConfigError,
) -> float:
    """Return `value` if it is a number from `low` to `high`, else raise `error`; `open_low`, `open_high` exclude the
    bound.
    """
    number = _number(value)
    if (
        number is None
        or not (-_FINITE <= number <= _FINITE or (infinite and number in (math.inf, -math.inf)))
        or not low <= number <= high
        or (open_low and number == low)
        or (open_high and number == high)
    ):
        raise error(f"{name} is {shown(value)}: {remedy}")
    return float(number)


def check_share(
    name: str, value: object, remedy: str = "give more than 0 and less than 1", error: type[ProbemonError] = ConfigError
) -> float:
    """Return `value` if it is a number over 0 and under 1, else raise `error`."""
    return check_number(name, value, low=0, high=1, open_low=True, open_high=True, remedy=remedy, error=error)


def check_bool(name: str, value: object, error: type[ProbemonError] = ConfigError) -> bool:
    """Return `value` if it is True or False, else raise `error`."""
    if not isinstance(value, (bool, np.bool_)):
        raise error(f"{name} is {shown(value)}: give True or False")
    return bool(value)


def check_callable(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` can be called."""
    if not callable(value):
        raise ConfigError(f"{name} is given {value!r}: give a function to call")


def check_text(name: str, value: object, error: type[ProbemonError] = ConfigError) -> str:
    """Return `value` if it is a text, else raise `error`."""
    if not isinstance(value, str):
        raise error(f"{name} is {shown(value)}: give a text")
    return value


def check_choice(name: str, value: object, choices: Collection[str], error: type[ProbemonError] = ConfigError) -> str:
    """Return `value` if it is one of `choices`, else raise `error`."""
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name} is {shown(value)}: expected one of {', '.join(choices)}")
    return value


def check_settings(kind: type, names: Iterable[str], of: str = "") -> None:
    """Raise `UnknownSetting` for a name that is not a field of a dataclass."""
    known = [field.name for field in fields(kind)]
    for name in names:
        if name not in known:
            listed = f" of {of}{closest(name, known)}: there are {', '.join(known)}" if of else closest(name, known)
            raise UnknownSetting(f"there is no setting {name!r}{listed}")


def check_mapping(name: str, value: object, error: type[ProbemonError] = ConfigError) -> Mapping[str, Any]:
    """Return `value` if it is a dict with texts as keys, else raise `error`."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise error(f"{name} is {shown(value)}: give a dict whose keys are texts")
    return value


def check_mappings(name: str, value: object, error: type[ProbemonError] = ConfigError) -> Sequence[Mapping[str, Any]]:
    """Return `value` if it is a list of dicts with texts as keys, else raise `error`."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise error(f"{name} is {shown(value)}: give a list of dicts")
    for at, one in enumerate(value):
        check_mapping(f"{name}[{at}]", one, error)
    return value


def check_tensor(
    name: str, value: object, shape: tuple[int, ...] | None = None, error: type[ProbemonError] = ConfigError
) -> Tensor:
    """Return `value` if it is a dense tensor, of `shape` if given, else raise `error`."""
    import torch  # the command line starts without it

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type == "meta":
        raise error(f"{name} is {shown(value)}: give a tensor with values (torch.from_numpy makes one of an array)")
    if shape is not None and tuple(value.shape) != shape:
        raise error(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    return value


def shown(value: object) -> str:
    """`repr(value)`, shortened."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _number(value: object) -> int | float | None:
    """Python's own number, or None."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def plain(value: object) -> object:
    """NumPy's numbers as Python's own, also in a tuple."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    number = _number(value)
    return value if number is None else number


def is_missing(value: object) -> bool:
    """True for NaN, an unknown number."""
    return isinstance(value, (float, np.floating)) and math.isnan(value)

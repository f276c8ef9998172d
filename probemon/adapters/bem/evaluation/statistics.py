"""The interval of a mean over documents: document_interval(sums, counts), one of each for each document."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError, MissingExtra
from probemon.util.checks import check_share

Doubles = npt.NDArray[np.float64]

_N_BOOTSTRAP = 9_999


def document_interval(
    sums: Sequence[float] | Doubles, counts: Sequence[float] | Doubles, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the BCa interval of `sum(sums) / sum(counts)` (Efron 1987), drawing whole documents.

    `sums [N]`: each document's sum over its tokens, such as of paired differences of losses.
    `counts [N]`: its tokens.

    If all documents have the same mean, the interval is that point. Raises `ConfigError`, `MissingExtra`.
    """
    check_share("confidence", confidence)
    document_sums, n = finite_numbers("sums", sums), finite_numbers("counts", counts)
    if len(document_sums) != len(n) or len(n) < 2 or not (n > 0).all():
        raise ConfigError("a sum and a count over 0 are needed for each document, and two documents at least")
    means = document_sums / n
    if np.ptp(means) == 0:
        return float(means[0]), float(means[0])
    drawn = scipy_stats().bootstrap(
        (document_sums, n),
        lambda s, c, axis=-1: s.sum(axis=axis) / c.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=_N_BOOTSTRAP,
        confidence_level=confidence,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def finite_numbers(name: str, values: Sequence[float] | Doubles) -> Doubles:
    """Return a list of numbers as an array. Raises `ConfigError` if it is empty, or not finite."""
    array = numbers(name, values)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ConfigError(f"{name} are a list of finite numbers, one at least")
    return array


def numbers(name: str, values: object) -> Doubles:
    """Return numbers as an array. Raises `ConfigError`."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} are not a table of numbers: give numbers, as many in each row") from None


def scipy_stats() -> Any:
    """Import `scipy.stats`. Raises `MissingExtra`."""
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtra("comparing adapters needs SciPy: pip install scipy") from error

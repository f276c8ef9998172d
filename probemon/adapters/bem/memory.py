"""Memory in use, and batches that shrink before it runs out.

memory_pressure(host_memory)                              # 0.41 of this machine or container
memory_pressure(gpu_memory("cuda:0"))
backoff = with_batch_backoff(lambda rows: model.generate(ids[rows]), len(ids))
backoff.results, backoff.sizes, backoff.n_out_of_memory
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from probemon.errors import ConfigError
from probemon.util.checks import check_count, check_number, is_number
from probemon.util.host_memory import host_memory

LOG = logging.getLogger("probemon")
T = TypeVar("T")
Source = Callable[[], tuple[int, int]]  # bytes in use, and in total


def gpu_memory(device: str | torch.device = "cuda") -> Source:
    """Return a source for a GPU's memory, over all processes. Memory that torch only reserves is free."""

    def measure() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return total - free - unused, total

    return measure


def memory_pressure(source: Source = host_memory) -> float:
    """Return the share of memory in use, 0 to 1. Raises `ConfigError`."""
    pair = source()
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(is_number(n) and n >= 0 for n in pair) and pair[1] > 0):
        raise ConfigError(
            f"the source of memory gives {pair!r}: give one that returns bytes in use and how many there are"
        )
    return pair[0] / pair[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On a CPU torch raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@dataclass(frozen=True)
class Backoff(Generic[T]):
    """`results`, and `sizes`: of all calls, in order.
    `n_out_of_memory`: how often memory ran out.
    `n_pressed`: batches halved for pressure.
    """

    results: tuple[T, ...]
    sizes: tuple[int, ...]
    n_out_of_memory: int
    n_pressed: int


def with_batch_backoff(
    call: Callable[[slice], T], n: int, *, size: int | None = None, limit: float = 0.9, source: Source = host_memory
) -> Backoff[T]:
    """Run `call(slice)` over n rows, in batches of `size` (None: all at once).

    The size is halved for good when memory runs out, and before a call if over `limit` of it is in use. A batch that
    ran out is called again, so `call` must leave nothing behind when it raises. Errors of a single row are raised.
    Raises `ConfigError`.
    """
    check_count("n", n)
    if size is not None:
        check_count("size", size, least=1)
    check_number("limit", limit, low=0, high=1, open_low=True, remedy="give a number over 0, at most 1")
    batch, begin, n_out, n_pressed = min(size or n, n), 0, 0, 0
    results: list[T] = []
    sizes: list[int] = []
    while begin < n:
        while batch > 1 and memory_pressure(source) > limit:
            batch, n_pressed = batch // 2, n_pressed + 1
            LOG.warning("over %g of memory is in use: batches of %d from here on", limit, batch)
            _free_unused()
        n_rows = min(batch, n - begin)
        try:
            results.append(call(slice(begin, begin + n_rows)))
        except Exception as error:
            if n_rows == 1 or not is_out_of_memory(error):
                raise
        else:
            sizes.append(n_rows)
            begin += n_rows
            continue
        # Outside the handler, whose error would hold memory.
        batch, n_out = n_rows // 2, n_out + 1
        LOG.warning("memory ran out for a batch of %d: batches of %d from here on", n_rows, batch)
        _free_unused()
    return Backoff(tuple(results), tuple(sizes), n_out, n_pressed)


def _free_unused() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

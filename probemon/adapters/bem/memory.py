"""Memory in use, and batches that shrink before it runs out.

memory_pressure(host_memory)                              # 0.41 of this machine or container
memory_pressure(gpu_memory("cuda:0"))
backoff = with_batch_backoff(lambda rows: model.generate(ids[rows]), len(ids))
backoff.results, backoff.sizes, backoff.n_out_of_memory
"""

from __future__ import annotations

import gc
import logging
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from probemon.errors import ConfigError
from probemon.util.checks import is_int, is_number, shown

LOG = logging.getLogger("probemon")
T = TypeVar("T")
Source = Callable[[], tuple[int, int]]  # bytes in use, and in total

# Files of cgroups 2 and 1: limit, use, and file cache in memory.stat.
_GROUPS = (
    (Path("/sys/fs/cgroup"), "", ("memory.max", "memory.current", "inactive_file")),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)


def host_memory() -> tuple[int, int]:
    """Return bytes in use and in total, of this machine or its cgroup, whichever is fuller. File cache is free."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    info = Path("/proc/meminfo")
    meminfo = _numbers(info.read_text()) if info.is_file() else {}
    available = meminfo["MemAvailable:"] * 1024 if "MemAvailable:" in meminfo else os.sysconf("SC_AVPHYS_PAGES") * page
    return max([(total - available, total), *_groups(total)], key=lambda pair: pair[0] / pair[1])


def process_memory() -> tuple[int, int]:
    """Return bytes in use by this process, and the limit of machine or cgroup."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    total = min([total, *(limit for _, limit in _groups(total))])
    pages = Path("/proc/self/statm")
    if pages.is_file():
        return int(pages.read_text().split()[1]) * page, total
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, total  # not Linux: the peak


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
    if (
        not is_int(n)
        or n < 0
        or (size is not None and (not is_int(size) or size < 1))
        or not is_number(limit)
        or not 0 < limit <= 1
    ):
        raise ConfigError(
            f"n is {shown(n)}, size {shown(size)}, limit {shown(limit)}: give n from 0, a size of at least 1, a limit"
            " over 0, at most 1"
        )
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


def _groups(total: int) -> list[tuple[int, int]]:
    """Use and limit of each cgroup that limits this process."""
    return [pair for top, controller, names in _GROUPS for pair in _of_group(top, controller, names, total)]


def _of_group(top: Path, controller: str, names: tuple[str, str, str], total: int) -> list[tuple[int, int]]:
    limit_name, used_name, cache_name = names
    cgroup_file = Path("/proc/self/cgroup")
    lines = [line.split(":", 2) for line in cgroup_file.read_text().splitlines()] if cgroup_file.is_file() else []
    below = next((path for _, name, path in lines if name == controller), "/")
    for folder in (top / below.lstrip("/"), top):
        limit, used = _text(folder / limit_name).strip(), _text(folder / used_name)
        if used and limit.isdigit() and 0 < int(limit) < total:  # else it does not limit
            cache = _numbers(_text(folder / "memory.stat")).get(cache_name, 0)
            return [(max(0, int(used) - cache), int(limit))]
    return []


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _numbers(text: str) -> dict[str, int]:
    return {
        words[0]: int(words[1]) for line in text.splitlines() if len(words := line.split()) > 1 and words[1].isdigit()
    }

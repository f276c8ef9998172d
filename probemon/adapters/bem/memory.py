"""Memory: how much of it is in use, and a batch that becomes smaller before there is none.

    memory_pressure(host_memory)                              # 0.41 of what this machine or container has
    memory_pressure(gpu_memory("cuda:0"))
    backoff = with_batch_backoff(lambda rows: model.generate(ids[rows]), len(ids))
    backoff.results, backoff.sizes, backoff.n_out_of_memory   # in order; how many rows each call had

Sizes are halved and never grow again within one call: what ran out once would run out again.
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
Source = Callable[[], tuple[int, int]]  # bytes in use, and bytes there are

# The files of cgroups 2 and 1, below the folder of this process's group or, in a container, at the top: the limit, the
# use, and, in memory.stat, how much of the use is a cache of files.
_GROUPS = (
    (Path("/sys/fs/cgroup"), "", ("memory.max", "memory.current", "inactive_file")),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)


def host_memory() -> tuple[int, int]:
    """Return bytes in use and bytes there are, of this machine or of the group that limits this process: whichever is
    nearer to its end.

    A cache of files is not in use: it is given up when memory is asked for.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    info = Path("/proc/meminfo")
    stated = _numbers(info.read_text()) if info.is_file() else {}
    available = stated["MemAvailable:"] * 1024 if "MemAvailable:" in stated else os.sysconf("SC_AVPHYS_PAGES") * page
    return max([(total - available, total), *_groups(total)], key=lambda pair: pair[0] / pair[1])


def process_memory() -> tuple[int, int]:
    """Return bytes in use by this process alone, and bytes that it may have: the machine's, or what the group that
    limits it allows.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    total = min([total, *(limit for _, limit in _groups(total))])
    pages = Path("/proc/self/statm")
    if pages.is_file():
        return int(pages.read_text().split()[1]) * page, total
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, total  # no Linux: the most there was


def gpu_memory(device: str | torch.device = "cuda") -> Source:
    """Return a source for the memory of a GPU, used by all processes. What torch holds and does not use is free."""

    def measure() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return total - free - held, total

    return measure


def memory_pressure(source: Source = host_memory) -> float:
    """Return the share of memory in use, 0 to 1. `source` returns bytes in use and bytes there are: `host_memory`,
    `gpu_memory(device)`. Raises `ConfigError`.
    """
    pair = source()
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(is_number(n) and n >= 0 for n in pair) and pair[1] > 0):
        raise ConfigError(
            f"the source of memory gives {pair!r}: give one that returns bytes in use and how many there are"
        )
    return pair[0] / pair[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. On a CPU torch raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@dataclass(frozen=True)
class Backoff(Generic[T]):
    """The `results` of all calls in order, the `sizes` of their batches (which sum to n), how often memory ran out, and
    how often a batch was halved for pressure.
    """

    results: tuple[T, ...]
    sizes: tuple[int, ...]
    n_out_of_memory: int
    n_pressed: int


def with_batch_backoff(
    call: Callable[[slice], T], n: int, *, size: int | None = None, limit: float = 0.9, source: Source = host_memory
) -> Backoff[T]:
    """Run `call(slice)` over n rows, in batches of `size` (all at once if None). The size is halved where memory runs
    out, and before a call at which more than `limit` of it is in use.

    A batch whose memory ran out is called again in halves, so `call` must leave nothing behind when it raises. An error
    for a single row is raised; pressure never stops a single row. Raises `ConfigError`.
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
        # Outside of the handler: its error would hold the frames that hold the memory.
        batch, n_out = n_rows // 2, n_out + 1
        LOG.warning("memory ran out for a batch of %d: batches of %d from here on", n_rows, batch)
        _free_unused()
    return Backoff(tuple(results), tuple(sizes), n_out, n_pressed)


def _free_unused() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _groups(total: int) -> list[tuple[int, int]]:
    """Use and limit of each group that allows this process less than the `total` of the machine."""
    return [pair for top, controller, names in _GROUPS for pair in _of_group(top, controller, names, total)]


def _of_group(top: Path, controller: str, names: tuple[str, str, str], total: int) -> list[tuple[int, int]]:
    limit_name, used_name, cache_name = names
    own = Path("/proc/self/cgroup")
    lines = [line.split(":", 2) for line in own.read_text().splitlines()] if own.is_file() else []
    below = next((path for _, name, path in lines if name == controller), "/")
    for folder in (top / below.lstrip("/"), top):
        limit, used = _text(folder / limit_name).strip(), _text(folder / used_name)
        if used and limit.isdigit() and 0 < int(limit) < total:  # else it is no limit
            cache = _numbers(_text(folder / "memory.stat")).get(cache_name, 0)
            return [(max(0, int(used) - cache), int(limit))]
    return []


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _numbers(text: str) -> dict[str, int]:
    """`name number ...` a line."""
    return {
        words[0]: int(words[1]) for line in text.splitlines() if len(words := line.split()) > 1 and words[1].isdigit()
    }

"""Memory of this machine, or of the cgroup (container) that limits it.

used, total = host_memory()                                # bytes
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

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

"""Files held open, so that an opened pack stays the same while its folder changes.

    def read(folder):                                  # called again if the folder changes meanwhile
        return folder.hold("manifest.json").read(1 << 20), folder.hold("probes.safetensors", keep=True)

    text, file = read_whole(Path("pack"), read)
    file.check()                                       # PackChanged if the file was written to

Files are opened relative to the folder's descriptor and read through their own: a truncated file is an error, not a
signal.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from probemon.errors import PackChanged, PackCorrupt, PackError

_BLOCK_BYTES = 1 << 20
# Seconds before each attempt to open a changing folder.
_WAITS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
# Attempts for a missing folder: without an atomic exchange, a replaced pack is briefly absent.
_ABSENT = 6
_RELATIVE = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd  # not on Windows
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_seeking = threading.Lock()  # without preadv, one read at a time
Outcome = TypeVar("Outcome")


class HeldFile:
    """An open file, closed with its last reference. `expected`: its known sha256, if any."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        self.stat = os.fstat(descriptor)
        self.size = self.stat.st_size
        self.expected: str | None = None

    def check(self) -> None:
        """Raise `PackChanged` if the file was written to. Takes microseconds, or once a hash."""
        try:
            now = os.fstat(self._descriptor)
        except OSError as error:  # network file systems
            raise PackChanged(f"{self.path} can no longer be read ({error.strerror}): open the pack again") from error
        before = self.stat
        if (
            now.st_ctime_ns == before.st_ctime_ns
            and now.st_mtime_ns == before.st_mtime_ns
            and now.st_size == before.st_size
        ):
            return
        # Only links, owner or permissions changed, or a write reset the other times: the hash decides.
        only_circumstances = _contents(now) == _contents(before) and _circumstances(now) != _circumstances(before)
        if only_circumstances and (self.expected is None or self.sha256() == self.expected):
            self.stat = now
            return
        what = (
            f"has {now.st_size:,} bytes, not {before.st_size:,}" if now.st_size != before.st_size else "was written to"
        )
        raise PackChanged(
            f"{self.path} {what} since the pack was opened: open the pack again, and replace packs whole (write"
            " elsewhere, then rename)"
        )

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill a buffer from an offset. Raises `PackChanged` if the file is shorter."""
        view = memoryview(buffer).cast("B")
        while len(view):
            try:
                n = (
                    os.preadv(self._descriptor, [view], offset)
                    if hasattr(os, "preadv")
                    else _read_at(self._descriptor, view, offset)
                )
            except OSError as error:
                raise PackError(f"{self.path} cannot be read ({error.strerror}): check its disk") from error
            if n == 0:
                raise PackChanged(
                    f"{self.path} ends at byte {offset:,}, it had {self.size:,} when the pack was opened: open the pack"
                    " again"
                )
            view, offset = view[n:], offset + n

    def read_soon(self, offset: int, length: int) -> None:
        """Advise the kernel to read ahead."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # reading reports the error
                os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, max_bytes: int) -> bytes:
        """Return all bytes. Raises `PackCorrupt` for more than `max_bytes`."""
        if self.size > max_bytes:
            raise PackCorrupt(
                f"{self.path} has {self.size:,} bytes, at most {max_bytes:,} are read: fetch the pack again"
            )
        data = bytearray(self.size)
        self.read_into(data, 0)
        return bytes(data)

    def sha256(self) -> str:
        """Return the content's hex digest."""
        digest, block = hashlib.sha256(), bytearray(min(_BLOCK_BYTES, self.size))
        for offset in range(0, self.size, _BLOCK_BYTES):
            part = memoryview(block)[: min(_BLOCK_BYTES, self.size - offset)]
            self.read_into(part, offset)
            digest.update(part)
        return digest.hexdigest()

    def descriptor(self) -> int:
        """Return the descriptor; this object closes it."""
        return self._descriptor


class HeldFolder:
    """An open folder; leaving the block closes files without `keep`. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, HeldFile] = {}
        self._kept: set[str] = set()
        self._descriptor = os.open(path, _FLAGS | os.O_DIRECTORY) if _RELATIVE else None
        self._stat = os.stat(path) if self._descriptor is None else os.fstat(self._descriptor)
        if not stat.S_ISDIR(self._stat.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for name, file in self._held.items():
            if name not in self._kept:
                file.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def names(self) -> list[str]:
        """Return the folder's entries."""
        return os.listdir(self.path if self._descriptor is None else self._descriptor)

    def has(self, name: str) -> bool:
        """Return whether a name exists, even as a broken link."""
        try:
            (
                os.lstat(self._at(name))
                if self._descriptor is None
                else os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            )
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise self._unreadable(name, error) from error
        return True

    def is_folder(self, name: str) -> bool:
        """Return whether a name leads to a folder."""
        try:
            return stat.S_ISDIR(os.stat(self._at(name), dir_fd=self._descriptor).st_mode)
        except FileNotFoundError:
            return False

    def hold(self, name: str, *, keep: bool = False) -> HeldFile:
        """Open a file. Raises `PackCorrupt` if it is missing or links out of the folder."""
        if keep:
            self._kept.add(name)
        if name not in self._held:
            self._held[name] = self._open(name)
        return self._held[name]

    def _open(self, name: str) -> HeldFile:
        path = self.path / name
        where: Any = self._at(name)
        try:
            is_link = stat.S_ISLNK(os.stat(where, dir_fd=self._descriptor, follow_symlinks=False).st_mode)
            real = inside(path) if is_link else None
            # Do not block on a pipe; do not follow a link that appeared meanwhile.
            flags = _FLAGS | getattr(os, "O_NONBLOCK", 0) | (0 if is_link else getattr(os, "O_NOFOLLOW", 0))
            file = HeldFile(os.open(where, flags, dir_fd=self._descriptor), path)
            if real is not None and not os.path.samestat(file.stat, os.stat(real)):
                raise PackChanged(
                    f"{path} is a link whose target changed a moment ago: open the pack again when nothing writes to it"
                )
        except OSError as error:
            raise self._unreadable(name, error) from error
        if not stat.S_ISREG(file.stat.st_mode):
            raise PackCorrupt(f"{path} is missing (it is not a file): fetch the pack again")
        return file

    def _unreadable(self, name: str, error: OSError) -> PackError:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return PackCorrupt(f"{self.path / name} is missing: fetch the pack again")
        return PackError(f"{self.path / name} cannot be read ({error.strerror}): check its permissions")

    def _at(self, name: str) -> str | Path:
        return self.path / name if self._descriptor is None else name

    def in_place(self) -> bool:
        """Return whether the path still leads here."""
        try:
            return os.path.samestat(self._stat, os.stat(self.path))
        except OSError:
            return False

    def unchanged(self) -> bool:
        """Return whether no held file was written to or replaced; the whole folder may be gone."""
        for name, file in self._held.items():
            try:
                if file.close.alive:
                    file.check()
                if not os.path.samestat(file.stat, os.stat(self._at(name), dir_fd=self._descriptor)):
                    return False
            except PackChanged:
                return False
            except OSError as error:
                if error.errno != errno.ENOENT:
                    return False
        return True


def read_whole(path: Path, read: Callable[[HeldFolder], Outcome]) -> Outcome:
    """Return `read(folder)` of an unchanged folder, after some retries.

    Raises `PackChanged` if it keeps changing, errors of `read`, and `OSError` without a folder.
    """
    for attempt, seconds in enumerate(_WAITS):
        time.sleep(seconds)
        try:
            folder = HeldFolder(path)
        except FileNotFoundError:
            if attempt + 1 >= _ABSENT:
                raise
            continue
        with folder:
            try:
                outcome = read(folder)
            except Exception:
                if folder.in_place() and folder.unchanged():
                    raise
                continue
            if folder.unchanged():
                return outcome
    raise PackChanged(f"{path} is written to again and again while it is opened: open it when nothing writes to it")


def inside(path: Path) -> Path:
    """Return the target of a pack's link, which may be in the hub cache's blobs. Raises `PackCorrupt` outside: a
    pack must not expose other files.
    """
    real, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    roots = [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(place) for place in roots):
        raise PackCorrupt(
            f"{path} is a link that leads out of the pack: copy the pack with the files that it links to (cp -rL), if"
            " you trust it"
        )
    return real


def _contents(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _circumstances(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes `ctime` without a write."""
    return status.st_mode, status.st_nlink, status.st_uid, status.st_gid


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, min(len(view), _BLOCK_BYTES))
    view[: len(data)] = data
    return len(data)

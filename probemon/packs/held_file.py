"""Files held open: a pack is one thing from the moment it is opened, whatever becomes of the names of its files.

    def read(folder):                                  # is called again where somebody writes to the folder meanwhile
        return folder.hold("manifest.json").read(1 << 20), folder.hold("probes.safetensors", keep=True)

    text, file = read_whole(Path("pack"), read)
    file.check()                                       # PackChanged where the file was written to since it was opened

All files of a folder are opened relative to the folder's own descriptor, so that a folder that is replaced meanwhile is
still one folder. What is read of a file is read through its descriptor, at the places that were asked for: a file that
became shorter is an error, never a signal.
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
# seconds before each attempt to open a folder that is being replaced
_WAITS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
# attempts for a folder that is not there: where two names cannot be exchanged, a pack that is replaced is absent for a
# moment
_ABSENT = 6
_RELATIVE = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd  # not on Windows
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_seeking = threading.Lock()  # where files cannot be read at a place, they are read one at a time
Outcome = TypeVar("Outcome")


class HeldFile:
    """A file that was opened. It is closed when nobody has it any more. `size` is what it had when it was opened.

    `expected`: the sha256 that it is said to have, where that is known: it decides where times do not tell.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        self.stat = os.fstat(descriptor)
        self.size = self.stat.st_size
        self.expected: str | None = None

    def check(self) -> None:
        """Raise `PackChanged` where the file was written to since it was opened. Takes a microsecond or two, and once
        as long as hashing it where it was linked, unlinked or given other permissions.
        """
        try:
            now = os.fstat(self._descriptor)
        except OSError as error:  # of a network's file system
            raise PackChanged(f"{self.path} can no longer be read ({error.strerror}): open the pack again") from error
        before = self.stat
        if (
            now.st_ctime_ns == before.st_ctime_ns
            and now.st_mtime_ns == before.st_mtime_ns
            and now.st_size == before.st_size
        ):
            return
        # Linked, unlinked (a pack that was replaced) or given to somebody; or written to, its other times put back.
        # What is in it tells.
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
        """Fill a buffer of bytes from an offset on. Raises `PackChanged` where the file ends before."""
        view = memoryview(buffer).cast("B")
        while len(view):
            try:
                n = (
                    os.preadv(self._descriptor, [view], offset)
                    if hasattr(os, "preadv")
                    else _read_at(self._descriptor, view, offset)
                )
            except OSError as error:
                raise PackError(
                    f"{self.path} cannot be read ({error.strerror}): check the disk that it lies on"
                ) from error
            if n == 0:
                raise PackChanged(
                    f"{self.path} ends at byte {offset:,}, it had {self.size:,} when the pack was opened: open the pack"
                    " again"
                )
            view, offset = view[n:], offset + n

    def read_soon(self, offset: int, length: int) -> None:
        """Tell the kernel that these bytes will be read, so that the disk looks for several places at once."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # reading says what is wrong
                os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, max_bytes: int) -> bytes:
        """Return all of it. Raises `PackCorrupt` for a file that is longer than `max_bytes`, before it is read."""
        if self.size > max_bytes:
            raise PackCorrupt(
                f"{self.path} has {self.size:,} bytes, at most {max_bytes:,} are read: fetch the pack again"
            )
        data = bytearray(self.size)
        self.read_into(data, 0)
        return bytes(data)

    def sha256(self) -> str:
        """Return the hex digest of what is in the file."""
        digest, block = hashlib.sha256(), bytearray(min(_BLOCK_BYTES, self.size))
        for offset in range(0, self.size, _BLOCK_BYTES):
            part = memoryview(block)[: min(_BLOCK_BYTES, self.size - offset)]
            self.read_into(part, offset)
            digest.update(part)
        return digest.hexdigest()

    def descriptor(self) -> int:
        """Return the descriptor, for who maps the file. It belongs to this object."""
        return self._descriptor


class HeldFolder:
    """A folder that was opened, and the files that are held in it. Leaving the block closes those that are not kept.
    Raises `OSError` where there is none.
    """

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
        """Return the names of what is in the folder."""
        return os.listdir(self.path if self._descriptor is None else self._descriptor)

    def has(self, name: str) -> bool:
        """Return whether there is anything of that name, a broken link too."""
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
        """Return whether a folder has that name, or a link that leads to one."""
        try:
            return stat.S_ISDIR(os.stat(self._at(name), dir_fd=self._descriptor).st_mode)
        except FileNotFoundError:
            return False

    def hold(self, name: str, *, keep: bool = False) -> HeldFile:
        """Hold a file of the folder open, beyond the block with `keep`. Raises `PackCorrupt` where it is missing or is
        a link that leads out of the folder.
        """
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
            # Nobody waits for the other end of a pipe, and what became a link meanwhile is not followed.
            flags = _FLAGS | getattr(os, "O_NONBLOCK", 0) | (0 if is_link else getattr(os, "O_NOFOLLOW", 0))
            file = HeldFile(os.open(where, flags, dir_fd=self._descriptor), path)
            if real is not None and not os.path.samestat(file.stat, os.stat(real)):
                raise PackChanged(
                    f"{path} is a link that leads elsewhere than a moment ago: open the pack again when nobody writes"
                    " to it"
                )
        except OSError as error:
            raise self._unreadable(name, error) from error
        if not stat.S_ISREG(file.stat.st_mode):
            raise PackCorrupt(f"{path} is missing (what is there is no file): fetch the pack again")
        return file

    def _unreadable(self, name: str, error: OSError) -> PackError:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return PackCorrupt(f"{self.path / name} is missing: fetch the pack again")
        return PackError(f"{self.path / name} cannot be read ({error.strerror}): check its permissions")

    def _at(self, name: str) -> str | Path:
        return self.path / name if self._descriptor is None else name

    def in_place(self) -> bool:
        """Return whether its path still leads to this folder."""
        try:
            return os.path.samestat(self._stat, os.stat(self.path))
        except OSError:
            return False

    def unchanged(self) -> bool:
        """Return whether the held files are those of one moment: none was written to, and none has been put in the
        place of another. A folder that was removed as a whole may be.
        """
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
    """Return what `read` makes of a folder in which nobody writes meanwhile. Where somebody does, it is read anew, a
    few times; then `PackChanged` is raised.

    Raises what `read` raises of a folder that stays as it is, and `OSError` where there is no folder.
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
    raise PackChanged(f"{path} is written to again and again while it is opened: open it when nobody writes to it")


def inside(path: Path) -> Path:
    """Return where a link of a pack leads. Raises `PackCorrupt` where that is out of its folder: whoever made the pack
    would have another's file read, and copied on.

    In the hub's cache a snapshot's files are links to the blobs beside it, and these are the pack's own.
    """
    real, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    own = [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(place) for place in own):
        raise PackCorrupt(
            f"{path} is a link that leads out of the pack: copy the pack with the files that it links to (cp -rL), if"
            " you trust it"
        )
    return real


def _contents(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _circumstances(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes `ctime` without a byte being written."""
    return status.st_mode, status.st_nlink, status.st_uid, status.st_gid


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, min(len(view), _BLOCK_BYTES))
    view[: len(data)] = data
    return len(data)

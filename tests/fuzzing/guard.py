"""What a case opens, changes and runs, by Python's audit events.

    guard = Guard()                                 # one a process: an audit hook cannot be taken away
    with guard.watch(room) as seen:
        ...                                         # may read room/source and room/out, and write room/out
    seen                                            # what it did beyond that, in words

Files that a native library opens by itself raise no event: those are caught by what is in them (`fuzzing.case`). Those
that are opened relative to a folder raise one that does not say which folder: of these the system is asked what was
opened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from probemon.packs.held_file import HeldFile

_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile", "subprocess.Popen",
    "pickle.find_class", "socket.", "urllib.Request", "http.client.",
    "ftplib.", "smtplib.", "ctypes.", "code.__new__", "function.__new__", "webbrowser.open", "os.putenv", "os.kill",
    "sys.addaudithook", "mmap.__new__.exec",
)  # fmt: skip
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "os.chown",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.utime",
    "shutil.rmtree",
    "shutil.move",
)
_LISTS = ("os.listdir", "os.scandir", "glob.glob", "os.walk")


class Guard:
    """Watches where asked; lets all else pass."""

    def __init__(self) -> None:
        here = Path(__file__).resolve().parents[2]
        places = {sys.prefix, sys.base_prefix, str(here), *(path for path in sys.path if path)}
        self._installed = tuple(os.path.realpath(place) + os.sep for place in places)
        self._names = frozenset(sys.stdlib_module_names)
        self._seen: list[str] | None = None
        self._room = ""
        sys.addaudithook(self._hook)

    @contextmanager
    def watch(self, room: Path) -> Iterator[list[str]]:
        """What is done in the block beyond what a case may do; empty where nothing is."""
        self._room = os.path.realpath(room)
        self._known = {name.partition(".")[0] for name in sys.modules}
        found: list[str] = []
        self._seen = found
        hold = HeldFile.__init__

        def held(file: HeldFile, descriptor: int, path: Path) -> None:
            self._hook("open", (os.readlink(f"/proc/self/fd/{descriptor}"), None, os.O_RDONLY))
            hold(file, descriptor, path)

        try:
            with mock.patch.object(HeldFile, "__init__", held):
                yield found
        finally:
            self._seen = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        seen = self._seen
        if seen is None:
            return
        self._seen = None  # what is asked here raises events of its own
        try:
            told = self._judge(event, arguments)
            if told and len(seen) < 5:
                seen.append(told)
        finally:
            self._seen = seen

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, mode, flags = arguments
            writes = (
                bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
                if isinstance(flags, int)
                else any(char in (mode or "") for char in "wax+")
            )
            return self._place(event, path, writes)
        if event in _LISTS:
            return self._place(event, arguments[0] if arguments[0] is not None else ".", False)
        if event in _CHANGES:
            return (
                None
                if isinstance(arguments[-1], int) and arguments[-1] > 0 and event in ("os.remove", "os.rmdir")
                else self._place(event, arguments[0], True)
            )
        if event == "import":
            name = str(arguments[0]).partition(".")[0]
            return None if name in self._names or name in self._known else f"imports {arguments[0]}"
        if event == "exec":
            return self._code(getattr(arguments[0], "co_filename", ""))
        if event == "compile":
            return self._code(arguments[1])
        return f"{event}{arguments!r:.200}" if event.startswith(_FORBIDDEN) else None

    def _place(self, event: str, path: Any, writes: bool) -> str | None:
        if isinstance(path, int):
            return None
        try:
            real = os.path.realpath(os.fsdecode(path))
        except (OSError, ValueError):
            return None  # cannot be opened either
        if (real + os.sep).startswith(f"{self._room}{os.sep}out{os.sep}"):
            return None
        if not writes and (
            (real + os.sep).startswith((f"{self._room}{os.sep}source{os.sep}", f"{self._room}{os.sep}flat{os.sep}"))
            or (real + os.sep).startswith(self._installed)
        ):
            return None
        return f"{event} {'to write' if writes else 'to read'} {real}"

    def _code(self, file: Any) -> str | None:
        file = os.fsdecode(file) if isinstance(file, (str, bytes)) else ""
        return (
            None
            if file.startswith("<frozen ")
            or (os.path.isabs(file) and os.path.realpath(file).startswith(self._installed))
            else f"runs code of {file!r}"
        )

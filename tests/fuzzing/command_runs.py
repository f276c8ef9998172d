"""Runs drawn command lines in forked children, and judges how each ended.

    runs = Runs(folder)                             # the workshop is made, the package imported once
    ended = runs.run(case)                          # status, texts, seconds
    trouble = judge(case, ended)                    # None, or what is wrong
    smallest = runs.minimised(case)                 # with as little as is needed for the same kind of trouble

A child is a copy of a process that has imported all: 20,000 command lines take an hour or two on one core. It has
streams, limits, variables and a folder of its own, runs the command line's own `main`, and ends as Python does.

A command ends with 0; 1 where what was asked is not so; 2 and one line on standard error that begins with "probemon: ";
130 after SIGINT; 143 after SIGTERM; 141 where nobody reads its output. Nothing ends with a traceback, and nothing goes
on for ever.
"""

from __future__ import annotations

import gc
import logging
import os
import pkgutil
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import typer

import probemon
from fuzzing.command_lines import ENVIRONMENTS, Case, commands
from fuzzing.workshop import Workshop, break_file
from probemon.cli import app as cli
from probemon.errors import ProbemonError

MOST_SECONDS = 60.0  # after which a command is told to end, as a server is
ENDS_WITHIN_SECONDS = 20.0
FILE_BYTES, MEMORY_BYTES, N_FILES = 1500, 96 << 20, 24
MOST_MEMORY_BYTES = 4 << 30  # that a command may map beyond what is there when it begins
_SERVERS = {("serve",), ("vllm", "serve")}
_SERVER_SECONDS = 4.0
_COMMANDS: Any = typer.main.get_command(cli.app)  # made once: it takes longer than a command
TABLE = commands(_COMMANDS)


@dataclass(frozen=True)
class Ended:
    """How a command ended: `status`, negative for the number of a signal that ended it; `told` when it was to end."""

    status: int
    out: str
    error: str
    seconds: float
    told: str = ""


class Runs:
    """A folder for cases, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.shop = Workshop(folder / "workshop")
        for module in pkgutil.walk_packages(probemon.__path__, "probemon."):
            if not any(part in module.name for part in ("__main__", "kernels", "triton", "vllm")):
                with suppress(ImportError, ProbemonError):  # of an extra that is not here
                    import_module(module.name)

    def run(self, case: Case) -> Ended:
        """Run a case."""
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, kind in case.files.items():
            self.shop.put(kind, place / name)
            if name in case.broken:
                break_file(place / name, Random(case.broken[name]))
        ready, begins = os.pipe()
        pipes = [os.pipe(), os.pipe()]  # not files, which a limit of their size would cut
        gc.freeze()  # else a child copies what its own collector touches
        child = os.fork()
        if child == 0:
            os.close(ready)
            _become(case, place, self.folder, begins, [writer for _, writer in pipes])
        gc.unfreeze()
        for writer in (begins, *(writer for _, writer in pipes)):
            os.close(writer)
        os.read(ready, 1)  # nothing: it is closed when the command begins
        os.close(ready)
        begin = time.monotonic()
        texts = [_Text(reader) for reader, _ in pipes]
        status, told = self._wait(child, case, begin, texts)
        return Ended(status, texts[0].end(), texts[1].end(), time.monotonic() - begin, told)

    def _wait(self, child: int, case: Case, begin: float, texts: list[_Text]) -> tuple[int, str]:
        """Wait for a child and tell it to end when its time has come; one that does not is killed."""
        limit = _SERVER_SECONDS if case.command in _SERVERS else MOST_SECONDS
        signals = [(limit, signal.SIGTERM), (limit + ENDS_WITHIN_SECONDS, signal.SIGKILL)]
        if case.signal:
            signals.insert(0, (case.seconds, getattr(signal, f"SIG{case.signal}")))
        told, pause = "", 0.0005
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), told
            if signals and time.monotonic() - begin > signals[0][0]:
                told = signals.pop(0)[1].name.removeprefix("SIG")
                os.kill(child, getattr(signal, f"SIG{told}"))
            for text in texts:
                text.read()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def minimised(self, case: Case) -> Case:
        """Return a case with as little as is needed for the same kind of trouble."""
        kind, smaller = kind_of(judge(case, self.run(case)) or ""), True
        while smaller and kind:
            smaller = False
            for simpler in case.simpler():
                if kind_of(judge(simpler, self.run(simpler)) or "") == kind:
                    case, smaller = simpler, True
                    break
        return case


class _Text:
    """What comes through a pipe."""

    def __init__(self, reader: int) -> None:
        self._reader, self._parts = reader, list[bytes]()
        os.set_blocking(reader, False)

    def read(self) -> None:
        """Take what has come."""
        with suppress(BlockingIOError):
            while part := os.read(self._reader, 1 << 16):
                self._parts.append(part)

    def end(self) -> str:
        """Return all of it."""
        self.read()
        os.close(self._reader)
        return b"".join(self._parts).decode("utf-8", "backslashreplace")


def _become(case: Case, place: Path, home: Path, begins: int, outputs: list[int]) -> None:
    """Be the process of a command line, and end as it does; `begins` is closed when all is ready."""
    code = 70
    try:
        os.setsid()
        os.chdir(place)
        os.environ.update({"HOME": str(home / "home"), "COLUMNS": "100", "PROBEMON_NO_UPDATE": "1"})
        for name in ("XDG_CACHE_HOME", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        for name, value in ENVIRONMENTS[case.environment].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _set_streams(case, home, outputs)
        _set_limit(case.limit)
        warnings.resetwarnings()
        warnings.simplefilter("default")
        logging.raiseExceptions = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv, cli.app = ["probemon", *case.arguments], _COMMANDS
        os.close(begins)
        code = _main()
    except BaseException:  # of this file
        with suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _main() -> int:
    """Run the command line and end as the interpreter does: what is not written yet is, or ends it with 120."""
    try:
        cli.main()
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        code = 0 if code is None else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    return code


def _set_streams(case: Case, home: Path, outputs: list[int]) -> None:
    for number, writer in enumerate(outputs, 1):
        os.dup2(writer, number)
        os.close(writer)
    (home / "in").write_text('{"text": "a sea"}\n' if case.streams == "stdin has documents" else "")
    os.dup2(os.open(home / "in", os.O_RDONLY), 0)
    if case.streams == "nobody reads":
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
    elif case.streams == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    as_text: dict[str, Any] = {"encoding": encoding, "closefd": False}
    sys.stdin, sys.stdout = open(0, **as_text), open(1, "w", **as_text)  # noqa: SIM115 (for the whole process)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", **as_text)  # noqa: SIM115
    # As Python begins with a stream that is closed.
    if case.streams == "stdin closed":
        os.close(0)
        sys.stdin = None  # type: ignore[assignment]
    elif case.streams == "stdout closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]


def _set_limit(limit: str) -> None:
    if limit == "file size":  # as of a disk that fills up: writing more is EFBIG
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = taken + (MEMORY_BYTES if limit == "memory" else MOST_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if limit == "files":
        taken = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + N_FILES, taken + N_FILES))


def judge(case: Case, ended: Ended) -> str | None:
    """Return what is wrong with how a case ended, or None."""
    status, error = ended.status, ended.error
    if "Traceback (most recent call last)" in error + ended.out:
        return f"a traceback: {_last(error or ended.out)}"
    expected = {0, 1, 2}
    if ended.told in ("INT", "TERM"):
        expected |= {130} if ended.told == "INT" else {143, -signal.SIGTERM}
        if case.signal == "INT" and ended.told == "TERM":
            expected.add(130)
    if case.streams == "nobody reads":
        expected.add(141)
    if status not in expected:
        return f"status {status}: {_last(error)}"
    if ended.told == "TERM" and not case.signal and case.command not in _SERVERS:
        return f"it went on for {ended.seconds:.0f} s"
    lines = [line for line in re.split(r"[\n\r]", error) if line.startswith("probemon: ")]
    if status == 2 and len(lines) != 1:
        return f"status 2 with {len(lines)} lines of what is wrong: {_last(error)}"
    return None


def _last(text: str) -> str:
    """The last line of a text, and for a traceback the place in the package that it came from."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or [""]
    places = re.findall(r'File "[^"]*/(probemon/[^"]+)", line \d+, in (\S+)', text)
    return f"{lines[-1][:200]}{f' ({places[-1][0]}, {places[-1][1]})' if places else ''}"


def kind_of(trouble: str) -> str:
    """Return a trouble without what differs from case to case."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|/\S+/|\d+", "_", trouble)

"""Output of commands, made harmless: no text controls the terminal.

    with border():                         # wraps sys.stdout and sys.stderr
        say(f"{name}: {licence}")                  # one line per argument
        answer({"name": name})                     # one line of JSON
        terminal().print(table)                    # a rich console without markup

Control and invisible characters, and those that cannot be encoded, are escaped.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from probemon.util.harmless_text import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BLANKS = re.compile(r" +(?=\n)")


def say(*lines: object, error: bool = False) -> None:
    """Print each argument as one line, at once: a server's first line is read through a pipe."""
    stream = sys.stderr if error else sys.stdout
    for line in lines:
        stream.write(harmless(str(line)) + "\n")
    stream.flush()


def answer(content: Mapping[str, Any]) -> None:
    """Print one line of ASCII JSON; numbers that are not finite become null."""
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(content), allow_nan=False)
    say(text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Bordered(io.TextIOBase):
    """A stream that makes texts harmless. Line ends stay; on a terminal also a leading "\\r", for progress bars."""

    def __init__(self, stream: TextIO) -> None:
        self.unbordered = stream

    def write(self, text: str) -> int:
        """Write harmless text."""
        begin = "\r" if text.startswith("\r") and self.isatty() else ""
        shown = begin + harmless(text[len(begin) :], keep="\n\t")
        self._put(shown)
        return len(text)

    def _put(self, shown: str) -> None:
        with self._named():
            try:
                self.unbordered.write(shown)
            except UnicodeEncodeError:
                encoding = self.unbordered.encoding or "ascii"
                self.unbordered.write(shown.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """Flush the stream."""
        with self._named():
            self.unbordered.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the stream in an OSError."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = {"<stdout>": "standard output", "<stderr>": "standard error"}.get(
                    getattr(self.unbordered, "name", ""), "standard output"
                )
            raise

    def isatty(self) -> bool:
        """As the stream."""
        return self.unbordered.isatty()

    def fileno(self) -> int:
        """As the stream."""
        return self.unbordered.fileno()

    def writable(self) -> bool:
        """True."""
        return True

    @property
    def errors(self) -> str:  # type: ignore[override]
        """Escapes what cannot be encoded."""
        return "backslashreplace"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the stream."""
        return self.unbordered.encoding


@contextmanager
def border() -> Iterator[None]:
    """Wrap standard output and standard error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Bordered(sys.stdout), Bordered(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _FromRich(Bordered):
    """For rich, whose output is harmless; files and pipes lose the blanks that pad tables."""

    def write(self, text: str) -> int:
        """Write."""
        self._put(text if self.isatty() else _BLANKS.sub("", text))
        return len(text)


def terminal(*, error: bool = False, **options: Any) -> Console:
    """Return a rich console without markup that makes texts harmless. `options`: of `rich.console.Console`."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Terminal(Console):
        def render_str(self, text: str, **more: Any) -> Text:
            return super().render_str(harmless(text), **{**more, "markup": False, "emoji": False, "highlight": False})

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control is None:  # rich's cursor moves
                    segment = Segment(harmless(segment.text, keep="\n"), segment.style)
                yield segment

    stream: Any = sys.stderr if error else sys.stdout
    unbordered: TextIO = getattr(stream, "unbordered", stream)
    return Terminal(
        **{
            "file": _FromRich(unbordered),
            "markup": False,
            "emoji": False,
            "highlight": False,
            "soft_wrap": True,
            **options,
        }
    )


def plain_table(**options: Any) -> Table:
    """Return a rich table without a frame."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, header_style="dim", **options)


def shorten_path(path: Sequence[str], width: int) -> list[str]:
    """Shorten a path to `width`: first drop middle names, then the root; the concept stays."""
    shown, n_kept = list(path), len(path) - 1
    while n_kept > 1 and len(" > ".join(shown)) > width:
        n_kept -= 1
        shown = [path[0], "…", *path[len(path) - n_kept :]]
    for shorter in (["…", path[-1]], [path[-1]]):
        if len(shorter) < len(shown) and len(" > ".join(shown)) > width:
            shown = shorter
    return shown

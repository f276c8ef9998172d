"""The border to the terminal: every text of a command leaves through here, and none of it is obeyed.

    with border():                         # around sys.stdout and sys.stderr: prints, warnings, logs, tracebacks
        say(f"{name}: {licence}")                  # a line; of several arguments each is one
        say("not found", error=True)               # on standard error
        answer({"name": name})                     # one line of JSON
        terminal().print(table)                    # a rich console that takes no text for markup

Names, texts and paths are somebody else's. A terminal would act on some of their characters: escapes, other
controls, changes of the writing direction, and those that nobody sees. They are shown as Python writes them,
`\\x1b`; so is what cannot be encoded. A line break in a text is shown, too: it cannot begin a line of its own.
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
    """Print each argument as one line, on standard output or standard error."""
    stream = sys.stderr if error else sys.stdout
    for line in lines:
        stream.write(harmless(str(line)) + "\n")


def answer(content: Mapping[str, Any]) -> None:
    """Print an object as one line of JSON, in ASCII; a number that is not finite is null."""
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
    """A stream whose texts are made harmless on their way.

    Lines stay lines; on a terminal a progress bar may go back to the beginning of its own.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unbordered = stream

    def write(self, text: str) -> int:
        """As of any stream."""
        begin = "\r" if text.startswith("\r") and self.isatty() else ""
        shown = begin + harmless(text[len(begin) :], keep="\n\t")
        self._put(shown)
        return len(text)

    def _put(self, shown: str) -> None:
        with self._named():
            try:
                self.unbordered.write(shown)
            except UnicodeEncodeError:  # a terminal of few characters
                encoding = self.unbordered.encoding or "ascii"
                self.unbordered.write(shown.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """As of any stream."""
        with self._named():
            self.unbordered.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the stream in an error of the system, which names files alone."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = {"<stdout>": "standard output", "<stderr>": "standard error"}.get(
                    getattr(self.unbordered, "name", ""), "standard output"
                )
            raise

    def isatty(self) -> bool:
        """As of the stream."""
        return self.unbordered.isatty()

    def fileno(self) -> int:
        """As of the stream."""
        return self.unbordered.fileno()

    def writable(self) -> bool:
        """It is."""
        return True

    @property
    def errors(self) -> str:  # type: ignore[override]
        """What cannot be encoded is written out."""
        return "backslashreplace"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As of the stream."""
        return self.unbordered.encoding


@contextmanager
def border() -> Iterator[None]:
    """Put the border around standard output and standard error while the block runs."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Bordered(sys.stdout), Bordered(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _FromRich(Bordered):
    """A terminal; or a file or pipe, into which tables go without the blanks that fill their last column.

    What rich writes is harmless already; its colours, where they are forced, stay.
    """

    def write(self, text: str) -> int:
        """As of any stream."""
        self._put(text if self.isatty() else _BLANKS.sub("", text))
        return len(text)


def terminal(*, error: bool = False, **options: Any) -> Console:
    """Return a rich console at the border: text is never markup, and is harmless in tables, titles and `Text` too.

    `options`: of `rich.console.Console`.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Terminal(Console):
        def render_str(self, text: str, **more: Any) -> Text:
            return super().render_str(harmless(text), **{**more, "markup": False, "emoji": False, "highlight": False})

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control is None:  # a control segment is rich's own: to move the cursor
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
    """Return a rich table without a frame. `options`: of `rich.table.Table`."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, header_style="dim", **options)


def shorten_path(path: Sequence[str], width: int) -> list[str]:
    """Return a path from the root; where it is wider than `width`, names between root and concept give way, then the
    root: the concept is what the numbers beside it are of.
    """
    shown, n_kept = list(path), len(path) - 1
    while n_kept > 1 and len(" > ".join(shown)) > width:
        n_kept -= 1
        shown = [path[0], "…", *path[len(path) - n_kept :]]
    for shorter in (["…", path[-1]], [path[-1]]):
        if len(shorter) < len(shown) and len(" > ".join(shown)) > width:
            shown = shorter
    return shown

"""Runs the examples of README and the pages, and writes what they print under them.

python scripts/benchmarks/page_output.py                            # renews the output of every page
python scripts/benchmarks/page_output.py README.md docs/rules.md    # of some
python scripts/benchmarks/page_output.py --check                    # changes nothing; status 1 where one would change

A page's `python` and `sh` blocks run in their order, in a folder of the page's own that holds nothing but `probes` and
`examples`.
A `text` block right under one is what it prints on standard output. `<!-- not run -->` over a block leaves it out.
Lines of an `sh` block are commands of probemon; they run in this process, which has loaded the demo model once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import io
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are about the probemon that lies beside them

# importers.md and packs.md run in tests of their own: they need files and a hub next to them.
NAMES = (
    "tutorial",
    "watch",
    "rules",
    "scores",
    "hidden-states",
    "followers",
    "training",
    "corpora",
    "deployment",
    "drift",
    "metrics",
    "memory-and-routing",
    "bem",
    "bem-rows",
)
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))
BLOCK = re.compile(
    r"(?P<skipped><!-- not run -->\n+)?^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


# Whether a descent or all probes are cheaper is measured when a manager is made, so how many are evaluated depends on
# what else the machine does. Nothing else may differ.
MEASURED = re.compile(r"\d+(?= evaluated a token)")


NUMBER = re.compile(r"\d+(?:\.\d+)?%?")


def alike(one: str, other: str) -> bool:
    """True if two outputs are the same, except that a fraction or a percentage may differ by one in its last digit.

    Processors round sums in another order.
    """
    one, other = MEASURED.sub("", one), MEASURED.sub("", other)
    if one == other:
        return True
    numbers, others = NUMBER.findall(one), NUMBER.findall(other)
    return NUMBER.sub("", one) == NUMBER.sub("", other) and all(map(_near, numbers, others))


def _near(one: str, other: str) -> bool:
    if one == other:
        return True
    digits, of_other = (number.rstrip("%").partition(".")[2] for number in (one, other))
    if len(digits) != len(of_other) or one.endswith("%") != other.endswith("%") or not (digits or one.endswith("%")):
        return False
    return round(abs(float(one.rstrip("%")) - float(other.rstrip("%"))) * 10 ** len(digits)) <= 1


@dataclass(frozen=True)
class Example:
    """One block that runs, and where its output stands on the page: `start` to `end`, None where none is shown."""

    line: int
    kind: str
    code: str
    span: tuple[int, int] | None


def examples(page: str) -> Iterator[Example]:
    """Yield the blocks of a page that run."""
    for found in BLOCK.finditer(page):
        if not found["skipped"]:
            span = None if found["output"] is None else found.span("output")
            yield Example(page.count("\n", 0, found.start("code")) + 1, found["kind"], found["code"], span)


def renewed(name: str) -> str:
    """Return a page with the output that its examples print now. Raises `RuntimeError` naming the block that failed."""
    page, parts, end = (ROOT / name).read_text(encoding="utf-8"), [], 0
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in ("probes", "examples"):
            Path(name).symlink_to(ROOT / name)
        for example in examples(page):
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    run(example, names, f"{name}:{example.line}")
            except Exception as error:
                traceback.print_exc()
                raise RuntimeError(f"{name}, line {example.line}: the example fails: {error}") from error
            if example.span is not None:
                lines = (line.rstrip() for line in printed.getvalue().splitlines())
                parts += [page[end : example.span[0]], "".join(f"{line}\n" for line in lines)]
                end = example.span[1]
    return "".join([*parts, page[end:]])


def run(example: Example, names: dict[str, Any], where: str) -> None:
    """Run one block: Python in the names of its page, or commands of probemon."""
    if example.kind == "python":
        exec(compile("\n" * example.line + example.code, where, "exec"), names)
        return
    from probemon.cli.app import main

    for line in example.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] != "probemon":
            raise RuntimeError(f"{line!r} is no command of probemon: mark the block with <!-- not run -->")
        before, sys.argv = sys.argv, words
        try:
            main()
        except SystemExit as ended:
            if ended.code not in (0, None):
                raise RuntimeError(f"{line!r} ends with status {ended.code}") from None
        finally:
            sys.argv = before


def main_of_pages() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where output would change")
    arguments = parser.parse_args()
    os.environ["COLUMNS"] = "100"
    for library in ("OMP", "OPENBLAS"):  # threads that wait for each other take longer than one, where others work, too
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    from probemon import bundled
    from probemon.util.files import write_text_atomically

    bundled.load_bundled = functools.cache(bundled.load_bundled)
    differing = 0
    for name in arguments.pages:
        began = time.monotonic()
        old, new = (ROOT / name).read_text(encoding="utf-8"), renewed(name)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        if not alike(old, new):
            differing += 1
            changes = difflib.unified_diff(
                old.splitlines(), new.splitlines(), name, "what it prints now", n=0, lineterm=""
            )
            print(*changes, sep="\n", file=sys.stderr)
            if not arguments.check:
                write_text_atomically(ROOT / name, new)
    return 1 if arguments.check and differing else 0


if __name__ == "__main__":
    sys.exit(main_of_pages())

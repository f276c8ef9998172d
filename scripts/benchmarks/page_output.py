"""Runs the examples of README and the pages, and writes what they print under them.

python scripts/benchmarks/page_output.py                            # renews the output of every page
python scripts/benchmarks/page_output.py README.md docs/rules.md    # of some
python scripts/benchmarks/page_output.py --check                    # changes nothing; status 1 where one would change

A page's `python` and `sh` blocks run in their order, in a folder of the page's own that holds nothing but `probes` and
`examples`.
A `text` block right under one is what it prints on standard output. `<!-- not run -->` over a block leaves it out.
Lines of an `sh` block are commands of probemon; they run in this process, which has loaded the demo model once.

In bf16 the model writes other words on a processor that rounds otherwise. `docs/output.json` names the arithmetic with
which the pages were renewed; with another one all examples still run, and whether they print is checked, not what.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import io
import json
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are about the probemon that lies beside them
from arithmetic import arithmetic  # noqa: E402
from provenance import machine  # noqa: E402

# Other pages run in tests of their own: bring-your-own-probes.md and sharing.md need files and a hub beside them, and
# memory-hosts.md needs no model but its own.
NAMES = (
    "tutorial",
    "training",
    "watch",
    "rules",
    "followers",
    "deployment",
    "drift",
    "metrics",
    "budget",
    "opentelemetry",
    "second_opinion",
    "decode-loop",
    "hidden-states",
    "several-packs",
    "corpora",
)
PAGES = ("README.md", *(f"docs/{name}.md" for name in (*NAMES, "thresholds", "routing", "bem")))
BLOCK = re.compile(
    r"(?P<skipped><!-- not run -->\n+)?^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


# Whether a descent or all probes are cheaper is measured when a manager is made, so how many are evaluated depends on
# what else the machine does. Nothing else may differ.
MEASURED = re.compile(r"\d+(?= evaluated a token)")
MADE_WITH = ROOT / "docs" / "output.json"


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
    import torch

    from probemon import bundled
    from probemon.util.files import write_text_atomically

    bundled.load_bundled = functools.cache(bundled.load_bundled)
    here = {"arithmetic": arithmetic(), "cpu": machine()["cpu"]}
    before = json.loads(MADE_WITH.read_text(encoding="utf-8"))
    comparable = before["arithmetic"] == here["arithmetic"]
    if not comparable and arguments.check:
        print(f"the pages were renewed on {before['cpu']}, so what they print is not compared", file=sys.stderr)
        demo = bundled.load_bundled(torch.float32)
        bundled.load_bundled = lambda *args, **kwargs: demo
    if not comparable and not arguments.check and set(arguments.pages) != set(PAGES):
        parser.error(f"the pages were renewed on {before['cpu']}, which rounds otherwise: renew all of them")
    differing = 0
    for name in arguments.pages:
        old, new = (ROOT / name).read_text(encoding="utf-8"), renewed(name)
        if not comparable and arguments.check:
            assert [bool(block["output"]) for block in BLOCK.finditer(old)] == [
                bool(block["output"]) for block in BLOCK.finditer(new)
            ], name
        elif MEASURED.sub("", old) != MEASURED.sub("", new):
            differing += 1
            changes = difflib.unified_diff(
                old.splitlines(), new.splitlines(), name, "what it prints now", n=0, lineterm=""
            )
            print(*changes, sep="\n", file=sys.stderr)
            if not arguments.check:
                write_text_atomically(ROOT / name, new)
    if not arguments.check and not comparable:
        write_text_atomically(MADE_WITH, json.dumps(here) + "\n")
    return 1 if arguments.check and differing else 0


if __name__ == "__main__":
    sys.exit(main_of_pages())

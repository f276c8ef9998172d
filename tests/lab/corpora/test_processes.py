"""Shell commands: two concurrent processes, or a Ray worker, write the rows that one process writes."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from conftest import make_model
from corpora import make_tokenizer, random_texts
from forked import ended, forked
from probemon.lab.corpora.analysis_files import TABLES
from probemon.lab.corpora.analysis_folder import Analysis


def tables(folder):
    opened = Analysis.open(folder)
    return {name: getattr(opened, name)().to_pydict() for name in TABLES}, opened.manifest["totals"]


@pytest.fixture(scope="module")
def workplace(pack, tmp_path_factory):
    """A host in a folder, 520 texts (so three shards of 256), and their analysis by one process, in a terminal; and
    what was shown there.
    """
    folder = tmp_path_factory.mktemp("shell")
    make_model().save_pretrained(folder / "host")
    make_tokenizer().save_pretrained(folder / "host")
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(random_texts(520, longest=20))]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))  # else it has no columns to draw in
    child = forked(words(folder, pack, "one"), out=folder / "told", errors=os.ttyname(theirs))
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    assert ended(child) == 0 and Analysis.open(folder / "one").complete, shown
    return folder, shown.decode()


def words(folder, pack, out, *more):
    arguments = ["analyze", folder / "host", pack.directory, folder / "texts.jsonl", "--out", folder / out]
    return [*map(str, arguments), "--dtype", "float32", "--window", "24", "--json", *more]


def test_progress_bar_shows_a_rate_and_the_remaining_time(workplace):
    """In a terminal; what is no terminal gets none."""
    _, shown = workplace
    bar = r"analyze: +\d+%\|.*\| \d+/520 doc \[\d\d:\d\d<\d\d:\d\d, \d+ tokens, \d+ a second\]"
    assert re.search(bar, shown), shown[-500:]


def test_two_processes_at_once_write_the_rows_of_one(pack, workplace):
    folder, _ = workplace
    running = [
        forked(
            words(folder, pack, "ranks"),
            out=folder / f"told{rank}",
            errors=folder / f"errors{rank}",
            RANK=str(rank),
            WORLD_SIZE="2",
        )
        for rank in (0, 1)
    ]
    assert [ended(child) for child in running] == [0, 0], (folder / "errors0").read_text()
    assert len(list((folder / "ranks/shards").glob("*.json"))) == 3
    assert tables(folder / "ranks") == tables(folder / "one")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_ray_from_the_shell_writes_the_rows_of_one_process(pack, workplace):
    """In a cluster of its own, which the command makes and ends. Of two workers: test_distributed.py."""
    folder, _ = workplace
    line = [sys.executable, "-m", "probemon.cli", *words(folder, pack, "ray", "--ray", "1")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["documents"] == 520
    assert tables(folder / "ray") == tables(folder / "one")

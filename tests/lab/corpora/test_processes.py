"""From the shell: two processes at once, and two workers of Ray, write the rows that one process writes."""

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
from probemon.lab.corpora.analysis_files import TABLES
from probemon.lab.corpora.analysis_folder import Analysis


def tables(folder):
    opened = Analysis.open(folder)
    return {name: getattr(opened, name)().to_pydict() for name in TABLES}, opened.manifest["totals"]


@pytest.fixture(scope="module")
def workplace(pack, tmp_path_factory):
    """A host in a folder, 700 texts (so three shards of 256), and their analysis by one process, from the shell."""
    folder = tmp_path_factory.mktemp("shell")
    make_model().save_pretrained(folder / "host")
    make_tokenizer().save_pretrained(folder / "host")
    (folder / "texts.jsonl").write_text(
        "".join(
            json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(random_texts(700, longest=20))
        )
    )
    done = command(folder, pack, "one").communicate(timeout=900)
    assert Analysis.open(folder / "one").complete, done
    return folder


def command(folder, pack, out, *more, **environment):
    arguments = [
        "analyze",
        folder / "host",
        pack.directory,
        folder / "texts.jsonl",
        "--out",
        folder / out,
        "--dtype",
        "float32",
        "--window",
        "24",
        "--json",
        *more,
    ]
    words = [sys.executable, "-m", "probemon.cli", *map(str, arguments)]
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_progress_has_a_rate_and_the_time_that_is_left(pack, workplace):
    """In a terminal; what is no terminal gets none."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))  # else it has no columns to draw in
    words = [
        sys.executable,
        "-m",
        "probemon.cli",
        "analyze",
        workplace / "host",
        pack.directory,
        workplace / "texts.jsonl",
        "--out",
        workplace / "bar",
        "--dtype",
        "float32",
    ]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    assert process.wait(timeout=900) == 0
    assert re.search(
        r"analyze: +\d+%\|.*\| \d+/700 doc \[\d\d:\d\d<\d\d:\d\d, \d+ tokens, \d+ a second\]", shown.decode()
    ), shown[-500:]


def test_two_processes_at_once_write_the_rows_of_one(pack, workplace):
    running = [command(workplace, pack, "ranks", RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)]
    told = [process.communicate(timeout=900) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert len(list((workplace / "ranks/shards").glob("*.json"))) == 3
    assert tables(workplace / "ranks") == tables(workplace / "one")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_ray_from_the_shell_writes_the_rows_of_one_process(pack, workplace):
    """In a cluster of its own, which the command makes and ends."""
    running = command(workplace, pack, "ray", "--ray", "2", RAY_ADDRESS="local")
    out, error = running.communicate(timeout=900)
    assert running.returncode == 0, error
    assert json.loads(out)["documents"] == 700
    assert tables(workplace / "ray") == tables(workplace / "one")

"""The log of a server: one line per record, as text or JSON, with its exception, and harmless for a terminal."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, warnings
from probemon.ops.server.logs import set_up_log
set_up_log("{level}", "{form}")
log = logging.getLogger("probemon")
log.debug("not shown")
log.info("request %s %s", "r1", "answered", extra=dict(request="r1", outcome="answered", seconds=0.5))
logging.getLogger("another.library").info("not shown")
warnings.warn("careful")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed\\x1b[2J\\nforged line")
"""


def lines_of(level, form):
    program = PROGRAM.format(level=level, form=form)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == ""
    return run.stderr.splitlines()


def test_json_has_one_object_per_record():
    told, warned, failed = map(json.loads, lines_of("info", "json"))
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "info",
        "logger": "probemon",
        "message": "request r1 answered",
        "request": "r1",
        "outcome": "answered",
        "seconds": 0.5,
    }
    assert warned["level"] == "warning" and "careful" in warned["message"]
    assert failed["message"] == "failed\x1b[2J\nforged line" and "ZeroDivisionError" in failed["exception"]


@pytest.mark.parametrize("level, n_told", [("info", 1), ("warning", 0)])
def test_text_shows_the_level_asked_for_and_no_control_characters(level, n_told):
    lines = lines_of(level, "text")
    assert len([line for line in lines if line.endswith("info probemon: request r1 answered")]) == n_told
    assert any(line.endswith("ZeroDivisionError: division by zero") for line in lines)
    assert not any("\x1b" in line for line in lines)

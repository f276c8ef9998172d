"""The log of a server: lines of text or JSON on stderr, without texts of requests."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from probemon.util.harmless_text import harmless

Level = Literal["debug", "info", "warning", "error"]
Form = Literal["text", "json"]
OWN = ("probemon", "uvicorn")
FIELDS = ("request", "key", "outcome", "n_tokens", "seconds")  # what a line of the server may have as `extra`


class _Lines(logging.Formatter):
    """One line of text per record, and its traceback if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(f"{_time(record)} {record.levelname.lower()} {record.name}: ") + "\n".join(
            harmless(line) for line in super().format(record).split("\n")
        )


class _Json(logging.Formatter):
    """One JSON object per record: `time`, `level`, `logger`, `message`, `FIELDS` that it has, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name in FIELDS if (value := getattr(record, name, None)) is not None},
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def set_up_log(level: Level, form: Form) -> None:
    """Write the process's log to stderr: `level` of probemon and its HTTP server, warnings of other libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Lines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in OWN:
        logging.getLogger(name).setLevel(level.upper())

"""Background text on no particular subject, on which probes must be quiet.

Prose, letters, lists, tables and markup; code and manual of Python. Every fifth passage is a chat if possible.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from probemon.lab.training.examples import Example

LONGEST = 600  # characters
_MODULES = (
    "argparse", "ast", "bisect", "calendar", "cmd", "codecs", "collections/__init__", "configparser", "contextlib",
    "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "email/message", "enum", "fileinput",
    "fractions", "functools", "glob", "gzip", "heapq", "html/parser", "http/client", "inspect", "json/decoder",
    "locale", "logging/__init__", "mailbox", "numbers", "optparse", "pathlib", "pickle", "platform", "pprint",
    "queue", "random", "sched", "shelve", "shlex", "shutil", "smtplib", "sqlite3/dump", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "turtle",
    "typing", "unittest/case", "urllib/parse", "uuid", "warnings", "wave", "weakref", "zipfile",
)  # fmt: skip
_OF_A_MODULE, _TOPICS = 2, 120


def passages(tokenizer: Any = None) -> list[Example]:
    """Return unlabelled passages, the same for one version of Python."""
    texts = [*_own(), *_code(), *_manual()]
    chats = bool(getattr(tokenizer, "chat_template", None))
    examples = []
    for i, (group, text) in enumerate(texts):
        where = f"background {i + 1} ({group})"
        if chats and i % 5 == 4:
            messages = ({"role": "user", "content": "Go on."}, {"role": "assistant", "content": text.strip()})
            examples.append(Example(where, messages=messages, group=f"background {group}"))
        else:
            examples.append(Example(where, text, group=f"background {group}"))
    return examples


def _own() -> Iterator[tuple[str, str]]:
    content = files("probemon.lab.training").joinpath("background.txt").read_text(encoding="utf-8")
    for i, text in enumerate(content.split("\n\n")):
        yield f"text {i + 1}", text.strip("\n")


def _code() -> Iterator[tuple[str, str]]:
    """Passages from one and two thirds into each module, after its imports."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in _MODULES:
        path = library / f"{module}.py"
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            for part in range(_OF_A_MODULE):
                begin = len(lines) * (part + 1) // (_OF_A_MODULE + 1)
                text = _whole_lines(lines[begin:])
                if text.strip():
                    yield module, text


def _manual() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics)[:_TOPICS]:
        text = _whole_lines(topics[name].splitlines(keepends=True)[2:])
        if text.strip():
            yield f"manual {name}", text


def _whole_lines(lines: list[str]) -> str:
    text = ""
    for line in lines:
        if text and len(text) + len(line) > LONGEST:
            break
        text += line
    return text[: 2 * LONGEST]

"""The room of hostile text: packs whose texts are hostile, through the commands that show them.

    tree = hostile(tree, rng)                       # some texts and names of a pack replaced
    shown = run_command(call)                       # status, standard output, standard error of a command
    judge_command(shown, call)                      # raises where a terminal would obey anything, or JSON is none

A terminal obeys control characters, and what changes the direction of writing; a half of a surrogate pair cannot be
encoded. The judge knows them by their Unicode categories, and not from the function that makes text harmless.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import unicodedata
import warnings
from dataclasses import dataclass
from random import Random
from typing import Any

import typer

from fuzzing.mutate import Tree
from probemon.cli import app as cli
from probemon.errors import ConfigError

_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_NASTY = (
    "\x1b[2J",
    "\x1b]0;pwned\x07",
    "\x1b]8;;file:///\x1b\\",
    "\x9b31m",
    "\x9d0;x\x9c",
    "\r",
    "\b\b\b",
    "\n",
    "\x85",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\u061c",
    "\ud800",
    "\udcff",
    "\x00",
    "\x7f",
    "\ufeff",
    "\U000e0041",
    "[red]",
    "[/]",
    "[/nonsense]",
    "[link=file:///x]",
    "\\[",
    ":skull:",
    "{0}",
    "%s",
    "whole: every file has its hash",
    "",
)
_COMMANDS: Any = typer.main.get_command(cli.app)  # made once: it takes longer than a command


@dataclass(frozen=True)
class Shown:
    """What a command left: its exit status and its texts; `as_json`: it was asked for JSON."""

    status: int
    out: str
    error: str
    as_json: bool


def text(rng: Random) -> str:
    """A text that a terminal should not be shown as it is."""
    return "".join(
        (
            rng.choice(_NASTY)
            if rng.random() < 0.7
            else chr(rng.choice((rng.randrange(0xA0), rng.randrange(0x2000, 0x2070), rng.randrange(0x110000))))
        )
        for _ in range(rng.randrange(1, 7))
    )


def hostile(tree: Tree, rng: Random) -> Tree:
    """A pack with one to six texts, keys or numbers of its manifest and its concepts replaced by hostile text; as it
    was, where they cannot be read."""
    changed = dict(tree)
    try:
        manifest = json.loads(_bytes(tree, "manifest.json"))
        concepts = [json.loads(line) for line in _bytes(tree, "concepts.jsonl").decode().splitlines()]
        for _ in range(rng.randrange(1, 7)):
            if rng.random() < 0.7:
                _replace(manifest, rng)
            elif concepts:
                concept = rng.choice(concepts)
                concept[rng.choice(("name", "definition", "id", text(rng)))] = (
                    text(rng) if rng.random() < 0.5 else text(rng).encode("ascii", "ignore").decode()
                )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return changed
    changed["manifest.json"] = json.dumps(manifest).encode()
    changed["concepts.jsonl"] = "".join(json.dumps(concept) + "\n" for concept in concepts).encode()
    return changed


def _bytes(tree: Tree, name: str) -> bytes:
    content = tree[name]
    if not isinstance(content, bytes):
        raise TypeError(name)
    return content


def _replace(value: Any, rng: Random) -> None:
    """One leaf or key at any depth; of what has none, something is added."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys or rng.random() < 0.1:
            value.update({text(rng): text(rng)}) if isinstance(value, dict) else value.append(text(rng))
            return
        key = rng.choice(keys)
        inner = value[key]
        if isinstance(inner, (dict, list)) and rng.random() < 0.9:
            value = inner
            continue
        if isinstance(value, dict) and rng.random() < 0.3:
            value[text(rng)] = value.pop(key)
        else:
            value[key] = text(rng)
        return


def run_command(call: Any) -> Shown:
    """A command on the pack, chosen by the case, with options that are hostile themselves. Raises `ConfigError` where
    it ended with an error, which is judged before."""
    rng, scrap = call.rng, call.out.parent / "scrap"
    pack, other = str(call.source), str(call.source.parent / "flat")
    name = text(rng)
    made = scrap / "".join(char for char in name if char not in "/\0\ud800\udcff")[:40]
    arguments = rng.choice(
        (
            ["inspect", pack],
            ["inspect", pack, "--json"],
            ["concepts", pack],
            ["concepts", pack, name, "--depth", "2"],
            ["concepts", pack, "*", "--json"],
            ["pack", "diff", pack, other],
            ["pack", "diff", other, pack, "--json"],
            ["pack", "subset", pack, str(made), "--concept", name],
            ["pack", "subset", pack, str(made), "--concept", "c*", "--name", name],
            ["pack", "rename", pack, str(made), "--name", name],
            ["pack", "merge", pack, other, str(made), "--prefix"],
            ["quantize", pack, str(made)],
            ["quantize", pack, str(made), "--json"],
            ["hierarchy", pack, "--from-weights", "--threshold", "0.5"],
            ["hierarchy", pack, str(call.source / "manifest.json")],
            ["calibrate", pack, "--benign", str(scrap / "none.txt"), "--fpr", "0.1", "--watch", name],
            ["inspect", pack, f"--{name}"],
            ["pack", "diff", pack, pack],
        )
    )
    before, app = sys.argv, cli.app
    sys.argv, cli.app = ["probemon", *arguments], _COMMANDS
    out, error = io.StringIO(), io.StringIO()
    status: Any = None
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            warnings.simplefilter("always")
            try:
                cli.main()
            except SystemExit as ended:
                status = ended.code
    finally:
        sys.argv, cli.app = before, app
        shutil.rmtree(scrap, ignore_errors=True)
    shown = Shown(status, out.getvalue(), error.getvalue(), "--json" in arguments)
    if status == 2:
        judge_command(shown, call)
        raise ConfigError(shown.error.strip())
    return shown


def judge_command(shown: Shown, call: Any) -> None:
    """Raise `AssertionError` where a terminal would obey what is shown, where an error is not told in a line, or JSON
    is none."""
    for what, part in (("output", shown.out), ("error", shown.error)):
        bad = [
            char
            for char in part
            if char != "\n" and (unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in _DIRECTION)
        ]
        assert not bad, f"{what} has {bad[:5]!r}: {part[:300]!r}"
    assert shown.status in (0, 1, 2) and "Traceback" not in shown.error, (
        f"status {shown.status}: {shown.error[-600:]!r}"
    )
    if shown.status == 2:
        assert shown.error.count("\n") == 1 and shown.error.startswith("probemon: "), shown.error[:600]
    if shown.as_json and shown.status != 2:
        json.loads(shown.out, parse_constant=lambda constant: 1 / 0)

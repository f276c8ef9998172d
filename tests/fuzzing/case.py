"""One input from writing to verdict.

    room = Room(folder)
    verdict = room.run("hatcat", tree, Random(7))
    verdict.outcome, verdict.trouble                # "ImportRefused" or "pack", and what was wrong, None for nothing

Trouble is: an error that is not probemon's; a pack that does not verify, or scores otherwise than its files say;
anything opened, changed or run beyond the case's own folders; anything left behind; memory that could not be had; more
seconds than a case may take.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import commands, seeds, torchfile
from fuzzing.guard import Guard
from fuzzing.independent import Unreadable
from fuzzing.mutate import Tree, mutate, write_tree
from fuzzing.target import Call, Wrong
from fuzzing.targets import TARGETS
from probemon.errors import ProbemonError

MOST_SECONDS = 20.0  # of processor time, for input of a few thousand bytes
_guard: list[Guard] = []


@dataclass(frozen=True)
class Verdict:
    """`outcome`: the name of the error, or "made"; `seconds` of processor time."""

    outcome: str
    trouble: str | None
    seconds: float


class Room:
    """A folder for cases, one after another: `source` is broken, `outside` has valid files that nobody may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        self._seeds: dict[str, list[Tree]] = {}
        self._outside = ""  # whose valid files lie there
        self._older = seeds.packs(folder / "older")[0]
        write_tree(seeds.packs(folder / "again")[4], folder / "flat")
        if not _guard:
            _guard.append(Guard())
        self.guard = _guard[0]

    def seeds(self, target: str) -> list[Tree]:
        """Valid input of a target. Each is run once, so that what a room imports when first used is not taken for the
        input's doing.
        """
        if target not in self._seeds:
            made = self._seeds[target] = TARGETS[target].seeds(self.folder / "valid" / target)
            for tree in made:
                for way in range(
                    {"pack": 20, "edit": 20, "commands": 40, "opened": 5, "used": 5}.get(target, 1)
                ):  # these choose what they do
                    verdict = self.run(target, tree, Random(way), guarded=False)
                    if verdict.trouble is not None:
                        raise RuntimeError(f"{target} does not take its own valid input: {verdict}")
        if self._outside != target:
            shutil.rmtree(self.folder / "outside", ignore_errors=True)
            for tree in self._seeds[target]:
                write_tree(tree, self.folder / "outside")
            self._outside = target
        return self._seeds[target]

    def mutate(self, target: str, tree: Tree, rng: Random) -> Tree:
        """The input with something broken; the hashes of a pack are mostly made right again, so that what comes after
        them is reached.
        """
        if not TARGETS[target].breaks:
            return tree
        broken = mutate(tree, rng, TARGETS[target].folders)
        if target == "commands" and rng.random() < 0.8:
            broken = commands.hostile(tree if rng.random() < 0.6 else broken, rng)
        if target in ("pack", "edit", "commands") and rng.random() < 0.9:
            _rehash(broken)
        return broken

    def run(self, target: str, tree: Tree, rng: Random, *, guarded: bool = True, tracer: Any = None) -> Verdict:
        room = TARGETS[target]
        source, out = self.folder / "source", self.folder / "out"
        for folder in (source, out):
            if folder.is_symlink() or folder.exists():
                shutil.rmtree(folder)
        write_tree(tree, source)
        out.mkdir()
        over = room.writes and rng.random() < 0.3
        if over:
            write_tree(self._older, out / "pack")
        call = Call(source, out / "pack", over, rng)
        made, trouble, outcome = None, None, "made"
        begin = time.process_time()
        with self.guard.watch(self.folder) if guarded and room.guarded else nullcontext([]) as seen:
            try:
                if tracer is not None:
                    sys.settrace(tracer)
                made = room.run(call)
            except ProbemonError as error:
                outcome = type(error).__name__
                trouble = _starved(error)
            except Exception as error:
                outcome = type(error).__name__
                trouble = f"untyped: {_told(error)}"
            finally:
                if tracer is not None:
                    sys.settrace(None)
        seconds = time.process_time() - begin
        trouble = "; ".join([*seen, *([trouble] if trouble else [])]) or self._left(
            out, "pack" if room.writes and (over or made is not None) else None, made is None and over
        )
        if trouble is None and made is not None:
            outcome, trouble = self._judged(target, made, call)
        if trouble is None and seconds > MOST_SECONDS:
            trouble = f"took {seconds:.1f} s"
        return Verdict(outcome, trouble, seconds)

    def _judged(self, target: str, made: Any, call: Call) -> tuple[str, str | None]:
        outside, away = self.folder / "outside", self.folder / "away"
        if outside.is_dir():
            outside.rename(away)  # a link that was followed leads nowhere now
        deep = sys.getrecursionlimit()
        sys.setrecursionlimit(deep + 1000)  # what could just be read shall be read again from further down
        try:
            TARGETS[target].judge(made, call)
        except Unreadable:
            return "made, not compared", None  # torch's own loader refuses the file
        except Exception as error:
            return "made", ("wrong: " + str(error) if isinstance(error, Wrong) else "no verdict: " + _told(error))
        finally:
            sys.setrecursionlimit(deep)
            if away.is_dir():
                away.rename(outside)
        return "made", None

    def _left(self, out: Path, expected: str | None, unchanged: bool) -> str | None:
        """What lies where it should not: a pack is there whole, as it was before, or not at all."""
        there = sorted(os.listdir(out))
        if there != ([expected] if expected else []):
            return f"left behind: {there}"
        if unchanged and {name: (out / "pack" / name).read_bytes() for name in os.listdir(out / "pack")} != self._older:
            return "the older pack was changed"
        return "an exploit ran" if os.path.exists(torchfile.MARKER) else None


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-6:])[-1500:]


def _starved(error: BaseException | None) -> str | None:
    """Whether memory could not be had, under whatever error that was told."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate" in str(error) or "MemoryError" in str(error):
            return f"memory: {_told(error)}"
        error = error.__cause__ or error.__context__
    return None


def _rehash(tree: Tree) -> None:
    """Sizes and hashes of a manifest that can still be read, as the files are now."""
    data = tree.get("manifest.json")
    if not isinstance(data, bytes):
        return
    try:
        manifest = json.loads(data)
        files = manifest["files"]
        for name in list(files):
            content = tree.get(name)
            if isinstance(content, bytes):
                files[name] = {"sha256": sha256(content).hexdigest(), "size": len(content)}
        tree["manifest.json"] = json.dumps(manifest).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return

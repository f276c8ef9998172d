"""A room of the fuzzer: what it is given, what it does with it, and who judges what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.mutate import Tree


class Wrong(Exception):
    """What was made is not what the files say."""


@dataclass(frozen=True)
class Call:
    """One input: its folder, where a pack may be written, whether over an older one, and what else is left to
    chance.
    """

    source: Path
    out: Path
    overwrite: bool
    rng: Random


@dataclass(frozen=True)
class Target:
    """A room. `writes`: it makes a pack. `folders`: names and links of its input are broken too, since it is given a
    folder.

    `breaks`: its input is broken at all. `guarded`: what it opens and runs is watched; not where the command line's own
    libraries compile and set what they need as they parse.
    """

    seeds: Callable[[Path], list[Tree]]
    run: Callable[[Call], Any]
    judge: Callable[[Any, Call], None]
    writes: bool = False
    folders: bool = True
    breaks: bool = True
    guarded: bool = True

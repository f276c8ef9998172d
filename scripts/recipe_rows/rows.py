"""What a recipe is, how it is run on a host, and how what it measured is judged.

@recipe("gradient checkpointing", "transformers", "gradients equal those of the plain run", on=("ltm", "mamba2"))
def checkpointing(kind: str) -> Found: ...

rows = [run(one, kind) for one in RECIPES for kind in one.hosts]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

WATCHED_BOUND = 1e-5  # of scores and states in fp32, from those of plain forwards


@dataclass(frozen=True)
class Found:
    """What a recipe measured.

    - `value`: how far the optimised run is from the plain one; 0 is exact.
    - `watched`: how far what the monitor saw is from plain forwards; None where nothing was watched.
    - `trap`: how far off the wrong way is.
    """

    value: float
    watched: float | None = None
    trap: float | None = None


@dataclass(frozen=True)
class Refused:
    """An error by name, which the run met as it should."""

    error: str


@dataclass(frozen=True)
class Row:
    """One recipe on one host, judged."""

    name: str
    host: str
    library: str
    check: str
    value: float | str | None
    bound: float | None
    verdict: str
    watched: float | None = None
    watched_bound: float | None = None
    trap: str | None = None
    trap_value: float | None = None
    trap_least: float | None = None


@dataclass(frozen=True)
class Recipe:
    """How to optimise, by which library, and what must hold."""

    name: str
    library: str
    check: str
    hosts: tuple[str, ...]
    bound: float | None
    watched_bound: float
    trap: str | None
    trap_least: float
    apart: bool
    function: Callable[[str], Found | Refused]


RECIPES: list[Recipe] = []


def recipe(
    name: str,
    library: str,
    check: str,
    *,
    on: tuple[str, ...],
    bound: float | None = 0.0,
    watched_bound: float = WATCHED_BOUND,
    trap: str | None = None,
    trap_least: float = 1e-3,
    apart: bool = False,
) -> Callable[[Callable[[str], Found | Refused]], Callable[[str], Found | Refused]]:
    """Register a recipe. `bound` None: it has to be refused. `apart`: it runs in a process of its own."""

    def register(function: Callable[[str], Found | Refused]) -> Callable[[str], Found | Refused]:
        RECIPES.append(Recipe(name, library, check, on, bound, watched_bound, trap, trap_least, apart, function))
        return function

    return register


def judge(one: Recipe, host: str, found: Found | Refused) -> Row:
    """Judge what a recipe measured on a host."""
    row = Row(one.name, host, one.library, one.check, None, one.bound, "failed", trap=one.trap)
    if isinstance(found, Refused):
        return _with(row, value=found.error, verdict="refused" if one.bound is None else "failed", trap_least=None)
    measured = {
        "value": _finite(found.value), "watched": _finite(found.watched), "trap_value": _finite(found.trap),
        "watched_bound": None if found.watched is None else one.watched_bound,
        "trap_least": None if one.trap is None else one.trap_least,
    }  # fmt: skip
    holds = (
        one.bound is not None
        and 0 <= found.value <= one.bound
        and (found.watched is None or found.watched <= one.watched_bound)
        and (one.trap is None or (found.trap is not None and found.trap >= one.trap_least))
    )
    return _with(row, **measured, verdict=("exact" if found.value == 0 else "within bound") if holds else "failed")


def _with(row: Row, **changes: Any) -> Row:
    return Row(**{**asdict(row), **changes})


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value  # JSON has no infinity


def run(one: Recipe, host: str) -> Row:
    """Run a recipe on a host; what it raises makes its row a failed one."""
    try:
        return judge(one, host, one.function(host))
    except Exception as error:  # one that fails must not hide the others
        row = judge(one, host, Refused(f"{type(error).__name__}: {str(error)[:200]}"))
        return _with(row, verdict="failed")


@contextmanager
def refusal(error: type[Exception], words: str) -> Iterator[list[Refused]]:
    """Within the block this error has to come, with these words; what was met is put into the list.

    with refusal(UnsupportedDecoding, "mask") as met:
        model(...)
    return met[0]
    """
    met: list[Refused] = []
    try:
        yield met
    except error as raised:
        if words not in str(raised):
            raise
        met.append(Refused(f"{type(raised).__name__}: {str(raised).splitlines()[0][:160]}"))
    else:
        raise AssertionError(f"no {error.__name__} was raised")

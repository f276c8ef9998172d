"""Which definitions of the repository this process has executed, for a result file to say what it measured.

    executed(["probemon/core", "probes"])     # {"probemon/core/plan.py": "CascadePlan CascadePlan.of", "probes": "*"}

A function counts from its first call; a constant where a function that was called, or a constant that counts, reads
its name; a class, with all that it states outside its methods, where its name is read or a method of it was called.
What numba or Triton made of a function runs without a trace in the function: it counts wherever its module is imported.
What torch.compile takes into a graph leaves none either, and is not found: run it uncompiled, too, or name whole
modules. Nothing slows down what is measured: CPython counts the first calls of each code object anyway.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import gc
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from staleness import ALL, CODE, ROOT, files_of, named

_COMPILERS = ("numba", "triton")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def executed(measures: Sequence[str]) -> dict[str, str]:
    """The names of what ran of these modules and folders, by file; of packs, and where this Python cannot tell, `ALL`
    of it.
    """
    if _counter() is None:
        return dict.fromkeys(measures, ALL)
    called, read = set(), set()
    for file, name, code in _codes():
        if was_called(code):
            called.add((file, name))
            read.update(code.co_names)
    modules = _modules()
    statements = {file: dict(named(ast.parse(file.read_text(encoding="utf-8")))) for file in modules}
    names = {file: set(_that_ran(file, vars(modules[file]), within, called)) for file, within in statements.items()}
    for within in statements.values():  # what stands alone ran when its module was imported
        read.update(*(_read_in(statement) for name, statement in within.items() if name.startswith("line ")))
    while _add_what_is_read(statements, names, read):
        pass
    found = {measured: ALL for measured in measures if measured.split("/")[0] == "probes"}
    for file in sorted({file for measured in measures if measured not in found for file in files_of(measured)}):
        if names.get(file):
            found[file.relative_to(ROOT).as_posix()] = " ".join(sorted(names[file]))
    return found


def _that_ran(
    file: Path, module: dict[str, Any], within: dict[str, ast.stmt], called: set[tuple[Path, str]]
) -> Iterator[str]:
    for name, statement in within.items():
        compiled = type(module.get(name)).__module__.startswith(_COMPILERS)
        if isinstance(statement, _FUNCTIONS) and (compiled or (file, name) in called):
            yield name


def _add_what_is_read(statements: dict[Path, dict[str, ast.stmt]], names: dict[Path, set[str]], read: set[str]) -> bool:
    """Constants and classes whose name is read, and all of a class that counts but its methods; whether one was new."""
    before = sum(map(len, names.values()))
    for file, within in statements.items():
        used = names[file]
        for name, statement in within.items():
            outer, _, last = name.rpartition(".")
            if isinstance(statement, _FUNCTIONS) or name in used:
                continue
            members = isinstance(statement, ast.ClassDef) and any(one.startswith(f"{name}.") for one in used)
            if members or (outer in used if outer else last in read):
                used.add(name)
                read |= _read_in(statement) if not isinstance(statement, ast.ClassDef) else set()
    return sum(map(len, names.values())) > before


def union(*ran: dict[str, str]) -> dict[str, str]:
    """What ran in one of several processes."""
    names: dict[str, set[str]] = {}
    for one in ran:
        for file, told in one.items():
            names.setdefault(file, set()).update(told.split())
    return {file: ALL if ALL in told else " ".join(sorted(told)) for file, told in sorted(names.items())}


def was_called(code: types.CodeType) -> bool:
    """Whether a function of this code was entered once."""
    counter = _counter()
    return counter is None or _two_bytes(code, counter[0]) != counter[1]


@functools.cache
def _counter() -> tuple[int, bytes] | None:
    """Where a code object has the counter by which CPython 3.11 finds out which code to specialise, and what is there
    before the first call; None where there is no such counter.
    """
    function = _fresh()
    before = ctypes.string_at(id(function.__code__), types.CodeType.__basicsize__)
    function()
    after = ctypes.string_at(id(function.__code__), types.CodeType.__basicsize__)
    moved = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if sys.implementation.name != "cpython" or len(moved) != 1:
        return None
    return moved[0], before[moved[0] : moved[0] + 2]


def _two_bytes(code: types.CodeType, at: int) -> bytes:
    return ctypes.string_at(id(code) + at, 2)


def _fresh() -> types.FunctionType:
    space: dict[str, Any] = {}
    exec("def function(): pass", space)
    made: types.FunctionType = space["function"]
    return made


def _codes() -> Iterator[tuple[Path, str, types.CodeType]]:
    """File, name and code of every function that lives, those inside others included."""
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:  # isinstance would ask stand-ins of other libraries, which answer aloud
            file = _our_file(thing.__code__.co_filename, ROOT)
            if file is not None:
                yield from _inside(file, thing.__code__)


def _inside(file: Path, code: types.CodeType) -> Iterator[tuple[Path, str, types.CodeType]]:
    yield file, code.co_qualname.partition(".<locals>")[0], code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inside(file, constant)


def _modules() -> dict[Path, types.ModuleType]:
    modules = [
        (_our_file(getattr(module, "__file__", None) or "/", ROOT), module) for module in list(sys.modules.values())
    ]
    return {file: module for file, module in modules if file is not None}


@functools.cache
def _our_file(name: str, root: Path) -> Path | None:
    file = Path(name).resolve()
    return file if file.is_file() and any(file.is_relative_to(root / folder) for folder in CODE) else None


def _read_in(statement: ast.stmt) -> set[str]:
    nodes = list(ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }

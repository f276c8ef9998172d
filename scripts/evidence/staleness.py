"""Which result files are older than a change of meaning in what they measure.

    changed = changes_since(commit, ["probemon/engine", "probes"])            # names of what means something else now
    for name, why in stale_files(Path("docs/benchmarks")): print(name, why)

Code is compared by its syntax tree, definition by definition: one that was moved, formatted, or given other comments or
docstrings, or whose errors have other words, means what it meant. Imports say nothing of meaning, and neither does a
definition that has gone, unless another one changed with it, nor how much a file says of its origin (`about`). What a
GPU alone runs counts for results that were made on one, and for those that name it. Where a result file names the
definitions that ran (`executed.py`), others count only if they could run in their place: new members of a class that
was used, new functions that something registers, and what has moved to another file.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("probemon", "scripts", "tests")
ALL = "*"  # every definition of a module or folder counts
ONLY_ON_A_GPU = (
    "probemon/adapters/bem/kernels",
    "probemon/engine/device_steps.py",
    "probemon/engine/kernels/triton_cascade.py",
    "probemon/engine/kernels/triton_matrix.py",
    "probemon/engine/kernels/triton_pairs.py",
    "probemon/engine/kernels/triton_softmax.py",
    "probemon/engine/ways/on_device.py",
    "scripts/bench/gpu.py",
)


def definitions(source: str) -> dict[str, str]:
    """Every function, method and other statement of a module, by its tree; the value is what to call it."""
    return dict(_definitions(ast.parse(source), ""))


def _definitions(node: ast.Module | ast.ClassDef, inside: str) -> Iterator[tuple[str, str]]:
    for name, statement in named(node, inside):
        if isinstance(statement, ast.ClassDef):
            yield ast.dump(ast.Module([*statement.decorator_list, *statement.bases], [])) + name, name
        else:
            yield name[: name.rfind(".") + 1] + ast.dump(_without_texts(statement)), name


def named(node: ast.Module | ast.ClassDef, inside: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Every statement that can mean something, members of classes after their class: `Box`, `Box.area`, `line 12`."""
    for statement in node.body:
        if isinstance(statement, ast.Import | ast.ImportFrom) or _is_text(statement):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        name = f"{inside}{getattr(statement, 'name', '') or _assigned(statement)}"
        if name != "MEASURES":
            yield name, statement
        if isinstance(statement, ast.ClassDef):
            yield from named(statement, f"{name}.")


def _assigned(statement: ast.stmt) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names[0] if names else f"line {statement.lineno}"


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _without_texts(statement: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.body = [inner for inner in node.body if not _is_text(inner)]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "about":
            node.keywords = []
    return statement


@functools.cache
def known_at(commit: str) -> tuple[frozenset[str], frozenset[str]]:
    """The trees of all definitions in the code of a commit, and where they stood: `file: name`. Raises `LookupError`
    where the commit is not there.
    """
    packed = subprocess.run(["git", "archive", commit, *CODE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise LookupError(f"commit {commit[:9]} is not in this clone")
    trees: set[str] = set()
    places: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found = definitions(file.read().decode("utf-8"))
                trees.update(found)
                places.update(f"{member.name}: {name}" for name in found.values())
    return frozenset(trees), frozenset(places)


def changes_since(commit: str, measures: list[str] | dict[str, str], *, on_gpu: bool = False) -> list[str]:
    """Names of definitions in modules or folders that mean something else than anything in the code of a commit; of a
    module whose value is not `ALL`, of the names in that value, and of what could run in their place.
    """
    known_at(commit)
    ran = measures if isinstance(measures, dict) else dict.fromkeys(measures, ALL)
    changed = []
    for measured in [measured for measured, names in ran.items() if names == ALL]:
        if measured.split("/")[0] == "probes":
            if _packs_at(commit, measured) != _packs_at("HEAD", measured):
                changed.append(f"{measured} holds other packs")
            continue
        files = files_of(measured)
        if not files or not all(file.is_file() for file in files):
            changed.append(f"{measured}, which is not there")
            continue
        for file in files:
            if not on_gpu and not measured.startswith(ONLY_ON_A_GPU) and _place(file).startswith(ONLY_ON_A_GPU):
                continue
            changed += [f"{_place(file)}: {name}" for name in _changed_in(file, commit)]
    gone: set[str] = set()
    for measured, names in ran.items():
        if names != ALL:
            used, file = set(names.split()), ROOT / measured
            there = dict(named(ast.parse(file.read_text(encoding="utf-8")))) if file.is_file() else {}
            gone |= used - set(there)
            changed += [
                f"{measured}: {name}"
                for name in (_changed_in(file, commit) if there else [])
                if name in used or _could_run(name, there[name], measured, used, commit)
            ]
    if gone:
        changed += [
            f"{_place(file)}: {name}"
            for file in files_of("probemon") + files_of("scripts")
            for name in _changed_in(file, commit)
            if name in gone
        ]
    return list(dict.fromkeys(changed))


def _changed_in(file: Path, commit: str) -> list[str]:
    trees, _ = known_at(commit)
    return [name for tree, name in definitions(file.read_text(encoding="utf-8")).items() if tree not in trees]


def _could_run(name: str, statement: ast.stmt, place: str, used: set[str], commit: str) -> bool:
    """Whether a definition that did not run, since it was not there, could run where those of `used` do."""
    if name.startswith("line "):  # it stands alone, and runs when its module is imported
        return True
    if f"{place}: {name}" in known_at(commit)[1]:
        return False
    outer = name.rpartition(".")[0]
    return outer in used if outer else bool(getattr(statement, "decorator_list", []))


def files_of(measured: str) -> list[Path]:
    """The files of a module or a folder, as a path in the repository."""
    path = ROOT / measured
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _place(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _packs_at(commit: str, path: str) -> dict[str, str]:
    """The files of packs by their hashes. What a manifest says of its host is compared with the host, and moves no
    score: it is left out.
    """
    listed = _git("ls-tree", "-r", commit, path)
    found = {name: about.split()[2] for about, _, name in (line.partition("\t") for line in listed.splitlines())}
    for name in [name for name in found if name.endswith("/manifest.json")]:
        manifest = json.loads(_git("show", f"{commit}:{name}"))
        found[name] = json.dumps({key: value for key, value in manifest.items() if key != "host"})
    return found


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def stale_files(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Result files that have to be made again, and why; a file that does not say what it measures is one."""
    for file in sorted(folder.glob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        if not document.get("commit") or not document.get("measures"):
            yield file.name, ["it does not say of which commit it is and what it measures"]
            continue
        try:
            changed = changes_since(document["commit"], document["measures"], on_gpu="gpu" in document)
        except LookupError as error:
            changed = [str(error)]
        if changed:
            yield file.name, changed

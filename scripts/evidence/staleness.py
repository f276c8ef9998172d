"""Which result files are older than a change of meaning in what they measure.

    changed = changes_since(commit, ["probemon/engine", "probes"])            # names of what means something else now
    for name, why in stale_files(Path("docs/benchmarks")): print(name, why)

Code is compared by its syntax tree, definition by definition: one that was moved, formatted, or given other comments or
docstrings, or whose errors have other words, means what it meant. Imports say nothing of meaning, and neither does a
definition that has gone, unless another one changed with it. What a GPU alone runs counts for results that were made on
one, and for those that name it.
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
ONLY_ON_A_GPU = (
    "probemon/bem/kernels",
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
    for statement in node.body:
        if isinstance(statement, ast.Import | ast.ImportFrom) or _is_text(statement):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        name = f"{inside}{getattr(statement, 'name', '') or _assigned(statement)}"
        if isinstance(statement, ast.ClassDef):
            yield ast.dump(ast.Module([*statement.decorator_list, *statement.bases], [])) + name, name
            yield from _definitions(statement, f"{name}.")
        elif name != "MEASURES":
            yield inside + ast.dump(_without_texts(statement)), name


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
    return statement


@functools.cache
def known_at(commit: str) -> frozenset[str]:
    """The trees of all definitions in the code of a commit. Raises `LookupError` where the commit is not there."""
    packed = subprocess.run(["git", "archive", commit, *CODE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise LookupError(f"commit {commit[:9]} is not in this clone")
    trees: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                trees.update(definitions(file.read().decode("utf-8")))
    return frozenset(trees)


def changes_since(commit: str, measures: list[str], *, on_gpu: bool = False) -> list[str]:
    """Names of definitions in modules or folders that mean something else than anything in the code of a commit."""
    known, changed = known_at(commit), []
    for measured in measures:
        path = ROOT / measured
        if measured.split("/")[0] == "probes":
            if _packs_at(commit, measured) != _packs_at("HEAD", measured):
                changed.append(f"{measured} holds other packs")
            continue
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            changed.append(f"{measured}, which is not there")
            continue
        for file in files:
            if not on_gpu and not measured.startswith(ONLY_ON_A_GPU) and _place(file).startswith(ONLY_ON_A_GPU):
                continue
            trees = definitions(file.read_text(encoding="utf-8"))
            changed += [f"{_place(file)}: {name}" for tree, name in trees.items() if tree not in known]
    return changed


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

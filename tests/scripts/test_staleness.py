"""A result file is stale where what it measures means something else than at its commit."""

import importlib.util
import json
import subprocess
import sys

import pytest

from executed import executed, union
from staleness import ROOT, changes_since, definitions, stale_files

BEFORE = '''"""A module."""
import os

LIMIT = 3


class Box:
    """Holds."""

    size = 2

    def area(self):
        """Return it."""
        if self.size < 0:
            raise ValueError(f"no size: {self.size}")
        return self.size ** 2  # a square


def main():
    return Box().area() * LIMIT, about(LIMIT)
'''


def changed(after):
    known = definitions(BEFORE)
    return [name for tree, name in definitions(after).items() if tree not in known]


def test_form_comments_docstrings_words_of_errors_imports_and_order_are_no_meaning():
    after = BEFORE.replace('"""Return it."""', '"""Return what it is."""').replace("  # a square", "")
    after = (
        after.replace("self.size ** 2", "self.size**2")
        .replace("about(LIMIT)", "about(LIMIT, whole=True)")
        .replace("import os", "import os\nimport sys")
    )
    after = after.replace('f"no size: {self.size}"', '"give a size"').replace("LIMIT = 3", "")
    assert changed(after + "\n\nLIMIT = (\n    3\n)\n") == []


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("LIMIT = 3", "LIMIT = 4", "LIMIT"),
        ("size = 2", "size = 3", "Box.size"),
        ("self.size ** 2", "self.size * 2", "Box.area"),
        ("ValueError", "TypeError", "Box.area"),
        ("class Box:", "class Box(dict):", "Box"),
        ("* LIMIT", "+ LIMIT", "main"),
        ("about(LIMIT)", "about(Box)", "main"),
        ("def main():", "def main(n=1):", "main"),
    ],
)
def test_every_change_of_meaning_is_named(old, new, name):
    assert changed(BEFORE.replace(old, new)) == [name]


def test_files_of_this_commit_are_fresh_and_others_say_why(tmp_path):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    for name, document in {
        "silent.json": {"rows": []},
        "lost.json": {"commit": "0" * 40, "measures": ["probemon/errors.py"]},
        "gone.json": {"commit": commit, "measures": ["probemon/nowhere"]},
    }.items():
        (tmp_path / name).write_text(json.dumps(document))
    assert dict(stale_files(tmp_path)) == {
        "silent.json": ["it does not say of which commit it is and what it measures"],
        "lost.json": ["commit 000000000 is not in this clone"],
        "gone.json": ["probemon/nowhere, which is not there"],
    }
    root = subprocess.run(
        ["git", "rev-list", "--max-parents=0", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if root.stdout.split()[0] != commit:  # of the first commit nearly all has changed since
        assert len(changes_since(root.stdout.split()[0], ["probemon/errors.py"])) > 3


def test_what_a_gpu_alone_runs_counts_for_results_of_a_gpu_and_where_it_is_named():
    first = subprocess.run(
        ["git", "rev-list", "--max-parents=0", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()[0]
    kernel = "probemon/engine/kernels/triton_pairs.py"
    of_kernel = [name for name in changes_since(first, ["probemon/engine"], on_gpu=True) if name.startswith(kernel)]
    assert of_kernel and changes_since(first, [kernel]) == of_kernel
    others = changes_since(first, ["probemon/engine"])
    assert others and not any(name.startswith(kernel) for name in others)


def committed(folder):
    """The commit that holds all of a folder."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    return head.stdout.strip()


RAN = """
import functools

import numba

SCALE = {"a": 2}
UNREAD = 1


def told(function):
    return functools.wraps(function)(lambda *given: function(*given))


@numba.njit
def product(a, b):
    return a * b


@told
def scaled(a):
    return [Box(x).area() for x in [a]][0] * SCALE["a"]


def other(a):
    return a


class Box:
    size = 3

    def __init__(self, a):
        self.a = a

    def area(self):
        return product(self.a, self.size)

    def edge(self):
        return UNREAD


print()
"""


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A repository of one module of which `scaled` was called: its file, and what ran of it."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("only CPython 3.11 tells which functions were called")
    for module in ("staleness", "executed"):
        monkeypatch.setattr(f"{module}.ROOT", tmp_path)
    for name in ("probemon", "scripts", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ran.py").write_text(RAN if name == "probemon" else "")
    file = tmp_path / "probemon/ran.py"
    spec = importlib.util.spec_from_file_location("a_module_that_ran", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_module_that_ran", module)
    spec.loader.exec_module(module)
    assert module.scaled(2) == 12
    return file, executed(["probemon"])


def test_what_was_called_and_what_that_reads_is_named(ran):
    assert ran[1] == {"probemon/ran.py": "Box Box.__init__ Box.area Box.size SCALE product scaled told"}
    assert union(ran[1], {"probemon/ran.py": "other"}, {"probes": "*"}) == {
        "probemon/ran.py": "Box Box.__init__ Box.area Box.size SCALE other product scaled told",
        "probes": "*",
    }


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("x in [a]", "x in [a, a]", ["scaled"]),
        ('"a": 2', '"a": 3', ["SCALE"]),
        ("size = 3", "size = 4", ["Box.size"]),
        ("a * b", "a + b", ["product"]),
        ("print()", "print(1)", ["line 41"]),
        ("    def edge", "    def __getattr__(self, name):\n        return 1\n\n    def edge", ["Box.__getattr__"]),
        ("def other", "@told\ndef one_more(a):\n    return a\n\n\ndef other", ["one_more"]),
        ("    return a\n", "    return -a\n", []),
        ("UNREAD = 1", "UNREAD = 2", []),
        ("return UNREAD", "return 0", []),
        ("def other", "def one_more(a):\n    return a\n\n\ndef other", []),
    ],
)
def test_only_what_ran_or_could_run_instead_counts(ran, old, new, names):
    file, measures = ran
    commit = committed(file.parents[1])
    assert changes_since(commit, measures) == []
    file.write_text(RAN.replace(old, new))
    assert changes_since(commit, measures) == [f"probemon/ran.py: {name}" for name in names]


def test_what_ran_is_followed_to_another_file(ran):
    file, measures = ran
    commit = committed(file.parents[1])
    begin, end = RAN.index("@told\ndef scaled"), RAN.index("def other")
    file.write_text(RAN[:begin] + RAN[end:])
    moved = file.with_name("moved.py")
    moved.write_text(RAN[begin:end])
    assert changes_since(commit, measures) == []
    moved.write_text(RAN[begin:end].replace("x in [a]", "x in [a, a]"))
    assert changes_since(commit, measures) == ["probemon/moved.py: scaled"]


def test_packs_are_others_where_a_score_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr("staleness.ROOT", tmp_path)
    pack = tmp_path / "probes/a"
    pack.mkdir(parents=True)

    def commit(tensors, **manifest):
        (pack / "probes.safetensors").write_text(tensors)
        (pack / "manifest.json").write_text(json.dumps(manifest))
        return committed(tmp_path)

    (tmp_path / "probemon").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    for name in ("probemon", "scripts", "tests"):
        (tmp_path / name / "code.py").write_text("")
    first = commit("weights", host={"fingerprint": "a"}, score_rule="path")
    commit("weights", host={"fingerprint": "b", "settings": {}}, score_rule="path")
    assert changes_since(first, ["probes"]) == []
    commit("weights", host={"fingerprint": "b"}, score_rule="own")
    assert changes_since(first, ["probes"]) == ["probes holds other packs"]
    commit("others", host={"fingerprint": "a"}, score_rule="path")
    assert changes_since(first, ["probes"]) == ["probes holds other packs"]

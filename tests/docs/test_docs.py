"""Tables and trees in the documents equal the result files and the repository."""

import json
import re
import subprocess
import sys
from pathlib import Path

from mutate_alignment import MUTATIONS

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
RESULTS = sorted((ROOT / "docs/benchmarks").glob("*.json"))


def result(name):
    return json.loads((ROOT / "docs/benchmarks" / name).read_text())


def test_tables_of_the_pages_equal_the_result_files():
    command = [sys.executable, "scripts/benchmarks/figures.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nscripts/benchmarks/figures.py renews the tables"
    marks = sum(len(re.findall(r"<!-- (?:end of table|table: )", page.read_text(encoding="utf-8"))) for page in PAGES)
    pairs = sum(page.read_text(encoding="utf-8").count("<!-- table: ") for page in PAGES)
    assert marks == 2 * pairs > 60


def test_outdated_table_is_rewritten():
    import figures

    page = "\n".join(["before", "", *figures.block("settings.json", "settings"), "", "after"])
    assert figures.renewed(page) == page
    assert figures.renewed(page.replace("µs a step", "a step")) == page
    empty = "<!-- table: settings.json settings -->\n<!-- end of table -->"
    assert figures.renewed(f"before\n\n{empty}\n\nafter") == page


def test_every_result_file_is_named_by_a_page_or_a_decision():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [path.name for path in RESULTS if path.name not in text]


def test_every_result_file_names_its_commit_and_machine():
    for path in RESULTS:
        found = json.loads(path.read_text())
        assert re.fullmatch(r"[0-9a-f]{40}", found["commit"]) and {"cpu", "torch"} <= found["machine"].keys(), path


def test_no_architecture_is_wrong_in_any_mode():
    found = result("architectures.json")
    rows = {name: row["modes"] for name, row in found["architectures"].items() if "modes" in row}
    assert (
        len(rows) >= 170 and len(found["modes"]) >= 10 and all(set(row) == set(found["modes"]) for row in rows.values())
    )
    entries = [entry for row in rows.values() for entry in row.values()]
    assert {entry["outcome"] for entry in entries} == {"exact", "as run", "refused", "host fails"}
    for entry in entries:
        if entry["outcome"] in ("exact", "as run"):
            assert entry.get("own", 0.0) <= 1e-5 and (entry["deviation"] <= found["bar"] or entry["host"] > 1e-3)


def test_every_mutation_of_attribution_is_caught():
    found = result("mutations.json")
    assert found["n_caught"] == found["n_mutations"] >= 30


def test_every_mutation_matches_one_source_line():
    """Else the script that breaks attribution on purpose ends before it has shown anything."""
    for file, before, after, what in MUTATIONS:
        assert (ROOT / "probemon" / file).read_text().count(before) == 1 and before != after, (file, what)


def test_tree_in_the_architecture_page_is_the_real_tree():
    text = (ROOT / "docs/architecture.md").read_text()
    named, folders = set[str](), list[str]()
    for line in text.split("## The tree")[1].split("```")[1].splitlines()[1:]:
        words = line.split()
        if words[0] == ".":
            named |= {"/".join([*folders[1:], word]) for word in words[1:]}
        else:
            folders = [*folders[: (len(line) - len(line.lstrip())) // 2], words[0].rstrip("/")]
    package = ROOT / "probemon"
    files = subprocess.run(["git", "ls-files", "."], cwd=package, capture_output=True, text=True, check=True)
    there = {name.removesuffix(".py") for name in files.stdout.split() if not name.endswith(("__.py", "py.typed"))}
    assert named == there


def test_tests_named_by_a_decision_exist():
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    decisions = [*(ROOT / "docs/decisions").glob("*.md")]
    assert len(decisions) > 10
    for page in decisions:
        for test in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")):
            assert f"def {test}(" in tests, (page.name, test)


def test_tables_have_a_line_for_each_row():
    wrapped = re.compile(r"\S.*\|-{2,}\|")
    assert len(PAGES) > 30
    assert not [
        page.name
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if wrapped.match(line) and not re.fullmatch(r"[|:\- ]+", line)
    ]

"""Every requested feature is in its table of docs/decisions once, and the files, tests and recipes it names exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
N_ROWS = {
    "bem-features": 48,
    "memory-transformer-features": 28,
    "performance-track-features": 41,
    "state-space-features": 30,
}
PAGES = {name: (ROOT / f"docs/decisions/{name}.md").read_text(encoding="utf-8") for name in N_ROWS}
TABLES = {
    page: [cells.split(" | ") for cells in re.findall(r"^\| (\d+ \| .*) \|$", text, re.MULTILINE)]
    for page, text in PAGES.items()
}
NAMED = sorted({name for text in PAGES.values() for name in re.findall(r"`((?:tests|scripts|docs)/[^`]*)`", text)})
RECIPES = sorted({name for text in PAGES.values() for name in re.findall(r"recipe `([^`]*)`", text)})
STATES = {"works", "partly", "measured out", "not ours"}
SHOWN = r"`(?:tests|scripts|docs)/|recipe `"


@pytest.mark.parametrize("page", N_ROWS)
def test_every_row_appears_once_and_has_a_state(page):
    assert [row[0] for row in TABLES[page]] == [str(i + 1) for i in range(N_ROWS[page])]
    assert all(len(row) == 4 and row[2] in STATES for row in TABLES[page])


@pytest.mark.parametrize("page", N_ROWS)
def test_rows_stated_to_work_name_a_test_or_recipe(page):
    for number, feature, state, shown in TABLES[page]:
        assert state in ("not ours", "partly") or re.search(SHOWN, shown), (number, feature)
        works = "`tests/" in shown or "recipe `" in shown or feature == "tests and benchmarks"
        assert state != "works" or works, (number, feature)


def test_no_more_than_fifteen_rows_are_partly_there_each_for_a_gpu():
    partly = [row for rows in TABLES.values() for row in rows if row[2] == "partly"]
    assert len(partly) <= 15 and all(re.search(r"GPU|H100|CUDA", row[3]) for row in partly), partly


@pytest.mark.parametrize("name", NAMED)
def test_files_and_tests_named_by_a_row_exist(name):
    file, _, test = name.partition("::")
    assert (ROOT / file).is_file()
    assert not test or re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_recipes_named_by_a_row_have_a_result():
    found = json.loads((ROOT / "docs/benchmarks/host_recipes.json").read_text(encoding="utf-8"))
    assert set(RECIPES) <= {row["name"] for row in found["rows"] if row["verdict"] != "failed"}

"""Every requested row is in docs/decisions/bem-features.md once, and the files and tests it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/decisions/bem-features.md").read_text(encoding="utf-8")
ROWS = {int(number): cells.split(" | ") for number, cells in re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)}
NAMED = sorted(set(re.findall(r"`((?:tests|scripts|docs)/[^`]*)`", PAGE)))
STATES = {"works", "partly", "measured out", "not ours"}


def test_every_row_appears_once_and_has_a_state():
    assert re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == [str(i + 1) for i in range(48)]
    assert {state for _, state, _ in ROWS.values()} == STATES


def test_rows_stated_to_work_name_a_test():
    for number, (_, state, shown) in ROWS.items():
        assert state == "not ours" or "`tests/" in shown or "`scripts/" in shown or "`docs/" in shown
        assert state != "works" or "`tests/" in shown or number == 48, number


@pytest.mark.parametrize("name", NAMED)
def test_files_and_tests_named_by_a_row_exist(name):
    file, _, test = name.partition("::")
    assert (ROOT / file).is_file()
    assert not test or re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)

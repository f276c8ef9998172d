"""Recipes for what may be added are true: followed to the letter, they work, and the files and names in them exist."""

import re
from pathlib import Path

import pytest
import torch

from conftest import PAD, make_model
from probemon import DynamicProbeManager

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TABLE = ARCHITECTURE.split("## Where to add what")[1].split("## What can change a score")[0]
ADDED = {
    **dict(
        re.findall(r"^- \*\*(.+?)\*\*(.+?)(?=^- \*\*|\Z)", CONTRIBUTING.split("## How to add")[1], flags=re.M | re.S)
    ),
    **{row.split("|")[1].strip(): row for row in TABLE.splitlines() if row.startswith("| ") and "a new" not in row},
}


def test_a_sink_written_as_the_recipe_says_receives_every_token(pack):
    signatures = re.findall(r"`(\w+)\((\w*)\)`", ADDED["A sink"])
    calls = []
    methods = {name: (lambda self, *given, name=name: calls.append((name, given))) for name, _ in signatures}
    model, manager = make_model(), DynamicProbeManager(pack)
    with manager.attach(model) as run:
        run.follow(type("Sink", (), methods)())
        ids = torch.tensor([[1, 5, 9, 13]])
        ids = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    assert [calls[0][0], calls[-1][0]] == ["open", "close"] and {name for name, _ in calls} == methods.keys()
    assert all(len(given) == bool(argument) for name, argument in signatures for one, given in calls if one == name)
    assert sum(len(given[0]) for name, given in calls if name == "write") == ids.shape[1] - 1  # the last never ran


@pytest.mark.parametrize("recipe", ["A norm of inputs", "norm of inputs"])
def test_the_recipe_for_a_norm_names_every_file_that_computes_norms(recipe):
    package = ROOT / "probemon"
    computes = {f.relative_to(package).as_posix() for f in package.rglob("*.py") if " check_norm(" in f.read_text()}
    assert "engine/kernels/numba_inputs.py" in computes and computes < set(re.findall(r"`([\w/]+\.py)`", ADDED[recipe]))


@pytest.mark.parametrize("recipe", ADDED)
def test_files_and_names_of_a_recipe_exist(recipe):
    code = [part for part in re.findall(r"`([^`]+)`", ADDED[recipe]) if re.fullmatch(r"[\w./]+", part)]
    paths = [part for part in code if "/" in part or "." in part]
    files = []
    for path in paths:
        near = [folder / path for folder in (ROOT, ROOT / "probemon", ROOT / "probemon/lab/importers", ROOT / "tests")]
        found = [one for one in near if one.exists()]
        assert found or "NEW" in path, path
        files += [file for one in found for file in ([one] if one.is_file() else one.rglob("*.py"))]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert not [name for name in code if name not in paths and not re.search(rf"\b{name}\b", text)]

"""The command concepts: the tree, depth limits, patterns and JSON."""

import json
import math
import re
import sys

import pytest
import torch

from conftest import make_model, make_pack
from probemon import ProbePack
from probemon.cli import app as cli
from probemon.cli import concepts as command

PACK = "probes/wordnet-smollm2-135m"
# Two roots; "b" and "c" both lead to "d".
CONCEPTS = [
    {"id": "a", "name": "a", "parents": [], "definition": "the root"},
    {"id": "lone", "name": "lone", "parents": []},
    {"id": "b", "name": "b", "parents": ["a"], "words": ["bee", 7, "wasp"], "precision": {"strict": 0.914}},
    {"id": "c", "name": "c", "parents": ["a"], "definition": "beside b"},
    {"id": "d", "name": "same", "parents": ["b", "c"], "definition": 5},
    {"id": "e", "name": "same", "parents": ["d"], "words": "none"},
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    threshold = torch.tensor([0.5, 0.25, 0.125, math.nan, 0.5, 0.75])
    return make_pack(
        tmp_path_factory.mktemp("toy") / "toy",
        make_model(),
        n=6,
        name="toy",
        concepts=CONCEPTS,
        alert_threshold=threshold,
        alert_set="strict",
        alert_sets={"loose": threshold / 2},
    )


def run(monkeypatch, capsys, *arguments):
    """Exit status, standard output and standard error of `probemon concepts`."""
    monkeypatch.setattr(sys, "argv", ["probemon", "concepts", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def rows(out):
    """The lines of the table, each as its words, without guides."""
    return [line.replace("├─", "").replace("└─", "").replace("│", "").split() for line in out.splitlines()[2:-1]]


def test_tree_shows_level_threshold_precision_and_definition_of_every_concept(monkeypatch, capsys, toy):
    code, out, _ = run(monkeypatch, capsys, toy.directory)
    assert code == 0 and out.startswith("toy: 6 of 6 concepts, alert set strict (--alert-set also knows loose)\n")
    assert [row for row in rows(out) if row[0] != "for"] == [
        ["a", "0", "0.500", "the", "root"],
        ["b", "1", "0.125", "91%", "for", "example:", "bee,", "wasp"],
        ["same", "2", "0.500", "5"],
        ["same", "3", "0.750"],
        ["c", "1", "-", "beside", "b"],
        ["same", "2", "0.500", "(what", "is", "below", "it", "is", "listed", "above)"],
        ["lone", "0", "0.250"],
    ]
    lines = [line[:11] for line in out.splitlines()[2:]]
    assert lines[:6] == ["a          ", "├─ b       ", "│  └─ same ", "│     └─ sa", "└─ c       ", "   └─ same "]


def test_another_alert_set_shows_its_own_thresholds_and_no_other_precision(monkeypatch, capsys, toy):
    _, out, _ = run(monkeypatch, capsys, toy.directory, "b", "--depth", "0", "--alert-set", "loose")
    assert rows(out)[1][:3] == ["b", "1", "0.062"] and "91%" not in out and "alert set loose" in out
    code, out, error = run(monkeypatch, capsys, toy.directory, "--alert-set", "lose")
    assert code == 2 and not out and error.count("\n") == 1 and "it has strict, loose" in error


def test_pattern_shows_all_paths_from_the_root_and_all_descendants(monkeypatch, capsys, toy):
    _, out, _ = run(monkeypatch, capsys, toy.directory, "d", "--json")
    answer = json.loads(out)
    assert [(c["id"], c["matches"]) for c in answer["concepts"]] == [
        ("a", False), ("b", False), ("c", False), ("d", True), ("e", False),
    ]  # fmt: skip
    _, out, _ = run(monkeypatch, capsys, toy.directory, "same", "--depth", "0", "--json")  # the name of two
    assert {c["id"] for c in json.loads(out)["concepts"] if c["matches"]} == {"d", "e"}
    _, out, _ = run(monkeypatch, capsys, toy.directory, "l*", "--json")
    assert json.loads(out)["concepts"] == [
        {
            "id": "lone",
            "name": "lone",
            "path": ["lone"],
            "level": 0,
            "parents": [],
            "children": [],
            "threshold": 0.25,
            "precision": None,
            "definition": None,
            "words": [],
            "matches": True,
        }
    ]


def test_depth_limits_levels_and_hidden_concepts_are_listed(monkeypatch, capsys, toy):
    _, out, _ = run(monkeypatch, capsys, toy.directory, "--depth", "1")
    names = [row[0] for row in rows(out)[:-1]]
    assert names == ["a", "b", "+2:", "c", "+2:", "lone"]
    assert "+2: same, same" in out and out.splitlines()[-1].startswith("--depth 3 shows everything")
    assert json.loads(run(monkeypatch, capsys, toy.directory, "--json")[1])["n_concepts"] == 6
    _, out, _ = run(monkeypatch, capsys, toy.directory, "b", "--depth", "1", "--json")
    assert [c["id"] for c in json.loads(out)["concepts"]] == ["a", "b", "d"]


def test_large_pack_is_cut_to_a_bounded_number_of_lines(monkeypatch, capsys):
    pack = ProbePack.open(PACK)
    code, out, _ = run(monkeypatch, capsys, PACK)
    shown = rows(out)[:-1]
    assert code == 0 and len(pack.tree.roots) < len(shown) <= 100
    assert not [line for line in out.splitlines() if line.endswith(" ")]
    level = {pack.tree.level[probe] for probe in range(pack.n_probes) if pack.concepts[probe]["name"] == shown[-1][0]}
    assert level <= {0, 1} and all(row.count("for") < 9 for row in shown)
    whole = json.loads(run(monkeypatch, capsys, PACK, "--json")[1])["concepts"]
    assert [c["id"] for c in whole] == [c["id"] for c in pack.concepts]
    assert [c["threshold"] for c in whole] == pack.alert_threshold.tolist()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(command, "_MOST_IN_FULL", 0)
    _, out, _ = run(monkeypatch, capsys, PACK, "animal")
    table = re.sub("\x1b\\[[0-9;]*m", "", out).splitlines()[1:-1]
    assert max(map(len, table)) == 100 and sum(line.endswith("…") for line in table) > 3


def test_pack_without_thresholds_says_that_nothing_fires(monkeypatch, capsys, tmp_path):
    pack = make_pack(tmp_path / "bare", make_model(), n=5, alert_threshold=torch.full((5,), math.nan))
    _, out, _ = run(monkeypatch, capsys, pack.directory)
    assert "none fires: probemon calibrate sets thresholds" in out and "right:" not in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "nowhere"),
        ([PACK, "plant"], "'plant (artifact)' (buildings for carrying on industrial labor): give one of them"),
        ([PACK, "whael"], "did you mean 'whale'?"),
        ([PACK, "automobile"], "the nearest in meaning is 'car'"),
        ([PACK, "automobile*"], "the nearest in meaning is 'car'"),
        ([PACK, "--depth", "-1"], "--depth is -1: give 0 or more"),
    ],
)
def test_missing_pack_or_concept_is_one_line_and_status_2(monkeypatch, capsys, arguments, words):
    code, out, error = run(monkeypatch, capsys, *arguments)
    assert code == 2 and not out and error.count("\n") == 1 and words in error

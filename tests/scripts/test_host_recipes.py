"""Recipes for running models: each row is judged by its measurement, and a wrong one fails."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import host_recipes
from probemon.adapters.routing.recurrent import recorder
from probemon.host.recurrent import scan
from recipe_rows import RECIPES, inference, training, weights
from recipe_rows.rows import Found, Refused, judge, refusal, run

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {one.name: one for one in RECIPES}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of kernels that are not installed


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("gradient checkpointing", "ltm"),
        ("loss scaling", "mamba2"),
        ("batched generation", "falcon_h1"),
        ("tokens one by one on a used cache", "mamba"),
        ("pruning, rows", "mamba2"),
    ],
)
def test_recipe_row_holds_and_its_trap_exists(name, host):
    row = run(BY_NAME[name], host)
    assert row.verdict in ("exact", "within bound"), row


@pytest.mark.parametrize(
    ("name", "host"), [("several tokens on a used cache, watched", "mamba"), ("static cache", "ltm")]
)
def test_refused_recipe_names_its_error(name, host):
    row = run(BY_NAME[name], host)
    assert row.verdict == "refused" and row.value.startswith("UnsupportedDecoding: "), row


def test_model_that_differs_from_the_plain_one_fails(monkeypatch):
    made = iter((0, 1))
    make = training.make
    monkeypatch.setattr(training, "make", lambda kind: make(kind, seed=next(made)))
    row = run(BY_NAME["activation offload"], "mamba2")
    assert row.verdict == "failed" and row.value > 1e-3 and row.watched < 1e-5


def test_states_shifted_by_one_token_fail_despite_correct_logits(monkeypatch):
    def late(log_decay, added, start=None):
        return scan.scan_loop(log_decay.roll(1, 0), added, start)

    monkeypatch.setattr(recorder, "scan_loop", late)
    row = run(BY_NAME["batched generation"], "mamba2")
    assert row.verdict == "failed" and row.value < 1e-5 and row.watched > 1e-3


def test_gradients_left_scaled_fail(monkeypatch):
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", lambda self, optimizer: None)
    assert run(BY_NAME["loss scaling"], "mamba2").verdict == "failed"


def test_missing_trap_and_missing_refusal_fail(monkeypatch):
    pieces = inference._pieces
    monkeypatch.setattr(inference, "_pieces", lambda kind, sizes, **how: pieces(kind, [7] + [1] * 17, watched=False))
    row = run(BY_NAME["tokens one by one on a used cache"], "mamba")
    assert row.verdict == "failed" and row.value < 1e-5 and row.trap_value < 1e-5
    row = run(BY_NAME["several tokens on a used cache, watched"], "mamba")
    assert row.verdict == "failed" and "no UnsupportedDecoding was raised" in row.value


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Found(0.0, 1e-6, 1.0), "exact"),
        (Found(1e-6, 1e-6, 1.0), "within bound"),
        (Found(2e-5, 1e-6, 1.0), "failed"),
        (Found(math.nan, 1e-6, 1.0), "failed"),
        (Found(math.inf, 1e-6, 1.0), "failed"),
        (Found(-1.0, 1e-6, 1.0), "failed"),
        (Found(0.0, 2e-5, 1.0), "failed"),
        (Found(0.0, math.nan, 1.0), "failed"),
        (Found(0.0, 1e-6, 1e-4), "failed"),
        (Found(0.0, 1e-6, None), "failed"),
        (Refused("ValueError: no"), "failed"),
    ],
)
def test_row_is_judged_by_value_watched_states_and_trap(found, verdict):
    row = judge(BY_NAME["SDPA"], "ltm", found)
    assert row.verdict == verdict
    json.dumps(vars(row), allow_nan=False)


def test_answer_in_place_of_a_refusal_fails():
    assert judge(BY_NAME["static cache"], "ltm", Found(0.0)).verdict == "failed"
    with pytest.raises(ValueError, match="another"), refusal(ValueError, "these words"):
        raise ValueError("another")


def test_script_writes_its_rows_and_its_status_says_if_all_hold(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["host_recipes.py", "--only", "more slots", "--json", str(out)])
    assert host_recipes.main() == 0
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == ["more slots"] and found["counts"] == {"within bound": 1}
    monkeypatch.setattr(weights, "largest", lambda a, b: 1.0)
    assert host_recipes.main() == 1 and json.loads(out.read_text())["rows"][0]["verdict"] == "failed"
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["host_recipes.py", "--only", "no such row"])
    with pytest.raises(SystemExit) as ended:
        host_recipes.main()
    assert ended.value.code == 2 and "more slots" in capsys.readouterr().err


def test_the_result_file_has_every_row_and_none_failed():
    found = json.loads((ROOT / "docs/benchmarks/host_recipes.json").read_text())
    assert {(row["name"], row["host"]) for row in found["rows"]} == {(r.name, h) for r in RECIPES for h in r.hosts}
    verdicts = [row["verdict"] for row in found["rows"]]
    assert "failed" not in verdicts and found["passed"]
    assert verdicts.count("exact") + verdicts.count("within bound") >= 30 and found["seconds"] < 600

"""The cascade profile at a small size: consistent figures, a gate against unequal work, and option errors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "profile_cascade.py"
N_TOKENS = 101
SMALL = ["--probes", "120", "--tokens", str(N_TOKENS), "--hidden", "64"]  # not the demo model's width: no host model
NAMES = ("no_pruning", "top_50", "top_30")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "result.json"
    command = [sys.executable, str(SCRIPT), "--json", "--out", str(out), *SMALL]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return SimpleNamespace(stdout=run.stdout, out=out, result=json.loads(run.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def script():
    """The script as a module, under a name of its own: its package bears the obvious one."""
    spec = importlib.util.spec_from_file_location("profile_cascade_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_printed_and_saved_results_are_equal_and_tables_plain_text(ran):
    assert json.loads(ran.out.read_text(encoding="utf-8")) == ran.result
    assert [file.name for file in ran.out.parent.iterdir()] == ["result.json"]
    assert "\x1b" not in ran.stdout
    for words in (
        "file read",
        "child lookup",
        "Token by token, top-30",
        "final loaded",
        "100-token overhead, measured",
    ):
        assert words in ran.stdout
    assert "random weights" in ran.stdout and ran.result["random_weights"] is True


def test_gate_compared_every_token_of_every_configuration(ran):
    agreement = ran.result["agreement"]
    assert agreement["sets_agree"] is True
    assert agreement["tokens_compared"] == 4 * N_TOKENS
    assert 0 < agreement["largest_score_difference"] < 1e-5


def test_both_managers_end_with_the_same_probes(ran):
    twin, ours, base = ran.result["twin"], ran.result["ours"], ran.result["probes_per_level"][0]
    assert [twin[name]["final_loaded"] for name in NAMES] == [ours[name]["final_loaded"] for name in NAMES]
    assert twin["top_30"]["final_loaded"] == base + 30
    assert twin["top_50"]["final_loaded"] == base + 50
    assert twin["no_pruning"]["final_loaded"] > base + 50
    offline = ran.result["offline_configuration"]
    assert offline["twin"]["final_loaded"] == offline["ours"]["final_loaded"] > sum(ran.result["probes_per_level"][:2])


@pytest.mark.parametrize("name", ["no_pruning", "top_30"])
def test_each_tokens_counts_follow_from_the_previous_row(ran, name):
    rows = ran.result[f"per_token_{name}"]
    loaded, unloaded = ran.result["probes_per_level"][0], 0
    for row in rows:
        assert row["loaded"] == loaded + row["children"] - (row["unloaded"] - unloaded)
        loaded, unloaded = row["loaded"], row["unloaded"]
    assert loaded == ran.result["twin"][name]["final_loaded"]
    assert (unloaded > 0) == (name == "top_30")
    for side in ("twin", "ours"):
        ms = [row[f"{side}_ms"] for row in rows]
        assert ran.result[side][name]["mean_ms"] == pytest.approx(sum(ms) / len(ms), abs=1e-3)
        assert ran.result[side][name]["max_ms"] == pytest.approx(max(ms), abs=1e-3)
        assert ran.result["hundred_tokens_ms"][side][name] == pytest.approx(sum(ms[:100]), abs=0.1)


def test_speedup_is_the_ratio_of_the_means(ran):
    twin, ours = ran.result["twin"], ran.result["ours"]
    assert ran.result["speedup_top_30"] == pytest.approx(
        twin["top_30"]["mean_ms"] / ours["top_30"]["mean_ms"], abs=0.01
    )
    for name in NAMES:
        assert ran.result["speedups"][name] == pytest.approx(twin[name]["mean_ms"] / ours[name]["mean_ms"], abs=0.01)


def test_parts_add_up_to_the_whole(ran):
    split = ran.result["load_split"]
    parts = [split[part] for part in ("file_read", "model_and_weights", "transfer")]
    assert sum(part["ms"] for part in parts) == pytest.approx(split["total_ms"], abs=1e-3)
    assert sum(part["share"] for part in parts) == pytest.approx(1, abs=1e-3)
    for name in NAMES:
        steps = ran.result["step_breakdown"][name]
        assert list(steps) == ["scoring_loaded", "child_lookup", "loading", "scoring_children", "sorting"]
        assert sum(part["share"] for part in steps.values()) == pytest.approx(1, abs=1e-3)
        mean = ran.result["twin"][name]["mean_ms"]
        assert 0.9 * mean < sum(part["mean_ms"] for part in steps.values()) <= mean + 1e-3
    children = sum(row["children"] for row in ran.result["per_token_top_30"])
    assert split["n_loads"] > children + sum(row["children"] for row in ran.result["per_token_no_pruning"])


def pair_of(script, folder, setting):
    world = script.make_world(n_probes=60, n_tokens=12, hidden_size=16, seed=3)
    files, pack = script.write_files(world, folder / "files"), script.write_pack(world, folder / "pack")
    return script.Pair.of(setting, world, files, pack)


def quiet_bar():
    return SimpleNamespace(update=lambda: None)


def test_gate_passes_equal_work_and_names_the_probe_whose_weights_differ(script, tmp_path):
    pair = pair_of(script, tmp_path, script.COMPARED[0])
    assert script.check_agreement(pair, quiet_bar()) < 1e-5
    state = torch.load(pair.twin.files[0], weights_only=True)
    state["6.bias"] = state["6.bias"] + 1e-3
    torch.save(state, pair.twin.files[0])
    with pytest.raises(script.Disagreement, match="no_pruning, token 1: random-00000 scores"):
        script.check_agreement(pair, quiet_bar())


def test_gate_refuses_another_pruning(script, tmp_path):
    pair = pair_of(script, tmp_path, script.Setting("top_3", (0,), 3))
    pair.twin.setting = script.Setting("top_3", (0,), 2)
    with pytest.raises(script.Disagreement, match=r"only ours \['random-.*one of the two is wrong"):
        script.check_agreement(pair, quiet_bar())


def test_gate_reports_differences_decided_by_rounding(script):
    with pytest.raises(script.Disagreement, match=r"only the twin kept \['random-00004'\].*use another --seed"):
        script._same("top_30, token 2", "kept", {1, 4}, {1, 5}, margin=2e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--probes", "3"], "--probes is 3: give 40 or more"),
        (["--hidden", "0"], "profile_cascade: --hidden is 0: give 2 or more"),
        (["--tokens", "many"], "--tokens: invalid int value: 'many'"),
        (["--out", "/no/such/folder/result.json"], "give a file in a folder that exists"),
        (["--tokes", "5"], "--tokes"),
    ],
)
def test_bad_options_exit_2_with_one_line(script, capsys, options, words):
    with pytest.raises(SystemExit) as exit_:
        script.main(options)
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and words in said[0]

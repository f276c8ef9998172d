"""The command doctor names every problem with a remedy, and is quiet if there is none."""

import importlib.metadata
import json
import os
import shutil
import sys

import pytest
import torch
import typer

from conftest import make_model, make_pack
from corpora import make_tokenizer
from probemon.cli import app as cli
from probemon.cli.doctor import measured_settings
from probemon.engine import kernels

COMMANDS = typer.main.get_command(cli.app)
ALL = ["versions", "device", "threads", "pack", "model", "fit", "sites", "tokenizer", "cache", "kernel", "canary"]


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Runs the command; returns its status and its JSON, or with `text` what it prints, and its errors."""

    def run(*arguments, text=False):
        monkeypatch.setattr(sys, "argv", ["probemon", "doctor", *map(str, arguments), *([] if text else ["--json"])])
        monkeypatch.setattr(cli, "app", COMMANDS)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, error = capsys.readouterr()
        return ended.value.code, out if text else json.loads(out) if out else {}, error

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny host, one with a pack for it, and one with a pack for another of its shape."""
    folder, model = tmp_path_factory.mktemp("tiny"), make_model()
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    make_pack(folder / "pack", model)
    make_pack(folder / "other", make_model(seed=1), name="other", sites=("resid_post.2",))
    return folder


def by_state(answer, state):
    assert all(check["remedy"].endswith(".") for check in answer["checks"] if check["state"] != "ok")
    return {check["name"]: check["what"] for check in answer["checks"] if check["state"] == state}


def test_demo_passes_every_check(doctor):
    code, answer, error = doctor("demo")
    assert (code, answer["ok"], answer["model"], answer["packs"]) == (0, True, "demo", ["demo"]), error
    assert [check["name"] for check in answer["checks"]] == ALL and not by_state(answer, "failed")
    well = by_state(answer, "ok")
    assert well["fit"] == "the pack was made for these weights" and well["sites"].startswith("resid_post.15 of 30")
    assert f"torch {torch.__version__}" in well["versions"] and "numba (the weights are on a CPU)" in well["kernel"]
    assert "have the scores of an unwatched run's states (within 0)" in well["canary"]


def test_model_that_does_not_fit_fails_with_its_consequences(doctor, tiny):
    code, answer, _ = doctor(tiny / "model", "demo")
    failed = by_state(answer, "failed")
    assert code == 1 and not answer["ok"] and [check["name"] for check in answer["checks"]] == ALL
    assert failed.keys() == {"fit", "sites", "canary"}
    assert "reads resid_post.15, LlamaForCausalLM has layers 0..2: use a pack that was made for" in failed["fit"]
    assert "layers 0..2" in failed["sites"]


def test_other_weights_warn_and_with_strict_fail(doctor, tiny):
    code, answer, error = doctor(tiny / "model", tiny / "other")
    assert code == 0 and answer["ok"] and error == ""
    assert "this model's weights are others" in by_state(answer, "warning")["fit"]
    code, answer, _ = doctor(tiny / "model", tiny / "other", "--strict")
    assert code == 1 and by_state(answer, "failed").keys() == {"fit"}


def test_broken_pack_does_not_hide_the_model_or_the_other_pack(doctor, tiny, tmp_path):
    broken = shutil.copytree(tiny / "pack", tmp_path / "broken")
    content = bytearray((broken / "probes.safetensors").read_bytes())
    content[-1] ^= 1
    (broken / "probes.safetensors").write_bytes(content)
    code, answer, _ = doctor(tiny / "model", broken, "--pack", tiny / "other")
    packs = [check for check in answer["checks"] if check["name"] == "pack"]
    assert code == 1 and [check["state"] for check in packs] == ["failed", "ok"] and "sha256" in packs[0]["what"]
    waiting = by_state(answer, "warning")
    assert waiting["fit"] == "not tried, for want of a pack" and waiting["canary"] == "not tried, for want of a kernel"
    assert {"model", "tokenizer"} <= by_state(answer, "ok").keys()


def test_two_packs_are_checked_together(doctor, tiny):
    code, answer, _ = doctor(tiny / "model", tiny / "pack", "--pack", tiny / "other")
    assert code == 0 and "resid_post.1, resid_post.2" in by_state(answer, "ok")["sites"]
    code, answer, _ = doctor(tiny / "model", tiny / "pack", "--pack", tiny / "pack")
    assert code == 1 and "2 packs are named 'random'" in by_state(answer, "failed")["pack"]


def test_missing_model_and_pack_are_both_reported(doctor, tiny):
    code, answer, error = doctor(tiny / "nowhere", tiny / "nothing")
    failed = by_state(answer, "failed")
    assert code == 1 and error == "" and failed.keys() == {"pack", "model"}
    assert "no such folder" in failed["model"] and "nothing" in failed["pack"]
    code, out, _ = doctor(tiny / "nowhere", tiny / "nothing", text=True)
    assert code == 1 and "failed" in out and out.rstrip().endswith("2 failed, 5 warnings")
    code, out, _ = doctor(tiny / "nowhere", tiny / "nothing", "--measure", text=True)
    assert code == 1 and "settings were not measured" in out


def test_nan_weights_are_found_before_and_by_the_canary(doctor, tiny, tmp_path):
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    code, answer, _ = doctor(tmp_path / "model", tiny / "pack")
    failed = by_state(answer, "failed")
    assert code == 1 and failed.keys() == {"model", "canary"}
    assert "1 weights" in failed["model"] and "layers.0.mlp.down_proj" in failed["model"]
    assert "hidden state is not finite" in failed["canary"]


def test_missing_extra_is_named_with_its_install_command(doctor, tiny, monkeypatch, tmp_path):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "numba", None)
        kernels._installed.cache_clear()
        code, answer, _ = doctor(tiny / "model", tiny / "pack")
    kernels._installed.cache_clear()
    (kernel,) = [check for check in answer["checks"] if check["name"] == "kernel"]
    assert code == 0 and kernel["state"] == "warning" and "numba is not installed" in kernel["what"]
    assert "pip install 'probemon[cpu]'" in kernel["remedy"] and by_state(answer, "ok")["canary"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, answer, _ = doctor("demo")
    assert code == 1 and "pip install 'probemon[demo]'" in by_state(answer, "failed")["model"]
    assert by_state(answer, "ok").keys() >= {"pack", "kernel", "cache"}


def test_temporary_code_folder_names_the_variable_to_set(doctor, tiny, monkeypatch):
    monkeypatch.setattr("probemon.cli.doctor.examination.is_temporary", lambda folder: True)
    code, answer, _ = doctor(tiny / "model", tiny / "pack")
    (cache,) = [check for check in answer["checks"] if check["name"] == "cache"]
    assert code == 0 and cache["state"] == "warning" and "for want of another folder" in cache["what"]
    assert cache["remedy"] == "Set XDG_CACHE_HOME to a folder that can be written."


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_device_is_reported_and_the_rest_checked_without_it(doctor, tiny):
    code, answer, _ = doctor(tiny / "model", tiny / "pack", "--device", "cuda")
    assert code == 1 and by_state(answer, "failed").keys() == {"device"} and by_state(answer, "ok")["canary"]


def test_untested_versions_and_too_many_threads_are_named(doctor, tiny, monkeypatch):
    installed = importlib.metadata.version
    newer = {"transformers": "5.99.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: newer.get(name) or installed(name))
    n_threads, too_many = torch.get_num_threads(), len(os.sched_getaffinity(0)) + 1
    try:
        code, answer, _ = doctor(tiny / "model", tiny / "pack", "--threads", too_many)
    finally:
        torch.set_num_threads(n_threads)
    assert code == 1 and by_state(answer, "failed") == {"versions": "transformers is 5.99.0, <5.25,>=5.0 is needed"}
    assert by_state(answer, "warning")["threads"].startswith(f"{too_many} threads of torch on")


def test_settings_are_measured_on_a_given_text(doctor, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(measured_settings, "_SECONDS", 0.5)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "ships and whales at sea", "id": "mine"}) + "\n")
    code, answer, error = doctor(tiny / "model", tiny / "pack", "--measure", "--text", tmp_path / "texts.jsonl")
    said = answer["settings"]
    assert code == 0 and error == "" and said["text"] == "mine" and said["n_tokens"] > 3
    assert said["trials"][0]["changes"] == {} and said["trials"][-1]["changes"] == {"strategy": "exhaustive"}
    assert said["trials"][-1]["evaluated"] == 40 and said["interval_pct"][0] <= said["overhead_pct"]
    code, out, _ = doctor(tiny / "model", tiny / "pack", "--measure", text=True)
    assert code == 0 and "as the pack recommends" in out and "a built-in text" in out and "watching adds" in out
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    code, _, error = doctor(tiny / "model", tiny / "pack", "--measure", "--text", tmp_path / "texts.jsonl")
    assert code == 2 and "no document of" in error
    for arguments in (["--text", tmp_path / "texts.jsonl"], ["--measure", "--text", tmp_path / "nowhere.jsonl"]):
        code, answer, error = doctor(tiny / "nowhere", tiny / "pack", *arguments)
        assert (code == 2 and answer == {} and error.count("\n") == 1 and "--text" in error) or "nowhere.jsonl" in error


@pytest.mark.parametrize("arguments", [["tiny"], ["demo", "--dtype", "int3"], ["demo", "--threads", "-1"], []], ids=str)
def test_wrong_usage_is_one_line_with_status_2(doctor, arguments):
    code, answer, error = doctor(*arguments)
    assert code == 2 and answer == {} and error.count("\n") == 1

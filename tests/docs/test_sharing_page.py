"""Every example of the sharing page runs, in order, against a local stand-in of the hub."""

import json
import re
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from hub_stand_in import HubStandIn
from probemon import ProbePack
from probemon.cli.app import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/packs.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_every_example_runs_with_the_stated_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probes").symlink_to(ROOT / "probes")
    for name, value in (
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", False),
    ):
        monkeypatch.setattr(constants, name, value)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 4
    with HubStandIn(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        names = {}
        code = re.sub(r'\(\s*"org/name"', f'("org/name", endpoint={hub.url!r}', "\n".join(blocks))
        code = re.sub(
            r'from_pretrained\(\s*"org/name"',
            f'from_pretrained("org/name", cache_dir={str(tmp_path / "cache")!r}',
            code,
        )
        exec(compile(code, "packs.md", "exec"), names)
    huggingface_hub.close_session()
    vehicles, both, mine = (
        ProbePack.open(tmp_path / "packs" / name, verify=True) for name in ("vehicles", "both", "mine")
    )
    assert (
        vehicles.find("vehicle")
        and both.find("v:vehicle.n.01")
        and mine.find("things that go")
        and both.n_probes == vehicles.n_probes + names["animals"].n_probes
    )
    said = capsys.readouterr().out
    assert (
        "name of 1 concept differ: vehicle.n.01" in said
        and "1 names have no probe" in said
        and "vehicle" in said
        and "no group of probes would save anything" in said
        and "'animal', 'pet']" in said
    )
    assert (
        names["pack"].manifest["files"]["probes.safetensors"]
        == ProbePack.open(ROOT / "probes/wordnet-smollm2-135m").manifest["files"]["probes.safetensors"]
    )
    assert names["placed"].path(names["placed"].find("whale")) == ["animal", "mammal", "whale"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["pack", "subset", "probes/wordnet-smollm2-135m", "OUT", "--concept", "vehicle"],
        ["pack", "merge", "probes/wordnet-smollm2-135m", "probes/wordnet-smollm2-135m-mlp", "OUT", "--prefix"],
        ["pack", "rename", "probes/wordnet-smollm2-135m", "OUT", "--name", "NAME", "--concepts", "FILE.json"],
        ["hierarchy", "probes/wordnet-smollm2-135m", "TREE.json", "--out", "OUT"],
    ],
)
def test_commands_succeed_or_fail_in_one_line(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probes").symlink_to(ROOT / "probes")
    (tmp_path / "FILE.json").write_text(json.dumps({"vehicle": "things that go"}))
    (tmp_path / "TREE.json").write_text(json.dumps({"animal": {"whale": {}}}))
    monkeypatch.setattr("sys.argv", ["probemon", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, error = capsys.readouterr()
    if arguments[0] == "hierarchy":  # a pack of the path rule
        assert (
            ended.value.code == 2
            and error.count("\n") == 1
            and "path rule" in error
            and not (tmp_path / "OUT").exists()
        )
    else:
        assert (
            ended.value.code in (0, None)
            and "wrote OUT" in out
            and ProbePack.open(tmp_path / "OUT", verify=True).n_probes
        )

"""A pack's name means a folder, a shipped pack or one on the hub; a wrong path gets suggestions."""

import shutil
from pathlib import Path

import pytest

from probemon import ProbePack
from probemon.errors import PackCorrupt, PackError
from probemon.packs.local import DEFAULT, DEMO_CONCEPTS, find_folder, hint, shipped_packs
from probemon.util.files import sha256
from probemon.util.near_folders import near_folders

PROBES = Path(__file__).parents[2] / "probes"
ALL = f"'{DEFAULT}' or '{DEFAULT}-mlp' or '{DEMO_CONCEPTS}'"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder without packs, and in it `packs/` with two."""
    for name in ("animals", "vehicles", "cars"):
        shutil.copytree(PROBES / DEFAULT, tmp_path / "packs" / name)
    (tmp_path / "packs" / "no-pack").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["demo", DEFAULT])
def test_shipped_pack_is_found_from_any_folder(elsewhere, name):
    assert find_folder(name) == shipped_packs()[DEFAULT] == PROBES / DEFAULT
    assert ProbePack.from_pretrained(name).directory.resolve() == PROBES / DEFAULT


def test_all_packs_of_a_checkout_are_found_by_name():
    assert shipped_packs() == {name: PROBES / name for name in (DEFAULT, f"{DEFAULT}-mlp", DEMO_CONCEPTS)}


def test_folder_takes_precedence_over_a_shipped_pack_except_for_demo(elsewhere):
    for name in (DEFAULT, "demo"):
        shutil.copytree("packs/animals", name)
    assert find_folder(DEFAULT) == Path(DEFAULT)
    assert find_folder("demo") == PROBES / DEFAULT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("packs/animal", "no such folder: 'packs/animal'; did you mean 'packs/animals'?"),
        ("packs/vehicle/", "no such folder: 'packs/vehicle/'; did you mean 'packs/vehicles'?"),
        ("./packs/vehicle", "no such folder: './packs/vehicle'; did you mean 'packs/vehicles'?"),
        ("packs/quite-another", "no such folder: 'packs/quite-another'; give a folder, or a name on the hub: org/name"),
        ("wordnet-smollm", f"no such folder: 'wordnet-smollm'; did you mean {ALL}?"),
        ("nosuchpack", "no such folder: 'nosuchpack'; give a folder, or a name on the hub: org/name"),
        ("~/packs", "no such folder: '~/packs'; give a folder, or a name on the hub: org/name"),
        ("", "the name of the pack is empty: give a folder, a name on the hub such as 'org/name', or 'demo'"),
        (
            "packs/animals/manifest.json",
            "packs/animals/manifest.json is a file: give the folder of the pack, packs/animals",
        ),
        ("mails.jsonl", "mails.jsonl is a file: give the folder of a pack"),
    ],
)
def test_wrong_path_names_similar_folders(elsewhere, name, message):
    (elsewhere / "mails.jsonl").write_text("{}\n")
    with pytest.raises(PackError) as caught:
        ProbePack.from_pretrained(name)
    assert str(caught.value) == message


def test_two_part_name_without_a_local_folder_means_the_hub(elsewhere):
    assert find_folder("org/name") is None
    assert hint("org/name") == "" and hint(f"org/{DEFAULT[:-1]}") == f"; did you mean {ALL}?"


def test_pin_is_checked_for_a_shipped_pack(elsewhere):
    digest = sha256(PROBES / DEFAULT / "manifest.json")
    assert ProbePack.from_pretrained("demo", manifest_sha256=digest).n_probes > 300
    with pytest.raises(PackCorrupt, match=r"manifest.json"):
        ProbePack.from_pretrained("demo", manifest_sha256="0" * 64)


def test_near_folders_contain_the_marker_file_and_are_sorted_by_distance(tmp_path):
    for name in ("model", "model-b", "modelb", "zebra"):
        (tmp_path / name).mkdir()
        if name != "modelb":
            (tmp_path / name / "config.json").touch()
    near = near_folders(str(tmp_path / "mode"), "config.json", ["demo"])
    assert near == [str(tmp_path / "model"), str(tmp_path / "model-b")]
    assert near_folders(str(tmp_path / "missing" / "deom"), "config.json", ["demo"]) == ["demo"]
    assert near_folders(str(tmp_path / "quite-other"), "config.json") == []

"""Truncated, missing and duplicate input of importers is reported as such."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from probemon.cli.packs import read_object
from probemon.errors import ConfigError, ImportRefused
from probemon.lab.importers.foreign_files import parse_json, read_json, read_safetensors
from probemon.lab.importers.hatcat import import_pack
from probemon.lab.importers.weights import Folder, load_bank, load_state_dict
from probemon.util.strict_json import loads

TWICE = '{"parent_to_children": {"A:0": ["B:1"], "A:0": ["C:1"]}}'


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_download_is_not_reported_as_an_attack(tmp_path, share):
    torch.save({"linear.weight": torch.ones(1, 200), "linear.bias": torch.ones(1)}, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(whole[: int(len(whole) * share)])
    for read in (load_state_dict, load_bank):
        with pytest.raises(
            ImportRefused, match=r"x\.pt is cut short or damaged: a zip without its end: fetch it again"
        ):
            read(tmp_path / "x.pt")


OTHERS = {
    "probes.npz": (
        lambda path: np.savez(path, a=np.ones(3)),
        r"is arrays of NumPy \(\.npz\): probemon import safe",
    ),
    "probes.npy": (lambda path: np.save(path, np.ones(3)), r"is an array of NumPy \(\.npy\): save it by numpy\.savez"),
    "probes.pt": (
        lambda path: torch.save({"a": torch.ones(3)}, path),
        r"is a file of torch\.save \(\.pt\): .*lie-det",
    ),
    "probes.gguf": (
        lambda path: path.write_bytes(b"GGUF\x03\0\0\0" + bytes(64)),
        "is tensors of llama.cpp.*: probemon import repeng",
    ),
    "probes.h5": (
        lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)),
        "is HDF5: no importer reads it",
    ),
    "model.safetensors.index.json": (
        lambda path: path.write_text('{"weight_map": {}}'),
        "index of weights in several",
    ),
    "probes.bin": (lambda path: path.write_bytes(b"some other format" * 9), "give a file that safetensors"),
}


@pytest.mark.parametrize("named", [None, "as.safetensors"])
@pytest.mark.parametrize("name", OTHERS)
def test_file_of_another_kind_is_named_with_a_remedy(tmp_path, name, named):
    write, said = OTHERS[name]
    write(tmp_path / name)
    if named and not name.endswith(".json"):
        (tmp_path / name).rename(tmp_path / (name := named))
    with pytest.raises(ImportRefused, match=said):
        read_safetensors(tmp_path / name)
    if name.endswith(".safetensors"):
        with pytest.raises(ImportRefused, match="header too large" if said.startswith("give") else said):
            load_state_dict(tmp_path / name)


def test_empty_file_is_reported_as_empty(tmp_path):
    (tmp_path / "x.pt").touch()
    with pytest.raises(ImportRefused, match=r"x\.pt is empty: fetch it again"):
        load_state_dict(tmp_path / "x.pt")


def test_missing_path_is_reported(tmp_path):
    (tmp_path / "file").write_text("{}")
    for read in (load_state_dict, read_json):
        for name in ("typo.pt", "file/x.pt"):
            with pytest.raises(ImportRefused, match=f"{name} is not there: check the path$"):
                read(tmp_path / name)
        with pytest.raises(ImportRefused, match=r"is not a file, but a folder: check the path$"):
            read(tmp_path)


def test_duplicate_json_key_is_refused_with_file_and_key(tmp_path):
    words = "'A:0' appears twice in one object, and only the last would be read: put the two together"
    path = tmp_path / "hierarchy.json"
    path.write_text(TWICE)
    for read in (lambda: Folder(tmp_path).json("hierarchy.json"), lambda: read_json(path)):
        with pytest.raises(ImportRefused, match=rf"hierarchy\.json: {words}"):
            read()
    with pytest.raises(ImportRefused, match=f"^the mapping: {words}"):
        parse_json(TWICE, "the mapping")
    with pytest.raises(ConfigError, match=rf"hierarchy\.json: {words}"):
        read_object(path)


def test_every_json_file_of_a_pack_refuses_duplicate_keys(tmp_path):
    (tmp_path / "theirs/layer0").mkdir(parents=True)
    torch.save({"linear.weight": torch.ones(1, 8), "linear.bias": torch.ones(1)}, tmp_path / "theirs/layer0/A.pt")
    for name in (
        "hierarchy.json",
        "layer0.json",
        "bank_index.json",
        "calibration.json",
        "pack_info.json",
        "lens_pack.json",
        "pack.json",
    ):
        (tmp_path / "theirs" / name).write_text('{"concepts": [], "x": {"a": 1, "b": 2, "a": 1}}')
        with pytest.raises(ImportRefused, match=f"{name}: 'a' appears twice"):
            import_pack(tmp_path / "theirs", tmp_path / "ours", site="resid_post.1", normalize="none")
        (tmp_path / "theirs" / name).unlink()


def test_duplicate_probe_names_are_refused(tmp_path):
    from probemon.lab.importers.generic import import_safetensors
    from probemon.lab.importers.probekit import import_file

    one = json.dumps({"weights": [1.0, 2.0], "bias": 0.5})
    (tmp_path / "probes.json").write_text(f'{{"a": {one}, "a": {one}}}')
    with pytest.raises(ImportRefused, match=r"probes\.json: 'a' appears twice"):
        import_file(tmp_path / "probes.json", tmp_path / "ours", site="resid_post.1", normalize="none")
    save_file({"w": torch.ones(4)}, tmp_path / "w.safetensors")
    (tmp_path / "mapping.json").write_text(
        '{"site": "resid_post.1", "normalize": "none", "probes": {"a": {"weight": "w"}, "a": {"weight": "w"}}}'
    )
    with pytest.raises(ImportRefused, match=r"mapping\.json: 'a' appears twice"):
        import_safetensors(tmp_path / "w.safetensors", tmp_path / "ours", mapping=tmp_path / "mapping.json")


def test_equal_keys_in_different_objects_and_special_values_are_read():
    text = '{"a": {"a": [{"a": NaN}, {"a": 1e400}, {}]}, "b": "\\u00e9\\ud83d\\ude00"}'
    found = loads(text)
    assert (
        found["a"]["a"][1:] == [{"a": float("inf")}, {}]
        and found["b"] == "é😀"
        and found["a"]["a"][0]["a"] != found["a"]["a"][0]["a"]
    )
    assert loads(text, constant=lambda _: None)["a"]["a"][0] == {"a": None}
    with pytest.raises(ValueError, match="surrogates"):
        loads('{"\\ud800": 1}')


def test_infinity_in_json_is_refused_instead_of_read_as_missing(tmp_path):
    """An infinite normalisation read as none would change every score."""
    from probemon.lab.importers.probekit import import_file

    (tmp_path / "p.json").write_text('{"a": {"weights": [1.0, 2.0], "bias": 0.0, "normalization": Infinity}}')
    with pytest.raises(ImportRefused, match="Infinity is not a JSON number: put a number there, or null"):
        import_file(tmp_path / "p.json", tmp_path / "pack", site="resid_post.0", normalize="none")
    assert not (tmp_path / "pack").exists()

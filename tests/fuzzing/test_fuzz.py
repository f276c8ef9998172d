"""Broken input ends in a typed error or a correct pack; the fuzzer's findings and its ability to detect faults."""

import importlib
import json
import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzz
from conftest import HIDDEN
from forging import forge
from fuzzing import changes, independent, targets, torchfile
from fuzzing.case import Room
from fuzzing.mutate import Link, write_tree
from fuzzing.targets import TARGETS, Target
from probemon import DynamicProbeManager, ProbePack, errors
from probemon.cli.packs import read_object
from probemon.core.reference import exhaustive_reference
from probemon.errors import ConfigError, HierarchyError, ImportRefused, PackCorrupt, PackError
from probemon.lab.importers.weights import Folder, load_plain
from probemon.packs.concept_lines import read_concepts
from probemon.packs.edit import rename
from probemon.packs.files import MAX_CARD_BYTES
from probemon.packs.manifest import MAX_CONCEPTS_BYTES, MAX_MANIFEST_BYTES, read_manifest
from probemon.util.files import sha256

RESULT = Path(__file__).parents[2] / "docs" / "benchmarks" / "fuzz.json"
# A sample: scripts/benchmarks/fuzz.py runs as many as are wanted (docs/benchmarks/fuzz.json: what was run).
LATER = {"lie-detectors", "repeng"}  # newer than the result file, until it is renewed
EXAMPLES = {"manifest": 100, "concepts": 60, "tensors": 100, "pack": 100, "torch": 100, "opened": 12, "used": 8}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return Room(tmp_path_factory.mktemp("fuzz") / "room")


@pytest.mark.parametrize("target", TARGETS)
def test_broken_input_ends_in_a_typed_error_or_a_correct_pack(room, target):
    valid = room.seeds(target)

    @settings(
        max_examples=EXAMPLES.get(target, 20),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(valid), st.integers(0, 2**64 - 1))
    def check(tree, seed):
        rng = Random(seed)
        verdict = room.run(target, room.mutate(target, tree, rng), rng)
        assert verdict.trouble is None, verdict

    check()


@settings(max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["manifest", "hierarchy", "probekit"]),
    keys=st.lists(st.text(), max_size=3),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    ),
)
def test_any_json_value_anywhere_is_a_typed_error_or_correct(room, name, keys, value):
    tree = dict(room.seeds(name)[0])
    file = next(iter(tree))
    content = json.loads(tree[file])
    for place in [*keys, *list(content)[: len(keys)]]:
        content[place] = value
    tree[file] = json.dumps(content).encode()
    verdict = room.run(name, tree, Random(0))
    assert verdict.trouble is None, verdict


@settings(max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.sampled_from(["manifest", "concepts", "tensors", "torch"]), st.booleans())
def test_any_bytes_are_a_typed_error_or_correct(room, data, name, in_pickle):
    tree = dict(room.seeds(name)[0])
    file = next(iter(tree))
    tree[file] = torchfile.with_pickle(tree[file], data) if name == "torch" and in_pickle else data
    verdict = room.run(name, tree, Random(0))
    assert verdict.trouble is None, verdict


# -- that it would notice ------------------------------------------------------------------------


def untyped(call):
    return {}["no such key"]


def starved(call):
    try:
        raise MemoryError
    except MemoryError as error:
        raise ImportRefused("cannot be read") from error


def runs_a_program(call):
    subprocess.run(["true"], check=True)


def runs_code_of_the_file(call):
    exec((call.source / "x").read_text())


def reads_outside(call):
    (call.source / "../outside/x").read_text()


def writes_beside(call):
    (call.source / "new").write_text("x")


def imports_what_the_input_names(call):
    __import__("antigravity_of_the_input")


def leaves_half_a_pack(call):
    call.out.mkdir()
    raise ImportRefused("no more")


def leaves_a_temporary_folder(call):
    (call.out.parent / ".pack-x").mkdir()
    raise ImportRefused("no more")


@pytest.mark.parametrize(
    "run, told",
    [
        (untyped, "untyped"),
        (starved, "memory"),
        (runs_a_program, "subprocess.Popen"),
        (runs_code_of_the_file, "runs code"),
        (reads_outside, "to read"),
        (writes_beside, "to write"),
        (imports_what_the_input_names, "imports antigravity_of_the_input"),
        (leaves_half_a_pack, "left behind"),
        (leaves_a_temporary_folder, "left behind"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fuzzer_detects_every_kind_of_trouble(room, monkeypatch, run, told):
    room.seeds("manifest")
    monkeypatch.setitem(TARGETS, "bad", Target(lambda folder: [], run, lambda made, call: None, writes=True))
    (room.folder / "outside" / "x").write_text("")
    verdict = room.run("bad", {"x": b"y = 1"}, Random(0))
    assert verdict.trouble is not None and told in verdict.trouble


def test_fuzzer_detects_a_changed_older_pack(room, monkeypatch):
    def spoil(call):
        (call.out / "README.md").write_text("spoiled")
        raise ImportRefused("no more")

    monkeypatch.setitem(TARGETS, "bad", Target(lambda folder: [], spoil, lambda made, call: None, writes=True))
    rng = Random(next(seed for seed in range(99) if Random(seed).random() < 0.3))  # over an older pack
    assert room.run("bad", {}, rng).trouble == "the older pack was changed"


def test_fuzzer_detects_wrong_scores(room, monkeypatch):
    from probemon.lab.importers import flat

    tree, real = room.seeds("steerkit")[0], flat.stack
    monkeypatch.setattr(
        flat,
        "stack",
        lambda *given: {name: tensor * 1.01 if name == "b1" else tensor for name, tensor in real(*given).items()},
    )
    verdict = room.run("steerkit", tree, Random(0))
    assert verdict.trouble is not None and verdict.trouble.startswith("wrong: 'refusal'")


def test_fuzzer_detects_a_followed_link(room, monkeypatch):
    from probemon.packs import held_file as heldfile

    room.seeds("pack")
    monkeypatch.setattr(heldfile, "inside", lambda path: path)
    tree = {**room.seeds("pack")[-1], "probes.safetensors": Link("../outside/probes.safetensors")}
    verdict = room.run("pack", tree, Random(3))
    assert verdict.outcome == "made" and "outside" in verdict.trouble


@pytest.mark.parametrize(
    "target, place, name, value, told",
    [
        (
            "opened",
            "held_file.HeldFolder",
            "unchanged",
            lambda folder: True,
            "wrong: a mixture",
        ),  # a pack is opened file by file
        (
            "used",
            "held_file.HeldFile",
            "check",
            lambda file: None,
            "scores are others",
        ),  # nobody looks whether a file was written to
    ],
)
def test_fuzzer_detects_a_pack_changed_while_read(room, monkeypatch, target, place, name, value, told):
    tree = room.seeds(target)[0]
    monkeypatch.delitem(changes.CHANGES, "cut")  # without the check these would end this process
    monkeypatch.delitem(changes.CHANGES, "halve")
    module, _, owner = place.partition(".")
    monkeypatch.setattr(getattr(importlib.import_module(f"probemon.packs.{module}"), owner), name, value)
    assert any(told in (room.run(target, tree, Random(seed)).trouble or "") for seed in range(300))


def test_independent_evaluation_detects_a_wrong_weight(room):
    tree = room.seeds("pack")[0]
    write_tree(tree, room.folder / "source")
    pack = ProbePack.open(room.folder / "flat")
    nets = independent.pack_file(room.folder / "flat")
    targets.compare(pack, nets)
    weight, bias = nets["c3"][0].layers[0]
    nets["c3"][0].layers[0] = (weight, bias + 1e-4)
    with pytest.raises(targets.Wrong, match="'c3'"):
        targets.compare(pack, nets)


def test_cases_of_one_seed_are_the_same_every_time(room, monkeypatch):
    monkeypatch.setattr(fuzz, "_room", [room])
    monkeypatch.setattr(fuzz, "_begin_bytes", [0])
    first, second = (fuzz.run_chunk("tensors", 0, 60, 5) for _ in range(2))
    assert (
        first["outcomes"] == second["outcomes"]
        and sum(first["outcomes"].values()) == 60
        and first["kept"] == second["kept"] > 0
    )
    assert (
        fuzz.run_chunk("tensors", 1, 60, 5)["edges"] != first["edges"]
        or fuzz.run_chunk("tensors", 1, 60, 5)["outcomes"] != first["outcomes"]
    )


def test_planned_chunks_cover_all_requested_cases():
    chunks = fuzz.plan(list(TARGETS), 100_000, 0)
    assert 100_000 <= sum(chunk[2] for chunk in chunks) < 100_000 + len(TARGETS)
    assert {chunk[0] for chunk in chunks} == set(TARGETS) == set(fuzz.SHARES) and len(
        {chunk[:2] for chunk in chunks}
    ) == len(chunks)


# -- what it found -------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["manifest.json", "concepts.jsonl", "probes.safetensors", "README.md"])
@pytest.mark.parametrize("pinned", [False, True])
def test_pack_file_linking_outside_the_pack_is_refused(pack, tmp_path, file, pinned):
    target = shutil.copytree(pack.directory, tmp_path / "pack")
    digest = sha256(target / "manifest.json")
    shutil.move(target / file, tmp_path / file)
    (target / file).symlink_to(tmp_path / file)
    with pytest.raises(PackCorrupt, match=rf"{file} is a link that leads out of the pack"):
        ProbePack.from_pretrained(str(target), manifest_sha256=digest if pinned else None)


def test_unlisted_card_cannot_link_to_another_file(pack, tmp_path):
    target = shutil.copytree(pack.directory, tmp_path / "pack")
    manifest = json.loads((target / "manifest.json").read_text())
    del manifest["files"]["README.md"]
    (target / "manifest.json").write_text(json.dumps(manifest))
    (target / "README.md").unlink()
    (tmp_path / "key").write_text("secret")
    (target / "README.md").symlink_to("../key")
    with pytest.raises(PackCorrupt, match="leads out"):
        rename(ProbePack.open(target), tmp_path / "new", name="new")


def test_links_within_a_pack_or_into_the_hub_cache_are_accepted(pack, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(pack.directory.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert ProbePack.open(snapshot, verify=True).n_probes == pack.n_probes
    (tmp_path / "link").symlink_to(snapshot)  # what a user names may be a link itself
    assert ProbePack.open(tmp_path / "link").n_probes == pack.n_probes
    shutil.copytree(pack.directory, tmp_path / "inner")
    (tmp_path / "inner" / "README.md").rename(tmp_path / "inner" / "CARD.md")
    (tmp_path / "inner" / "README.md").symlink_to("CARD.md")
    assert ProbePack.open(tmp_path / "inner").n_probes == pack.n_probes


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 2000 + "1" + "}" * 2000, '{"a": ' + "1" * 5000 + "}"], ids=lambda text: text[:5]
)
def test_json_that_python_cannot_read_is_reported(tmp_path, text):
    path = tmp_path / "text"
    path.write_text(text)
    with pytest.raises(PackCorrupt, match="not valid JSON"):
        read_manifest(path)
    with pytest.raises(PackCorrupt, match="line 1 is not valid JSON"):
        read_concepts(path)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_object(path)


@pytest.mark.parametrize(
    "file, most",
    [("manifest.json", MAX_MANIFEST_BYTES), ("concepts.jsonl", MAX_CONCEPTS_BYTES), ("README.md", MAX_CARD_BYTES)],
)
def test_oversized_file_is_refused_before_it_is_read(pack, tmp_path, file, most):
    target = shutil.copytree(pack.directory, tmp_path / "pack")
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"][file] = {"sha256": "", "size": most + 1}
    (target / "manifest.json").write_text(json.dumps(manifest))
    os.truncate(target / file, most + 1)  # holes: the disk has little of it
    tracemalloc.start()
    with pytest.raises(PackCorrupt, match=rf"{file} has {most + 1:,} bytes"):
        ProbePack.open(target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_oversized_tree_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "tree.json").touch()
    os.truncate(tmp_path / "tree.json", (64 << 20) + 1)
    with pytest.raises(ConfigError, match="at most 67,108,864 are read"):
        read_object(tmp_path / "tree.json")


@pytest.mark.parametrize("level", [-1, 2**15, 2**40, 2**63 - 1])
def test_invalid_levels_are_refused_without_allocating_for_them(pack, tmp_path, level):
    def change(tensors):
        tensors["level"][-1 if level > 0 else 0] = level

    with pytest.raises(HierarchyError, match=rf"levels must lie in 0\.\.32767, found .*{level}"):
        ProbePack.open(forge(pack, tmp_path / "forged", change))


def test_card_with_invalid_utf8_is_kept_with_replacements(pack, tmp_path):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    (target / "README.md").write_bytes(b"# \xff ours\n")
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["README.md"] = {"sha256": sha256(target / "README.md"), "size": 9}
    (target / "manifest.json").write_text(json.dumps(manifest))
    made = rename(ProbePack.open(target), tmp_path / "new", name="new")
    assert "# \ufffd ours" in (made.directory / "README.md").read_text()


@pytest.mark.parametrize("eps", [10**30, 10**400, 1e39])
def test_eps_must_be_representable_in_fp32(pack, tmp_path, eps):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["inputs"][0]["eps"] = eps
    (target / "manifest.json").write_text(json.dumps(manifest))
    if eps > 1e38:
        with pytest.raises(PackError, match="expected a small number"):
            ProbePack.open(target)
    else:
        scores = DynamicProbeManager(ProbePack.open(target), load_threshold=-1.0).score_tokens(torch.randn(2, HIDDEN))
        assert np.isfinite(scores.values).all() and len(scores.values)


def test_golden_states_scored_in_blocks_give_the_same_scores(pack, monkeypatch):
    hidden = dict.fromkeys(pack.sites, torch.randn(3, HIDDEN))
    whole = exhaustive_reference(hidden, pack)
    monkeypatch.setattr("probemon.core.reference._BLOCK_BYTES", 3 * 4 * pack.architecture.parameters_per_probe())
    assert torch.equal(exhaustive_reference(hidden, pack), whole)


def test_exponentially_growing_card_metadata_is_refused(pack, tmp_path):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    lines = [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(12)]
    result = "{task: {type: a}, dataset: {name: *m, type: b}, metrics: [{type: c, value: *m}]}"
    text = "\n".join(
        ["---", "a: &a [x, x]", *lines, f"model-index: [{{name: x, results: [{result}]}}]", "---", "# ours", ""]
    )
    (target / "README.md").write_text(text)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["README.md"] = {"sha256": sha256(target / "README.md"), "size": len(text)}
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PackError, match="its metadata refers to itself"):
        ProbePack.open(target).save_pretrained(tmp_path / "copy")


@pytest.mark.parametrize(
    "name, pickled", torchfile.EXPLOITS, ids=[f"{i} {name}" for i, (name, _) in enumerate(torchfile.EXPLOITS)]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_pickle_that_would_run_code_is_refused_by_name(room, tmp_path, monkeypatch, name, pickled, wrapped):
    monkeypatch.chdir(tmp_path)
    data = torchfile.with_pickle(room.seeds("torch")[0]["x.pt"], pickled) if wrapped else pickled
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ImportRefused, match=name):
        load_plain(tmp_path / "x.pt")
    assert not (tmp_path / torchfile.MARKER).exists()


@pytest.mark.parametrize("number", range(len(torchfile.BOMBS)))
def test_exponentially_growing_pickle_is_refused(room, tmp_path, number):
    (tmp_path / "x.pt").write_bytes(torchfile.with_pickle(room.seeds("torch")[0]["x.pt"], torchfile.BOMBS[number]))
    tracemalloc.start()
    with pytest.raises(ImportRefused) as caught:
        load_plain(tmp_path / "x.pt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 << 20 and len(str(caught.value)) < 1000 and not isinstance(caught.value.__cause__, MemoryError)


def test_bare_storage_in_a_pickle_is_refused(room, tmp_path):
    (tmp_path / "x.pt").write_bytes(
        torchfile.with_pickle(room.seeds("torch")[0]["x.pt"], b"\x80\x02}X\x01\x00\x00\x00actorch\nFloatStorage\ns.")
    )
    with pytest.raises(ImportRefused, match="a part of a tensor by itself"):
        load_plain(tmp_path / "x.pt")


def test_names_that_a_file_system_refuses_are_refused(tmp_path):
    for name in ("x" * 300, "/".join(["x" * 200] * 30)):
        with pytest.raises(ImportRefused):
            Folder(tmp_path).inside(name)


def test_result_file_covers_every_target_without_a_crash():
    found = json.loads(RESULT.read_text())
    assert found["cases"] >= 100_000 and found["crashes"] == 0 and found["troubles"] == []
    assert (
        set(found["targets"]) | LATER == set(TARGETS)
        and sum(one["cases"] for one in found["targets"].values()) == found["cases"]
    )
    assert all(one["outcomes"].get("made", 0) > 20 and len(one["outcomes"]) > 1 for one in found["targets"].values())
    typed = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.ProbemonError)
    }
    assert set(found["outcomes"]) <= {"made", "made, not compared", *typed}

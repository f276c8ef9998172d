"""Packs with right hashes and wrong contents are refused by name, when opened or when a weight is first used."""

import json
from unittest import mock

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_pack
from forging import forge
from probemon import DynamicProbeManager, ProbePack
from probemon.errors import ConfigError, HierarchyError, PackCorrupt, PackError, ProbeLoadError
from probemon.packs import concept_lines, opened
from probemon.util.files import sha256


def cycle(tensors):
    # Probe 0's first child gets probe 0 as its only child.
    ptr, idx = tensors["child_ptr"].tolist(), tensors["child_idx"].tolist()
    child = idx[ptr[0]]
    before = idx[: ptr[child]]
    tensors["child_idx"] = torch.tensor([*before, 0, *idx[ptr[child] :]])
    tensors["child_ptr"] = torch.tensor([p + (i > child) for i, p in enumerate(ptr)])


def edge_to_nowhere(tensors):
    tensors["child_idx"][0] = 4000


def pointer_backwards(tensors):
    tensors["child_ptr"][3] = 10**6


def level_above_parent(tensors):
    tensors["level"][-1] = 0


def input_out_of_range(tensors):
    tensors["input"][3] = 7


def threshold_too_short(tensors):
    tensors["alert_threshold"] = tensors["alert_threshold"][:-1]


def other_width(tensors):
    tensors["w1"] = tensors["w1"][:, :, :-1]


def no_bias(tensors):
    del tensors["b1"]


def float_pointers(tensors):
    tensors["child_ptr"] = tensors["child_ptr"].to(torch.float32) + 0.5


def level_matrix(tensors):
    tensors["level"] = tensors["level"][:, None]


def integer_weights(tensors):
    tensors["w1"] = tensors["w1"].to(torch.int32)


def golden_of_another_width(tensors):
    tensors["golden_hidden"] = tensors["golden_hidden"][:, :, :-1]


def pointers_that_wrap_around(tensors):
    """Each difference is no less than 0 in 64 bits, and their sum is the number of edges: to repeat by them writes past
    the end of memory.
    """
    n, n_edges = len(tensors["level"]), len(tensors["child_idx"])
    tensors["child_ptr"] = torch.tensor([0, 1 << 62, -(1 << 63), -(1 << 62), *[n_edges] * (n - 3)])


def golden_states_without_scores(tensors):
    del tensors["golden_scores"]


def tensor_of_too_many_dimensions(tensors):
    tensors["golden_hidden"] = tensors["golden_hidden"].reshape(*[1] * 80, *tensors["golden_hidden"].shape)


def tensor_of_no_values_and_a_long_side(tensors):
    tensors["golden_hidden"] = torch.zeros(0, 1 << 62)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (pointers_that_wrap_around, HierarchyError, "child_ptr must rise"),
        (golden_states_without_scores, PackCorrupt, "golden states without their scores"),
        (tensor_of_too_many_dimensions, PackCorrupt, r"golden_hidden has shape \(1, 1, .* at most 8 dimensions under"),
        (tensor_of_no_values_and_a_long_side, PackCorrupt, r"golden_hidden has shape \(0, 4611686018427387904\)"),
        (cycle, HierarchyError, "cycle through probes"),
        (edge_to_nowhere, HierarchyError, r"child_idx must lie in 0\.\.39"),
        (pointer_backwards, HierarchyError, "child_ptr must rise"),
        (level_above_parent, PackError, "level"),
        (input_out_of_range, PackCorrupt, "input must index"),
        (threshold_too_short, PackCorrupt, "alert_threshold has shape"),
        (other_width, PackCorrupt, "reads 15 values"),
        (no_bias, PackCorrupt, "no tensor 'b1'"),
        (float_pointers, PackCorrupt, "child_ptr"),
        (level_matrix, PackCorrupt, "level"),
        (integer_weights, PackCorrupt, "w1"),
        (golden_of_another_width, PackCorrupt, "golden_hidden has shape"),
    ],
)
def test_wrong_contents_with_right_hashes_are_named(pack, tmp_path, change, error, words):
    with pytest.raises((error, HierarchyError), match=words) as caught:
        ProbePack.open(forge(pack, tmp_path / "forged", change))
    assert "probes.safetensors" in str(caught.value) or "concepts.jsonl" in str(caught.value)


def with_lines(pack, target, change):
    """A copy of a pack with other concepts, hashes made right again."""
    folder = forge(pack, target, lambda tensors: None)
    lines = [json.loads(line) for line in (folder / "concepts.jsonl").read_text().splitlines()]
    change(lines)
    (folder / "concepts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / "concepts.jsonl"
    manifest["files"]["concepts.jsonl"] = {"sha256": sha256(path), "size": path.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    "change, words",
    [
        ({"level": 9}, "line 13 .*level 9 and parents"),
        ({"parents": ["c0", "c1", "c2"]}, "line 13 .*differ from probes.safetensors"),
        ({"name": 7}, "line 13: name is not of the right kind"),
        ({"id": "a\x1b[2J"}, "line 13: id is .*control characters"),
    ],
)
def test_concept_line_is_checked_at_opening_or_in_large_packs_when_read(pack, tmp_path, monkeypatch, change, words):
    folder = with_lines(pack, tmp_path / "forged", lambda lines: lines[12].update(change))
    with pytest.raises(PackCorrupt, match=words):
        ProbePack.open(folder)
    monkeypatch.setattr(concept_lines, "MOST_AT_ONCE", 10)
    forged = ProbePack.open(folder)
    hidden = torch.randn(6, HIDDEN)
    scores = DynamicProbeManager(forged).score_tokens(hidden)  # which need no line
    assert scores.values.tolist() == DynamicProbeManager(pack).score_tokens(hidden).values.tolist()
    assert forged.concepts[11] == pack.concepts[11] and forged.concepts[-1] == pack.concepts[-1]
    for ask in (lambda: forged.concepts[12], lambda: forged.find("c3"), forged.verify):
        with pytest.raises(PackCorrupt, match=words):
            ask()


def test_duplicate_ids_are_reported_at_opening_or_when_searched(pack, tmp_path, monkeypatch):
    folder = with_lines(pack, tmp_path / "forged", lambda lines: lines[-1].update(id="c0"))
    with pytest.raises(PackCorrupt, match="id 'c0' appears twice"):
        ProbePack.open(folder)
    monkeypatch.setattr(concept_lines, "MOST_AT_ONCE", 10)
    forged = ProbePack.open(folder)
    with pytest.raises(PackCorrupt, match="an id of random occurs twice"):
        forged.find("c0")
    with pytest.raises(PackCorrupt, match="id 'c0' appears twice"):
        forged.verify()


def test_lazily_read_concepts_equal_a_list(pack, monkeypatch):
    monkeypatch.setattr(concept_lines, "MOST_AT_ONCE", 10)
    parsed = mock.Mock(side_effect=concept_lines.loads)
    monkeypatch.setattr(concept_lines, "loads", parsed)
    many = ProbePack.open(pack.directory)
    DynamicProbeManager(many).score_tokens(torch.randn(6, HIDDEN))
    assert not parsed.called and len(many.concepts) == many.n_probes
    assert many.find(7) == 7 and many.path(3) == pack.path(3) and parsed.call_count <= 7
    assert many.find(pack.concepts[20]["id"]) == 20 and parsed.call_count == many.n_probes
    assert many.concepts == pack.concepts and many.concepts[3:6] == list(pack.concepts)[3:6]
    with pytest.raises(IndexError):
        many.concepts[many.n_probes]
    assert ProbePack.open(pack.directory, verify=True).golden_error is not None


@pytest.mark.parametrize("arena_bytes", [None, 6000])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_weight_is_an_error_when_first_used(pack, tmp_path, value, arena_bytes):
    def change(tensors):
        tensors["w1"][11, 2, 3] = value

    forged = ProbePack.open(forge(pack, tmp_path / "forged", change))  # opening touches no weight
    with pytest.raises(ProbeLoadError, match=r"w1 of concept 'c\d+' \(probe 11\) is not finite"):
        manager = DynamicProbeManager(forged, arena_bytes=arena_bytes, strategy="descent", load_threshold=-1.0)
        manager.score_tokens(torch.randn(3, HIDDEN))
    with pytest.raises(PackCorrupt, match=r"probe 11\) is not finite"):
        ProbePack.open(forged.directory, verify=True)


def test_large_finite_weights_are_not_mistaken_for_infinite(pack, tmp_path):
    def change(tensors):
        tensors["w1"][11] = 3e38  # each is finite, their sum is not

    forged = ProbePack.open(forge(pack, tmp_path / "forged", change))
    forged.check_finite()


@pytest.mark.parametrize("small", [0, 1 << 30])
def test_mapped_and_copied_weights_are_checked_alike(pack, tmp_path, monkeypatch, small):
    monkeypatch.setattr(opened, "_SMALL_BYTES", small)
    monkeypatch.setattr(opened, "_FINITE_BYTES", 3 * 4 * pack.weights["w1"][0].numel())  # three probes a piece
    one, all_at_once = ProbePack.open(pack.directory), ProbePack.open(pack.directory)
    wanted = np.array([30, 3, 4, 5, 6, 7, 11, 3, 20])
    all_at_once.check_finite(wanted)
    for probe in np.unique(wanted).tolist():
        one.check_rows({name: tensor[probe : probe + 1] for name, tensor in pack.weights.items()}, probe)
    assert np.array_equal(all_at_once.input_limit, one.input_limit, equal_nan=True)

    def change(tensors):
        tensors["w1"][[11, 30], 2, 3] = float("nan")

    forged = ProbePack.open(forge(pack, tmp_path / "forged", change))
    forged.check_finite(np.array([3, 4, 20]))
    with pytest.raises(PackCorrupt, match=r"probe 11\) is not finite"):
        forged.check_finite(wanted)


def test_truncation_inside_the_header_is_named(pack, tmp_path):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    path = target / "probes.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["probes.safetensors"] = {"sha256": sha256(path), "size": 20}
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PackCorrupt, match="cannot be read as safetensors"):
        ProbePack.open(target)


def test_unicode_line_breaks_in_a_definition_are_kept(model, tmp_path):
    concepts = [
        {"id": f"c{i}", "name": f"n{i}", "parents": [], "definition": "a\u2028b\u0085c\u000bd"} for i in range(40)
    ]
    written = make_pack(tmp_path / "p", model, concepts=concepts)
    assert written.concepts[7]["definition"] == "a\u2028b\u0085c\u000bd"


@pytest.mark.parametrize(
    "changes",
    [
        {"recommended": 5},
        {"recommended": [1]},
        {"quality": "good"},
        {"inputs": [{"site": 5}]},
        {"inputs": [{"site": "resid_post.1", "eps": "a"}]},
        {"inputs": [{"site": "resid_post.1", "eps": -5}]},
        {"inputs": [{"site": "resid_post.1", "eps": float("nan")}]},
        {"inputs": [{"norm": "none"}]},
        {"files": {"x" * 5000: {"sha256": "0", "size": 1}}},
        {"files": {"README.md": 5}},
        {"host": {"hidden_size": []}},
    ],
    ids=str,
)
def test_forged_manifest_is_one_error_that_names_the_pack(pack, tmp_path, changes):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(PackError):
        ProbePack.open(target)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "", "{", "[]", "\ufeff{}", '{"format_version": ' + "1" * 5000 + "}"], ids=lambda t: t[:5]
)
def test_text_that_is_not_a_manifest_is_one_error(pack, tmp_path, text):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    (target / "manifest.json").write_text(text)
    with pytest.raises(PackError):
        ProbePack.open(target)


@pytest.mark.parametrize(
    "change", [{"id": 5}, {"name": ["a"]}, {"name": None}, {"parents": None}, {"parents": [5]}, {"level": "0"}], ids=str
)
def test_forged_concept_is_named_by_its_line(pack, tmp_path, change):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    lines = (target / "concepts.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | change)
    (target / "concepts.jsonl").write_text("\n".join(lines) + "\n")
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["concepts.jsonl"]["size"] = (target / "concepts.jsonl").stat().st_size
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PackCorrupt, match="line 3"):
        ProbePack.open(target)


def test_unusable_recommendation_is_named(pack, tmp_path):
    target = forge(pack, tmp_path / "forged", lambda tensors: None)
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | {"recommended": {"load_threshold": {}}}))
    with pytest.raises(ConfigError, match="load_threshold"):
        DynamicProbeManager(ProbePack.open(target))


@pytest.mark.parametrize(
    "edit, told",
    [
        (lambda manifest: manifest.update(score_rule="independent"), True),
        (lambda manifest: manifest["inputs"][0].update(norm="none"), True),
        (lambda manifest: manifest["inputs"][0].update(site="resid_post.2"), False),
    ],
    ids=["score rule", "norm", "site"],
)
def test_hand_edited_manifest_is_detected_only_by_verify(edit, told, tmp_path, model):
    norm = [{"site": "resid_post.1", "norm": "rmsnorm"}]
    pack = make_pack(tmp_path / "pack", model, inputs=norm, golden_hidden=3 * torch.randn(4, 1, HIDDEN))
    path = pack.directory / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    ProbePack.open(pack.directory)
    if told:
        with pytest.raises(PackCorrupt, match="golden replay"):
            ProbePack.open(pack.directory, verify=True)
    else:
        ProbePack.open(pack.directory, verify=True)

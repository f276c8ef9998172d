"""HatCat packs are imported with equal scores and every concept, without executing their files."""

import contextlib
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

import hatcat_packs as theirs
from hatcat_packs import KEYS, TREE, modules
from probemon import DynamicProbeManager, ProbePack
from probemon.core.reference import exhaustive_reference
from probemon.errors import ConfigError, HierarchyError, ImportRefused, PackError
from probemon.lab.importers.hatcat import import_pack
from probemon.lab.importers.weights import Folder, load_bank, load_state_dict

D = 24
VARIANTS = {
    "plain": ("plain",),
    "LayerNorm": ("LayerNorm",),
    "linear": ("linear",),
    "mixed": ("plain", "LayerNorm", "linear"),
}


def states(scale=1.0):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, D, generator=generator) * scale + torch.linspace(-0.5, 1, D)


def bring(folder, target, normalize="none", **options):
    return import_pack(folder, target, site="resid_post.1", normalize=normalize, **options)


def scores(pack, hidden):
    return exhaustive_reference({"resid_post.1": hidden}, pack)


def error(pack, probes, hidden, normalize):
    """Largest difference of a score from that of the module that was saved, in fp64."""
    ours = scores(pack, hidden)
    return max(
        float((ours[:, pack.find(key)] - theirs.expected(made, hidden, normalize)).abs().max())
        for key, made in probes.items()
    )


GENERATIONS = {
    "layered": lambda folder, probes: theirs.write_layered(folder, probes),
    "layered, _classifier": lambda folder, probes: theirs.write_layered(folder, probes, suffix="_classifier"),
    "layered, bare names": lambda folder, probes: theirs.write_layered(folder, probes, suffix="_classifier", bare=True),
    "banked": lambda folder, probes: theirs.write_banked(folder, probes),
    "flat": lambda folder, probes: theirs.write_flat(folder, probes),
    "flat, activation_lenses": lambda folder, probes: theirs.write_flat(
        folder, probes, place="activation_lenses", suffix=""
    ),
    "flat, the folder itself": lambda folder, probes: theirs.write_flat(folder, probes, place="."),
}


@pytest.mark.parametrize("tree", ["hierarchy.json", "layer files", "elsewhere"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_format_generation_keeps_scores_and_hierarchy(tmp_path, generation, tree):
    folder, probes = tmp_path / "theirs", modules(VARIANTS["mixed"], D)
    folder.mkdir()
    GENERATIONS[generation](folder, probes)
    told = tmp_path / "concepts" if tree == "elsewhere" else folder
    (theirs.write_layer_files if tree == "layer files" else theirs.write_hierarchy)(told)
    pack, report = bring(folder, tmp_path / "ours", **({"hierarchy": told} if tree == "elsewhere" else {}))
    assert error(pack, probes, states(), "none") < 1e-6
    assert [c["id"] for c in pack.concepts if c["level"] == 0] == ["Abstract:0", "Entity:0"] and pack.n_probes == len(
        KEYS
    )
    for i, concept in enumerate(pack.concepts):
        children = {pack.concepts[child]["id"] for child in pack.tree.children(i).tolist()}
        assert (
            children == set(TREE.get(concept["id"], []))
            and concept["name"] == theirs.split(concept["id"])[0]
            and concept["level"] == theirs.split(concept["id"])[1]
        )
        assert concept.get("definition") == (f"what {concept['name']} is" if tree == "layer files" else None)
    assert [note.kind for note in report.notes] == ["several_parents"] and report.note("several_parents").count == 1
    assert report.note("several_parents").examples[0] in (
        "Process:1 under Entity:0, Abstract:0",
        "Process:1 under Abstract:0, Entity:0",
    )
    assert report.counts["probes"] == len(KEYS) and report.counts["edges"] == sum(map(len, TREE.values()))
    assert ProbePack.open(pack.directory, verify=True).n_probes == len(KEYS)


@pytest.mark.parametrize("normalize", ["none", "layernorm"])
@pytest.mark.parametrize("variants", VARIANTS)
def test_fp32_scores_equal_the_saved_modules(tmp_path, variants, normalize):
    probes = modules(VARIANTS[variants], D)
    theirs.write_layered(tmp_path / "theirs", probes)
    theirs.write_hierarchy(tmp_path / "theirs")
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours", normalize)
    assert pack.dtype == torch.float32 and str(pack.architecture) == ("linear" if variants == "linear" else "7-5-1")
    for scale in (1.0, 20.0, 1e-3) if normalize == "layernorm" else (1.0, 3.0):
        assert error(pack, probes, states(scale), normalize) < 1e-6
    expected = {"plain": ["none"], "linear": ["none"], "LayerNorm": ["layernorm"], "mixed": ["none", "layernorm"]}[
        variants
    ]
    assert [spec.norm for spec in pack.inputs] == (expected if normalize == "none" else ["layernorm"] * len(expected))
    assert pack.manifest["quality"]["import"]["max_score_error"] < 1e-6


@pytest.mark.parametrize("normalize", ["none", "layernorm"])
@pytest.mark.parametrize("variants", VARIANTS)
def test_bf16_stays_bf16_and_scores_as_the_rounded_state(tmp_path, variants, normalize):
    probes = modules(VARIANTS[variants], D, torch.bfloat16)
    theirs.write_layered(tmp_path / "theirs", probes)
    theirs.write_hierarchy(tmp_path / "theirs")
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours", normalize)
    assert pack.dtype == torch.bfloat16
    hidden = states()
    x = torch.nn.functional.layer_norm(hidden, (D,), eps=1e-5) if normalize == "layernorm" else hidden
    rounded = x.to(torch.bfloat16).float()
    for key, made in probes.items():
        ours = scores(pack, hidden)[:, pack.find(key)]
        if isinstance(made, theirs.Linear) or isinstance(made.net[0], torch.nn.Linear):
            # Weights are the file's bit for bit: only the input is rounded, as packs do.
            assert (ours - theirs.expected(made, rounded, "none")).abs().max() < 1e-6
        assert (ours - theirs.expected(made, hidden, normalize)).abs().max() < 0.01
    worst = pack.manifest["quality"]["import"]["max_score_error"]
    assert 0 < worst < 0.01 and f"within {worst:.2g}" in (pack.directory / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unfolded_weights_are_kept_bit_identical(tmp_path, dtype):
    probes = modules(VARIANTS["plain"], D, dtype)
    theirs.write_layered(tmp_path / "theirs", probes)
    theirs.write_hierarchy(tmp_path / "theirs")
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours")
    for key, made in probes.items():
        i, state = pack.find(key), made.state_dict()
        for ours, name in (("w1", "net.0.weight"), ("w2", "net.3.weight"), ("b1", "net.0.bias"), ("b2", "net.3.bias")):
            assert torch.equal(pack.weights[ours][i], state[name].to(pack.weights[ours].dtype))
        assert torch.equal(pack.weights["w3"][i], state["net.6.weight"][0]) and pack.weights["w1"].dtype == dtype


def test_probes_of_several_widths_and_dtypes_go_into_one_pack_exactly(tmp_path):
    probes = {
        "A:0": theirs.module("plain", D, 0, widths=(7, 5)),
        "B:0": theirs.module("LayerNorm", D, 1, torch.bfloat16, widths=(3, 9)),
        "C:0": theirs.module("linear", D, 2, torch.float16),
        "D:0": theirs.module("plain", D, 3, torch.bfloat16, widths=(1, 1)),
    }
    theirs.write_layered(tmp_path / "theirs", probes)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert (
        str(pack.architecture) == "7-9-1"
        and pack.dtype == torch.float32
        and error(pack, probes, states(), "none") < 1e-6
    )
    assert {name: n for name, n in report.counts.items() if name.startswith("in ")} == {
        "in float32": 1,
        "in bfloat16": 2,
        "in float16": 1,
    }


def test_linear_probe_with_the_narrowest_perceptron_is_exact(tmp_path):
    probes = {"A:0": theirs.module("plain", D, 0, widths=(1, 1)), "B:0": theirs.module("linear", D, 1)}
    theirs.write_layered(tmp_path / "theirs", probes)
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours")
    assert str(pack.architecture) == "2-2-1" and error(pack, probes, states(), "none") < 1e-6


def test_nested_layernorm_is_folded_exactly_at_small_eps(tmp_path):
    """States so small that both eps count: a second LayerNorm taken for the first one would be far off."""
    probes = {"A:0": theirs.module("LayerNorm", D, 4)}
    theirs.write_layered(tmp_path / "theirs", probes)
    hidden = torch.randn(6, D, generator=torch.Generator().manual_seed(0)) * 3e-3
    x = torch.nn.functional.layer_norm(hidden.double(), (D,), eps=1e-5)
    assert x.var() < 0.6  # eps counts
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours", "layernorm")
    assert error(pack, probes, hidden, "layernorm") < 1e-6
    once, _ = bring(tmp_path / "theirs", tmp_path / "once", "none")
    assert error(once, probes, hidden, "layernorm") > 0.01


def test_site_and_normalisation_must_be_given_and_are_kept(tmp_path):
    theirs.write_layered(tmp_path / "theirs", modules(["plain"], D))
    theirs.write_hierarchy(tmp_path / "theirs")
    theirs.write_json(
        tmp_path / "theirs/pack_info.json",
        {"source_pack": "first", "model": "org/model", "hidden_dim": D, "training_config": {"seed": 1}},
    )
    with pytest.raises(TypeError, match="site"):
        import_pack(tmp_path / "theirs", tmp_path / "ours", normalize="none")
    with pytest.raises(ConfigError, match="say whether states are standardised"):
        import_pack(tmp_path / "theirs", tmp_path / "ours", site="resid_post.1", normalize="")
    with pytest.raises(ConfigError, match="layer 7"):
        import_pack(tmp_path / "theirs", tmp_path / "ours", site="layer 7", normalize="none")
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours", "layernorm", licence="MIT")
    kept = pack.manifest["provenance"]
    assert kept["import"] == json.loads(json.dumps(report.as_dict())) and kept["import"]["stated"] == {
        "site": "resid_post.1",
        "normalize": "layernorm",
        "eps": 1e-5,
    }
    assert kept["source"] == {"source_pack": "first", "model": "org/model", "training_config": {"seed": 1}}
    assert (
        pack.manifest["host"]["model_id"] == "org/model"
        and pack.manifest["licence"] == "MIT"
        and pack.score_rule == "independent"
    )
    card = (pack.directory / "README.md").read_text()
    assert (
        "not in its files, said at import: site resid_post.1, normalize layernorm" in card
        and str(report).splitlines()[-1] in card
    )


# -- the hierarchy -------------------------------------------------------------------------------


def write(folder, tree, probes=(), **changes):
    """Linear probes for some concepts, and a hierarchy."""
    theirs.write_layered(folder, modules(["linear"], D, keys=sorted(probes)))
    theirs.write_hierarchy(folder, tree, **changes)


def parents(pack):
    return {concept["id"]: set(concept["parents"]) for concept in pack.concepts}


def test_unreachable_probes_are_reported_everywhere(tmp_path):
    write(
        tmp_path / "theirs",
        {"Root:0": ["Child:1"], "Lost:2": ["Deep:3"]},
        ["Root:0", "Child:1", "Lost:2", "Deep:3", "Nowhere:1"],
    )
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    note = report.note("unreachable")
    assert note.count == 3 and note.examples == ("Nowhere:1", "Lost:2", "Deep:3")
    assert report.note("unlisted").examples == ("Nowhere:1",)
    assert {c["id"] for c in pack.concepts if c.get("reachable") is False} == {"Nowhere:1", "Lost:2", "Deep:3"}
    assert pack.manifest["provenance"]["import"]["notes"]["unreachable"]["count"] == 3
    card = (pack.directory / "README.md").read_text()
    assert "3 of the concepts have no path from the base level" in card
    manager = DynamicProbeManager(pack, impl="reference", strategy="descent", load_threshold=-1.0)
    coverage = manager.score_tokens(states()).coverage
    assert (coverage.active == 2).all() and (coverage.not_reached == 3).all()
    example = card.split("```python")[1].split("```")[0]
    told = {
        "pack": pack,
        "DynamicProbeManager": lambda pack, **settings: DynamicProbeManager(
            pack, impl="reference", strategy="descent", load_threshold=-1.0, **settings
        ),
    }
    exec(example, told)  # what the card says to do reaches all of them
    assert (told["manager"].score_tokens(states()).coverage.not_reached == 0).all() and sorted(told["orphans"]) == [
        "Lost:2",
        "Nowhere:1",
    ]


def test_pack_without_level_0_starts_at_its_first_level(tmp_path):
    write(tmp_path / "theirs", TREE, [key for key in KEYS if not key.endswith(":0")])
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert pack.recommended["base_layers"] == [1] and report.note("unreachable") is None
    assert (
        DynamicProbeManager(pack, impl="reference", load_threshold=-1.0).score_tokens(states()).coverage.not_reached
        == 0
    ).all()


def test_children_of_a_missing_probe_move_to_the_nearest_ancestor(tmp_path):
    write(tmp_path / "theirs", TREE, ["Entity:0", "Abstract:0", "WhiteLie:3"])
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert parents(pack) == {"Entity:0": set(), "Abstract:0": set(), "WhiteLie:3": {"Entity:0", "Abstract:0"}}
    assert report.note("bridged").examples == ("WhiteLie:3 under Entity:0, Abstract:0",)
    assert report.note("missing").count == len(KEYS) - 3 and report.note("missing").examples[0] == "Idea:1"


def test_a_cycle_is_an_error_that_shows_it_and_may_be_broken(tmp_path):
    tree = {"A:0": ["B:1"], "B:1": ["C:2"], "C:2": ["B:1", "D:3"]}
    write(tmp_path / "theirs", tree, ["A:0", "B:1", "C:2", "D:3"])
    with pytest.raises(HierarchyError, match=r"a cycle: B:1 > C:2 > B:1: mend the files, or pass break_cycles=True"):
        bring(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours", break_cycles=True)
    assert parents(pack) == {"A:0": set(), "B:1": {"A:0"}, "C:2": {"B:1"}, "D:3": {"C:2"}}
    assert report.note("cycle").examples == ("C:2 > B:1",) and report.note("unreachable") is None


def test_cycles_of_any_shape_are_broken_and_every_concept_stays(tmp_path):
    generator = torch.Generator().manual_seed(0)
    keys = [f"n{i}:{i % 4}" for i in range(24)]
    edges = torch.randint(24, (60, 2), generator=generator).tolist()
    tree = {}
    for a, b in edges:
        tree.setdefault(keys[a], []).append(keys[b])
    write(tmp_path / "theirs", {parent: sorted(set(children)) for parent, children in tree.items()}, keys)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours", break_cycles=True)
    removed = set(report.note("cycle").examples)
    assert pack.n_probes == 24 and len(removed) == report.note("cycle").count > 5
    for a, b in {(a, b) for a, b in edges}:
        assert (keys[a] in parents(pack)[keys[b]]) != (f"{keys[a]} > {keys[b]}" in removed)


def test_levels_are_kept_if_an_edge_does_not_go_down(tmp_path):
    write(
        tmp_path / "theirs",
        {"A:0": ["B:1", "E:0"], "B:1": ["C:1"], "C:1": ["D:0"]},
        ["A:0", "B:1", "C:1", "D:0", "E:0"],
    )
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert {c["id"]: c["level"] for c in pack.concepts} == {"A:0": 0, "B:1": 1, "C:1": 1, "D:0": 0, "E:0": 0}
    assert parents(pack) == {"A:0": set(), "B:1": {"A:0"}, "C:1": {"B:1"}, "D:0": {"C:1"}, "E:0": {"A:0"}}
    assert (
        set(report.note("not_down").examples) == {"A:0 > E:0", "B:1 > C:1", "C:1 > D:0"}
        and report.note("unreachable") is None
    )
    for base, begun in (([0], {"A:0", "D:0", "E:0"}), ([0, 1], {"A:0", "B:1", "C:1", "D:0", "E:0"})):
        plan = DynamicProbeManager(pack, impl="reference", strategy="descent", base_layers=base).plan
        assert {pack.concepts[probe]["id"] for probe in plan.start} == begun


def test_a_name_on_several_levels_is_a_concept_on_each(tmp_path):
    write(tmp_path / "theirs", {"A:0": ["A:1"], "A:1": ["B:2"]}, ["A:0", "A:1", "B:2"])
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert [c["name"] for c in pack.concepts] == ["A", "A", "B"] and parents(pack)["A:1"] == {"A:0"}
    assert report.note("repeated").examples == ("A on levels 0, 1",)


def test_bare_name_in_a_layer_file_means_the_nearest_level_below(tmp_path):
    probes = modules(["linear"], D, keys=["A:0", "B:1", "B:2", "C:3"])
    theirs.write_layered(tmp_path / "theirs", probes)
    for level, concepts in enumerate([[("A", ["B", "Ghost"])], [("B", [])], [("B", ["C"])], [("C", [])]]):
        content = [
            {
                "sumo_term": name,
                "layer": level,
                "category_children": children,
                "parent_concepts": ["Nobody"] if level == 3 else [],
            }
            for name, children in concepts
        ]
        theirs.write_json(tmp_path / f"theirs/layer{level}.json", {"layer": level, "concepts": content})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert parents(pack) == {"A:0": set(), "B:1": {"A:0"}, "B:2": set(), "C:3": {"B:2"}}
    assert report.note("dangling").examples == ("A:0 > 'Ghost'", "'Nobody' > C:3")
    assert report.note("unreachable").examples == ("B:2", "C:3")


def test_stale_layer_files_are_reported_and_hierarchy_json_is_used(tmp_path):
    write(tmp_path / "theirs", {"A:0": ["B:1"]}, ["A:0", "B:1"])
    theirs.write_layer_files(tmp_path / "theirs", {"A:0": ["Old:1"]})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert parents(pack)["B:1"] == {"A:0"} and pack.concepts[0]["definition"] == "what A is"
    assert report.note("stale").examples == ("Old:1 is in layer1.json alone", "B:1 is in hierarchy.json alone")


def test_one_sided_edges_and_malformed_keys_are_reported(tmp_path):
    changes = {"parent_to_children": {"A:0": ["B:1", "nonsense", 7]}, "child_to_parent": {"C:1": "A:0"}}
    write(tmp_path / "theirs", {"A:0": ["B:1"]}, ["A:0", "B:1", "C:1"], **changes)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert parents(pack)["C:1"] == {"A:0"} and report.note("one_sided").examples == ("A:0 > C:1",)
    assert report.note("malformed").count == 2


def test_ambiguous_flat_file_takes_the_first_level_and_is_reported(tmp_path):
    probes = modules(["linear"], D, keys=["A:0", "B:1"])
    theirs.write_flat(tmp_path / "theirs", probes)
    theirs.write_hierarchy(tmp_path / "theirs", {"A:0": ["B:1"], "B:1": ["B:2"]})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert set(parents(pack)) == {"A:0", "B:1"} and report.note("missing").examples == ("B:2",)
    assert report.note("ambiguous").examples == ("probes/activation/B_classifier.pt for B:1, of levels 1, 2",)


def test_flat_set_without_a_hierarchy_is_one_fully_scored_level(tmp_path):
    probes = modules(["linear"], 3, keys=[f"c{i}:0" for i in range(510)])
    (tmp_path / "theirs").mkdir()
    theirs.write_flat(tmp_path / "theirs", probes)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert len(pack.manifest["counts_per_level"]) == 1 and not report.notes
    assert (
        DynamicProbeManager(pack, impl="reference", strategy="exhaustive")
        .score_tokens(torch.randn(2, 3))
        .coverage.active
        == 510
    ).all()


def test_lens_paths_locate_a_flat_pack(tmp_path):
    probes = modules(["linear"], D, keys=["A:0", "B:0"])
    theirs.write_flat(tmp_path / "theirs", probes, place="hierarchy")
    theirs.write_json(
        tmp_path / "theirs/pack.json",
        {
            "lens_paths": {"activation_lenses": "hierarchy", "text_lenses": "text_lenses"},
            "model_info": {"model_id": "m", "hidden_dim": D},
        },
    )
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours")
    assert error(pack, probes, states(), "none") < 1e-6 and pack.manifest["host"] == {"model_id": "m", "hidden_size": D}


def test_a_bank_whose_child_is_two_levels_down_is_placed_by_the_hierarchy(tmp_path):
    tree = {"A:0": ["B:1", "C:3"], "B:1": ["D:2", "E:2"]}
    probes = modules(["plain", "linear"], D, keys=["A:0", "B:1", "C:3", "D:2", "E:2"])
    theirs.write_banked(tmp_path / "theirs", probes, tree)
    theirs.write_hierarchy(tmp_path / "theirs", tree)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert error(pack, probes, states(), "none") < 1e-6 and not report.notes and report.counts["files"] == 3


def test_bank_missing_from_the_index_is_read(tmp_path):
    probes = modules(["linear"], D)
    theirs.write_banked(tmp_path / "theirs", probes)
    theirs.write_hierarchy(tmp_path / "theirs")
    (tmp_path / "theirs/bank_index.json").unlink()
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours")
    assert pack.n_probes == len(KEYS) and error(pack, probes, states(), "none") < 1e-6


def test_probe_stored_twice_is_reported_and_the_current_name_used(tmp_path):
    write(tmp_path / "theirs", {"A:0": ["B:1"]}, ["A:0", "B:1"])
    other = theirs.module("linear", D, 99)
    torch.save(other.state_dict(), tmp_path / "theirs/layer1/B_classifier.pt")
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert report.note("twice").examples == ("B:1 in layer1/B.pt and layer1/B_classifier.pt",)
    assert error(pack, modules(["linear"], D, keys=["A:0", "B:1"]), states(), "none") < 1e-6


# -- what is left out ----------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["none", "layernorm"])
@pytest.mark.parametrize("beside", ["plain", "linear"])
def test_three_way_head_becomes_a_softmax_group(tmp_path, normalize, beside):
    """Every pole has its share by the softmax of the head; what was below the head is below what is above it."""
    heads = {f"Head{i}:1": theirs.module("tripole", D, i, torch.float32) for i in range(3)}
    with torch.no_grad():
        heads["Head1:1"].log_margins.fill_(1.5)
    others = modules([beside], D, keys=["A:0", "B:1", "C:2"])
    theirs.write_layered(tmp_path / "theirs", {**others, **heads})
    theirs.write_hierarchy(tmp_path / "theirs", {"A:0": ["B:1", *heads], "Head1:1": ["C:2"]})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours", normalize)
    poles = [f"Head{i}/{pole}:1" for i in range(3) for pole in ("negative", "neutral", "positive")]
    assert parents(pack) == {"A:0": set(), **{key: {"A:0"} for key in ("B:1", "C:2", *poles)}}
    assert [sorted(pack.concepts[p]["id"] for p in part) for part in np.split(pack.tree.groups.members, 3)] == [
        poles[i : i + 3] for i in (0, 3, 6)
    ]
    assert error(pack, others, states(), normalize) < 1e-6
    ours = DynamicProbeManager(pack).score_all(states())
    for i, made in enumerate(heads.values()):
        shares = theirs.expected_poles(made, states(), normalize)
        assert shares.std(dim=0).min() > 0.01
        found = ours[:, [pack.find(pole) for pole in poles[3 * i : 3 * i + 3]]]
        assert (found - shares).abs().max() < 1e-6
    assert report.note("tripole").examples == ("Head0:1", "Head1:1", "Head2:1") and report.counts["probes"] == 12
    assert report.note("bridged").examples == ("C:2 under A:0",) and report.counts["three-way probes"] == 3
    assert pack.manifest["quality"]["import"]["max_score_error"] < 1e-6
    assert pack.recommended == {} and "12 concept probes, imported" in pack.card_text()


def test_a_folder_of_three_way_heads_alone_is_a_pack(tmp_path):
    heads = {f"Head{i}:0": theirs.module("tripole", D, i, torch.bfloat16) for i in range(200)}
    theirs.write_layered(tmp_path / "theirs", heads)
    pack, _ = bring(tmp_path / "theirs", tmp_path / "ours")
    assert pack.n_probes == 600 == pack.recommended["max_loaded_probes"] and len(pack.tree.groups) == 200
    assert pack.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kind, state",
    [
        ("unknown", {"fc.weight": torch.ones(1, D), "fc.bias": torch.ones(1)}),
        ("unknown", {"linear.weight": torch.ones(2, D), "linear.bias": torch.ones(2)}),
        ("unknown", {"linear.weight": torch.ones(D), "linear.bias": torch.ones(1)}),
        ("unknown", {"linear.weight": torch.ones(3, D), "linear.bias": torch.ones(1)}),
        ("unknown", {"linear.weight": torch.ones(1, D), "linear.bias": torch.ones(1), "log_margins": torch.ones(3)}),
        ("unknown", {"linear.weight": torch.ones(3, D), "linear.bias": torch.ones(3), "log_margins": torch.ones(2)}),
        (
            "unknown",
            {"net.linear.weight": torch.ones(1, D), "linear.weight": torch.ones(1, D), "linear.bias": torch.ones(1)},
        ),
        ("dtype", {"linear.weight": torch.ones(1, D).double(), "linear.bias": torch.ones(1).double()}),
        ("not_finite", {"linear.weight": torch.full((1, D), float("nan")), "linear.bias": torch.ones(1)}),
        ("width", {"linear.weight": torch.ones(1, D + 1), "linear.bias": torch.ones(1)}),
    ],
)
def test_unsupported_probes_are_left_out_by_name(tmp_path, kind, state):
    write(tmp_path / "theirs", {"A:0": ["B:1", "C:1"]}, ["A:0", "B:1"])
    torch.save(state, tmp_path / "theirs/layer1/C.pt")
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert (
        set(parents(pack)) == {"A:0", "B:1"}
        and report.note(kind).count == 1
        and report.note(kind).examples[0].startswith("C:1")
    )


def test_a_source_without_any_probe_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportRefused, match="holds no probes: expected layer0/"):
        bring(tmp_path / "empty", tmp_path / "ours")
    (tmp_path / "others/layer0").mkdir(parents=True)
    torch.save({"fc.weight": torch.ones(1, D), "fc.bias": torch.ones(1)}, tmp_path / "others/layer0/A.pt")
    with pytest.raises(
        ImportRefused, match="none of its 1 probes can be imported: 1 files whose tensors are not a probe"
    ):
        bring(tmp_path / "others", tmp_path / "ours")
    with pytest.raises(ImportRefused, match="is not a folder"):
        bring(tmp_path / "nothing", tmp_path / "ours")


def test_text_probes_are_reported_as_unread(tmp_path):
    write(tmp_path / "theirs", TREE, KEYS)
    (tmp_path / "theirs/layer0/Entity_centroid.npy").write_bytes(b"x")
    _, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert report.note("unread").examples == ("layer0/Entity_centroid.npy",)


def test_calibration_is_kept_without_setting_thresholds(tmp_path):
    write(tmp_path / "theirs", TREE, KEYS)
    theirs.write_calibration(tmp_path / "theirs", [*KEYS[:-1], "Gone:4"])
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    kept = pack.concepts[pack.find("Whale:2")]["calibration"]
    assert kept == {"self_mean": 0.9, "cross_mean": 0.1, "cross_fire_rate": 0.02, "gen_fire_rate": None}
    assert pack.alert_threshold.isnan().all() and report.counts["calibrated"] == len(KEYS) - 1
    assert report.note("uncalibrated").examples == (KEYS[-1],) and report.note("calibration_unknown").examples == (
        "Gone_L4",
    )


def test_probes_on_concatenated_layers_are_reported(tmp_path):
    write(tmp_path / "theirs", TREE, KEYS)
    theirs.write_json(tmp_path / "theirs/pack_info.json", {"hidden_dim": D // 3})
    _, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert report.note("concatenated").count == len(KEYS) and report.note("concatenated").examples[0].endswith(
        "(3 of 8)"
    )
    theirs.write_json(tmp_path / "theirs/pack_info.json", {"hidden_dim": D - 1})
    with pytest.raises(ImportRefused, match="probes read 24 values, the pack says hidden_dim 23"):
        bring(tmp_path / "theirs", tmp_path / "more")


def test_progress_counts_every_probe_twice(tmp_path):
    write(tmp_path / "theirs", TREE, KEYS)
    torch.save(theirs.module("tripole", D, 0).state_dict(), tmp_path / "theirs/layer0/Head.pt")
    torch.save({"linear.weight": torch.ones(1, 3), "linear.bias": torch.ones(1)}, tmp_path / "theirs/layer0/Narrow.pt")
    told = []
    bring(tmp_path / "theirs", tmp_path / "ours", progress=lambda done, total: told.append((done, total)))
    assert told == [(i + 1, 2 * len(KEYS) + 4) for i in range(2 * len(KEYS) + 4)]


def test_thread_count_is_restored_after_success_and_failure(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        write(tmp_path / "theirs", TREE, KEYS)
        seen = []
        bring(tmp_path / "theirs", tmp_path / "ours", progress=lambda *_: seen.append(torch.get_num_threads()))
        assert set(seen) == {1} and torch.get_num_threads() == before + 1
        with pytest.raises(PackError, match="exists"):
            bring(tmp_path / "theirs", tmp_path / "ours")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_existing_pack_is_not_overwritten_by_default(tmp_path):
    write(tmp_path / "theirs", TREE, KEYS)
    bring(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(PackError, match="overwrite=True"):
        bring(tmp_path / "theirs", tmp_path / "ours")
    bring(tmp_path / "theirs", tmp_path / "ours", overwrite=True)


# -- safety --------------------------------------------------------------------------------------


class Evil:
    """What would write a file, if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    "wrapped, protocol",
    [("zip", 2), ("zip", 3), ("zip", 4), ("zip", 5), ("bare", 0), ("bare", 1), ("bare", 2), ("bare", 4)],
)
def test_malicious_pickle_is_refused_naming_its_global(tmp_path, wrapped, protocol):
    write(tmp_path / "theirs", TREE, KEYS)
    state = {"linear.weight": torch.ones(1, D), "linear.bias": Evil(tmp_path / "ran")}
    path = tmp_path / "theirs/layer1/Idea.pt"
    if wrapped == "zip":
        torch.save(state, path, pickle_protocol=protocol)
    else:
        path.write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol=protocol))
    with pytest.raises(
        ImportRefused, match=r"layer1/Idea\.pt is a pickle that asks for posix\.system, which no state dict needs"
    ):
        bring(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins bytearray", "torch.storage UntypedStorage", "torch._utils _rebuild_sparse_tensor", "builtins getattr"],
)
def test_globals_that_only_allocate_or_look_up_are_refused(tmp_path, name):
    module, word = name.split()
    data = b"\x80\x02c" + f"{module}\n{word}\n".encode() + b"J\x00\x00\x00\x7f\x85R."
    forge(tmp_path / "x.pt", data)
    with pytest.raises(ImportRefused, match=name.replace(" ", r"\.")):
        load_state_dict(tmp_path / "x.pt")


def forge(path, data, members=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in dict(members).items():
            file.writestr(f"archive/{name}", content)


def described(numel=4, size=(4,), stride=(1,), offset=0, storage="FloatStorage", key="0"):
    """The pickle of `{"x": tensor}` with a tensor described as asked."""

    def number(n):
        return b"\x8a" + bytes([(n.bit_length() // 8) + 1]) + n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)

    def text(t):
        return b"X" + struct.pack("<I", len(t)) + t.encode()

    pid = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu") + number(numel) + b"tQ"
    sizes = b"(" + b"".join(map(number, size)) + b"t" + b"(" + b"".join(map(number, stride)) + b"t"
    return (
        b"\x80\x02}"
        + text("x")
        + b"ctorch._utils\n_rebuild_tensor_v2\n("
        + pid
        + number(offset)
        + sizes
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


def test_forger_writes_files_that_torch_reads(tmp_path):
    forge(
        tmp_path / "x.pt",
        described(6, (2, 2), (3, 1), 1),
        {"data/0": torch.arange(6.0).numpy().tobytes(), "version": b"3\n"},
    )
    ours, its = load_state_dict(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(ours["x"], its["x"]) and ours["x"].tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"numel": 1 << 40}, "storage 0 has 16 bytes, 1099511627776 values of torch.float32 are stated"),
        ({"size": (1 << 40,), "stride": (0,)}, "state more than the"),
        ({"size": (1 << 20, 1 << 20), "stride": (0, 0)}, "state more than the"),
        ({"size": (5,)}, "state more than the"),
        ({"offset": 1}, "state more than the"),
        ({"stride": (2,)}, "state more than the"),
        ({"size": (-1,)}, "size"),
        ({"stride": (-1,)}, "size"),
        ({"size": (4,), "stride": ()}, "size"),
        ({"size": (1,) * 9, "stride": (1,) * 9}, "size"),
        ({"storage": "QInt8Storage"}, r"asks for torch\.QInt8Storage"),
        ({"key": "../../etc/passwd"}, "cannot be read"),
    ],
)
def test_a_tensor_that_is_larger_than_its_file_is_refused(tmp_path, change, words):
    forge(tmp_path / "x.pt", described(**change), {"data/0": b"\0" * 16})
    with pytest.raises(ImportRefused, match=words):
        load_state_dict(tmp_path / "x.pt")


def test_storage_shared_beyond_the_file_size_is_refused(tmp_path):
    w = torch.ones(1000)
    torch.save({f"{i}": w.view(1000) for i in range(1000)}, tmp_path / "x.pt")
    with pytest.raises(ImportRefused, match="state more than the"):
        load_state_dict(tmp_path / "x.pt")
    state = {"a": torch.ones(64)}
    torch.save({f"{i}": state for i in range(100)}, tmp_path / "bank.pt")
    assert (tmp_path / "bank.pt").stat().st_size < 8000
    with pytest.raises(ImportRefused, match="for more and more concepts"):
        load_bank(tmp_path / "bank.pt", max_bytes=8000)


def test_a_compressed_or_overlapping_member_is_refused(tmp_path):
    forge(tmp_path / "bomb.pt", described(1 << 22, (1 << 22,)), {"data/0": bytes(1 << 24)}, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 16
    with pytest.raises(ImportRefused, match="is compressed"):
        load_state_dict(tmp_path / "bomb.pt")
    forge(tmp_path / "two.pt", described(), {"data/0": bytes(16), "x/data.pkl": described()})
    with pytest.raises(ImportRefused, match=r"2 data\.pkl"):
        load_state_dict(tmp_path / "two.pt")


def test_zip_table_or_pickle_needing_excessive_memory_is_refused(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"PK\1\2" * 70_000)
    with pytest.raises(ImportRefused, match="more than 65,536 members"):
        load_state_dict(tmp_path / "x.pt")
    forge(tmp_path / "x.pt", b"\x80\x02" + b"}" * (3 << 20) + b".")
    with pytest.raises(ImportRefused, match=r"its data\.pkl has 3,145,731 bytes, at most 2,097,152 are read"):
        load_state_dict(tmp_path / "x.pt")


def test_oversized_file_is_refused_before_it_is_opened(tmp_path):
    theirs.write_layered(tmp_path / "theirs", modules(["linear"], D))
    theirs.write_hierarchy(tmp_path / "theirs")
    path = tmp_path / "theirs/layer0/Entity.pt"
    with path.open("ab") as stream:
        stream.truncate(300 << 20)  # sparse
    with pytest.raises(ImportRefused, match=r"Entity\.pt has 314,572,800 bytes, at most 268,435,456 are read"):
        bring(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs/layer0/Entity.pt").unlink()
    with (tmp_path / "theirs/hierarchy.json").open("wb") as stream:
        stream.truncate(65 << 20)
    with pytest.raises(ImportRefused, match=r"hierarchy\.json has 68,157,440 bytes"):
        bring(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_named(tmp_path, share):
    theirs.write_layered(tmp_path / "theirs", modules(["linear"], D))
    theirs.write_hierarchy(tmp_path / "theirs")
    path = tmp_path / "theirs/layer0/Entity.pt"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ImportRefused, match=r"layer0/Entity\.pt"):
        bring(tmp_path / "theirs", tmp_path / "ours")


def test_changed_weight_byte_is_detected(tmp_path):
    torch.save({"x": torch.ones(100)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[data.index(torch.ones(100).numpy().tobytes()) + 40] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ImportRefused, match="CRC"):
        load_state_dict(tmp_path / "x.pt")


@pytest.mark.parametrize("place", ["../outside", "/etc", "a/../../outside", "..", "C:/x", "a\\..\\..\\outside", ""])
@pytest.mark.parametrize("file", ["lens_paths", "probe_paths", "bank_path"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path, file, place):
    theirs.write_layered(tmp_path / "outside", modules(["linear"], D))
    write(tmp_path / "theirs", TREE, KEYS)
    if file == "bank_path":
        theirs.write_json(
            tmp_path / "theirs/bank_index.json", {"Entity:0": {"bank_path": place, "concepts": ["Process"]}}
        )
    else:
        theirs.write_json(
            tmp_path / "theirs/pack.json", {file: {"activation_lenses": place, "activation_probes": place}}
        )
    with pytest.raises(ImportRefused, match="does not lie in this folder"):
        bring(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("what", ["layer1/Physical.pt", "layer2", "hierarchy.json", "calibration.json"])
def test_link_out_of_the_folder_is_refused_and_one_inside_is_followed(tmp_path, what):
    write(tmp_path / "theirs", TREE, KEYS)
    theirs.write_calibration(tmp_path / "theirs")
    outside, inside = tmp_path / "outside", tmp_path / "theirs/kept"
    (tmp_path / "theirs" / what).rename(inside)
    (tmp_path / "theirs" / what).symlink_to(inside)
    assert bring(tmp_path / "theirs", tmp_path / "fine")[0].n_probes == len(KEYS)
    inside.rename(outside)
    (tmp_path / "theirs" / what).unlink()
    (tmp_path / "theirs" / what).symlink_to(outside)
    with pytest.raises(ImportRefused, match="is a link that leads outside"):
        bring(tmp_path / "theirs", tmp_path / "ours")


def test_pipe_in_place_of_a_file_is_not_opened(tmp_path):
    write(tmp_path / "theirs", TREE, KEYS)
    (tmp_path / "theirs/layer0/Entity.pt").unlink()
    os.mkfifo(tmp_path / "theirs/layer0/Entity.pt")  # opening it would wait for ever
    with pytest.raises(ImportRefused, match=r"Entity\.pt is not a file"):
        bring(tmp_path / "theirs", tmp_path / "ours")


def test_names_in_the_hierarchy_are_never_paths(tmp_path):
    write(tmp_path / "theirs", {"Entity:0": ["../../outside:1", "/etc/passwd:1"]}, ["Entity:0"])
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert list(parents(pack)) == ["Entity:0"] and report.note("missing").count == 2


def test_names_are_printed_without_terminal_controls(tmp_path):
    write(tmp_path / "theirs", {"Entity:0": ["Bad\x1b[2J\n:1"]}, ["Entity:0"])
    _, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert (
        r"Bad\x1b[2J\n:1" in str(report)
        and "\x1b" not in report.section()
        and report.note("missing").examples == ("Bad\x1b[2J\n:1",)
    )


@pytest.mark.parametrize(
    "file, content",
    [
        ("hierarchy.json", "[1]"),
        ("hierarchy.json", "{"),
        ("hierarchy.json", '{"parent_to_children": [1]}'),
        ("hierarchy.json", "[" * 100_000),
        ("hierarchy.json", '{"parent_to_children": {"Entity:0": ["\\ud800:1"]}}'),
        ("pack_info.json", "7"),
        ("calibration.json", "{}"),
        ("bank_index.json", '{"Entity:0": 3}'),
        ("pack.json", '{"lens_paths": {"activation_lenses": 5}}'),
        ("pack.json", "\udcff"),
    ],
)
def test_json_of_another_kind_is_refused_by_name(tmp_path, file, content):
    write(tmp_path / "theirs", TREE, KEYS)
    (tmp_path / "theirs" / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ImportRefused, match=file.split(".")[0] if "lens_paths" not in content else "lens_paths"):
        bring(tmp_path / "theirs", tmp_path / "ours")


def test_layer_files_of_another_kind_are_refused(tmp_path):
    theirs.write_layered(tmp_path / "theirs", modules(["linear"], D))
    theirs.write_json(tmp_path / "theirs/layer0.json", {"concepts": [{"name": "no term"}]})
    with pytest.raises(ImportRefused, match=r"layer0\.json: expected an object with concepts"):
        bring(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool],
    ids=str,
)
def test_state_dicts_are_read_as_torch_reads_them(tmp_path, dtype):
    base = (torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    state = OrderedDict(
        whole=base,
        part=base[1:3, ::2],
        turned=base.T,
        one=base[2, 3],
        none=base[:0],
        parameter=torch.nn.Parameter(base.clone(), requires_grad=False),
    )
    state["room"] = torch.zeros(4096)  # the views state more bytes than their storage has
    state._metadata = {"": {"version": 1}}
    torch.save(state, tmp_path / "x.pt")
    ours, its = load_state_dict(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(ours) == list(its)
    for name, tensor in its.items():
        assert torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype and ours[name].is_contiguous()


def test_safetensors_are_read_and_other_objects_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.arange(3.0)}, tmp_path / "x.safetensors")
    assert load_state_dict(tmp_path / "x.safetensors")["a"].tolist() == [0, 1, 2]
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ImportRefused, match="cannot be read"):
        load_state_dict(tmp_path / "x.safetensors")
    for thing, words in (([torch.ones(1)], "a list"), ({"a": 1}, "a dict of int by str"), ({}, "an empty dict")):
        torch.save(thing, tmp_path / "x.pt")
        with pytest.raises(ImportRefused, match=words):
            load_state_dict(tmp_path / "x.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ImportRefused, match=r"a zip since torch 1\.6"):
        load_state_dict(tmp_path / "old.pt")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_give_the_weights_or_a_typed_error(tmp_path, seed):
    torch.save(theirs.module("plain", 4, 0).state_dict(), tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    generator = torch.Generator().manual_seed(seed)
    n_read = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(int(torch.randint(1, 4, (1,), generator=generator))):
            data[int(torch.randint(len(data), (1,), generator=generator))] = int(
                torch.randint(256, (1,), generator=generator)
            )
        (tmp_path / "x.pt").write_bytes(data)
        with contextlib.suppress(ImportRefused):
            n_read += sum(tensor.numel() for tensor in load_state_dict(tmp_path / "x.pt").values()) > 0
    assert 0 < n_read < 300


def test_folder_lists_its_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.pt").write_text("")
    folder = Folder(tmp_path)
    assert folder.inside("a", "x.pt") == tmp_path / "a/x.pt" and folder.files("a", suffix=".pt") == [
        tmp_path / "a/x.pt"
    ]
    assert folder.files("b", suffix=".pt") == [] and folder.json("none.json") is None

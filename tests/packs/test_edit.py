"""Packs derived from packs score as their sources and state where they come from."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from probemon import DynamicProbeManager, ProbePack
from probemon.cli.app import app
from probemon.core.dtypes import ROUNDINGS
from probemon.core.probes import Architecture
from probemon.core.reference import exhaustive_reference
from probemon.errors import ConfigError, HierarchyError, PackError, UnknownConcept
from probemon.packs.attached import attach_below
from probemon.packs.diff import pack_diff
from probemon.packs.edit import merge, rename, subset
from probemon.packs.hierarchies import propose, with_hierarchy
from probemon.packs.quantize import quantize
from probemon.packs.widen import smallest_common, widen

D = 24
SHAPES = {"linear": Architecture(D), "one": Architecture(D, (5,)), "two": Architecture(D, (6, 3))}


def random_weights(n, shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    widths = (D, *(shape.hidden or (1,)))
    made = {}
    for i in range(len(widths) - 1):
        made |= {
            f"w{i + 1}": torch.randn(n, widths[i + 1], widths[i], generator=generator).to(dtype),
            f"b{i + 1}": torch.randn(n, widths[i + 1], generator=generator),
        }
    if shape.hidden:
        made |= {
            "w3": torch.randn(n, shape.hidden[-1], generator=generator).to(dtype),
            "b3": torch.randn(n, generator=generator),
        }
    return made


def write(
    path,
    n=6,
    shape="linear",
    *,
    site="resid_post.1",
    norm="layernorm",
    rule="independent",
    golden=True,
    seed=0,
    dtype=torch.float32,
    **more,
):
    name = path.name
    concepts = more.pop("concepts", None) or [
        {
            "id": f"{name}-{i}",
            "name": f"{name} {i}",
            "parents": [] if i < 2 else [f"{name}-{i // 2 - 1}"],
            "definition": f"the {i}th",
        }
        for i in range(n)
    ]
    generator = torch.Generator().manual_seed(seed + 100)
    return ProbePack.write(
        path,
        name=name,
        concepts=concepts,
        weights=random_weights(n, SHAPES[shape], dtype, seed),
        score_rule=rule,
        inputs=[{"site": site, "norm": norm}],
        host={"hidden_size": D, "layers": 4},
        licence=more.pop("licence", "CC0-1.0"),
        card=f"# {name}\n\nIts card.\n",
        alert_threshold=torch.rand(n, generator=generator) * 0.5 + 0.2,
        golden_hidden=torch.randn(4, 1, D, generator=generator) if golden else None,
        quality={"auroc": 0.9, "alerts": {"each": {"concepts": {f"{name}-1": {"fpr": 0.01}}}}},
        **more,
    )


def scores(pack, hidden):
    """By concept id."""
    found = exhaustive_reference(hidden, pack)
    return {concept["id"]: found[:, i] for i, concept in enumerate(pack.concepts)}


def states(*sites, n=7, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {site: torch.randn(n, D, generator=generator) for site in sites}


@pytest.mark.parametrize("small, large", [("linear", "one"), ("linear", "two"), ("one", "two")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widened_probe_scores_the_same(tmp_path, small, large, dtype):
    pack = write(tmp_path / "small", shape=small, dtype=dtype)
    to = smallest_common([SHAPES[small], SHAPES[large]])
    weights = widen(pack.weights, to)
    assert Architecture.of(weights, "made") == to and weights["w1"].dtype == dtype
    hidden = states("resid_post.1")
    before, after = exhaustive_reference(hidden, pack), exhaustive_reference(hidden, pack, weights)
    assert torch.allclose(before, after, atol=1e-6, rtol=0) and not torch.allclose(before, before.roll(1, 1), atol=1e-3)


def test_probe_fits_neither_a_smaller_shape_nor_another_width(tmp_path):
    with pytest.raises(PackError, match="do not fit into"):
        widen(random_weights(2, SHAPES["two"]), SHAPES["one"])
    with pytest.raises(PackError, match="24 and 32 values"):
        smallest_common([SHAPES["one"], Architecture(32)])


def test_merged_pack_scores_as_its_parts_and_keeps_their_metadata(tmp_path):
    a = write(tmp_path / "a", shape="linear", site="resid_post.1")
    b = write(
        tmp_path / "b",
        n=4,
        shape="two",
        site="resid_post.2",
        norm="rmsnorm",
        licence="MIT",
        seed=3,
        aggregated={"ema(0.3)": torch.rand(4)},
    )
    made = merge([a, b], tmp_path / "both", name="both")
    hidden = states("resid_post.1", "resid_post.2")
    expected = {**scores(a, hidden), **scores(b, hidden)}
    found = scores(made, hidden)
    assert found.keys() == expected.keys() and all(
        torch.allclose(found[key], expected[key], atol=1e-6, rtol=0) for key in expected
    )
    assert made.manifest["licence"] == "CC0-1.0 AND MIT" and made.architecture == SHAPES["two"]
    for part in (a, b):
        for i, concept in enumerate(part.concepts):
            at = made.find(concept["id"])
            assert made.alert_threshold[at] == part.alert_threshold[i] and made.concepts[at] == concept
            assert made.path(at) == part.path(i)
    ema = made.thresholds_for("ema(0.3)")
    assert [bool(ema[made.find(f"a-{i}")].isnan()) for i in range(6)] == [True] * 6 and float(
        ema[made.find("b-2")]
    ) == float(b.thresholds_for("ema(0.3)")[b.find("b-2")])
    parents = made.manifest["provenance"]["parents"]
    assert (
        [parent["name"] for parent in parents] == ["a", "b"]
        and parents[0]["quality"]["auroc"] == 0.9
        and made.manifest["quality"] == {}
    )
    assert parents[1]["sha256"] == b.manifest["files"]["probes.safetensors"]["sha256"]
    assert ProbePack.open(made.directory, verify=True).golden_hidden.shape == (4, 2, D)
    assert "Its card." in (made.directory / "README.md").read_text()


def test_packs_that_clash_are_not_merged(tmp_path):
    a = write(tmp_path / "a")
    again = write(tmp_path / "again", concepts=[dict(concept) for concept in a.concepts])
    with pytest.raises(PackError, match=r"6 ids are in more than one pack .*'a-0'"):
        merge([a, again], tmp_path / "both", name="both")
    made = merge({"x": a, "y": again}, tmp_path / "both", name="both")
    assert {concept["id"] for concept in made.concepts} == {f"{prefix}:a-{i}" for prefix in "xy" for i in range(6)}
    assert made.concepts[made.find("y:a-5")]["parents"] == ["y:a-1"]
    with pytest.raises(PackError, match=r"score_rule differs: independent .a., path .p."):
        merge([a, write(tmp_path / "p", rule="path")], tmp_path / "no", name="no")
    with pytest.raises(PackError, match="dtype differs"):
        merge([a, write(tmp_path / "n", dtype=torch.bfloat16)], tmp_path / "no", name="no")
    with pytest.raises(PackError, match="nothing to merge"):
        merge([], tmp_path / "no", name="no")
    with pytest.raises(PackError, match="both exists"):
        merge([a], tmp_path / "both", name="both")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "again", "both", "n", "p"]


def test_model_settings_are_compared_if_both_packs_state_them(tmp_path):
    a, b, c = (write(tmp_path / name) for name in "abc")
    b.manifest["host"] = {**b.manifest["host"], "settings": {"eps": 1e-6, "bias": False}}
    c.manifest["host"] = {**c.manifest["host"], "settings": {"eps": 1e-6, "of_a_later_release": 1}}
    assert merge([a, b, c], tmp_path / "fine", name="fine").manifest["host"] == b.manifest["host"]
    c.manifest["host"]["settings"]["eps"] = 0.1
    with pytest.raises(PackError, match=r"different models: eps is 0\.1 and was 1e-06 \(c\)"):
        merge([a, b, c], tmp_path / "no", name="no")
    assert "host: {'settings': {'eps': 1e-06, 'bias': False}} in b, {'settings': {'eps': 0.1," in str(pack_diff(b, c))


def test_packs_of_different_models_are_not_merged(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    b.manifest["host"] = {**b.manifest["host"], "fingerprint": "f00"}
    assert merge([a, b], tmp_path / "fine", name="fine").manifest["host"]["fingerprint"] == "f00"
    a.manifest["host"] = {**a.manifest["host"], "fingerprint": "ba4"}
    with pytest.raises(PackError, match="different models: fingerprint is 'ba4' and 'f00'"):
        merge([a, b], tmp_path / "no", name="no")


@pytest.mark.parametrize("rule", ["independent", "path"])
def test_subset_includes_ancestors_and_descendants_and_scores_the_same(tmp_path, rule):
    pack = write(tmp_path / "a", n=20, rule=rule, shape="one")
    made = subset(pack, tmp_path / "some", ["a-2", "a-1*"] if rule == "path" else ["a 2"])
    expected, kept = scores(pack, states("resid_post.1")), {concept["id"] for concept in made.concepts}
    found = scores(made, states("resid_post.1"))
    assert all(torch.allclose(found[key], expected[key], atol=1e-6, rtol=0) for key in kept)
    wanted = {"a-0", "a-2", "a-6", "a-7", "a-14", "a-15", "a-16", "a-17"}  # of a-2: its parent, its children, theirs
    assert kept == wanted if rule == "independent" else wanted < kept
    assert all(
        float(made.alert_threshold[made.find(key)]) == float(pack.alert_threshold[pack.find(key)]) for key in kept
    )
    assert made.manifest["provenance"]["made_by"] == "probemon.packs.edit.subset" and made.manifest["quality"] == {}


def test_subset_without_ancestors_starts_its_own_hierarchy(tmp_path):
    pack = write(tmp_path / "a", n=20)
    made = subset(pack, tmp_path / "some", ["a-6"], above=False)
    assert {concept["id"]: concept["level"] for concept in made.concepts} == {"a-6": 0, "a-14": 1, "a-15": 1}
    alone = subset(pack, tmp_path / "one", ["a-6"], above=False, below=False)
    assert [concept["parents"] for concept in alone.concepts] == [[]]
    with pytest.raises(PackError, match="product along its path"):
        subset(write(tmp_path / "p", rule="path"), tmp_path / "no", ["p-4"], above=False)
    with pytest.raises(UnknownConcept, match="wale"):
        subset(pack, tmp_path / "no", ["wale"])
    with pytest.raises(PackError, match="no concept is chosen"):
        subset(pack, tmp_path / "no", [])


def steered(path, seed, rule, most_parents=2):
    """A random pack whose descent begins, opens and ends by settings of its own."""
    rng = np.random.default_rng(seed)
    n, first = int(rng.integers(5, 14)), int(rng.integers(0, 3))
    level, parents = [], []
    for i in range(n):
        above = sorted({int(p) for p in rng.integers(0, i, size=rng.integers(0, most_parents + 1))}) if i > 1 else []
        parents.append([f"{path.name}-{p}" for p in above])
        level.append(max((level[p] for p in above), default=first - 1) + 1 + int(rng.random() < 0.2))
    if seed % 3 == 2:  # levels that need not grow along edges
        level = rng.integers(0, 4, size=n).tolist()
    concepts = [
        {"id": f"{path.name}-{i}", "name": f"{path.name} {i}", "parents": parents[i], "level": level[i]}
        for i in range(n)
    ]
    present = sorted(set(level))
    recommended = {"base_layers": sorted({int(at) for at in rng.choice(present, size=rng.integers(1, 3))})}
    if 0 in present and rng.random() < 0.5:
        del recommended["base_layers"]
    choice = [None, 0.05, 0.5, -1.0, "calibrated", *(["exact"] if rule == "path" else [])][
        int(rng.integers(0, 6 if rule == "path" else 5))
    ]
    recommended |= {} if choice is None else {"load_threshold": choice}
    recommended |= [{}, {}, {"max_rounds": None}, {"max_rounds": 1}, {"max_rounds": 2}][int(rng.integers(0, 5))]
    recommended |= {"always_on": [int(rng.integers(0, n))]} if rng.random() < 0.3 else {}
    alert = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 0.5 + 0.2
    other = alert / 4
    for thresholds in (alert, other):
        if choice != "exact" and rng.random() < 0.3:
            thresholds[0] = torch.nan
    if of_sentences := rng.random() < 0.4:  # then some concepts have a threshold for these alone, and open for them
        alert[torch.from_numpy(rng.random(n) < 0.3)] = torch.nan
    return ProbePack.write(
        path,
        name=path.name,
        concepts=concepts,
        weights=random_weights(n, SHAPES["linear"], seed=seed),
        score_rule=rule,
        inputs=[{"site": "resid_post.1", "norm": "layernorm"}],
        host={"hidden_size": D},
        licence="CC0-1.0",
        card="# random\n",
        alert_threshold=alert,
        aggregated={"max": torch.rand(n, generator=torch.Generator().manual_seed(seed + 2)) * 0.6}
        if of_sentences
        else {},
        alert_set="main",
        alert_sets={"low": other},
        expand_threshold=torch.rand(n, generator=torch.Generator().manual_seed(seed + 1)),
        recommended=recommended,
    )


def found_in(pack, hidden):
    """Scores of all that is active, by state and concept id."""
    found = DynamicProbeManager(pack, impl="reference", strategy="descent").score_tokens(hidden)
    return {
        (int(t), pack.concepts[probe]["id"]): float(value)
        for t, probe, value in zip(found.state_of, found.probes, found.values, strict=True)
    }


@pytest.mark.parametrize("rule", ["independent", "path"])
def test_descent_of_a_merged_pack_finds_what_each_part_finds(tmp_path, rule):
    hidden, n_equal, kinds, kept = states("resid_post.1", n=12), 0, set(), 0
    for seed in range(60):
        packs = [
            steered(tmp_path / f"{seed}{name}", 3 * seed + i, rule) for i, name in enumerate("abc"[: 2 + seed % 2])
        ]
        made = merge(packs, tmp_path / f"{seed}", name="made")
        rounds = {pack.recommended.get("max_rounds") for pack in packs}
        for name in made.alert_sets:
            alone = {}
            for pack in packs:
                alone |= found_in(pack.with_alert_set(name), hidden)
            together = found_in(made.with_alert_set(name), hidden)
            assert alone.items() <= together.items() and (len(rounds) > 1 or alone == together), (seed, name)
            n_equal += alone == together
        kept += len(made.alert_sets) - 1
        kinds.add(str(made.recommended.get("load_threshold")))
    assert n_equal > 30 and {"calibrated", "None"} <= kinds
    assert 5 < kept < 55, "another set is kept where one rule holds with it, and left out else"


@pytest.mark.parametrize("rule", ["independent", "path"])
def test_descent_of_a_subset_finds_what_the_whole_pack_finds(tmp_path, rule):
    """By the path rule what fires, in trees: there a concept is looked at, too, because of others that are left out: to
    open what is under these, or because they have another child.
    """
    hidden, n_equal = states("resid_post.1", n=12), 0
    for seed in range(60):
        pack = steered(tmp_path / f"{seed}a", seed, rule, most_parents=1 if rule == "path" else 2)
        whole = found_in(pack, hidden)
        if rule == "path":
            whole = {pair: score for pair, score in whole.items() if score > pack.alert_threshold[pack.find(pair[1])]}
        chosen = f"{seed}a-{seed % 5}"
        for i, how in enumerate(
            ({}, {"below": False}, {"above": False}, {"above": False, "below": False})[
                : 4 if rule == "independent" else 2
            ]
        ):
            part = subset(pack, tmp_path / f"{seed}{i}", [chosen], **how)
            kept = {concept["id"] for concept in part.concepts}
            expected, found = {pair: score for pair, score in whole.items() if pair[1] in kept}, found_in(part, hidden)
            found = {
                pair: score
                for pair, score in found.items()
                if rule != "path" or score > part.alert_threshold[part.find(pair[1])]
            }
            assert expected.items() <= found.items(), (seed, how, pack.recommended, part.recommended)
            n_equal += expected == found
    assert n_equal > 60


def test_merging_a_flat_pack_keeps_the_descent_settings_of_the_other(tmp_path):
    deep = write(
        tmp_path / "a",
        n=8,
        expand_threshold=torch.full((8,), 0.1),
        recommended={"load_threshold": "calibrated", "keep_top_k": 0},
    )
    flat_one = write(tmp_path / "b", n=2)
    made = merge([deep, flat_one], tmp_path / "both", name="both")
    assert made.recommended == {"load_threshold": "calibrated", "max_loaded_probes": 1000, "keep_top_k": 30}
    low = write(tmp_path / "c", n=8, recommended={"load_threshold": 0.05})
    assert merge([low, flat_one], tmp_path / "low", name="low").recommended["load_threshold"] == 0.05
    opened = merge([low, deep], tmp_path / "unlike", name="unlike")
    assert opened.recommended["load_threshold"] == "calibrated"
    assert [opened.expand_threshold[opened.find(f"{name}-0")].item() for name in "ca"] == [
        pytest.approx(0.05),
        pytest.approx(0.1),
    ]


def test_hierarchy_is_rebuilt_from_roots_whatever_the_old_levels(tmp_path):
    pack = alike(tmp_path / "alike")
    lines = [{**concept, "level": 2} for concept in pack.concepts]
    there = ProbePack.write(
        tmp_path / "there",
        name="there",
        concepts=lines,
        weights=pack.weights,
        score_rule="independent",
        inputs=[spec.as_dict() for spec in pack.inputs],
        host={"hidden_size": D},
        licence="CC0-1.0",
        card="# there\n",
        alert_threshold=pack.alert_threshold,
        golden_hidden=pack.golden_hidden,
        recommended={"base_layers": [2], "max_rounds": 0},
    )
    made = propose(there).write(tmp_path / "grouped")
    hidden = states("resid_post.1", n=200, seed=4)
    expected = fired_in(there, hidden)
    assert fired_in(made, hidden) == expected and len(expected[0]) > 50
    placed, _ = with_hierarchy(there, {"p1": ["p0"]}, tmp_path / "placed")
    assert placed.recommended == {} and DynamicProbeManager(placed).plan.always.sum() == pack.n_probes - 1


def test_renamed_pack_has_the_same_scores_under_new_names(tmp_path):
    pack = write(tmp_path / "a", recommended={"always_on": ["a-1"]})
    made = rename(
        pack, tmp_path / "mine", name="mine", concepts={"a-1": {"id": "whale", "name": "a whale"}, "a 3": "third"}
    )
    assert (
        made.name == "mine"
        and made.concepts[made.find("whale")]["name"] == "a whale"
        and made.concepts[made.find("a-3")]["name"] == "third"
    )
    assert made.concepts[made.find("a-5")]["parents"] == ["whale"] and made.recommended == {"always_on": ["whale"]}
    assert made.manifest["quality"]["alerts"]["each"]["concepts"] == {"whale": {"fpr": 0.01}}
    before, after = scores(pack, states("resid_post.1")), scores(made, states("resid_post.1"))
    assert torch.equal(before["a-1"], after["whale"]) and torch.equal(before["a-5"], after["a-5"])
    assert made.manifest["provenance"]["how"] == {"ids": {"a-1": "whale"}}
    for wrong, message in (
        ({"a-1": {"id": "a-2"}}, "another concept's"),
        ({"a-1": {}}, "give its new name"),
        ({"a-1": 3}, "give its new name"),
    ):
        with pytest.raises(PackError, match=message):
            rename(pack, tmp_path / "no", concepts=wrong)
    with pytest.raises(PackError, match="nothing is renamed"):
        rename(pack, tmp_path / "no")


def test_renaming_a_concept_leaves_equal_quality_keys_alone(tmp_path):
    concepts = [{"id": name, "name": name, "parents": []} for name in ("fpr", "concepts")]
    quality = {"alerts": {"each": {"fpr": 0.01, "concepts": {"fpr": {"fpr": 0.02}}}}}
    pack = ProbePack.write(
        tmp_path / "a",
        name="a",
        concepts=concepts,
        weights=random_weights(2, SHAPES["linear"], torch.float32, 0),
        score_rule="independent",
        inputs=[{"site": "resid_post.1", "norm": "none"}],
        card="",
        host={},
        licence="MIT",
        quality=quality,
    )
    made = rename(pack, tmp_path / "mine", concepts={"fpr": {"id": "rate"}, "concepts": {"id": "ideas"}})
    assert made.manifest["quality"] == {"alerts": {"each": {"fpr": 0.01, "concepts": {"rate": {"fpr": 0.02}}}}}


def test_pack_diff_names_every_concept_that_differs(tmp_path):
    pack = write(tmp_path / "a")
    same = pack_diff(pack, pack)
    assert same.same and same.n_same == 6 and str(same) == "6 concepts are alike"
    weights = {key: tensor.clone() for key, tensor in pack.weights.items()}
    weights["w1"][3, 0, 7] += 0.25
    concepts = [dict(concept, id="new" if concept["id"] == "a-5" else concept["id"]) for concept in pack.concepts]
    concepts[4]["parents"] = ["a-0"]
    thresholds = pack.alert_threshold.clone()
    thresholds[2] = float("nan")
    other = ProbePack.write(
        tmp_path / "b",
        name="b",
        concepts=concepts,
        weights=weights,
        score_rule="independent",
        inputs=[{"site": "resid_post.1", "norm": "layernorm"}],
        host={"hidden_size": D, "layers": 4},
        licence="MIT",
        card="# b\n",
        alert_threshold=thresholds,
    )
    found = pack_diff(pack, other)
    assert found.only_in_a == ["a-5"] and found.only_in_b == ["new"] and found.about["licence"] == ["CC0-1.0", "MIT"]
    assert found.changed["a-3"] == {"weights": pytest.approx(0.25, abs=1e-6)} and found.changed["a-4"] == {
        "parents": [["a-1"], ["a-0"]]
    }
    assert (
        found.changed["a-2"] == {"alert_threshold": [pytest.approx(float(pack.alert_threshold[2])), None]}
        and found.n_same == 2
    )
    text = str(found)
    assert (
        "only in a: a-5" in text
        and "weights of 1 concept differ, by at most 0.25: a-3" in text
        and "licence: 'CC0-1.0' in a, 'MIT' in b" in text
    )


def flat(path, n=7, **more):
    return write(
        path,
        n=n,
        concepts=[
            {"id": f"c{i}", "name": name, "parents": []}
            for i, name in enumerate(("animal", "mammal", "whale", "dog", "ship", "boat", "lie")[:n])
        ],
        **more,
    )


NESTED = {"animal": {"mammal": {"whale": {}, "dog": {}}}, "vehicle": {"ship": {"boat": {}}}}
PARENTS = {"mammal": "animal", "whale": ["mammal"], "dog": ["mammal"], "boat": "ship", "ship": ["vehicle"]}


@pytest.mark.parametrize("tree", [NESTED, PARENTS])
def test_added_hierarchy_changes_no_score(tmp_path, tree):
    pack = flat(tmp_path / "flat")
    made, told = with_hierarchy(pack, tree, tmp_path / "tree")
    assert {concept["name"]: concept["parents"] for concept in made.concepts} == {
        "animal": [],
        "mammal": ["c0"],
        "whale": ["c1"],
        "dog": ["c1"],
        "ship": [],
        "boat": ["c4"],
        "lie": [],
    }
    assert told.groups == ["vehicle"] and told.unnamed == ["c6"] and (told.n_placed, told.n_roots) == (4, 3)
    assert "'" not in str(told) and "vehicle" in str(told) and "c6" in str(told)
    before, after = scores(pack, states("resid_post.1")), scores(made, states("resid_post.1"))
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {concept["level"] for concept in made.concepts} == {0, 1, 2}


def test_hierarchy_group_without_a_probe_passes_its_children_up(tmp_path):
    made, told = with_hierarchy(
        flat(tmp_path / "flat"), {"animal": {"swimmers": {"big ones": {"whale": {}}}}}, tmp_path / "tree"
    )
    assert made.concepts[made.find("whale")]["parents"] == ["c0"] and told.groups == ["swimmers", "big ones"]


def test_hierarchy_groups_of_one_name_without_probes_stay_separate(tmp_path):
    """What is put under "other" in one branch has nothing to do with the "other" of another branch; a concept is one,
    wherever it stands.
    """
    tree = {
        "animal": {"other": {"kinds": {"whale": {}}, "lie": {}}},
        "vehicle": {"ship": {"other": {"kinds": {"boat": {}}, "lie": {}}}, "other": {"dog": {}}},
    }
    made, told = with_hierarchy(flat(tmp_path / "flat"), tree, tmp_path / "tree")
    parents = {concept["name"]: concept["parents"] for concept in made.concepts}
    assert parents == {
        "animal": [],
        "mammal": [],
        "whale": ["c0"],
        "dog": [],
        "ship": [],
        "boat": ["c4"],
        "lie": ["c0", "c4"],
    }
    assert told.groups == ["vehicle", "other", "kinds"] and told.unnamed == ["c1"]


def test_invalid_hierarchy_is_refused(tmp_path):
    pack = flat(tmp_path / "flat")
    for tree, error, message in (
        ({"whale": ["animal"], "animal": ["whale"]}, HierarchyError, "cycle"),
        ({}, PackError, "empty"),
        ({"animal": {"whale": "x"}}, PackError, "an object for each name"),
        ({"whale": 3}, PackError, "a name or a list"),
        ({"whale": {}, "c2": {}}, PackError, "one concept"),
        (
            {"zeppelin": {"zap": {}}},
            PackError,
            "no concept of flat is named in the hierarchy, which has 'zeppelin', 'zap'",
        ),
    ):
        with pytest.raises(error, match=message):
            with_hierarchy(pack, tree, tmp_path / "no")
    with pytest.raises(PackError, match="path rule"):
        with_hierarchy(flat(tmp_path / "p", rule="path"), NESTED, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def alike(path, *, n_families=6, n_each=30, spread=0.002, dtype=torch.float32, threshold=0.9, **more):
    """A flat pack of families of nearly equal directions, whose threshold few states exceed."""
    generator = torch.Generator().manual_seed(2)
    directions = torch.nn.functional.normalize(torch.randn(n_families, D, generator=generator), dim=1) * 2
    rows = (directions[:, None] + torch.randn(n_families, n_each, D, generator=generator) * spread).reshape(-1, D)
    n = len(rows)
    return ProbePack.write(
        path,
        name=path.name,
        concepts=[{"id": f"p{i}", "name": f"p{i}", "parents": []} for i in range(n)],
        weights={
            "w1": rows[:, None].to(dtype),
            "b1": torch.full((n, 1), -3.0) + torch.randn(n, 1, generator=generator) * 0.05,
        },
        score_rule="independent",
        inputs=[{"site": "resid_post.1", "norm": "layernorm"}],
        host={"hidden_size": D},
        licence="CC0-1.0",
        card="# alike\n",
        alert_threshold=torch.full((n,), threshold),
        golden_hidden=torch.randn(64, 1, D, generator=generator),
        **more,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_proposed_groups_find_all_that_fires_with_fewer_evaluations(tmp_path, dtype):
    pack = alike(tmp_path / "alike", dtype=dtype)
    proposal = propose(pack)
    made = proposal.write(tmp_path / "grouped")
    hidden = states("resid_post.1", n=300, seed=11)
    # States that lie along the probes, where scores are near the threshold: hardest for a bound.
    hidden["resid_post.1"][:180] = pack.weights["w1"][:, 0].float() * 3 + hidden["resid_post.1"][:180] * 0.3
    everything = exhaustive_reference(hidden, pack).numpy()
    expected = {
        (t, concept["id"]) for i, concept in enumerate(pack.concepts) for t in np.flatnonzero(everything[:, i] > 0.9)
    }
    found = DynamicProbeManager(
        made, impl="reference", strategy="descent", keep_top_k=0, max_loaded_probes=10_000
    ).score_tokens(hidden)
    fired = {(t, made.concepts[probe]["id"]) for t in range(300) for probe in found.fired(t)}
    assert fired == expected and len(expected) > 500
    share = found.coverage.active.mean() / pack.n_probes
    assert share < 0.75 and proposal.share < 0.75 and "exact cascade" in str(proposal)
    bounds = [i for i, concept in enumerate(made.concepts) if concept.get("bounding")]
    everything = exhaustive_reference(hidden, made)
    for bound in bounds:
        assert bool((everything[:, bound, None] >= everything[:, made.tree.children(bound)]).all())
    with pytest.raises(ConfigError, match="has bounding probes"):  # whose rounded scores bound nothing
        quantize(made, tmp_path / "int8")


def test_proposal_for_unrelated_probes_says_that_nothing_is_saved(tmp_path):
    pack = alike(tmp_path / "random", n_families=60, n_each=1, threshold=0.1)
    proposal = propose(pack)
    assert proposal.groups == [] and proposal.share == 1 and "no group of probes would save anything" in str(proposal)
    with pytest.raises(PackError, match="nothing is written"):
        proposal.write(tmp_path / "no")


def test_groups_are_not_proposed_when_no_bound_holds(tmp_path):
    for name, pack in (
        ("mlp", flat(tmp_path / "mlp", shape="one")),
        ("tree", write(tmp_path / "tree")),
        ("path", flat(tmp_path / "path", rule="path")),
    ):
        with pytest.raises(PackError, match="no bound is known"):
            propose(pack)
        assert name
    with pytest.raises(PackError, match="not normalised"):
        propose(flat(tmp_path / "raw", norm="none"))
    with pytest.raises(PackError, match="threshold is 2"):
        propose(flat(tmp_path / "flat"), threshold=2)


def test_arguments_that_are_not_packs_of_one_model_are_named(tmp_path):
    a = write(tmp_path / "a")
    for wrong in (
        lambda: merge(["a", a], tmp_path / "no", name="no"),
        lambda: subset("a", tmp_path / "no", ["a-1"]),
        lambda: rename("a", tmp_path / "no", name="x"),
        lambda: with_hierarchy("a", NESTED, tmp_path / "no"),
        lambda: propose("a"),
        lambda: quantize("a", tmp_path / "no"),
    ):
        with pytest.raises(PackError, match="'a' is a str: open it first"):
            wrong()
    other = ProbePack.write(
        tmp_path / "b",
        name="b",
        concepts=[{"id": "x", "name": "x", "parents": []}],
        weights={"w1": torch.zeros(1, 1, 7), "b1": torch.zeros(1, 1)},
        score_rule="independent",
        inputs=[{"site": "resid_post.1"}],
        host={},
        licence="CC0-1.0",
        card="",
    )
    with pytest.raises(PackError, match="a reads states of 24 values, b of 7: they are for different models"):
        pack_diff(a, other)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_pack_commands_merge_subset_and_diff(tmp_path):
    write(tmp_path / "a"), write(tmp_path / "b"), flat(tmp_path / "flat")
    merged = run("pack", "merge", tmp_path / "a", tmp_path / "b", tmp_path / "both", "--prefix")
    assert merged.exit_code == 0 and "both, 12 probes" in merged.stdout
    assert run("pack", "subset", tmp_path / "both", tmp_path / "some", "--concept", "a:a-2").exit_code == 0
    assert {concept["id"] for concept in ProbePack.open(tmp_path / "some").concepts} == {"a:a-0", "a:a-2"}
    (tmp_path / "names.json").write_text(json.dumps({"a-1": "second"}))
    assert (
        run(
            "pack", "rename", tmp_path / "a", tmp_path / "mine", "--name", "mine", "--concepts", tmp_path / "names.json"
        ).exit_code
        == 0
    )
    differs = run("pack", "diff", tmp_path / "a", tmp_path / "mine", "--json")
    assert differs.exit_code == 1 and json.loads(differs.stdout)["changed"] == {"a-1": {"name": ["a 1", "second"]}}
    assert run("pack", "diff", tmp_path / "a", tmp_path / "a").exit_code == 0
    (tmp_path / "tree.json").write_text(json.dumps(NESTED))
    placed = run("hierarchy", tmp_path / "flat", tmp_path / "tree.json")
    assert (
        placed.exit_code == 0
        and "4 concepts are under others" in placed.stdout
        and (tmp_path / "flat-tree" / "manifest.json").is_file()
    )
    alike(tmp_path / "alike")
    proposed = run("hierarchy", tmp_path / "alike", "--from-weights", "--json", "--out", tmp_path / "grouped")
    assert (
        json.loads(proposed.stdout)["n_groups"] >= 6
        and ProbePack.open(tmp_path / "grouped").recommended["load_threshold"] == "calibrated"
    )


def fired_in(pack, hidden, **settings):
    """By concept id; and how many pairs were dropped."""
    found = DynamicProbeManager(pack, impl="reference", strategy="descent", **settings).score_tokens(hidden)
    return {(t, pack.concepts[probe]["id"]) for t in range(len(found)) for probe in found.fired(t)}, int(
        found.coverage.dropped.sum()
    )


def family(path, prefix, *, n_each=40, seed=0, **recommended):
    """A hierarchical pack of many probes that fire: ten roots with children."""
    n = 10 * (1 + n_each)
    generator = torch.Generator().manual_seed(seed)
    concepts = [
        {"id": f"{prefix}{i}", "name": f"{prefix}{i}", "parents": [] if i < 10 else [f"{prefix}{i % 10}"]}
        for i in range(n)
    ]
    return ProbePack.write(
        path,
        name=path.name,
        concepts=concepts,
        weights={"w1": torch.randn(n, 1, D, generator=generator) / 5, "b1": torch.ones(n, 1)},
        score_rule="independent",
        inputs=[{"site": "resid_post.1", "norm": "layernorm"}],
        host={"hidden_size": D},
        licence="CC0-1.0",
        card="# random\n",
        alert_threshold=torch.full((n,), 0.6),
        recommended={"load_threshold": 0.2, **recommended},
    )


def test_merged_packs_lose_no_probe_that_fires_alone(tmp_path):
    hidden = states("resid_post.1", n=40, seed=3)
    packs = [family(tmp_path / name, name, seed=seed) for seed, name in enumerate("ab")]
    alone = [fired_in(pack, hidden) for pack in packs]
    made = merge(packs, tmp_path / "both", name="both")
    assert fired_in(made, hidden) == (alone[0][0] | alone[1][0], 0) and [dropped for _, dropped in alone] == [0, 0]
    assert (
        len(alone[0][0]) > 2000
        and made.recommended["max_loaded_probes"] == 1000
        and made.recommended["keep_top_k"] == 60
    )
    assert fired_in(made, hidden, max_loaded_probes=500)[1] > 0, "so there was something to lose"


def test_merged_flat_packs_have_room_for_all_their_roots(tmp_path):
    for sizes, rooms in (((300, 300), (500, 500)), ((12, 8), (12, 20))):
        packs = []
        for i, (n, room) in enumerate(zip(sizes, rooms, strict=True)):
            concepts = [{"id": f"{i}-{j}", "name": f"{j}", "parents": []} for j in range(n)]
            packs.append(
                write(
                    tmp_path / f"{i}-{n}",
                    n=n,
                    concepts=concepts,
                    **({} if room == 500 else {"recommended": {"max_loaded_probes": room}}),
                )
            )
        made = merge(packs, tmp_path / f"both-{sum(sizes)}", name="both")
        assert made.recommended["max_loaded_probes"] == sum(rooms) and DynamicProbeManager(
            made
        ).plan.always.sum() == sum(sizes)


def test_always_on_names_the_same_concept_in_every_derived_pack(tmp_path):
    """Named by number, name or id."""
    for given in (5, "a 5", "a-5"):
        place = tmp_path / str(given).replace(" ", "_")
        pack = write(place / "a", n=12, recommended={"always_on": [given]})
        other = write(place / "b", n=12, seed=1)
        assert subset(pack, place / "with", ["a-5"], below=False).recommended["always_on"] == ["a-5"]
        without = subset(pack, place / "without", ["a-1", "a-11"], below=False, above=False)
        assert without.recommended["always_on"] == [] and DynamicProbeManager(without).config.always_on == ()
        assert merge([other, pack], place / "m", name="m").recommended["always_on"] == ["a-5"]
        assert merge({"x": pack, "y": pack}, place / "p", name="p").recommended["always_on"] == ["x:a-5", "y:a-5"]
        DynamicProbeManager(ProbePack.open(place / "p"))
        assert rename(pack, place / "r", concepts={"a-5": {"id": "five"}}).recommended["always_on"] == ["five"]
    grouped = propose(alike(tmp_path / "alike", recommended={"always_on": [3]})).write(tmp_path / "grouped")
    assert grouped.recommended["always_on"] == ["p3"]


def test_grouped_pack_has_room_for_bounding_probes_and_keeps_running_thresholds(tmp_path):
    """520 probes, as many as may be loaded: with the bounding ones these are more."""
    pack = alike(
        tmp_path / "alike",
        n_families=40,
        n_each=13,
        recommended={"max_loaded_probes": 520},
        aggregated={"ema(0.3)": torch.full((520,), 0.8)},
    )
    made = propose(pack).write(tmp_path / "grouped")
    n = made.n_probes - 520
    assert n > 20 and made.recommended["max_loaded_probes"] == 520 + n
    open_all = {"resid_post.1": torch.randn(300, D, generator=torch.Generator().manual_seed(1))}
    everything = exhaustive_reference(open_all, pack).numpy()
    expected = {(t, f"p{i}") for i in range(520) for t in np.flatnonzero(everything[:, i] > 0.9)}
    assert fired_in(made, open_all) == (expected, 0) and expected
    assert (
        made.aggregated == ("ema(0.3)",)
        and made.thresholds_for("ema(0.3)").tolist() == [1.0] * n + [pytest.approx(0.8)] * 520
    )
    assert "# alike" in (tmp_path / "grouped/README.md").read_text()


def test_group_gets_an_unused_id(tmp_path):
    pack = alike(tmp_path / "alike")
    first = [f"p{int(group.members[0])}" for group in propose(pack).groups]
    other = next(concept["id"] for concept in pack.concepts if concept["id"] not in first)
    named = rename(pack, tmp_path / "named", concepts={other: {"id": f"group:{first[0]}"}})
    made = propose(named).write(tmp_path / "grouped")
    assert [concept["id"] for concept in made.concepts if concept.get("bounding")] == [
        f"group:group:{name}" for name in first
    ]


def test_calibrated_grouped_pack_still_finds_all_that_fires(tmp_path):
    from probemon.lab.calibration.calibrate import calibrate_alerts
    from probemon.lab.calibration.calibrated_pack import write_calibrated

    made = propose(alike(tmp_path / "alike")).write(tmp_path / "grouped")
    concepts = [i for i, concept in enumerate(made.concepts) if not concept.get("bounding")]
    benign = exhaustive_reference(states("resid_post.1", n=600, seed=1), made).numpy()[:, concepts]
    alerts = calibrate_alerts([benign], fpr=0.1)
    with pytest.raises(ConfigError, match="is a bounding probe"):
        write_calibrated(made, tmp_path / "no", watched=range(len(concepts)), alerts=alerts)
    new = write_calibrated(made, tmp_path / "new", watched=concepts, alerts=alerts)
    hidden = states("resid_post.1", n=200, seed=2)
    everything = exhaustive_reference(hidden, new).numpy()
    expected = {
        (t, new.concepts[i]["id"])
        for i in concepts
        for t in np.flatnonzero(everything[:, i] > new.alert_threshold[i].item())
    }
    assert (
        fired_in(new, hidden) == (expected, 0)
        and len(expected) > 500
        and new.recommended["load_threshold"] == "calibrated"
    )
    some = write_calibrated(
        made, tmp_path / "some", watched=concepts[:7], alerts=calibrate_alerts([benign[:, :7]], fpr=0.1)
    )
    everything = exhaustive_reference(hidden, some).numpy()
    expected = {
        (t, some.concepts[i]["id"])
        for i in concepts
        for t in np.flatnonzero(everything[:, i] > some.alert_threshold[i].item())
    }
    assert fired_in(some, hidden) == (expected, 0)


def test_invalid_merge_and_rename_arguments_are_named(tmp_path):
    pack = write(tmp_path / "a")
    for call, message in (
        (lambda: merge(pack, tmp_path / "m", name="m"), "nothing to merge it with"),
        (lambda: pack_diff(str(tmp_path / "a"), pack), "open it first"),
        (lambda: rename(pack, tmp_path / "r", concepts=["a"]), "give new names by id"),
        (lambda: rename(pack, tmp_path / "r", name=5), "the pack's name is 5: give a text"),
        (
            lambda: rename(pack, tmp_path / "r", concepts={"a-1": "a\x1b[2J"}),
            r"a concept's name is 'a\\x1b\[2J': give a text without control characters",
        ),
    ):
        with pytest.raises(PackError, match=message):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def fp64_oracle(pack, probes, concept, hidden, dtype, rule):
    """Scores `[N]` by id, in fp64 from the definition: normalised, rounded to the dtype, and by the path rule times the
    best parent.
    """

    def own(part):
        found = {}
        for i, line in enumerate(part.concepts):
            spec = part.inputs[int(part.input_index[i])]
            x = hidden[spec.site].to(torch.float64)
            if spec.norm == "layernorm":
                x = x - x.mean(-1, keepdim=True)
            if spec.norm != "none":
                x = x / (x.pow(2).mean(-1, keepdim=True) + spec.eps).sqrt()
            w = part.weights["w1"][i, 0].to(dtype).to(torch.float64)
            found[line["id"]] = torch.sigmoid(x.to(dtype).to(torch.float64) @ w + part.weights["b1"][i, 0].double())
        return found

    scores_of, expected = own(pack), {}
    for line in pack.concepts:  # by level
        one = scores_of[line["id"]]
        best = [expected[parent] for parent in line["parents"]] if pack.score_rule == "path" else []
        expected[line["id"]] = one * torch.stack(best).amax(0) if best else one
    above = expected[pack.concepts[pack.find(concept)]["id"]]
    return expected | {key: one * above if rule == "path" else one for key, one in own(probes).items()}


@pytest.mark.parametrize("pack_rule, rule", [("path", "path"), ("path", "independent"), ("independent", "independent")])
@pytest.mark.parametrize("dtypes", [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
@pytest.mark.parametrize("site", ["resid_post.1", "resid_post.2"])
def test_attached_probe_scores_as_its_rule_says(tmp_path, pack_rule, rule, dtypes, site):
    one, other = (ROUNDINGS[dtype] for dtype in dtypes)
    pack = write(tmp_path / "a", n=14, rule=pack_rule, dtype=one, seed=7)
    flat = [{"id": f"mine-{i}", "name": f"mine {i}", "parents": []} for i in range(3)]
    mine = write(tmp_path / "mine", n=3, concepts=flat, site=site, norm="none", dtype=other, seed=8)
    stated = None if one == other else "bf16"
    made = attach_below(pack, "a 2", mine, tmp_path / "both", score_rule=rule, dtype=stated)
    assert ProbePack.open(made.directory, verify=True).n_probes == 17
    hidden = states("resid_post.1", site)
    expected = fp64_oracle(pack, mine, "a 2", hidden, one, rule)
    found = scores(made, hidden)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[key].double(), expected[key], atol=2e-6, rtol=0) for key in expected)
    is_below = not (pack_rule == "path" and rule == "independent")
    assert made.path(made.find("mine-1")) == ([*pack.path(pack.find("a-2")), "mine 1"] if is_below else ["mine 1"])
    # A descent by what the pack recommends finds every concept that fires, as the exact rule promises.
    for hidden_of in (states("resid_post.1", site, n=40, seed=seed) for seed in range(3)):
        manager = DynamicProbeManager(made)
        everything = manager.score_all(hidden_of)
        fires = everything > made.alert_threshold
        seen = manager.score_tokens(hidden_of)
        for t in range(40):
            active = seen.active(t)
            assert np.allclose(seen.active_scores(t), everything[t, active], atol=1e-6)
            if pack_rule == "path":
                assert seen.fired(t).tolist() == fires[t].nonzero()[:, 0].tolist()
    assert fires[:, [made.find(f"mine-{i}") for i in range(3)]].any()


def test_attached_probe_leaves_thresholds_sets_and_calibration_of_the_pack(tmp_path):
    alert = torch.full((6,), 0.3)
    pack = write(tmp_path / "a", rule="path", alert_set="strict", alert_sets={"loose": alert})
    mine = write(tmp_path / "mine", n=1, concepts=[{"id": "mine", "name": "mine", "parents": []}], golden=False)
    made = attach_below(pack, "a 1", mine, tmp_path / "both", score_rule="path", alert_threshold=0.25)
    at = [made.find(concept["id"]) for concept in pack.concepts]
    assert made.alert_set == "strict" and torch.equal(made.alert_threshold[at], pack.alert_threshold)
    assert torch.equal(made.with_alert_set("loose").alert_threshold[at], alert)
    for one in (made, made.with_alert_set("loose")):
        assert float(one.alert_threshold[made.find("mine")]) == 0.25
    assert torch.equal(made.golden_hidden, pack.golden_hidden)
    assert made.manifest["provenance"]["how"]["score_rule"] == "path"


@pytest.mark.parametrize("rule", ["independent", "path"])
def test_calibrated_descent_opens_attached_probes(tmp_path, rule):
    expand = torch.tensor([0.9, 0.9, 0.9, *[math.nan] * 5])
    pack = write(tmp_path / "a", n=8, rule=rule, expand_threshold=expand, recommended={"load_threshold": "calibrated"})
    mine = write(tmp_path / "mine", n=1, concepts=[{"id": "mine", "name": "mine", "parents": []}])
    made = attach_below(pack, "a-6", mine, tmp_path / "both", score_rule=rule)
    manager, hidden = DynamicProbeManager(made), states("resid_post.1", n=60)
    seen, everything = manager.score_tokens(hidden), manager.score_all(hidden)
    new, leaf = made.find("mine"), made.find("a-6")
    for t in range(60):
        if rule == "path":
            assert (new in seen.fired(t)) == bool(everything[t, new] > made.alert_threshold[new])
        else:
            assert (new in seen.active(t)) == (leaf in seen.active(t))
    assert (everything[:, new] > made.alert_threshold[new]).any()


def test_probes_that_cannot_be_attached_are_refused_with_the_remedy(tmp_path):
    pack, flat = write(tmp_path / "a", rule="path"), [{"id": "mine", "name": "mine", "parents": []}]
    mine = write(tmp_path / "mine", n=1, concepts=flat, dtype=torch.bfloat16)
    deep = write(tmp_path / "deep")
    refused = [
        (
            dict(score_rule="path"),
            r"dtype differs: float32 \(a\), bfloat16 \(mine\)\. State the rounding, dtype='bf16'",
        ),
        (dict(score_rule="path", dtype="int8"), "dtype is 'int8': give 'bf16' or 'fp32'"),
        (dict(score_rule="conditioned", dtype="bf16"), "score_rule"),
        (dict(score_rule="path", dtype="bf16", alert_threshold=1.0), "alert_threshold is 1.0"),
        (dict(score_rule="path", dtype="bf16", probes=deep), "deep has a hierarchy"),
        (dict(score_rule="path", dtype="bf16", pack=deep), "give score_rule='independent'"),
        (dict(score_rule="path", dtype="bf16", pack=quantize(pack, tmp_path / "int8")), "probemon quantize"),
    ]
    for given, message in refused:
        given = {"pack": pack, "probes": mine, **given}
        with pytest.raises((PackError, ConfigError), match=message):
            attach_below(given.pop("pack"), 1, given.pop("probes"), tmp_path / "no", **given)
    mine.alert_threshold[:] = math.nan
    with pytest.raises(PackError, match="'mine' has no alert threshold"):
        attach_below(pack, 1, mine, tmp_path / "no", score_rule="path", dtype="bf16")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_packs_of_two_dtypes_merge_by_a_stated_rounding(tmp_path, dtype):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", dtype=torch.bfloat16, seed=2)
    made = merge([a, b], tmp_path / "both", name="both", dtype=dtype)
    assert made.dtype == ROUNDINGS[dtype] and made.manifest["provenance"]["how"]["dtype"] == dtype
    hidden = states("resid_post.1")
    found = scores(made, hidden)
    for part in (a, b):
        expected = fp64_oracle(part, part, 0, hidden, ROUNDINGS[dtype], "independent")
        assert all(torch.allclose(found[key].double(), one, atol=2e-6, rtol=0) for key, one in expected.items())


@pytest.mark.parametrize("deep, flat", [("path", "independent"), ("independent", "path")])
def test_flat_packs_merge_with_packs_of_the_other_score_rule(tmp_path, deep, flat):
    a = write(tmp_path / "a", rule=deep)
    names = [{"id": f"b-{i}", "name": f"b {i}", "parents": [], "level": i} for i in range(3)]
    b = write(tmp_path / "b", n=3, rule=flat, concepts=names, seed=4)
    made, hidden = merge([b, a], tmp_path / "both", name="both"), states("resid_post.1", n=30)
    expected, found = {**scores(a, hidden), **scores(b, hidden)}, scores(made, hidden)
    assert made.score_rule == deep
    assert all(torch.allclose(found[key], expected[key], atol=1e-6, rtol=0) for key in expected)
    together = DynamicProbeManager([a, b]).score_tokens(hidden)
    alone, ids = DynamicProbeManager(made).score_tokens(hidden), [concept["id"] for concept in made.concepts]
    group = DynamicProbeManager([a, b]).pack
    for t in range(30):
        want = {group.concepts[i]["id"].partition(":")[2] for i in together.fired(t)}
        assert want <= {ids[i] for i in alone.fired(t)} if deep == "path" else want == {ids[i] for i in alone.fired(t)}


def test_commands_attach_and_merge_by_a_stated_rounding(tmp_path):
    write(tmp_path / "a", rule="path")
    concepts = [{"id": "mine", "name": "mine", "parents": []}]
    write(tmp_path / "mine", n=1, concepts=concepts, dtype=torch.bfloat16)
    a, mine, out, both = (str(tmp_path / name) for name in ("a", "mine", "out", "both"))
    more = ["--score-rule", "path", "--alert-threshold", "0.5", "--dtype", "bf16"]
    said = CliRunner().invoke(app, ["pack", "attach", a, "a 1", mine, out, *more])
    assert said.exit_code == 0, said.output
    made = ProbePack.open(out)
    assert made.path(made.find("mine")) == ["a 1", "mine"] and float(made.alert_threshold[made.find("mine")]) == 0.5
    assert CliRunner().invoke(app, ["pack", "merge", a, mine, both, "--dtype", "fp32"]).exit_code == 0
    assert ProbePack.open(both).dtype == torch.float32

"""Hierarchy, pack and kernels: values against plain Python, and every damaged pack named."""

import json
import math
import os
import random
import shutil

os.environ.setdefault("TRITON_INTERPRET", "1")

import itertools

import numpy as np
import pytest
import torch

from nets import dequantized
from probemon.core.dtypes import input_dtype
from probemon.core.hierarchy import ConceptTree
from probemon.core.inputs import FEW, prepare_input
from probemon.core.probes import NORMS, InputSpec
from probemon.core.reference import exhaustive_reference
from probemon.core.settings import CascadeConfig
from probemon.engine.kernels import IMPLS, score_probes
from probemon.engine.pairs import input_maker
from probemon.errors import (
    ConfigError,
    HierarchyError,
    PackCorrupt,
    PackError,
    PackVersionError,
    UnknownConcept,
    UnknownSetting,
)
from probemon.packs.pack import ProbePack
from probemon.packs.quantize import quantize_weights

SHIPPED = ["probes/wordnet-smollm2-135m", "probes/wordnet-smollm2-135m-mlp"]


def random_weights(p, d, hidden, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    widths = (d, *hidden, 1)
    made = {}
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        w, bias = torch.randn(p, b, a, generator=g) / a**0.5, torch.randn(p, b, generator=g)
        if i == 0:
            made["w1"], made["b1"] = w, bias
        elif b == 1:
            made["w3"], made["b3"] = w[:, 0], bias[:, 0]
        else:
            made["w2"], made["b2"] = w, bias
    if dtype == torch.int8:
        return quantize_weights(made)
    return {k: v.to(dtype) if k.startswith("w") else v for k, v in made.items()}


def plain_score(x, weights, slot):
    """fp64 plain Python: the oracle of a score."""
    weights = dequantized(weights)

    def layer(w, b, values):
        return [
            sum(float(wi) * vi for wi, vi in zip(row, values, strict=True)) + float(bi)
            for row, bi in zip(w, b, strict=True)
        ]

    h = layer(weights["w1"][slot].tolist(), weights["b1"][slot].tolist(), [float(v) for v in x])
    if "w2" in weights:
        h = layer(weights["w2"][slot].tolist(), weights["b2"][slot].tolist(), [max(v, 0.0) for v in h])
    if "w3" in weights:
        h = layer([weights["w3"][slot].tolist()], [float(weights["b3"][slot])], [max(v, 0.0) for v in h])
    return 1 / (1 + math.exp(-h[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("hidden", [(), (1,), (7,), (16, 5), (33, 2)])
@pytest.mark.parametrize("impl", IMPLS)
def test_kernel_equals_fp64_oracle(impl, hidden, dtype):
    weights = random_weights(6, 37, hidden, dtype)
    x = torch.randn(3, 37, generator=torch.Generator().manual_seed(1))
    rows, slots = torch.tensor([0, 2, 1, 0, 2]), torch.tensor([5, 0, 3, 1, 2])
    scored = score_probes(x, weights, rows, slots, impl=impl)
    rounded = x.to(input_dtype(dtype))
    expected = [
        plain_score(rounded[r].tolist(), weights, s) for r, s in zip(rows.tolist(), slots.tolist(), strict=True)
    ]
    assert np.abs(scored.numpy() - np.array(expected)).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("hidden", [(), (7,), (16, 5)])
@pytest.mark.parametrize("impl", IMPLS)
def test_score_has_the_same_bits_whatever_else_is_scored(impl, hidden, dtype):
    weights = random_weights(19, 37, hidden, dtype)
    x = torch.randn(4, 37, generator=torch.Generator().manual_seed(2))
    rows, slots = torch.arange(4).repeat_interleave(19), torch.arange(19).repeat(4)
    everything = score_probes(x, weights, rows, slots, impl=impl).view(4, 19)
    alone = torch.cat(
        [score_probes(x[2:3], weights, torch.tensor([0]), torch.tensor([s]), impl=impl) for s in range(19)]
    )
    assert torch.equal(alone, everything[2])


def test_nan_weight_gives_nan_in_every_implementation():
    weights = random_weights(2, 9, (4, 3), torch.float32)
    weights["w1"][1, 2, 3] = float("nan")
    for impl in IMPLS:
        scored = score_probes(torch.ones(1, 9), weights, torch.tensor([0, 0]), torch.tensor([0, 1]), impl=impl)
        assert torch.isnan(scored).tolist() == [False, True], impl


def normalised(x, norm, eps):
    """States normalised as their norm is defined, in fp64."""
    if norm == "none":
        return x
    if norm == "layernorm":
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    if norm == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    raise NotImplementedError(f"no oracle for {norm}")


def prepared(impl, spec, n):
    """States [n, 31], and what an implementation makes of them for probes."""
    x = torch.randn(n, 31, generator=torch.Generator().manual_seed(3)) * 7 + 2
    return x, input_maker([spec], torch.float32, torch.device("cpu"), impl).make({spec.site: x}).values


@pytest.mark.parametrize("n", [1, FEW + 1])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_normalises_as_fp64(impl, norm, n):
    x, values = prepared(impl, InputSpec("resid_post.0", norm, 1e-5), n)
    assert (values - normalised(x.double(), norm, 1e-5)).abs().max() < 1e-5


@pytest.mark.parametrize("n", [1, FEW + 1])
@pytest.mark.parametrize("impl", IMPLS)
def test_norm_unknown_to_an_implementation_is_an_error(impl, n):
    spec = InputSpec("resid_post.0")
    object.__setattr__(spec, "norm", "l2")  # as if it were in the list of norms already
    with pytest.raises(ConfigError, match=r"\.py does not compute norm 'l2', only none, layernorm, rmsnorm: use one"):
        prepared(impl, spec, n)


def random_dag(rng, n, two_parents):
    ids = [f"c{i}" for i in range(n)]
    parents = [
        [] if i < 2 else [ids[j] for j in rng.sample(range(i), k=min(i, rng.choice([1, 2]) if two_parents else 1))]
        for i in range(n)
    ]
    shuffled = list(range(n))
    rng.shuffle(shuffled)
    return [ids[i] for i in shuffled], [parents[i] for i in shuffled]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("two_parents", [False, True])
@pytest.mark.parametrize("stated", [False, True])
def test_tree_arrays_agree_with_dicts(seed, two_parents, stated):
    rng = random.Random(seed)
    ids, parents = random_dag(rng, rng.choice([1, 2, 17, 40]), two_parents)
    levels = {n: rng.randrange(4) for n in ids}  # edges of such a hierarchy go down, along and up
    order, tree = ConceptTree.build(ids, parents, [levels[n] for n in ids] if stated else None)
    up = dict(zip(ids, parents, strict=True))
    name = [ids[i] for i in order]
    number = {n: i for i, n in enumerate(name)}

    def rank(n):
        return max([levels[n] if stated else 0, *(rank(p) + 1 for p in up[n])])

    assert tree.level.tolist() == [levels[n] if stated else rank(n) for n in name]
    assert tree.rank.tolist() == sorted(rank(n) for n in name) == [rank(n) for n in name]
    assert all(number[p] < number[n] for n in ids for p in up[n])

    def above(n):
        return set(up[n]) | {a for p in up[n] for a in above(p)}

    scores = np.array([[rng.random() for _ in name] for _ in range(3)], dtype=np.float32)
    path = tree.times_best_parent(scores.copy())
    values = np.array([rng.random() for _ in name], dtype=np.float32)
    lowest = tree.min_over_descendants(values)
    mask = np.array([[rng.random() < 0.3 for _ in name] for _ in range(3)])
    closed, children = tree.close(mask), tree.children_of(mask)
    for i, n in enumerate(name):
        assert {name[a] for a in tree.ancestors(i)} == above(n)
        assert {name[p] for p in tree.parents(i)} == set(up[n])
        below = [number[m] for m in name if n in above(m)]
        assert lowest[i] == (values[below].min() if below else np.inf)
        for row in range(3):
            best = max((path[row, number[p]] for p in up[n]), default=np.float32(1))
            assert path[row, i] == scores[row, i] * best
            assert closed[row, i] == (mask[row, i] or any(mask[row, b] for b in below))
            assert children[row, i] == any(mask[row, number[p]] for p in up[n])
    if not two_parents:
        for i in range(tree.n):
            kids = tree.children(i)
            next_rank = kids[tree.rank[kids] == tree.rank[i] + 1]
            assert len(next_rank) == 0 or (np.diff(next_rank) == 1).all()


@pytest.mark.parametrize(
    ("ids", "parents", "message"),
    [
        (["a", "b"], [["b"], ["a"]], "cycle"),
        (["a"], [["a"]], "cycle"),
        (["a"], [["zebra"]], "zebra"),
        (["a", "a"], [[], []], "twice"),
        (["a", "b"], [[], ["a", "a"]], "twice"),
    ],
)
def test_bad_hierarchy_is_named(ids, parents, message):
    with pytest.raises(HierarchyError, match=message):
        ConceptTree.build(ids, parents)


def test_probes_numbered_before_their_parents_are_refused():
    """Whatever the levels say: a cycle among equal levels is one, too."""
    for level in ([0, 0, 0], [0, 1, 2], [2, 1, 0], [5, 5, 5]):
        with pytest.raises(HierarchyError, match=r"cycle through probes \[1, 2, 1\]"):
            ConceptTree([0, 1, 2, 3], [1, 2, 1], level)
    with pytest.raises(HierarchyError, match="numbered by level, each after its parents"):
        ConceptTree([0, 0, 1], [0], [1, 1])
    with pytest.raises(HierarchyError, match="numbered by level, each after its parents"):
        ConceptTree([0, 1, 1, 1], [1], [1, 0, 1])  # ranks 1, 2, 1
    for level in (-1, 2**15):
        with pytest.raises(HierarchyError, match=f"concept 'b' is at level {level}: levels lie in 0..32767"):
            ConceptTree.build(["a", "b"], [[], ["a"]], [0, level])


@pytest.fixture
def toy(tmp_path):
    concepts = [
        {"id": "whale", "name": "whale", "parents": ["mammal"]},
        {"id": "animal", "name": "animal", "parents": []},
        {"id": "mammal", "name": "mammal", "parents": ["animal"]},
        {"id": "plant", "name": "life", "parents": []},
        {"id": "bird", "name": "life", "parents": ["animal"]},
    ]
    pack = ProbePack.write(
        tmp_path / "toy",
        name="toy",
        concepts=concepts,
        weights=random_weights(5, 11, (4, 3), torch.bfloat16),
        score_rule="path",
        inputs=[{"site": "resid_post.1", "norm": "rmsnorm", "eps": 1e-6}],
        host={"hidden_size": 11, "n_layers": 4},
        licence="CC0-1.0",
        card="# toy\n",
        alert_threshold=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
        golden_hidden=torch.randn(3, 1, 11),
    )
    return pack


def test_written_pack_keeps_every_probe_with_its_concept(toy):
    weights = random_weights(5, 11, (4, 3), torch.bfloat16)
    given = ["whale", "animal", "mammal", "plant", "bird"]
    assert [c["id"] for c in toy.concepts] == ["animal", "plant", "mammal", "bird", "whale"]
    for i, concept in enumerate(toy.concepts):
        for key, tensor in weights.items():
            assert torch.equal(toy.weights[key][i], tensor[given.index(concept["id"])]), (concept["id"], key)
    assert toy.alert_threshold.tolist() == pytest.approx([0.2, 0.4, 0.3, 0.5, 0.1])
    assert toy.path(toy.find("whale")) == ["animal", "mammal", "whale"]
    assert toy.weights["w1"].dtype == torch.bfloat16


def test_golden_scores_are_path_scores(toy):
    scored = exhaustive_reference({"resid_post.1": toy.golden_hidden[:, 0]}, toy)
    assert torch.equal(scored, toy.golden_scores)
    own = {}
    x = prepare_input(toy.golden_hidden[:, 0], toy.inputs[0], torch.bfloat16)
    for i in (0, 2, 4):
        own[i] = plain_score(x[1].tolist(), toy.weights, i)
    assert float(toy.golden_scores[1, 4]) == pytest.approx(own[0] * own[2] * own[4], abs=1e-5)


def edit_manifest(pack, **changes):
    path = pack.directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("file", ["probes.safetensors", "concepts.jsonl", "README.md"])
def test_truncated_file_is_named(toy, file):
    path = toy.directory / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PackCorrupt, match=f"{file} is truncated"):
        ProbePack.open(toy.directory)


@pytest.mark.parametrize("file", ["probes.safetensors", "concepts.jsonl", "README.md"])
def test_edited_file_is_named_by_verify(toy, file):
    path = toy.directory / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(PackCorrupt, match=f"{file} was changed"):
        ProbePack.open(toy.directory, verify=True)


def test_missing_file_is_named(toy):
    (toy.directory / "concepts.jsonl").unlink()
    with pytest.raises(PackCorrupt, match=r"concepts\.jsonl is missing"):
        ProbePack.open(toy.directory)


def test_newer_format_version_is_refused(toy):
    edit_manifest(toy, format_version=99)
    with pytest.raises(PackVersionError, match="99"):
        ProbePack.open(toy.directory)


@pytest.mark.parametrize(
    "changes", [{"format": "zip"}, {"score_rule": "vote"}, {"inputs": [{"site": "x", "norm": "batch"}]}, {"host": 3}]
)
def test_foreign_manifest_is_refused(toy, changes):
    edit_manifest(toy, **changes)
    with pytest.raises(PackError, match=next(iter(changes)).rstrip("s")):
        ProbePack.open(toy.directory)


def test_manifest_with_a_path_outside_the_pack_is_refused(toy):
    files = toy.manifest["files"] | {"../x": {"sha256": "0", "size": 0}}
    edit_manifest(toy, files=files)
    with pytest.raises(PackCorrupt, match="outside"):
        ProbePack.open(toy.directory)


def test_nan_weight_is_named_with_its_concept(tmp_path):
    weights = random_weights(2, 5, (), torch.float32)
    weights["w1"][1, 0, 2] = float("nan")
    with pytest.raises(PackCorrupt, match="'b'"):
        ProbePack.write(
            tmp_path / "bad",
            name="bad",
            concepts=[{"id": i, "name": i, "parents": []} for i in "ab"],
            weights=weights,
            score_rule="independent",
            inputs=[{"site": "resid_post.0"}],
            host={},
            licence="x",
            card="x",
        )
    assert list(tmp_path.iterdir()) == []


def test_existing_pack_is_not_overwritten_unasked(toy):
    with pytest.raises(PackError, match="overwrite=True"):
        ProbePack.write(
            toy.directory, name="x", concepts=[], weights={}, score_rule="path", inputs=[], host={}, licence="", card=""
        )


def test_unknown_and_ambiguous_concepts_are_explained(toy):
    with pytest.raises(UnknownConcept, match="did you mean 'whale'"):
        toy.find("whales")
    with pytest.raises(UnknownConcept, match=r"plant .*bird"):
        toy.find("life")
    assert toy.concepts[toy.find("bird")]["id"] == "bird"


def test_unknown_setting_names_the_nearest():
    with pytest.raises(UnknownSetting, match="keep_top_k"):
        CascadeConfig.of({"keep_topk": 3})
    for wrong in ({"always_on": "c1"}, {"always_on": 5}, {"base_layers": 0}, {"base_layers": None}):
        with pytest.raises(ConfigError, match="give a list, even of one"):
            CascadeConfig.of(wrong)
    with pytest.raises(ConfigError, match="keep_top_k is -1"):
        CascadeConfig.of({"keep_top_k": -1})


@pytest.mark.parametrize("path", SHIPPED)
def test_shipped_pack_is_complete_and_replays(path):
    assert ProbePack.open(path, verify=True).verify() < 1e-5


@pytest.mark.parametrize("path", SHIPPED)
def test_shipped_packs_meet_their_quality_limits(path):
    pack = ProbePack.open(path)
    q = pack.manifest["quality"]
    assert pack.n_probes >= 250 and len(pack.manifest["counts_per_level"]) >= 4
    assert q["auroc_median"] >= 0.95 and q["auroc_p10"] >= 0.88
    assert q["auroc_examples_median"] >= 0.88 and q["auroc_siblings_median"] >= 0.79
    assert q["firing_recall_exact"] == 1.0 and q["share_evaluated_exact"] <= 0.25


def test_one_changed_weight_fails_the_golden_replay(tmp_path):
    copy = tmp_path / "pack"
    shutil.copytree(SHIPPED[0], copy)
    path = copy / "probes.safetensors"
    pack = ProbePack.open(copy)
    w1 = pack.weights["w1"].clone()
    w1[0] += 1.0
    pack.weights["w1"] = w1
    with pytest.raises(PackCorrupt, match="golden replay"):
        pack.verify()
    assert path.is_file()

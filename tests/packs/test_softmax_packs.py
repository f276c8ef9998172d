"""Packs with softmax groups: what is refused, and how copies, subsets, merges and comparisons treat groups."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import HIDDEN
from forging import forge
from grouped_packs import GROUPS, everything_by_fp64, write
from probemon import DynamicProbeManager, ProbePack
from probemon.cli.app import app
from probemon.core.probes import Architecture
from probemon.errors import HierarchyError, PackCorrupt, PackError, PackVersionError
from probemon.packs.diff import pack_diff
from probemon.packs.edit import merge, rename, subset
from probemon.packs.hierarchies import propose, with_hierarchy
from probemon.packs.quantize import quantize
from probemon.packs.writer import PackWriter


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return write(tmp_path_factory.mktemp("packs") / "grouped", (), torch.float32)


def states(n=6):
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(5))


def by_id(pack, hidden):
    """The scores of every concept by a manager, by id."""
    everything = DynamicProbeManager(pack).score_all(hidden).numpy()
    return {concept["id"]: everything[:, i] for i, concept in enumerate(pack.concepts)}


def groups_by_id(pack):
    groups = pack.tree.groups
    return {
        frozenset(pack.concepts[p]["id"] for p in groups.members[groups.ptr[g] : groups.ptr[g + 1]])
        for g in range(len(groups))
    }


GIVEN = {frozenset(f"c{i}" for i, own in enumerate(GROUPS) if own == group) for group in set(GROUPS) - {-1}}


def test_written_groups_read_back_in_format_version_2(grouped, tmp_path):
    assert groups_by_id(grouped) == groups_by_id(ProbePack.open(grouped.directory)) == GIVEN
    assert grouped.manifest["format_version"] == 2
    assert grouped.softmax_group.unique().tolist() == [-1, 0, 1, 2, 3]
    plain = write(tmp_path / "plain", (), torch.float32, softmax_group=torch.full((len(GROUPS),), -1))
    assert plain.manifest["format_version"] == 1 and plain.softmax_group.tolist() == [-1] * len(GROUPS)
    assert "softmax_group" not in plain._tensors.described


def test_groups_written_probe_by_probe_have_the_same_golden_scores(grouped, tmp_path):
    """Golden scores of a group need all its members, wherever they are put."""
    spec = {
        "name": "groups", "concepts": [dict(concept) for concept in grouped.concepts], "dtype": torch.float32,
        "architecture": Architecture(HIDDEN), "score_rule": "independent", "host": {}, "licence": "CC0-1.0",
        "inputs": [spec.as_dict() for spec in grouped.inputs], "card": "Random.\n",
        "golden_hidden": grouped.golden_hidden, "softmax_group": grouped.softmax_group,
    }  # fmt: skip
    logits = {}
    with PackWriter(tmp_path / "pack", **spec) as writer:
        for i in reversed(range(grouped.n_probes)):
            logits[i] = writer.put(i, {name: tensor[i] for name, tensor in grouped.weights.items()})
    assert torch.equal(writer.opened.golden_scores, grouped.golden_scores)
    group = np.flatnonzero(grouped.tree.groups.of == 1).tolist()
    shares = torch.cat([logits[i] for i in group], dim=1).double().softmax(dim=1)
    assert (shares - grouped.golden_scores[:, group]).abs().max() < 1e-7


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({0: 4, 5: 4}, "'c0' and 'c5' are of one softmax group"),  # a parent and its child
        ({5: 1, 7: 1}, "'c5' and 'c7' are of one softmax group"),  # of other parents
        ({3: 0}, "concept 'c3' is alone in its softmax group"),
        ({10: 3, 11: 3}, "'c10' and 'c11' .* read different inputs"),
        ({0: -2}, "other values than whole numbers from -1"),
    ],
)
def test_invalid_groups_are_refused_when_written(tmp_path, groups, why):
    given = torch.full((len(GROUPS),), -1)
    for concept, group in groups.items():
        given[concept] = group
    with pytest.raises((HierarchyError, PackError), match=why):
        write(tmp_path / "pack", (), torch.float32, sites=("resid_post.1", "resid_post.2"), softmax_group=given)
    assert not (tmp_path / "pack").exists()
    with pytest.raises(PackError, match="softmax_group holds other values"):
        write(tmp_path / "pack", (), torch.float32, softmax_group=given.double() + 0.5)


def test_members_on_different_levels_are_refused(tmp_path):
    concepts = [{"id": name, "name": name, "parents": [], "level": level} for name, level in (("a", 0), ("b", 1))]
    with pytest.raises(HierarchyError, match="'a' and 'b' are of one softmax group"):
        write(
            tmp_path / "pack", (), torch.float32, concepts=concepts, softmax_group=torch.zeros(2, dtype=torch.int64),
            weights={"w1": torch.ones(2, 1, HIDDEN), "b1": torch.zeros(2, 1)}, input_index=None, alert_threshold=None,
        )  # fmt: skip


def cut(tensors):
    tensors["softmax_group"][tensors["softmax_group"] == 1] = -1
    tensors["softmax_group"][-1] = 1


def unlike(tensors):
    tensors["softmax_group"][0] = tensors["softmax_group"].max()


def short(tensors):
    tensors["softmax_group"] = tensors["softmax_group"][:-1]


def wide(tensors):
    tensors["softmax_group"] = tensors["softmax_group"].to(torch.int64)


def negative(tensors):
    tensors["softmax_group"][2] = -(2**31)


def gone(tensors):
    del tensors["softmax_group"]


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (cut, HierarchyError, "alone in its softmax group"),
        (unlike, HierarchyError, "are of one softmax group"),
        (short, PackCorrupt, "softmax_group is torch.int32"),
        (wide, PackCorrupt, "softmax_group is torch.int64"),
        (negative, HierarchyError, "values from -2147483648"),
        (gone, PackVersionError, "no softmax_group, and the manifest's format_version is 2"),
    ],
)
def test_forged_groups_are_refused_when_opened(grouped, tmp_path, change, error, why):
    with pytest.raises(error, match=why):
        ProbePack.open(forge(grouped, tmp_path / "forged", change))


def test_version_1_pack_with_groups_is_refused(grouped, tmp_path):
    """A reader of version 1 would take each member's sigmoid: what says 1 and has groups is refused here, too."""
    folder = forge(grouped, tmp_path / "forged", lambda tensors: None)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 1}))
    with pytest.raises(PackVersionError, match="holds a softmax_group, and the manifest's format_version is 1"):
        ProbePack.open(folder)


def test_subset_takes_the_whole_group(grouped, tmp_path):
    hidden = states()
    before = by_id(grouped, hidden)
    cut_out = subset(grouped, tmp_path / "below", ["c10"])
    assert {concept["id"] for concept in cut_out.concepts} == {"c0", "c5", "c6", "c10", "c12"}
    alone = subset(grouped, tmp_path / "alone", ["c8"], above=False, below=False)
    assert {concept["id"] for concept in alone.concepts} == {"c7", "c8", "c9"}
    for pack in (cut_out, alone):
        for concept, scores in by_id(pack, hidden).items():
            assert np.array_equal(scores, before[concept])


def test_merged_and_renamed_packs_score_as_before(grouped, tmp_path):
    hidden = states()
    other = write(tmp_path / "other", (24,), torch.float32, seed=3)  # its linear fellow is widened
    both = merge({"a": grouped, "b": other}, tmp_path / "both", name="both")
    assert groups_by_id(both) == {frozenset(f"{name}:{c}" for c in group) for group in GIVEN for name in "ab"}
    after = by_id(both, hidden)
    for name, pack in (("a", grouped), ("b", other)):
        for concept, scores in by_id(pack, hidden).items():
            assert np.abs(after[f"{name}:{concept}"] - scores).max() < 1e-6
    renamed = rename(grouped, tmp_path / "renamed", concepts={"c8": {"id": "joy"}})
    assert frozenset({"c7", "joy", "c9"}) in groups_by_id(renamed)
    assert np.array_equal(by_id(renamed, hidden)["joy"], by_id(grouped, hidden)["c8"])


def test_int8_copy_states_how_far_shares_moved(grouped, tmp_path):
    small = quantize(grouped, tmp_path / "small")
    moved = (everything_by_fp64(small, grouped.golden_hidden[:, 0]) - grouped.golden_scores).abs().max()
    assert groups_by_id(small) == GIVEN
    assert small.manifest["quality"]["int8"]["max_score_error"] == pytest.approx(float(moved), abs=1e-6)


def test_pack_diff_names_changed_groups(grouped, tmp_path):
    given = torch.tensor([-1 if group == 5 else group for group in GROUPS])
    other = write(tmp_path / "other", (), torch.float32, softmax_group=given)
    diff = pack_diff(grouped, other)
    assert list(diff.changed) == ["c7", "c8", "c9"]
    for changes in diff.changed.values():
        assert changes.pop("golden_scores") > 0 and changes == {"softmax_group": [["c7", "c8", "c9"], None]}
    assert "softmax_group of 3 concepts differ" in str(diff)
    assert pack_diff(grouped, ProbePack.open(grouped.directory)).same


def test_hierarchy_may_not_split_a_group_and_bounds_are_refused(grouped, tmp_path):
    with pytest.raises(HierarchyError, match="'c7' and 'c8' are of one softmax group"):
        with_hierarchy(grouped, {"c0": {"c7": {}}}, tmp_path / "tree")
    flat, _ = with_hierarchy(grouped, {"c0": {}}, tmp_path / "flat")
    assert groups_by_id(flat) == GIVEN
    with pytest.raises(PackError, match="for it has softmax groups: no bound is known"):
        propose(flat)


def test_inspect_and_html_show_the_groups(grouped):
    shown = CliRunner().invoke(app, ["inspect", str(grouped.directory), "--json"])
    assert {frozenset(group) for group in json.loads(shown.stdout)["softmax_groups"]} == GIVEN
    text = " ".join(CliRunner().invoke(app, ["inspect", str(grouped.directory)]).stdout.split())
    assert "10 probes in 4 softmax groups (c2 and 2 more, for example): within each, scores add up to 1" in text
    assert "rule independent, 4 softmax groups," in " ".join(grouped._repr_html_().split())

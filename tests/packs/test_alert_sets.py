"""The current set of alert thresholds decides which concepts fire; no score depends on it."""

import copy
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_model, make_pack
from forging import forge
from probemon import DynamicProbeManager, ProbePack
from probemon.errors import ConfigError, PackCorrupt, PackError
from probemon.lab.calibration.calibrate import calibrate_alerts
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.lab.corpora.analyze import _identified as identified
from probemon.ops.drift.drift_monitor import DriftMonitor
from probemon.packs.copies import copy_pack
from probemon.packs.diff import pack_diff
from probemon.packs.edit import merge, rename, subset
from probemon.packs.group import PackGroup
from probemon.packs.hierarchies import propose, with_hierarchy
from probemon.packs.opened import bounds_for, lowest_alert
from probemon.packs.quantize import quantize

ROOT = Path(__file__).resolve().parents[2]
N = 40


@pytest.fixture(scope="module")
def pack(model, tmp_path_factory):
    """A pack whose recommended thresholds are high ones, with low ones under a name of their own."""
    return make_pack(
        tmp_path_factory.mktemp("sets") / "two",
        model,
        n=N,
        alert_threshold=torch.linspace(0.5, 0.9, N),
        alert_set="precision_0.9",
        alert_sets={"rate_0.01": torch.linspace(0.1, 0.3, N)},
    )


def test_alert_set_decides_what_fires_and_changes_no_score(pack):
    hidden = torch.randn(50, HIDDEN)
    assert pack.alert_sets == ("precision_0.9", "rate_0.01") and pack.alert_set == "precision_0.9"
    everything = DynamicProbeManager(pack).score_all(hidden)
    evaluated = {}
    for name, at in (("precision_0.9", 0.5), ("rate_0.01", 0.1)):
        # Where nothing is retained a step is the rule alone; "descent" evaluates no more than it must.
        manager = DynamicProbeManager(pack, alert_set=name, keep_top_k=0, strategy="descent")
        assert manager.pack.alert_set == name
        threshold = manager.pack.alert_threshold
        assert threshold[0] == pytest.approx(at)
        assert torch.equal(manager.score_all(hidden), everything)
        scores = manager.score_tokens(hidden)
        for t in range(50):
            assert scores.fired(t).tolist() == (everything[t] > threshold).nonzero()[:, 0].tolist()
        evaluated[name] = int(scores.coverage.evaluated.sum())
    assert evaluated["precision_0.9"] < evaluated["rate_0.01"]  # exact, and the higher thresholds open less


def test_copied_or_unpickled_manager_keeps_the_alert_set(pack):
    manager = DynamicProbeManager(pack, alert_set="rate_0.01")
    for other in (copy.deepcopy(manager), pickle.loads(pickle.dumps(manager))):
        assert other.pack.alert_set == "rate_0.01"
        assert torch.equal(other.pack.alert_threshold, manager.pack.alert_threshold)
    assert pack.alert_set == "precision_0.9"  # the pack itself is read-only


def test_derived_packs_keep_alert_sets_and_calibration_adds_one(pack, tmp_path):
    low = dict(zip((c["id"] for c in pack.concepts), pack.other_alert_sets()["rate_0.01"].tolist(), strict=True))

    def same(made, prefix=""):
        assert made.alert_sets[:2] == ("precision_0.9", "rate_0.01")
        kept = made.with_alert_set("rate_0.01").alert_threshold.tolist()
        named = {c["id"].removeprefix(prefix): value for c, value in zip(made.concepts, kept, strict=True)}
        assert named == {key: low[key] for key in named}

    same(rename(pack, tmp_path / "renamed", name="other"))
    same(subset(pack, tmp_path / "some", ["c7", "c9"]))
    same(quantize(pack, tmp_path / "int8"))
    both = merge({"a": pack, "b": pack}, tmp_path / "both", name="both")
    assert both.with_alert_set("rate_0.01").alert_threshold[both.find("b:c7")] == pytest.approx(low["c7"])

    swapped = {"a": pack, "b": pack.with_alert_set("rate_0.01")}
    assert pack_diff(*swapped.values()).about == {"alert_set": ["precision_0.9", "rate_0.01"]}
    unlike = merge(swapped, tmp_path / "unlike", name="unlike")
    assert unlike.alert_set == "merged" and unlike.alert_sets == ("merged", "precision_0.9", "rate_0.01")
    assert unlike.alert_threshold[unlike.find("b:c7")] == pytest.approx(low["c7"])
    of_a = unlike.with_alert_set("precision_0.9")
    for prefix in "ab":
        assert of_a.alert_threshold[of_a.find(f"{prefix}:c7")] == pack.alert_threshold[pack.find("c7")]

    alerts = calibrate_alerts([np.random.default_rng(0).random((400, 2))], fpr=0.1)
    made = write_calibrated(pack, tmp_path / "calibrated", watched=[3, 5], alerts=alerts)
    assert made.alert_set == "calibrated" and made.alert_sets == ("calibrated", "precision_0.9", "rate_0.01")
    assert made.alert_threshold[3] == pytest.approx(float(alerts.threshold[0]))
    assert torch.equal(made.with_alert_set("precision_0.9").alert_threshold, pack.alert_threshold)


def precisions(pack):
    return np.array([pack.precision(probe) for probe in range(pack.n_probes)])


def test_calibration_keeps_the_precision_of_unchanged_thresholds(tmp_path):
    pack = ProbePack.from_pretrained("demo")
    alerts = calibrate_alerts([np.random.default_rng(0).random((400, 2))], fpr=0.1)
    made = write_calibrated(pack, tmp_path / "once", watched=[3, 5], alerts=alerts)
    again = write_calibrated(made, tmp_path / "twice", watched=[5, 7], alerts=alerts)
    for calibrated, lost in ((made, [3, 5]), (again, [3, 5, 7])):
        kept = precisions(pack)
        kept[lost] = np.nan
        assert np.isfinite(kept).sum() > 400
        np.testing.assert_array_equal(precisions(calibrated), kept)
        np.testing.assert_array_equal(precisions(calibrated.with_alert_set("precision_0.9")), precisions(pack))


def test_expand_thresholds_are_dropped_with_another_alert_set(model, tmp_path):
    made = make_pack(
        tmp_path / "expanding",
        model,
        rule="independent",
        alert_set="a",
        alert_sets={"b": torch.full((N,), 0.2)},
        expand_threshold=torch.full((N,), 0.4),
        recommended={"load_threshold": "calibrated"},
    )
    other = made.with_alert_set("b")
    assert bool(other.expand_threshold.isnan().all()) and other.recommended == {}
    with pytest.raises(ConfigError, match="calibrated"):
        DynamicProbeManager(made, alert_set="b", load_threshold="calibrated")


def test_unknown_alert_set_is_named(pack, model, tmp_path):
    with pytest.raises(ConfigError, match=r"no set of alert thresholds 'rate'.*precision_0\.9, rate_0\.01"):
        DynamicProbeManager(pack, alert_set="rate")
    bare = make_pack(tmp_path / "bare", model)
    assert bare.alert_set is None and bare.alert_sets == ()
    with pytest.raises(ConfigError, match="none that has a name"):
        bare.with_alert_set("rate_0.01")
    with pytest.raises(ConfigError, match="random has no set"):
        DynamicProbeManager({"two": pack, "bare": bare}, alert_set="rate_0.01")
    for changes, message in (
        ({"alert_sets": {"b": torch.full((N,), 0.2)}}, "name that one too"),
        ({"alert_set": "a b"}, "letters, digits"),
        ({"alert_set": "a", "alert_sets": {"a": torch.full((N,), 0.2)}}, "give it once"),
        ({"alert_set": "a", "alert_sets": {"b": torch.full((3,), 0.2)}}, "alert_sets"),
        ({"alert_set": "a", "alert_sets": {"b": torch.full((N,), 1.5)}}, "alert_threshold@b"),
    ):
        with pytest.raises(PackError, match=message):
            make_pack(tmp_path / "wrong", model, **changes)
    key = "alert_threshold@rate_0.01"
    for name, change in (
        ("short", lambda tensors: tensors.update({key: tensors[key][:3]})),
        ("escape", lambda tensors: tensors.update({"alert_threshold@\x1b[2J": tensors[key].clone()})),
        ("above", lambda tensors: tensors[key].fill_(1.5)),
    ):
        forge(pack, tmp_path / name, change)
        with pytest.raises(PackCorrupt, match="alert_threshold@"):
            ProbePack.open(tmp_path / name)
    manifest = tmp_path / "short" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"precision_0.9"', '"\\u001b[2J"'))
    with pytest.raises(PackCorrupt, match="alert_set is"):
        ProbePack.open(tmp_path / "short")


def test_analysis_is_identified_by_its_alert_set(pack):
    one, other = DynamicProbeManager(pack), DynamicProbeManager(pack, alert_set="rate_0.01")
    for manager in (one, other):
        assert identified(manager.pack)["alert_set"] == manager.pack.alert_set
    assert identified(one.pack) != identified(other.pack)


def test_event_names_the_alert_set_of_its_threshold(pack, model):
    ids = torch.tensor([[1, 5, 6, 7]])
    events = []
    for name in pack.alert_sets:
        with DynamicProbeManager(pack, alert_set=name).attach(model) as run:
            run.on("c0", action=events.append)
            run.on("c1", above=0.0, action=events.append)
            run.on("c2", above=0.0, aggregate="mean", action=events.append)
            model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert {(e.concept, e.alert_set) for e in events} <= {("c0", name), ("c1", None), ("c2", None)}
        assert {"c1", "c2"} <= {e.concept for e in events}
        if name == "rate_0.01":
            assert ("c0", name) in {(e.concept, e.alert_set) for e in events}
        events.clear()


def like_probes(path, **thresholds):
    """60 random probes of six directions."""
    n, directions = 60, torch.randn(6, 1, HIDDEN).repeat_interleave(10, 0)
    return ProbePack.write(
        path,
        name="flat",
        licence="CC0-1.0",
        card="Random probes.\n",
        score_rule="independent",
        concepts=[{"id": f"c{i}", "name": f"c{i}", "parents": []} for i in range(n)],
        weights={"w1": directions + torch.randn(n, 1, HIDDEN) / 20, "b1": torch.full((n, 1), -3.0)},
        inputs=[{"site": "resid_post.1", "norm": "rmsnorm"}],
        golden_hidden=torch.randn(64, 1, HIDDEN),
        host={},
        **{
            name: {k: torch.full((n,), x) for k, x in v.items()} if isinstance(v, dict) else v
            for name, v in thresholds.items()
        },
    )


def test_bounding_probes_find_all_that_fires_with_any_alert_set(tmp_path):
    hidden = torch.randn(200, HIDDEN)
    each = torch.full((60,), 0.9)
    flat = like_probes(tmp_path / "flat", alert_threshold=each, alert_set="high", alert_sets={"low": 0.05})
    tree = propose(flat).write(tmp_path / "tree")
    for name in tree.alert_sets:
        manager = DynamicProbeManager(tree, alert_set=name)
        fires, scores = manager.score_all(hidden) > manager.pack.alert_threshold, manager.score_tokens(hidden)
        assert fires.any() and scores.coverage.totals()["not_reached"]
        for t, row in enumerate(fires):
            assert scores.fired(t).tolist() == row.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("of_tokens", [0.9, math.nan])
def test_bounding_probes_open_for_sentence_thresholds_too(of_tokens, tmp_path):
    """Whatever comes first: the groups, the threshold of a sentence, or another set and back."""
    hidden, n = torch.randn(200, HIDDEN), 60
    each = torch.full((n,), of_tokens)
    both = like_probes(
        tmp_path / "both", alert_threshold=each, alert_set="high", alert_sets={"low": 0.95}, aggregated={"max": 0.05}
    )
    tree = propose(both).write(tmp_path / "tree")
    alone = like_probes(tmp_path / "alone", alert_threshold=each)
    grouped = propose(alone, threshold=None if of_tokens == 0.9 else 0.9).write(tmp_path / "grouped")
    bounds = bounds_for(grouped, lowest_alert(grouped.alert_threshold, {"max": torch.full((grouped.n_probes,), 0.05)}))
    assert torch.equal(bounds[grouped.bounding], torch.full((len(grouped.bounding),), 0.05))
    for pack in (tree, tree.with_alert_set("low").with_alert_set("high")):
        manager = DynamicProbeManager(pack)
        listed, scores = manager.score_all(hidden)[:, :n] > 0.05, manager.score_tokens(hidden)
        assert listed.any() and scores.coverage.totals()["not_reached"]
        for t, row in enumerate(listed):
            found = scores.active(t)[scores.active_scores(t) > 0.05]
            assert found[found < n].tolist() == row.nonzero()[:, 0].tolist()


def test_bounding_probes_find_all_that_fires_after_thresholds_were_edited(tmp_path):
    """In memory, and in every pack that is made of one whose thresholds were lowered."""
    hidden, n = torch.randn(200, HIDDEN), 60
    flat = like_probes(tmp_path / "flat", alert_threshold=torch.full((n,), 0.95))
    every = DynamicProbeManager(flat).score_all(hidden)
    other = like_probes(tmp_path / "other", alert_threshold=torch.full((n,), 0.95))
    pack = propose(flat).write(tmp_path / "tree")
    pack.alert_threshold[len(pack.bounding) :] = 0.05
    packs = {
        "itself": pack,
        "renamed": rename(pack, tmp_path / "renamed", name="renamed"),
        "a part": subset(pack, tmp_path / "part", [concept["id"] for concept in pack.concepts]),
        "merged": merge(
            {"a": pack, "b": propose(other).write(tmp_path / "second")}, tmp_path / "merged", name="merged"
        ),
    }
    for name, made in packs.items():
        scores = DynamicProbeManager(made).score_tokens(hidden)
        number = {concept["id"].removeprefix("a:"): i for i, concept in enumerate(made.concepts)}
        wanted = {(t, number[f"c{i}"]) for t, i in (every > 0.05).nonzero().tolist()}
        found = {(t, probe) for t in range(len(hidden)) for probe in scores.fired(t).tolist()}
        assert len(wanted) > 100 and not wanted - found, name
        assert scores.coverage.totals()["not_reached"], name
    own = ProbePack.open(packs["a part"].directory)
    with pytest.raises(ConfigError, match="written to"):
        own.expand_threshold[0] = 0.9
        pickle.dumps(own)
    with pytest.raises(ConfigError, match="written to"):
        own.save_pretrained(tmp_path / "saved")
    own = ProbePack.open(pack.directory)  # who writes to both knows what opens
    own.alert_threshold[len(own.bounding) :] = 0.05
    own.expand_threshold[own.bounding] = 0.99
    assert DynamicProbeManager(own).pack.descent()[0] is own.expand_threshold
    with pytest.raises(PackError, match="bounding probes"):
        with_hierarchy(pack, {"c1": "c0"}, tmp_path / "no")


def test_bounding_probes_find_all_over_an_edited_sentence_threshold(tmp_path):
    hidden, n = torch.randn(200, HIDDEN), 60
    each = torch.full((n,), 0.95)
    flat = like_probes(tmp_path / "flat", alert_threshold=each, alert_set="usual", aggregated={"max": 0.9})
    every = DynamicProbeManager(flat).score_all(hidden)
    pack = propose(flat).write(tmp_path / "tree")
    pack.thresholds_for("max")[len(pack.bounding) :] = 0.05
    assert pack.edited and pack.alert_set is None
    with pytest.raises(ConfigError, match="written to"):
        pickle.dumps(pack)
    with pytest.raises(ConfigError, match="written to"):
        pack.with_alert_set("usual")
    members = [pack.find(f"c{i}") for i in range(n)]
    for made in (pack, rename(pack, tmp_path / "renamed", name="renamed")):
        scores = DynamicProbeManager(made).score_tokens(hidden)
        found = {
            (t, int(probe))
            for t in range(len(hidden))
            for probe in scores.active(t)[scores.active_scores(t) > 0.05]
            if probe in members
        }
        assert found == {(t, members[i]) for t, i in (every > 0.05).nonzero().tolist()} and len(found) > 1000


def test_edited_weights_are_told_apart_from_those_of_the_files(model, tmp_path):
    """Who names a pack by its files tells the two apart, or refuses; a copy has the weights as they are."""
    make_pack(tmp_path / "made", model, n=N)
    as_made, written = (ProbePack.open(tmp_path / "made") for _ in range(2))
    written.weights["b1"][:] += 1
    assert as_made.weights and not as_made.rewritten and written.rewritten and not written.edited
    assert identified(as_made) != identified(written) and "weights" not in identified(as_made)
    with pytest.raises(ConfigError, match="weights of random were written to"):
        pickle.dumps(written)
    with pytest.raises(ConfigError, match="weights of random were written to"):
        written.save_pretrained(tmp_path / "saved")
    copied = rename(written, tmp_path / "renamed", name="renamed")
    assert torch.equal(copied.weights["b1"], written.weights["b1"])
    drift = DriftMonitor(DynamicProbeManager(as_made))
    with pytest.raises(ConfigError, match="counts by the probes and alert thresholds"):
        DynamicProbeManager(written).attach(make_model(), followers=[drift])


def test_editing_alert_thresholds_drops_calibrated_expand_thresholds(model, tmp_path):
    """As they do with another set: the descent is that of a pack without any."""
    made = make_pack(
        tmp_path / "calibrated",
        model,
        n=N,
        score_rule="independent",
        alert_threshold=torch.full((N,), 0.9),
        expand_threshold=torch.full((N,), 0.99),
        recommended={"load_threshold": "calibrated"},
    )
    bare = make_pack(tmp_path / "bare", model, n=N, score_rule="independent", alert_threshold=torch.full((N,), 0.2))
    made.alert_threshold[:] = 0.2
    assert "load_threshold" not in made.descent()[1]
    one, other = DynamicProbeManager(made).plan, DynamicProbeManager(bare).plan
    assert np.array_equal(one.expand_threshold, other.expand_threshold)
    again = rename(made, tmp_path / "renamed", name="renamed")
    assert again.expand_threshold.isnan().all() and again.recommended == {}


def test_quality_of_one_alert_set_is_not_stated_for_another(model, tmp_path):
    rates = {"count": 1, "n": 100}
    made = make_pack(
        tmp_path / "measured",
        model,
        n=N,
        alert_set="high",
        alert_sets={"low": torch.full((N,), 0.2)},
        quality={
            "auroc_median": 0.9,
            "precision_at_threshold": 0.8,
            "per_level": {"0": {"auroc_median": 0.9, "recall_at_threshold": 0.7}},
            "running_text": {"news": {"right": 0.9, "fires_per_token": 0.2}},
            "background_fires": {"tokens": 100},
            "concepts": {
                "c3": {"auroc": 0.9, "alert": {"threshold": 0.9}, "found": rates, "precision": {"threshold": 0.9}}
            },
            "alerts": {"each": {"any_token": rates, "concepts": {}}, "mean": {"any_token": rates, "concepts": {}}},
            "alert_sets": {"high": {"precision_at_threshold": 0.8}, "low": {"false_positive_rate": 0.01}},
        },
    )
    stated = made.manifest["quality"]
    assert rename(made, tmp_path / "high", name="other").manifest["quality"] == stated
    other = made.with_alert_set("low")
    expected = {
        "auroc_median": 0.9,
        "per_level": {"0": {"auroc_median": 0.9}},
        "concepts": {"c3": {"auroc": 0.9}},
        "alerts": {"mean": stated["alerts"]["mean"]},
        "alert_sets": stated["alert_sets"],
    }
    assert rename(other, tmp_path / "low", name="other").manifest["quality"] == expected
    int8 = quantize(other, tmp_path / "int8").manifest["quality"]
    assert int8.pop("int8") and int8 == expected
    alerts = calibrate_alerts([np.random.default_rng(0).random((400, 1))], fpr=0.1)
    calibrated = write_calibrated(other, tmp_path / "calibrated", watched=[3], alerts=alerts).manifest["quality"]
    assert list(calibrated["alerts"].pop("each")["concepts"]) == ["c3"] and calibrated == expected


def test_basis_of_a_threshold_is_not_stated_for_another(pack, tmp_path):
    lines = [{**concept, "alert_threshold_of": "its level"} for concept in pack.concepts]
    said = copy_pack(pack, tmp_path / "said", "As it was", {}, concepts=lines)

    def says(made):
        return [concept.get("alert_threshold_of") == "its level" for concept in made.concepts]

    alerts = calibrate_alerts([np.random.default_rng(0).random((400, 1))], fpr=0.1)
    assert all(says(rename(said, tmp_path / "same", name="other")))
    assert says(write_calibrated(said, tmp_path / "one", watched=[3], alerts=alerts)) == [i != 3 for i in range(N)]
    other = said.with_alert_set("rate_0.01")
    for made in (
        rename(other, tmp_path / "low", name="other"),
        subset(other, tmp_path / "some", ["c7", "c9"]),
        quantize(other, tmp_path / "int8"),
        merge({"a": other, "b": other}, tmp_path / "both", name="both"),
        write_calibrated(other, tmp_path / "calibrated", watched=[3], alerts=alerts),
    ):
        assert not any(says(made))


def test_shipped_packs_state_quality_of_the_current_thresholds_only(tmp_path):
    """Every figure that a copy with other thresholds keeps is one that no threshold has a part in."""

    def figures(said):
        for key, value in said.items():
            if isinstance(value, dict) and key not in ("alert_sets", "int8"):
                yield from figures(value)
            elif value is not None:
                yield key

    for name in ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp"):
        shipped = ProbePack.open(ROOT / "probes" / name)
        [other] = set(shipped.alert_sets) - {shipped.alert_set}
        made = rename(shipped.with_alert_set(other), tmp_path / name, name="other")
        kept = set(figures(made.manifest["quality"]))
        assert kept and {key for key in kept if not key.startswith(("auroc_", "n_"))} <= {"true_per_token"}
        assert not any("alert_threshold_of" in concept for concept in made.concepts)


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_edited_thresholds_have_no_set_name_and_no_precision(model, tmp_path, how):
    concepts = [
        {
            "id": f"c{i}",
            "name": f"k{i}",
            "parents": [],
            "precision": {"high": 0.9, "low": 0.3},
            "alert_threshold_of": "x",
        }
        for i in range(4)
    ]
    make_pack(
        tmp_path / "p",
        model,
        n=4,
        concepts=concepts,
        alert_set="high",
        alert_threshold=torch.full((4,), 0.9),
        alert_sets={"low": torch.full((4,), 0.3)},
        quality={"n_fired": 3, "auroc": 0.9},
    )
    pack, untouched = ProbePack.open(tmp_path / "p"), ProbePack.open(tmp_path / "p")
    if how == "written":
        pack.alert_threshold[:] = 0.02
    else:
        pack.alert_threshold = torch.full((4,), 0.02)
    manager = DynamicProbeManager(pack)
    with manager.attach(model) as run:
        run.on("c0", action="record")
        out = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    shown = run.result(out).leading(3, 4)
    assert shown and all(c.threshold == np.float32(0.02) and math.isnan(c.precision) for c in shown)
    assert run.events and run.events[0].above == np.float32(0.02) and run.events[0].alert_set is None
    assert "alert_set" not in identified(pack) and "thresholds 'high'" not in repr(manager)
    for made in (rename(pack, tmp_path / "r", name="r"), subset(pack, tmp_path / "s", [f"c{i}" for i in range(4)])):
        assert made.alert_threshold.tolist() == pack.alert_threshold.tolist()
        assert made.alert_set is None and made.alert_sets == () and math.isnan(made.precision(0))
        assert "n_fired" not in made.manifest["quality"] and "alert_threshold_of" not in made.concepts[0]
    # A group's are a copy of its packs' thresholds: concepts fire by the packs', so no manager takes others.
    group = PackGroup({"a": untouched, "b": pack})
    assert [group.precision(group.find(concept)) for concept in ("a:c0", "b:c0")] == pytest.approx(
        [0.9, math.nan], nan_ok=True
    )
    alone = PackGroup({"a": untouched})
    assert (alone.alert_set, alone.precision(0)) == ("high", 0.9)
    alone.alert_threshold[0] = 0.5
    assert alone.alert_set is None and math.isnan(alone.precision(0))
    assert (untouched.alert_set, untouched.precision(0)) == ("high", 0.9)
    with pytest.raises(ConfigError, match=r"alert_threshold of the group .* was written to"):
        DynamicProbeManager(alone)
    later = PackGroup({"b": pack})
    DynamicProbeManager(later)
    pack.expand_threshold[0] = 0.25
    with pytest.raises(ConfigError, match=r"expand_threshold of the group .* or that of one of its packs since"):
        DynamicProbeManager(later)
    DynamicProbeManager(PackGroup({"b": pack}))
    # The files have the old ones.
    with pytest.raises(ConfigError, match=r"were written to since it was opened, and its files"):
        pack.save_pretrained(tmp_path / "copy")
    assert pack.with_alert_set("low").precision(0) == 0.3
    if how == "written":
        with pytest.raises(ConfigError, match=r"'high' of .* were written to since it was opened: open it again"):
            pack.with_alert_set("high")


@pytest.mark.parametrize("name", ["alert_threshold", "expand_threshold"])
@pytest.mark.parametrize("of", ["pack", "member", "group"])
def test_editing_thresholds_under_a_manager_is_an_error(tmp_path, name, of):
    """What opens a concept, and what fires, is made of them at different times."""
    model = make_model()
    packs = {key: make_pack(tmp_path / key, model, seed=i) for i, key in enumerate("ab")}
    manager = DynamicProbeManager(packs["a"] if of == "pack" else packs)
    hidden = torch.zeros(1, HIDDEN)
    manager.step(None, {site: hidden for site in manager.pack.sites})
    written = manager.pack if of != "member" else packs["b"]
    getattr(written, name)[:1] = 0.05
    with pytest.raises(ConfigError, match="modified after the manager was made"):
        manager.step(None, {site: hidden for site in manager.pack.sites})
    DynamicProbeManager(packs["a"] if of == "pack" else packs).step(None, {s: hidden for s in manager.pack.sites})

"""The manager on the shipped packs: descent equals exhaustive evaluation, and online equals offline."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import probemon
from conftest import HIDDEN, make_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.core.settings import CascadeConfig, CascadeSettings
from probemon.errors import ConfigError, PackError, UnknownConcept, UnknownSetting
from probemon.manager import MachineSettings

LINEAR, MLP = "probes/wordnet-smollm2-135m", "probes/wordnet-smollm2-135m-mlp"


@pytest.fixture(params=[LINEAR, MLP])
def pack(request):
    return ProbePack.open(request.param)


def test_exact_descent_fires_what_exhaustive_scoring_fires(pack):
    manager, hidden = DynamicProbeManager(pack), pack.golden_hidden[:, 0]
    everything = manager.score_all(hidden).numpy()
    assert np.abs(everything - pack.golden_scores.numpy()).max() < 1e-5
    scores = manager.score_tokens(hidden)
    alert = pack.alert_threshold.numpy()
    for t in range(len(hidden)):
        assert scores.fired(t).tolist() == np.flatnonzero(everything[t] > alert).tolist()
        assert np.array_equal(scores.active_scores(t), everything[t, scores.active(t)])
        best = sorted(scores.active(t).tolist(), key=lambda p: (-everything[t, p], p))[:10]
        assert [p for p, _ in scores.top(t)] == best
    cover = scores.coverage
    assert (cover.active + cover.dropped + cover.not_reached == pack.n_probes).all()
    assert cover.active.mean() < 0.5 * pack.n_probes


def test_sequences_of_a_batch_do_not_affect_each_other(pack):
    manager, hidden = DynamicProbeManager(pack), pack.golden_hidden[:, 0]
    state, first = manager.step(None, hidden[:8])
    _, second = manager.step(state, hidden[8:16])
    for row in range(8):
        alone_state, alone = manager.step(None, hidden[row : row + 1])
        assert np.array_equal(alone.active(0), first.active(row))
        assert np.array_equal(alone.active_scores(0), first.active_scores(row))
        _, alone = manager.step(alone_state, hidden[8 + row : 9 + row])
        assert np.array_equal(alone.active(0), second.active(row))
        assert np.array_equal(alone.active_scores(0), second.active_scores(row))


def test_score_tokens_with_prompt_len_equals_stepping(pack):
    manager, hidden = DynamicProbeManager(pack), pack.golden_hidden[:, 0]
    offline = manager.score_tokens(hidden, prompt_len=5)
    state, _ = manager.step(None, hidden[4:5])
    for t in range(5, len(hidden)):
        state, online = manager.step(state, hidden[t : t + 1])
        assert np.array_equal(online.active(0), offline.active(t))
        assert np.array_equal(online.active_scores(0), offline.active_scores(t))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_hidden_state_is_unseen_and_its_neighbours_are_not(value):
    manager = DynamicProbeManager(ProbePack.open(LINEAR))
    hidden = manager.pack.golden_hidden[:3, 0].clone()
    clean = manager.score_tokens(hidden)
    hidden[1, 7] = value
    scores = manager.score_tokens(hidden)
    assert scores.coverage.unseen == ("", "hidden state is not finite", "")
    assert len(scores.active(1)) == 0
    assert np.array_equal(scores.active_scores(2), clean.active_scores(2))


def test_probes_over_the_limit_are_counted_as_dropped():
    pack = ProbePack.open(LINEAR)
    scores = DynamicProbeManager(pack, max_loaded_probes=20).score_tokens(pack.golden_hidden[:, 0])
    assert scores.coverage.dropped.sum() > 0
    assert scores.coverage.active.max() <= 20


def test_excluded_branches_do_not_change_the_other_scores(pack):
    hidden = pack.golden_hidden[:, 0]
    named = [pack.concepts[int(probe)]["id"] for probe in pack.tree.roots[:2]]
    whole = DynamicProbeManager(pack, load_threshold="exact", max_loaded_probes=pack.n_probes)
    part = DynamicProbeManager(
        pack, load_threshold="exact", max_loaded_probes=pack.n_probes, exclude=named, audit_rate=1.0
    )
    below = {probe for level in pack.tree.levels_below(pack.find_all(named)) for probe in level}
    everything, found = whole.score_tokens(hidden), part.score_tokens(hidden)
    n_fired = 0
    for t in range(len(hidden)):
        assert not set(found.active(t).tolist()) & below
        assert found.fired(t).tolist() == [probe for probe in everything.fired(t).tolist() if probe not in below]
        n_fired += len(found.fired(t))
    assert n_fired and (found.coverage.excluded == len(below)).all()
    assert (found.coverage.evaluated < everything.coverage.evaluated).any() or part.strategy.batch == "exhaustive"
    with pytest.raises(ConfigError, match="nothing would ever be scored: give a wider include, or exclude less"):
        DynamicProbeManager(pack, exclude=[pack.concepts[int(probe)]["id"] for probe in pack.tree.roots])


@pytest.mark.parametrize("impl", ["cpu", "numba"])
def test_implementations_agree_with_golden_scores(pack, impl):
    scored = DynamicProbeManager(pack, impl=impl).score_all(pack.golden_hidden[:, 0])
    assert (scored - pack.golden_scores).abs().max() < 1e-5


def test_bad_arguments_are_named():
    pack = ProbePack.open(LINEAR)
    with pytest.raises(UnknownSetting, match="keep_top_k"):
        DynamicProbeManager(pack, keep_topk=3)
    with pytest.raises(UnknownConcept, match="zebrafish-x"):
        DynamicProbeManager(pack, always_on=["zebrafish-x"])
    with pytest.raises(ConfigError, match="max_loaded_probes is 3"):
        DynamicProbeManager(pack, max_loaded_probes=3)
    with pytest.raises(ConfigError, match=r"expected \[N, 576\]"):
        DynamicProbeManager(pack).score_tokens(torch.zeros(2, 5))


@pytest.mark.parametrize("impl", ["numba", "cpu"])
def test_state_of_a_manager_with_other_settings_is_refused_if_it_does_not_fit(tmp_path, model, impl):
    """A concept that is left out has lost its parents: its path score would be its own alone."""
    pack, hidden = make_pack(tmp_path / "pack", model), torch.randn(3, HIDDEN)
    for packs in (pack, {"one": pack, "other": pack}):
        every = {"impl": impl, "load_threshold": -1.0, "keep_top_k": 40}
        state, _ = DynamicProbeManager(packs, **every).step(None, hidden)
        narrower = DynamicProbeManager(packs, exclude=["c3"] if packs is pack else ["other:c3"], **every)
        with pytest.raises(ConfigError, match=r"state retains '(other:)?c\d"):
            narrower.step(state, hidden)
        smaller = DynamicProbeManager(packs, max_loaded_probes=20, **every)
        with pytest.raises(ConfigError, match=r"state retains \d+ probes of a row, max_loaded_probes is 20"):
            smaller.step(state, hidden)
        for manager in (narrower, smaller):  # its own states fit, also where probes were dropped
            own = None
            for _ in range(3):
                own, scores = manager.step(own, hidden)
            assert scores.coverage.dropped.any() == (manager is smaller)


def test_manager_repr_names_pack_thresholds_and_strategy(pack):
    manager = DynamicProbeManager(pack, impl="cpu", strategy="descent")
    text = f"DynamicProbeManager({pack.name!r}, {pack.n_probes} probes, thresholds 'precision_0.9', cpu on cpu,"
    assert repr(manager) == f"{text} descent for a token, descent for a prompt)"


@pytest.mark.parametrize("strategy", ["descent", "exhaustive"])
@pytest.mark.parametrize("arena_bytes", [None, 8000])
def test_every_probe_reads_its_own_site(two_sites, strategy, arena_bytes):
    """Against plain fp64 arithmetic, probe by probe: the engine is not asked about itself."""
    if arena_bytes is not None and strategy == "exhaustive":
        return
    generator = torch.Generator().manual_seed(3)
    hidden = {site: torch.randn(5, 16, generator=generator) for site in two_sites.sites}
    own = np.zeros((5, two_sites.n_probes))
    for p in range(two_sites.n_probes):
        x = hidden[two_sites.inputs[int(two_sites.input_index[p])].site].double()
        x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        h = (x @ two_sites.weights["w1"][p].double().T + two_sites.weights["b1"][p].double()).clamp(min=0)
        own[:, p] = torch.sigmoid(h @ two_sites.weights["w3"][p].double() + two_sites.weights["b3"][p].double())
    path = own.copy()
    for p in range(two_sites.n_probes):
        above = two_sites.tree.parents(p)
        if len(above):
            path[:, p] = own[:, p] * path[:, above].max(axis=1)
    manager = DynamicProbeManager(two_sites, strategy=strategy, arena_bytes=arena_bytes)
    scores = manager.score_tokens(hidden)
    assert np.abs(manager.score_all(hidden).numpy() - path).max() < 1e-5
    for t in range(5):
        assert np.abs(scores.active_scores(t) - path[t, scores.active(t)]).max() < 1e-5


def test_user_settings_override_recommended_ones(model, tmp_path):
    made = make_pack(tmp_path / "pack", model, recommended={"load_threshold": 0.4, "keep_top_k": 3})
    asked, left = DynamicProbeManager(made, keep_top_k=7, impl="cpu"), DynamicProbeManager(made, impl="cpu")
    assert (asked.config.keep_top_k, left.config.keep_top_k, left.config.report_top_k) == (7, 3, 10)
    assert left.plan.expand_threshold[0] == np.float32(0.4)
    with pytest.raises(UnknownSetting, match=r"'random': .* did you mean 'keep_top_k'"):
        make_pack(tmp_path / "odd", model, recommended={"keep_top": 3})


def test_folders_are_accepted_in_place_of_packs(tmp_path):
    shipped, mlp = "probes/wordnet-smollm2-135m", Path("probes/wordnet-smollm2-135m-mlp")
    pack = ProbePack.open(shipped)
    hidden = pack.golden_hidden[:3, 0]
    expected = DynamicProbeManager(pack).score_tokens(hidden)
    assert np.array_equal(DynamicProbeManager(shipped).score_tokens(hidden).values, expected.values)
    assert list(DynamicProbeManager([shipped, mlp]).pack.packs) == [Path(shipped).name, mlp.name]
    assert list(DynamicProbeManager({"a": pack, "b": mlp}).pack.packs) == ["a", "b"]
    with pytest.raises(PackError, match="wordnet-smollm2-135n"):
        DynamicProbeManager("probes/wordnet-smollm2-135n")
    for wrong in (b"probes", 3, [], [3]):
        with pytest.raises(ConfigError, match="give a ProbePack, or the folder of one"):
            DynamicProbeManager(wrong)


def test_public_names_are_importable_and_loaded_lazily():
    for name in set(probemon.__all__) - {"__version__"}:
        assert getattr(probemon, name).__name__ == name and name in dir(probemon)
    with pytest.raises(AttributeError, match="no attribute 'Scoers'"):
        probemon.Scoers  # noqa: B018
    loaded = "import sys, probemon; assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], check=True)


def test_settings_that_type_checkers_see_are_those_of_a_manager():
    stated = set(CascadeSettings.__annotations__)
    assert stated == {field.name for field in dataclasses.fields(CascadeConfig)}
    signature = inspect.signature(DynamicProbeManager.__init__).parameters
    assert signature["settings"].annotation == "Unpack[CascadeSettings]" and not stated & set(signature)
    assert set(MachineSettings.__annotations__) < set(signature)


def test_public_names_are_for_users():
    assert not {"left_out"} & set(dir(DynamicProbeManager))
    assert not {"read_soon", "read_rows", "rewritten_weights", "bounds_for"} & set(dir(ProbePack))

"""The measured cost and recall of settings equal those of descents under them."""

import math

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_pack
from probemon import DynamicProbeManager
from probemon.engine.setting_trials import VARIATIONS, try_settings
from probemon.errors import ConfigError

STATES = {"resid_post.1": torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(3))}


def test_trials_report_what_a_descent_evaluates_and_finds(pack):
    trials = try_settings(pack, STATES)
    assert [trial.changes for trial in trials] == list(VARIATIONS)
    alert = pack.alert_threshold.numpy()
    fires = [set(np.flatnonzero(own > alert)) for own in DynamicProbeManager(pack).score_all(STATES).numpy()]
    n_fires = sum(map(len, fires))
    for trial in trials:
        scores = DynamicProbeManager(pack, **trial.changes).score_tokens(STATES["resid_post.1"], prompt_len=0)
        found = sum(len(fires[t] & set(scores.fired(t).tolist())) for t in range(30))
        assert trial.found == found / n_fires and trial.step_us > 0
        assert trial.n_evaluated == scores.coverage.evaluated.mean() and trial.n_dropped == 0
    by = {str(trial.changes): trial for trial in trials}
    assert by["{'load_threshold': 'exact'}"].found == 1 > by["{'max_rounds': 1}"].found
    assert by["{'strategy': 'exhaustive'}"].n_evaluated == pack.n_probes


def test_settings_that_a_pack_refuses_are_left_out_of_trials(model, tmp_path):
    free = make_pack(tmp_path / "free", model, rule="independent")
    changes = [trial.changes for trial in try_settings(free, STATES)]
    assert {"load_threshold": "exact"} not in changes and len(changes) == len(VARIATIONS) - 1
    some = try_settings(free, STATES, [{}, {"keep_top_k": 1}], max_loaded_probes=8)
    assert len(some) == 2 and max(trial.n_dropped for trial in some) > 0
    with pytest.raises(ConfigError, match="keep_top_k"):
        try_settings(free, STATES, keep_top_k=-1)


def test_trials_without_firing_concepts_report_nan_recall(model, tmp_path):
    silent = make_pack(tmp_path / "silent", model, alert_threshold=torch.full((40,), 1.0))
    assert all(math.isnan(trial.found) for trial in try_settings(silent, STATES))

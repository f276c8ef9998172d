"""Several outputs of one head are imported as a softmax group."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from probemon import DynamicProbeManager
from probemon.errors import ImportRefused
from probemon.lab.importers.generic import import_safetensors, import_weights

D, MOODS = 12, ("calm", "angry", "sad")
RANDOM = np.random.default_rng(0)
WEIGHT, BIAS = RANDOM.normal(size=(3, D)), RANDOM.normal(size=3)
MEAN, SCALE = RANDOM.normal(size=D), RANDOM.uniform(0.5, 2, size=D)
STATES = RANDOM.normal(size=(7, D)).astype(np.float32)


def shares(x):
    z = x.astype(np.float64) @ WEIGHT.T + BIAS
    return np.exp(z - z.max(1, keepdims=True)) / np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)


def found(pack, names):
    everything = DynamicProbeManager(pack).score_all(torch.from_numpy(STATES)).numpy()
    return everything[:, [pack.find(name) for name in names]]


def test_weights_in_memory_may_form_a_softmax_group(tmp_path):
    probes = {name: (WEIGHT[i], BIAS[i]) for i, name in enumerate(MOODS)} | {"whale": (WEIGHT[0], 0.0)}
    pack = import_weights(probes, tmp_path / "pack", site="resid_post.1", normalize="none", groups={"mood": MOODS})
    assert np.abs(found(pack, MOODS) - shares(STATES)).max() < 1e-6
    assert np.abs(found(pack, ["whale"])[:, 0] - 1 / (1 + np.exp(-(STATES @ WEIGHT[0])))).max() < 1e-6
    assert pack.manifest["format_version"] == 2


def test_mapping_makes_a_softmax_group_of_one_tensors_rows(tmp_path):
    tensors = {"w": WEIGHT, "b": BIAS, "mean": MEAN, "std": SCALE}
    save_file({name: torch.from_numpy(values) for name, values in tensors.items()}, tmp_path / "mood.safetensors")
    rows = {name: {"weight": "w", "bias": "b", "row": i, "group": "mood"} for i, name in enumerate(MOODS)}
    mapping = {"site": "resid_post.1", "normalize": "none", "probes": rows}
    mapping["standardize"] = {"mean": "mean", "scale": "std"}
    (tmp_path / "mood.json").write_text(json.dumps(mapping))
    pack = import_safetensors(tmp_path / "mood.safetensors", tmp_path / "pack", mapping=tmp_path / "mood.json")
    assert np.abs(found(pack, MOODS) - shares((STATES - MEAN) / SCALE)).max() < 1e-6


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({"mood": ["calm", "glad"]}, "the group 'mood' has 'glad', and there is no such probe"),
        ({"mood": ["calm", "sad"], "face": ["sad", "angry"]}, "'sad' is in the groups 'mood' and 'face'"),
        ({"mood": ["calm", "calm"]}, "'calm' is in the groups 'mood' and 'mood'"),
        ({"mood": ["calm"]}, "the softmax group 'mood' has one probe, whose score would always be 1"),
        ({"mood": "calm"}, "give a name, and a list of names of probes"),
        ({"": ["calm", "sad"]}, "give a name, and a list of names of probes"),
        (["calm", "sad"], "groups is a list: give a dict"),
    ],
)
def test_invalid_groups_are_refused_by_name(tmp_path, groups, why):
    probes = {name: (WEIGHT[i], BIAS[i]) for i, name in enumerate(MOODS)}
    with pytest.raises(ImportRefused, match=why):
        import_weights(probes, tmp_path / "pack", site="resid_post.1", normalize="none", groups=groups)
    assert not (tmp_path / "pack").exists()

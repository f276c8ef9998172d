"""Steps with memory-mapped weights run while the model goes on, and give the same scores."""

import threading

import numpy as np
import pytest
import torch

from conftest import make_model, make_pack
from probemon import DynamicProbeManager
from probemon.errors import ProbeLoadError
from probemon.packs import held_tensors

IDS = torch.arange(3, 8)[None]
OPTIONS = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def watched(manager, model):
    with manager.attach(model) as run:
        out = model.generate(IDS, attention_mask=torch.ones_like(IDS), **OPTIONS)
    return run.result(out)


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def mapped(tmp_path, model, monkeypatch):
    monkeypatch.setattr(held_tensors, "IN_MEMORY_BYTES", 0)
    return make_pack(tmp_path / "pack", model, sites=("resid_post.0",))


@pytest.mark.parametrize("impl", ["cpu", "numba"])
@pytest.mark.parametrize("n_packs", [1, 2])
def test_weights_are_read_while_the_models_later_layers_run(model, mapped, tmp_path, monkeypatch, impl, n_packs):
    later, reads = threading.Event(), []
    other = make_pack(tmp_path / "other", model, sites=("resid_post.0",), seed=1, dtype=torch.bfloat16)
    packs = {"one": mapped, "other": other} if n_packs == 2 else mapped
    expected = watched(DynamicProbeManager(packs, impl="reference"), model)
    manager = DynamicProbeManager(packs, impl=impl)

    def read():
        """Every step asks before it reads a weight."""
        reads.append((threading.current_thread().name, later.wait(10)))

    model.model.register_forward_pre_hook(lambda *_: later.clear())
    model.model.norm.register_forward_pre_hook(lambda *_: later.set())  # what runs after every layer
    for pack in (mapped, other):
        monkeypatch.setattr(pack, "check_unchanged", read)
    result = watched(manager, model)
    steps = [came for name, came in reads if name.startswith("probemon step")]
    assert len(steps) >= 7 and all(steps)
    for name in ("ptr", "probes", "fired_mask"):
        assert np.array_equal(getattr(result.scores, name), getattr(expected.scores, name))
    assert np.allclose(result.scores.values, expected.scores.values, atol=1e-6, rtol=0)


def test_read_error_in_the_step_thread_is_raised_by_generate(model, mapped, monkeypatch):
    manager = DynamicProbeManager(mapped)

    def fail():
        if threading.current_thread() is not threading.main_thread():
            raise ProbeLoadError("probe 33 could not be read")

    monkeypatch.setattr(mapped, "check_unchanged", fail)
    with pytest.raises(ProbeLoadError, match="probe 33"):
        watched(manager, model)

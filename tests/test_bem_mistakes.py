"""What goes wrong around an adapter is told before it does harm."""

import dataclasses
import json

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file

from probemon.bem import BemConfig, attach_bem
from probemon.bem.distil import distil
from probemon.bem.fallback import MOST_RANK, MOST_WIDTH, FallbackPolicy
from probemon.bem.imitation import imitate
from probemon.bem.training import TrainSettings, train
from probemon.errors import BemError, BemFileError, ConfigError
from probemon.packfile import sha256
from probemon.telemetry import RoutingSettings

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8}
IDS = torch.tensor([[1, 44, 3, 17, 8, 9]])
LESSONS = [{"input_ids": IDS, "labels": IDS}]
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def test_an_adapter_is_not_taken_off_in_the_middle_of_a_generation():
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        expected = model.generate(IDS, **GREEDY)

        def leaves(ids, scores):
            bem.detach()
            return scores

        with pytest.raises(BemError, match=r"1 generate\(\) of this host is under way"):
            model.generate(IDS, logits_processor=[leaves], **GREEDY)
        assert bem.open and torch.equal(model.generate(IDS, **GREEDY), expected)
    assert not bem.open


def test_what_falls_back_is_not_learned_from():
    with attach_bem(make_model(), BemConfig(**SMALL), fallback=FallbackPolicy()) as bem:
        for learn in (lambda: train(bem, LESSONS, TrainSettings(n_steps=1)), lambda: imitate(bem, LESSONS, TrainSettings(n_steps=1)), lambda: distil(bem, LESSONS)):
            with pytest.raises(ConfigError, match=r"FallbackPolicy.*without fallback="):
                learn()


def test_tokens_that_are_left_out_are_not_distilled_as_if_they_were_not():
    with attach_bem(make_model(), BemConfig(**SMALL, sparse_eps=0.9)) as bem, pytest.raises(ConfigError, match=r"sparse_eps is 0.9"):
        distil(bem, LESSONS)


def test_a_diverged_adapter_does_not_replace_a_good_one(tmp_path):
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        bem.save_pretrained(tmp_path)
        before = (tmp_path / "bem.safetensors").read_bytes()
        with torch.no_grad():
            next(iter(bem.updates.values())).U.fill_(float("nan"))
        with pytest.raises(BemError, match="is not finite, so nothing is saved"):
            bem.save_pretrained(tmp_path)
    assert (tmp_path / "bem.safetensors").read_bytes() == before


def forged(folder, **change):
    """A saved adapter with other tensors, whose hash is right."""
    tensors = load_file(folder / "bem.safetensors")
    name = next(name for name in tensors if name.endswith(".U"))
    tensors[name] = change["tensor"](tensors[name])
    save_file(tensors, folder / "bem.safetensors")
    settings = json.loads((folder / "bem.json").read_text())
    settings["files"]["bem.safetensors"] = {"sha256": sha256(folder / "bem.safetensors"), "size": (folder / "bem.safetensors").stat().st_size}
    (folder / "bem.json").write_text(json.dumps(settings))


def test_a_saved_adapter_with_settings_left_out_or_other_numbers_is_refused(tmp_path):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        bem.save_pretrained(tmp_path)
    text = (tmp_path / "bem.json").read_text()
    settings = json.loads(text)
    del settings["config"]["alpha"]
    for broken, message in ((json.dumps(settings), "lacks alpha"), ("[" * 100_000, "cannot be read as JSON"), (text.replace('"rank": 3', '"rank": 10000000000000'), "rank is 10000000000000")):
        (tmp_path / "bem.json").write_text(broken)
        with pytest.raises(BemFileError, match=message):
            attach_bem(model, tmp_path)
    (tmp_path / "bem.json").write_text(text)
    forged(tmp_path, tensor=lambda u: torch.full_like(u, 1e300, dtype=torch.float64))
    with pytest.raises(BemFileError, match=r"numbers that torch.float32 has not"):
        attach_bem(model, tmp_path)
    forged(tmp_path, tensor=lambda u: torch.ones_like(u, dtype=torch.bool))
    with pytest.raises(BemFileError, match=r"is torch.bool, expected torch.float32"):
        attach_bem(model, tmp_path)


def test_sizes_that_the_kernels_do_not_have_are_told_when_attached():
    for change in ({"rank": MOST_RANK + 1}, {"width": MOST_WIDTH + 1}):
        config = dataclasses.replace(BemConfig(), **change)
        with pytest.raises(ConfigError, match="the kernels have ranks to 64 and widths to 1024"):
            attach_bem(make_model(), config, impl="triton")
        bem = attach_bem(make_model(), config, impl="auto")
        assert bem.impl == "reference" and "the kernels have" in bem.impl_why
        bem.detach()
    kernels = pytest.importorskip("probemon.kernels.bem_controller"), pytest.importorskip("probemon.kernels.bem_triton")
    assert (kernels[1].MOST_RANK, kernels[0].MOST_WIDTH) == (MOST_RANK, MOST_WIDTH)


def test_rules_that_are_none_are_told_at_once():
    with pytest.raises(ConfigError, match="'collapse' is no rule"):
        RoutingSettings(rules=("collapse",))


def test_learning_makes_gradients_wherever_it_is_called():
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem, torch.no_grad():
        history = train(bem, LESSONS, TrainSettings(n_steps=2, lr=1e-2))
        assert not torch.is_grad_enabled()
    assert history.losses[1] < history.losses[0]

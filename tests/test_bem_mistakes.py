"""What goes wrong around an adapter is told before it does harm."""

import dataclasses
import json
import threading

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file

from probemon.bem import BemConfig, attach_bem, quantize, with_batch_backoff
from probemon.bem.distil import distil
from probemon.bem.fallback import MOST_RANK, MOST_WIDTH, FallbackPolicy
from probemon.bem.imitation import imitate
from probemon.bem.losses import silenced
from probemon.bem.policy import Gaussian, improve
from probemon.bem.saved import settings_hash
from probemon.bem.training import TrainSettings, evaluate, train
from probemon.errors import BemError, BemFileError, BemStateError, CallbackFailed, ConfigError, NotSupportedDecoding
from probemon.packfile import sha256
from probemon.telemetry import RoutingJsonLines, RoutingMonitor, RoutingSettings

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
    (folder / "bem.json").write_text(hashed(settings))


def hashed(settings):
    """The text of bem.json with a hash that is right."""
    return json.dumps({**settings, "sha256": settings_hash({key: settings[key] for key in ("config", "host", "files")})})


def test_a_saved_adapter_with_settings_left_out_or_other_numbers_is_refused(tmp_path):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        bem.save_pretrained(tmp_path)
    text = (tmp_path / "bem.json").read_text()
    settings = json.loads(text)
    del settings["config"]["alpha"]
    for broken, message in ((hashed(settings), "lacks alpha"), ("[" * 100_000, "cannot be read as JSON"), (hashed(json.loads(text.replace('"rank": 3', '"rank": 10000000000000'))), "rank is 10000000000000"),
                            (text.replace('"ema": 0.5', '"ema": 0.6'), "is not as save_pretrained wrote it")):
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


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: attach_bem(make_model(), {"rank": 4}), "config is a dict: give a BemConfig"),
        (lambda: attach_bem(make_model(), {}), "config is a dict"),
        (lambda: attach_bem(make_model(), BemConfig(), fallback=True), "fallback is True: give a FallbackPolicy"),
        (lambda: BemConfig(max_norm=1000.0), "max_norm is 1000.0: give a number over 0, at most 256"),
        (lambda: BemConfig(alpha=10**400), "alpha is 1000"),
        (lambda: FallbackPolicy(min_confidence="a"), "min_confidence is 'a'"),
        (lambda: FallbackPolicy(latency_factor="2"), "latency_factor is '2'"),
        (lambda: FallbackPolicy(clock=None), "clock is None: give what returns seconds"),
        (lambda: TrainSettings(n_steps="2"), "n_steps is '2'"),
        (lambda: TrainSettings(n_steps=2, lr=None), "lr is None"),
        (lambda: TrainSettings(n_steps=2, seed=-1), "seed is -1"),
        (lambda: quantize(3), "int is no adapter"),
        (lambda: train(make_model(), LESSONS, TrainSettings(n_steps=1)), "is no adapter"),
        (lambda: with_batch_backoff(len, 4, size=2.5), "size 2.5"),
        (lambda: with_batch_backoff(len, 4, limit="a"), "limit 'a'"),
        (lambda: evaluate(make_model(), [{"input_ids": IDS}]), "a batch has input_ids and no labels"),
        (lambda: RoutingSettings(memory=3), "memory is 3"),
    ],
)  # fmt: skip
def test_odd_arguments_are_told_by_name(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_what_cannot_be_learned_from_is_told_before_a_step_is_made():
    padding = {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        with pytest.raises(ConfigError, match="no batch has a token"):
            distil(bem, [padding])
        assert distil(bem, [*LESSONS, padding]).error == distil(bem, LESSONS).error
        before = {name: x.clone() for name, x in bem.state_dict().items()}
        with pytest.raises(ConfigError, match="batches have 1, 2 rows"):
            improve(bem, [{"input_ids": IDS}, {"input_ids": IDS.expand(2, -1)}], lambda batch, output: torch.ones(len(batch["input_ids"])), Gaussian(), TrainSettings(n_steps=4))
        assert all(torch.equal(x, before[name]) for name, x in bem.state_dict().items())


def test_another_thread_is_steered_while_this_one_learns():
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        with torch.no_grad():
            bem.updates["down_1"].U.add_(0.5)

        def elsewhere():
            found = []
            thread = threading.Thread(target=lambda: found.append(model(IDS).logits))
            thread.start()
            thread.join()
            return found[0]

        with torch.no_grad():
            steered = model(IDS).logits
            with silenced(bem):
                assert not torch.equal(model(IDS).logits, steered)
                assert torch.equal(elsewhere(), steered)


def test_a_state_of_another_level_is_not_restored():
    model, fixed, auto = make_model(), BemConfig(**SMALL), BemConfig(**SMALL, level="auto")
    kept = {}
    for config in (fixed, auto):
        with attach_bem(model, config) as bem:
            cache = model(IDS, use_cache=True).past_key_values
            kept[config.level] = bem.state(cache).tensors()
    for config, state, message in (
        (auto, kept["position"], "has no level of its rows"), (fixed, kept["auto"], "has a level of its rows"), (auto, {**kept["auto"], "level": torch.tensor([9])}, r"levels are \[9\]"),
        (auto, {**kept["auto"], "level": torch.tensor([0.0])}, "torch.float32"),
    ):  # fmt: skip
        with attach_bem(model, config) as bem:
            cache = model(IDS, use_cache=True).past_key_values
            bem.restore(cache, kept[config.level])
            with pytest.raises(BemStateError, match=message):
                bem.restore(cache, state)


def test_drafts_of_layers_before_the_one_that_is_read_are_refused_by_name():
    model = make_model(layers=4)
    with attach_bem(model, BemConfig(**SMALL, read_layer=2)):
        assert model.generate(IDS, **GREEDY, assistant_early_exit=3).shape[1] > 6
        with pytest.raises(NotSupportedDecoding, match=r"drafts are made by the first 2 layers.* of 3 or more"):
            model.generate(IDS, **GREEDY, assistant_early_exit=2)


def test_a_source_of_memory_that_fails_ends_no_generation(tmp_path):
    def gone():
        raise OSError("no such device")

    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        expected = model.generate(IDS, **GREEDY)
        with pytest.raises(CallbackFailed, match="no such device"), RoutingMonitor(model, bem=bem, memory=gone, window=4) as monitor:
            assert torch.equal(model.generate(IDS, **GREEDY), expected)
            report = monitor.report()
            assert report["n_tokens"] > 0 and report["memory_watermark_bytes"] == 0
        with pytest.raises(ConfigError, match="the block has ended"):
            monitor.add_sink(RoutingJsonLines(tmp_path / "late.jsonl"))

"""Mistakes in the use of an adapter are reported before they do harm."""

import dataclasses
import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from bem_oracle import make_host
from conftest import make_model, n_hooks
from gates import FAILED, integrity
from probemon.adapters.bem import BemConfig, attach_bem, quantize, with_batch_backoff
from probemon.adapters.bem.distil import distil, distil_trained
from probemon.adapters.bem.evaluation.profiler import peak_memory
from probemon.adapters.bem.fallback import FallbackPolicy
from probemon.adapters.bem.imitation import imitate
from probemon.adapters.bem.losses import LossWeights, adapter_losses, silenced
from probemon.adapters.bem.memory import memory_pressure
from probemon.adapters.bem.saved import settings_hash
from probemon.adapters.bem.training import TrainSettings, evaluate, parameter_groups, train
from probemon.adapters.bem.update import MOST_RANK, MOST_WIDTH
from probemon.adapters.routing import RoutingJsonLines, RoutingMonitor, RoutingSettings
from probemon.errors import (
    BemError,
    BemFileError,
    BemStateError,
    ConfigError,
    UnsupportedDecoding,
    UnsupportedModel,
)
from probemon.util.files import sha256
from turns import take_turns

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8}
IDS = torch.tensor([[1, 44, 3, 17, 8, 9]])
LESSONS = [{"input_ids": IDS, "labels": IDS}]
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def test_adapter_cannot_be_detached_during_generation():
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        expected = model.generate(IDS, **GREEDY)

        def leaves(ids, scores):
            bem.detach()
            return scores

        with pytest.raises(BemError, match=r"1 generate\(\) of this model is under way"):
            model.generate(IDS, logits_processor=[leaves], **GREEDY)
        assert bem.open and torch.equal(model.generate(IDS, **GREEDY), expected)
    assert not bem.open


def test_training_and_distillation_refuse_a_fallback_policy():
    with attach_bem(make_model(), BemConfig(**SMALL), fallback=FallbackPolicy()) as bem:
        for learn in (
            lambda: train(bem, LESSONS, TrainSettings(n_steps=1)),
            lambda: imitate(bem, LESSONS, TrainSettings(n_steps=1)),
            lambda: distil(bem, LESSONS),
        ):
            with pytest.raises(ConfigError, match=r"FallbackPolicy.*without fallback="):
                learn()


def test_distillation_refuses_sparse_updates():
    with (
        attach_bem(make_model(), BemConfig(**SMALL, sparse_eps=0.9)) as bem,
        pytest.raises(ConfigError, match=r"sparse_eps is 0.9"),
    ):
        distil(bem, LESSONS)


def test_features_unsupported_on_sharded_models_are_refused_when_attached():
    """Of low-rank updates tests/adapters/bem/test_bem_ranks.py shows that they can."""
    model = make_model()
    model._tp_size = 2  # as transformers' tp_plan sets it
    for config, how, words in (
        (BemConfig(form="film"), {}, "form 'film'"),
        (BemConfig(**SMALL, start="svd"), {}, "start='svd'"),
        (BemConfig(**SMALL, dropout=0.1), {"impl": "triton"}, r"dropout=0\.1 and impl='triton'"),
        (BemConfig(**SMALL), {"fallback": FallbackPolicy()}, "a FallbackPolicy"),
    ):
        with pytest.raises(ConfigError, match=words + r" on a model .* 2 ranks \(tensor parallel\).*without tp_plan"):
            attach_bem(model, config, **how)
    assert n_hooks(model) == 0
    model._tp_size = None
    with attach_bem(model, BemConfig(**SMALL)), torch.no_grad():
        model(IDS)


def test_site_run_on_other_states_is_refused_with_a_remedy():
    model = make_model()
    site = model.model.layers[0].mlp.down_proj
    site.register_forward_pre_hook(lambda module, args: (args[0].reshape(1, -1, args[0].shape[-1]).repeat(1, 2, 1),))
    with (
        attach_bem(model, BemConfig(**SMALL)),
        pytest.raises(UnsupportedModel, match=r"site down\.0 is run on .* Leave 'down' out of sites"),
    ):
        model(IDS)


@pytest.mark.parametrize(
    "cache",
    [None, "x", 3, {}, torch.zeros(2), ((torch.zeros(1), torch.zeros(1)),)],
    ids=lambda cache: type(cache).__name__,
)
def test_state_of_something_other_than_a_cache_is_an_error(cache):
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem, torch.no_grad():
        filled = bem.host(IDS, use_cache=True).past_key_values
        state = bem.state(filled).tensors()
        with pytest.raises(BemStateError, match=f"{type(cache).__name__} is not a cache.*give the past_key_values"):
            bem.state(cache)
        with pytest.raises(BemStateError, match=f"{type(cache).__name__} is not a cache.*give the past_key_values"):
            bem.restore(cache, state)
        for saved in (None, "x", [state], {"z": 3}, {**state, "real": None}):
            with pytest.raises(BemStateError, match="give the tensors by name"):
                bem.restore(filled, saved)
        bem.restore(filled, state)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_adapter_is_not_saved_and_keeps_the_older_files(dtype, tmp_path):
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        bem.save_pretrained(tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        bem.updates.to(dtype)
        with pytest.raises(BemError, match=r"updates\.o_0\.\w is torch\.float8.*bem\.float\(\), or quantize\(bem\)"):
            bem.save_pretrained(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        bem.float().save_pretrained(tmp_path / "wide")
        assert (tmp_path / "wide/bem.safetensors").is_file()


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
    settings["files"]["bem.safetensors"] = {
        "sha256": sha256(folder / "bem.safetensors"),
        "size": (folder / "bem.safetensors").stat().st_size,
    }
    (folder / "bem.json").write_text(hashed(settings))


def hashed(settings):
    """The text of bem.json with a hash that is right."""
    return json.dumps(
        {**settings, "sha256": settings_hash({key: settings[key] for key in ("config", "host", "files")})}
    )


def test_saved_adapter_with_missing_or_invalid_settings_is_refused(tmp_path):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        bem.save_pretrained(tmp_path)
    text = (tmp_path / "bem.json").read_text()
    settings = json.loads(text)
    del settings["config"]["alpha"]
    for broken, message in (
        (hashed(settings), "lacks alpha"),
        ("[" * 100_000, "cannot be read as JSON"),
        (hashed(json.loads(text.replace('"rank": 3', '"rank": 10000000000000'))), "rank is 10000000000000"),
        (text.replace('"ema": 0.5', '"ema": 0.6'), "is not as save_pretrained wrote it"),
    ):
        (tmp_path / "bem.json").write_text(broken)
        with pytest.raises(BemFileError, match=message):
            attach_bem(model, tmp_path)
    (tmp_path / "bem.json").write_text(text)
    for dtype in (torch.bool, torch.int64):
        forged(tmp_path, tensor=lambda u, dtype=dtype: torch.ones_like(u, dtype=dtype))
        with pytest.raises(BemFileError, match=rf"is {dtype}, expected torch.float32"):
            attach_bem(model, tmp_path)


def test_sizes_unsupported_by_the_kernels_are_reported_when_attached():
    for change in ({"rank": MOST_RANK + 1}, {"width": MOST_WIDTH + 1}):
        config = dataclasses.replace(BemConfig(), **change)
        with pytest.raises(ConfigError, match="the kernels have ranks to 64 and widths to 1024"):
            attach_bem(make_model(), config, impl="triton")
        bem = attach_bem(make_model(), config, impl="auto")
        assert bem.impl == "reference" and "the kernels have" in bem.impl_why
        bem.detach()
    kernels = (
        pytest.importorskip("probemon.adapters.bem.kernels.controller"),
        pytest.importorskip("probemon.adapters.bem.kernels.update"),
    )
    assert (kernels[1].MOST_RANK, kernels[0].MOST_WIDTH) == (MOST_RANK, MOST_WIDTH)


def test_invalid_routing_rules_are_refused_at_once():
    with pytest.raises(ConfigError, match="rules is \\('collapse',\\): give a tuple of AlertRule"):
        RoutingSettings(rules=("collapse",))


def test_training_enables_gradients_under_no_grad():
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
        (lambda: quantize(3), "int is not an adapter"),
        (lambda: train(make_model(), LESSONS, TrainSettings(n_steps=1)), "is not an adapter"),
        (lambda: with_batch_backoff(len, 4, size=2.5), "size is 2.5"),
        (lambda: with_batch_backoff(len, 4, limit="a"), "limit is 'a'"),
        (lambda: evaluate(make_model(), [{"input_ids": IDS}]), "a batch has input_ids and no labels"),
    ],
)
def test_invalid_arguments_are_reported_by_name(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_unusable_batches_are_refused_before_the_first_step():
    padding = {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        with pytest.raises(ConfigError, match="no batch has a token"):
            distil(bem, [padding])
        assert distil(bem, [*LESSONS, padding]).error == distil(bem, LESSONS).error


def learning(bem, settings=None, **changes):
    """Every way to learn, given one batch with changes."""
    settings = settings or TrainSettings(n_steps=1)
    batch = {"input_ids": IDS, "labels": IDS, "expert_codes": torch.ones(1, 3) / 2, **changes}
    batch = {name: x for name, x in batch.items() if x is not None}
    return {
        "train": lambda: train(bem, [batch], settings),
        "imitate": lambda: imitate(bem, [batch], settings),
        "distil": lambda: distil(bem, [batch]),
        "trained": lambda: distil_trained(bem, [batch], settings),
        "evaluate": lambda: evaluate(bem.host, [batch]),
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"input_ids": None}, "input_ids are not among labels, expert_codes"),
        ({"input_ids": [[1, 2, 3]]}, "input_ids are a list"),
        ({"input_ids": IDS[0]}, r"of shape \(6,\)"),
        ({"input_ids": IDS[:0]}, r"of shape \(0, 6\)"),
        ({"input_ids": IDS.float()}, "torch.float32"),
        ({"labels": IDS[:, :4]}, r"labels of a batch are of shape \(1, 4\) and .*, its input_ids of \(1, 6\)"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask of a batch are of shape \(1, 4\)"),
        ({"labels": [1]}, "labels of a batch are a list"),
    ],
)
def test_invalid_batch_is_refused_by_every_training_function(changes, message):
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        for name, learn in learning(bem, **changes).items():
            with pytest.raises(ConfigError, match=message):
                learn()
                pytest.fail(name)


def test_training_functions_refuse_invalid_batches_and_settings():
    settings, ok = TrainSettings(n_steps=1), {"input_ids": IDS, "labels": IDS, "expert_codes": torch.ones(1, 3) / 2}
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        ways = (
            lambda b, s: train(bem, b, s),
            lambda b, s: imitate(bem, b, s),
        )
        for learn in ways:
            for batches, given, message in (
                (ok, settings, r"batches is a dict.*\[batch\] of one"),
                ((x for x in [ok]), settings, r"batches is a generator.*list\(batches\)"),
                (["x"], settings, "a batch is a str"),
                ([ok], {"n_steps": 1}, r"settings is \{'n_steps': 1\}: give TrainSettings"),
                ([], settings, "no batches to learn from"),
            ):
                with pytest.raises(ConfigError, match=message):
                    learn(batches, given)
            assert learn([ok], settings) is not None
        with pytest.raises(ConfigError, match="weights is"):
            train(bem, [ok], settings, {"lm": 1})
        for measure in (lambda: evaluate(bem.host, ok), lambda: distil(bem, ok)):
            with pytest.raises(ConfigError, match="a batch is a str: give a sequence of batches"):
                measure()


def test_integer_and_float_masks_equal_bool_masks():
    settings = TrainSettings(n_steps=3)
    where = torch.tensor([[False, True, False, False, True, True], [True, False, False, True, False, False]])
    ids, codes = torch.cat([IDS, IDS.flip(1)]), torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0)) / 4
    found = []
    for kind in (torch.bool, torch.int64, torch.uint8, torch.float32):
        batch = {"input_ids": ids, "expert_codes": codes, "counted": where.to(kind)}
        with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
            found.append(imitate(bem, [batch], settings).losses)
    assert all(one == found[0] for one in found)
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        for wrong in (where[:, :4], where[0], [True]):
            batch = {"input_ids": ids, "expert_codes": codes, "counted": wrong}
            with pytest.raises(ConfigError, match="counted of a batch are"):
                imitate(bem, [batch], settings)


def test_other_threads_are_steered_during_training():
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
        (auto, kept["position"], "a state without levels of its rows"),
        (fixed, kept["auto"], "a state with a level of its rows"),
        (auto, {**kept["auto"], "level": torch.tensor([9])}, "are not a controller.s state"),
        (auto, {**kept["auto"], "level": torch.tensor([0.0])}, "are not a controller.s state"),
    ):
        with attach_bem(model, config) as bem:
            cache = model(IDS, use_cache=True).past_key_values
            bem.restore(cache, kept[config.level])
            with pytest.raises(BemStateError, match=message):
                bem.restore(cache, state)


def test_state_of_another_dtype_or_batch_size_is_not_restored():
    model, ids = make_model(), IDS.expand(2, -1)
    with attach_bem(model, BemConfig(**SMALL)) as bem, torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        kept = bem.state(cache).tensors()
        for state, message in (
            ({**kept, "z": kept["z"].bfloat16()}, r"a state of .*bfloat16\) for a cache and .* \(2, .*float32\)"),
            ({**kept, "z": kept["z"].long()}, "a state of .*int64"),
            ({name: x[:1] for name, x in kept.items()}, r"a state of .* \(1, .* \(2, "),
            ({name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in kept.items()}, r"a state of .* \(4, "),
        ):
            with pytest.raises(BemStateError, match=message):
                bem.restore(cache, state)
        bem.restore(cache, kept)
        expected = model(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1]
        assert (model(ids[:, :1], past_key_values=cache).logits[:, 0] - expected).abs().max() < 1e-5


def test_drafts_from_layers_before_the_read_layer_are_refused():
    model = make_model(layers=4)
    with attach_bem(model, BemConfig(**SMALL, read_layer=2)):
        assert model.generate(IDS, **GREEDY, assistant_early_exit=3).shape[1] > 6
        with pytest.raises(UnsupportedDecoding, match=r"drafts are made by the first 2 layers.* of 3 or more"):
            model.generate(IDS, **GREEDY, assistant_early_exit=2)


def test_sinks_and_listeners_are_refused_after_the_block(tmp_path):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        with RoutingMonitor(model, bem=bem, window=4) as monitor:
            model.generate(IDS, **GREEDY)
        with pytest.raises(ConfigError, match="the block has ended"):
            monitor.add_sink(RoutingJsonLines(tmp_path / "late.jsonl"))


def test_packed_sequences_are_refused_with_a_cache():
    """The host would tell them apart by their positions without a cache, and by default it makes one."""
    model = make_model()
    packed = {"input_ids": torch.cat([IDS, IDS[:, :4]], dim=1), "position_ids": torch.tensor([[*range(6), *range(4)]])}
    with attach_bem(model, BemConfig(**SMALL)), torch.no_grad():
        with pytest.raises(UnsupportedDecoding, match="position_ids that do not rise by one"):
            model(**packed)
        rising = {"input_ids": IDS, "position_ids": torch.arange(3, 9)[None]}
        assert model(**rising).logits.isfinite().all()
        padded = {
            "input_ids": torch.cat([torch.zeros_like(IDS[:, :2]), IDS], dim=1),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]),
            "position_ids": torch.tensor([[0, 0, *range(6)]]),
        }
        assert (model(**padded).logits[:, 2:] - model(IDS).logits).abs().max() < 1e-5


@pytest.mark.parametrize("cap", [1.0, None])
@pytest.mark.parametrize("where", ["token router", "U"])
def test_nonfinite_codes_are_recorded_without_ending_generation(where, cap):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL, spectral_cap=cap)) as bem:
        with torch.no_grad():
            if where == "U":
                bem.updates["down_1"].U.fill_(float("nan"))
            else:
                bem.controller.token[1].weight.fill_(float("nan"))
        expected = model.generate(IDS, **GREEDY)
        with RoutingMonitor(model, bem=bem) as monitor:
            records = []
            monitor.listen(lambda placed, decisions, record: records.append(record))
            assert torch.equal(model.generate(IDS, **GREEDY), expected)
        lines = [line for record in records for line in record.lines()]
        assert lines and all(line["sigma1"] is None or line["sigma1"] != line["sigma1"] for line in lines)
        if where == "token router":
            assert any(stream.get("n_not_finite") for stream in monitor.report()["streams"])


@pytest.mark.parametrize("cap", [1.0, None])
@pytest.mark.parametrize("rank, sites, level", [(12, ("q", "v"), "chunk"), (20, ("o", "down"), "position")])
def test_rank_may_exceed_the_size_of_some_sites(rank, sites, level, cap):
    """The larger of singular values by the whole matrices, site by site."""
    model = make_host()
    config = BemConfig(rank=rank, width=8, prefix_tokens=8, chunk_tokens=4, sites=sites, level=level, spectral_cap=cap)
    with attach_bem(model, config) as bem, torch.no_grad():
        for update in bem.updates.values():
            update.U.normal_(generator=torch.Generator().manual_seed(1))
        assert len({min(side, rank) for site in bem.sites for side in (site.n_in, site.n_out)}) > 1
        codes = torch.randn(5, rank, generator=torch.Generator().manual_seed(2))
        for site in bem.sites:
            update = bem.updates[site.key]
            dense = [
                config.scale * update.U.double() @ torch.diag(code.double()) @ update.V.double().T for code in codes
            ]
            expected = torch.stack([torch.linalg.matrix_norm(one, 2) for one in dense])
            assert (bem.governor.sigma1(site, codes).double() / expected - 1).abs().max() < 1e-5
        with RoutingMonitor(model, bem=bem):
            assert model(IDS).logits.isfinite().all()


def test_first_token_after_padding_is_not_a_label():
    """The first token of a row padded on the left stands behind padding: it is no label."""
    model = make_model()
    pads = torch.zeros_like(IDS[:, :2])
    alone = {"input_ids": IDS, "labels": IDS}
    left = {
        "input_ids": torch.cat([pads, IDS], dim=1),
        "attention_mask": torch.cat([pads, torch.ones_like(IDS)], dim=1),
    }
    left["labels"] = left["input_ids"].masked_fill(left["attention_mask"] == 0, -100)
    right = {
        name: torch.cat([x, pads if name != "labels" else pads - 100], dim=1)
        for name, x in {**alone, "attention_mask": torch.ones_like(IDS)}.items()
    }
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        found = [
            float(adapter_losses(bem, batch, LossWeights(kl=0.0)).terms["lm"].detach())
            for batch in (alone, left, right)
        ]
        assert max(found) - min(found) < 1e-5
        measured = [evaluate(model, [batch]) for batch in (alone, left, right)]
        assert max(measured) - min(measured) < 1e-5 and abs(measured[0] - found[0]) < 1e-5


def test_batches_without_labels_are_not_reported_as_divergence():
    padding = {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
    experts = {
        "input_ids": IDS,
        "expert_codes": torch.ones(1, 6, 3) / 2,
        "counted": torch.zeros_like(IDS, dtype=torch.bool),
    }
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        for learn, message in (
            (lambda: train(bem, [padding], TrainSettings(n_steps=1)), "only padding"),
            (
                lambda: train(
                    bem, [{"input_ids": IDS, "labels": torch.full_like(IDS, -100)}], TrainSettings(n_steps=1)
                ),
                "no label behind a token",
            ),
            (lambda: train(bem, [{"input_ids": IDS[:, :1]}], TrainSettings(n_steps=1)), "no label behind a token"),
            (lambda: imitate(bem, [experts], TrainSettings(n_steps=1)), "no token that counts"),
        ):
            with pytest.raises(ConfigError, match=message):
                learn()


def test_training_works_in_inference_mode():
    losses = []
    for block in (torch.enable_grad(), torch.inference_mode()):
        with attach_bem(make_model(), BemConfig(**SMALL)) as bem, block:
            lessons = [{"input_ids": IDS.clone(), "labels": IDS.clone()}]
            losses.append(train(bem, lessons, TrainSettings(n_steps=3)).losses)
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


def test_model_made_in_inference_mode_is_refused_for_training():
    with torch.inference_mode():
        model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        for learn in (lambda: train(bem, LESSONS, TrainSettings(n_steps=1)), lambda: distil(bem, LESSONS)):
            with pytest.raises(ConfigError, match="the model was made in torch"):
                learn()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_reloaded_adapter_keeps_its_precision(tmp_path, dtype):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        with torch.no_grad():
            bem.updates["down_1"].U.add_(0.1)
        bem.to(dtype)
        expected = model(IDS).logits
        bem.save_pretrained(tmp_path)
    with attach_bem(model, tmp_path) as again:
        assert {p.dtype for p in again.parameters()} == {dtype} and torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize(
    "part, dtype",
    [
        ("controller", torch.bfloat16),
        ("controller", torch.float64),
        ("updates", torch.bfloat16),
        ("updates", torch.float64),
    ],
    ids=str,
)
def test_reloaded_adapter_keeps_the_precision_of_each_part(tmp_path, part, dtype):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        with torch.no_grad():
            for parameter in bem.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 3)
        getattr(bem, part).to(dtype)
        with torch.no_grad():
            for parameter in getattr(bem, part).parameters():
                parameter.mul_(1.1)  # so that fp64 holds what fp32 has not
        expected, kept = model(IDS).logits, bem.state_dict()
        bem.save_pretrained(tmp_path)
    for block in (torch.enable_grad(), torch.inference_mode()):
        with block, attach_bem(model, tmp_path) as again:
            found = again.state_dict()
            assert all(
                torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in kept.items()
            ) and torch.equal(model(IDS).logits, expected)
            assert not any(parameter.is_inference() or not parameter.requires_grad for parameter in again.parameters())


def test_saving_to_a_path_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        for save in (bem.save_pretrained, distil(bem, LESSONS).save):
            with pytest.raises(BemFileError, match="file cannot be made"):
                save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_invalid_memory_readings_and_settings_are_refused():
    for source in (lambda: (float("nan"), 10), lambda: (1, 0), lambda: 3, lambda: (1, "10"), lambda: (-1, 10)):
        with pytest.raises(ConfigError, match="the source of memory gives"):
            memory_pressure(source)
    with pytest.raises(ConfigError, match="settings are list"):
        BemConfig.from_dict([1])


def test_the_kernel_is_not_chosen_for_an_adapter_in_half_precision(tmp_path, monkeypatch):
    model = make_model()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        bem.to(torch.bfloat16).save_pretrained(tmp_path)
    before = [
        n for _, module in model.named_modules() for n in (len(module._forward_hooks), len(module._forward_pre_hooks))
    ]
    with pytest.raises(ConfigError, match=r"saved in torch\.bfloat16, and the controller's kernel"):
        attach_bem(model, tmp_path, impl="triton")
    assert before == [
        n for _, module in model.named_modules() for n in (len(module._forward_hooks), len(module._forward_pre_hooks))
    ]
    monkeypatch.setattr("probemon.adapters.bem.attached.choose_impl", lambda *_: ("triton", "as on a GPU"))
    with attach_bem(model, tmp_path, impl="auto") as bem:
        assert bem.impl == "reference" and "saved in torch.bfloat16" in bem.impl_why
        assert model.generate(IDS, **GREEDY).shape[1] > IDS.shape[1]
        bem.updates.float()  # of a controller of half precision and full U and V the same holds
        bem.save_pretrained(tmp_path)
    with attach_bem(model, tmp_path, impl="auto") as bem:
        assert bem.impl == "reference" and not bem.controller.fused and "saved in torch.bfloat16" in bem.impl_why
        bem.controller.float()
        bem.updates.bfloat16()
        bem.save_pretrained(tmp_path)
    with attach_bem(model, tmp_path, impl="auto") as bem:
        assert bem.impl == "triton" and bem.controller.fused


def test_batches_may_hold_extra_data_and_none_values():
    with attach_bem(make_model(), BemConfig(**SMALL)) as bem:
        lesson = {"input_ids": IDS, "labels": None, "attention_mask": None, "text": ["x"]}
        assert len(train(bem, [lesson], TrainSettings(n_steps=1)).losses) == 1


def test_packed_sequences_with_an_all_ones_mask_are_refused_if_it_is_dropped():
    model = make_model()
    packed = {
        "input_ids": torch.cat([IDS, IDS[:, :4]], dim=1),
        "position_ids": torch.tensor([[*range(6), *range(4)]]),
        "attention_mask": torch.ones(1, 10, dtype=torch.int64),
    }
    with attach_bem(model, BemConfig(**SMALL)), torch.no_grad():
        assert model(**packed).logits.isfinite().all()  # one row to the host
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(UnsupportedDecoding, match="position_ids that do not rise by one"):
            model(**packed)


def test_routing_of_the_inner_decoder_and_the_whole_model_is_the_same():
    model = make_model()
    for attached, watched in ((model.model, model), (model, model.model)):
        with (
            attach_bem(attached, BemConfig(**SMALL)) as bem,
            RoutingMonitor(watched, bem=bem) as monitor,
            torch.no_grad(),
        ):
            watched(IDS)
        assert monitor.n_tokens == IDS.numel()


def test_invalid_evaluation_inputs_are_refused():
    fine = {"start": 0.0, "rows": 0.0, "leak": 0.0, "cached": 0.0, "cut": 1e-6}
    for wrong in ("none", True, [0.0]):
        with pytest.raises(ConfigError, match=r"the error of rows is .*give a number, or None"):
            integrity({**fine, "rows": wrong})
    with pytest.raises(ConfigError, match=r"errors is .*give a dict"):
        integrity("fine")
    assert integrity({**fine, "rows": float("nan")}).verdict == FAILED
    for calls, message in ((lambda: None, "give functions to call, by name"), ({"a": 3}, r"calls\['a'\] is given 3")):
        with pytest.raises(ConfigError, match=message):
            take_turns(calls, 1)
    for device in ("gpu", "meta", None, "cuda:97"):
        with pytest.raises(ConfigError, match=r"device is .*give"):
            peak_memory(lambda: None, device)
    with pytest.raises(ConfigError, match="peak_memory is given 3"):
        peak_memory(3)


def test_adapter_with_all_learning_rates_zero_is_refused():
    with attach_bem(make_host(), BemConfig(rank=2, width=6)) as bem:
        none = TrainSettings(n_steps=1, multipliers={"controller": 0.0, "updates": 0})
        with pytest.raises(ConfigError, match="nothing would learn: leave one over 0, or leave out"):
            parameter_groups(bem, none)
        assert len(parameter_groups(bem, dataclasses.replace(none, multipliers={"controller": 0.0}))) == 2


def test_int8_of_other_forms_is_refused_with_a_remedy(tmp_path):
    with attach_bem(make_host(), BemConfig(form="film", rank=2, width=6)) as bem:
        with pytest.raises(BemError, match=r"only low_rank .*bem\.bfloat16\(\)"):
            quantize(bem)
        logits = bem.host(torch.tensor([[3, 4, 5]])).logits
        assert torch.equal(bem.bfloat16().host(torch.tensor([[3, 4, 5]])).logits, logits)  # the remedy runs

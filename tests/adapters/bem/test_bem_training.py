"""Gradients reach U, V and the controller and equal finite differences; a bf16 model agrees within bf16."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bem_oracle import VOCAB, make_host, randomise
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.config import POLICIES
from probemon.adapters.bem.saved import SETTINGS, WEIGHTS, settings_hash
from probemon.adapters.bem.training import Objective, TrainSettings, train
from probemon.errors import ConfigError
from probemon.util.files import sha256

SMALL = {
    "rank": 3,
    "width": 6,
    "chunk_tokens": 4,
    "prefix_tokens": 8,
    "sites": ("q", "k", "v", "o", "down"),
    "spectral_cap": None,
}
IDS = torch.randint(3, VOCAB, (2, 19), generator=torch.Generator().manual_seed(0))


def loss_of(model, ids=IDS, mask=None):
    """Teacher forcing, without a cache. Not the host's own loss, which is in fp32 whatever the logits are."""
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    out = model(ids, attention_mask=mask, use_cache=False).logits
    return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("level", ["position", "auto"])
@pytest.mark.parametrize("shape", ["llama", "mixtral"])
def test_gradients_reach_every_adapter_parameter_and_none_of_the_model(shape, level):
    model = make_host(shape)
    config = BemConfig(**SMALL, level=level, token_limit=9, auto_limits=(10, 15))
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0  # 13 and 19 tokens: chunk and token codes under "auto"
    with randomise(attach_bem(model, config)) as bem:
        loss_of(model, mask=mask).backward()
    silent = {
        name
        for name, parameter in bem.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().max() > 0
    }
    assert silent == (
        {name for name, _ in bem.named_parameters() if name.startswith("controller.prefix")}
        if level == "auto"
        else set()
    )
    assert all(torch.isfinite(parameter.grad).all() for parameter in bem.parameters() if parameter.grad is not None)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("level", ["position", "prefix"])
def test_gradients_equal_finite_differences(level):
    model = make_host().double()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = (
            torch.nn.RMSNorm(16, dtype=torch.float64) for _ in range(2)
        )
    model.model.norm = torch.nn.RMSNorm(16, dtype=torch.float64)  # the host's own are computed in fp32
    config = BemConfig(**{**SMALL, "level": level, "token_limit": 9})
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    generator = torch.Generator().manual_seed(1)
    with randomise(attach_bem(model, config).double()) as bem:
        loss_of(model, mask=mask).backward()
        for name, parameter in bem.named_parameters():
            direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            expected, step = float((parameter.grad * direction).sum()), 1e-5
            losses = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.add_(sign * step * direction)
                    losses.append(float(loss_of(model, mask=mask)))
                    parameter.sub_(sign * step * direction)
            measured = (losses[0] - losses[1]) / (2 * step)
            assert abs(measured - expected) < 1e-7 + 1e-5 * abs(expected), name


def test_a_fresh_adapter_learns():
    """U = 0 at the start is no dead end: the loss on one batch falls, and the host stays as it was."""
    model = make_host()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with attach_bem(model, BemConfig(**{**SMALL, "spectral_cap": 1.0})) as bem:
        optimiser = torch.optim.Adam(bem.parameters(), lr=0.02)
        losses = []
        for _ in range(30):
            optimiser.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_training_works_through_a_forward_that_fills_a_cache():
    """By default hosts make a cache even where they are trained; no gradient goes through it, and none is lost."""
    model = make_host()
    with randomise(attach_bem(model, BemConfig(**SMALL))) as bem:
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        expected = [parameter.grad.clone() for parameter in bem.parameters()]
        bem.zero_grad()
        out = model(IDS, labels=IDS)
        out.loss.backward()
        for parameter, grad in zip(bem.parameters(), expected, strict=True):
            assert (parameter.grad - grad).abs().max() < 1e-6
        state = bem.state(out.past_key_values)
        assert not any(
            x.requires_grad for x in (*state.tensors().values(), *vars(state.carry).values()) if x is not None
        )


def test_dropout_applies_only_to_the_update_and_only_in_training():
    model = make_host()
    with attach_bem(model, BemConfig(**SMALL, dropout=0.5)) as bem:
        model.train()
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, model(IDS).logits)  # U = 0: the host's own path is whole
            randomise(bem)
            assert not torch.equal(model(IDS).logits, model(IDS).logits)
            model.eval()
            assert torch.equal(model(IDS).logits, model(IDS).logits)


def test_autocast_leaves_the_adapter_in_fp32():
    """The usual way of training in bf16: codes and updates stay in fp32, and a fresh adapter still changes no bit."""
    model, seen = make_host(), []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        bare = model(IDS).logits
    with (
        attach_bem(model, BemConfig(**{**SMALL, "spectral_cap": 1.0})) as bem,
        bem.controller.register_forward_hook(lambda module, args, codes: seen.append(codes)),
    ):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(IDS).logits, bare)
        with torch.no_grad():
            model(IDS)
        randomise(bem)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            steered = model(IDS).logits
        with torch.no_grad():
            expected = model(IDS).logits
    for level in ("chunk", "token"):
        assert seen[0].of(level).dtype == torch.float32 and torch.equal(seen[0].of(level), seen[1].of(level))
        assert torch.equal(seen[2].of(level), seen[3].of(level)) and not torch.equal(
            seen[0].of(level), seen[2].of(level)
        )
    assert bare.dtype == steered.dtype and (steered - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("shape", ["llama", "qwen3", "mixtral"])
def test_model_in_bf16_agrees_within_bf16_rounding(shape):
    """The update is computed in fp32 and rounded once: the steered host is no further from fp32 than three times the
    bare one.
    """
    model, config = make_host(shape), BemConfig(**SMALL)
    low = make_host(shape).bfloat16()
    with torch.no_grad():
        base = model(IDS).logits
        own = (low(IDS).logits.float() - base).norm() / base.norm()
        with randomise(attach_bem(model, config)):
            expected = model(IDS).logits
        with randomise(attach_bem(low, config)) as bem:
            assert {parameter.dtype for parameter in bem.parameters()} == {torch.float32}
            found = low(IDS).logits
            out = low.generate(IDS, max_new_tokens=5, do_sample=False)
    assert found.dtype == torch.bfloat16 and out.shape == (2, 24)
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 3 * own and (expected - base).norm() / base.norm() > 10 * error


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("n_tokens", [3, 19])  # fewer than a chunk, and several chunks
@pytest.mark.parametrize("sites", [("o", "down"), ("q", "o"), ("v",)], ids="+".join)
@pytest.mark.parametrize("level", POLICIES)
def test_ddp_trains_for_many_steps_as_one_process(process_group, level, sites, n_tokens):
    """DistributedDataParallel as it comes stops at its second step where a parameter has no part in the loss."""
    if sites == ("v",) and level in ("prefix", "token", "energy", "learned"):
        pytest.skip("refused: such an adapter would have chunk codes alone")
    batches, made = (
        [{"input_ids": ids[:, :n_tokens], "labels": ids[:, :n_tokens]} for ids in (IDS, IDS.flip(0), IDS.flip(1))],
        [],
    )
    for wrapped in (False, True):
        with randomise(attach_bem(make_host(), BemConfig(**{**SMALL, "sites": sites, "level": level}))) as bem:
            objective = Objective(bem)
            if level == "learned":  # only where it trains are all levels tried
                bem.host.train()
                torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(objective) if wrapped else objective
            optimiser = torch.optim.SGD(bem.parameters(), lr=0.05)
            for batch in batches:
                optimiser.zero_grad()
                model(**batch)["loss"].backward()
                optimiser.step()
            made.append({name: parameter.detach().clone() for name, parameter in bem.named_parameters()})
    assert made[0].keys() == made[1].keys() and all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_older_adapter_opens(tmp_path):
    """Older ones have `controller.default_code` at every level, and fewer settings."""
    model = make_host()
    with randomise(attach_bem(model, BemConfig(**{**SMALL, "sites": ("o", "down"), "level": "token"}))) as bem:
        assert "controller.default_code" not in bem.state_dict()
        with torch.no_grad():
            expected = model(IDS, use_cache=False).logits
        bem.save_pretrained(tmp_path)
    save_file({**load_file(tmp_path / WEIGHTS), "controller.default_code": torch.ones(3)}, tmp_path / WEIGHTS)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    del settings["config"]["start"], settings["config"]["gate_inputs"]
    settings["files"][WEIGHTS] = {"sha256": sha256(tmp_path / WEIGHTS), "size": (tmp_path / WEIGHTS).stat().st_size}
    settings["sha256"] = settings_hash({key: settings[key] for key in ("config", "host", "files")})
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with attach_bem(model, tmp_path), torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, expected)


def test_parts_of_an_adapter_use_their_own_learning_rates():
    model = make_host()
    batches = [{"input_ids": IDS, "labels": IDS}]
    multipliers = {"controller": 0, "updates": 0.5, "updates.o_1": 2}
    with randomise(attach_bem(model, BemConfig(**SMALL))) as bem:
        before = {name: parameter.detach().clone() for name, parameter in bem.named_parameters()}
        train(bem, batches, TrainSettings(n_steps=1, lr=1e-3, n_warmup=0, multipliers=multipliers))
    for name, parameter in bem.named_parameters():
        wanted = 0 if name.startswith("controller") else 2e-3 if name.startswith("updates.o_1.") else 0.5e-3
        # Adam's first step is its rate in every direction that has a gradient.
        moved = (parameter.detach() - before[name]).abs().max()
        assert float(moved) == pytest.approx(wanted, rel=1e-2), name
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        n = sum(parameter.numel() for parameter in bem.parameters())
        own = sum(parameter.numel() for parameter in bem.updates.parameters())
        for settings, words in [
            ({"multipliers": {"router": 1}}, "no parameter's name begins with 'router'"),
            ({"budget": n - 1}, f"would learn {n:,} numbers, and the budget is {n - 1:,}"),
        ]:
            with pytest.raises(ConfigError, match=words):
                train(bem, batches, TrainSettings(n_steps=1, **settings))
        train(bem, batches, TrainSettings(n_steps=1, budget=own, multipliers={"controller": 0}))  # it learns no number
    for settings in ({"multipliers": {"updates": -1}}, {"multipliers": 2}, {"budget": 0}):
        with pytest.raises(ConfigError):
            TrainSettings(n_steps=1, **settings)

"""An adapter's gradients are the same with gradient checkpointing of the model."""

from functools import partial

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bem_oracle import FORMS, VOCAB, make_host, randomise
from probemon.adapters.bem import BemConfig, FallbackPolicy, attach_bem
from probemon.adapters.bem.losses import adapter_losses
from probemon.adapters.bem.training import Objective, TrainSettings, train
from probemon.bundled import load_bundled
from probemon.errors import BemError

ALL = ("q", "k", "v", "o", "down")
IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(3, VOCAB, (1, 7), generator=torch.Generator().manual_seed(1))
LOW_RANK = {"rank": 3, "width": 6, "chunk_tokens": 3, "prefix_tokens": 6, "token_limit": 8}
CONFIGS = {
    "all sites": BemConfig(sites=ALL, spectral_cap=1.0, **LOW_RANK),
    "read later": BemConfig(sites=ALL, read_layer=1, spectral_cap=1.0, **LOW_RANK),
    "no limit": BemConfig(spectral_cap=None, level="auto", auto_limits=(8, 9), **LOW_RANK),
    "dropout": BemConfig(dropout=0.3, spectral_cap=1.0, **LOW_RANK),
    **{name: FORMS[name] for name in ("rank_mask rotated", "film")},
}


def checkpoint(model, reentrant=False):
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # newest, older
    enable({"use_reentrant": reentrant})


def gradients(model, bem, loss):
    torch.manual_seed(3)
    loss().backward()
    found = {name: parameter.grad.clone() for name, parameter in bem.named_parameters()}
    bem.zero_grad(set_to_none=True)
    return found


def two_forwards(model):
    """Both are under way when the backward pass begins, as the halves of a preference pair are."""
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    first = model(IDS, attention_mask=mask, use_cache=False).logits
    with torch.no_grad():  # as a reference model is run
        model(IDS.flip(1), use_cache=False)
    second = model(OTHER, use_cache=False).logits
    return first[0, 3:].square().mean() + first[1].exp().mean() - second.sin().mean() * first[1].cos().mean()


class HooksWithin(LlamaDecoderLayer):
    """A layer of an older transformers: its checkpoint is around its hooks."""

    def __call__(self, *args, **kwargs):
        call = partial(super().__call__, **kwargs)
        return self._gradient_checkpointing_func(call, *args) if self.gradient_checkpointing else call(*args)


HooksWithin.forward = LlamaDecoderLayer.forward.__wrapped__


@pytest.mark.parametrize("older", [False, True], ids=["hooks outside", "hooks within"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_those_without_checkpointing(name, reentrant, older):
    model = make_host(layers=3).train()
    with randomise(attach_bem(model, CONFIGS[name])) as bem:
        expected = gradients(model, bem, lambda: two_forwards(model))
        if older:
            for layer in model.model.layers:
                layer.__class__ = HooksWithin
        checkpoint(model, reentrant)
        codes = []
        with bem.controller.register_forward_hook(lambda *args: codes.append(args)):
            found = gradients(model, bem, lambda: two_forwards(model))
        again = gradients(model, bem, lambda: two_forwards(model))
    assert len(codes) == 3  # the controller runs once a forward
    assert all(grad.abs().max() > 0 for key, grad in expected.items() if "default" not in key)
    for key, grad in expected.items():
        assert torch.equal(found[key], grad) and torch.equal(again[key], grad), key
    assert all("_Bound" not in repr(vars(layer).get("_gradient_checkpointing_func")) for layer in model.model.layers)


@pytest.mark.parametrize("reentrant", [False, True])
def test_losses_and_gradients_of_earlier_layers_equal_those_without(reentrant):
    """A parameter before the layer that is read has its gradient through the codes too."""
    found = []
    for checkpointed in (False, True):
        model = make_host(layers=3).train()
        if checkpointed:
            checkpoint(model, reentrant)
        with randomise(attach_bem(model, CONFIGS["read later"])) as bem:
            losses = adapter_losses(bem, {"input_ids": IDS})
            embeddings = model.get_input_embeddings()
            embeddings.weight.requires_grad_(True)
            model(IDS, use_cache=False).logits.square().mean().backward()
            losses.total.backward()
            grads = {name: parameter.grad for name, parameter in bem.named_parameters()}
            found.append({**losses.terms, **grads, "embeddings": embeddings.weight.grad})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_uses_the_adapter_state_of_the_original_forward(reentrant):
    """The adapter is silenced, or off, when the layers of a steered forward run again; and the reverse."""
    model = make_host().train()
    checkpoint(model, reentrant)
    model.enable_input_require_grads()
    model.lm_head.weight.requires_grad_(True)
    bem = randomise(attach_bem(model, CONFIGS["all sites"]))
    expected = gradients(model, bem, lambda: model(IDS, use_cache=False).logits.square().mean())
    model.zero_grad()

    def with_another_forward():
        loss = model(IDS, use_cache=False).logits.square().mean()
        bem.enabled = False
        bare = model(IDS, use_cache=False).logits
        bem.enabled = True
        bare.square().mean().backward()
        assert all(parameter.grad is None for parameter in bem.parameters())
        bem.enabled = False
        return loss

    found = gradients(model, bem, with_another_forward)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    bem.enabled = True
    loss = model(IDS, use_cache=False).logits.square().mean()
    bem.detach()
    with pytest.raises(BemError, match="the adapter that was on them is off"):
        loss.backward()


def steps_of(way, bem, folder):
    """The adapter's numbers, or gradients, after a training by one of the ways to train."""
    batch = {"input_ids": IDS, "labels": IDS}
    if way == "train":
        train(bem, [batch], TrainSettings(n_steps=3, lr=1e-2))
    elif way == "Trainer":
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
            save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
        Trainer(model=Objective(bem), args=arguments, train_dataset=rows).train()
    else:
        Objective(bem).train()(**batch)["loss"].backward()
    return {name: (x.detach() if x.grad is None else x.grad).clone() for name, x in bem.named_parameters()}


@pytest.mark.parametrize("way", ["train", "Objective", "Trainer"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["all sites", "read later"])
def test_unfrozen_model_is_trained_as_without_checkpointing_and_stays_as_it_was(name, reentrant, way, tmp_path):
    """As `from_pretrained` and PEFT's `enable_input_require_grads` leave it; one of its parameters is frozen."""
    found = []
    for checkpointed in (False, True):
        model = make_host(layers=3).requires_grad_(True)
        model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)
        model.enable_input_require_grads()
        asked = [parameter.requires_grad for parameter in model.parameters()]
        if checkpointed:
            checkpoint(model, reentrant)
        with randomise(attach_bem(model, CONFIGS[name])) as bem:
            found.append(steps_of(way, bem, tmp_path))
            assert [parameter.requires_grad for parameter in model.parameters()] == asked
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.isfinite(x).all() for x in found[0].values())
    for key, expected in found[0].items():
        close = torch.equal if way == "Objective" else lambda a, b: (a - b).norm() <= 1e-4 * b.norm()
        assert close(found[1][key], expected), key


def test_bundled_model_as_it_is_loaded_is_trained_with_checkpointing():
    found = []
    for checkpointed in (False, True):
        model, _ = load_bundled(torch.float32)
        assert next(model.parameters()).requires_grad
        if checkpointed:
            checkpoint(model, False)
        with attach_bem(model, BemConfig(rank=2, layers=(29,))) as bem:
            found.append(train(bem, [{"input_ids": IDS, "labels": IDS}], TrainSettings(n_steps=2, lr=1e-2)).losses)
    assert found[0] == found[1] and found[0][1] < found[0][0]


def test_unsupported_checkpointing_is_refused():
    model = make_host().train()
    checkpoint(model)
    with (
        attach_bem(model, CONFIGS["all sites"], fallback=FallbackPolicy()),
        pytest.raises(BemError, match="without fallback= to train"),
    ):
        model(IDS)
    with attach_bem(model, CONFIGS["all sites"]):
        for layer in model.model.layers:
            del layer._gradient_checkpointing_func
        with pytest.raises(BemError, match="no checkpoint function through which codes could be passed"):
            model(IDS)
        model.eval()
        model(IDS)

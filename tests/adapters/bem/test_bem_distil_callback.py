"""Distilling an adapter during training leaves the training unchanged."""

import json
import os

import pytest
import torch
from transformers import Trainer, TrainingArguments

from bem_oracle import VOCAB, make_host
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.distil import distil
from probemon.adapters.bem.distil_callback import DistilCallback
from probemon.adapters.bem.training import Objective, TrainSettings
from probemon.errors import ConfigError

CONFIG = BemConfig(rank=3, width=6, chunk_tokens=4, prefix_tokens=8)
ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, VOCAB, (6, 12))]
LESSONS = [{"input_ids": torch.stack([row["input_ids"] for row in ROWS])}]


def trained(folder, make_callbacks=lambda bem: []):
    host = make_host()
    with attach_bem(host, CONFIG) as bem:
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=7, per_device_train_batch_size=3, learning_rate=3e-2, report_to=[],
            save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(model=Objective(bem), args=arguments, train_dataset=ROWS, callbacks=make_callbacks(bem)).train()
        host.eval()
        return {name: x.detach().clone() for name, x in bem.named_parameters()}, distil(bem, LESSONS)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by an older name
@pytest.mark.parametrize("how", [{}, {"settings": TrainSettings(n_steps=2), "rank": 2}], ids=["nearest", "trained"])
def test_callback_writes_loras_every_n_steps_without_affecting_training(tmp_path, how):
    from peft import PeftModel

    (tmp_path / "loras" / "step-one").mkdir(parents=True)  # somebody else's
    expected, last = trained(tmp_path / "plain")
    callbacks = []

    def make(bem):
        callbacks.append(DistilCallback(bem, LESSONS, tmp_path / "loras", every=2, keep=2, **how))
        return callbacks

    found, _ = trained(tmp_path / "distilled", make)
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert [path.name for path in callbacks[0].written] == ["step-6", "step-7"]
    assert {path.name for path in (tmp_path / "loras").iterdir()} == {"step-6", "step-7", "step-one"}
    told = json.loads((callbacks[0].written[-1] / "distilled.json").read_text())
    assert told["step"] == 7 and told["rank"] == (2 if how else 3)
    with torch.no_grad():
        opened = PeftModel.from_pretrained(make_host(), callbacks[0].written[-1])(LESSONS[0]["input_ids"]).logits
        merged = make_host()
        for name in last.factors:
            merged.get_submodule(name).weight += last.dense(name)
        distance = (opened - merged(LESSONS[0]["input_ids"]).logits).abs().max()
    assert (distance < 1e-4) == (not how)  # a trained one is another


def test_restarted_training_keeps_its_own_loras(tmp_path):
    """In the folder of a longer one, whose steps are higher."""
    folder, callbacks = tmp_path / "loras", []

    def make(bem, every):
        callbacks.append(DistilCallback(bem, LESSONS, folder, every=every, keep=2))
        return callbacks[-1:]

    trained(tmp_path / "first", lambda bem: make(bem, 2))
    assert [path.name for path in callbacks[0].written] == ["step-6", "step-7"]
    trained(tmp_path / "second", lambda bem: make(bem, 4))
    assert [path.name for path in callbacks[1].written] == ["step-4", "step-7"]
    (folder / "step-9").mkdir()
    os.utime(folder / "step-9", (1, 1))  # of long ago, whatever its step
    assert [path.name for path in callbacks[1].written] == ["step-9", "step-4", "step-7"]


def test_failed_write_leaves_no_partial_folder(tmp_path, monkeypatch):
    def fails(path, text):
        raise OSError("no space left")

    monkeypatch.setattr("probemon.adapters.bem.distil_callback.write_text_atomically", fails)
    with pytest.raises(OSError, match="no space"):
        trained(tmp_path, lambda bem: [DistilCallback(bem, LESSONS, tmp_path / "loras", every=2)])
    assert list((tmp_path / "loras").iterdir()) == []


def test_invalid_settings_are_refused(tmp_path):
    with attach_bem(make_host(), CONFIG) as bem:
        for wrong in ({"every": 0}, {"every": 1, "keep": 0}):
            with pytest.raises(ConfigError, match="give 1 or more"):
                DistilCallback(bem, LESSONS, tmp_path, **wrong)
        # Before a training begins, and not hours later.
        with pytest.raises(ConfigError, match=r"'rang' is not a setting of distil: it takes method, rank"):
            DistilCallback(bem, LESSONS, tmp_path, every=1, rang=3)
        with pytest.raises(ConfigError, match=r"'labels' is not a setting of distil: .* need settings=TrainSettings"):
            DistilCallback(bem, LESSONS, tmp_path, every=1, labels=0.5)
        with pytest.raises(ConfigError, match="no batches"):
            DistilCallback(bem, [], tmp_path, every=1)
    with attach_bem(make_host(), BemConfig(form="film", rank=2)) as bem, pytest.raises(ConfigError, match="no LoRA"):
        DistilCallback(bem, LESSONS, tmp_path, every=1)

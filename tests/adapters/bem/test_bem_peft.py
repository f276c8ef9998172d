"""An adapter used through PEFT equals an attached one: logits, generation, files and limits."""

import copy
import json
import shutil

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, Trainer, TrainerCallback, TrainingArguments

from bem_oracle import FORMS, SHAPES, VOCAB, make_host, randomise
from conftest import PAD, make_model, make_pack, n_hooks
from probemon import DynamicProbeManager
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.int8 import make_int8
from probemon.adapters.bem.peft_tuner import BemPeftConfig
from probemon.adapters.routing import RoutingMonitor
from probemon.errors import (
    BemError,
    BemFileError,
    BemStateError,
    ConfigError,
    ModelMismatch,
    UnsupportedModel,
)
from probemon.host.fingerprint import adapters_fingerprint
from probemon.host.model import model_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),  # PEFT asks for that of a host that has no name
]
SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8, "token_limit": 12}
ALL = ("q", "k", "v", "o", "down")
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
IDS = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
CONFIGS = {"low_rank": BemConfig(sites=ALL, level="auto", auto_limits=(3, 9), **SMALL), **FORMS}


def peft_config(config, **others):
    return BemPeftConfig(**{**vars(config), "task_type": "CAUSAL_LM", **others})


def tuned(name="low_rank", seed=0, **others):
    model = get_peft_model(make_host(), peft_config(CONFIGS[name], **others))
    randomise(model.bem, seed=seed)
    return model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


# -- the same adapter --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_model_equals_attach_bem_in_output_and_saved_files(name, tmp_path):
    host = make_host()
    bare, tokens = logits(host), host.generate(IDS, **GREEDY)
    with randomise(attach_bem(host, CONFIGS[name])) as bem:
        expected, n = logits(host), sum(parameter.numel() for parameter in bem.parameters())
        greedy, beams = host.generate(IDS, **GREEDY), host.generate(IDS, num_beams=3, **GREEDY)
    model = get_peft_model(host, peft_config(CONFIGS[name]))
    assert torch.equal(logits(model), bare) and torch.equal(model.generate(input_ids=IDS, **GREEDY), tokens)
    randomise(model.bem)
    assert torch.equal(logits(model), expected) and not torch.equal(expected, bare)
    assert torch.equal(model.generate(input_ids=IDS, **GREEDY), greedy)
    assert torch.equal(model.generate(input_ids=IDS, num_beams=3, **GREEDY), beams)
    assert model.get_nb_trainable_parameters() == (n, n + sum(p.numel() for p in make_host().parameters()))
    with model.disable_adapter():
        assert torch.equal(logits(model), bare) and torch.equal(model.generate(input_ids=IDS, **GREEDY), tokens)
    assert torch.equal(logits(model), expected)

    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    trainable = PeftModel.from_pretrained(make_host(), tmp_path, adapter_name="mine", is_trainable=True)
    assert torch.equal(logits(trainable), expected) and trainable.get_nb_trainable_parameters()[0] == n
    again = PeftModel.from_pretrained(make_host(), tmp_path)
    assert again.bem.config == CONFIGS[name] and again.get_nb_trainable_parameters()[0] == 0
    # Torch multiplies by weights that learn in another order than by those that do not, on a CPU too.
    assert (logits(again) - expected).abs().max() < 1e-5
    model.set_requires_grad("default", False)
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(again.generate(input_ids=IDS, **GREEDY), greedy)


def test_unload_restores_the_model():
    host = make_host()
    host.lm_head.weight.requires_grad_(True)
    before, modules = (n_hooks(host), set(vars(host)), set(host.state_dict())), len(list(host.modules()))
    model = get_peft_model(host, peft_config(CONFIGS["low_rank"]))
    randomise(model.bem)
    bare = logits(make_host())
    assert not torch.equal(logits(model), bare) and not host.lm_head.weight.requires_grad
    assert model.unload() is host
    assert [name for name, parameter in host.named_parameters() if parameter.requires_grad] == ["lm_head.weight"]
    host.requires_grad_(False)
    assert torch.equal(logits(host), bare)
    assert (n_hooks(host), set(vars(host)), set(host.state_dict())) == before and len(list(host.modules())) == modules
    with attach_bem(host, CONFIGS["film"]):  # there is room for another
        logits(host)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_architecture_works_through_peft(shape, tmp_path):
    host, config = make_host(shape), CONFIGS["film"] if shape == "mixtral" else CONFIGS["low_rank"]
    with randomise(attach_bem(host, config)):
        expected = logits(host)
    model = get_peft_model(host, peft_config(config))
    randomise(model.bem)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(make_host(shape), tmp_path, is_trainable=True)), expected)


def test_cached_state_survives_forwards_with_the_adapter_disabled():
    model = tuned("film")
    with torch.no_grad():
        cache = DynamicCache()
        model(input_ids=IDS[:, :6], past_key_values=cache, use_cache=True)
        with model.disable_adapter():  # a reference model beside it, with a cache of its own
            model(input_ids=IDS, use_cache=True)
        found = model(input_ids=IDS[:, 6:], past_key_values=cache, use_cache=True).logits
        assert (found - logits(model)[:, 6:]).abs().max() < 1e-5
        with model.disable_adapter():
            model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)
        with pytest.raises(BemStateError, match="the adapter has read none of them"):
            model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)


# -- several by name ---------------------------------------------------------------------------------


def test_named_adapters_steer_one_at_a_time(tmp_path):
    model, other = tuned(), BemConfig(**{**SMALL, "rank": 2}, level="chunk")
    first = logits(model)
    model.add_adapter("other", peft_config(other))
    assert torch.equal(logits(model), first)  # adding changes nothing
    model.set_adapter("other")
    randomise(model.bem, seed=1)
    with randomise(attach_bem(make_host(), other), seed=1) as bem:
        second = logits(bem.host)
    assert torch.equal(logits(model), second) and not torch.equal(first, second)
    status = model.get_model_status()
    assert (status.enabled, status.active_adapters, status.available_adapters) == (
        True,
        ["other"],
        ["default", "other"],
    )
    assert status.requires_grad == {"default": False, "other": True}

    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make_host(), tmp_path, is_trainable=True)
    again.load_adapter(tmp_path / "other", adapter_name="again")
    assert torch.equal(logits(again), first)
    again.set_adapter("again")
    assert torch.equal(logits(again), second)

    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    with model.disable_adapter():
        model.set_adapter("other")
        assert torch.equal(logits(model), logits(make_host()))
    assert torch.equal(logits(model), second)
    with pytest.warns(UserWarning, match="Setting active adapter to default"):
        model.delete_adapter("other")
    assert torch.equal(logits(model), first) and set(model.peft_config) == {"default"}
    model.delete_adapter("default")
    assert torch.equal(logits(model.base_model.model), logits(make_host()))


def test_disabling_keeps_requires_grad():
    model = tuned()
    model.set_requires_grad("default", False)
    with model.disable_adapter():
        pass
    assert model.get_nb_trainable_parameters()[0] == 0


# -- files -------------------------------------------------------------------------------------------


def test_auto_classes_open_a_saved_adapter(tmp_path):
    make_host().save_pretrained(tmp_path / "host")
    for task, kind in (("CAUSAL_LM", AutoPeftModelForCausalLM), (None, AutoPeftModel)):
        host = type(make_host()).from_pretrained(tmp_path / "host")
        model = get_peft_model(host, peft_config(CONFIGS["low_rank"], task_type=task))
        randomise(model.bem)
        model.save_pretrained(tmp_path / str(task))
        opened = kind.from_pretrained(tmp_path / str(task), is_trainable=True)
        assert torch.equal(logits(opened), logits(model))


@pytest.fixture
def saved(tmp_path):
    model = tuned()
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


KEY = "base_model.bem_adapters.controller.query"


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda folder: change_config(folder, max_norm=2.0), BemFileError, "saved with other settings than"),
        (lambda folder: change_config(folder, max_norm=...), BemFileError, "lacks max_norm"),
        (lambda folder: change_config(folder, max_nrom=2.0), BemFileError, "not known here .max_nrom."),
        (lambda folder: change_config(folder, max_norm=-1), ConfigError, "max_norm is -1"),
        (lambda folder: change_tensors(folder, lambda x: x.pop(KEY)), BemFileError, "'controller.query' is missing"),
        (lambda folder: change_tensors(folder, lambda x: x.update({KEY: x[KEY][:3]})), BemFileError, "another shape"),
        (
            lambda folder: change_tensors(folder, lambda x: x.update({KEY: x[KEY].int()})),
            BemFileError,
            "is torch.int32",
        ),
        (lambda folder: change_tensors(folder, lambda x: x[KEY].fill_(torch.nan)), BemError, "query is not finite"),
        (
            lambda folder: change_tensors(folder, lambda x: x.pop(KEY.replace("controller.query", "settings"))),
            BemFileError,
            "does not state its settings",
        ),
    ],
    ids=range(9),
)
def test_damaged_files_are_refused(saved, damage, error, words):
    damage(saved)
    with pytest.raises(error, match=words):
        PeftModel.from_pretrained(make_host(), saved)


def test_other_weights_warn_and_another_architecture_is_refused(saved):
    with pytest.warns(UserWarning, match="other weights"):
        PeftModel.from_pretrained(make_host(seed=1), saved)
    with pytest.raises(ModelMismatch, match="n_layers"):
        PeftModel.from_pretrained(make_host(layers=3), saved)


def test_adapter_keeps_its_saved_dtype(tmp_path):
    model = tuned()
    model.bem.bfloat16()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make_host(), tmp_path)
    assert {parameter.dtype for parameter in again.bem.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(again), logits(model))


# -- refused -----------------------------------------------------------------------------------------


def test_unsupported_peft_operations_are_refused_with_a_remedy(tmp_path):
    host, model, film = make_host(), tuned(), peft_config(CONFIGS["film"])
    classifier = peft_config(CONFIGS["film"], task_type="SEQ_CLS")
    model.add_adapter("other", film)
    for ask, error, words in [
        (lambda: model.merge_and_unload(), BemError, "probemon.adapters.bem.distil"),
        (lambda: model.merge_adapter(), BemError, "probemon.adapters.bem.distil"),
        (lambda: model.base_model.set_adapter(["default", "other"]), BemError, "cannot steer together"),
        (lambda: model(input_ids=IDS, adapter_names=["default", "other"]), BemError, "all rows of a forward"),
        (lambda: model.generate(input_ids=IDS, adapter_names=["other"]), BemError, "all rows of a forward"),
        (lambda: model.add_adapter("controller", film), ConfigError, "give another name"),
        (lambda: model.add_adapter("a.b", film), ConfigError, "give another name"),
        (
            lambda: get_peft_model(host, film, low_cpu_mem_usage=True),
            ConfigError,
            "leave it out",
        ),
        (
            lambda: get_peft_model(host, classifier),
            UnsupportedModel,
            "head would",
        ),
        (lambda: BemPeftConfig(rank=0), ConfigError, "rank is 0"),
        (lambda: BemPeftConfig(sites=("x",)), ConfigError, "sites"),
        (lambda: copy.deepcopy(model), UnsupportedModel, "save_pretrained"),
        (lambda: model.set_adapter("none"), ValueError, "not found"),
        (lambda: model.base_model.delete_adapter("none"), ConfigError, "there are default, other"),
    ]:
        with pytest.raises(error, match=words):
            ask()
    with pytest.raises(TypeError):
        BemPeftConfig(rnak=3)
    assert set(model.peft_config) == {"default", "other"} and torch.equal(logits(host), logits(make_host()))
    with attach_bem(host, CONFIGS["film"]), pytest.raises(BemError, match="detach it first"):
        get_peft_model(host, peft_config(CONFIGS["film"]))
    make_int8(model.bem)
    with pytest.raises(BemError, match=r"bem\.save_pretrained"):
        model.save_pretrained(tmp_path)


# -- watched -----------------------------------------------------------------------------------------


def test_peft_model_is_watched_like_an_attached_adapter(tmp_path):
    """Probes' scores, routing decisions, and the names of what is on the host."""
    config, found = BemConfig(**SMALL), []
    for how in ("attached", "tuned"):
        host = make_model()
        manager = DynamicProbeManager(make_pack(tmp_path / how, host, sites=("resid_post.2",)), keep_top_k=6)
        before = adapters_fingerprint(host, host)
        if how == "attached":
            model, bem = host, attach_bem(host, config)
        else:
            model = get_peft_model(host, BemPeftConfig(**SMALL, task_type="CAUSAL_LM"))
            bem = model.bem
        randomise(bem)
        state = model_state(host)
        with pytest.warns(UserWarning, match="adapters .*bem.* are active"), manager.attach(model) as run:
            with RoutingMonitor(model, bem=bem) as monitor:
                out = model.generate(input_ids=IDS, **GREEDY)
            result = run.result(out)
        found.append((out, result.to_arrow(), monitor.report()["n_tokens"], adapters_fingerprint(model, host), state))
        if how == "tuned":
            with model.disable_adapter():
                assert model_state(host).adapters == () and adapters_fingerprint(model, host) == before
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].equals(found[1][1])
    assert found[0][2:] == found[1][2:] and found[0][2] == 2 * (13 + 7)


@pytest.mark.filterwarnings(
    "ignore:.*for a second time:UserWarning", "ignore:Already found a `peft_config`:UserWarning"
)
def test_bem_through_peft_combines_with_a_lora():
    model = get_peft_model(make_host(), LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    base = logits(model)
    with randomise(attach_bem(model, CONFIGS["low_rank"])):
        expected = logits(model)
    both = get_peft_model(model, peft_config(CONFIGS["low_rank"]))
    randomise(both.bem)
    assert torch.equal(logits(both), expected) and not torch.equal(expected, base)


# -- Trainer -----------------------------------------------------------------------------------------


class Losses(TrainerCallback):
    def __init__(self):
        self.seen = {}

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            self.seen[state.global_step] = logs["loss"]


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")  # by the name that older ones know too
@pytest.mark.parametrize("checkpointed", [False, True])
def test_trainer_resumes_exactly_from_its_checkpoint(checkpointed, tmp_path):
    rows = torch.randint(3, VOCAB, (8, 9), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]

    def trained(folder, resume=None):
        torch.manual_seed(0)
        model = tuned(dropout=0.1, spectral_cap=1.0)
        losses = Losses()
        settings = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if checkpointed else {}
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=6,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            gradient_checkpointing=checkpointed,
            **settings,
        )
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[losses]).train(
            resume_from_checkpoint=resume
        )
        return losses.seen, logits(model.eval())

    losses, expected = trained(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "half")
    again, found = trained(tmp_path / "resumed", str(tmp_path / "half"))
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and again == {step: losses[step] for step in (4, 5, 6)}
    assert torch.equal(found, expected) and losses[6] < losses[1]
    reopened = PeftModel.from_pretrained(make_host(), tmp_path / "whole" / "checkpoint-6", is_trainable=True)
    assert torch.equal(logits(reopened), expected)

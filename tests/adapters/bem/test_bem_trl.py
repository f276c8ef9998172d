"""TRL's own trainers train a BEM adapter: a step changes only the adapter, and its checkpoint opens."""

import pytest
import torch

pytest.importorskip("trl")
from datasets import Dataset
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from bem_oracle import VOCAB, make_host, randomise
from conftest import EOS, PAD
from probemon.adapters.bem.peft_tuner import BemPeftConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # TRL has names that transformers has others for now, and says so at length
]
SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8, "token_limit": 12, "task_type": "CAUSAL_LM"}
IDS = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
COMMON = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": [], "logging_steps": 1}
COMMON |= {"disable_tqdm": True, "use_cpu": True, "bf16": False, "save_steps": 1}


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": PAD, "<eos>": EOS}
    rest = iter([i for i in range(VOCAB) if i not in words.values()])
    words |= {f"w{n}": i for n, i in enumerate(rest)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="w0")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


def text(seed, n=6):
    numbers = torch.randint(0, VOCAB - 3, (n,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in numbers.tolist())


def trainer_of(kind, tokenizer, folder, **others):
    model = get_peft_model(make_host(), BemPeftConfig(**SMALL))
    randomise(model.bem)
    arguments = {**COMMON, "output_dir": str(folder), **others}
    if kind == "SFT":
        rows = Dataset.from_list([{"text": text(i, n)} for i, n in enumerate((5, 9))])
        return SFTTrainer(model, SFTConfig(**arguments), train_dataset=rows, processing_class=tokenizer)
    if kind == "DPO":
        rows = [{"prompt": text(i), "chosen": text(i + 10, 4), "rejected": text(i + 20, 3)} for i in range(2)]
        rows = Dataset.from_list(rows)
        return DPOTrainer(model, args=DPOConfig(**arguments), train_dataset=rows, processing_class=tokenizer)
    rows = Dataset.from_list([{"prompt": text(i)} for i in range(2)])

    def reward(completions, **others):
        return [float(completion.count("w1")) - len(completion) / 50 for completion in completions]

    settings = GRPOConfig(**arguments, num_generations=2, max_completion_length=5, beta=0.1)
    return GRPOTrainer(model, reward, args=settings, train_dataset=rows, processing_class=tokenizer)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_trl_step_changes_only_the_adapter_and_its_checkpoint_opens(kind, tokenizer, tmp_path):
    """All with the host's gradient checkpointing, which TRL turns on; DPO and GRPO beside the adapter as it was."""
    trainer = trainer_of(kind, tokenizer, tmp_path)
    assert trainer.args.gradient_checkpointing
    model = trainer.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {"base_model.bem_adapters.named.default.controller.project.weight"} < moved
    assert all(".named.default." in name for name in moved)
    assert ("ref" in model.peft_config) == (kind != "SFT")
    model.eval()
    opened = PeftModel.from_pretrained(make_host(), tmp_path / "checkpoint-1", is_trainable=True).eval()
    assert torch.equal(logits(opened), logits(model))
    assert not torch.equal(logits(model), logits(get_peft_model(make_host(), BemPeftConfig(**SMALL))))


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_learns_the_same_with_and_without_gradient_checkpointing(kind, tokenizer, tmp_path):
    found = []
    for checkpointed in (False, True):
        trainer = trainer_of(kind, tokenizer, tmp_path / str(checkpointed), gradient_checkpointing=checkpointed)
        trainer.train()
        found.append({name: parameter.detach() for name, parameter in trainer.model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_grpo_training_increases_rewarded_answers(tokenizer, tmp_path):
    """Answers of generate() earn the share of their tokens that have an even number."""

    def reward(completion_ids, **others):
        return [sum(id % 2 == 0 for id in ids) / max(1, len(ids)) for ids in completion_ids]

    rows = Dataset.from_list([{"prompt": text(i)} for i in range(8)])
    model = get_peft_model(make_host(), BemPeftConfig(**SMALL, spectral_cap=None, trust_region=None))
    randomise(model.bem)
    arguments = {**COMMON, "max_steps": 16, "learning_rate": 2e-1, "per_device_train_batch_size": 32}
    arguments |= {"save_strategy": "no", "lr_scheduler_type": "constant", "max_grad_norm": 10.0}
    settings = GRPOConfig(str(tmp_path), **arguments, num_generations=8, max_completion_length=6)
    trainer = GRPOTrainer(model, reward, args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert sum(rewards[:2]) / 2 < 0.65 and sum(rewards[-4:]) / 4 > 0.8, rewards

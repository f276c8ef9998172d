"""Toys of routed adapters whose answers are known, on tiny random hosts; all data are random.

- two domains: a row's first tokens say its domain, and the right next token differs by domain.
- imitation: each domain has an expert's code, which the controller learns to give.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.imitation import compared, imitate
from probemon.adapters.bem.losses import Batch, LossWeights, mode
from probemon.adapters.bem.training import TrainSettings, fit, train

N_CONTENT, N_PREFIX, N_STEPS_OF_TEXT, NOISE = 16, 8, 24, 0.1
FIRST_PREFIX, FIRST_CONTENT, VOCAB = 3, 20, 40
LM_ONLY = LossWeights(kl=0, entropy=0, update=0, decorrelation=0, flips=0)
# Of a tiny random host the weights' largest singular value is about 2, and what is asked of the adapter is all it says:
# the cap of 1 is for real hosts.
BEM = {"rank": 8, "width": 8, "chunk_tokens": 8, "prefix_tokens": 8, "spectral_cap": None}
SAME_SITES = ("o_proj", "down_proj")


def make_host(seed: int) -> Any:
    """A tiny random llama, frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def two_domains(seed: int, part: int, n_batches: int, n_rows: int = 16) -> list[dict[str, Tensor]]:
    """Random rows `[n_rows, 33]`, half of each domain: 8 tokens that only the domain uses, then a walk by the domain's
    own permutation of 16 tokens.

    One step in ten goes to a random token instead. Labels are the walk's. `part`: rows of different parts are drawn
    independently.
    """
    of_seed = torch.Generator().manual_seed(1000 + seed)
    following = torch.stack([torch.randperm(N_CONTENT, generator=of_seed) for _ in range(2)])
    generator = torch.Generator().manual_seed(7919 * (seed + 1) + part)
    batches = []
    for _ in range(n_batches):
        domain = torch.arange(n_rows) % 2
        prefix = FIRST_PREFIX + 8 * domain[:, None] + torch.randint(8, (n_rows, N_PREFIX), generator=generator)
        walk = [torch.randint(N_CONTENT, (n_rows,), generator=generator)]
        for _ in range(N_STEPS_OF_TEXT):
            astray = torch.rand(n_rows, generator=generator) < NOISE
            walk.append(
                torch.where(
                    astray, torch.randint(N_CONTENT, (n_rows,), generator=generator), following[domain, walk[-1]]
                )
            )
        ids = torch.cat([prefix, FIRST_CONTENT + torch.stack(walk, dim=1)], dim=1)
        labels = ids.clone()
        labels[:, : N_PREFIX + 1] = -100  # the first of the walk follows from nothing
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def routed(seed: int, lr: float, n_steps: int, batches: Sequence[Batch], **changes: Any) -> tuple[Any, Bem, int]:
    """A host with a trained adapter on it, and how many parameters that has, the controller among them."""
    model = make_host(seed)
    bem = attach_bem(model, BemConfig(**{**BEM, "level": "token", "seed": seed, **changes}))
    train(bem, batches, TrainSettings(n_steps=n_steps, lr=lr, seed=seed), LM_ONLY)
    return model, bem, n_parameters(bem.parameters())


def static(
    seed: int, lr: float, n_steps: int, batches: Sequence[Batch], modules: Sequence[str], at_least: int
) -> tuple[Any, int, int]:
    """A host with a trained LoRA of PEFT's, of the smallest rank that has `at_least` so many parameters; these and the
    rank.
    """
    from peft import LoraConfig, get_peft_model

    rank = 1
    while True:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an older name
            torch.manual_seed(seed)
            model = get_peft_model(
                make_host(seed), LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(modules))
            )
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if n_parameters(learned) >= at_least:
            break
        rank += 1

    def loss_of(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return (
            nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
            ),
            {},
        )

    fit(learned, loss_of, batches, TrainSettings(n_steps=n_steps, lr=lr, seed=seed))
    return model, n_parameters(learned), rank


def n_parameters(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def with_experts(batches: Sequence[Batch], experts: Tensor) -> list[dict[str, Tensor]]:
    """For each row the code of its domain's expert; it counts from the second chunk on, when the prefix has
    been read.
    """
    made = []
    for batch in batches:
        ids = batch["input_ids"]
        counted = torch.arange(ids.shape[1]).expand_as(ids) >= BEM["chunk_tokens"]
        made.append(
            {"input_ids": ids, "expert_codes": experts[torch.arange(len(ids)) % len(experts)], "counted": counted}
        )
    return made


@torch.no_grad()
def imitation_error(bem: Bem, batches: Sequence[Batch]) -> float:
    """The squared distance to the experts' codes over that of their mean: 0 is exact."""
    pairs = []
    with mode(bem.host, training=False):
        for batch in batches:
            codes, wanted = compared(bem, batch)
            if bem.levels is None:
                taken = torch.stack(list(codes.values()))
            else:
                chosen = bem.levels.chosen()
                taken = torch.stack([codes[chosen.get(site.name, "chunk")] for site in bem.sites])
            pairs.append((taken.flatten(0, 1), wanted.expand_as(taken).flatten(0, 1)))
    given, experts = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
    return float((given - experts).square().sum() / (experts - experts.mean(dim=0)).square().sum())


def imitated(seed: int, n_steps: int, level: str) -> dict[str, float]:
    """The error on rows never seen, before and after; 0 is exact, 1 is the best single code."""
    bem = attach_bem(make_host(seed), BemConfig(**BEM, level=level, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    experts = nn.functional.normalize(torch.randn(2, bem.config.rank, generator=generator), dim=-1) * 1.5
    learning, held_out = (with_experts(two_domains(seed, part, n), experts) for part, n in ((4, 64), (5, 8)))
    before = imitation_error(bem, held_out)
    imitate(bem, learning, TrainSettings(n_steps=n_steps, lr=3e-2, seed=seed))
    return {"before": before, "after": imitation_error(bem, held_out)}

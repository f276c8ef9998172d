"""Toys of routed adapters whose answers are known, on tiny random hosts; all data are random.

- two domains: a row's first tokens say its domain, and the right next token differs by domain.
- imitation: each domain has an expert's code, which the controller learns to give.
- bandit: each domain has one code among several that is rewarded.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.imitation import imitate, imitation_error
from probemon.adapters.bem.losses import Batch, LossWeights
from probemon.adapters.bem.policy import Categorical, Gaussian, improve, regret
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


def imitated(seed: int, n_steps: int, level: str) -> dict[str, float]:
    """The error on rows never seen, before and after; 0 is exact, 1 is the best single code."""
    bem = attach_bem(make_host(seed), BemConfig(**BEM, level=level, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    experts = nn.functional.normalize(torch.randn(2, bem.config.rank, generator=generator), dim=-1) * 1.5
    learning, held_out = (with_experts(two_domains(seed, part, n), experts) for part, n in ((4, 64), (5, 8)))
    before = imitation_error(bem, held_out)
    imitate(bem, learning, TrainSettings(n_steps=n_steps, lr=3e-2, seed=seed))
    return {"before": before, "after": imitation_error(bem, held_out)}


class Bandit:
    """Arms are experts' codes on a host with random U and V, one of which is the best for each domain, by construction.

    A row is its domain's 8 tokens and 8 of the walk; one decision is made, when the walk begins. The reward, from 0 to
    1, is the mean probability of those tokens that the row's best arm makes the likeliest.
    """

    def __init__(self, seed: int, n_arms: int = 4) -> None:
        self.seed, self.model = seed, make_host(seed)
        self.bem = attach_bem(self.model, BemConfig(**BEM, level="prefix", seed=seed))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.bem.updates.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        # Entries that sum to 0: a fresh controller's codes are nearly all ones, and so prefer none of them.
        drawn = torch.randn(n_arms, self.bem.config.rank, generator=generator)
        self.arms = nn.functional.normalize(drawn - drawn.mean(dim=1, keepdim=True), dim=-1) * 1.5
        self.best_arm = torch.randperm(n_arms, generator=generator)[:2]  # of each domain

    def batches(self, part: int, n: int) -> list[dict[str, Tensor]]:
        """With `wanted [B, 16]`, and `arms [B, K]`: what each arm would earn, the known answer."""
        made = []
        for batch in two_domains(self.seed, part, n):
            ids = batch["input_ids"][:, : 2 * N_PREFIX]
            acts = torch.arange(ids.shape[1]).expand_as(ids) >= N_PREFIX
            said = torch.stack([self.logits(ids, acts, arm) for arm in self.arms])
            rows = torch.arange(len(ids))
            wanted = said[self.best_arm[rows % 2], rows].argmax(dim=-1)
            made.append(
                {
                    "input_ids": ids,
                    "acts": acts,
                    "wanted": wanted,
                    "arms": torch.stack([earned(x, wanted, acts) for x in said], dim=1),
                }
            )
        return made

    @torch.no_grad()
    def logits(self, ids: Tensor, acts: Tensor, arm: Tensor | None) -> Tensor:
        """Under one arm where the policy acts; under the controller's own code without one."""

        def given(controller: Any, args: Any, codes: Any) -> Any:
            return codes if arm is None else codes.replace(prefix=torch.where(acts[..., None], arm, codes.prefix))

        handle = self.bem.controller.register_forward_hook(given)
        try:
            found: Tensor = self.model(ids, use_cache=False).logits
        finally:
            handle.remove()
        return found

    def learn(self, kind: str, n_steps: int, lr: float) -> dict[str, Any]:
        """Regret a row and step, by tenths of the training, beside that of a uniform choice of arm on the same rows."""
        possible: list[Tensor] = []

        def reward(batch: Batch, output: Any) -> Tensor:
            possible.append(batch["arms"])
            return earned(output.logits, batch["wanted"], batch["acts"])

        gaussian = kind == "gaussian"  # of a categorical policy the codes themselves are no action
        held_out = self.batches(7, 16) if gaussian else []
        before = self.own(held_out) if gaussian else None
        policy = Gaussian(0.5) if gaussian else Categorical(self.arms)
        history = improve(
            self.bem, self.batches(6, 64), reward, policy, TrainSettings(n_steps=n_steps, lr=lr, seed=self.seed)
        )
        arms = torch.stack(possible)
        total, uniform = (regret(x, arms.max(dim=-1).values) for x in (history.rewards, arms.mean(dim=-1)))
        slopes = total[n_steps // 10 - 1 :: n_steps // 10].diff(prepend=torch.zeros(1)) / (n_steps // 10)
        found = {
            "seed": self.seed,
            "policy": kind,
            "lr": lr,
            "steps": n_steps,
            "regret": float(total[-1]),
            "uniform_regret": float(uniform[-1]),
            "slope_by_tenths": slopes.tolist(),
            "uniform_slope": float(uniform[-1]) / n_steps,
        }
        if gaussian:
            found |= {
                "own_code_reward_before": before,
                "own_code_reward_after": self.own(held_out),
                "best_arm_reward": float(torch.cat([x["arms"] for x in held_out]).max(dim=1).values.mean()),
            }
        return found

    def own(self, batches: Sequence[Batch]) -> float:
        """Mean reward of the controller's own codes."""
        return float(
            torch.cat(
                [earned(self.logits(x["input_ids"], x["acts"], None), x["wanted"], x["acts"]) for x in batches]
            ).mean()
        )


def earned(logits: Tensor, wanted: Tensor, acts: Tensor) -> Tensor:
    """Mean probability of the wanted tokens where the policy acts `[B]`."""
    right = logits.softmax(dim=-1).gather(-1, wanted[..., None])[..., 0]
    return (right * acts).sum(dim=1) / acts.sum(dim=1)

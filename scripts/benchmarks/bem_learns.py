#!/usr/bin/env python3
"""Do routed adapters learn? Toys whose answers are known, on tiny random hosts; all data are random.

    python scripts/benchmarks/bem_learns.py                      # writes docs/benchmarks/bem_learns.json
    # measures these again, and leaves the rest of that file
    python scripts/benchmarks/bem_learns.py --only afterwards distilled

two domains   a row's first tokens say its domain, and the right next token differs by domain: the adapter against PEFT
LoRAs of at least as many
              parameters, over seeds, at the learning rate that is best for each on a validation part
imitation     each domain has an expert's code; the controller learns to give it, and is measured on rows never seen
bandit        each domain has one code among several that is rewarded; regret by policy gradient against that of a
uniform choice afterwards    cached decoding against full logits, the host after the adapter is gone, and what the LoRA
keeps that is nearest to it distilled     LoRAs distilled from the adapter against PEFT LoRAs trained anew: the same
sites, rank, data and steps, each at its best learning rate
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.distil import distil, distil_trained
from probemon.adapters.bem.imitation import imitate, imitation_error
from probemon.adapters.bem.losses import Batch, LossWeights
from probemon.adapters.bem.policy import Categorical, Gaussian, improve, regret
from probemon.adapters.bem.training import TrainSettings, evaluate, fit, train
from probemon.util.files import write_text_atomically
from provenance import about

ROOT = Path(__file__).resolve().parents[2]
N_CONTENT, N_PREFIX, N_STEPS_OF_TEXT, NOISE = 16, 8, 24, 0.1
FIRST_PREFIX, FIRST_CONTENT, VOCAB = 3, 20, 40
LR = (2e-2, 3e-2, 5e-2, 1e-1)
LM_ONLY = LossWeights(kl=0, entropy=0, update=0, decorrelation=0, flips=0)
# Of a tiny random host the weights' largest singular value is about 2, and what is asked of the adapter is all it says:
# the cap of 1 is for real hosts.
BEM = {"rank": 8, "width": 8, "chunk_tokens": 8, "prefix_tokens": 8, "spectral_cap": None}
SAME_SITES = ("o_proj", "down_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Student's t at 97.5 %, by degrees of freedom (any table of it): scipy is not needed for this alone.
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


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


def known_floor() -> float:
    """Cross-entropy of the truth itself, in nats a label."""
    right, other = 1 - NOISE + NOISE / N_CONTENT, NOISE / N_CONTENT
    return -right * math.log(right) - (N_CONTENT - 1) * other * math.log(other)


# -- two domains -------------------------------------------------------------------------------------


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


def compare(seeds: Sequence[int], n_steps: int) -> dict[str, Any]:
    """Held-out loss of every method on every seed, at the learning rate that its validation part likes best."""
    methods = {
        "routed": "token",
        "routed, prefix codes": "prefix",
        "lora": SAME_SITES,
        "lora, all linear layers": ALL_LINEAR,
    }
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        learning, valid, held_out = two_domains(seed, 1, 64), two_domains(seed, 2, 8), two_domains(seed, 3, 32)
        n_routed = 0
        for method, how in methods.items():
            tried = []
            for lr in LR:
                if isinstance(how, str):
                    model, _, n = routed(seed, lr, n_steps, learning, level=how)
                    n_routed, rank = max(n_routed, n), BEM["rank"]
                else:
                    model, n, rank = static(seed, lr, n_steps, learning, how, n_routed)
                tried.append({"lr": lr, "valid": evaluate(model, valid), "held_out": evaluate(model, held_out)})
            best = min(tried, key=lambda one: one["valid"])
            rows.append({"seed": seed, "method": method, "rank": rank, "parameters": n, **best, "tried": tried})
            print(
                f"two domains, seed {seed}: {method:24s} {n} parameters, lr {best['lr']:g}, held-out"
                f" {best['held_out']:.4f}",
                file=sys.stderr,
            )
    found: dict[str, Any] = {
        "steps": n_steps,
        "rows_a_step": 16,
        "floor": known_floor(),
        "uniform": math.log(N_CONTENT),
        "rows": rows,
    }
    losses = {method: [row["held_out"] for row in rows if row["method"] == method] for method in methods}
    found["mean_held_out"] = {method: statistics.mean(values) for method, values in losses.items()}
    found["over_routed"] = {
        method: interval([b - a for a, b in zip(losses["routed"], values, strict=True)])
        for method, values in losses.items()
        if method != "routed"
    }
    return found


def interval(differences: Sequence[float]) -> dict[str, Any]:
    """Mean and 95 % interval by Student's t; differences are taken seed by seed."""
    mean, n = statistics.mean(differences), len(differences)
    half = T_975[n - 1] * statistics.stdev(differences) / math.sqrt(n)
    return {
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
        "n": n,
        "excludes_0": abs(mean) > half,
        "differences": list(differences),
    }


# -- imitation ---------------------------------------------------------------------------------------


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


# -- bandit ------------------------------------------------------------------------------------------


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


# -- afterwards --------------------------------------------------------------------------------------


def afterwards(seed: int, lr: float, n_steps: int) -> dict[str, Any]:
    """Of a trained adapter: cached decoding, the host it leaves, and its distillation."""
    held_out = two_domains(seed, 3, 32)
    ids = held_out[0]["input_ids"]
    bare = make_host(seed)
    with torch.no_grad():
        base = bare(ids, use_cache=False).logits
    model, bem, _ = routed(seed, lr, n_steps, two_domains(seed, 1, 64))
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        cache = DynamicCache()
        parts = [model(ids[:, :11], past_key_values=cache).logits]
        parts += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(11, ids.shape[1])]
        found: dict[str, Any] = {
            "cached_vs_full_max": float((torch.cat(parts, dim=1) - full).abs().max()),
            "steered_vs_base_max": float((full - base).abs().max()),
        }
        found["distilled"] = {"routed": {"held_out": evaluate(model, held_out)}}
        lessons = two_domains(seed, 1, 64)
        static_ones = {method: distil(bem, lessons, method) for method in ("mean", "least_squares")}
        bem.detach()
        found["base_restored_bit_for_bit"] = torch.equal(model(ids, use_cache=False).logits, base) and all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), bare.state_dict().values(), strict=True)
        )
        found["distilled"]["bare host"] = {"held_out": evaluate(model, held_out)}
        for method, one in static_ones.items():
            merged = make_host(seed)
            for name in one.factors:
                merged.get_submodule(name).weight += one.dense(name)
            found["distilled"][method] = {"held_out": evaluate(merged, held_out), "squared_update_lost": one.error}
    return found


# -- distilled ---------------------------------------------------------------------------------------

OWN, DISTILLED = "LoRA trained anew", "LoRA distilled"
# The largest was the worst for the LoRAs of `compare` on all seeds (rank 11); at rank 8, and for distilled ones, it was
# not tried.
DISTILLED_LR = LR[:3]


def distilled(lrs: Sequence[float], n_steps: int, ranks: Sequence[int] = (8,)) -> dict[str, Any]:
    """Held-out loss of every method on every seed and rank, at the learning rate that its validation part likes best;
    `lrs`: of the adapters, by seed.
    """
    rows: list[dict[str, Any]] = []
    for seed, lr in enumerate(lrs):
        learning, valid, held_out = two_domains(seed, 1, 64), two_domains(seed, 2, 8), two_domains(seed, 3, 32)
        model, bem, _ = routed(seed, lr, n_steps, learning)
        rows.append(
            {
                "seed": seed,
                "method": "routed adapter",
                "rank": bem.config.rank,
                "lr": lr,
                "held_out": evaluate(model, held_out),
            }
        )
        for rank in ranks:
            n_wanted = sum(rank * (site.n_in + site.n_out) for site in bem.sites)
            tried: dict[str, list[dict[str, Any]]] = {}
            for rate in DISTILLED_LR:
                own, _, own_rank = static(seed, rate, n_steps, learning, SAME_SITES, n_wanted)
                assert own_rank == rank
                tried.setdefault(OWN, []).append(
                    {"lr": rate, "valid": evaluate(own, valid), "held_out": evaluate(own, held_out)}
                )
                lora, _ = distil_trained(bem, learning, TrainSettings(n_steps=n_steps, lr=rate, seed=seed), rank=rank)
                merged = make_host(seed)
                for name in lora.factors:
                    merged.get_submodule(name).weight += lora.dense(name)
                tried.setdefault(DISTILLED, []).append(
                    {
                        "lr": rate,
                        "start": lora.start,
                        "valid": evaluate(merged, valid),
                        "held_out": evaluate(merged, held_out),
                    }
                )
            for method, ones in tried.items():
                best = min(ones, key=lambda one: one["valid"])
                rows.append({"seed": seed, "method": method, "rank": rank, **best, "tried": ones})
                print(
                    f"distilled, seed {seed}, rank {rank}: {method:18s} lr {best['lr']:g}, held-out "
                    f"{best['held_out']:.4f}",
                    file=sys.stderr,
                )
    losses: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        losses.setdefault((row["method"], row["rank"]), []).append(row["held_out"])
    summary = [
        {
            "method": method,
            "rank": rank,
            "mean_held_out": statistics.mean(values),
            "over_lora": (
                interval([b - a for a, b in zip(losses[OWN, rank], values, strict=True)])
                if method == DISTILLED
                else None
            ),
        }
        for (method, rank), values in losses.items()
    ]
    return {
        "steps": n_steps,
        "rows_a_step": 16,
        "lr_tried": DISTILLED_LR,
        "floor": known_floor(),
        "summary": summary,
        "rows": rows,
    }


PARTS = ("two_domains", "imitation", "bandit", "afterwards", "distilled")


def main() -> None:
    """Run the toys, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/bem_learns.json")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds, n_steps = range(arguments.seeds), arguments.steps
    found: dict[str, Any] = {
        "what": "routed adapters on tiny random hosts (llama, 2 layers of 32, fp32), random data",
        "config": BEM,
        "lr_tried": LR,
        **({} if set(arguments.only) == set(PARTS) else json.loads(arguments.out.read_text())),
    }

    def best_lrs() -> list[float]:
        return [row["lr"] for row in found["two_domains"]["rows"] if row["method"] == "routed"]

    parts = {
        "two_domains": lambda: compare(seeds, n_steps),
        "imitation": lambda: {
            level: [imitated(seed, n_steps, level) for seed in seeds] for level in ("token", "prefix")
        },
        "bandit": lambda: [
            Bandit(seed).learn(kind, n_steps, lr)
            for kind, lr in (("categorical", 3e-3), ("gaussian", 1e-2))
            for seed in seeds
        ],
        "afterwards": lambda: afterwards(0, best_lrs()[0], n_steps),
        "distilled": lambda: distilled(best_lrs(), n_steps),
    }
    if "measured" not in found:  # a file whose parts were measured together
        found["measured"] = {
            name: {"machine": found["machine"], "commit": found["commit"]} for name in PARTS if name in found
        }
    for name in PARTS:
        if name in arguments.only:
            begin = time.process_time()
            found[name] = parts[name]()
            found["measured"][name] = {
                "cpu_seconds": round(time.process_time() - begin, 1),
                **about(),
            }
            outcome = found[name] if isinstance(found[name], dict) else {}
            outcome = outcome.get("summary") or outcome.get("over_routed") or outcome
            print(f"{name}: {json.dumps(outcome, indent=1)[:3000]}", file=sys.stderr)
    found |= about()
    found.pop("cpu_seconds", None)
    write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

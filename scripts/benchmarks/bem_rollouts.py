#!/usr/bin/env python3
"""Is routing learned from rewards of what the host writes? On tiny random hosts; all data are random.

    python scripts/benchmarks/bem_rollouts.py                      # writes docs/benchmarks/bem_rollouts.json

bandit     each domain has one code among four that is best: under it the host writes an answer that earns 1. One
           decision an answer, and the answers of all four codes are known, so regret is, too: by group-relative
           advantages, and by a running baseline (REINFORCE), beside a uniform choice on the same prompts
writing    each domain has tokens that one code makes it write; a Gaussian around the controller's codes is rewarded for
           their share. Reward on prompts never seen, before, after, and under that code itself
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from bem_learns import N_PREFIX, Bandit, interval, two_domains
from probemon.adapters.bem.grpo import BASELINES, GroupSettings, improve_by_rollouts
from probemon.adapters.bem.losses import Batch
from probemon.adapters.bem.policy import Categorical, Gaussian, regret
from probemon.adapters.bem.rollouts import Rollout, RolloutSettings, roll_out
from probemon.adapters.bem.training import TrainSettings
from probemon.util.files import write_text_atomically
from provenance import about

ROOT = Path(__file__).resolve().parents[2]
N_ROLLOUTS, N_NEW, N_WANTED = 8, 7, 8  # of 7 new tokens none begins a chunk, so an answer has one decision


class Always:
    """A policy of one action for each answer `[M, r]`, at every decision: what an arm would earn."""

    def __init__(self, actions: Tensor) -> None:
        self.actions = actions

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        return self.actions[: len(codes)].to(codes)  # nothing, where nothing is decided

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        return codes.new_zeros(len(codes))


class Answers(Bandit):
    """The bandit of `bem_learns`, over what the host writes after a prompt of 8 tokens of a domain and one of text."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.model.generation_config.eos_token_id = None
        self.rows = torch.arange(16) % 2  # the domain of each prompt

    def prompts(self, part: int, n: int) -> list[dict[str, Tensor]]:
        """Batches of 16 prompts; the policy acts from their last token on."""
        made = []
        for batch in two_domains(self.seed, part, n):
            ids = batch["input_ids"][:, : N_PREFIX + 1]
            made.append({"input_ids": ids, "acts": (torch.arange(ids.shape[1]) == N_PREFIX).expand_as(ids).long()})
        return made

    def under(self, batch: Batch, arms: Tensor) -> Tensor:
        """The likeliest answers `[16, N_NEW]` under the arm of each row."""
        settings = RolloutSettings(n_rollouts=1, max_new_tokens=N_NEW, temperature=0)
        generator = torch.Generator()
        return roll_out(self.bem, batch, Always(self.arms[arms]), settings, generator).sequences[:, N_PREFIX + 1 :]

    def bandit(self, baseline: str, n_steps: int, lr: float) -> dict[str, Any]:
        """Regret an answer, by tenths of the training, beside that of a uniform choice on the same prompts."""
        best, lessons = self.best_arm[self.rows], []
        for batch in self.prompts(6, 32):
            wanted = self.under(batch, best)
            every = [self.under(batch, torch.full_like(best, arm)) for arm in range(len(self.arms))]
            earns = torch.stack([(said == wanted).float().mean(dim=1) for said in every], dim=1)
            lessons.append({**batch, "wanted": wanted, "earns": earns})
        uniform: list[Tensor] = []

        def reward(batch: Batch, rollout: Rollout) -> Tensor:
            uniform.append(batch["earns"].mean(dim=1))
            wanted = batch["wanted"].repeat_interleave(N_ROLLOUTS, dim=0)
            return (rollout.sequences[:, rollout.n_prompt :] == wanted).float().mean(dim=1)

        history = improve_by_rollouts(
            self.bem,
            lessons,
            reward,
            Categorical(self.arms, temperature=0.25),
            TrainSettings(n_steps=n_steps, lr=lr, seed=self.seed),
            RolloutSettings(n_rollouts=N_ROLLOUTS, max_new_tokens=N_NEW, temperature=0),
            GroupSettings(baseline=baseline),
        )
        total, of_chance = regret(history.rewards, 1.0), regret(torch.stack(uniform), 1.0)
        tenth = max(1, n_steps // 10)
        slopes = total[tenth - 1 :: tenth].diff(prepend=torch.zeros(1)) / tenth
        return {
            "seed": self.seed,
            "baseline": baseline,
            "regret": float(total[-1]),
            "uniform_regret": float(of_chance[-1]),
            "regret_an_answer_by_tenths": slopes.tolist(),
            "uniform_regret_an_answer": float(of_chance[-1]) / n_steps,
        }

    def writing(self, n_steps: int, lr: float, n_new: int = 12) -> dict[str, Any]:
        """Mean reward on prompts never seen: before, after, and under the best arm of each domain."""
        settings = RolloutSettings(n_rollouts=N_ROLLOUTS, max_new_tokens=n_new)
        best, written = self.best_arm[self.rows], []
        for batch in self.prompts(6, 8):
            written.append(roll_out(self.bem, batch, Always(self.arms[best]), _greedy(n_new), torch.Generator()))
        said = torch.cat([one.sequences[:, one.n_prompt :] for one in written])
        counts = torch.zeros(2, int(self.model.config.vocab_size))
        counts.index_put_((self.rows.repeat(8)[:, None].expand_as(said), said), torch.ones(()), accumulate=True)
        wanted = torch.zeros_like(counts).scatter(1, counts.topk(N_WANTED, dim=1).indices, 1.0)

        def reward(batch: Batch, rollout: Rollout) -> Tensor:
            domains = self.rows.repeat_interleave(rollout.n_rollouts)
            return wanted[domains[:, None], rollout.sequences[:, rollout.n_prompt :]].mean(dim=1)

        held_out, policy = self.prompts(7, 4), Gaussian(0.3)

        def mean(policy: Any, settings: RolloutSettings) -> float:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                generator = torch.Generator().manual_seed(self.seed)
                rollouts = [roll_out(self.bem, batch, policy, settings, generator) for batch in held_out]
            return float(torch.cat([reward(b, r) for b, r in zip(held_out, rollouts, strict=True)]).mean())

        before = mean(policy, settings)
        improve_by_rollouts(
            self.bem,
            self.prompts(6, 32),
            reward,
            policy,
            TrainSettings(n_steps=n_steps, lr=lr, seed=self.seed),
            settings,
            GroupSettings(n_updates=2, kl=0.001),
        )
        under_best = RolloutSettings(n_rollouts=1, max_new_tokens=n_new)
        return {
            "seed": self.seed,
            "before": before,
            "after": mean(policy, settings),
            "under_the_arm": mean(Always(self.arms[best]), under_best),
        }


def _greedy(n_new: int) -> RolloutSettings:
    return RolloutSettings(n_rollouts=1, max_new_tokens=n_new, temperature=0)


def bandits(n_seeds: int, n_steps: int) -> dict[str, Any]:
    """Regret beside that of a uniform choice, over seeds."""
    rows = []
    for seed in range(n_seeds):
        for baseline in BASELINES:
            rows.append(Answers(seed).bandit(baseline, n_steps, 5e-3))
            print(json.dumps(rows[-1]), file=sys.stderr)
    found: dict[str, Any] = {"steps": n_steps, "rollouts": N_ROLLOUTS, "rows": rows}
    for baseline in BASELINES:
        of_baseline = [row for row in rows if row["baseline"] == baseline]
        found[baseline] = {
            "regret_share_of_uniform": interval([row["regret"] / row["uniform_regret"] for row in of_baseline]),
            "last_tenth_share_of_uniform": interval(
                [row["regret_an_answer_by_tenths"][-1] / row["uniform_regret_an_answer"] for row in of_baseline]
            ),
        }
    return found


def writings(n_seeds: int, n_steps: int, before: dict[str, Any]) -> dict[str, Any]:
    """Reward on prompts never seen, over seeds; those that `before` has are not measured again."""
    rows = list(before["rows"]) if before.get("steps") == n_steps else []
    for seed in range(len(rows), n_seeds):
        rows.append(Answers(seed).writing(n_steps, 2e-2))
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {
        "steps": n_steps,
        "rollouts": N_ROLLOUTS,
        "rows": rows,
        "gained": interval([row["after"] - row["before"] for row in rows]),
        "mean": {name: statistics.mean(row[name] for row in rows) for name in ("before", "after", "under_the_arm")},
    }


def main() -> None:
    """Measure, show, write; each part as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "bem_rollouts.json")
    parser.add_argument("--only", nargs="+", choices=("bandit", "writing"), default=("bandit", "writing"))
    parser.add_argument("--seeds", type=int, default=8, help="of writing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.is_file() else {}
    for name in options.only:
        found[name] = bandits(4, 60) if name == "bandit" else writings(options.seeds, 120, found.get(name, {}))
        made_by = about()  # a part's file may be older than this process
        found[name] |= made_by
        write_text_atomically(options.json, json.dumps({**found, **made_by}, indent=2) + "\n")


if __name__ == "__main__":
    main()

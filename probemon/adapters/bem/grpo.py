"""Routing learned from rewards of what the host writes, each answer compared with others to the same prompt (GRPO).

    rewards = lambda batch, rollout: (rollout.sequences[:, rollout.n_prompt:] == 7).float().mean(dim=1)
    history = improve_by_rollouts(
        bem, prompts, rewards, Gaussian(0.3), TrainSettings(n_steps=200, lr=3e-3),
        RolloutSettings(n_rollouts=8, max_new_tokens=16), GroupSettings(clip=0.2, kl=0.01),
    )
    history.rewards                                              # [rounds, rows * n_rollouts]

A round writes `n_rollouts` answers to each prompt of a batch (`probemon.adapters.bem.rollouts`), and learns from them
in `n_updates` steps. With A the advantage of an answer, and rho the ratio of a decision's probability now to that at
which it was drawn, a step lowers

    - sum over decisions of min(rho A, clip(rho, 1 - clip, 1 + clip) A)  +  kl * sum of (q - log q - 1)

averaged over answers, with q the ratio of the decision's probability at the start of training to that now: what follows
`kl` is an estimate of KL(now || start) that is never negative (Shao et al. 2024, equations 3 and 4; Schulman et al.
2017). The sum is not divided by the number of decisions, which would favour long answers that are wrong (Liu et al.
2025). As `improve` does, it trains the controller alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.losses import Batch, check_learnable, host_inputs
from probemon.adapters.bem.policy import Baseline, Policy, PolicyHistory, as_rewards, check_policy
from probemon.adapters.bem.rollouts import Rollout, RolloutSettings, log_probs, roll_out, states_read
from probemon.adapters.bem.training import TrainSettings, check_fit, fit
from probemon.errors import ConfigError
from probemon.util.checks import LARGEST, check_count, check_number

RolloutReward = Callable[[Batch, Rollout], Any]
BASELINES = ("group", "running")


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """How much is learned from one round. Raises `ConfigError`.

    `baseline`: what a reward is compared with: "group", the mean over answers to the same prompt; "running", the
    running mean of earlier rounds, as `improve` does (REINFORCE).
    `scaled`: advantages of a group are divided by its standard deviation.
    `clip`: how far a decision's probability may move for a gain; None for no limit.
    `kl`: the weight of the divergence from the controller as it was at the start.
    `n_updates`: steps that learn from one round.
    """

    baseline: str = "group"
    scaled: bool = True
    clip: float | None = 0.2
    kl: float = 0.0
    n_updates: int = 1

    def __post_init__(self) -> None:
        if self.baseline not in BASELINES:
            raise ConfigError(f"baseline is {self.baseline!r}: give one of {', '.join(BASELINES)}")
        if not isinstance(self.scaled, bool):
            raise ConfigError(f"scaled is {self.scaled!r}: give True or False")
        if self.clip is not None:
            check_number("clip", self.clip, low=0, high=1, open_low=True, remedy="give a number over 0, or None")
        check_number("kl", self.kl, low=0, high=LARGEST, remedy="give 0 or more")
        check_count("n_updates", self.n_updates, least=1, remedy="give 1 or more")


def improve_by_rollouts(
    bem: Bem,
    prompts: Sequence[Batch],
    reward: RolloutReward,
    policy: Policy,
    settings: TrainSettings,
    rollouts: RolloutSettings | None = None,
    how: GroupSettings | None = None,
) -> PolicyHistory:
    """Train the controller of an attached adapter so that what the host writes under it is rewarded. `reward(batch,
    rollout)` gives a number for each answer. `n_steps` of the settings counts updates.

    Raises `ConfigError` for batches of several numbers of rows, for groups of one answer, or a reward that is not one
    finite number an answer; `BemError` as `train`.
    """
    rollouts, how = rollouts or RolloutSettings(), how or GroupSettings()
    check_learnable(bem)
    check_fit(prompts, settings)
    check_policy(bem, policy)
    if how.baseline == "group" and rollouts.n_rollouts < 2:
        raise ConfigError("a group of one answer has nothing to be compared with: give n_rollouts of 2 or more")
    if len(sizes := {len(host_inputs(batch)["input_ids"]) for batch in prompts}) > 1:
        raise ConfigError(
            f"batches have {', '.join(str(n) for n in sorted(sizes))} rows: give all of them one number, for rewards"
            " are kept a row"
        )
    generator, running = torch.Generator().manual_seed(settings.seed), Baseline(0.9)
    start = copy.deepcopy(bem.controller) if how.kl else None
    rewards_of_rounds: list[Tensor] = []
    current: _Round | None = None

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        nonlocal current
        if current is None or current.n_updates == how.n_updates:
            rollout = roll_out(bem, batch, policy, rollouts, generator)
            rewards = as_rewards(reward(batch, rollout), len(rollout.sequences)).to(rollout.log_prob.device)
            rewards_of_rounds.append(rewards.cpu())
            group = how.baseline == "group"
            advantages = group_advantages(rewards, rollouts, how) if group else running.advantage(rewards)
            read, of_start = states_read(bem, rollout), None
            if start is not None:
                with torch.no_grad():
                    of_start = log_probs(bem, rollout, policy, read=read, controller=start)
            current = _Round(rollout, advantages, read, of_start)
        current.n_updates += 1
        now = log_probs(bem, current.rollout, policy, read=current.read)
        loss, terms = group_loss(now, current.rollout, current.advantages, how, current.of_start)
        return loss, {"reward": rewards_of_rounds[-1].mean(), **terms}

    history = fit(list(bem.controller.parameters()), loss_of, prompts, settings)
    return PolicyHistory(history, torch.stack(rewards_of_rounds))


@dataclass
class _Round:
    """Answers, and what is learned from them; `of_start`: log-probabilities under the controller of the start."""

    rollout: Rollout
    advantages: Tensor
    read: Tensor
    of_start: Tensor | None
    n_updates: int = 0


def group_advantages(rewards: Tensor, rollouts: RolloutSettings, how: GroupSettings) -> Tensor:
    """Return advantages `[M]` of rewards `[M]`, `n_rollouts` of a prompt side by side; 0 where all of a group earned
    the same.
    """
    groups = rewards.view(-1, rollouts.n_rollouts)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if how.scaled:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.flatten()


def group_loss(
    now: Tensor, rollout: Rollout, advantages: Tensor, how: GroupSettings, of_start: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and its terms without gradients, of log-probabilities `now [M, L - 1]`, of a rollout with
    advantages `[M]`.
    """
    ratio = (now - rollout.log_prob).exp()
    gain = ratio * advantages[:, None].to(ratio)
    clipped = ratio.new_zeros(())
    if how.clip is not None:
        limited = ratio.clamp(1 - how.clip, 1 + how.clip) * advantages[:, None].to(ratio)
        clipped = (limited < gain)[rollout.decides].float().mean() if bool(rollout.decides.any()) else clipped
        gain = torch.minimum(gain, limited)
    loss = -torch.where(rollout.decides, gain, 0.0).sum(dim=1).mean()
    terms = {"clipped": clipped.detach()}
    if of_start is not None:
        log_q = of_start - now
        divergence = torch.where(rollout.decides, log_q.exp() - log_q - 1, 0.0).sum(dim=1).mean()
        loss, terms["kl"] = loss + how.kl * divergence, divergence.detach()
    return loss, terms

"""Policy gradient over routing: tries codes at random, and makes rewarded ones likelier.

    policy = Gaussian(std=0.3)                            # or Categorical(experts [K, r], temperature=0.5)
    history = improve(bem, batches, reward, policy, TrainSettings(n_steps=300, lr=3e-3))
    regret(history.rewards, best)

`reward(batch, output) -> [B]` rates rows, without a gradient. REINFORCE (Williams 1992) gives
`(R - b) grad log pi(a | c)`, with b the mean of earlier rewards.

The policy acts at each token of token codes, else at a chunk's first token, until the next. It steers tokens that are
not 0 in a batch's optional `acts [B, T]`. U and V do not learn. Sites that always take chunk codes follow it only if
no others are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.controller import TOKEN, Codes
from probemon.adapters.bem.forwards import frozen
from probemon.adapters.bem.losses import (
    Batch,
    check_learnable,
    forward_inputs,
    hooked_codes,
    masked_tokens,
    model_inputs,
)
from probemon.adapters.bem.training import TrainingHistory, TrainSettings, check_fit, fit
from probemon.errors import BemError, ConfigError
from probemon.util.checks import LARGEST, check_number

Reward = Callable[[Batch, Any], Tensor]


class Policy(Protocol):
    """Actions around codes."""

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions `[M, r]` for codes `[M, r]`, without a gradient."""

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        """Return log densities `[M]` of actions, with a gradient to codes `[M, r]`."""


@dataclass(frozen=True)
class Gaussian:
    """Codes plus noise of standard deviation `std`. Raises `ConfigError`."""

    std: float = 0.3

    def __post_init__(self) -> None:
        check_number("std", self.std, low=0, high=LARGEST, open_low=True, remedy="give a number over 0")

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(codes.shape, generator=generator, dtype=torch.float32, device=generator.device)
        return codes.detach() + self.std * noise.to(codes)

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        distance = ((actions - codes) / self.std).square().sum(dim=-1)
        return -0.5 * distance - codes.shape[-1] * (math.log(self.std) + 0.5 * math.log(2 * math.pi))


@dataclass(frozen=True, eq=False)
class Categorical:
    """K experts `[K, r]` by softmax(`codes . experts / temperature`). Raises `ConfigError`."""

    experts: Tensor
    temperature: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.experts, Tensor) or self.experts.dim() != 2 or len(self.experts) < 2:
            if isinstance(self.experts, Tensor):
                problem = f"have shape {tuple(self.experts.shape)}"
            else:
                problem = f"are a {type(self.experts).__name__}"
            raise ConfigError(f"experts {problem}: give the codes of two or more, [K, r]")
        remedy = "give a number over 0"
        check_number("temperature", self.temperature, low=0, high=LARGEST, open_low=True, remedy=remedy)

    def log_probs(self, codes: Tensor) -> Tensor:
        """Return experts' log probabilities `[M, K]` for codes `[M, r]`."""
        return (codes @ self.experts.to(codes).T / self.temperature).log_softmax(dim=-1)

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        if not len(codes):
            return codes.detach()
        expert = torch.multinomial(self.log_probs(codes.detach()).exp().cpu(), 1, generator=generator)[:, 0]
        return self.experts.to(codes)[expert.to(codes.device)]

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        expert = torch.cdist(actions[:, None], self.experts.to(actions)[None])[:, 0].argmin(dim=-1)
        return self.log_probs(codes).gather(-1, expert[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class PolicyDecisions:
    """Decisions in one forward.

    `log_prob [B]`: of a row's, with a gradient.
    `n [B]`: their number.
    `actions [B, T, r]`: codes in use.
    """

    log_prob: Tensor
    n: Tensor
    actions: Tensor


@contextmanager
def acting(bem: Bem, policy: Policy, generator: torch.Generator, acts: Tensor) -> Iterator[list[PolicyDecisions]]:
    """In the block, let the policy steer cache-free forwards at tokens `acts [B, T]` bool, and record its decisions."""
    recorded: list[PolicyDecisions] = []

    def act(codes: Codes) -> Codes:
        steering, decisions = draw(codes, policy, generator, acts)
        recorded.append(decisions)
        return steering

    check_policy(bem, policy)
    with hooked_codes(bem, act):
        yield recorded


def check_policy(bem: Bem, policy: Policy) -> None:
    """Raise `BemError` if the adapter is off, `ConfigError` unless this is a policy for its codes."""
    if not bem.open:
        raise BemError("the adapter is not on its model: attach it first")
    if bem.levels is not None:
        raise ConfigError(
            "level is 'learned': sites take codes of several levels, and a policy decides those of one. Train with the"
            " level that is wanted, or learn levels by probemon.adapters.bem.training"
        )
    if not callable(getattr(policy, "sample", None)) or not callable(getattr(policy, "log_prob", None)):
        raise ConfigError(
            f"policy is {policy!r}: give Gaussian(), Categorical(experts), or an object with their sample and log_prob"
        )
    if isinstance(policy, Categorical) and policy.experts.shape[1] != bem.config.code_size:
        raise ConfigError(
            f"experts have shape {tuple(policy.experts.shape)}, and this adapter's codes have {bem.config.code_size}"
            f" numbers: give [K, {bem.config.code_size}]"
        )


def draw(codes: Codes, policy: Policy, generator: torch.Generator, acts: Tensor) -> tuple[Codes, PolicyDecisions]:
    """Return steered codes and decisions of a policy at tokens `acts [B, T]` bool."""
    used = list(codes.by_level())
    # Level of each token's code [B, T].
    level = torch.full_like(codes.level, LEVELS.index(used[0])) if len(used) == 1 else codes.level
    proposed = codes.adaptive()
    decides = _decides(codes, level, acts)
    drawn = proposed.detach().clone()
    drawn[decides] = policy.sample(proposed[decides], generator)
    log_prob = torch.zeros(decides.shape, dtype=proposed.dtype, device=proposed.device).masked_scatter(
        decides, policy.log_prob(proposed[decides], drawn[decides])
    )
    padded = torch.cat([drawn[:, :1], drawn], dim=1)
    columns = torch.arange(1, decides.shape[1] + 1, device=decides.device)
    latest = torch.where(decides, columns, 0).cummax(dim=1).values
    actions = padded.gather(1, latest[..., None].expand_as(drawn))
    actions = torch.where(acts[..., None], actions, proposed.detach())
    replaced = {
        name: torch.where((level == LEVELS.index(name))[..., None], actions, code.detach())
        for name, code in codes.by_level().items()
    }
    return codes.replace(**replaced), PolicyDecisions(log_prob.sum(dim=1), decides.sum(dim=1), actions)


def _decides(codes: Codes, level: Tensor, acts: Tensor) -> Tensor:
    """Where actions are drawn `[B, T]` bool."""
    begins = torch.ones_like(acts)
    begins[:, 1:] = ~acts[:, :-1] | (level[:, 1:] != level[:, :-1])
    return acts & ((level == TOKEN) | codes.boundary | begins)


@dataclass(frozen=True, eq=False)
class PolicyHistory:
    """The training's `history`, and `rewards [n_steps, B]`."""

    history: TrainingHistory
    rewards: Tensor


@dataclass
class Baseline:
    """Running mean of earlier rewards."""

    decay: float
    value: float | None = None

    def advantage(self, rewards: Tensor) -> Tensor:
        before = self.value
        mean = float(rewards.mean())
        self.value = mean if before is None else self.decay * before + (1 - self.decay) * mean
        return torch.zeros_like(rewards) if before is None else rewards - before


def improve(
    bem: Bem,
    batches: Sequence[Batch],
    reward: Reward,
    policy: Policy,
    settings: TrainSettings,
    *,
    baseline_decay: float = 0.9,
) -> PolicyHistory:
    """Train the controller of an attached adapter to be rewarded.

    Raises `ConfigError` if batches differ in rows, or as `as_rewards`; `BemError` as `train`.
    """
    check_learnable(bem)
    check_fit(batches, settings)
    check_policy(bem, policy)
    remedy = "give 0 to 1, how much of the running mean is kept at each step"
    check_number("baseline_decay", baseline_decay, low=0, high=1, remedy=remedy)
    if len(sizes := {len(model_inputs(batch)["input_ids"]) for batch in batches}) > 1:
        raise ConfigError(
            f"batches have {', '.join(str(n) for n in sorted(sizes))} rows: give all of them one number, for rewards"
            " are kept a row"
        )
    generator, baseline = torch.Generator().manual_seed(settings.seed), Baseline(baseline_decay)
    all_rewards: list[Tensor] = []

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs, acts = forward_inputs(bem.host, batch), masked_tokens(batch, "acts")
        if not bool(acts.any()):
            raise ConfigError("a batch has no token at which the policy acts: leave it out")
        with (
            frozen(bem.host.parameters()),
            frozen(bem.updates.parameters()),
            acting(bem, policy, generator, acts) as recorded,
        ):
            output = bem.host(**inputs, use_cache=False)
        with torch.no_grad():
            rewards = as_rewards(reward(batch, output), len(acts)).to(acts.device)
        all_rewards.append(rewards.cpu())
        [decisions] = recorded
        return -(baseline.advantage(rewards) * decisions.log_prob).mean(), {"reward": rewards.mean()}

    history = fit(list(bem.controller.parameters()), loss_of, batches, settings)
    return PolicyHistory(history, torch.stack(all_rewards))


def as_rewards(rewards: Any, n_rows: int) -> Tensor:
    """Return rewards as a tensor `[n_rows]`. Raises `ConfigError` unless they are one finite number a row."""
    try:
        row_rewards = torch.as_tensor(rewards, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"the reward gave {rewards!r}: give one finite number for each row") from None
    if row_rewards.shape != (n_rows,) or not bool(torch.isfinite(row_rewards).all()):
        raise ConfigError(f"the reward gave {row_rewards.tolist()} for {n_rows} rows: give one finite number for each")
    return row_rewards


def regret(rewards: Tensor, best: Tensor | float) -> Tensor:
    """Return the cumulative regret `[n]` of `rewards [n, B]` against `best`, averaged over rows."""
    return (best - rewards).mean(dim=1).cumsum(dim=0)

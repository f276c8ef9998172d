"""Policy gradient over routing: codes are tried at random, and those that were rewarded become likelier.

    policy = Gaussian(std=0.3)                            # or Categorical(experts [K, r], temperature=0.5)
    history = improve(bem, batches, reward, policy, TrainSettings(n_steps=300, lr=3e-3))
    regret(history.rewards, best)                         # cumulative, against the best that was possible

`reward(batch, output) -> [B]` rates each row of the host's output under the codes that were tried. It needs no
gradient, and may be anything: what a user said, a checker's verdict, a score. The gradient is that of Williams 1992
(REINFORCE), `(R - b) grad log pi(a | c)`. b is the running mean of earlier rewards, which does not depend on the action
and so leaves the expectation as it is.

The policy decides where a code may change: at each token of token codes, else at the first token of each chunk; a
decision holds until the next. `acts [B, T]` in a batch, optional: the policy steers the tokens where it is not 0, and
the others keep the controller's code. U and V do not learn. Codes of sites that take chunk codes whatever the level are
the policy's only where no others are used.
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
from probemon.adapters.bem.losses import (
    Batch,
    check_learnable,
    forward_inputs,
    frozen,
    hooked_codes,
    host_inputs,
    masked_tokens,
)
from probemon.adapters.bem.training import TrainingHistory, TrainSettings, check_fit, fit
from probemon.errors import BemError, ConfigError
from probemon.util.checks import LARGEST, check_number

Reward = Callable[[Batch, Any], Tensor]


class Policy(Protocol):
    """A distribution of actions around codes."""

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        """Draw an action `[M, r]` for each of codes `[M, r]`, without a gradient."""

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        """Return `[M]` log densities, or probabilities, of actions given codes `[M, r]`, with a gradient to codes."""


@dataclass(frozen=True)
class Gaussian:
    """Actions are codes with independent noise of standard deviation `std`. Raises `ConfigError`."""

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
    """Actions are those of K experts `[K, r]`, with probability softmax(`codes . experts / temperature`).

    Raises `ConfigError`.
    """

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
        """Return log probabilities `[M, K]` of every expert, given codes `[M, r]`."""
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
    """One forward under a policy: `log_prob [B]` of all decisions of a row, with a gradient; `n [B]`, how many they
    were; `actions [B, T, r]`.
    """

    log_prob: Tensor
    n: Tensor
    actions: Tensor


@contextmanager
def acting(bem: Bem, policy: Policy, generator: torch.Generator, acts: Tensor) -> Iterator[list[PolicyDecisions]]:
    """In the block, let the policy steer forwards without a cache, at the tokens `acts [B, T]` bool, and record its
    decisions in the list.
    """
    recorded: list[PolicyDecisions] = []

    def act(codes: Codes) -> Codes:
        steering, decisions = draw(codes, policy, generator, acts)
        recorded.append(decisions)
        return steering

    check_policy(bem, policy)
    with hooked_codes(bem, act):
        yield recorded


def check_policy(bem: Bem, policy: Policy) -> None:
    """Raise `BemError` where the adapter is off, `ConfigError` for what is no policy, or one over codes of another
    length.
    """
    if not bem.open:
        raise BemError("the adapter is not on its host: attach it first")
    if bem.levels is not None:
        raise ConfigError(
            "level is 'learned': sites take codes of several levels, and a policy decides those of one. Train with the"
            " level that is wanted, or learn levels by probemon.adapters.bem.training"
        )
    if not callable(getattr(policy, "sample", None)) or not callable(getattr(policy, "log_prob", None)):
        raise ConfigError(
            f"policy is {policy!r}: give Gaussian(), Categorical(experts), or what has their sample and log_prob"
        )
    if isinstance(policy, Categorical) and policy.experts.shape[1] != bem.config.code_size:
        raise ConfigError(
            f"experts have shape {tuple(policy.experts.shape)}, and this adapter's codes have {bem.config.code_size}"
            f" numbers: give [K, {bem.config.code_size}]"
        )


def draw(codes: Codes, policy: Policy, generator: torch.Generator, acts: Tensor) -> tuple[Codes, PolicyDecisions]:
    """Return the codes that steer one forward where a policy decides at the tokens `acts [B, T]` bool, and what it
    decided.
    """
    used = list(codes.by_level())
    # The level of the code that sites take at each token [B, T].
    level = torch.full_like(codes.level, LEVELS.index(used[0])) if len(used) == 1 else codes.level
    proposed = codes.adaptive()
    decides = _decides(codes, level, acts)
    drawn = proposed.detach().clone()
    drawn[decides] = policy.sample(proposed[decides], generator)
    log_prob = torch.zeros(decides.shape, dtype=proposed.dtype, device=proposed.device).masked_scatter(
        decides, policy.log_prob(proposed[decides], drawn[decides])
    )
    held = torch.cat([drawn[:, :1], drawn], dim=1)
    columns = torch.arange(1, decides.shape[1] + 1, device=decides.device)
    latest = torch.where(decides, columns, 0).cummax(dim=1).values
    actions = held.gather(1, latest[..., None].expand_as(drawn))
    actions = torch.where(acts[..., None], actions, proposed.detach())
    replaced = {
        name: torch.where((level == LEVELS.index(name))[..., None], actions, code.detach())
        for name, code in codes.by_level().items()
    }
    return codes.replace(**replaced), PolicyDecisions(log_prob.sum(dim=1), decides.sum(dim=1), actions)


def _decides(codes: Codes, level: Tensor, acts: Tensor) -> Tensor:
    """Where a new action is drawn `[B, T]` bool: where a code may change, and where the policy or a level begins."""
    begins = torch.ones_like(acts)
    begins[:, 1:] = ~acts[:, :-1] | (level[:, 1:] != level[:, :-1])
    return acts & ((level == TOKEN) | codes.boundary | begins)


@dataclass(frozen=True, eq=False)
class PolicyHistory:
    """The `history` of the training, and the `rewards [n_steps, B]` of every step, in order."""

    history: TrainingHistory
    rewards: Tensor


@dataclass
class Baseline:
    """The running mean of rewards, of earlier steps alone. Nothing is learned from the first, which only sets it."""

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

    Raises `ConfigError` for batches of several numbers of rows or a reward that is not one finite number a row,
    `BemError` as `train`.
    """
    check_learnable(bem)
    check_fit(batches, settings)
    check_policy(bem, policy)
    remedy = "give 0 to 1, how much of the running mean is kept at each step"
    check_number("baseline_decay", baseline_decay, low=0, high=1, remedy=remedy)
    if len(sizes := {len(host_inputs(batch)["input_ids"]) for batch in batches}) > 1:
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
        with frozen(bem.host), frozen(bem.updates), acting(bem, policy, generator, acts) as recorded:
            output = bem.host(**inputs, use_cache=False)
        with torch.no_grad():
            rewards = as_rewards(reward(batch, output), len(acts)).to(acts.device)
        all_rewards.append(rewards.cpu())
        [decisions] = recorded
        return -(baseline.advantage(rewards) * decisions.log_prob).mean(), {"reward": rewards.mean()}

    history = fit(list(bem.controller.parameters()), loss_of, batches, settings)
    return PolicyHistory(history, torch.stack(all_rewards))


def as_rewards(rewards: Any, n_rows: int) -> Tensor:
    """Return what a reward gave, which may be a list, as a tensor `[n_rows]`. Raises `ConfigError` for anything but one
    finite number a row.
    """
    try:
        given = torch.as_tensor(rewards, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"the reward gave {rewards!r}: give one finite number for each row") from None
    if given.shape != (n_rows,) or not bool(torch.isfinite(given).all()):
        raise ConfigError(f"the reward gave {given.tolist()} for {n_rows} rows: give one finite number for each")
    return given


def regret(rewards: Tensor, best: Tensor | float) -> Tensor:
    """Return the cumulative regret `[n]`: after each step, how much more the best actions would have earned, on average
    over rows. rewards `[n, B]`; best alike, or a number.
    """
    return (best - rewards).mean(dim=1).cumsum(dim=0)

"""Policy gradient over routing: codes are tried at random, and those that were rewarded become likelier.

    policy = Gaussian(std=0.3)                            # or Categorical(experts [K, r], temperature=0.5)
    history = improve(bem, batches, reward, policy, TrainSettings(n_steps=300, lr=3e-3))
    regret(history.rewards, best)                         # cumulative, against the best that was possible

`reward(batch, output) -> [B]`: of each row, given the host's output under the codes that were tried. It needs no
gradient, and may be anything: what a user said, a checker's verdict, a score. The gradient is that of Williams 1992
(REINFORCE), `(R - b) grad log pi(a | c)` with b the running mean of earlier rewards, which does not depend on the
action and so leaves the expectation as it is.

A decision is made where a code may change: at each token of token codes, at the first token of each chunk otherwise,
and holds until the next. `acts [B, T]` in a batch, optional, says which tokens are steered by the policy, those where
it is not 0; the others keep the controller's code. U and V do not learn. Codes of sites that take chunk codes whatever
the level are the policy's only where no others are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from probemon.bem.attached import Bem
from probemon.bem.config import LEVELS
from probemon.bem.controller import TOKEN, Codes
from probemon.bem.losses import Batch, chosen, frozen, host_inputs, host_of, learner, on_codes
from probemon.bem.training import History, TrainSettings, check_lessons, fit
from probemon.core.checks import is_number, shown
from probemon.errors import BemError, ConfigError

Reward = Callable[[Batch, Any], Tensor]


class Policy(Protocol):
    """A distribution of actions around codes."""

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        """One action for each of codes `[M, r]`: `[M, r]`, without a gradient."""

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        """Log of the density, or probability, of actions `[M, r]` given codes `[M, r]`: `[M]`, with a gradient to
        codes.
        """


@dataclass(frozen=True)
class Gaussian:
    """Actions are codes with independent noise of standard deviation `std`. Raises `ConfigError`."""

    std: float = 0.3

    def __post_init__(self) -> None:
        if not is_number(self.std) or not self.std > 0:
            raise ConfigError(f"std is {shown(self.std)}: give a number over 0")

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        return codes.detach() + self.std * torch.randn(
            codes.shape, generator=generator, dtype=torch.float32, device=generator.device
        ).to(codes)

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        distance = ((actions - codes) / self.std).square().sum(dim=-1)
        return -0.5 * distance - codes.shape[-1] * (math.log(self.std) + 0.5 * math.log(2 * math.pi))


@dataclass(frozen=True, eq=False)
class Categorical:
    """Actions are one of K experts' codes `[K, r]`, with probability softmax(`codes . experts / temperature`). Raises
    `ConfigError`.
    """

    experts: Tensor
    temperature: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.experts, Tensor) or self.experts.dim() != 2 or len(self.experts) < 2:
            told = (
                f"have shape {tuple(self.experts.shape)}"
                if isinstance(self.experts, Tensor)
                else f"are a {type(self.experts).__name__}"
            )
            raise ConfigError(f"experts {told}: give the codes of two or more, [K, r]")
        if not is_number(self.temperature) or not self.temperature > 0:
            raise ConfigError(f"temperature is {shown(self.temperature)}: give a number over 0")

    def log_probs(self, codes: Tensor) -> Tensor:
        """Of every expert, given codes `[M, r]`: `[M, K]`."""
        return (codes @ self.experts.to(codes).T / self.temperature).log_softmax(dim=-1)

    def sample(self, codes: Tensor, generator: torch.Generator) -> Tensor:
        if not len(codes):
            return codes.detach()
        chosen = torch.multinomial(self.log_probs(codes.detach()).exp().cpu(), 1, generator=generator)[:, 0]
        return self.experts.to(codes)[chosen.to(codes.device)]

    def log_prob(self, codes: Tensor, actions: Tensor) -> Tensor:
        chosen = torch.cdist(actions[:, None], self.experts.to(actions)[None])[:, 0].argmin(dim=-1)
        return self.log_probs(codes).gather(-1, chosen[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class Acted:
    """One forward under a policy: `log_prob [B]`, of all decisions of a row, with a gradient; how many they were, `n
    [B]`; `actions [B, T, r]`.
    """

    log_prob: Tensor
    n: Tensor
    actions: Tensor


@contextmanager
def acting(bem: Bem, policy: Policy, generator: torch.Generator, acts: Tensor) -> Iterator[list[Acted]]:
    """For the time of the block, forwards without a cache are steered by what the policy draws; `acts [B, T]` bool: at
    which tokens.
    """
    seen: list[Acted] = []

    def act(codes: Codes) -> Codes:
        wanted, level = codes.adaptive(), _level(codes)
        decides = _decisions(codes, level, acts)
        actions = wanted.detach().clone()
        actions[decides] = policy.sample(wanted[decides], generator)
        log_prob = torch.zeros(decides.shape, dtype=wanted.dtype, device=wanted.device).masked_scatter(
            decides, policy.log_prob(wanted[decides], actions[decides])
        )
        at = torch.where(decides, torch.arange(decides.shape[1], device=decides.device), 0).cummax(dim=1).values
        held = actions.gather(1, at[..., None].expand_as(actions))
        actions = torch.where(acts[..., None], held, wanted.detach())
        seen.append(Acted(log_prob.sum(dim=1), decides.sum(dim=1), actions))
        levels = {name: getattr(codes, name) for name in LEVELS}
        return codes.replace(
            **{
                name: torch.where((level == i)[..., None], actions, levels[name].detach())
                for i, name in enumerate(LEVELS)
                if levels[name] is not None
            }
        )

    if not bem.open:
        raise BemError("the adapter is not on its host: attach it first")
    if isinstance(policy, Categorical) and policy.experts.shape[1] != bem.config.rank:
        raise ConfigError(
            f"experts have shape {tuple(policy.experts.shape)}, and this adapter's codes have rank {bem.config.rank}:"
            f" give [K, {bem.config.rank}]"
        )
    with on_codes(bem, act):
        yield seen


def _level(codes: Codes) -> Tensor:
    """Of which level the code is that sites take at each token `[B, T]`."""
    used = [i for i, name in enumerate(LEVELS) if getattr(codes, name) is not None]
    return torch.full_like(codes.level, used[0]) if len(used) == 1 else codes.level


def _decisions(codes: Codes, level: Tensor, acts: Tensor) -> Tensor:
    """Where a new action is drawn `[B, T]` bool: where a code may change, and where the policy or a level begins."""
    fresh = torch.ones_like(acts)
    fresh[:, 1:] = ~acts[:, :-1] | (level[:, 1:] != level[:, :-1])
    return acts & ((level == TOKEN) | codes.boundary | fresh)


@dataclass(frozen=True, eq=False)
class PolicyHistory:
    """`history` of the training, and the `rewards [n_steps, B]` of every step, in order."""

    history: History
    rewards: Tensor


@dataclass
class _Baseline:
    """The running mean of rewards, of earlier steps alone. Nothing is learned from the first, which only sets it."""

    decay: float
    value: float | None = field(default=None)

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
    learner(bem)
    check_lessons(batches, settings)
    if not callable(getattr(policy, "sample", None)) or not callable(getattr(policy, "log_prob", None)):
        raise ConfigError(
            f"policy is {policy!r}: give Gaussian(), Categorical(experts), or what has their sample and log_prob"
        )
    if not is_number(baseline_decay) or not 0 <= baseline_decay <= 1:
        raise ConfigError(
            f"baseline_decay is {baseline_decay!r}: give 0 to 1, how much of the running mean is kept at each step"
        )
    if len(sizes := {len(host_inputs(batch)["input_ids"]) for batch in batches}) > 1:
        raise ConfigError(
            f"batches have {', '.join(str(n) for n in sorted(sizes))} rows: give all of them one number, for rewards"
            " are kept a row"
        )
    generator, baseline = torch.Generator().manual_seed(settings.seed), _Baseline(baseline_decay)
    taken: list[Tensor] = []

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs, acts = host_inputs(batch), chosen(batch, "acts")
        if not bool(acts.any()):
            raise ConfigError("a batch has no token at which the policy acts: leave it out")
        with frozen(host_of(bem)), frozen(bem.updates), acting(bem, policy, generator, acts) as seen:
            output = host_of(bem)(**inputs, use_cache=False)
        with torch.no_grad():
            rewards = _numbers(reward(batch, output)).to(acts.device)
        if rewards.shape != (len(acts),) or not bool(torch.isfinite(rewards).all()):
            raise ConfigError(
                f"the reward gave {rewards.tolist()} for {len(acts)} rows: give one finite number for each"
            )
        taken.append(rewards.cpu())
        [acted] = seen
        return -(baseline.advantage(rewards) * acted.log_prob).mean(), {"reward": rewards.mean()}

    history = fit(list(bem.controller.parameters()), loss_of, batches, settings)
    return PolicyHistory(history, torch.stack(taken))


def _numbers(rewards: Any) -> Tensor:
    """What a reward gave, in a tensor of fp32: a checker gives a list."""
    try:
        return torch.as_tensor(rewards, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"the reward gave {rewards!r}: give one finite number for each row") from None


def regret(rewards: Tensor, best: Tensor | float) -> Tensor:
    """Cumulative regret `[n]`: after each step, how much more the best actions would have earned on average over rows;
    rewards `[n, B]`, best alike or a number.
    """
    return (best - rewards).mean(dim=1).cumsum(dim=0)

"""Rollouts: answers that the host writes while a policy decides its codes, and how likely each decision was.

    rollout = roll_out(bem, prompts, Gaussian(0.3), RolloutSettings(n_rollouts=8, max_new_tokens=32), generator)
    rollout.sequences[:, rollout.n_prompt :]              # what was written; rows of one prompt lie side by side
    rollout.log_prob                                      # of each decision, from the forward that drew it
    log_probs(bem, rollout, policy)                       # the same from one forward without a cache, with a gradient

A decision is made where `probemon.adapters.bem.policy` says, once for each token that takes a new code, also when the
tokens come one by one with a cache; it holds until the next, across forwards. What the host samples is no decision of
the policy: given the tokens before it, a code depends on the controller alone, and a token on codes and the host alone.
So the gradient of a rollout's likelihood by the controller's parameters is that of its decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.controller import Codes, Controller
from probemon.adapters.bem.losses import (
    Batch,
    forward_inputs,
    hooked_codes,
    host_inputs,
    masked_tokens,
    mode,
    real_tokens,
)
from probemon.adapters.bem.packing import packing_of
from probemon.adapters.bem.policy import Drawn, Policy, check_policy, draw, levels_taken
from probemon.adapters.bem.state import ControllerState
from probemon.errors import BemError, ConfigError
from probemon.host.model import find_layers
from probemon.util.checks import LARGEST, check_count, check_number


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How answers are written. Raises `ConfigError`.

    `n_rollouts`: answers to each prompt.
    `max_new_tokens`: the most tokens of an answer; it ends sooner at the host's end-of-sequence token.
    `temperature`: of the host's tokens; 0 takes the likeliest. top_k and top_p are off. What else the host's
        generation_config asks for (a repetition penalty, suppressed tokens, min_p) holds as in its generate().
    """

    n_rollouts: int = 8
    max_new_tokens: int = 32
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_count("n_rollouts", self.n_rollouts, least=1, remedy="give 1 or more")
        check_count("max_new_tokens", self.max_new_tokens, least=1, remedy="give 1 or more")
        check_number("temperature", self.temperature, low=0, high=LARGEST, remedy="give 0 or more")


@dataclass(frozen=True, eq=False)
class Rollout:
    """M answers, `n_rollouts` to each prompt side by side, of L columns in all.

    `sequences [M, L]`, of which the first `n_prompt` columns are the prompt; `real [M, L]` bool: which columns are
    tokens, not padding before the prompt or after the answer's end.
    Of the columns that the host read, all but the last:
    `decides [M, L - 1]` bool: where a decision was made on which the answer depends.
    `log_prob [M, L - 1]`: the logarithm of its probability (density) when it was drawn; 0 elsewhere.
    `actions [M, L - 1, r]`: the codes that were taken. `level [M, L - 1]`: the level whose codes they replaced.
    """

    sequences: Tensor
    real: Tensor
    n_prompt: int
    n_rollouts: int
    decides: Tensor
    log_prob: Tensor
    actions: Tensor
    level: Tensor

    @property
    def written(self) -> Tensor:
        """Which columns are tokens of the answer `[M, L]` bool, the one that ends it among them."""
        written = self.real.clone()
        written[:, : self.n_prompt] = False
        return written


def roll_out(bem: Bem, batch: Batch, policy: Policy, settings: RolloutSettings, generator: torch.Generator) -> Rollout:
    """Write answers to the prompts of a batch (`input_ids`, `attention_mask`, padded on the left), without gradients
    or dropout. `generator` draws the decisions, torch's own the tokens.

    `acts [B, T]` of the batch, optional: the policy steers the prompt's tokens where it is not 0; it steers all of the
    answer's. Raises `ConfigError`, `BemError`.
    """
    check_policy(bem, policy)
    inputs, prompt_acts, real = host_inputs(batch), masked_tokens(batch, "acts"), real_tokens(batch)
    if packing_of(bem.host, {**inputs, "use_cache": False}) is not None:
        raise ConfigError(
            "several prompts are packed in one row (position_ids), which generate() does not read: give each a row"
        )
    if not bool(real[:, -1].all()):
        raise ConfigError("a prompt ends in padding, where an answer would begin: pad prompts on the left")
    n, n_prompt = settings.n_rollouts, real.shape[1]
    prompt_acts = prompt_acts.repeat_interleave(n, dim=0)
    drawn: list[Drawn] = []

    def decide(codes: Codes) -> Codes:
        n_read, n_columns = sum(one.acts.shape[1] for one in drawn), codes.level.shape[1]
        acts = torch.ones(codes.level.shape, dtype=torch.bool, device=codes.level.device)
        of_prompt = prompt_acts[:, n_read : n_read + n_columns].to(acts.device)
        acts[:, : of_prompt.shape[1]] = of_prompt
        drawn.append(draw(codes, policy, generator, acts, drawn[-1] if drawn else None))
        return drawn[-1].codes

    with torch.no_grad(), mode(bem.host, training=False), hooked_codes(bem, decide):
        sequences: Tensor = bem.host.generate(
            input_ids=inputs["input_ids"].repeat_interleave(n, dim=0),
            attention_mask=real.long().repeat_interleave(n, dim=0),
            generation_config=_generation_config(bem, settings),
        )
    decides, log_prob, actions, level = (
        torch.cat([getattr(one, name) for one in drawn], dim=1) for name in ("decides", "log_prob", "actions", "level")
    )
    if decides.shape != (len(sequences), sequences.shape[1] - 1):
        raise BemError(
            f"generate() ran {decides.shape[1]} columns of {len(decides)} rows for {len(sequences)} answers of"
            f" {sequences.shape[1]}: whose decisions they are is unknown. Leave assistants and beams out"
        )
    every = torch.cat([real.repeat_interleave(n, dim=0), _until_end(bem, sequences[:, n_prompt:])], dim=1)
    # What is read at a column moves the tokens after it: the last token of an answer depends on those before it.
    decides = decides & every[:, 1:] & every[:, :-1]
    return Rollout(sequences, every, n_prompt, n, decides, torch.where(decides, log_prob, 0.0), actions, level)


def _generation_config(bem: Bem, settings: RolloutSettings) -> GenerationConfig:
    own = getattr(bem.host, "generation_config", None)
    sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    eos = getattr(own, "eos_token_id", None)
    pad = getattr(own, "pad_token_id", None)
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        num_beams=1,
        use_cache=True,
        eos_token_id=eos,
        pad_token_id=_ends(bem)[0] if pad is None and eos is not None else pad,
        **(sampling if settings.temperature else {"do_sample": False}),
    )


def _ends(bem: Bem) -> list[int]:
    eos = getattr(getattr(bem.host, "generation_config", None), "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _until_end(bem: Bem, written: Tensor) -> Tensor:
    """Which columns of answers `[M, W]` are their tokens: up to the first that ends one, and that one."""
    ended = torch.isin(written, torch.tensor(_ends(bem), dtype=written.dtype, device=written.device))
    return ended.int().cumsum(dim=1) - ended.int() == 0


def log_probs(
    bem: Bem, rollout: Rollout, policy: Policy, *, read: Tensor | None = None, controller: Controller | None = None
) -> Tensor:
    """Return the log-probabilities `[M, L - 1]` of a rollout's decisions, 0 elsewhere, under the controller as it is
    now, from one forward without a cache, with a gradient.

    `read`: what `states_read` returned, where it is known. `controller`: another than the adapter's.
    """
    read = states_read(bem, rollout) if read is None else read
    controller = bem.controller if controller is None else controller
    decided = rollout.level[:, -1] if bem.config.level == "auto" else None
    codes: Codes = controller(read, rollout.real[:, :-1], ControllerState(len(read), decided))
    if not torch.equal(levels_taken(codes)[rollout.decides], rollout.level[rollout.decides]):
        raise BemError(
            f"a rollout's levels are not those of its tokens read again (level={bem.config.level!r} of"
            f" {', '.join(LEVELS)}): it is of another adapter"
        )
    proposed, decides = codes.adaptive(), rollout.decides
    of_decisions = policy.log_prob(proposed[decides], rollout.actions[decides].to(proposed))
    return torch.zeros(decides.shape, dtype=proposed.dtype, device=proposed.device).masked_scatter(
        decides, of_decisions
    )


@torch.no_grad()
def states_read(bem: Bem, rollout: Rollout) -> Tensor:
    """Return the states `[M, L - 1, D]` that the controller reads of a rollout, in one forward without a cache. No code
    moves them: every site lies behind them.
    """
    seen: list[Tensor] = []

    def keep(controller: nn.Module, args: Sequence[Tensor]) -> None:
        seen.append(args[0])

    decoder, _ = find_layers(bem.host)
    handle = bem.controller.register_forward_pre_hook(keep)
    try:
        with mode(bem.host, training=False):
            read = {"input_ids": rollout.sequences[:, :-1], "attention_mask": rollout.real[:, :-1].long()}
            decoder(**forward_inputs(bem.host, read, decoder), use_cache=False)
    finally:
        handle.remove()
    return seen[0]

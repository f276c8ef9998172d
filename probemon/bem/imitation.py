"""Expert imitation: the controller learns to give the codes that experts gave.

    batches = [{"input_ids": ids, "attention_mask": mask, "expert_codes": codes, "counted": where}, ...]
    history = imitate(bem, batches, TrainSettings(n_steps=200, lr=1e-2))
    imitation_error(bem, held_out)                  # 0: the experts' codes; 1: no better than the best single code

`expert_codes [B, T, r]`, or `[B, r]` for one expert a row. `counted [B, T]`, optional: tokens count where it is not 0;
without it all real ones do. A code of chunk k knows complete chunks before k alone, and that of chunk 0 is one learned
vector (a token code also knows its own token): leave out tokens whose expert cannot be known yet. U and V do not learn,
and the host runs without its head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from probemon.bem.attached import Bem
from probemon.bem.losses import (
    Batch,
    check_learnable,
    codes_taken,
    frozen,
    host_inputs,
    masked_tokens,
    recorded_codes,
)
from probemon.bem.training import History, TrainSettings, check_fit, fit
from probemon.errors import ConfigError
from probemon.host.model import find_layers


def imitate(bem: Bem, batches: Sequence[Batch], settings: TrainSettings) -> History:
    """Train the controller of an attached adapter on `imitation_loss`.

    Raises `ConfigError` for experts out of reach (a norm of `max_norm` or more), `BemError` as `train`.
    """
    check_learnable(bem)
    check_fit(batches, settings)
    for batch in batches:
        check_experts(bem, batch)

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        with frozen(bem.updates):
            return imitation_loss(*_compared(bem, batch)), {}

    return fit(list(bem.controller.parameters()), loss_of, batches, settings)


def imitation_loss(codes: Tensor, experts: Tensor) -> Tensor:
    """Return the mean squared distance of codes `[M, r]` to experts' `[M, r]`, over tokens and dimensions."""
    return (codes - experts).square().mean()


@torch.no_grad()
def imitation_error(bem: Bem, batches: Sequence[Batch]) -> float:
    """Return the squared distance to the experts' codes over that of their mean, on all batches together: 0 is exact, 1
    as good as one code for all. Raises `ConfigError` where all experts' codes are the same.
    """
    if not batches:
        raise ConfigError("there are no batches to measure on: give at least one")
    pairs = [_compared(bem, batch) for batch in batches]
    codes, experts = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
    spread = (experts - experts.mean(dim=0)).square().sum()
    if not spread > 0:
        raise ConfigError("the experts' codes are all the same: there is no routing to be measured")
    return float((codes - experts).square().sum() / spread)


def check_experts(bem: Bem, batch: Batch) -> None:
    """Raise `ConfigError` unless a batch has codes of the right shape, within the reach of a code."""
    (n_rows, n_columns), experts = host_inputs(batch)["input_ids"].shape, batch.get("expert_codes")
    rank, most = bem.config.code_size, bem.config.max_norm
    if not isinstance(experts, Tensor) or tuple(experts.shape) not in ((n_rows, n_columns, rank), (n_rows, rank)):
        if isinstance(experts, Tensor):
            problem = f"shape {tuple(experts.shape)}"
        else:
            problem = "none" if experts is None else f"a {type(experts).__name__}"
        raise ConfigError(f"expert_codes: {problem}, expected [{n_rows}, {n_columns}, {rank}] or [{n_rows}, {rank}]")
    largest = float(experts.norm(dim=-1).max())
    if not largest < most:
        raise ConfigError(
            f"an expert's code has norm {largest:.4g}, and codes stay under max_norm {most}: scale the experts down"
            " (and U up), or raise max_norm"
        )


def _compared(bem: Bem, batch: Batch) -> tuple[Tensor, Tensor]:
    """Codes that sites take `[M, r]`, and the experts' `[M, r]`, of the tokens that count."""
    inputs, counted = host_inputs(batch), masked_tokens(batch, "counted")
    decoder, _ = find_layers(bem.host)
    with frozen(bem.host), recorded_codes(bem) as recorded:
        decoder(**inputs, use_cache=False)
    if not bool(counted.any()):
        raise ConfigError("a batch has no token that counts: leave it out")
    experts = batch["expert_codes"]
    experts = experts[:, None].expand(-1, counted.shape[1], -1) if experts.dim() == 2 else experts
    taken = torch.cat([codes[counted] for codes in codes_taken(bem, recorded[-1]).values()])
    wanted = experts[counted].to(taken)
    return taken, wanted.repeat(len(taken) // len(wanted), 1)

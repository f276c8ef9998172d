"""Expert imitation: the controller learns to give experts' codes.

    batches = [{"input_ids": ids, "attention_mask": mask, "expert_codes": codes, "counted": where}, ...]
    history = imitate(bem, batches, TrainSettings(n_steps=200, lr=1e-2))

`expert_codes [B, T, r]`, or `[B, r]` for one expert a row.
`counted [B, T]`, optional: not 0 at tokens that count.

A code of chunk k knows only complete chunks before k (a token code also its own token): leave out tokens whose expert
cannot be known yet. U and V do not learn. Learned levels do: the loss is its expectation over their probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.forwards import frozen
from probemon.adapters.bem.levels import expected_operations
from probemon.adapters.bem.losses import (
    Batch,
    check_learnable,
    codes_taken,
    forward_inputs,
    kind_of,
    masked_tokens,
    mode,
    model_inputs,
    recorded_codes,
)
from probemon.adapters.bem.training import TrainingHistory, TrainSettings, check_fit, fit
from probemon.errors import ConfigError
from probemon.host.model import find_layers
from probemon.util.checks import check_number


def imitate(bem: Bem, batches: Sequence[Batch], settings: TrainSettings, *, operations: float = 0.0) -> TrainingHistory:
    """Train the controller of an attached adapter on `imitation_loss`, and learned levels.

    `operations`: cost of an operation a token. Raises `ConfigError` for experts with norms of `max_norm` or more, or
    `operations` without learned levels; `BemError` as `train`.
    """
    check_learnable(bem)
    check_fit(batches, settings)
    check_number("operations", operations, low=0, remedy="give 0 or more")
    for batch in batches:
        check_experts(bem, batch)

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        with frozen(bem.updates.parameters()):
            loss = _expected_loss(bem, *compared(bem, batch))
        if operations:
            n_tokens = max(1, round(float(masked_tokens(batch, "counted").sum()) / len(batch["input_ids"])))
            loss = loss + operations * expected_operations(bem, n_tokens).to(loss.device)
        return loss, {}

    learning = list(bem.controller.parameters())
    if bem.levels is None:
        every_level: AbstractContextManager[None] = nullcontext()
    else:  # training mode makes the codes of every level
        learning, every_level = [*learning, bem.levels.logits], mode(bem.host, training=True)
    with every_level:
        return fit(learning, loss_of, batches, settings)


def imitation_loss(codes: Tensor, experts: Tensor) -> Tensor:
    """Return the mean squared distance of codes and experts' codes, both `[M, r]`."""
    return (codes - experts).square().mean()


def check_experts(bem: Bem, batch: Batch) -> None:
    """Raise `ConfigError` unless a batch has codes of the right shape, under `max_norm`."""
    (n_rows, n_columns), experts = model_inputs(batch)["input_ids"].shape, batch.get("expert_codes")
    rank, most = bem.config.code_size, bem.config.max_norm
    if not isinstance(experts, Tensor) or tuple(experts.shape) not in ((n_rows, n_columns, rank), (n_rows, rank)):
        raise ConfigError(
            f"expert_codes of a batch are {kind_of(experts)}: expected [{n_rows}, {n_columns}, {rank}] or"
            f" [{n_rows}, {rank}]"
        )
    largest = float(experts.norm(dim=-1).max())
    if not largest < most:
        raise ConfigError(
            f"an expert's code has norm {largest:.4g}, and codes stay under max_norm {most}: scale the experts down"
            " (and U up), or raise max_norm"
        )


def compared(bem: Bem, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Return codes `[M, r]` by sort of site or by level, and the experts'."""
    decoder, _ = find_layers(bem.host)
    inputs, counted = forward_inputs(bem.host, batch, decoder), masked_tokens(batch, "counted")
    with frozen(bem.host.parameters()), recorded_codes(bem) as recorded:
        decoder(**inputs, use_cache=False)
    if not bool(counted.any()):
        raise ConfigError("a batch has no token that counts: leave it out")
    if bem.levels is not None:
        made = recorded[-1].by_level()
    else:
        made = {str(chunked): codes for chunked, codes in codes_taken(bem, recorded[-1]).items()}
    experts = batch["expert_codes"]
    experts = experts[:, None].expand(-1, counted.shape[1], -1) if experts.dim() == 2 else experts
    taken = {name: codes[counted] for name, codes in made.items()}
    return taken, experts[counted].to(next(iter(taken.values())))


def _expected_loss(bem: Bem, codes: Mapping[str, Tensor], experts: Tensor) -> Tensor:
    """The mean over sorts of sites, or expected over learned levels."""
    losses = {name: imitation_loss(code, experts) for name, code in codes.items()}
    if bem.levels is None:
        return torch.stack(list(losses.values())).mean()
    by_level = torch.stack([losses[level] for level in LEVELS])
    site_losses = bem.levels.logits.softmax(dim=1).to(by_level.device) @ by_level
    n_chunked = sum(site.chunked for site in bem.sites)
    return (site_losses.sum() + n_chunked * losses["chunk"]) / len(bem.sites)

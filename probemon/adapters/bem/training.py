"""Trains an adapter, in plain torch or by Hugging Face's Trainer; the model stays as it was, bit for bit.

    # batches: dicts of input_ids, attention_mask, labels
    history = train(bem, batches, TrainSettings(n_steps=300, lr=1e-2))
    evaluate(model, held_out)                                                   # nats a label

    Trainer(model=Objective(bem), args=..., train_dataset=...).train()          # the same losses
    attach_bem(model, "output/checkpoint-500")                                  # its checkpoints are adapters

On a CPU this is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.losses import (
    Batch,
    LossWeights,
    adapter_losses,
    as_batch,
    check_learnable,
    mode,
    model_inputs,
    predictions,
)
from probemon.adapters.bem.saved import STATED, settings_tensor
from probemon.errors import BemError, ConfigError
from probemon.util.checks import LARGEST, check_count, check_number

LossOf = Callable[[Batch], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of AdamW (Loshchilov and Hutter 2019). Raises `ConfigError`.

    `lr`: highest rate, after `n_warmup` linear steps; then falls linearly to 0 at `n_steps`.
    `max_grad_norm`: limit of the joint norm; None for none.
    `seed`: of batch order and dropout.
    `multipliers`: of `lr`, by prefix of a parameter's name ("controller", "updates.o_3"); the longest counts.
    `budget`: most numbers that may learn; None for any.
    """

    n_steps: int
    lr: float = 1e-2
    n_warmup: int = 10
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    seed: int = 0
    multipliers: Mapping[str, float] = field(default_factory=dict)
    budget: int | None = None

    def __post_init__(self) -> None:
        check_count("n_steps", self.n_steps, least=1, remedy="give 1 or more")
        check_number("lr", self.lr, low=0, high=LARGEST, open_low=True, remedy="give a number over 0")
        check_count("n_warmup", self.n_warmup, remedy="give 0 or more")
        check_number("weight_decay", self.weight_decay, low=0, high=LARGEST, remedy="give 0 or more")
        if self.max_grad_norm is not None:
            remedy = "give a number over 0, or None for no limit"
            check_number("max_grad_norm", self.max_grad_norm, low=0, high=LARGEST, open_low=True, remedy=remedy)
        check_count("seed", self.seed, remedy="give 0 or more, within 63 bits")
        if not isinstance(self.multipliers, Mapping):
            raise ConfigError(f"multipliers is {self.multipliers!r}: give them by name, as {{'controller': 0.5}}")
        for name, value in self.multipliers.items():
            check_number(f"multipliers[{name!r}]", value, low=0, high=LARGEST, remedy="give 0 or more")
        if self.budget is not None:
            check_count("budget", self.budget, least=1, remedy="give 1 or more, or None for any number")

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step 0, 1, .."""
        up = (step + 1) / (self.n_warmup + 1)
        down = (self.n_steps - step) / max(1, self.n_steps - self.n_warmup)
        return self.lr * min(1.0, up, down)


@dataclass(frozen=True)
class TrainingStep:
    """One step; `grad_norm` is before clipping."""

    loss: float
    terms: Mapping[str, float]
    lr: float
    grad_norm: float


@dataclass(frozen=True)
class TrainingHistory:
    """Every step, in order."""

    steps: tuple[TrainingStep, ...]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.steps]


def train(
    bem: Bem, batches: Sequence[Batch], settings: TrainSettings, weights: LossWeights | None = None
) -> TrainingHistory:
    """Train an attached adapter on `adapter_losses`, with dropout; restores modes.

    Raises `ConfigError` without batches, `BemError` if the adapter is off or a loss is not finite, before that step.
    """

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        losses = adapter_losses(bem, batch, weights)
        return losses.total, losses.terms

    check_learnable(bem)
    check_fit(batches, settings)
    with mode(bem.host, training=True):
        return fit(parameter_groups(bem, settings), loss_of, batches, settings)


def parameter_groups(bem: Bem, settings: TrainSettings) -> list[dict[str, Any]]:
    """Return parameters in an optimiser's groups, each with its `lr`. Raises `ConfigError` for an unused multiplier,
    if nothing would learn, or over the budget.
    """
    by_multiplier: dict[float, list[nn.Parameter]] = {}
    unused, n_learning = set(settings.multipliers), 0
    for name, parameter in bem.named_parameters():
        fitting = [prefix for prefix in settings.multipliers if f"{name}.".startswith(f"{prefix}.")]
        unused -= set(fitting)
        multiplier = settings.multipliers[max(fitting, key=len)] if fitting else 1.0
        by_multiplier.setdefault(float(multiplier), []).append(parameter)
        n_learning += parameter.numel() if multiplier else 0
    if unused:
        raise ConfigError(
            f"multipliers: no parameter's name begins with {min(unused)!r}: an adapter has 'controller' and 'updates'"
        )
    if not n_learning:
        raise ConfigError(
            "multipliers: that of every parameter is 0, so nothing would learn: leave one over 0, or leave out those of"
            f" {', '.join(sorted(map(repr, settings.multipliers)))}"
        )
    if settings.budget is not None and n_learning > settings.budget:
        raise ConfigError(
            f"the adapter would learn {n_learning:,} numbers, and the budget is {settings.budget:,}: make it smaller"
            " (probemon.adapters.bem.evaluation.budget.solve)"
        )
    return [
        {"params": parameters, "lr": settings.lr * multiplier, "multiplier": multiplier}
        for multiplier, parameters in by_multiplier.items()
    ]


def fit(
    parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    loss_of: LossOf,
    batches: Sequence[Batch],
    settings: TrainSettings,
) -> TrainingHistory:
    """Minimise `loss_of(batch)`, which returns the loss and terms to record, over parameters or groups of them.
    Shuffles batches. Raises as `train`.
    """
    check_fit(batches, settings)
    grouped = [dict(group) for group in parameters if isinstance(group, dict)]
    groups = grouped or [{"params": [one for one in parameters if isinstance(one, nn.Parameter)]}]
    learning = [parameter for group in groups for parameter in group["params"]]
    optimiser = torch.optim.AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay)
    order, steps = _order(len(batches), settings.seed), []
    limit = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
    # Even in a caller's no_grad or inference_mode.
    with torch.inference_mode(False), _seeded(learning, settings.seed), torch.enable_grad():
        for step in range(settings.n_steps):
            optimiser.zero_grad()
            batch = batches[next(order)]
            model_inputs(batch)  # raises early
            loss, terms = loss_of(_outside_inference_mode(batch))
            loss.backward()
            norm, value = float(nn.utils.clip_grad_norm_(learning, limit)), float(loss.detach())
            if not math.isfinite(value) or not math.isfinite(norm):
                raise BemError(
                    f"step {step}: the loss is {value}, its gradient's norm {norm}: lower lr"
                    f" ({settings.lr}) or look into this batch"
                )
            lr = settings.lr_at(step)
            for group in optimiser.param_groups:
                group["lr"] = lr * group.get("multiplier", 1.0)
            optimiser.step()
            steps.append(TrainingStep(value, {name: float(term) for name, term in terms.items()}, lr, norm))
    optimiser.zero_grad()
    return TrainingHistory(tuple(steps))


def check_fit(batches: Sequence[Batch], settings: TrainSettings) -> None:
    """Raise `ConfigError` unless these are a sequence of batches, and settings."""
    if not isinstance(settings, TrainSettings):
        raise ConfigError(f"settings is {settings!r}: give TrainSettings(n_steps=..., ...)")
    if isinstance(batches, Mapping) or not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        raise ConfigError(
            f"batches is a {type(batches).__name__}: give a list of batches, list(batches) of a generator, [batch]"
            " of one"
        )
    if not len(batches):
        raise ConfigError("there are no batches to learn from: give at least one")


def _outside_inference_mode(batch: Batch) -> Batch:
    """Clones inference tensors, which cannot learn."""
    copies = {name: x.clone() for name, x in batch.items() if isinstance(x, Tensor) and x.is_inference()}
    return {**batch, **copies} if copies else batch


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[Batch]) -> float:
    """Return the mean cross-entropy in nats a label, in evaluation mode, with any attached adapter."""
    total, n = 0.0, 0
    with mode(model, training=False):
        for batch in batches:
            logits, labels = predictions(model, batch)
            total += float(nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"))
            n += int((labels != -100).sum())
    if n == 0:
        raise ConfigError("no batch has a label that is not -100: there is nothing to measure")
    return total / n


class Objective(nn.Module):
    """An adapter's losses as a model: `forward` gives `loss` and `logits`.

    Only the adapter is saved, trained and moved to a device; the mode is the model's too. The buffer `settings` makes
    checkpoints open by `attach_bem`. The model is frozen within a forward, and while its checkpointed layers run again
    in the backward pass; in between and after, each parameter's `requires_grad` is the caller's.
    """

    def __init__(self, bem: Bem, weights: LossWeights | None = None) -> None:
        super().__init__()
        self.bem, self.weights = bem, weights
        self.register_buffer(STATED, settings_tensor(bem.config, bem.host, bem.sites))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """As `adapter_losses`."""
        batch = as_batch(input_ids, attention_mask, labels, position_ids)
        losses = adapter_losses(self.bem, batch, self.weights)
        return {"loss": losses.total, "logits": losses.logits}

    def train(self, mode: bool = True) -> Objective:
        super().train(mode)
        self.bem.host.train(mode)
        return self


def _order(n: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=generator).tolist()


@contextmanager
def _seeded(parameters: Sequence[nn.Parameter], seed: int) -> Iterator[Any]:
    """In the block, draw random numbers by this seed."""
    devices = sorted({int(parameter.device.index or 0) for parameter in parameters if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

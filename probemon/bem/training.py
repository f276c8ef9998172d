"""Training an adapter end to end, in plain torch or by Hugging Face's Trainer; the host stays as it was, bit for bit.

    bem = attach_bem(model, BemConfig())
    # batches: dicts of input_ids, attention_mask, labels
    history = train(bem, batches, TrainSettings(n_steps=300, lr=1e-2))
    history.losses                                                              # [n_steps]
    evaluate(model, held_out)                                                   # mean cross-entropy a label

    Trainer(model=Objective(bem), args=..., train_dataset=...).train()          # the same losses
    attach_bem(model, "output/checkpoint-500")                                  # what it saved on the way is adapters

On a CPU the same seed, batches and adapter give the same parameters, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probemon.bem.attached import Bem
from probemon.bem.losses import (
    Batch,
    LossWeights,
    adapter_losses,
    host_inputs,
    host_of,
    labels_after,
    learner,
    mode,
    real_tokens,
)
from probemon.bem.saved import STATED, settings_tensor
from probemon.core.checks import is_int, is_number, shown
from probemon.errors import BemError, ConfigError

LossOf = Callable[[Batch], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How parameters learn: AdamW (Loshchilov and Hutter 2019), gradients clipped, the learning rate in a line up and
    in a line down to 0.

    `max_grad_norm`: of all gradients together, None for no limit. `seed`: of the order of the batches and of dropout.
    Raises `ConfigError`.
    """

    n_steps: int
    lr: float = 1e-2
    n_warmup: int = 10
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fine, remedy in (
            ("n_steps", is_int(self.n_steps) and self.n_steps >= 1, "give 1 or more"),
            ("lr", is_number(self.lr) and self.lr > 0, "give a number over 0"),
            ("n_warmup", is_int(self.n_warmup) and self.n_warmup >= 0, "give 0 or more"),
            ("weight_decay", is_number(self.weight_decay) and self.weight_decay >= 0, "give 0 or more"),
            (
                "max_grad_norm",
                self.max_grad_norm is None or (is_number(self.max_grad_norm) and self.max_grad_norm > 0),
                "give a number over 0, or None for no limit",
            ),
            ("seed", is_int(self.seed) and 0 <= self.seed < 1 << 63, "give 0 or more, within 63 bits"),
        ):
            if not fine:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}: {remedy}")

    def lr_at(self, step: int) -> float:
        """The learning rate of step 0, 1, .."""
        up = (step + 1) / (self.n_warmup + 1)
        down = (self.n_steps - step) / max(1, self.n_steps - self.n_warmup)
        return self.lr * min(1.0, up, down)


@dataclass(frozen=True)
class Step:
    """One step: the loss before it, its terms, the learning rate, the norm of the gradient before clipping."""

    loss: float
    terms: Mapping[str, float]
    lr: float
    grad_norm: float


@dataclass(frozen=True)
class History:
    """Every step of a training, in order."""

    steps: tuple[Step, ...]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.steps]


def train(bem: Bem, batches: Sequence[Batch], settings: TrainSettings, weights: LossWeights | None = None) -> History:
    """Train every parameter of an attached adapter on `adapter_losses`. Dropout is on, the host's too if it has any;
    modes are put back.

    Raises `ConfigError` without batches, `BemError` where the adapter is off or a loss is not finite: it then has the
    parameters before that step.
    """

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        found = adapter_losses(bem, batch, weights)
        return found.total, found.terms

    learner(bem)
    with mode(host_of(bem), training=True):
        return fit(list(bem.parameters()), loss_of, batches, settings)


def fit(
    parameters: Sequence[nn.Parameter], loss_of: LossOf, batches: Sequence[Batch], settings: TrainSettings
) -> History:
    """Lower any loss of a batch over `parameters`: `loss_of(batch)` gives the loss and what else is to be noted. Raises
    as `train`.

    Batches are taken in a new order each time round.
    """
    check_lessons(batches, settings)
    optimiser = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    order, steps = _order(len(batches), settings.seed), []
    limit = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
    with (
        torch.inference_mode(False),
        _seeded(parameters, settings.seed),
        torch.enable_grad(),
    ):  # whoever learns, wherever they are
        for step in range(settings.n_steps):
            optimiser.zero_grad()
            batch = batches[next(order)]
            host_inputs(batch)  # told before anything is computed
            loss, terms = loss_of(_learnable(batch))
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(parameters, limit))
            if not math.isfinite(float(loss.detach())) or not math.isfinite(norm):
                raise BemError(
                    f"step {step}: the loss is {float(loss.detach())}, its gradient's norm {norm}: lower lr"
                    f" ({settings.lr}) or look into this batch"
                )
            lr = settings.lr_at(step)
            for group in optimiser.param_groups:
                group["lr"] = lr
            optimiser.step()
            steps.append(Step(float(loss.detach()), {name: float(term) for name, term in terms.items()}, lr, norm))
    optimiser.zero_grad()
    return History(tuple(steps))


def check_lessons(batches: Sequence[Batch], settings: TrainSettings) -> None:
    """Raise `ConfigError` unless these are batches in a sequence, which is gone through many times, and settings."""
    if not isinstance(settings, TrainSettings):
        raise ConfigError(f"settings is {settings!r}: give TrainSettings(n_steps=..., ...)")
    if isinstance(batches, Mapping) or not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        raise ConfigError(
            f"batches is a {type(batches).__name__}: give a list of batches, list(batches) of a generator, [batch]"
            " of one"
        )
    if not len(batches):
        raise ConfigError("there are no batches to learn from: give at least one")


def _learnable(batch: Batch) -> Batch:
    """The batch; what of it was made in inference mode, where nothing is learned from it, as a copy."""
    made = {name: x.clone() for name, x in batch.items() if isinstance(x, Tensor) and x.is_inference()}
    return {**batch, **made} if made else batch


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[Batch]) -> float:
    """Mean cross-entropy in nats of the labels of all batches, each label counted once, in evaluation mode; with the
    adapter where one is on.
    """
    total, n = 0.0, 0
    with mode(model, training=False):
        for batch in batches:
            inputs = host_inputs(batch)
            if batch.get("labels") is None:
                raise ConfigError(
                    f"a batch has {', '.join(batch)} and no labels: give them, [B, T] with -100 where a token is not to"
                    " be counted"
                )
            labels = labels_after(batch["labels"], real_tokens(batch)).flatten()
            logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
            total += float(nn.functional.cross_entropy(logits.double(), labels, ignore_index=-100, reduction="sum"))
            n += int((labels != -100).sum())
    if n == 0:
        raise ConfigError("no batch has a label that is not -100: there is nothing to measure")
    return total / n


class Objective(nn.Module):
    """An adapter's losses as a model: `forward(input_ids, attention_mask, labels)` gives `loss` and `logits`, as
    Trainer expects.

    Its parameters are the adapter's alone, so that a trainer optimises, clips and saves no others. Its mode is the
    host's too; moving it to a device moves the adapter and not the host. Its buffer `settings` holds the adapter's, so
    that a checkpoint opens by `attach_bem(model, checkpoint)`.
    """

    def __init__(self, bem: Bem, weights: LossWeights | None = None) -> None:
        super().__init__()
        self.bem, self.weights = bem, weights
        self.register_buffer(STATED, settings_tensor(bem.config, host_of(bem), bem.sites))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `adapter_losses`."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        found = adapter_losses(self.bem, {name: x for name, x in given.items() if x is not None}, self.weights)
        return {"loss": found.total, "logits": found.logits}

    def train(self, mode: bool = True) -> Objective:
        super().train(mode)
        host_of(self.bem).train(mode)
        return self


def _order(n: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=generator).tolist()


@contextmanager
def _seeded(parameters: Sequence[nn.Parameter], seed: int) -> Iterator[Any]:
    """For the time of the block, random numbers are by this seed; afterwards they go on as if nothing had been
    drawn.
    """
    devices = sorted({int(parameter.device.index or 0) for parameter in parameters if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

"""Course: a training that is kept in a folder, stops when a held-out loss does not fall, and goes on after a kill.

    course = Course(bem, batches, TrainSettings(n_steps=300, lr=2e-3), folder, choose=held_out_batches)
    for step in course: ...                          # goes on from the folder's checkpoint, if it has one
    course.finish()                                  # the best parameters are the adapter's, and are in the folder

A checkpoint is one file, written whole: parameters, the best ones so far, the optimiser's moments, and how far it is.
Which batch a step takes, and what dropout draws in it, follow from the seed and the step alone. So on a CPU a course
that was killed at any moment and went on ends with the bits of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.losses import Batch, LossWeights, adapter_losses, check_learnable, host_inputs, mode
from probemon.adapters.bem.saved import describe, make_folder, write_tensors
from probemon.adapters.bem.training import TrainSettings, check_fit, evaluate, parameter_groups
from probemon.errors import BemError, BemFileError
from probemon.util.checks import check_count
from probemon.util.files import write_text_atomically

CHECKPOINT, RECORD = "checkpoint.safetensors", "training.json"


@dataclass(frozen=True)
class CourseStep:
    """A step that was done: the loss before it, and the loss on what chooses, where that was measured after it."""

    step: int
    loss: float
    chosen_by: float | None = None


class Course:
    """The training of an attached adapter, step by step.

    `choose`: batches that train nothing; after each `evaluate_every` steps, and after the last, their loss decides
    which parameters are best. Without them the last ones are.
    `patience`: the course ends after so many such losses in a row without a better one.
    `save_every`: steps from one checkpoint to the next.

    Raises as `train`, and `BemFileError` for a folder that has a finished adapter, or a checkpoint of another course.
    """

    def __init__(
        self,
        bem: Bem,
        batches: Sequence[Batch],
        settings: TrainSettings,
        folder: Path,
        *,
        choose: Sequence[Batch] = (),
        weights: LossWeights | None = None,
        evaluate_every: int = 20,
        patience: int = 5,
        save_every: int = 20,
    ) -> None:
        check_learnable(bem)
        check_fit(batches, settings)
        for name, value in (("evaluate_every", evaluate_every), ("patience", patience), ("save_every", save_every)):
            check_count(name, value, least=1, remedy="give 1 or more")
        self.bem, self.settings, self.folder, self.weights = bem, settings, folder, weights or LossWeights()
        self.evaluate_every, self.patience, self.save_every = evaluate_every, patience, save_every
        self._batches, self._choose = batches, choose
        groups = parameter_groups(bem, settings)
        self._learning = [parameter for group in groups for parameter in group["params"]]
        self._optimiser = torch.optim.AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay)
        self.steps: list[CourseStep] = []
        self.best_loss, self.best_step, self.stopped_early = math.inf, -1, False
        self._best: dict[str, Tensor] = {}
        self._identity = self._hash()
        self._resume()
        self.n_resumed = len(self.steps)

    @property
    def ended(self) -> bool:
        """Whether no step is left."""
        return self.stopped_early or len(self.steps) >= self.settings.n_steps

    def __iter__(self) -> Iterator[CourseStep]:
        while not self.ended:
            yield self._step(len(self.steps))

    def finish(self) -> None:
        """Give the adapter its best parameters, save it with a record of the course, and drop the checkpoint."""
        if self._best:
            self.bem.load_state_dict(self._best)
        self.bem.save_pretrained(self.folder)
        write_text_atomically(self.folder / RECORD, json.dumps(self.record(), indent=2) + "\n")
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def record(self) -> dict[str, Any]:
        """Return what happened, for JSON."""
        return {
            "settings": {**asdict(self.settings), "weights": asdict(self.weights)},
            "n_steps": len(self.steps),
            "stopped_early": self.stopped_early,
            "best_step": self.best_step if self._best else len(self.steps) - 1,
            "best_loss": self.best_loss if self._best else None,
            "losses": [step.loss for step in self.steps],
            "chosen_by": [[step.step, step.chosen_by] for step in self.steps if step.chosen_by is not None],
        }

    def _step(self, number: int) -> CourseStep:
        settings, n = self.settings, len(self._batches)
        generator = torch.Generator().manual_seed(settings.seed + 1_000_003 * (number // n))
        batch = self._batches[int(torch.randperm(n, generator=generator)[number % n])]
        devices = sorted({int(p.device.index or 0) for p in self._learning if p.device.type == "cuda"})
        with (
            torch.inference_mode(False),
            torch.random.fork_rng(devices=devices),
            torch.enable_grad(),
            mode(self.bem.host, training=True),
        ):
            torch.manual_seed(settings.seed + 7_919 * (number + 1))
            self._optimiser.zero_grad()
            loss = adapter_losses(self.bem, batch, self.weights).total
            loss.backward()  # type: ignore[no-untyped-call]
            limit = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
            norm, value = float(torch.nn.utils.clip_grad_norm_(self._learning, limit)), float(loss.detach())
            if not math.isfinite(value) or not math.isfinite(norm):
                raise BemError(
                    f"step {number}: the loss is {value}, its gradient's norm {norm}: lower lr ({settings.lr}) or look"
                    " into this batch"
                )
            for group in self._optimiser.param_groups:
                group["lr"] = settings.lr_at(number) * group.get("multiplier", 1.0)
            self._optimiser.step()
        self._optimiser.zero_grad()
        last = number + 1 == settings.n_steps
        chosen_by = None
        if self._choose and (last or (number + 1) % self.evaluate_every == 0):
            chosen_by = evaluate(self.bem.host, self._choose)
            self._note(number, chosen_by)
        self.steps.append(CourseStep(number, value, chosen_by))
        if (number + 1) % self.save_every == 0 or self.ended:
            self._save()
        return self.steps[-1]

    def _note(self, number: int, loss: float) -> None:
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, number
            self._best = {name: tensor.detach().clone() for name, tensor in self.bem.state_dict().items()}
        elif number - self.best_step >= self.patience * self.evaluate_every:
            self.stopped_early = True

    def _hash(self) -> str:
        """Of all that the steps follow from: host, adapter as it begins, batches and settings."""
        stated = {
            "adapter": describe(self.bem.config, self.bem.host, self.bem.sites),
            "settings": asdict(self.settings),
            "weights": asdict(self.weights),
            "every": [self.evaluate_every, self.patience, self.save_every],
        }
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
        for tensor in self.bem.state_dict().values():
            digest.update(_bytes(tensor))
        for batch in (*self._batches, *self._choose):
            host_inputs(batch)
            for name in sorted(batch):
                digest.update(name.encode() + str(tuple(batch[name].shape)).encode() + _bytes(batch[name]))
        return digest.hexdigest()

    def _save(self) -> None:
        tensors = {f"adapter.{name}": tensor for name, tensor in self.bem.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self._best.items()}
        for i, moments in self._optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{name}": torch.as_tensor(value) for name, value in moments.items()}
        state = {
            "identity": self._identity,
            "steps": [[step.step, step.loss, step.chosen_by] for step in self.steps],
            "best": [None if math.isinf(self.best_loss) else self.best_loss, self.best_step],
            "stopped_early": self.stopped_early,
        }
        tensors["state"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        make_folder(self.folder)
        write_tensors(self.folder / CHECKPOINT, tensors)

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            if (self.folder / RECORD).exists():
                raise BemFileError(f"{self.folder} has a finished adapter: give another folder, or remove it first")
            return
        try:
            tensors = load_file(path)
            state = json.loads(bytes(tensors.pop("state").tolist()))
            identity, steps, (best_loss, best_step) = state["identity"], state["steps"], state["best"]
        except (OSError, SafetensorError, RecursionError, ValueError, KeyError, TypeError) as error:
            raise BemFileError(f"{path} cannot be read ({error}): remove it to begin again") from None
        if identity != self._identity:
            raise BemFileError(
                f"{path} is of a course with other data, settings, host or adapter: give another folder, or remove it"
                " to begin again"
            )
        parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "best": {}, "optimiser": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        device_of = {name: tensor.device for name, tensor in self.bem.state_dict().items()}
        self.bem.load_state_dict(parts["adapter"])
        self._best = {name: tensor.to(device_of[name]) for name, tensor in parts["best"].items()}
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimiser"].items():
            i, _, moment = name.partition(".")
            moments.setdefault(int(i), {})[moment] = tensor
        self._optimiser.load_state_dict({**self._optimiser.state_dict(), "state": moments})
        self.steps = [CourseStep(*step) for step in steps]
        self.best_loss = math.inf if best_loss is None else best_loss
        self.best_step, self.stopped_early = best_step, state["stopped_early"]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""

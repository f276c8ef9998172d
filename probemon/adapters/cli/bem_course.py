"""A training by transformers' Trainer, of an adapter or of the LoRA beside it, that goes on after a kill.

record = Course(objective, host, groups, identity, save, "train").run(batches, settings, looks, Path("adapter"))
end(Path("adapter"))                                # once all that belongs to it is done
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from probemon.cli.common import progress_bar
from probemon.cli.terminal import say
from probemon.errors import BemError, BemFileError, ConfigError, MissingExtra
from probemon.util.files import write_text_atomically

if TYPE_CHECKING:
    from torch import nn

    from probemon.adapters.bem.losses import Batch
    from probemon.adapters.bem.training import TrainSettings

_UNFINISHED, _RECORD = "unfinished.json", "training.json"


@dataclass(frozen=True)
class Looks:
    """Batches that choose the best parameters, evaluated every `every` steps."""

    batches: Sequence[Batch]
    every: int
    patience: int


@dataclass(frozen=True)
class Course:
    """What is trained.

    - `objective`: a model whose forward gives `loss`; only what learns are its parameters
    - `groups`: of parameters, for AdamW
    - `identity`: JSON that tells it from another training
    - `save(folder)`: writes the best parameters
    - `title`: of its progress bar
    """

    objective: nn.Module
    host: Any
    groups: list[dict[str, Any]]
    identity: Any
    save: Callable[[Path], object]
    title: str

    def run(
        self, batches: Sequence[Batch], settings: TrainSettings, looks: Looks, out: Path, *, quiet: bool
    ) -> dict[str, Any]:
        """Train from the last checkpoint in `out`, and save the best parameters there with a record, which it returns;
        at once if both are there.

        Raises `BemFileError` for checkpoints of another training, `BemError` if a loss is not finite, `MissingExtra`.
        """
        import torch
        from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        from probemon.adapters.bem.training import evaluate

        host = self.host

        class ByLoss(Trainer):
            """Evaluates by the mean loss of labels, and stops if a loss is not finite."""

            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss = super().training_step(*args, **kwargs)
                if not math.isfinite(loss):
                    raise BemError(
                        f"step {self.state.global_step}: the loss is {float(loss)}: lower lr ({settings.lr}) or look"
                        " into this batch"
                    )
                return loss

            def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
                metrics = {"eval_loss": evaluate(host, looks.batches)}
                self.log(metrics)
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
                return metrics

        class Bar(TrainerCallback):
            chosen_by = "-"

            def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                logs = others["logs"]
                if "eval_loss" in logs:
                    self.chosen_by = f"{logs['eval_loss']:.4f}"
                if "loss" in logs:
                    bar.set_postfix_str(f"{logs['loss']:.4f}, of those that choose {self.chosen_by}", refresh=False)
                    bar.update(state.global_step - bar.n)

        self._check_unfinished([*batches, *looks.batches], settings, looks, out)
        if is_trained(out):
            return cast(dict[str, Any], json.loads((out / _RECORD).read_text(encoding="utf-8")))
        checkpoint = _last_checkpoint(out)
        try:
            arguments = TrainingArguments(
                output_dir=str(out.resolve()),
                max_steps=settings.n_steps,
                per_device_train_batch_size=1,  # of our batches
                max_grad_norm=settings.max_grad_norm or 0.0,
                seed=settings.seed,
                eval_strategy="steps",
                eval_steps=looks.every,
                save_strategy="steps",
                save_steps=looks.every,
                save_total_limit=1,  # and the best one
                load_best_model_at_end=True,
                metric_for_best_model="eval_loss",
                restore_callback_states_from_checkpoint=True,
                logging_steps=1,
                logging_nan_inf_filter=False,
                report_to=[],
                disable_tqdm=True,
                use_cpu=self.groups[0]["params"][0].device.type == "cpu",
                dataloader_pin_memory=False,
                remove_unused_columns=False,
            )
        except ImportError as error:
            raise MissingExtra("bem train needs accelerate: pip install 'probemon[bem]'") from error
        if arguments.n_gpu > 1:  # the Trainer would copy only the adapter
            raise ConfigError(
                f"{arguments.n_gpu} GPUs are visible, and an adapter learns on one: set CUDA_VISIBLE_DEVICES"
            )
        optimiser = torch.optim.AdamW(self.groups, weight_decay=settings.weight_decay)
        trainer = ByLoss(
            self.objective,
            arguments,
            data_collator=lambda rows: rows[0],
            train_dataset=list(batches),
            eval_dataset=list(looks.batches),
            callbacks=[EarlyStoppingCallback(looks.patience), Bar()],
            optimizers=(
                optimiser,
                torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: settings.lr_at(step) / settings.lr),
            ),
        )
        trainer.remove_callback(PrinterCallback)
        if checkpoint is not None and not quiet:
            say(f"going on from step {_step_of(checkpoint)}", error=True)
        with progress_bar(self.title, total=settings.n_steps, unit="step", postfix=", loss {postfix}") as bar:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        host.eval()
        state = trainer.state
        record = {
            "n_steps": state.global_step,
            "stopped_early": state.global_step < settings.n_steps,
            "best_step": (state.best_global_step or state.global_step) - 1,
            "best_loss": state.best_metric,
            "losses": [log["loss"] for log in state.log_history if "loss" in log],
            "chosen_by": [[log["step"] - 1, log["eval_loss"]] for log in state.log_history if "eval_loss" in log],
        }
        self.save(out)
        write_text_atomically(out / _RECORD, json.dumps(record, indent=2) + "\n")
        for folder in out.glob("checkpoint-*"):
            shutil.rmtree(folder)
        return record

    def _check_unfinished(self, batches: Sequence[Batch], settings: TrainSettings, looks: Looks, out: Path) -> None:
        """Note in `out` what is trained there. Raises `BemFileError` if it is another training."""
        from probemon.adapters.bem.saved import make_folder

        digest = hashlib.sha256(
            json.dumps([self.identity, asdict(settings), looks.every, looks.patience], sort_keys=True).encode()
        )
        for batch in batches:
            digest.update(json.dumps({name: tensor.tolist() for name, tensor in sorted(batch.items())}).encode())
        note, path = json.dumps({"identity": digest.hexdigest()}) + "\n", out / _UNFINISHED
        if not path.exists():
            make_folder(out)
            write_text_atomically(path, note)
        elif path.read_text(encoding="utf-8") != note:
            raise BemFileError(
                f"{out} has a training of other data, settings, model or adapter: give another folder, or remove it to"
                " begin again"
            )


def is_trained(out: Path) -> bool:
    """True if the best parameters of a training are in `out`."""
    return (out / _RECORD).exists()


def end(out: Path) -> None:
    """Mark a training as finished."""
    (out / _UNFINISHED).unlink(missing_ok=True)


def check_folder(out: Path) -> None:
    """Raise `ConfigError` unless the folder is new, empty, or an unfinished training."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out is {out}, which is not a folder: give another name")
    if out.is_dir() and any(out.iterdir()) and not (out / _UNFINISHED).exists():
        raise ConfigError(f"--out is {out}, which exists and is not an unfinished training: give another name")


def _last_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint: a kill may leave a partial one."""
    for folder in sorted(out.glob("checkpoint-*"), key=_step_of, reverse=True):
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return folder
    return None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))

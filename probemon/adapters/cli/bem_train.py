"""The command bem train.

probemon bem train demo answers.jsonl --out adapter/
probemon bem train ./my-model answers.jsonl --out adapter/ --layers 20-29 --budget 2% --epochs 5
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.adapters.cli.bem_inspect import size_of
from probemon.adapters.cli.bem_rows import BatchRows, Data, MostTokens, as_dict, check_sizes, pad_of, read, say_measured
from probemon.cli import options as opt
from probemon.cli.common import load_aloud, progress_bar, use_threads
from probemon.cli.terminal import answer, say
from probemon.errors import BemError, BemFileError, ConfigError, MissingExtra
from probemon.util.files import write_text_atomically
from probemon.util.strict_json import loads

if TYPE_CHECKING:
    from probemon.adapters.bem import Bem, BemConfig
    from probemon.adapters.bem.losses import Batch, LossWeights
    from probemon.adapters.bem.training import TrainSettings

_CHOOSE = 0.1  # share of the documents
_UNFINISHED, _RECORD = "unfinished.json", "training.json"


def train(
    model: opt.Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The adapter's folder. An unfinished training in it is continued.")],
    form: Annotated[str, typer.Option(help="Form of the update: low_rank, film, ... (docs/bem-rows.md).")] = "low_rank",
    rank: Annotated[int, typer.Option(help="Numbers of a code.")] = 8,
    sites: Annotated[str, typer.Option(help="Kinds of layers, some of q,k,v,o,down.")] = "o,down",
    layers: Annotated[str, typer.Option(help="Layers of the model, as 8,12,16 or 20-29; all: every one.")] = "all",
    level: Annotated[
        str, typer.Option(help="Level of the codes: position, auto, energy, learned, prefix, chunk or token.")
    ] = "position",
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Any other setting of BemConfig, as groups=9; may be repeated."
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Trainable numbers, 50000 or 2% of the model: the largest rank that fits is taken, then the width of"
            " the controller that comes nearest, which may be a little over it."
        ),
    ] = "",
    epochs: Annotated[float, typer.Option(help="How often each row is learned from.")] = 3.0,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 2e-3,
    kl: Annotated[float, typer.Option(help="Weight of staying near the bare model.")] = 0.05,
    batch: BatchRows = 8,
    most_tokens: MostTokens = 512,
    held_out: Annotated[
        float, typer.Option(help="Share of the documents that are held out for the final measurement.")
    ] = 0.2,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between evaluations on the documents that choose; each writes a checkpoint.")
    ] = 20,
    patience: Annotated[int, typer.Option(help="Evaluations without a lower loss after which training stops.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of parameters, of the split and of the order of rows.")] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Train a routed adapter on DATA and measure it on held-out documents.

    Whole documents are split: most train, a tenth choose when to stop, the rest is held out. After a kill the same
    command goes on from its last checkpoint.
    """
    from probemon.adapters.bem import BemConfig, attach_bem
    from probemon.adapters.bem.evaluation.held_out import measure
    from probemon.adapters.bem.lessons import make_batches, split
    from probemon.adapters.bem.losses import LossWeights
    from probemon.adapters.bem.training import TrainSettings

    kinds = tuple(kind.strip() for kind in sites.split(","))
    named = {"form": form, "rank": rank, "sites": kinds, "layers": layers_of(layers), "level": level, "seed": seed}
    others = other_settings(more or [])
    if budget and (chosen := sorted({"terms" if form == "kronecker" else "rank", "width"} & set(others))):
        raise ConfigError(
            f"--budget chooses the size of codes and of the controller: leave --set {chosen[0]} out, or it"
        )
    config = BemConfig.from_dict({**named, **others})
    check_sizes(most_tokens, batch)
    for name, value in (("evaluate-every", evaluate_every), ("patience", patience)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}: give 1 or more")
    if device.startswith("cuda:"):
        raise ConfigError(f"--device is {device}: give cuda, and choose the GPU by CUDA_VISIBLE_DEVICES")
    if not 0 < held_out <= 0.8:
        raise ConfigError(f"--held-out is {held_out}: give over 0, at most 0.8")
    if not 0 < epochs < math.inf:
        raise ConfigError(f"--epochs is {epochs}: give more than 0")
    settings, weights = TrainSettings(n_steps=1, lr=lr, seed=seed), LossWeights(kl=kl)
    check_budget(budget)
    check_folder(out)
    use_threads(threads)
    rows = read(data)
    shares = {"train": 1 - held_out - _CHOOSE, "choose": _CHOOSE, "test": held_out}
    split(rows.documents, shares, seed=seed)  # raises before the model is loaded
    loaded_model, tokenizer = load_aloud(model, device, dtype)
    config, n_trainable, n_model_parameters = solved(loaded_model, config, budget)
    lessons, documents = rows.lessons(tokenizer, most_tokens)
    parts = split(documents, shares, seed=seed)
    pad = pad_of(tokenizer)
    batches = {
        name: [
            {key: tensor.to(loaded_model.device) for key, tensor in one.items()}
            for one in make_batches([lessons[i] for i in part], batch, pad)
        ]
        for name, part in parts.items()
    }
    n_steps = math.ceil(epochs * len(batches["train"]))
    settings = TrainSettings(n_steps=n_steps, lr=lr, n_warmup=min(10, n_steps // 10), seed=seed)
    with attach_bem(loaded_model, config) as bem:
        looks = _Looks(batches["choose"], evaluate_every, patience)
        course = _train(bem, batches["train"], settings, weights, looks, out, quiet=as_json)
        with progress_bar("held out", total=len(parts["test"]), unit="row") as bar:
            measured = measure(bem, batches["test"], [documents[i] for i in parts["test"]], bar.update)
    result = {
        "adapter": str(out),
        "trainable": n_trainable,
        "share_of_host": n_trainable / n_model_parameters,
        "rows": {name: len(part) for name, part in parts.items()},
        **{name: value for name, value in course.items() if name not in ("losses", "chosen_by")},
        "held_out": as_dict(measured),
    }
    if as_json:
        answer(result)
        return
    size_text = (
        f"{n_trainable:,} trainable numbers, {100 * n_trainable / n_model_parameters:.2f} % of the model's"
        f" {n_model_parameters:,}"
    )
    stopped = "stopped early" if course["stopped_early"] else "every step done"
    say(
        f"{out}: {size_of(config)} at {len(bem.sites)} sites, {size_text}",
        f"{course['n_steps']} steps ({stopped}); the best is that after step {course['best_step'] + 1}",
    )
    say_measured(measured)


@dataclass(frozen=True)
class _Looks:
    """Batches that choose the best parameters, evaluated every `every` steps."""

    batches: Sequence[Batch]
    every: int
    patience: int


def _train(
    bem: Bem,
    batches: Sequence[Batch],
    settings: TrainSettings,
    weights: LossWeights,
    looks: _Looks,
    out: Path,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Train by transformers' Trainer, from the last checkpoint in `out`, and save the best adapter there.

    Raises `BemFileError` for checkpoints of another training, `BemError` if a loss is not finite, `MissingExtra`.
    """
    import torch
    from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from probemon.adapters.bem.training import Objective, evaluate, parameter_groups

    class ByLoss(Trainer):
        """Evaluates by the mean loss of labels, and stops if a loss is not finite."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            if not math.isfinite(loss):
                raise BemError(
                    f"step {self.state.global_step}: the loss is {float(loss)}: lower lr ({settings.lr}) or look into"
                    " this batch"
                )
            return loss

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics = {"eval_loss": evaluate(bem.host, looks.batches)}
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

    _check_unfinished(bem, [*batches, *looks.batches], settings, weights, looks, out)
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
            use_cpu=bem.controller.query.device.type == "cpu",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
    except ImportError as error:
        raise MissingExtra("bem train needs accelerate: pip install 'probemon[bem]'") from error
    if arguments.n_gpu > 1:  # the Trainer would copy only the adapter
        raise ConfigError(f"{arguments.n_gpu} GPUs are visible, and an adapter learns on one: set CUDA_VISIBLE_DEVICES")
    optimiser = torch.optim.AdamW(parameter_groups(bem, settings), weight_decay=settings.weight_decay)
    trainer = ByLoss(
        Objective(bem, weights),
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
    with progress_bar("train", total=settings.n_steps, unit="step", postfix=", loss {postfix}") as bar:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    bem.host.eval()
    state = trainer.state
    record = {
        "n_steps": state.global_step,
        "stopped_early": state.global_step < settings.n_steps,
        "best_step": (state.best_global_step or state.global_step) - 1,
        "best_loss": state.best_metric,
        "losses": [log["loss"] for log in state.log_history if "loss" in log],
        "chosen_by": [[log["step"] - 1, log["eval_loss"]] for log in state.log_history if "eval_loss" in log],
    }
    bem.save_pretrained(out)
    write_text_atomically(out / _RECORD, json.dumps(record, indent=2) + "\n")
    for folder in out.glob("checkpoint-*"):
        shutil.rmtree(folder)
    (out / _UNFINISHED).unlink()
    return record


def _check_unfinished(
    bem: Bem,
    batches: Sequence[Batch],
    settings: TrainSettings,
    weights: LossWeights,
    looks: _Looks,
    out: Path,
) -> None:
    """Note in `out` what is trained there. Raises `BemFileError` if it is another training."""
    from probemon.adapters.bem.saved import describe, make_folder

    identity_parts = [
        describe(bem.config, bem.host, bem.sites),
        asdict(settings),
        asdict(weights),
        looks.every,
        looks.patience,
    ]
    digest = hashlib.sha256(json.dumps(identity_parts, sort_keys=True).encode())
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


def other_settings(given: list[str]) -> dict[str, Any]:
    """Return settings by name, parsed as JSON. Raises `ConfigError`."""
    settings = dict[str, Any]()
    for text in given:
        name, equals, value = text.partition("=")
        try:
            if not equals or name in settings:
                raise ValueError
            parsed = loads(value)
        except ValueError:
            raise ConfigError(
                f"--set is {text!r}: give NAME=VALUE, each once, as groups=9 or spectral_cap=null"
            ) from None
        settings[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return settings


def layers_of(text: str) -> tuple[int, ...] | None:
    """Return layer numbers, None for all. Raises `ConfigError`."""
    if text == "all":
        return None
    layers = list[int]()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or len(part) > 20:
            raise ConfigError(f"--layers is {text!r}: give numbers, as 8,12,16 or 20-29, or all")
        begin, end = int(first), int(last or first)
        if not 0 <= end - begin <= 10_000:
            raise ConfigError(f"--layers is {text!r}: {part.strip()!r} goes down, or is too long")
        layers += range(begin, end + 1)
    return tuple(layers)


def check_budget(budget: str) -> float | int | None:
    """Return a number, a share of the model as a float, or None. Raises `ConfigError`."""
    if not budget:
        return None
    try:
        share = float(budget[:-1]) / 100 if budget.endswith("%") else int(budget)
    except ValueError:
        share = -1
    if not share > 0 or (isinstance(share, float) and share > 1):
        raise ConfigError(f"--budget is {budget!r}: give a number of trainable numbers, as 50000, or a share, as 2%")
    return share


def solved(host: Any, config: BemConfig, budget: str) -> tuple[BemConfig, int, int]:
    """Return the config, fitted to the budget, its trainable numbers, and the model's."""
    from probemon.adapters.bem.evaluation.budget import n_trainable, solve

    n_model_parameters, wanted = sum(parameter.numel() for parameter in host.parameters()), check_budget(budget)
    if wanted is None:
        return config, n_trainable(host, config), n_model_parameters
    solution = solve(host, config, int(wanted * n_model_parameters) if isinstance(wanted, float) else wanted)
    return solution.config, solution.n_trainable, n_model_parameters


def check_folder(out: Path) -> None:
    """Raise `ConfigError` unless the folder is new, empty, or an unfinished training."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out is {out}, which is not a folder: give another name")
    if out.is_dir() and any(out.iterdir()) and not (out / _UNFINISHED).exists():
        raise ConfigError(f"--out is {out}, which exists and is not an unfinished training: give another name")

"""The command bem train.

probemon bem train demo answers.jsonl --out adapter/
probemon bem train ./my-model answers.jsonl --out adapter/ --layers 20-29 --budget 2% --epochs 5
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.adapters.cli.bem_course import Course, Looks, check_folder, end, is_trained
from probemon.adapters.cli.bem_inspect import size_of
from probemon.adapters.cli.bem_measured import LORA, Asked, Measured, asked
from probemon.adapters.cli.bem_rows import BatchRows, Data, MostTokens, batches_of, check_sizes, read
from probemon.cli import options as opt
from probemon.cli.common import load_aloud, progress_bar, use_threads
from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError, MissingExtra, UnsupportedModel
from probemon.util.checks import check_count, check_number
from probemon.util.strict_json import loads

if TYPE_CHECKING:
    from probemon.adapters.bem import BemConfig
    from probemon.adapters.bem.evaluation.beside import Beside
    from probemon.adapters.bem.losses import Batch, LossWeights
    from probemon.adapters.bem.training import TrainSettings

_CHOOSE = 0.1  # share of the documents


def train(
    model: opt.Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The adapter's folder. An unfinished training in it is continued.")],
    form: Annotated[
        str, typer.Option(help="Form of the update: low_rank, kronecker, .. (docs/bem-rows.md).")
    ] = "low_rank",
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
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-2,
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
    lora: Annotated[
        bool,
        typer.Option(
            help="Train a LoRA beside it: at the same layers, with as many trainable numbers, from the same batches at"
            " the same rate."
        ),
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of parameters, of the split and of the order of rows.")] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Train a routed adapter on DATA, and a LoRA of its size beside it, and measure both on held-out documents.

    Whole documents are split: most train, a tenth choose when to stop, the rest is held out. After a kill the same
    command goes on from its last checkpoint. The LoRA is in the folder "lora" of the adapter's.
    """
    from probemon.adapters.bem import BemConfig
    from probemon.adapters.bem.lessons import split
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
    check_count("--evaluate-every", evaluate_every, least=1, remedy="give 1 or more")
    check_count("--patience", patience, least=1, remedy="give 1 or more")
    if device.startswith("cuda:"):
        raise ConfigError(f"--device is {device}: give cuda, and choose the GPU by CUDA_VISIBLE_DEVICES")
    check_number("--held-out", held_out, low=0, high=0.8, open_low=True, remedy="give over 0, at most 0.8")
    check_number("--epochs", epochs, low=0, open_low=True, remedy="give more than 0")
    settings, weights = TrainSettings(n_steps=1, lr=lr, seed=seed), LossWeights(kl=kl)
    wanted = check_budget(budget)
    check_folder(out)
    use_threads(threads)
    rows = read(data)
    shares = {"train": 1 - held_out - _CHOOSE, "choose": _CHOOSE, "test": held_out}
    split(rows.documents, shares, seed=seed)  # raises before the model is loaded
    loaded_model, tokenizer = load_aloud(model, device, dtype)
    config, n_trainable, n_model_parameters = solved(loaded_model, config, wanted)
    lessons, documents = rows.lessons(tokenizer, most_tokens)
    parts = split(documents, shares, seed=seed)
    batches = {
        name: batches_of([lessons[i] for i in part], batch, loaded_model, tokenizer) for name, part in parts.items()
    }
    n_steps = math.ceil(epochs * len(batches["train"]))
    settings = TrainSettings(n_steps=n_steps, lr=lr, n_warmup=min(10, n_steps // 10), seed=seed)
    training = _Training(
        loaded_model, tokenizer, config, settings, weights, batches, Looks(batches["choose"], evaluate_every, patience),
        [documents[i] for i in parts["test"]], out, quiet=as_json,
    )  # fmt: skip
    measured, record = training.of_adapter(asked([lessons[i] for i in parts["test"]], tokenizer))
    if lora:
        training.of_lora(measured)
    end(out)
    if as_json:
        answer(
            {
                "adapter": str(out),
                "trainable": n_trainable,
                "share_of_host": n_trainable / n_model_parameters,
                "rows": {name: len(part) for name, part in parts.items()},
                **{name: value for name, value in record.items() if name not in ("losses", "chosen_by")},
                **measured.as_dict(),
            }
        )
        return
    size_text = (
        f"{n_trainable:,} trainable numbers, {100 * n_trainable / n_model_parameters:.2f} % of the model's"
        f" {n_model_parameters:,}"
    )
    stopped = "stopped early" if record["stopped_early"] else "every step done"
    measured.say(
        f"{out}: {size_of(config)} at {len(training.sites)} sites, {size_text}",
        f"{record['n_steps']} steps ({stopped}); the best is that after step {record['best_step'] + 1}",
    )
    if measured.lora is not None:
        say(f"the LoRA is in {out / LORA}, for PEFT")


@dataclass
class _Training:
    """One training of an adapter, and of a LoRA of its size.

    - `documents`: of the held-out rows
    - `beside`: where that LoRA is, and its rank
    """

    host: Any
    tokenizer: Any
    config: BemConfig
    settings: TrainSettings
    weights: LossWeights
    batches: Mapping[str, Sequence[Batch]]
    looks: Looks
    documents: Sequence[int]
    out: Path
    quiet: bool
    identity: list[Any] = field(default_factory=list)
    beside: Beside | None = None
    sites: list[str] = field(default_factory=list)

    def of_adapter(self, questions: list[Asked]) -> tuple[Measured, dict[str, Any]]:
        """Train and measure the adapter; return its record, too."""
        from probemon.adapters.bem import attach_bem
        from probemon.adapters.bem.evaluation.beside import Beside
        from probemon.adapters.bem.evaluation.held_out import measure, share_at_limits
        from probemon.adapters.bem.saved import describe
        from probemon.adapters.bem.training import Objective, parameter_groups

        with attach_bem(self.host, self.out if is_trained(self.out) else self.config) as bem:
            self.identity = [describe(bem.config, bem.host, bem.sites), asdict(self.weights)]
            groups = parameter_groups(bem, self.settings)
            course = Course(Objective(bem, self.weights), bem.host, groups, self.identity, bem.save_pretrained, "train")
            record = course.run(self.batches["train"], self.settings, self.looks, self.out, quiet=self.quiet)
            with progress_bar("held out", total=len(self.documents), unit="row") as bar:
                measured = Measured(measure(bem, self.batches["test"], self.documents, bar.update), questions)
            measured.at_limits = {name: share_at_limits(bem, self.batches[name]) for name in ("train", "test")}
            measured.answer("adapter", self.host, self.tokenizer)
            self.sites = [site.name for site in bem.sites]
            self.beside = Beside.of(bem, self.settings.seed)
        return measured, record

    def of_lora(self, measured: Measured) -> None:
        """Train and measure the LoRA, or note why there is none."""
        from probemon.adapters.bem.evaluation.held_out import by_document

        try:
            folder = self.out / LORA
            assert self.beside is not None
            with self.beside.on(self.host, self.weights) as lora:
                if is_trained(folder):
                    lora.load(folder)
                groups = [{"params": list(lora.factors.values()), "lr": self.settings.lr}]
                course = Course(lora, self.host, groups, [*self.identity, lora.rank], lora.save, "LoRA beside it")
                record = course.run(self.batches["train"], self.settings, self.looks, folder, quiet=self.quiet)
                measured.lora_record = record
                measured.lora = by_document(self.host, self.batches["test"], self.documents)
                measured.n_trainable_of_lora = lora.n_trainable
                measured.answer("LoRA", self.host, self.tokenizer)
            end(folder)
        except (MissingExtra, UnsupportedModel) as error:
            measured.why_no_lora = str(error)


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


def solved(host: Any, config: BemConfig, wanted: float | int | None) -> tuple[BemConfig, int, int]:
    """Return the config, fitted to the budget, its trainable numbers, and the model's."""
    from probemon.adapters.bem.evaluation.budget import n_trainable, solve

    n_model_parameters = sum(parameter.numel() for parameter in host.parameters())
    if wanted is None:
        return config, n_trainable(host, config), n_model_parameters
    solution = solve(host, config, int(wanted * n_model_parameters) if isinstance(wanted, float) else wanted)
    return solution.config, solution.n_trainable, n_model_parameters

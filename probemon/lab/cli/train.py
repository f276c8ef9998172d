"""The command train.

probemon train demo mails.jsonl --out mails/
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.common import bytes_of, load_aloud, progress_bar, use_threads
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.host.chat_dates import CHAT_DATE
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.lab.training import Trained

_SHOWN = 30
_WIDTH = 160
_BASELINES = {
    "words": "words",
    "embedding": "embedding",
    "pooled": "mean state",
    "length": "length",
    "position": "position",
}
_CONTROLS = {"without_giveaways": "masked", "shuffled": "shuffled", "random_direction": "random"}


def train(
    model: opt.Model,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help=(
                "Examples: .jsonl, .csv, .tsv, .parquet or .yaml; texts with labels, pairs, spans of characters, chats,"
                " or concepts with examples."
            ),
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new pack: a folder that does not exist.")],
    layers: Annotated[
        str,
        typer.Option(help="Layers to choose from, by cross-validation: auto (five of them), or numbers, as 8,12,16."),
    ] = "auto",
    method: Annotated[
        str,
        typer.Option(
            help=(
                "The kind of probes: auto (the best on a fifth of the training groups), logistic, watched (the"
                " loss of the running score), joint (of a hierarchy), mlp, mass_mean or lda."
            )
        ),
    ] = "auto",
    aggregate: Annotated[
        str,
        typer.Option(
            help=(
                "The running score that will be watched, and by which a text is judged: each, mean, max, attention[:T],"
                " ema:W, rolling_mean:N, rolling_max:N."
            )
        ),
    ] = "ema:0.3",
    on: Annotated[
        list[str] | None,
        typer.Option(help="Whose turns of a chat count: assistant, user, system, tool; may be repeated."),
    ] = None,
    exclusive: Annotated[
        bool,
        typer.Option(
            "--exclusive", help="A text has the labels it lists, and no other concept; else others are unknown."
        ),
    ] = False,
    test: Annotated[
        list[str] | None,
        typer.Option(help="Examples from elsewhere, that are only tested on; may be repeated."),
    ] = None,
    holdout_group: Annotated[
        list[str] | None, typer.Option(help="A group of DATA that is only tested on; may be repeated.")
    ] = None,
    fpr: Annotated[float, typer.Option(help="The false-positive rate of alert thresholds.")] = 0.01,
    precision: Annotated[
        float | None,
        typer.Option(
            help=(
                "The share of events that must be right, in the given mix of texts: a second set of thresholds,"
                " which is then recommended."
            )
        ),
    ] = None,
    generate: Annotated[
        int,
        typer.Option(
            help=(
                "Least number of texts of a concept: MODEL writes the missing ones from its name and definition."
                " They train, and neither calibrate nor test."
            )
        ),
    ] = 0,
    no_background: Annotated[
        bool,
        typer.Option(
            "--no-background",
            help="Do not train on ordinary background text (prose, code, lists, chats).",
        ),
    ] = False,
    text_field: opt.TextField = "text",
    states: Annotated[
        Path | None,
        typer.Option(help="A folder for hidden states, which another run reuses. Default: in probemon's cache."),
    ] = None,
    budget: Annotated[float, typer.Option(min=0.01, help="Size of the hidden states on disk, in GB.")] = 4.0,
    seed: Annotated[int, typer.Option(help="The same examples, versions and seed give the same pack.")] = 0,
    chat_date: opt.ChatDate = CHAT_DATE,
    name: Annotated[str, typer.Option(help="Name of the pack; else that of its folder.")] = "",
    licence: Annotated[str, typer.Option(help="Licence of the pack, for its manifest.")] = "unstated",
    report: Annotated[Path | None, typer.Option(help="File of the report, an HTML page. Default: OUT.html.")] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    overwrite: opt.OverwritePack = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train probes for the concepts of DATA on MODEL, and measure how far they can be trusted.

    Texts are split by groups, pairs and near duplicates into training, calibration and test. The report compares probes
    with baselines: the words of a text, input embeddings, its length.
    """
    from probemon.lab.training import TrainingSettings
    from probemon.lab.training import train as train_probes
    from probemon.lab.training.examples import read_examples
    from probemon.lab.training.trainer import check_report
    from probemon.packs.files import check_target

    settings = TrainingSettings(
        layers=int(layers) if layers.isdigit() else layers,
        method=method,
        watch=aggregate,
        roles=tuple(on or ("assistant",)),
        exclusive=exclusive,
        text_field=text_field,
        held_out=tuple(holdout_group or ()),
        generate=generate,
        background=not no_background,
        fpr=fpr,
        precision=precision,
        states=states,
        budget=bytes_of(budget),
        seed=seed,
        chat_date=chat_date,
    )
    use_threads(threads)
    # Errors show before the model is loaded.
    check_target(out, overwrite)
    page = report or out.with_name(f"{out.name}.html")
    check_report(page, out)
    examples = read_examples(data, exclusive=exclusive, text_field=text_field)
    watched_model, tokenizer = load_aloud(model, device, dtype, reads_texts=True)
    with progress_bar("states", total=1, unit="") as bar:

        def progress(n: int, total: int) -> None:
            bar.total = total
            bar.update(n - bar.n)

        trained = train_probes(
            watched_model,
            examples,
            out,
            tokenizer=tokenizer,
            settings=settings,
            outside=test,
            name=name or None,
            licence=licence,
            overwrite=overwrite,
            report=page,
            model_id=model,
            say=lambda line: None if as_json else say(line, error=True),
            progress=progress,
        )
    if as_json:
        answer({"directory": str(out), "report": str(page), "name": trained.pack.name, **trained.quality})
    else:
        _show(trained, out, page)


def _show(trained: Trained, out: Path, page: Path) -> None:
    from probemon.lab.training.card import verdict, warnings

    quality = trained.quality
    say(f"{out}: {trained.pack.name}, {counted(trained.pack.n_probes, 'probe')}; report in {page}")
    say(verdict(quality).replace("`", ""), *(warning.replace("`", "") for warning in warnings(quality)))
    say(
        "Areas (AUROC) on the test texts, which chose nothing; those by cross-validation above chose among layers."
        " False alarms: the share of test tokens without the concept that are over its alert threshold."
    )
    table = plain_table()
    table.add_column("concept", no_wrap=True, overflow="ellipsis")
    for head in ("AUROC", "95 %", "TPR at 1 %", "0.1 %", *_BASELINES.values(), *_CONTROLS.values(), "false alarms"):
        table.add_column(head, justify="right")
    for id, measured in list(quality["concepts"].items())[:_SHOWN]:
        interval = "–" if measured["low"] is None else f"{measured['low']:.3f} to {measured['high']:.3f}"
        alarms = measured["alert"]["test"]["without"]["rate"]
        rates = [measured["tpr_at_fpr"][rate] for rate in ("0.01", "0.001")]
        table.add_row(
            id,
            _number(measured["auroc"]),
            interval,
            *("too few" if rate is None else f"{rate['rate']:.2f}" for rate in rates),
            *(_number(measured["baselines"][key]) for key in _BASELINES),
            *(_number(measured[key]) for key in _CONTROLS),
            "–" if alarms is None else f"{alarms:.2%}",
        )
    terminal(width=max(_WIDTH, terminal().width)).print(table)
    if len(quality["concepts"]) > _SHOWN:
        say(f"and {len(quality['concepts']) - _SHOWN} more: --json, or quality in the manifest")


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}"

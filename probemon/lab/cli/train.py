"""The command train.

probemon train demo mails.jsonl --out mails/
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probemon.cli import options as opt
from probemon.cli.common import bytes_of, load_aloud, tokens_read, use_threads
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.host.chat_dates import CHAT_DATE
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.lab.training import Trained

_WIDTH = 140


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
        typer.Option(help="Layers to choose from, by cross-validation: auto (four of them), or numbers, as 8,12,16."),
    ] = "auto",
    method: Annotated[
        str,
        typer.Option(help="auto: choose how each concept is read; plain: only the layer is chosen, which is faster."),
    ] = "auto",
    aggregate: Annotated[
        str,
        typer.Option(
            help=(
                "The running score that a text is judged by: auto (a mean of logits, of 16 or 64 tokens), mean, max,"
                " attention[:T], ema:W, rolling_mean:N, rolling_max:N, rolling_logit:N."
            )
        ),
    ] = "auto",
    on: opt.On = None,
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
    holdout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Rows of DATA that are only tested on, such as group=g7 or author=a2; may be repeated.",
        ),
    ] = None,
    fpr: Annotated[float, typer.Option(help="Rate of false alarms on ordinary text.")] = 0.01,
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
    ordinary: Annotated[
        int,
        typer.Option(
            help="Ordinary texts, equally of all kinds, that train and set thresholds; more tell more; 0 for none."
        ),
    ] = 520,
    unknown_in: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONCEPT=KIND",
            help=(
                "A kind of ordinary text that may have the concept, such as promotion=advert: it is left out for it,"
                " and neither trains nor sets its threshold; may be repeated."
            ),
        ),
    ] = None,
    text_field: opt.TextField = "text",
    chat_format: opt.ChatFormat = "",
    encoding: opt.Encoding = "utf-8",
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

    Texts are judged by probes that saw neither them nor their group, pair or near duplicates; the pack learns from all.
    Thresholds come from ordinary text, which comes with probemon, so that alarms are as rare as the card says.
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
        held_out=_pairs("holdout", "FIELD=VALUE, such as author=a2", holdout or []),
        generate=generate,
        ordinary=ordinary,
        unknown_in=_pairs("unknown-in", "CONCEPT=KIND, such as promotion=advert", unknown_in or []),
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
    examples = read_examples(data, exclusive=exclusive, text_field=text_field, shape=chat_format, encoding=encoding)
    watched_model, tokenizer = load_aloud(model, device, dtype, reads_texts=True)
    with tokens_read() as progress:
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
        _show(trained, out, page, model)


def _pairs(option: str, wanted: str, choices: list[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for choice in choices:
        name, sign, value = choice.partition("=")
        if not (name.strip() and sign and value.strip()):
            raise typer.BadParameter(f"--{option} is {choice!r}: give {wanted}")
        values.setdefault(name.strip(), []).append(value.strip())
    return values


def _show(trained: Trained, out: Path, page: Path, model: str) -> None:
    from probemon.lab.training.card import elsewhere, needs, verdict, warnings, works

    quality = trained.quality
    say(*(sentence.replace("`", "") for sentence in verdict(quality)))
    _table(*works(quality))
    say(*(warning.replace("`", "") for warning in warnings(quality)))
    heads, rows = elsewhere(quality["concepts"], {id: id for id in quality["concepts"]})
    if rows:
        say("Elsewhere, on texts that neither trained nor chose anything:")
        _table(heads, rows)
    concept, found = next(iter(quality["concepts"].items()))
    read = found["reads"].replace("(", ":").rstrip(")")  # as an option names it
    heads, rows = needs(quality)
    if rows:
        say("How many texts would tell more:")
        _table(heads, rows)
    say(
        f"{out}: {trained.pack.name}, {counted(trained.pack.n_probes, 'probe')}; report in {page}",
        f"next: probemon watch {model} {out} --stop-on {concept} --aggregate {read} --prompt ...",
    )


def _table(heads: list[str], rows: list[list[str]]) -> None:
    table = plain_table()
    table.add_column(heads[0], no_wrap=True, overflow="ellipsis")
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    terminal(width=max(_WIDTH, terminal().width)).print(table)

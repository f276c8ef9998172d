"""The command analyze.

probemon analyze demo demo mails.jsonl --out scores/
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.common import MODEL_FIRST, load_aloud, make_manager, progress_bar, use_threads
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.errors import ConfigError
from probemon.host.loading import check_is_no_pack
from probemon.lab.cli.reading import window_of
from probemon.lab.corpora.documents import MAX_CHARS, UTF_8
from probemon.lab.corpora.windows import Reading
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.lab.corpora.analysis_folder import Analysis
    from probemon.lab.corpora.distributed import CorpusJob
    from probemon.lab.corpora.documents import Documents

_SHOWN = 10


def analyze(
    model: opt.Model,
    pack: opt.Pack,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help=(
                "A text file (a document a line), .jsonl, .parquet, .csv and others, also of chats, a folder (a file"
                " each), or - for standard input."
            ),
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="Folder for the analysis. An unfinished one with the same input and settings is continued."),
    ],
    more_packs: opt.MorePacks = None,
    floor: Annotated[
        str,
        typer.Option(
            help=(
                "Scores above it are written: a number, or 'fired' for the alert thresholds. 0.5 writes every score"
                " over one half, whether or not it fires."
            )
        ),
    ] = "fired",
    window: opt.WindowTokens = 0,
    overlap: opt.Overlap = -1,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch, with padding.")] = Reading.batch_tokens,
    special_tokens: Annotated[
        str, typer.Option(help="Special tokens before each text: bos, tokenizer (those that it adds) or none.")
    ] = Reading.special_tokens,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Read special tokens in the texts as such, not as characters.")
    ] = False,
    text_field: opt.TextField = "text",
    id_field: opt.IdField = "id",
    chat_format: opt.ChatFormat = "",
    encoding: opt.Encoding = UTF_8,
    on: opt.On = None,
    max_chars: Annotated[int, typer.Option(help="A longer document is recorded as bad.")] = MAX_CHARS,
    alert_set: opt.AlertSet = None,
    audit_rate: opt.AuditRate = 0.0,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Keep neither texts nor tokens (a report then shows none).")
    ] = False,
    ray: Annotated[
        int,
        typer.Option(help="Workers of a Ray cluster (or of this machine) to share the work; 0: this process alone."),
    ] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    strict: opt.Strict = False,
    as_json: opt.AsJson = False,
) -> None:
    """Score every token of a corpus and write the concepts of PACK above the floor to OUT, in parquet.

    With RANK and WORLD_SIZE in the environment, processes on one file system share the work.
    """
    from probemon.engine.kernels import check_device
    from probemon.lab.corpora.analysis_folder import check_target
    from probemon.lab.corpora.analyze import Tables, check_apart, kernel_of
    from probemon.lab.corpora.documents import Documents
    from probemon.packs.group import open_packs

    rank, world_size = _ranks()
    least: float | str = floor if floor == "fired" else _number("floor", floor)
    reading = Reading(
        window_of(window, overlap),
        batch_tokens,
        special_tokens=special_tokens,
        parse_special=parse_special,
        on=tuple(on or ()),
    )
    documents = Documents(source, text_field, id_field, max_chars, chat_format, encoding)
    check_device(device)
    use_threads(threads)
    check_is_no_pack(model, MODEL_FIRST)
    opened = open_packs([pack, *(more_packs or ())], alert_set)
    # Errors show before the model is loaded.
    check_apart(source, out)
    check_target(out)
    first = None if source == "-" else next(iter(documents), None)
    if source != "-" and first is None:
        raise ConfigError(f"{source} has no documents: there is nothing to score")
    if first is not None and first.shape:
        say(f"{source} is read as chats: {first.shape}", error=True)
    Tables(opened, least, not no_text)
    if ray:
        from probemon.lab.corpora.distributed import CorpusJob

        job = CorpusJob(
            model,
            [pack, *(more_packs or ())],
            str(out),
            device,
            dtype,
            None,
            {"audit_rate": audit_rate, "alert_set": alert_set},
            least,
            reading,
            not no_text,
            strict,
        )
        _report(_with_ray(job, documents, source, ray), out, as_json)
        return
    manager = make_manager(opened, device=device, audit_rate=audit_rate, **kernel_of(out))
    watched_model, tokenizer = load_aloud(model, device, dtype, reads_texts=True)
    with _progress(source) as progress:
        analysis = manager.analyze(
            watched_model,
            tokenizer,
            documents,
            out,
            resume=True,
            floor=least,
            reading=reading,
            keep_text=not no_text,
            strict=strict,
            rank=rank,
            world_size=world_size,
            progress=progress,
        )
    _report(analysis, out, as_json)


def _with_ray(job: CorpusJob, documents: Documents, source: str, workers: int) -> Analysis:
    from probemon.lab.corpora.distributed import analyze_dataset

    if workers < 0:
        raise ConfigError(f"--ray is {workers}: give 1 or more workers")
    with _progress(source) as progress:
        return analyze_dataset(documents, job, concurrency=workers, resume=True, progress=progress)


@contextmanager
def _progress(source: str) -> Iterator[Callable[[float, int], None]]:
    from probemon.lab.corpora.documents import count_documents

    n_tokens = 0
    with progress_bar("analyze", total=count_documents(source), postfix="{postfix}") as bar:

        def progress(documents: float, tokens: int) -> None:
            nonlocal n_tokens
            n_tokens += tokens
            bar.update(documents)
            rate = n_tokens / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{n_tokens} tokens, {rate:.0f} a second", refresh=False)

        try:
            yield progress
        except KeyboardInterrupt:
            say("", "probemon: interrupted; the same command goes on from here", error=True)
            raise


def _report(analysis: Analysis, out: Path, as_json: bool) -> None:
    if analysis.complete and not analysis.manifest["totals"]["documents"]:
        raise ConfigError("there was nothing to score: the input has no documents")
    if not analysis.complete:
        if as_json:
            answer({"directory": str(out), "complete": False})
        else:
            say(f"{out}: this process has done its part; the parts of other ranks are still missing")
    elif as_json:
        answer({"directory": str(out), "complete": True, **analysis.manifest["totals"]})
    else:
        _show(analysis)
    totals = analysis.manifest.get("totals", {})
    if analysis.complete and totals["documents"] == totals["bad_documents"] > 0:
        raise ConfigError(
            f"none of {counted(totals['documents'], 'document')} could be scored; the first:"
            f" {analysis.documents().column('reason')[0]}"
        )


def _show(analysis: Analysis) -> None:
    from probemon.core.scores import unlike
    from probemon.engine.audit import Audit
    from probemon.lab.corpora.documents import FURTHER
    from probemon.packs.strength import in_short

    totals, concepts = analysis.manifest["totals"], analysis.concepts()
    bad = (
        f", {totals['bad_documents']} bad ones left out (their reasons are in documents.parquet)"
        if totals["bad_documents"]
        else ""
    )
    say(
        f"{analysis.directory}: {counted(totals['documents'], 'document')}{bad},"
        f" {counted(totals['tokens'], 'token')}, {totals['unseen']}"
        f" unseen, {counted(totals['rows'], 'row')}"
    )
    reasons = analysis.documents(["reason"]).column("reason").to_pylist() if totals["bad_documents"] else []
    for reason in [one for one in reasons if one.startswith(FURTHER)][:_SHOWN]:
        say(f"caution: the rest of a file was not read: {reason.removeprefix(f'{FURTHER}: ')}")
    p, seen = len(concepts), max(1, totals["tokens"] - totals["unseen"])
    say(
        f"{counted(p, 'probe')}, {totals['active'] / seen:.0f} active and"
        f" {totals['evaluated'] / seen:.0f} evaluated a token, {totals['dropped']} dropped"
        + (f", {totals['excluded'] / seen:.0f} excluded" if totals.get("excluded") else "")
    )
    if caution := unlike(totals.get("far", 0), totals["tokens"] - totals["unseen"]):
        say(f"caution: {caution}")
    if totals.get("audit", {}).get("n_tokens"):
        say(f"audit: {Audit.of_totals(totals['audit'])}")
    floor, alert = analysis.manifest["identity"]["floor"], concepts.column("alert_threshold").to_numpy()
    if floor == "fired" and (n_bare := int((alert != alert).sum())):  # NaN
        them = "it" if n_bare == 1 else "them"
        say(
            f"{counted(n_bare, 'concept')} without an alert threshold: there are no rows of {them}, whatever the scores"
        )
    if floor == "fired" and (n_never := int((alert >= 1).sum())):
        have, it = ("has an alert threshold", "it") if n_never == 1 else ("have alert thresholds", "them")
        say(f"{counted(n_never, 'concept')} {have} of 1, which no score exceeds: there are no rows of {it}")
    if not totals["rows"]:
        say(f"no score was over the floor ({floor})")
        return
    table = plain_table()
    for name, side in (("concept", "left"), ("documents", "right"), ("tokens", "right"), ("highest", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = (
        concepts.sort_by([("n_documents", "descending"), ("n_tokens", "descending"), ("concept", "ascending")])
        .slice(0, _SHOWN)
        .to_pylist()
    )
    for row in rows:
        table.add_row(
            " > ".join(row["path"]), str(row["n_documents"]), str(row["n_tokens"]), in_short(row["max_score"], ".3f")
        )
    terminal().print(table)


def _ranks() -> tuple[int, int]:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None or not (rank.isdigit() and world_size.isdigit()):
        raise ConfigError(f"RANK is {rank!r} and WORLD_SIZE {world_size!r}: give both as numbers, or neither")
    return int(rank), int(world_size)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}: give a number, or 'fired'") from None

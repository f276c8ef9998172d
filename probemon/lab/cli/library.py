"""The commands library list, show, lint, try, evaluate, fit.

probemon library fit demo --concepts safety,privacy --out safety/
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.common import bytes_of, load_aloud, progress_bar, tokens_read, use_threads
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.errors import ConfigError
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.lab.library.fit import Fitted
    from probemon.lab.library.library import Library

library = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="List, check and fit concepts that ship.",
)

Concepts = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="Concepts, families or domains, with commas: safety,topic/society,refusal. Default: all."
    ),
]
Folder = Annotated[Path | None, typer.Option("--library", metavar="FOLDER", help="Another library than probemon's.")]
_SHOWN = 3  # pairs


@library.command("list")
def list_(concepts: Concepts = "", folder: Folder = None, as_json: opt.AsJson = False) -> None:
    """List the concepts, by family, with their definitions."""
    opened = _open(folder)
    chosen = [opened.concepts[id] for id in opened.chosen(_split(concepts))]
    if as_json:
        return answer({one.id: {"path": one.path, "definition": one.definition} for one in chosen})
    family = ""
    for one in chosen:
        if one.path != family:
            family = one.path
            say(family)
        say(f"  {one.id:22} {one.definition}")


@library.command()
def show(concept: Annotated[str, typer.Argument(metavar="CONCEPT")], folder: Folder = None) -> None:
    """Show a concept: its definition, its near cases, its texts, and some pairs."""
    from probemon.lab.library.library import TESTS, TEXTS
    from probemon.lab.library.lint import said

    opened = _open(folder)
    [id, *others] = opened.chosen([concept])
    if others:
        raise ConfigError(f"{concept} is a family of {counted(len(others) + 1, 'concept')}: give one (library list)")
    one = opened.concepts[id]
    say(f"{one.full}: {one.definition}", f"does not count: {one.counts_not}")
    rows, tests = list(opened.raw(TEXTS, id)), list(opened.raw(TESTS, id))
    authors = sorted({row["author"] for row in [*rows, *tests]})
    say(f"{counted(len(rows), 'text')} to train, {len(tests)} to test, by {', '.join(authors)}; read in {one.reading}s")
    for row in rows[: 2 * _SHOWN]:
        sign = "+" if id in row["present"] else "-"
        say(f"{sign} {said(row)}")


@library.command("lint")
def lint_(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Rows of one concept. Without it: the whole library.")
    ] = None,
    concept: Annotated[str, typer.Option(help="The concept; else the file's name.")] = "",
    folder: Folder = None,
    as_json: opt.AsJson = False,
) -> None:
    """Check texts of a concept: pairs, marks, lengths, and what gives a side away. Ends with 1 if a check fails."""
    from probemon.lab.library.lint import lint, problems
    from probemon.lab.training.example_files import read_rows

    opened = _open(folder)
    if file is None and concept:
        raise typer.BadParameter(f"--concept is {concept!r}, and there is no FILE whose rows are of it: give it, too")
    if file is None:
        found = problems(opened)
        answer({"problems": found}) if as_json else say(*(found or ["no problem"]))
        raise typer.Exit(int(bool(found)))
    id = concept or file.stem
    known = opened.concepts.get(id)
    findings = lint([row for _, row in read_rows(file)], id, by_words=known is not None and known.by_source)
    if as_json:
        answer({"checks": [vars(finding) for finding in findings]})
    else:
        table = plain_table()
        for head in ("", "check", "found", "bar"):
            table.add_column(head)
        for one in findings:
            table.add_row("ok" if one.holds else "!!", one.check, one.found, one.bar)
        terminal().print(table)
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


@library.command("try")
def try_(
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    pack: Annotated[str, typer.Option(help="A pack of `library fit`, for the model below.")],
    model: Annotated[str, typer.Option(help="The model that the pack was fitted to.")] = "demo",
    prompt: Annotated[str, typer.Option(help="What a user said before: TEXT is the assistant's answer.")] = "",
    dtype: opt.Dtype = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Say which concepts stand in TEXT, at the thresholds of one alarm in 100 ordinary texts."""
    from probemon.lab.library.trial import shown_in
    from probemon.packs.pack import ProbePack

    opened = ProbePack.from_pretrained(pack)
    loaded, tokenizer = load_aloud(model, "cpu", dtype, reads_texts=True)
    found = shown_in(text, opened, loaded, tokenizer, prompt=prompt)
    if as_json:
        return answer({"concepts": [vars(one) for one in found]})
    for one in found:
        if one.fires:
            say(f"{one.concept}: {one.score:.3f}, threshold {one.threshold:.3f}, at {one.at!r}")
    if not any(one.fires for one in found):
        near = ", ".join(f"{one.concept} {one.score:.3f} of {one.threshold:.3f}" for one in found[:3])
        say(f"no concept; nearest: {near}")


@library.command("evaluate")
def evaluate_(
    pack: Annotated[str, typer.Argument(metavar="PACK", help="A pack of `library fit`.")],
    model: Annotated[str, typer.Option(help="The model that the pack was fitted to.")] = "demo",
    concepts: Concepts = "",
    folder: Folder = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Judge PACK by the library's tests, which second authors wrote and which train nothing.

    Short tests stand alone; long ones are one or two sentences inside an ordinary text of the package, which may have
    trained without them.
    """
    from probemon.lab.library.evaluate import evaluate, inside_ordinary
    from probemon.packs.pack import ProbePack

    use_threads(threads)
    opened, own = _open(folder), ProbePack.from_pretrained(pack)
    has = {concept["id"] for concept in own.concepts}
    chosen = opened.chosen(_split(concepts))
    ids = [id for id in chosen if id in has]
    if concepts and (lacks := [id for id in chosen if id not in has]):
        say(f"not in {own.name}: {', '.join(lacks)}", error=True)
    rows = inside_ordinary(opened.tests(ids))
    if not rows:
        raise ConfigError(f"no test is of a chosen concept that {own.name} has: choose others, or another pack")
    watched, tokenizer = load_aloud(model, device, dtype, reads_texts=True)
    with progress_bar("tests", total=1, unit="") as bar:

        def progress(n: int, total: int) -> None:
            bar.total = total
            bar.update(n - bar.n)

        found = evaluate(own, watched, tokenizer, rows, progress=progress)
    found = {id: one for id, one in found.items() if id in ids}
    if as_json:
        return answer({"concepts": found})
    table = plain_table()
    for head in ("concept", "near cases", "found", "near cases over", "in other text", "found there", "over there"):
        table.add_column(head)
    for id, one in found.items():
        cells = [cell for name in ("short", "long") for cell in _figures_of(one[name])]
        table.add_row(id, *cells)
    terminal().print(table)
    say("near cases: AUROC; found and over: texts over the threshold of one alarm in 100 ordinary texts")


def _figures_of(one: Mapping[str, Any]) -> list[str]:
    """Return AUROC, texts found, and near cases over the threshold."""
    area = "–" if one["auroc"] is None else f"{one['auroc']:.2f}"
    return [area, *(f"{one[key]['count']} of {one[key]['n']}" for key in ("found", "near_over"))]


@library.command()
def fit(
    model: opt.Model,
    out: Annotated[Path, typer.Option(help="The new pack: a folder that does not exist.")],
    concepts: Concepts = "",
    language: Annotated[
        str, typer.Option(metavar="CODES", help="Languages of the texts, with commas: en,de. Default: all.")
    ] = "",
    pairs: Annotated[
        int, typer.Option(min=0, help="At most so many pairs of each author and concept; 0: all, which takes longer.")
    ] = 40,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Examples of your own, as `train` takes them; reported apart."),
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Layers to choose from: auto (four of them), or numbers, as 8,12.")
    ] = "auto",
    folder: Folder = None,
    states: Annotated[
        Path | None,
        typer.Option(help="A folder for hidden states, which another run reuses. Default: in probemon's cache."),
    ] = None,
    budget: Annotated[float, typer.Option(min=0.01, help="Size of the hidden states on disk, in GB.")] = 12.0,
    seed: Annotated[int, typer.Option(help="The same library, versions and seed give the same pack.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the pack; else that of its folder.")] = "",
    report: Annotated[Path | None, typer.Option(help="File of the report, an HTML page.")] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    overwrite: opt.OverwritePack = False,
    as_json: opt.AsJson = False,
) -> None:
    """Fit the library to MODEL, and keep the concepts that hold on it.

    The card says which work, which work with a warning, and which this model does not show. A run that was ended goes
    on where it was.
    """
    from probemon.lab.library.fit import fit as fit_library
    from probemon.lab.library.fit import fit_settings
    from probemon.packs.files import check_target

    settings = fit_settings(
        layers=int(layers) if layers.isdigit() else layers, states=states, budget=bytes_of(budget), seed=seed
    )
    use_threads(threads)
    check_target(out, overwrite)
    opened = _open(folder)
    chosen = _split(concepts)
    opened.chosen(chosen)
    watched, tokenizer = load_aloud(model, device, dtype, reads_texts=True)
    with tokens_read() as progress:
        fitted = fit_library(
            watched,
            out,
            tokenizer=tokenizer,
            library=opened,
            concepts=chosen,
            languages=_split(language),
            pairs=pairs,
            add=add,
            settings=settings,
            name=name or None,
            model_id=model,
            overwrite=overwrite,
            report=report,
            say=lambda line: None if as_json else say(line, error=True),
            progress=progress,
        )
    if as_json:
        of = {id: {"group": one.group, "reasons": list(one.reasons)} for id, one in fitted.of.items()}
        answer({"directory": str(out), "verdicts": of, **fitted.quality})
    else:
        _show(fitted, out, model)


def _show(fitted: Fitted, out: Path, model: str) -> None:
    from probemon.lab.library.card import GROUPS

    for group, (title, about) in GROUPS.items():
        ids = [id for id, one in fitted.of.items() if one.group == group]
        if ids:
            say(f"{title} ({len(ids)}). {about}", f"  {', '.join(ids)}")
    say(f"{out}: {counted(fitted.trained.pack.n_probes, 'probe')}; figures in {out / 'README.md'}")
    say(f"next: probemon watch {model} {out} --prompt ...")


def _open(folder: Path | None) -> Library:
    from probemon.lab.library.library import Library

    return Library.open(folder)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]

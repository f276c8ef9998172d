"""The command diff.

probemon diff before/ after/ --by max --fdr 0.01 --out diff.parquet
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probemon.cli.common import progress_bar
from probemon.cli.terminal import answer, plain_table, say, shorten_path, terminal
from probemon.core.scores import unlike
from probemon.errors import ConfigError
from probemon.util.counted import counted

if TYPE_CHECKING:
    from rich.table import Table

    from probemon.lab.corpora.compare import Comparison, ConceptDifference, Corpus

_PATH = 50  # columns of a path
_WIDTH = 140  # wide enough not to cut numbers


def diff(
    a: Annotated[Path, typer.Argument(metavar="DIR_A", help="An analysis: the folder that `probemon analyze` wrote.")],
    b: Annotated[
        Path, typer.Argument(metavar="DIR_B", help="The one to compare with it; of the same pack, model and settings.")
    ],
    by: Annotated[
        str,
        typer.Option(
            help="Compared value of a document: share (of its tokens over the floor) or max (whether any is over it)."
        ),
    ] = "share",
    fdr: Annotated[
        float,
        typer.Option(help="The false-discovery rate: the largest share of the listed concepts that may be chance."),
    ] = 0.05,
    resamples: Annotated[int, typer.Option(help="Resamples of the bootstrap.")] = 1000,
    confidence: Annotated[float, typer.Option(help="Confidence of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    rows: Annotated[int, typer.Option(help="Concepts shown of each direction, the largest effects first.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Write a row for every concept tested: a parquet file that does not exist.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with every concept tested.")] = False,
) -> None:
    """List the concepts that differ between two analyzed corpora: how much more of them B has than A."""
    from probemon.lab.corpora.analysis_folder import Analysis
    from probemon.lab.corpora.compare import check_new, compare

    if rows < 1:
        raise ConfigError(f"--rows is {rows}: give 1 or more")
    if out is not None:
        check_new(out)
    first, second = Analysis.open(a), Analysis.open(b)
    with progress_bar("diff", total=resamples, unit="") as bar:
        comparison = compare(
            first, second, by=by, fdr=fdr, resamples=resamples, confidence=confidence, seed=seed, progress=bar.update
        )
    if out is not None:
        comparison.write(out)
    if as_json:
        answer(comparison.stated())
    else:
        _show(comparison, rows)


def _show(comparison: Comparison, most: int) -> None:
    console = terminal(width=max(_WIDTH, terminal().width))
    say(_corpus("A", comparison.a))
    say(_corpus("B", comparison.b))
    for letter, corpus in (("A", comparison.a), ("B", comparison.b)):
        if caution := unlike(corpus.n_far, corpus.n_tokens):
            say(f"caution: in {letter} {caution}")
    if comparison.a.n_dropped or comparison.b.n_dropped:
        say(
            f"a limit dropped a probe at a token {comparison.a.n_dropped} times in A and {comparison.b.n_dropped} times"
            " in B; their scores are missing here (raise max_loaded_probes)"
        )
    over = "its alert threshold" if comparison.floor == "fired" else f"{comparison.floor:g}"
    quantity = {
        "share": f"share of a document's tokens with a score over {over}",
        "max": f"whether any token of a document has a score over {over}",
    }[comparison.by]
    say(
        f"compared: {quantity}; mean over documents in %, B minus A, with {100 * comparison.confidence:g} % bootstrap"
        " intervals"
    )
    listed = comparison.differing
    tested = (
        f"{counted(len(comparison.rows), 'concept')} tested, {comparison.n_never_over} never over the floor in either"
        + (f" ({comparison.n_mute} of them cannot be: no alert threshold, or 1)" if comparison.n_mute else "")
        + (f", {comparison.n_excluded} excluded" if comparison.n_excluded else "")
    )
    if not listed:
        lowest = f"; the lowest q is {comparison.rows[0].q:.3g}" if comparison.rows else ""
        say(
            f"no concept differs at a false-discovery rate of {comparison.fdr:g} ({tested}{lowest}). That does not show"
            " that the corpora are alike"
        )
        return
    say(f"{counted(len(listed), 'concept')} differ{'s' if len(listed) == 1 else ''} ({tested})")
    say(
        f"of those that differ, {100 * comparison.fdr:g} % at most are expected to be chance (false-discovery rate,"
        " Benjamini-Hochberg)"
    )
    explained = False
    for title, rows in (
        ("more in B", [row for row in listed if row.cliffs_delta > 0]),
        ("more in A", [row for row in listed if row.cliffs_delta < 0]),
    ):
        shown = sorted(rows, key=lambda row: (-abs(row.cliffs_delta), row.q, row.concept))[:most]
        explained |= any(row.explained_by for row in shown)
        if rows:
            console.print(_table(title, shown, len(rows)))
    if explained:
        say("< a narrower concept below it differs at least as much and may explain the difference")


def _corpus(letter: str, corpus: Corpus) -> str:
    left_out = [f"{n} {why}" for n, why in ((corpus.n_bad, "bad"), (corpus.n_unseen, "without a seen token")) if n]
    note = f" (left out: {', '.join(left_out)})" if left_out else ""
    n = corpus.n_documents + corpus.n_bad + corpus.n_unseen
    return (
        f"{letter}  {corpus.directory}: {corpus.n_documents} of {counted(n, 'document')} compared{note},"
        f" {counted(corpus.n_tokens, 'seen token')}, {corpus.median_tokens:g} in the median document"
    )


def _table(title: str, rows: Sequence[ConceptDifference], n: int) -> Table:
    caption = f"{title}: {n}" + (f", the largest {len(rows)} effects" if len(rows) < n else "")
    table = plain_table(title=caption, title_justify="left", title_style="bold")
    table.add_column("concept", no_wrap=True)
    for name in ("A %", "B %", "B - A", "B / A", "Cliff's delta", "q"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        a, b, difference, low, high = (
            100 * value for value in (row.mean_a, row.mean_b, row.difference, row.difference_low, row.difference_high)
        )
        below = f" < {row.explained_by}" if row.explained_by else ""
        table.add_row(
            " > ".join(shorten_path(row.path, _PATH - len(below))) + below,
            f"{a:.2f}",
            f"{b:.2f}",
            f"{difference:+.2f} ({low:+.2f} to {high:+.2f})",
            "only B" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.cliffs_delta:+.2f} ({row.delta_low:+.2f} to {row.delta_high:+.2f})",
            f"{row.q:.1g}",
            style="dim" if row.explained_by else "",
        )
    return table

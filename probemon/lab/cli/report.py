"""The command report.

probemon report scores/ --out mails.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probemon.cli import options as opt
from probemon.cli.terminal import answer, say
from probemon.lab.corpora.report import MAX_PAIRS, TEXT_MEGABYTES, write_report


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `probemon analyze` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: report.html in DIR.")] = None,
    text_megabytes: Annotated[
        float, typer.Option(help="Room for the texts with their tokens; the best documents of each concept come first.")
    ] = TEXT_MEGABYTES,
    max_pairs: Annotated[int, typer.Option(help="Documents listed by concept, all concepts together.")] = MAX_PAIRS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Write the analysis in DIR as one HTML file, to be opened in a browser; it loads nothing from anywhere."""
    from probemon.lab.corpora.analysis_folder import Analysis

    path = write_report(
        Analysis.open(directory), out, text_megabytes=text_megabytes, max_pairs=max_pairs, overwrite=overwrite
    )
    size = path.stat().st_size
    if as_json:
        answer({"file": str(path), "bytes": size})
    else:
        say(f"{path}: {size / 1e6:.1f} MB, opens in a browser")

"""Writes an analysis as one HTML file: overview, hierarchy, concepts over documents, documents with coloured tokens.

    path = write_report(Analysis.open("scores/"))                       # scores/report.html
    write_report(analysis, "mails.html", text_megabytes=60, overwrite=True)

The file loads nothing from anywhere. All it holds of the analysis is JSON, and its one script (`report_page/page.js`)
puts that into the page as text; what it shares with the page of a server lies in `util/page_code`. All documents are
listed. Texts with their tokens are in it as far as the budget goes: first the best document of each concept, then the
second best, and so on. Each text is a block of its own, read when it is opened.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.errors import ConfigError
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.one_script import one_script
from probemon.lab.corpora.report_data import ReportData, millionths
from probemon.util.checks import check_count, check_number
from probemon.util.files import replace_file
from probemon.util.templates import template_environment

TEXT_MEGABYTES, MAX_PAIRS = 16.0, 1_000_000


def write_report(
    analysis: Analysis,
    out: str | os.PathLike[str] | None = None,
    *,
    text_megabytes: float = TEXT_MEGABYTES,
    max_pairs: int = MAX_PAIRS,
    overwrite: bool = False,
) -> Path:
    """Write the report of an analysis and return its path.

    - `out`: the file, by default `report.html` in the analysis' folder.
    - `text_megabytes` (10**6 bytes): for the texts with their tokens, at most.
    - `max_pairs`: documents listed by concept, at most, the same number of best ones for every concept.
    - `overwrite`: whether a file that is there is replaced.

    The rest of the file grows with concepts and documents (about 60 bytes each document). Raises `ConfigError`.
    """
    target = analysis.directory / "report.html" if out is None else Path(out)
    text_megabytes = check_number(
        "text_megabytes", text_megabytes, low=0, remedy="give a number of megabytes, 0 for no texts"
    )
    max_pairs = check_count("max_pairs", max_pairs, remedy="give a whole number, 0 for no lists")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder: give the name of a file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists: pass overwrite (--overwrite) to replace it, or give another name")
    report = ReportData(analysis)
    blocks = dict(_blocks_within(report, int(text_megabytes * 1e6)))
    data = report.page_data(max_pairs, sorted(blocks))
    data["made"]["text_megabytes"] = text_megabytes
    _replace(target, _page(data, blocks))
    return target


# -- the page ------------------------------------------------------------------------------------

# What could end a script element or begin a comment in it, and what old JavaScript took for the end of a line.
_ESCAPED = re.compile("[<>&\u2028\u2029]")


def embed(value: Any) -> str:
    """Write a value as JSON that may stand in a script element, whatever its texts hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _page(data: dict[str, Any], blocks: dict[int, str]) -> str:
    folder, shared = (
        resources.files("probemon.lab.corpora") / "report_page",
        resources.files("probemon.util") / "page_code",
    )
    style = "\n".join(file.read_text(encoding="utf-8") for file in (shared / "colours.css", folder / "style.css"))
    script = one_script(folder / "page.js", shared)
    # Not 'unsafe-inline': only this script and style run, even where something got past the escaping.
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'; form-action"
        " 'none'"
    )
    json_blocks = [f'<script type="application/json" id="data">{embed(data)}</script>']
    json_blocks += [f'<script type="application/json" id="document-{d}">{blocks[d]}</script>' for d in sorted(blocks)]
    return (
        template_environment()
        .get_template("lab/corpora/report_page/page.html.j2")
        .render(
            policy=policy,
            title=f"{data['title']} ({data['pack']})",
            style=style,
            script=script,
            data="\n".join(json_blocks),
        )
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _replace(target: Path, text: str) -> None:
    partial = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=target.parent, prefix=f".{target.name}-", delete=False
        ) as stream:
            partial = Path(stream.name)
            stream.write(text)
        partial.chmod(0o666 & ~_umask())
        replace_file(partial, target)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror}): give a name in a folder that is there and may be written"
        ) from error
    finally:
        if partial is not None:
            with suppress(FileNotFoundError):
                partial.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# -- texts with their tokens ---------------------------------------------------------------------


def _blocks_within(report: ReportData, budget: int) -> Iterator[tuple[int, str]]:
    """Return the blocks of wanted documents that the budget has room for; one that is too large is passed over."""
    order = _wanted(report)
    text_bytes, n_rows = (
        np.asarray([0 if text is None else len(text.encode()) for text in report.documents.column("text").to_pylist()]),
        report.counts("n_rows"),
    )
    at_least = text_bytes + 4 * n_rows  # no block is smaller, so that few are made in vain
    room, candidates = budget, set[int]()
    for d in order:
        if at_least[d] <= room:
            room -= int(at_least[d])
            candidates.add(int(d))
    blocks = dict(_blocks(report, candidates))
    for d in order:
        if d in candidates and (size := len(blocks[d].encode())) <= budget:
            budget -= size
            yield int(d), blocks[d]


def _wanted(report: ReportData) -> Ints:
    """List scored documents by their best rank for any concept, then in the order of the input."""
    n = report.documents.num_rows
    place = np.full(n, np.iinfo(np.int64).max)
    np.minimum.at(place, report.pairs.document, report.pairs.rank)
    order = np.lexsort((np.arange(n), place))
    scored = np.asarray([not reason for reason in report.documents.column("reason").to_pylist()], dtype=bool)
    return order[scored[order]]


def _blocks(report: ReportData, documents: set[int]) -> Iterator[tuple[int, str]]:
    """Write some documents as JSON, each with all its rows; a shard is read at a time."""
    texts, analysis = report.documents.column("text"), report.analysis
    plain = ("document", "position", "start", "end", "token_id", "score")
    for shard in analysis.manifest["shards"]:
        wanted = sorted(documents.intersection(range(shard["first"], shard["first"] + shard["n_documents"])))
        if not wanted:
            continue
        table = Analysis(analysis.directory, {**analysis.manifest, "shards": [shard]}).scores(
            columns=[*plain, "token", "concept"]
        )
        columns = {name: table.column(name).to_numpy() for name in plain} | {
            "concept": report.numbers(table.column("concept"))
        }
        for d in wanted:
            begin, end = np.searchsorted(columns["document"], [d, d + 1])
            words = table.column("token").slice(begin, end - begin)
            yield (
                d,
                embed(
                    _block(
                        texts[d].as_py(),
                        words,
                        **{name: values[begin:end] for name, values in columns.items() if name != "document"},
                    )
                ),
            )


def _block(
    text: str | None, words: Any, *, position: Ints, start: Ints, end: Ints, token_id: Ints, concept: Ints, score: Any
) -> dict[str, Any]:
    """Make the page's block of a document's rows.

    - `t`: its text.
    - of each token over the floor, `p` its position and `s` its start in the text, as steps from the token before; `l`
      its length; `n` its rows. Where tokens cannot be shown in the text: `w` their own texts, `i` their ids.
    - of each row, `c` the concept and `v` the score.
    """
    first = np.flatnonzero(np.diff(position, prepend=-1))
    start, end = start[first].astype(np.int64), end[first].astype(np.int64)
    block = {
        "t": text,
        "p": np.diff(position[first], prepend=0).tolist(),
        "n": np.diff(np.append(first, len(position))).tolist(),
        "c": concept.tolist(),
        "v": millionths(score),
    }
    if text is None or (start < 0).any():
        return {**block, "w": [words[int(i)].as_py() for i in first], "i": token_id[first].tolist()}
    start, end = _utf16(text, start), _utf16(text, end)
    return {**block, "s": np.diff(start, prepend=0).tolist(), "l": (end - start).tolist()}


def _utf16(text: str, at: Ints) -> Ints:
    """Count places in a text as JavaScript does, where a character beyond 0xFFFF is two."""
    if not text or ord(max(text)) <= 0xFFFF:
        return at
    beyond = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) > 0xFFFF
    places: Ints = at + np.concatenate([[0], np.cumsum(beyond)])[at]
    return places

"""Writes an analysis as one HTML file: overview, hierarchy, concepts over documents, documents with coloured tokens.

    path = write_report(Analysis.open("scores/"))                       # scores/report.html

The file loads nothing: its data are JSON, which `report_page/page.js` inserts as text. Texts are included up to a
budget, the best documents of each concept first.
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
    """Write the report and return its path. Raises `ConfigError`.

    - `out`: default `report.html` in the analysis' folder.
    - `text_megabytes`: budget in 10**6 bytes for texts with tokens.
    - `max_pairs`: most documents listed by concept, in total.
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


# The page

# Could end a script element, begin a comment, or end a line in old JavaScript.
_ESCAPED = re.compile("[<>&\u2028\u2029]")


def embed(value: Any) -> str:
    """Return a value as JSON that is safe in a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _page(data: dict[str, Any], blocks: dict[int, str]) -> str:
    folder, shared = (
        resources.files("probemon.lab.corpora") / "report_page",
        resources.files("probemon.util") / "page_code",
    )
    style = "\n".join(file.read_text(encoding="utf-8") for file in (shared / "colours.css", folder / "style.css"))
    script = one_script(folder / "page.js", shared)
    # Only this script and style run, even if escaping fails.
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


# Texts with tokens


def _blocks_within(report: ReportData, budget: int) -> Iterator[tuple[int, str]]:
    order = _wanted(report)
    text_bytes, n_rows = (
        np.asarray([0 if text is None else len(text.encode()) for text in report.documents.column("text").to_pylist()]),
        report.counts("n_rows"),
    )
    at_least = text_bytes + 4 * n_rows  # lower bounds
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
    n = report.documents.num_rows
    place = np.full(n, np.iinfo(np.int64).max)
    np.minimum.at(place, report.pairs.document, report.pairs.rank)
    order = np.lexsort((np.arange(n), place))
    scored = np.asarray([not reason for reason in report.documents.column("reason").to_pylist()], dtype=bool)
    return order[scored[order]]


def _blocks(report: ReportData, documents: set[int]) -> Iterator[tuple[int, str]]:
    """Yield documents with all rows, reading one shard at a time."""
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
    """Return a document's block for the page.

    - `t`: text.
    - per token over the floor: `p` position and `s` start in the text (differences), `l` length, `n` rows; without
      offsets `w` token text, `i` id.
    - per row: `c` concept, `v` score.
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
    """Convert offsets to JavaScript's: characters beyond 0xFFFF count twice."""
    if not text or ord(max(text)) <= 0xFFFF:
        return at
    beyond = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) > 0xFFFF
    places: Ints = at + np.concatenate([[0], np.cumsum(beyond)])[at]
    return places

"""An analysis as one HTML file: overview, hierarchy, concepts over documents, and documents with their tokens coloured.

    path = write_report(Analysis.open("scores/"))                       # scores/report.html
    write_report(analysis, "mails.html", text_megabytes=60, overwrite=True)

The file asks for nothing from anywhere. All it holds of the analysis is JSON, and its one script
(`report_page/page.js`) puts that into the page as text. All documents are listed; the texts with their tokens are in it
as far as the budget goes, those first that are the best of a concept, then the second best, and so on: so the heads of
all lists can be read. Each text is a block of its own, read when it is opened.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from probemon.core.checks import check_count, check_number
from probemon.core.hierarchy import Ints
from probemon.engine.audit import Audit
from probemon.errors import ConfigError
from probemon.offline.analysis_folder import Analysis

TEXT_MEGABYTES, MAX_PAIRS = 16.0, 1_000_000
BINS = 100  # columns of the concepts over the documents
BEST = 3  # concepts named beside a document
_PER_DOCUMENT = ("active", "evaluated", "dropped", "not_reached")
_TOTALS = ("documents", "bad_documents", "tokens", "unseen", "rows", *_PER_DOCUMENT)


def write_report(
    analysis: Analysis,
    out: str | os.PathLike[str] | None = None,
    *,
    text_megabytes: float = TEXT_MEGABYTES,
    max_pairs: int = MAX_PAIRS,
    overwrite: bool = False,
) -> Path:
    """Write the report of an analysis to a file, `report.html` in its folder if none is given, and return its path.

    `text_megabytes` (10**6 bytes): for the texts with their tokens, at most; `max_pairs`: documents listed by concept,
    at most, the same number of best ones for every concept. The rest of the file grows with concepts and documents
    (about 60 bytes each document). Raises `ConfigError` for a file that is there (unless `overwrite`), and where it
    cannot be written.
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
    corpus = _Corpus(analysis)
    blocks = dict(_within(corpus, int(text_megabytes * 1e6)))
    data = corpus.page_data(max_pairs, sorted(blocks))
    data["made"]["text_megabytes"] = text_megabytes
    _replace(target, _page(data, blocks))
    return target


# -- the page ------------------------------------------------------------------------------------

# What could end a script element or begin a comment in it, and what JavaScript once took for the end of a line.
_ESCAPED = re.compile("[<>&\u2028\u2029]")


def embed(value: Any) -> str:
    """A value as JSON that may stand in a script element, whatever its texts hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _page(data: dict[str, Any], blocks: dict[int, str]) -> str:
    folder = resources.files("probemon.offline") / "report_page"
    page, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "style.css", "page.js")
    )
    # Not 'unsafe-inline': only this very script and style run, even where something got past the escaping.
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'; form-action"
        " 'none'"
    )
    json_blocks = [f'<script type="application/json" id="data">{embed(data)}</script>']
    json_blocks += [f'<script type="application/json" id="document-{d}">{blocks[d]}</script>' for d in sorted(blocks)]
    parts = {
        "policy": policy,
        "title": html.escape(f"{data['title']} ({data['pack']})"),
        "style": style,
        "script": script,
        "data": "\n".join(json_blocks),
    }
    # In one pass: what is put in may itself look like a place to put something.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _replace(target: Path, text: str) -> None:
    """The file whole or not at all."""
    partial = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=target.parent, prefix=f".{target.name}-", delete=False
        ) as stream:
            partial = Path(stream.name)
            stream.write(text)
        partial.chmod(0o666 & ~_umask())
        os.replace(partial, target)
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


# -- what is known of the corpus -----------------------------------------------------------------


@dataclass(frozen=True)
class _Pairs:
    """Documents by concept, best first: `ptr [P + 1]`, and `document`, `tokens` (over the floor), `highest` `[N]`;
    `rank [N]` within the concept.
    """

    ptr: Ints
    document: Ints
    tokens: Ints
    highest: Any
    rank: Ints

    @property
    def concept(self) -> Ints:
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))

    def best(self, at_most: int) -> tuple[_Pairs, int | None]:
        """The pairs of rank under k, for the largest k that makes no more than `at_most`; and k, or None where that is
        all.
        """
        if len(self.rank) <= at_most:
            return self, None
        k = int(np.searchsorted(np.cumsum(np.bincount(self.rank)), at_most, side="right"))
        kept = self.rank < k
        ptr = np.concatenate([[0], np.cumsum(np.bincount(self.concept[kept], minlength=len(self.ptr) - 1))])
        return _Pairs(ptr, self.document[kept], self.tokens[kept], self.highest[kept], self.rank[kept]), k


class _Corpus:
    """The tables of an analysis but the scores, as arrays."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.concepts = analysis.concepts().to_pydict()
        self.documents = analysis.documents()
        self.number = {name: i for i, name in enumerate(self.concepts["concept"])}
        # The first parent of a path is the one that stands first in the pack.
        self.parents = [sorted(self.number[parent] for parent in parents) for parents in self.concepts["parents"]]

    def counts(self, name: str) -> Ints:
        return np.asarray(self.documents.column(name).to_numpy(), dtype=np.int64)

    def numbers(self, column: Any) -> Ints:
        """Concept numbers of a column of ids."""
        codes = [
            np.asarray([self.number[name] for name in chunk.dictionary.to_pylist()], dtype=np.int64)[
                chunk.indices.to_numpy()
            ]
            for chunk in column.chunks
        ]
        return np.concatenate([np.zeros(0, np.int64), *codes])

    @cached_property
    def pairs(self) -> _Pairs:
        table = self.analysis.summary(["document", "concept", "n_tokens", "max_score"])
        document, tokens, highest = (table.column(name).to_numpy() for name in ("document", "n_tokens", "max_score"))
        concept = self.numbers(table.column("concept"))
        order = np.lexsort((document, -highest, concept))
        ptr = np.concatenate([[0], np.cumsum(np.bincount(concept, minlength=len(self.number)))]).astype(np.int64)
        rank = np.arange(len(order)) - np.repeat(ptr[:-1], np.diff(ptr))
        return _Pairs(ptr, document[order], tokens[order].astype(np.int64), highest[order], rank)

    def page_data(self, max_pairs: int, texts: list[int]) -> dict[str, Any]:
        """What the page holds beside the texts."""
        identity, manifest, concepts = self.analysis.manifest["identity"], self.analysis.manifest, self.concepts
        pack, host, floor, totals = (
            identity["pack"]["name"],
            identity["host"],
            identity["floor"],
            {**dict.fromkeys(_TOTALS, 0), **manifest["totals"]},
        )
        pairs, per_concept = self.pairs.best(max_pairs)
        reasons = {d: reason for d, reason in enumerate(self.documents.column("reason").to_pylist()) if reason}
        return {
            "title": f"Concepts in {totals['documents']:,} document{'s' * (totals['documents'] != 1)}",
            "pack": pack,
            "floor": floor,
            "watched": f"Probe pack {pack} on {host['model']} ({host['dtype']}, {host['device']})",
            "totals": {name: totals[name] for name in _TOTALS},
            "audit": str(Audit.of_totals(totals["audit"])) if "audit" in totals else "",
            "settings": [*_flat(identity), *_flat(manifest["environment"], "made with")],
            "made": {"per_concept": per_concept},
            "concepts": {
                "id": concepts["concept"],
                "name": concepts["name"],
                "level": concepts["level"],
                "parents": self.parents,
                "threshold": [
                    round(value, 5) if math.isfinite(value) else None for value in concepts["alert_threshold"]
                ],
                "documents": concepts["n_documents"],
                "tokens": concepts["n_tokens"],
                "highest": [round(x, 4) for x in concepts["max_score"]],
                "sum": [round(x, 4) for x in concepts["score_sum"]],
            },
            "documents": {
                "id": self.documents.column("doc_id").to_pylist(),
                "tokens": self.counts("n_tokens").tolist(),
                "unseen": self.counts("n_unseen").tolist(),
                "rows": self.counts("n_rows").tolist(),
                **{name: self.counts(name).tolist() for name in _PER_DOCUMENT},
                "best": self.best_of_documents(),
                "reasons": reasons,
                "texts": texts,
            },
            "pairs": {
                "ptr": pairs.ptr.tolist(),
                "document": pairs.document.tolist(),
                "tokens": pairs.tokens.tolist(),
                "highest": _thousandths(pairs.highest),
            },
            "heat": self.heat(),
        }

    def heat(self) -> dict[str, Any]:
        """Concepts over equal stretches of the input: tokens seen in each, tokens over the floor and highest score by
        concept (0 for one without any).
        """
        pairs, n, p = self.pairs, self.documents.num_rows, len(self.number)
        n_bins = min(n, BINS)
        seen = np.bincount(
            np.arange(n) * n_bins // max(1, n),
            weights=self.counts("n_tokens") - self.counts("n_unseen"),
            minlength=n_bins,
        )
        at = pairs.concept * n_bins + pairs.document * n_bins // max(1, n)
        tokens = np.bincount(at, weights=pairs.tokens, minlength=p * n_bins).astype(np.int64).reshape(p, n_bins)
        highest = np.zeros(p * n_bins, dtype=np.float32)
        np.maximum.at(highest, at, pairs.highest)
        fired = np.diff(pairs.ptr) > 0
        return {
            "seen": seen.astype(np.int64).tolist(),
            "tokens": [row.tolist() if some else 0 for row, some in zip(tokens, fired, strict=True)],
            "highest": [
                _thousandths(row) if some else 0 for row, some in zip(highest.reshape(p, n_bins), fired, strict=True)
            ],
        }

    def best_of_documents(self) -> list[list[int]]:
        """Of each document the concepts that exceed their threshold most (in logits; without one, by score), none above
        or below a stronger one.
        """
        pairs, by_document = self.pairs, [list[int]() for _ in range(self.documents.num_rows)]
        concept = pairs.concept
        strength = _strength(pairs.highest, np.asarray(self.concepts["alert_threshold"], dtype=np.float64)[concept])
        lines = self._ancestors()
        for i in np.lexsort((concept, -strength, pairs.document)):
            c, chosen = int(concept[i]), by_document[pairs.document[i]]
            if len(chosen) < BEST and not any(c in lines[other] or other in lines[c] for other in chosen):
                chosen.append(c)
        return by_document

    def _ancestors(self) -> list[frozenset[int]]:
        above = [frozenset[int]()] * len(self.parents)
        for c in range(len(above)):  # a probe is numbered after its parents
            above[c] = frozenset().union(*(above[parent] | {parent} for parent in self.parents[c]))
        return above


def _thousandths(scores: Any) -> list[int]:
    """Scores as whole numbers: three digits are more than a score means."""
    thousandths: list[int] = np.rint(np.asarray(scores, dtype=np.float64) * 1000).astype(np.int64).tolist()
    return thousandths


def _strength(score: Any, threshold: Any) -> Any:
    s, t = (np.clip(np.asarray(values, dtype=np.float64), 1e-6, 1 - 1e-6) for values in (score, threshold))
    return np.where(np.isnan(threshold), s, np.log(s) - np.log1p(-s) - np.log(t) + np.log1p(-t))


def _flat(value: Any, where: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [line for key, inner in value.items() for line in _flat(inner, f"{where}, {key}" if where else key)]
    return [(where, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


# -- texts with their tokens ---------------------------------------------------------------------


def _within(corpus: _Corpus, budget: int) -> Iterator[tuple[int, str]]:
    """Blocks of documents, as many as there is room for, in the order in which they are wanted; one that is too large
    is passed over.
    """
    order = _wanted(corpus)
    text_bytes, n_rows = (
        np.asarray([0 if text is None else len(text.encode()) for text in corpus.documents.column("text").to_pylist()]),
        corpus.counts("n_rows"),
    )
    at_least = text_bytes + 4 * n_rows  # what a block cannot be smaller than, to not make many in vain
    room, tried = budget, set[int]()
    for d in order:
        if at_least[d] <= room:
            room -= int(at_least[d])
            tried.add(int(d))
    blocks = dict(_blocks(corpus, tried))
    for d in order:
        if d in tried and (size := len(blocks[d].encode())) <= budget:
            budget -= size
            yield int(d), blocks[d]


def _wanted(corpus: _Corpus) -> Ints:
    """Scored documents, by the best place that they have among the documents of any concept, then in the order of the
    input.
    """
    n = corpus.documents.num_rows
    place = np.full(n, np.iinfo(np.int64).max)
    np.minimum.at(place, corpus.pairs.document, corpus.pairs.rank)
    order = np.lexsort((np.arange(n), place))
    scored = np.asarray([not reason for reason in corpus.documents.column("reason").to_pylist()], dtype=bool)
    return order[scored[order]]


def _blocks(corpus: _Corpus, documents: set[int]) -> Iterator[tuple[int, str]]:
    """The JSON of some documents, each with all its rows; a shard is read at a time."""
    texts, analysis = corpus.documents.column("text"), corpus.analysis
    plain = ("document", "position", "start", "end", "token_id", "score")
    for shard in analysis.manifest["shards"]:
        wanted = sorted(documents.intersection(range(shard["first"], shard["first"] + shard["n_documents"])))
        if not wanted:
            continue
        table = Analysis(analysis.directory, {**analysis.manifest, "shards": [shard]}).scores(
            columns=[*plain, "token", "concept"]
        )
        columns = {name: table.column(name).to_numpy() for name in plain} | {
            "concept": corpus.numbers(table.column("concept"))
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
    """A document for the page, of its rows: `t` its text; of each token over the floor `p` its position and `s` its
    start in the text, as steps from the token before, `l` its length, `n` its rows; of each row `c` the concept and `v`
    the score. Where tokens cannot be shown in the text: `w` their own texts, `i` their ids.
    """
    first = np.flatnonzero(np.diff(position, prepend=-1))
    start, end = start[first].astype(np.int64), end[first].astype(np.int64)
    whole = {
        "t": text,
        "p": np.diff(position[first], prepend=0).tolist(),
        "n": np.diff(np.append(first, len(position))).tolist(),
        "c": concept.tolist(),
        "v": _thousandths(score),
    }
    if text is None or (start < 0).any():
        return {**whole, "w": [words[int(i)].as_py() for i in first], "i": token_id[first].tolist()}
    start, end = _utf16(text, start), _utf16(text, end)
    return {**whole, "s": np.diff(start, prepend=0).tolist(), "l": (end - start).tolist()}


def _utf16(text: str, at: Ints) -> Ints:
    """Places in a text as JavaScript counts them, where a character beyond 0xFFFF is two."""
    if not text or ord(max(text)) <= 0xFFFF:
        return at
    beyond = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) > 0xFFFF
    places: Ints = at + np.concatenate([[0], np.cumsum(beyond)])[at]
    return places

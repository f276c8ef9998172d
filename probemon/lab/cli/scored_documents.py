"""Scores of every probe at every token of a source's documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.cli.common import progress_bar
from probemon.core.hierarchy import Ints, Mask
from probemon.core.request_counts import RequestCounts, RequestTraits
from probemon.errors import CalibrationError, ConfigError
from probemon.lab.corpora.windows import Reading
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.core.scores import Floats
    from probemon.lab.corpora.documents import Document
    from probemon.manager import DynamicProbeManager
    from probemon.packs.pack import ProbePack


_FIRST = 1000  # documents
_MOST_REASONS = 10
_LIKE_CONCEPTS = ("concept", "label", "labels")  # names of the field "concepts" in other tools


@dataclass
class ScoredDocuments:
    """The scored documents of a source."""

    source: str
    scores: list[Floats] = field(default_factory=list)  # [T, K] of the seen tokens
    documents: list[Document] = field(default_factory=list)
    bad: list[Document] = field(default_factory=list)
    sha256: str = ""
    requests: list[RequestTraits] = field(default_factory=list)

    @property
    def n_copies(self) -> int:
        """Documents whose text another one also has; bounds wrongly count them as independent."""
        return len(self.documents) - len({document.text for document in self.documents})

    @property
    def chat_date(self) -> str | None:
        """Date of the chats, or None."""
        return next((document.chat_date for document in self.documents if document.chat_date), None)

    @property
    def n_unseen(self) -> int:
        """Documents without a seen token."""
        return sum(not len(scores) for scores in self.scores)

    @classmethod
    def of(
        cls,
        manager: DynamicProbeManager,
        host: Any,
        tokenizer: Any,
        source: str,
        columns: Ints,
        label: str,
        *,
        reading: Reading,
        read: Callable[[str], Iterator[Document]],
    ) -> ScoredDocuments:
        from probemon.lab.corpora.corpus import score_documents
        from probemon.lab.corpora.documents import count_documents

        result, digest = cls(source), hashlib.sha256()
        no_alerts = np.full(manager.pack.n_probes, np.inf, dtype=np.float32)
        with progress_bar(label, total=count_documents(source)) as bar:
            scored_documents = score_documents(
                manager,
                host,
                tokenizer,
                read(source),
                reading=reading,
                exhaustive=True,
                progress=lambda documents, tokens: bar.update(documents),
            )
            for scored in scored_documents:
                if scored.scores is None or scored.everything is None:
                    result.bad.append(scored.document)
                    continue
                seen = np.flatnonzero(scored.scores.coverage.seen)
                everything = scored.everything.numpy()[seen]
                result.scores.append(everything[:, columns])
                if len(seen) == len(scored.everything) > 0 and scored.norms is not None:
                    result.requests.append(RequestTraits.of(everything, scored.norms.numpy(), no_alerts))
                result.documents.append(scored.document)
                digest.update(scored.document.text.encode() + b"\0")
        if not result.scores:
            raise _none_of(source, result.bad)
        result.sha256 = digest.hexdigest()
        return result

    def counts(self, alert: Floats) -> RequestCounts:
        """Count the fully seen documents as requests, by alert thresholds `[P]`."""
        return RequestCounts.of([replace(request, fired=request.highest > alert) for request in self.requests])

    def stated(self) -> dict[str, Any]:
        """Return a record. The hash is of the scored texts, each followed by a zero byte."""
        name = "standard input" if self.source == "-" else Path(self.source).name
        return {
            "source": name,
            "sha256_of_texts": self.sha256,
            "n_documents": len(self.scores),
            "n_bad": len(self.bad),
            "n_unseen": self.n_unseen,
            "n_copies": self.n_copies,
            "n_tokens": sum(map(len, self.scores)),
        }

    def left_out(self) -> dict[str, Any]:
        """Return counts and reasons of documents not fully scored."""
        reasons = [{"id": document.id, "reason": document.reason} for document in self.bad[:_MOST_REASONS]]
        n_partly_seen = len(self.scores) - self.n_unseen - len(self.requests)
        return {
            "n_bad": len(self.bad),
            "n_unseen": self.n_unseen,
            "n_partly_seen": n_partly_seen,
            "first_reasons": reasons,
        }

    def sentences(self, kind: str) -> list[str]:
        """Describe the scored documents, those left out, and copies."""
        n, n_tokens = len(self.scores) - self.n_unseen, sum(map(len, self.scores))
        left_out = ""
        if self.bad:
            left_out += (
                f", {counted(len(self.bad), 'bad one')} left out (first: {self.bad[0].id}: {self.bad[0].reason})"
            )
        if self.n_unseen:
            left_out += f", {self.n_unseen} left out without a seen token"
        lines = [f"{counted(n, f'{kind} document')} of {counted(n_tokens, 'token')}{left_out}"]
        if self.n_copies:
            are = "is a copy of another" if self.n_copies == 1 else "are copies of others"
            lines.append(
                f"{self.n_copies} of {len(self.scores)} {kind} documents {are}: the bounds count them as"
                " independent, so they are too narrow"
            )
        return lines

    def not_in_drift(self) -> str:
        """Return a sentence about documents missing in the drift reference, or ""."""
        n, n_all = len(self.requests), len(self.scores)
        reason = "the others have unseen tokens"
        return "" if n == n_all else f"the pack's drift reference has {n} of {n_all} documents: {reason}"

    def with_concepts(self, pack: ProbePack, watched: list[int]) -> Iterator[tuple[Floats, Mask | None]]:
        """Yield each document's scores and watched concepts, None without a field `concepts`."""
        for scores, document in zip(self.scores, self.documents, strict=True):
            concepts = concepts_of(document, pack)
            yield scores, None if concepts is None else np.isin(watched, concepts)


def concepts_of(document: Document, pack: ProbePack) -> list[int] | None:
    """Return the probes in a document's field `concepts`, or None. Raises `ConfigError`, `UnknownConcept`."""
    names = document.fields.get("concepts")
    if names is None:
        if similar := [name for name in _LIKE_CONCEPTS if name in document.fields]:
            raise ConfigError(
                f"document {document.id} has a field {similar[0]!r}, which is not read: name its concepts in a list"
                " 'concepts', or leave the field out if it has all watched concepts"
            )
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"document {document.id}: 'concepts' is {names!r}: give a list of concept ids")
    return [pack.find(name) for name in names]


def labelled(source: str, read: Callable[[str], Iterator[Document]]) -> str:
    """Return a warning if benign documents have labels, or ""."""
    for document in islice(read(source), _FIRST) if source != "-" else ():
        for name in ("concepts", *_LIKE_CONCEPTS):
            if document.fields.get(name):
                return (
                    f"{source}: document {document.id} has {name!r}, which is not read: every document of --benign is"
                    " taken to be without the watched concepts"
                )
    return ""


def check_readable(source: str, read: Callable[[str], Iterator[Document]]) -> None:
    """Raise `CalibrationError` if none of the first documents is readable."""
    if source == "-":  # readable only once
        return
    bad = []
    for document in islice(read(source), _FIRST):
        if not document.reason:
            return
        bad.append(document)
    raise _none_of(source, bad)


def _none_of(source: str, bad: list[Document]) -> CalibrationError:
    why = f": {bad[0].id}: {bad[0].reason}" if bad else ""
    return CalibrationError(f"{source} has no document that can be scored{why}")

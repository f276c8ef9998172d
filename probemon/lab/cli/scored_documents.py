"""ScoredDocuments: every probe's score at every token of a source's documents, for the command calibrate.

benign = ScoredDocuments.of(manager, model, tokenizer, "ordinary.jsonl", columns, "benign", reading=..., read=...)
benign.scores                                   # [T, K] of each document
"""

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
_MOST_REASONS = 10  # why a document was left out
_LIKE_CONCEPTS = ("concept", "label", "labels")  # what other tools call the field "concepts"


@dataclass
class ScoredDocuments:
    """The documents of a source, scored."""

    source: str
    scores: list[Floats] = field(default_factory=list)  # [T, K] of the tokens seen, in order
    documents: list[Document] = field(default_factory=list)
    bad: list[Document] = field(default_factory=list)  # those that could not be scored, with reasons
    sha256: str = ""
    requests: list[RequestTraits] = field(default_factory=list)  # each document as a request; see `counts`

    @property
    def n_copies(self) -> int:
        """Documents whose text another one has too: a bound counts them as independent, which they are not."""
        return len(self.documents) - len({document.text for document in self.documents})

    @property
    def chat_date(self) -> str | None:
        """The day that chats among the documents say it is, None where none says one."""
        return next((document.chat_date for document in self.documents if document.chat_date), None)

    @property
    def n_unseen(self) -> int:
        """Documents without a token that was seen, which are in no rate."""
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
        unknown = np.full(manager.pack.n_probes, np.inf, dtype=np.float32)  # what fires is said by `counts`
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
                    result.requests.append(RequestTraits.of(everything, scored.norms.numpy(), unknown))
                result.documents.append(scored.document)
                digest.update(scored.document.text.encode() + b"\0")
        if not result.scores:
            raise _none_of(source, result.bad)
        result.sha256 = digest.hexdigest()
        return result

    def counts(self, alert: Floats) -> RequestCounts:
        """Count the documents of which every token was seen, by alert thresholds `[P]`, as requests are counted."""
        return RequestCounts.of([replace(request, fired=request.highest > alert) for request in self.requests])

    def stated(self) -> dict[str, Any]:
        """For the record. The hash is of the texts that were scored, each with a zero byte after it."""
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
        """For `--json`: how many documents are in no rate, or only some of their tokens, and why the first are not."""
        reasons = [{"id": document.id, "reason": document.reason} for document in self.bad[:_MOST_REASONS]]
        n_partly_seen = len(self.scores) - self.n_unseen - len(self.requests)
        return {
            "n_bad": len(self.bad),
            "n_unseen": self.n_unseen,
            "n_partly_seen": n_partly_seen,
            "first_reasons": reasons,
        }

    def sentences(self, kind: str) -> list[str]:
        """Say how many documents of a kind were scored, which were left out and why, and whether some are copies."""
        n, n_tokens = len(self.scores) - self.n_unseen, sum(map(len, self.scores))
        left_out = ""
        if self.bad:
            left_out += (
                f", {counted(len(self.bad), 'bad one')} left out (first: {self.bad[0].id}: {self.bad[0].reason})"
            )
        if self.n_unseen:
            left_out += f", {self.n_unseen} left out without a token that was seen"
        said = [f"{counted(n, f'{kind} document')} of {counted(n_tokens, 'token')}{left_out}"]
        if self.n_copies:
            are = "is a copy of another" if self.n_copies == 1 else "are copies of others"
            said.append(
                f"{self.n_copies} of {len(self.scores)} {kind} documents {are}: the bounds take them as"
                " independent, so they are too narrow"
            )
        return said

    def not_in_drift(self) -> str:
        """Say how many scored documents are in no reference of drift; "" where all are."""
        n, n_all = len(self.requests), len(self.scores)
        others = "the others have tokens that were not seen"
        return "" if n == n_all else f"the pack's reference of drift is of {n} of {n_all} documents: {others}"

    def with_concepts(self, pack: ProbePack, watched: list[int]) -> Iterator[tuple[Floats, Mask | None]]:
        """Yield the scores of each document, and which watched concepts it has by its field `concepts`."""
        for scores, document in zip(self.scores, self.documents, strict=True):
            concepts = concepts_of(document, pack)
            yield scores, None if concepts is None else np.isin(watched, concepts)


def concepts_of(document: Document, pack: ProbePack) -> list[int] | None:
    """Probes that a document's field `concepts` names, None without one. Raises `ConfigError`, `UnknownConcept`."""
    stated = document.fields.get("concepts")
    if stated is None:
        if alike := [name for name in _LIKE_CONCEPTS if name in document.fields]:
            raise ConfigError(
                f"document {document.id} has a field {alike[0]!r}, which is not read: name its concepts in a list"
                " 'concepts', or leave the field out where it has all that are watched"
            )
        return None
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        raise ConfigError(f"document {document.id}: 'concepts' is {stated!r}: give a list of concept ids")
    return [pack.find(name) for name in stated]


def labelled(source: str, read: Callable[[str], Iterator[Document]]) -> str:
    """Return a sentence on the labels of documents that are all taken to be benign; "" where the first have none."""
    for document in islice(read(source), _FIRST) if source != "-" else ():
        for name in ("concepts", *_LIKE_CONCEPTS):
            if document.fields.get(name):
                return (
                    f"{source}: document {document.id} has {name!r}, which is not read: every document of --benign is"
                    " taken to be without the watched concepts"
                )
    return ""


def check_readable(source: str, read: Callable[[str], Iterator[Document]]) -> None:
    """Raise `CalibrationError` where none of the first documents of a file or folder can be read."""
    if source == "-":  # which can be read once
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

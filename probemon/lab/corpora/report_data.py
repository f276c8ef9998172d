"""Data of the report of an analysis, without the texts, as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.scores import unlike
from probemon.engine.audit import Audit
from probemon.host.chat_forms import PARTS
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.packs.strength import shortest, strength_or_score

BINS = 100  # columns over the documents
BEST = 3  # concepts for a document
_PER_DOCUMENT = ("active", "evaluated", "dropped", "not_reached", "excluded", "far")
_TOTALS = ("documents", "bad_documents", "tokens", "unseen", "rows", *_PER_DOCUMENT)


@dataclass(frozen=True)
class Pairs:
    """Documents by concept, best first: concept c has `ptr[c]` to `ptr[c + 1]` of the arrays `[N]`.

    `tokens`: over the floor; `highest`: score; `rank`: within the concept.
    """

    ptr: Ints
    document: Ints
    tokens: Ints
    highest: Any
    rank: Ints

    @property
    def concept(self) -> Ints:
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))

    def best(self, at_most: int) -> tuple[Pairs, int | None]:
        """Return the pairs of rank under k, for the largest k with `at_most` pairs, and k (None: all)."""
        if len(self.rank) <= at_most:
            return self, None
        k = int(np.searchsorted(np.cumsum(np.bincount(self.rank)), at_most, side="right"))
        is_best = self.rank < k
        ptr = np.concatenate([[0], np.cumsum(np.bincount(self.concept[is_best], minlength=len(self.ptr) - 1))])
        return Pairs(ptr, self.document[is_best], self.tokens[is_best], self.highest[is_best], self.rank[is_best]), k


class ReportData:
    """The tables of an analysis, without scores, as arrays."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.concepts = analysis.concepts().to_pydict()
        self.documents = analysis.documents()
        self.number = {name: i for i, name in enumerate(self.concepts["concept"])}
        # The first parent in the pack comes first.
        self.parents = [sorted(self.number[parent] for parent in parents) for parents in self.concepts["parents"]]

    def counts(self, name: str) -> Ints:
        return np.asarray(self.documents.column(name).to_numpy(), dtype=np.int64)

    def numbers(self, column: Any) -> Ints:
        codes = [
            np.asarray([self.number[name] for name in chunk.dictionary.to_pylist()], dtype=np.int64)[
                chunk.indices.to_numpy()
            ]
            for chunk in column.chunks
        ]
        return np.concatenate([np.zeros(0, np.int64), *codes])

    @cached_property
    def pairs(self) -> Pairs:
        table = self.analysis.summary(["document", "concept", "n_tokens", "max_score"])
        document, tokens, highest = (table.column(name).to_numpy() for name in ("document", "n_tokens", "max_score"))
        concept = self.numbers(table.column("concept"))
        order = np.lexsort((document, -highest, concept))
        ptr = np.concatenate([[0], np.cumsum(np.bincount(concept, minlength=len(self.number)))]).astype(np.int64)
        rank = np.arange(len(order)) - np.repeat(ptr[:-1], np.diff(ptr))
        return Pairs(ptr, document[order], tokens[order].astype(np.int64), highest[order], rank)

    def page_data(self, max_pairs: int, texts: list[int]) -> dict[str, Any]:
        identity, manifest, concepts = self.analysis.manifest["identity"], self.analysis.manifest, self.concepts
        pack, model, floor, totals = (
            identity["pack"]["name"],
            identity["host"],
            identity["floor"],
            {**dict.fromkeys(_TOTALS, 0), **manifest["totals"]},
        )
        pairs, per_concept = self.pairs.best(max_pairs)
        reasons = {d: reason for d, reason in enumerate(self.documents.column("reason").to_pylist()) if reason}
        return {
            "parts": PARTS,
            "title": f"Concepts in {totals['documents']:,} document{'s' * (totals['documents'] != 1)}",
            "pack": pack,
            "floor": floor,
            "watched": (
                f"Probe pack {pack} on {model['model']} ({model['dtype']}, {model['device']})"
                + (f", alert thresholds {identity['pack']['alert_set']}" if "alert_set" in identity["pack"] else "")
            ),
            "totals": {name: totals[name] for name in _TOTALS},
            "unlike": unlike(totals["far"], totals["tokens"] - totals["unseen"]),
            "audit": str(Audit.of_totals(totals["audit"])) if "audit" in totals else "",
            "settings": [*_lines_of(identity), *_lines_of(manifest["environment"], "made with")],
            "made": {"per_concept": per_concept},
            "concepts": {
                "id": concepts["concept"],
                "name": concepts["name"],
                "level": concepts["level"],
                "parents": self.parents,
                "threshold": [
                    shortest(value) if math.isfinite(value) else None for value in concepts["alert_threshold"]
                ],
                # Precision is unknown below the alert threshold.
                "precision": [
                    share if floor == "fired" or (threshold is not None and floor >= threshold) else None
                    for share, threshold in zip(concepts["precision"], concepts["alert_threshold"], strict=True)
                ],
                "documents": concepts["n_documents"],
                "tokens": concepts["n_tokens"],
                "highest": [shortest(x) for x in concepts["max_score"]],
                "excluded": [c for c, watched in enumerate(concepts["watched"]) if not watched],
                "sum": [round(x, 4) for x in concepts["score_sum"]],
                # A sparse list: most texts are no chats.
                "parts": {c: counts for c, counts in enumerate(concepts["n_by_part"]) if any(counts)},
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
                "highest": millionths(pairs.highest),
            },
            "heat": self.heat(),
        }

    def heat(self) -> dict[str, Any]:
        """Count seen tokens over equal parts of the input; by concept, tokens over the floor and highest score."""
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
                millionths(row) if some else 0 for row, some in zip(highest.reshape(p, n_bins), fired, strict=True)
            ],
        }

    def best_of_documents(self) -> list[list[int]]:
        """List the concepts of each document that most exceed their threshold, without ancestors of others."""
        pairs, by_document = self.pairs, [list[int]() for _ in range(self.documents.num_rows)]
        concept = pairs.concept
        threshold = np.asarray(self.concepts["alert_threshold"], dtype=np.float64)
        strength = strength_or_score(pairs.highest, threshold[concept])
        lines = self._ancestors()
        for i in np.lexsort((concept, -strength, pairs.document)):
            c, chosen = int(concept[i]), by_document[pairs.document[i]]
            if len(chosen) < BEST and not any(c in lines[other] or other in lines[c] for other in chosen):
                chosen.append(c)
        return by_document

    def _ancestors(self) -> list[frozenset[int]]:
        above = [frozenset[int]()] * len(self.parents)
        for c in range(len(above)):  # probes are numbered after their parents
            above[c] = frozenset().union(*(above[parent] | {parent} for parent in self.parents[c]))
        return above


def millionths(scores: Any) -> list[float]:
    """Return scores `[N]` in millionths, with more digits near 0 and 1, where logits change fast."""
    exact = np.asarray(scores, dtype=np.float64) * 1e6
    millionths: list[float] = np.rint(exact).astype(np.int64).tolist()
    for i in np.flatnonzero((exact > 0) & (exact < 1e3)):
        millionths[i] = float(f"{exact[i]:.4g}")
    for i in np.flatnonzero((exact > 999e3) & (exact < 1e6)):
        millionths[i] = round(float(exact[i]), 2)
    return millionths


def _lines_of(value: Any, where: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [line for key, inner in value.items() for line in _lines_of(inner, f"{where}, {key}" if where else key)]
    return [(where, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]

"""HTML of an analysis and of a comparison, for notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.scores import unlike
from probemon.engine.audit import Audit
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.compare import Comparison, is_mute
from probemon.packs.strength import strength_or_score
from probemon.util.static_html import fragment
from probemon.util.templates import macros

_PAGE = "lab/corpora/analysis.html.j2"
_MOST_CONCEPTS, _MOST_DIFFERING = 20, 20
_COVERAGE = ("active", "not_reached", "dropped")  # sum to all probes


def analysis_html(analysis: Analysis) -> str:
    """Return counts, coverage and the strongest concepts as HTML."""
    return fragment(f"Analysis {analysis.directory.name}", _parts(analysis))


def comparison_html(comparison: Comparison) -> str:
    """Return both corpora and the most different concepts as HTML."""
    return fragment("Comparison", _compared(comparison))


def _parts(analysis: Analysis) -> Iterator[str]:
    page, identity, totals = macros(_PAGE), analysis.manifest["identity"], analysis.manifest.get("totals")
    yield page.about(identity["pack"], identity["host"])
    if totals is None:
        yield page.unfinished()
        return
    n_seen = totals["tokens"] - totals["unseen"]
    audit = Audit.of_totals(totals["audit"]) if "audit" in totals else None
    yield page.counts(
        totals,
        identity["floor"],
        _shares(totals),
        evaluated=totals["evaluated"] / max(1, n_seen),
        audit=str(audit) if audit is not None and audit.n_tokens else "",
        caution=unlike(totals.get("far", 0), n_seen),
    )
    yield _strongest(analysis)


def _shares(totals: dict[str, Any]) -> str:
    n_pairs, excluded = sum(totals[name] for name in _COVERAGE), totals["excluded"]
    counts = {**totals, "not_reached": totals["not_reached"] - excluded, "excluded": excluded}
    names = [*_COVERAGE, *(["excluded"] if excluded else [])]
    return ", ".join(f"{counts[name] / max(1, n_pairs):.1%} {name.replace('_', ' ')}" for name in names)


def _most_below(concepts: dict[str, list[Any]], firing: list[int]) -> Ints:
    """Return `[P]`, the most documents of any `firing` concept below."""
    number = {concept: c for c, concept in enumerate(concepts["concept"])}
    most = np.zeros(len(number), dtype=np.int64)
    for c in firing:
        above = c
        while concepts["parents"][above]:
            above = min(number[parent] for parent in concepts["parents"][above])
            most[above] = max(most[above], concepts["n_documents"][c])
    return most


def _strongest(analysis: Analysis) -> str:
    page, concepts = macros(_PAGE), analysis.concepts().to_pydict()
    documents = np.asarray(concepts["n_documents"])
    highest, threshold = np.asarray(concepts["max_score"]), np.asarray(concepts["alert_threshold"], dtype=np.float64)
    over, bare, n_excluded = np.flatnonzero(documents), np.isnan(threshold), concepts["watched"].count(False)
    if not len(over):
        return page.none_over(n_excluded)
    strength = strength_or_score(highest, threshold)
    order = over[np.lexsort((over, -strength[over], bare[over]))]
    # Skip concepts that fire in no more documents than one below.
    below = _most_below(concepts, [c for c in over.tolist() if strength[c] > 0])
    order = np.asarray([c for c in order if documents[c] > below[c]], dtype=np.int64)
    rows = [
        (
            concepts["path"][c],
            f"{documents[c]:,}",
            f"{concepts['n_tokens'][c]:,}",
            f"{highest[c]:.2f}",
            "" if bare[c] else f"{strength[c]:+.1f}",
        )
        for c in order[:_MOST_CONCEPTS].tolist()
    ]
    never = np.asarray([is_mute(value) for value in concepts["alert_threshold"]])
    fired = analysis.manifest["identity"]["floor"] == "fired"
    n_mute = int(np.count_nonzero(never & np.asarray(concepts["watched"]))) if fired else 0
    return page.strongest(rows, len(over) - len(rows), len(documents) - len(over) - n_excluded, n_mute, n_excluded)


def _compared(comparison: Comparison) -> Iterator[str]:
    page = macros(_PAGE)
    for name, corpus in (("A", comparison.a), ("B", comparison.b)):
        yield page.compared(name, corpus, unlike(corpus.n_far, corpus.n_tokens))
    rows = [
        (
            row.path,
            f"{row.mean_a:.3%}",
            f"{row.mean_b:.3%}",
            f"{row.difference:+.3%} ({row.difference_low:+.3%} to {row.difference_high:+.3%})",
            f"{row.cliffs_delta:+.2f}",
            f"{row.q:.2g}",
        )
        for row in comparison.differing[:_MOST_DIFFERING]
    ]
    yield page.differing(comparison, rows)

"""An analysis, and two that are compared, as a notebook shows them.

analysis_html(analysis)         # what analysis._repr_html_() returns
comparison_html(comparison)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.scores import unlike
from probemon.engine.audit import Audit
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.compare import Comparison, is_mute
from probemon.lab.corpora.document_samples import Corpus
from probemon.packs.strength import strength_or_score
from probemon.util.harmless_text import clip
from probemon.util.static_html import element, fragment, path_of, table

_MOST_CONCEPTS, _MOST_DIFFERING = 20, 20
_COVERAGE = ("active", "not_reached", "dropped")  # of each token seen they make up all probes


def analysis_html(analysis: Analysis) -> str:
    """Return the HTML of an analysis: counts, coverage, the strongest concepts."""
    return fragment(f"Analysis {analysis.directory.name}", _parts(analysis))


def comparison_html(comparison: Comparison) -> str:
    """Return the HTML of a comparison: both corpora, and the concepts that differ most."""
    return fragment("Comparison", _compared(comparison))


def _parts(analysis: Analysis) -> Iterator[Element]:
    identity, totals = analysis.manifest["identity"], analysis.manifest.get("totals")
    pack, host = identity["pack"], identity["host"]
    by = f", alert thresholds {clip(str(pack['alert_set']), 60)}" if pack.get("alert_set") else ""
    watched = element("bdi", clip(str(host["model"]), 120))
    yield element(
        "p", "By ", element("bdi", clip(pack["name"], 120)), by, " on ", watched, f" ({clip(host['dtype'], 40)})"
    )
    if totals is None:
        yield element("p", "It is not finished: the same call again goes on where it ended.")
        return
    counts = f"{totals['documents']:,} documents, {totals['bad_documents']:,} of them not scored; "
    counts += (
        f"{totals['tokens']:,} tokens, {totals['unseen']:,} of them unseen; {totals['rows']:,} scores over the floor"
    )
    yield element("p", counts, f" ({clip(str(identity['floor']), 40)})")
    yield _coverage(totals)
    if caution := unlike(totals.get("far", 0), totals["tokens"] - totals["unseen"]):
        yield element("p", f"Caution: {caution}.")
    yield from _strongest(analysis)


def _coverage(totals: dict[str, Any]) -> Element:
    n_seen, n_pairs = totals["tokens"] - totals["unseen"], sum(totals[name] for name in _COVERAGE)
    excluded = totals["excluded"]
    counts = {**totals, "not_reached": totals["not_reached"] - excluded, "excluded": excluded}
    names = [*_COVERAGE, *(["excluded"] if excluded else [])]
    shares = ", ".join(f"{counts[name] / max(1, n_pairs):.1%} {name.replace('_', ' ')}" for name in names)
    evaluated = f"{totals['evaluated'] / max(1, n_seen):,.1f} probes evaluated a token"
    audited = Audit.of_totals(totals["audit"]) if "audit" in totals else None
    audit = f" Audit: {audited}." if audited is not None and audited.n_tokens else ""
    return element("p", f"Coverage: of the probes, at the mean token, {shares}; {evaluated}.{audit}", kind="dim")


def _most_below(concepts: dict[str, list[Any]], firing: list[int]) -> Ints:
    """Return for each concept `[P]` in how many documents that of the `firing` ones below it on a path is which is in
    most.
    """
    number = {concept: c for c, concept in enumerate(concepts["concept"])}  # names may come twice
    most = np.zeros(len(number), dtype=np.int64)
    for c in firing:
        above = c
        while concepts["parents"][above]:
            above = min(number[parent] for parent in concepts["parents"][above])  # the first one
            most[above] = max(most[above], concepts["n_documents"][c])
    return most


def _strongest(analysis: Analysis) -> Iterator[Element]:
    concepts = analysis.concepts().to_pydict()
    documents = np.asarray(concepts["n_documents"])
    highest, threshold = np.asarray(concepts["max_score"]), np.asarray(concepts["alert_threshold"], dtype=np.float64)
    over, bare = np.flatnonzero(documents), np.isnan(threshold)
    if not len(over):
        yield element("p", f"No concept was over the floor{_excluded(concepts['watched'].count(False))}.")
        return
    strength = strength_or_score(highest, threshold)
    order = over[np.lexsort((over, -strength[over], bare[over]))]  # without a threshold there is a score only
    # A concept that fires in no more documents than one below it says nothing beside it.
    below = _most_below(concepts, [c for c in over.tolist() if strength[c] > 0])
    order = np.asarray([c for c in order if documents[c] > below[c]], dtype=np.int64)
    rows = [
        (
            path_of(concepts["path"][c]),
            f"{documents[c]:,}",
            f"{concepts['n_tokens'][c]:,}",
            f"{highest[c]:.2f}",
            "" if bare[c] else f"{strength[c]:+.1f}",
        )
        for c in order[:_MOST_CONCEPTS].tolist()
    ]
    heads = ["concepts, the strongest first", "documents", "tokens", "highest score", "strength there"]
    yield table(heads, rows, numbers=(1, 2, 3, 4))
    n_excluded = concepts["watched"].count(False)
    never = np.asarray([is_mute(value) for value in concepts["alert_threshold"]])
    fired = analysis.manifest["identity"]["floor"] == "fired"
    n_mute = int(np.count_nonzero(never & np.asarray(concepts["watched"]))) if fired else 0
    n_never = len(documents) - len(over) - n_excluded
    left = (
        f"{len(over) - len(rows):,} more were over the floor (those among them that are in no more documents than one"
        f" below them), {n_never:,} never{_mute(n_mute)}{_excluded(n_excluded)}: analysis.concepts() has all."
    )
    yield element("p", left, kind="dim")


def _mute(n: int) -> str:
    return f" ({n:,} of them cannot be: no alert threshold, or one of 1)" if n else ""


def _excluded(n: int) -> str:
    return f"; {n:,} were excluded, and nothing is known of them" if n else ""


def _compared(comparison: Comparison) -> Iterator[Element]:
    for name, corpus in (("A", comparison.a), ("B", comparison.b)):
        yield _corpus(name, corpus)
        if caution := unlike(corpus.n_far, corpus.n_tokens):
            yield element("p", f"Caution: in {name} {caution}.")
    differing = comparison.differing
    what = "tokens over the floor" if comparison.by == "share" else "documents whose maximum is over the floor"
    yield element(
        "p",
        f"{len(differing):,} of {len(comparison.rows):,} concepts differ in their share of {what}, with a"
        f" false-discovery rate of at most {comparison.fdr:g}; {comparison.n_never_over:,} were over it in neither"
        f"{_mute(comparison.n_mute)}"
        f"{_excluded(comparison.n_excluded)}.",
    )
    if not differing:
        return
    rows = [
        (
            path_of(row.path),
            f"{row.mean_a:.3%}",
            f"{row.mean_b:.3%}",
            f"{row.difference:+.3%} ({row.difference_low:+.3%} to {row.difference_high:+.3%})",
            f"{row.cliffs_delta:+.2f}",
            f"{row.q:.2g}",
        )
        for row in differing[:_MOST_DIFFERING]
    ]
    interval = f"B minus A ({comparison.confidence:.0%} interval)"
    yield table(["concept", "A", "B", interval, "Cliff's delta", "q"], rows, numbers=range(1, 6))
    if len(differing) > len(rows):
        yield element("p", f"{len(differing) - len(rows):,} more differ: comparison.differing has all.", kind="dim")


def _corpus(name: str, corpus: Corpus) -> Element:
    left_out = corpus.n_bad + corpus.n_unseen
    return element(
        "p",
        f"{name}: ",
        element("bdi", clip(corpus.directory, 200)),
        f", {corpus.n_documents:,} documents compared, {left_out:,} left out; {corpus.n_tokens:,} seen tokens",
    )

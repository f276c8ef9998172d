"""A result as a notebook shows it: coverage, the text in the colours of its concepts, what each sentence is about.

result_html(result)         # what result._repr_html_() returns
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from xml.etree.ElementTree import Element

import numpy as np

from probemon.core.scores import GENERATED, PHASES, Coverage, unlike
from probemon.monitor.result import ConceptScore, Result, ranked, told_reasons, without_thresholds
from probemon.monitor.summary import Stretch, lower_thresholds, nothing_listed, summarise
from probemon.monitor.token_html import token_span
from probemon.packs.group import told_of_never
from probemon.util.harmless_text import clip
from probemon.util.static_html import Colours, element, fragment, path_of, size_of, table

_TEXT_BYTES = 150_000  # of all rows together
_MOST_ROWS, _MOST_SENTENCES, _MOST_CONCEPTS, _MOST_REASONS = 8, 40, 12, 5
_MOST_TOKENS = 6_000  # looked at on each side of where the answer begins
_MOST_SUMMARISED = 20_000  # tokens of a row
_WORDS = (
    'Strength is the logit of a score minus that of its alert threshold; "right" is the share of what a concept fires'
    " at that was right where the pack was calibrated."
)


def result_html(result: Result) -> str:
    """Return the HTML of a result. Of a long one the beginning of each answer and the end of its prompt are shown."""
    return fragment("Result", _parts(result))


def _parts(result: Result) -> Iterator[Element]:
    yield from _coverage(result)
    colours = Colours()
    rows = sorted(set(result.row.tolist()))
    shown = rows[:_MOST_ROWS]
    for row in shown:
        if len(rows) > 1:
            request = f", request {clip(result.requests[row], 80)}" if result.requests else ""
            yield element("p", element("b", f"Row {row}{request}"))
        yield from _text(colours, result, row, _TEXT_BYTES // len(shown))
        yield from _summary(result, row, max(5, _MOST_SENTENCES // len(shown)))
    if len(rows) > len(shown):
        yield element("p", f"{len(rows) - len(shown):,} more rows are left out: result.top(row=...) tells of each.")


def _coverage(result: Result) -> Iterator[Element]:
    cover, host = result.coverage, result.host
    n_generated, n_seen = int((result.phase == GENERATED).sum()), len(result) - cover.n_unseen
    counts = f"{len(result):,} tokens, {n_generated:,} of them generated, by "
    on = "" if host is None else f" on {clip(host.model, 120)} ({clip(host.dtype, 40)})"
    yield element("p", counts, element("bdi", clip(result.pack.name, 120)), on)
    means = {name: getattr(cover, name).sum() / max(1, n_seen) for name in ("active", "evaluated")}
    why = "; ".join(told_reasons(cover.unseen, _MOST_REASONS))
    yield element(
        "p",
        f"Coverage: of {cover.n_probes:,} probes {means['active']:,.1f} active and {means['evaluated']:,.1f} evaluated"
        f" a token, {int(cover.dropped.sum()):,} dropped in all{_left_out(cover, n_seen)}. Unseen tokens:"
        f" {cover.n_unseen:,}"
        f"{f' ({why})' if why else ''}",
        kind="dim",
    )
    if caution := unlike(int(cover.far.sum()), n_seen):
        yield element("p", f"Caution: {caution}.")


def _left_out(cover: Coverage, n_seen: int) -> str:
    """What was looked at by nobody's wish, and what a budget left out."""
    words, n_shed = "", int(np.count_nonzero(cover.shed))
    if cover.excluded.any():
        words += f", {cover.excluded.sum() / max(1, n_seen):,.1f} excluded a token, of which nothing is known"
    if n_shed:
        words += f"; at {n_shed:,} token{'s' if n_shed > 1 else ''} a budget left out some of what is watched"
    return words


def _text(colours: Colours, result: Result, row: int, budget: int) -> Iterator[Element]:
    """Yield the tokens of a row by phase, and what of them is left out."""
    tokens = result.tokens_of(row)
    begin = int(np.argmax(result.phase[tokens] == GENERATED)) if len(tokens) else 0  # 0 where nothing was generated
    first, stop = max(0, begin - _MOST_TOKENS), min(len(tokens), begin + _MOST_TOKENS)
    window = tokens[first:stop]
    texts = result.texts(window)
    made = dict[int, Element]()
    # The answer from its beginning, then the prompt from its end.
    for place in (*range(begin - first, len(window)), *range(begin - first - 1, -1, -1)):
        span = _span(colours, result, int(window[place]), texts[place])
        budget -= size_of(span)
        if budget < 0:
            break
        made[place] = span
    places = sorted(made)
    if places and first + places[0] > 0:
        yield element("p", f"The first {first + places[0]:,} tokens are left out.", kind="dim")
    for phase, group in itertools.groupby(places, lambda place: int(result.phase[window[place]])):
        yield element("p", PHASES[phase], kind="dim")
        yield element("div", *(made[place] for place in group), kind="text", dir="auto")
    n_after = len(tokens) - (first + places[-1] + 1 if places else 0)
    if n_after:
        yield element("p", f"The last {n_after:,} tokens are left out.", kind="dim")
    if colours.hues:
        yield colours.legend()


def _span(colours: Colours, result: Result, token: int, text: str) -> Element:
    leading = result.leading(token, 3)
    best = [] if leading else ranked(result.pack, result.scores, token, 2)
    shown, unseen = text or result.where(token)["token"], result.coverage.unseen[token]
    return token_span(colours, shown, leading, best, unseen=unseen, own=not text)


def _summary(result: Result, row: int, most: int) -> Iterator[Element]:
    phase = "generated" if (result.phase[result.tokens_of(row)] == GENERATED).any() else "prompt"
    n_tokens = len(result.tokens_of(row, phase))
    if n_tokens > _MOST_SUMMARISED:
        yield element("p", f"What {n_tokens:,} tokens are about is left out: summarise(result, {row}) tells it.")
        return
    summary = summarise(result, row, phase=phase, k=3)
    if len(summary.sentences) > 1:
        rows = [_sentence(sentence) for sentence in summary.sentences[:most]]
        yield table(["sentence", "concepts that fired"], rows)
        if len(summary.sentences) > most:
            yield element("p", f"and {len(summary.sentences) - most:,} more sentences", kind="dim")
    mute = without_thresholds(result.pack)
    if mute.any():
        best = [concept for concept in result.top(result.pack.n_probes, row, phase=phase) if mute[concept.probe]]
        heads = ["ranked, not firing, since the pack has no alert threshold", "strongest at", "right", "score"]
        yield table(heads, [_line(concept) for concept in best[:_MOST_CONCEPTS]], numbers=(2, 3))
    if mute.all():
        return
    if n_bare := int(result.pack.alert_threshold.isnan().sum()) - int(mute.sum()):
        have = "concept has" if n_bare == 1 else "concepts have"
        yield element("p", f"{n_bare:,} {have} no alert threshold: nothing says when they fire.", kind="dim")
    if never := told_of_never(result.pack):
        yield element("p", f"{never}.", kind="dim")
    whole = "the answer" if phase == "generated" else "the text"
    if not summary.answer.concepts:
        yield element("p", nothing_listed(summary.answer, whole), kind="dim")
        return
    heads = [f"in {whole}, the strongest first", "strongest at", "right", "strength"]
    yield element("p", " ".join([_WORDS, *([lower_thresholds(summary)] if summary.n_lower else [])]), kind="dim")
    yield table(heads, [_line(concept) for concept in summary.answer.concepts[:_MOST_CONCEPTS]], numbers=(2, 3))
    if len(summary.answer.concepts) > _MOST_CONCEPTS:
        yield element("p", f"and {len(summary.answer.concepts) - _MOST_CONCEPTS:,} more concepts", kind="dim")


def _sentence(sentence: Stretch) -> tuple[Element, str | Element]:
    names = ", ".join(clip(concept.name, 60) for concept in sentence.concepts)
    more = f" and {sentence.n_more:,} more" if sentence.n_more else ""
    return element("bdi", clip(" ".join(sentence.text.split()), 300)), names + more


def _line(concept: ConceptScore) -> tuple[Element, Element, str, str]:
    precision = "" if np.isnan(concept.precision) else f"{concept.precision:.0%}"
    strength = f"{concept.score:.2f}" if np.isnan(concept.strength) else f"{concept.strength:+.1f}"
    return (
        path_of(concept.path),
        element("bdi", clip(concept.token.strip() or repr(concept.token), 40)),
        precision,
        strength,
    )

"""HTML of a result for notebooks: coverage, coloured text, concepts by sentence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from probemon.core.scores import GENERATED, PHASES, unlike
from probemon.monitor.result import ConceptScore, Result, ranked, told_reasons, without_thresholds
from probemon.monitor.summary import Stretch, lower_thresholds, nothing_listed, summarise
from probemon.monitor.token_html import token_span
from probemon.packs.group import told_of_never
from probemon.util.harmless_text import clip
from probemon.util.static_html import Colours, fragment
from probemon.util.templates import macros

_TEXT_BYTES = 150_000  # of all rows
_MOST_ROWS, _MOST_SENTENCES, _MOST_CONCEPTS, _MOST_REASONS = 8, 40, 12, 5
_MOST_TOKENS = 6_000  # on each side of the answer's beginning
_MOST_SUMMARISED = 20_000  # tokens of a row
_PAGE = "monitor/result.html.j2"


def result_html(result: Result) -> str:
    """Return a result's HTML; long texts keep what is around the answer's beginning."""
    return fragment("Result", _parts(result))


def _parts(result: Result) -> Iterator[str]:
    page, colours = macros(_PAGE), Colours()
    yield _coverage(result)
    rows = sorted(set(result.row.tolist()))
    shown = rows[:_MOST_ROWS]
    for row in shown:
        if len(rows) > 1:
            yield page.heading(row, result.requests[row] if result.requests else "")
        yield from _text(colours, result, row, _TEXT_BYTES // len(shown))
        yield from _summary(result, row, max(5, _MOST_SENTENCES // len(shown)))
    if len(rows) > len(shown):
        yield page.rows_left_out(len(rows) - len(shown))


def _coverage(result: Result) -> str:
    cover, n_seen = result.coverage, len(result) - result.coverage.n_unseen
    return macros(_PAGE).coverage(
        len(result),
        int((result.phase == GENERATED).sum()),
        result.pack.name,
        result.host,
        cover,
        n_seen,
        n_shed=int(np.count_nonzero(cover.shed)),
        reasons=told_reasons(cover.unseen, _MOST_REASONS),
        caution=unlike(int(cover.far.sum()), n_seen),
    )


def _text(colours: Colours, result: Result, row: int, budget: int) -> Iterator[str]:
    """Yield a row's tokens by phase, with notes on omissions."""
    page, tokens = macros(_PAGE), result.tokens_of(row)
    begin = int(np.argmax(result.phase[tokens] == GENERATED)) if len(tokens) else 0  # 0 without an answer
    first, stop = max(0, begin - _MOST_TOKENS), min(len(tokens), begin + _MOST_TOKENS)
    window = tokens[first:stop]
    texts = result.texts(window)
    spans = dict[int, str]()
    # The answer forwards, then the prompt backwards.
    for place in (*range(begin - first, len(window)), *range(begin - first - 1, -1, -1)):
        span = _span(colours, result, int(window[place]), texts[place])
        budget -= len(span.encode())
        if budget < 0:
            break
        spans[place] = span
    places = sorted(spans)
    if places and first + places[0] > 0:
        yield page.left_out("first", first + places[0])
    for phase, group in itertools.groupby(places, lambda place: int(result.phase[window[place]])):
        yield page.text([spans[place] for place in group], PHASES[phase])
    n_after = len(tokens) - (first + places[-1] + 1 if places else 0)
    if n_after:
        yield page.left_out("last", n_after)
    if colours.hues:
        yield colours.legend()


def _span(colours: Colours, result: Result, token: int, text: str) -> str:
    leading = result.leading(token, 3)
    best = [] if leading else ranked(result.pack, result.scores, token, 2)
    shown, unseen = text or result.where(token)["token"], result.coverage.unseen[token]
    return token_span(colours, shown, leading, best, unseen=unseen, own=not text)


def _summary(result: Result, row: int, most: int) -> Iterator[str]:
    page, pack = macros(_PAGE), result.pack
    phase = "generated" if (result.phase[result.tokens_of(row)] == GENERATED).any() else "prompt"
    n_tokens = len(result.tokens_of(row, phase))
    if n_tokens > _MOST_SUMMARISED:
        yield page.not_summarised(n_tokens, row)
        return
    summary = summarise(result, row, phase=phase, k=3)
    if len(summary.sentences) > 1:
        yield page.sentences(
            [_sentence(sentence) for sentence in summary.sentences[:most]], len(summary.sentences) - most
        )
    mute = without_thresholds(pack)
    if mute.any():
        best = [concept for concept in result.top(pack.n_probes, row, phase=phase) if mute[concept.probe]]
        yield page.ranked([_line(concept) for concept in best[:_MOST_CONCEPTS]])
    if mute.all():
        return
    yield page.silent(int(pack.alert_threshold.isnan().sum()) - int(mute.sum()), told_of_never(pack))
    whole = "the answer" if phase == "generated" else "the text"
    concepts = summary.answer.concepts
    if not concepts:
        yield page.silence(nothing_listed(summary.answer, whole))
        return
    lower = lower_thresholds(summary) if summary.n_lower else ""
    rows = [_line(concept) for concept in concepts[:_MOST_CONCEPTS]]
    yield page.answer(rows, whole, lower, len(concepts) - _MOST_CONCEPTS)


def _sentence(sentence: Stretch) -> tuple[str, str]:
    names = ", ".join(clip(concept.name, 60) for concept in sentence.concepts)
    rest = f" and {sentence.n_more:,} more" if sentence.n_more else ""
    return clip(" ".join(sentence.text.split()), 300), names + rest


def _line(concept: ConceptScore) -> tuple[tuple[str, ...], str, str, str]:
    precision = "" if np.isnan(concept.precision) else f"{concept.precision:.0%}"
    strength = f"{concept.score:.2f}" if np.isnan(concept.strength) else f"{concept.strength:+.1f}"
    return concept.path, clip(concept.token.strip() or repr(concept.token), 40), precision, strength

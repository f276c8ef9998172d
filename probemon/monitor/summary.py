"""Summarises the concepts of an answer and of its sentences.

summary = summarise(result, row=0)
for sentence in summary.sentences:
    print(sentence.text, [" > ".join(concept.path) for concept in sentence.concepts])
summary.answer.concepts, summary.thresholds
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from probemon.core.aggregate import Doubles
from probemon.core.hierarchy import Ints
from probemon.core.scores import unlike
from probemon.monitor.result import ConceptScore, Result, describe, firing, without_ancestors
from probemon.packs.group import AnyPack
from probemon.util.checks import check_count

_AGGREGATOR = "max"  # over the tokens of a sentence
_END = re.compile(r"""[.!?…]["')\]*_”’]*\s*$|\n""")
# Not an end: an abbreviation before a name or example, or a line number.
_NO_END = re.compile(r"(?:\b(?:Dr|Mrs?|Ms|Prof|St|vs|cf|e\.g|i\.e)|(?:^|\n)\s*\d{1,3})\.\s*$")
_LONGEST = 8  # tokens of such an abbreviation or number


@dataclass(frozen=True)
class Stretch:
    """A sentence or a whole answer.

    `stop`: exclusive position
    `n_far`: tokens unlike the calibration
    `n_firing`: tokens at which concepts fire; sentences have other thresholds
    `concepts`: strongest first, the lowest of each path
    `n_more`: concepts beyond `k`
    """

    text: str
    start: int
    stop: int
    n_unseen: int
    n_far: int
    n_firing: int
    concepts: tuple[ConceptScore, ...]
    n_more: int = 0


@dataclass(frozen=True)
class Summary:
    """`thresholds`: "max": for the maximum over a sentence; "each": for tokens
    `n_lower`: shown concepts with a lower threshold than at a token
    `unlike`: a note if the answer is unlike the calibration, or ""
    """

    answer: Stretch
    sentences: tuple[Stretch, ...]
    thresholds: str
    n_lower: int
    unlike: str


def summarise(
    result: Result,
    row: int = 0,
    *,
    phase: str | None = "generated",
    k: int = 5,
    above: Doubles | None = None,
    word_ends: bool = False,
) -> Summary:
    """Summarise a row, with at most `k` concepts a sentence; the answer has all.

    `phase`: "generated", "prompt" or None for both
    `above [P]`: further thresholds of tokens, inf to exclude; those of sentences rise as much
    `word_ends`: leaves out concepts within a word

    Raises `ConfigError`.
    """
    k = check_count("k", k, least=1)
    tokens = result.tokens_of(row, phase)
    name, thresholds = _thresholds(result.pack)
    bars = (
        thresholds
        if above is None
        else _bars(thresholds, result.pack.alert_threshold.double(), torch.from_numpy(above))
    )
    texts = result.texts(tokens)
    lists = thresholds.tolist(), bars.tolist()  # lists: looked up for every score
    left_out = {int(tokens[i]) for i, inside in enumerate(inside_words(texts)) if inside and word_ends}
    sentences = [_sentence(result, tokens[a:b], texts[a:b], *lists, above, left_out) for a, b in _bounds(texts)]
    best: dict[int, ConceptScore] = {}
    for sentence in sentences:
        for concept in sentence.concepts:
            if concept.probe not in best or concept.strength > best[concept.probe].strength:
                best[concept.probe] = concept
    in_answer = sorted((best[p] for p in without_ancestors(result.pack, list(best))), key=_rank)
    answer = Stretch(
        "".join(texts),
        *_ends(result.position[tokens]),
        n_unseen=sum(sentence.n_unseen for sentence in sentences),
        n_far=sum(sentence.n_far for sentence in sentences),
        n_firing=sum(sentence.n_firing for sentence in sentences),
        concepts=tuple(in_answer),
    )
    return Summary(
        answer,
        tuple(
            replace(sentence, concepts=sentence.concepts[:k], n_more=max(0, len(sentence.concepts) - k))
            for sentence in sentences
        ),
        name,
        int(((thresholds < result.pack.alert_threshold) & (bars < math.inf)).sum()),
        unlike(answer.n_far, len(tokens) - answer.n_unseen),
    )


def inside_words(texts: Sequence[str]) -> list[bool]:
    """Return for each token whether the next one continues its word."""
    return [text[-1:].isalnum() and after[:1].isalnum() for text, after in zip(texts, [*texts[1:], ""], strict=False)]


def nothing_listed(stretch: Stretch, where: str, what: str = "concept") -> str:
    """Return why a stretch has no concepts; `where`: "the answer" or similar."""
    if not stretch.n_firing:
        n_seen = stretch.stop - stretch.start - stretch.n_unseen
        if not n_seen:
            return f"No token of {where} was scored, so nothing is known of it."
        return (
            f"No {what} fired at any token of {where}, of which {n_seen:,} {'was' if n_seen == 1 else 'were'} scored."
        )
    tokens = f"{stretch.n_firing:,} token{'s' if stretch.n_firing > 1 else ''}"
    return f"Concepts fired at {tokens} of {where}, but none exceeds its threshold for a whole sentence."


def lower_thresholds(summary: Summary) -> str:
    """Return the note on thresholds of sentences that are lower than those of tokens."""
    concepts = f"{summary.n_lower:,} concept{'s' if summary.n_lower > 1 else ''}"
    return (
        f"In sentences and the whole answer, {concepts} had a lower threshold than at a token: one for the highest"
        " score of a sentence, whose precision the pack does not say."
    )


def _thresholds(pack: AnyPack) -> tuple[str, torch.Tensor]:
    """Return the kind and thresholds `[P]` fp64: of sentences, else of tokens."""
    each = pack.alert_threshold.double()
    if _AGGREGATOR not in pack.aggregated:
        return "each", each
    sentence_thresholds = pack.thresholds_for(_AGGREGATOR).double()
    return _AGGREGATOR, torch.where(sentence_thresholds.isnan(), each, sentence_thresholds)


def _bars(thresholds: torch.Tensor, each: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Return sentence thresholds, raised in logit as `above` raises those of tokens."""
    moved = (thresholds.logit() + above.logit() - each.logit()).sigmoid()
    return torch.where(above.isfinite() & ~moved.isnan(), moved, torch.maximum(thresholds, above))


def _bounds(texts: list[str]) -> list[tuple[int, int]]:
    # A stop within a word, as in "3.14", ends nothing.
    nexts = [*texts[1:], " "]
    ends = [
        i + 1
        for i, (text, following) in enumerate(zip(texts, nexts, strict=False))
        if "\n" in text
        or (
            _END.search(text)
            and not following[:1].isalnum()
            and not _NO_END.search("".join(texts[max(0, i - _LONGEST) : i + 1]))
        )
    ]
    if texts and (not ends or ends[-1] < len(texts)):
        ends.append(len(texts))
    bounds = list(zip([0, *ends], ends, strict=False))
    # Blank text belongs to the sentence before.
    joined: list[tuple[int, int]] = []
    for start, stop in bounds:
        if joined and not "".join(texts[start:stop]).strip():
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _sentence(
    result: Result,
    tokens: Ints,
    texts: list[str],
    thresholds: list[float],
    bars: list[float],
    above: Doubles | None,
    left_out: Collection[int],
) -> Stretch:
    scores, best = result.scores, dict[int, tuple[float, int]]()
    for token in [token for token in tokens.tolist() if token not in left_out]:
        for probe, value in zip(scores.active(token).tolist(), scores.active_scores(token).tolist(), strict=True):
            if value > bars[probe] and value > best.get(probe, (-1.0, 0))[0]:
                best[probe] = value, token
    concepts = [
        describe(result.pack, probe, best[probe][0], thresholds[probe], **result.where(best[probe][1]))
        for probe in without_ancestors(result.pack, list(best))
    ]
    # Not `coverage.seen`, which computes all tokens each time.
    n_unseen = sum(result.coverage.unseen[token] != "" for token in tokens.tolist())
    n_far = int(result.coverage.far[tokens].sum())
    n_firing = sum(bool(firing(scores, token, above)) for token in tokens.tolist() if token not in left_out)
    ends = _ends(result.position[tokens])
    return Stretch("".join(texts), *ends, n_unseen, n_far, n_firing, tuple(sorted(concepts, key=_rank)))


def _ends(positions: Ints) -> tuple[int, int]:
    return (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)


def _rank(concept: ConceptScore) -> tuple[float, int]:
    return -concept.strength, concept.probe

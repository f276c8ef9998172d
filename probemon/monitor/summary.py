"""What a whole answer was about, and each of its sentences.

summary = summarise(result, row=0)
for sentence in summary.sentences:
    print(sentence.text, [" > ".join(concept.path) for concept in sentence.concepts])
summary.answer.concepts, summary.thresholds
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch

from probemon.core.aggregate import Doubles
from probemon.core.hierarchy import Ints
from probemon.core.scores import unlike
from probemon.monitor.result import ConceptScore, Result, describe, firing, without_ancestors
from probemon.packs.group import AnyPack
from probemon.util.checks import check_count

_AGGREGATOR = "max"  # over the tokens of a sentence
# A sentence ends at a stop, with what closes it, or at the end of a line.
_END = re.compile(r"""[.!?…]["')\]*_”’]*\s*$|\n""")
# A stop that ends no sentence: after an abbreviation that always stands before something, or the number of a line.
_NO_END = re.compile(r"(?:\b(?:Dr|Mrs?|Ms|Prof|St|vs|cf|e\.g|i\.e)|(?:^|\n)\s*\d{1,3})\.\s*$")
_LONGEST = 8  # tokens that such an abbreviation or number may have


@dataclass(frozen=True)
class Stretch:
    """A sentence, or a whole answer: its text, its positions from `start` to before `stop`, how many tokens have no
    scores, how many are far from the states that the pack was calibrated on, at how many a concept fires, and the
    concepts in it, the strongest first, each at the token where it was strongest. Of those on one path the lowest alone
    is listed. Where tokens fire and no concept is listed, none exceeds its threshold for a sentence. `n_more`: how many
    concepts there are beside those listed, where only some were asked for.
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
    """Sums an answer up, and each of its sentences.

    `thresholds`: what a concept had to exceed: "max", the pack's threshold for the maximum over a sentence where the
    concept has one, or "each", those of single tokens, where none has. `n_lower`: how many concepts, of those that are
    shown, had to exceed less than at a token, of which the pack does not say how often they are right.
    `unlike`: in words, where the answer is unlike the text that the pack was calibrated on, else "".
    """

    answer: Stretch
    sentences: tuple[Stretch, ...]
    thresholds: str
    n_lower: int
    unlike: str


def summarise(
    result: Result, row: int = 0, *, phase: str | None = "generated", k: int = 5, above: Doubles | None = None
) -> Summary:
    """Sum up the tokens of a row, at most `k` concepts a sentence. In the answer is every concept of a sentence of it.

    `phase`: "generated", "prompt" or None for both. `above [P]`: what a token's scores have to exceed beside the
    thresholds, infinite for a concept that is left out; as much over its own threshold a sentence's score has to be.
    Raises `ConfigError`.
    """
    k = check_count("k", k, least=1)
    tokens = result.tokens_of(row, phase)
    name, own = _thresholds(result.pack)
    bars = own if above is None else _bars(own, result.pack.alert_threshold.double(), torch.from_numpy(above))
    texts = result.texts(tokens)
    lists = own.tolist(), bars.tolist()  # each is looked up for every score
    sentences = [_sentence(result, tokens[a:b], texts[a:b], *lists, above) for a, b in _bounds(texts)]
    best: dict[int, ConceptScore] = {}
    for sentence in sentences:
        for concept in sentence.concepts:
            if concept.probe not in best or concept.strength > best[concept.probe].strength:
                best[concept.probe] = concept
    in_answer = sorted((best[p] for p in without_ancestors(result.pack, list(best))), key=_rank)
    whole = Stretch(
        "".join(texts),
        *_ends(result.position[tokens]),
        n_unseen=sum(sentence.n_unseen for sentence in sentences),
        n_far=sum(sentence.n_far for sentence in sentences),
        n_firing=sum(sentence.n_firing for sentence in sentences),
        concepts=tuple(in_answer),
    )
    return Summary(
        whole,
        tuple(
            replace(sentence, concepts=sentence.concepts[:k], n_more=max(0, len(sentence.concepts) - k))
            for sentence in sentences
        ),
        name,
        int(((own < result.pack.alert_threshold) & (bars < math.inf)).sum()),
        unlike(whole.n_far, len(tokens) - whole.n_unseen),
    )


def nothing_listed(stretch: Stretch, where: str, what: str = "concept") -> str:
    """Return the sentence that says why a stretch without concepts has none; `where`: "the answer" or its like."""
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
    """Return the sentence that says that some thresholds for sentences are lower than those for tokens."""
    concepts = f"{summary.n_lower:,} concept{'s' if summary.n_lower > 1 else ''}"
    return (
        f"In sentences and the whole answer, {concepts} had to exceed less than at a token: a threshold for the highest"
        " score of a sentence, of which the pack does not say how often it is right."
    )


def _thresholds(pack: AnyPack) -> tuple[str, torch.Tensor]:
    """Return what they are for, and thresholds [P] fp64: a concept without one for a sentence has that of a token."""
    each = pack.alert_threshold.double()
    if _AGGREGATOR not in pack.aggregated:
        return "each", each
    of_sentences = pack.thresholds_for(_AGGREGATOR).double()
    return _AGGREGATOR, torch.where(of_sentences.isnan(), each, of_sentences)


def _bars(own: torch.Tensor, each: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Return what scores of sentences have to exceed: as far over `own` thresholds, in the logarithm of the odds, as
    `above` is over those of tokens.
    """
    moved = (own.logit() + above.logit() - each.logit()).sigmoid()
    return torch.where(above.isfinite() & ~moved.isnan(), moved, torch.maximum(own, above))


def _bounds(texts: list[str]) -> list[tuple[int, int]]:
    # A stop in the middle of a word, such as that of "3.14", ends nothing.
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
    # What is blank, such as the second of two line ends, goes with the sentence before.
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
) -> Stretch:
    scores, best = result.scores, dict[int, tuple[float, int]]()
    for token in tokens.tolist():
        for probe, value in zip(scores.active(token).tolist(), scores.active_scores(token).tolist(), strict=True):
            if value > bars[probe] and value > best.get(probe, (-1.0, 0))[0]:
                best[probe] = value, token
    found = [
        describe(result.pack, probe, best[probe][0], thresholds[probe], **result.where(best[probe][1]))
        for probe in without_ancestors(result.pack, list(best))
    ]
    # Not `coverage.seen`, which looks at all tokens: there may be thousands of sentences.
    n_unseen = sum(result.coverage.unseen[token] != "" for token in tokens.tolist())
    n_far = int(result.coverage.far[tokens].sum())
    n_firing = sum(bool(firing(scores, token, above)) for token in tokens.tolist())
    ends = _ends(result.position[tokens])
    return Stretch("".join(texts), *ends, n_unseen, n_far, n_firing, tuple(sorted(found, key=_rank)))


def _ends(positions: Ints) -> tuple[int, int]:
    return (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)


def _rank(concept: ConceptScore) -> tuple[float, int]:
    return -concept.strength, concept.probe

"""Points in text whose concepts are known, wholly or in part.

    texts, points = collect(wordnet, generated=[...], seed=0, limits=Limits())
    points[0].mass      # {"n02086723": 1.0}: how likely the word means each synset

Where the sense comes from (`source`):

    example      a WordNet example sentence of the synset itself: the sense is known
    dominant     another synset's example sentence; the word has one sense, or one with most of the tagged occurrences
    gloss        the same in a definition (more telling context than running text: kept apart in the evaluation)
    other_part   a verb, adjective or adverb in its own example sentence: no concept applies
    function     a closed-class word: no concept applies
    background   any piece of running text; ambiguous words are unknown to the concepts they might mean
    generated    the same in text that the host model wrote, chat markup included

Points are split by *head word* (the last word of the lemma), so that no word of the test split is ever trained on;
what has no head word (punctuation, function words in background) is split by its text.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .wordnet import Sense, WordNet
from .words import FUNCTION_WORDS, Word, noun_bases, verb_bases, words_of

PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 '-.")
MARKUP = re.compile(r"(<\|[a-z_]+\|>)(?:system|user|assistant)?")
# What people look for by name: each trains, and its commonest sense becomes a concept if the texts have enough of it.
EVERYDAY = frozenset((
    "anger", "animal", "army", "bird", "book", "building", "car", "child", "city", "computer", "contract", "crime",
    "death", "disease", "doctor", "dog", "drug", "election", "emotion", "fear", "fish", "food", "god", "government",
    "house", "king", "law", "love", "mammal", "money", "music", "police", "religion", "school", "science", "ship",
    "software", "soldier", "tax", "tree", "vehicle", "war", "weapon", "whale", "woman",
))  # fmt: skip
# Words that tagged text has no sense of, and the one that running text means by them.
MEANT = {"dolphin": "dolphin.n.02", "whale": "whale.n.02"}
MEANT_COUNT = 10  # as if tagged text had it so often
SPLITS = ("train", "validation", "test")
LABELLED = ("example", "dominant", "gloss", "other_part", "function")
RUNNING = ("background", "generated")
# Each listed sense counts this much beside its tagged occurrences, so that an untagged sense is not impossible.
SENSE_PRIOR = 0.25
DOMINANT_MASS = 0.8
MAX_WORDS = 4


@dataclass(frozen=True)
class Limits:
    """How many points of each source: whole numbers, the `_per_head` ones for each head word."""

    dominant_per_head: int = 12
    gloss_per_head: int = 4
    other_part: int = 14_000
    function: int = 1_500
    background: int = 24_000


@dataclass(frozen=True)
class Point:
    text: int  # index into the texts
    end: int  # one past the character whose token is read; 0 reads the beginning-of-sequence token
    source: str
    split: str
    head: str  # "" where the point has no content word
    lemma: str
    mass: dict[str, float]  # synset key -> share of the word's meaning; {} where no noun sense is possible


@dataclass(frozen=True)
class Span:
    start: int  # index of its first word
    stop: int  # one past its last
    lemma: str
    mass: dict[str, float]
    content: bool  # False for closed-class words and words that WordNet does not know


def split_of(key: str) -> str:
    """train, validation or test (70 / 10 / 20 %), a function of the key alone; EVERYDAY words train."""
    if key in EVERYDAY:
        return "train"
    at = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
    return "train" if at < 0.7 else "validation" if at < 0.8 else "test"


def sense_mass(senses: list[Sense], capitalised: bool, lower: bool) -> dict[str, float]:
    """Share of each noun synset in a word's meaning, by tagged counts over all parts of speech; may sum to under 1.

    A lemma that WordNet writes with a capital ("Turkey") is no candidate for a lower-case word; a capitalised word
    inside a sentence means such a lemma wherever there is one.
    """
    if lower:
        senses = [sense for sense in senses if not sense.lemma[:1].isupper()] or senses
    elif capitalised:
        senses = [sense for sense in senses if sense.lemma[:1].isupper()] or senses
    total = sum(sense.count + SENSE_PRIOR for sense in senses)
    mass: dict[str, float] = {}
    for sense in senses:
        if sense.key[0] == "n":
            mass[sense.key] = mass.get(sense.key, 0.0) + (sense.count + SENSE_PRIOR) / total
    return mass


def spans_of(wordnet: WordNet, text: str, words: list[Word]) -> Iterator[Span]:
    """The text's words from left to right, joined where several of them form one WordNet lemma (longest first)."""
    at = 0
    while at < len(words):
        for n in range(min(MAX_WORDS, len(words) - at), 0, -1):
            piece = text[words[at].start : words[at + n - 1].end]
            if n > 1 and (len(piece.split()) != n or not set(piece) <= PLAIN):
                continue
            span = _span(wordnet, piece, at, n, first=at == 0)
            if span is not None:
                yield span
                at = span.stop
                break


def _span(wordnet: WordNet, piece: str, at: int, n: int, first: bool) -> Span | None:
    lower = piece.lower()
    if n == 1 and lower in FUNCTION_WORDS:
        return Span(at, at + 1, lower, {}, content=False)
    found = [base for base in noun_bases(piece) if base in wordnet.senses]
    if n == 1:
        found += [
            base
            for base in verb_bases(piece)
            if any(sense.key[0] == "v" for sense in wordnet.senses.get(base, ())) and base not in found
        ]
    if not found:
        return Span(at, at + 1, lower, {}, content=False) if n == 1 else None
    exact = found[0]
    senses = list(wordnet.senses[exact])
    for base in found[1:]:
        senses += wordnet.senses[base]
    noun = next((base for base in found if any(s.key[0] == "n" for s in wordnet.senses[base])), exact)
    mass = sense_mass(senses, capitalised=piece[:1].isupper() and not first, lower=piece == lower)
    return Span(at, at + n, noun, mass, content=True)


def head_word(lemma: str) -> str:
    return lemma.lower().split(" ")[-1]


def _own_span(wordnet: WordNet, text: str, words: list[Word], lemmas: tuple[str, ...], part: str) -> Span | None:
    """The first place where one of the synset's own lemmas, longest first, stands in its example."""
    bases = noun_bases if part == "n" else verb_bases if part == "v" else lambda word: (word.lower(),)
    for lemma in sorted(lemmas, key=lambda lemma: (-len(lemma.split()), lemma)):
        n = len(lemma.split())
        for at in range(len(words) - n + 1):
            piece = text[words[at].start : words[at + n - 1].end]
            if lemma.lower() in bases(piece):
                return Span(at, at + n, lemma.lower(), {}, content=True)
    return None


def collect(wordnet: WordNet, *, generated: list[str], seed: int, limits: Limits) -> tuple[list[str], list[Point]]:
    """(texts, points), each point's text among the texts, in an order that depends on the arguments alone."""
    rng = random.Random(seed)
    texts: list[str] = []
    points: list[Point] = []
    pool: dict[str, list[Point]] = {source: [] for source in ("dominant", "gloss", "other_part", "function")}
    seen: set[str] = set()
    for key, synset in wordnet.synsets.items():
        part = key[0]
        for text in synset.examples:
            if text in seen:
                continue
            seen.add(text)
            words = words_of(text)
            own = _own_span(wordnet, text, words, synset.lemmas, part)
            texts.append(text)
            number = len(texts) - 1
            if own is not None:
                head = head_word(own.lemma)
                mass = {key: 1.0} if part == "n" else {}
                source = "example" if part == "n" else "other_part"
                point = Point(number, words[own.stop - 1].end, source, split_of(head), head, own.lemma, mass)
                (points if part == "n" else pool["other_part"]).append(point)
            taken = range(own.start, own.stop) if own is not None else range(0)
            for span in spans_of(wordnet, text, words):
                if span.start not in taken and span.stop - 1 not in taken:
                    _sort_in(pool, span, words, number, "dominant")
        if part == "n" and synset.definition:
            texts.append(synset.definition)
            words = words_of(synset.definition)
            for span in spans_of(wordnet, synset.definition, words):
                _sort_in(pool, span, words, len(texts) - 1, "gloss")
    points += _at_most_per_head(pool["dominant"], limits.dominant_per_head, rng)
    points += _at_most_per_head(pool["gloss"], limits.gloss_per_head, rng)
    points += _sample(pool["other_part"], limits.other_part, rng)
    points += _sample(pool["function"], limits.function, rng)
    # Background comes from texts that are read anyway: it costs no forward pass.
    read = sorted({point.text for point in points})
    points += _background(wordnet, texts, read, points, limits.background, rng)
    for text in generated:
        texts.append(text)
        points += list(_every_piece(wordnet, text, len(texts) - 1))
    return _used_only(texts, points)


def _sort_in(pool: dict[str, list[Point]], span: Span, words: list[Word], text: int, source: str) -> None:
    end = words[span.stop - 1].end
    if span.lemma in FUNCTION_WORDS:
        if source == "dominant":
            pool["function"].append(Point(text, end, "function", split_of(span.lemma), span.lemma, span.lemma, {}))
    elif span.mass and max(span.mass.values()) >= DOMINANT_MASS:
        head = head_word(span.lemma)
        pool[source].append(Point(text, end, source, split_of(head), head, span.lemma, span.mass))


def _at_most_per_head(points: list[Point], limit: int, rng: random.Random) -> list[Point]:
    shuffled = rng.sample(points, len(points))
    taken: Counter[str] = Counter()
    kept = []
    for point in shuffled:
        if taken[point.head] < limit:
            taken[point.head] += 1
            kept.append(point)
    return sorted(kept, key=lambda point: (point.text, point.end))


def _sample(points: list[Point], n: int, rng: random.Random) -> list[Point]:
    return sorted(rng.sample(points, min(n, len(points))), key=lambda point: (point.text, point.end))


def _background(
    wordnet: WordNet, texts: list[str], read: list[int], taken: list[Point], n: int, rng: random.Random
) -> list[Point]:
    used = {(point.text, point.end) for point in taken}
    chosen: list[Point] = []
    # The token that begins every sequence: its state hardly varies, a few copies make it count.
    for split in SPLITS:
        chosen += [Point(read[0], 0, "background", split, "", "", {})] * 8
    for number in rng.choices(read, k=n):
        pieces = [p for p in _every_piece(wordnet, texts[number], number, rng) if (p.text, p.end) not in used]
        if pieces:
            piece = rng.choice(pieces)
            used.add((piece.text, piece.end))
            chosen.append(Point(number, piece.end, "background", piece.split, piece.head, piece.lemma, piece.mass))
    return chosen


def _every_piece(wordnet: WordNet, text: str, number: int, rng: random.Random | None = None) -> Iterator[Point]:
    """One point for every word and every punctuation mark of a text; with `rng`, a quarter of them inside the word.

    Chat markup and the role names that belong to it mean nothing: "assistant" there is no person.
    """
    source = "generated" if rng is None else "background"
    by_text = split_of(text)
    covered: set[int] = set()
    for mark in MARKUP.finditer(text):
        covered.update(range(*mark.span()))
        # The markup, and the first and last token of a role name: they can be two ("ass", "istant").
        for at in sorted({mark.end(1), min(mark.end(1) + 1, mark.end()), mark.end()}):
            yield Point(number, at, source, by_text, "", "", {})
    plain = MARKUP.sub(lambda mark: " " * len(mark.group()), text)
    words = words_of(plain)
    for span in spans_of(wordnet, plain, words):
        start, end = words[span.start].start, words[span.stop - 1].end
        covered.update(range(start, end))
        head = head_word(span.lemma) if span.content else ""
        at = end if rng is None or rng.random() < 0.75 else rng.randint(start + 1, end)
        split = split_of(head) if head else by_text
        yield Point(number, at, source, split, head, span.lemma, span.mass)
    for at, character in enumerate(text):
        if at not in covered and not character.isspace():
            yield Point(number, at + 1, source, by_text, "", "", {})


def _used_only(texts: list[str], points: list[Point]) -> tuple[list[str], list[Point]]:
    used = sorted({point.text for point in points})
    renumbered = {old: new for new, old in enumerate(used)}
    moved = [Point(renumbered[p.text], p.end, p.source, p.split, p.head, p.lemma, p.mass) for p in points]
    return [texts[old] for old in used], moved

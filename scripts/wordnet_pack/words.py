"""Words in running text and the WordNet lemmas they may be forms of.

    for word in words_of("Two dogs barked."):
        noun_bases(word.text)       # "dogs" -> ("dogs", "dog")

The rules of detachment are those of WordNet's manual page morphy(7WN); its exception lists are not in every
distribution, so a short list of frequent irregular nouns stands in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:['.-][A-Za-z0-9]+)*")
NOUN_ENDINGS = (
    ("ses", "s"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"), ("men", "man"), ("ies", "y"), ("s", ""),
)  # fmt: skip
VERB_ENDINGS = (
    ("ies", "y"), ("ied", "y"), ("es", "e"), ("es", ""), ("s", ""),
    ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", ""),
)  # fmt: skip
IRREGULAR_NOUNS = {
    "children": "child", "feet": "foot", "teeth": "tooth", "geese": "goose", "mice": "mouse", "lice": "louse",
    "knives": "knife", "wives": "wife", "lives": "life", "leaves": "leaf", "wolves": "wolf", "shelves": "shelf",
    "halves": "half", "thieves": "thief", "loaves": "loaf", "calves": "calf", "oxen": "ox", "crises": "crisis",
    "analyses": "analysis", "theses": "thesis", "bacteria": "bacterium", "criteria": "criterion",
    "phenomena": "phenomenon", "data": "datum", "fungi": "fungus", "cacti": "cactus", "people": "people",
}  # fmt: skip
# Closed-class words: WordNet lists some as rare nouns ("a", "in", "I": units and elements) and most not at all.
FUNCTION_WORDS = frozenset(
    [
        "a",
        "an",
        "the",
        "this",
        "that",
        "these",
        "those",
        "some",
        "any",
        "no",
        "every",
        "each",
        "either",
        "neither",
        "both",
        "all",
        "many",
        "much",
        "few",
        "more",
        "most",
        "other",
        "another",
        "such",
        "same",
        "own",
        "i",
        "me",
        "my",
        "mine",
        "myself",
        "you",
        "your",
        "yours",
        "yourself",
        "he",
        "him",
        "his",
        "himself",
        "she",
        "her",
        "hers",
        "herself",
        "it",
        "its",
        "itself",
        "we",
        "us",
        "our",
        "ours",
        "ourselves",
        "they",
        "them",
        "their",
        "theirs",
        "themselves",
        "who",
        "whom",
        "whose",
        "which",
        "what",
        "whatever",
        "whoever",
        "someone",
        "anyone",
        "everyone",
        "nobody",
        "somebody",
        "anybody",
        "everybody",
        "something",
        "anything",
        "nothing",
        "everything",
        "one",
        "ones",
        "of",
        "in",
        "on",
        "at",
        "by",
        "for",
        "with",
        "about",
        "against",
        "between",
        "into",
        "through",
        "during",
        "before",
        "after",
        "above",
        "below",
        "to",
        "from",
        "up",
        "down",
        "out",
        "off",
        "over",
        "under",
        "again",
        "further",
        "near",
        "since",
        "until",
        "upon",
        "within",
        "without",
        "along",
        "across",
        "behind",
        "beyond",
        "toward",
        "towards",
        "among",
        "around",
        "as",
        "than",
        "like",
        "per",
        "via",
        "and",
        "or",
        "but",
        "nor",
        "so",
        "yet",
        "if",
        "because",
        "while",
        "although",
        "though",
        "unless",
        "whereas",
        "whether",
        "when",
        "where",
        "why",
        "how",
        "then",
        "once",
        "here",
        "there",
        "not",
        "never",
        "only",
        "very",
        "too",
        "also",
        "just",
        "even",
        "still",
        "already",
        "almost",
        "quite",
        "rather",
        "is",
        "am",
        "are",
        "was",
        "were",
        "be",
        "been",
        "being",
        "do",
        "does",
        "did",
        "doing",
        "done",
        "have",
        "has",
        "had",
        "having",
        "will",
        "would",
        "shall",
        "should",
        "can",
        "could",
        "may",
        "might",
        "must",
        "ought",
        "need",
        "dare",
        "cannot",
        "let's",
        "don't",
        "doesn't",
        "didn't",
        "isn't",
        "aren't",
        "wasn't",
        "weren't",
        "can't",
        "won't",
        "wouldn't",
        "couldn't",
        "shouldn't",
        "i'm",
        "you're",
        "he's",
        "she's",
        "it's",
        "we're",
        "they're",
        "i've",
        "i'll",
        "that's",
        "there's",
        "et",
        "al",
        "etc",
        "e.g",
        "i.e",
    ]
)


@dataclass(frozen=True)
class Word:
    text: str  # as written
    start: int
    end: int  # one past the last character


def words_of(text: str) -> list[Word]:
    """The words of a text with their character spans; a possessive "'s" is left off."""
    found = []
    for match in WORD.finditer(text):
        word = match.group()
        if word.lower().endswith("'s") and word.lower() not in FUNCTION_WORDS:
            word = word[:-2]
        found.append(Word(word, match.start(), match.start() + len(word)))
    return found


@lru_cache(maxsize=1 << 17)
def noun_bases(word: str) -> tuple[str, ...]:
    """Lower-case candidates for the singular of a noun form, the form itself first."""
    word = word.lower()
    bases = [word]
    if word in IRREGULAR_NOUNS:
        bases.append(IRREGULAR_NOUNS[word])
    elif not word.endswith("ss"):
        bases += [word[: -len(old)] + new for old, new in NOUN_ENDINGS if word.endswith(old) and len(word) > len(old)]
    return tuple(dict.fromkeys(base for base in bases if base))


@lru_cache(maxsize=1 << 17)
def verb_bases(word: str) -> tuple[str, ...]:
    """Lower-case candidates for the infinitive of a regular verb form, the form itself first."""
    word = word.lower()
    bases = [word]
    for old, new in VERB_ENDINGS:
        if word.endswith(old) and len(word) > len(old) + 1:
            stem = word[: -len(old)]
            bases.append(stem + new)
            if old in ("ed", "ing") and new == "" and len(stem) > 2 and stem[-1] == stem[-2]:
                bases.append(stem[:-1])
    return tuple(dict.fromkeys(bases))

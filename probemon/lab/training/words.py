"""Words of texts: the TF-IDF baseline, and words that give a concept away.

vocabulary = Vocabulary.of(train_texts)
vocabulary.features(texts)                     # Sparse [S, V]
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from probemon.lab.training.labels import Known
from probemon.lab.training.logistic import Sparse

# Scripts without spaces: each character is a word.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# In words, but not letters: accents, soft hyphens, zero-width characters.
_INVISIBLE = (
    r"\u00ad\u0300-\u036f\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff"
)
_VARIANTS = frozenset(map(chr, (0x034F, *range(0xFE00, 0xFE10))))  # zero width, but not format characters
_VOICING = r"\u3099\u309a"  # of a decomposed kana
_WORD = rf"[{_UNSPACED}][{_VOICING}]*|[^\W{_UNSPACED}]+(?:[{_INVISIBLE}]+[^\W{_UNSPACED}]*)*"
_WORDS, _WORDS_AND_MARKS = re.compile(_WORD), re.compile(rf"{_WORD}|[$€£!?]")
_MOST_WORDS = 20_000
N_GIVEAWAYS = 20


def words_in(text: str, *, marks: bool = True) -> list[str]:
    """Return lower-case words of a text, and a few `marks`; encoding (NFKC) and zero-width characters do not matter."""
    return (_WORDS_AND_MARKS if marks else _WORDS).findall(_plain(text))


def _plain(text: str) -> str:
    if text.isascii():
        return text.casefold()
    shown = "".join(c for c in text if unicodedata.category(c) != "Cf" and c not in _VARIANTS)
    # Whole texts: a kana and its voicing mark would be two words.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", shown).casefold())


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words of at least two training texts."""

    place: Mapping[str, int]
    idf: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[str]) -> Vocabulary:
        """Build from training texts."""
        return cls.of_units([words_in(text) for text in texts])

    @classmethod
    def of_units(cls, texts: Sequence[Sequence[str]]) -> Vocabulary:
        """Build from training texts as words, or other units."""
        counts = Counter(word for words in texts for word in set(words))
        # independent of set order
        ranked = sorted(((-n, word) for word, n in counts.items() if n > 1))[:_MOST_WORDS]
        return cls(
            {word: i for i, (_, word) in enumerate(ranked)},
            np.log(len(texts) / np.asarray([-n for n, _ in ranked], dtype=np.float64)) + 1,
        )

    def features(self, texts: Sequence[str]) -> Sparse:
        """Return TF-IDF rows `[S, V]` of unit length, by 1 + log count."""
        return self.features_of([words_in(text) for text in texts])

    def features_of(self, texts: Sequence[Sequence[str]]) -> Sparse:
        """Return the rows of texts as units."""
        row, column, value = [], [], []
        for i, words in enumerate(texts):
            counts = Counter(word for word in words if word in self.place)
            weights = {self.place[word]: (1 + math.log(n)) * self.idf[self.place[word]] for word, n in counts.items()}
            length = math.sqrt(sum(v * v for v in weights.values())) or 1.0
            for place in sorted(weights):
                row.append(i)
                column.append(place)
                value.append(weights[place] / length)
        shape = (len(texts), max(1, len(self.place)))
        return Sparse(torch.tensor(row).long(), torch.tensor(column).long(), torch.tensor(value).float(), shape)

    def giveaways(self, texts: Sequence[str], known: Known, n: int = N_GIVEAWAYS) -> list[list[str]]:
        """Return for each concept the most informative words that are likelier with it. `known [S, P]`."""
        present = self.features(texts)
        names = sorted(self.place, key=lambda word: self.place[word])
        by_concept = []
        for labels in known.T:
            sides = []
            for side in (1, 0):
                is_of = torch.from_numpy(labels == side)[present.row]
                counts = torch.bincount(present.column[is_of], minlength=present.shape[1]).numpy()
                sides.append((counts + 0.5) / ((labels == side).sum() + 1))
            gain = np.where(sides[0] > sides[1], _divergence(*sides), 0.0)
            best = np.argsort(-gain[: len(names)], kind="stable")[:n]
            by_concept.append([names[i] for i in best if gain[i] > 0])
        return by_concept


def _divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence of two Bernoulli variables."""
    middle = (p + q) / 2
    gain: np.ndarray = _entropy(middle) - (_entropy(p) + _entropy(q)) / 2
    return gain


def _entropy(p: np.ndarray) -> np.ndarray:
    p = p.clip(1e-12, 1 - 1e-12)
    entropy: np.ndarray = -p * np.log(p) - (1 - p) * np.log1p(-p)
    return entropy


def places_of(words: Collection[str], text: str) -> list[tuple[int, int]]:
    """Return the positions of words in a text."""
    chosen = set(words)
    return [match.span() for match in _WORDS_AND_MARKS.finditer(text) if _plain(match[0]) in chosen]

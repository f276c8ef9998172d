"""Every token of running text, with the word that it is of, what that word may mean, and its hidden state.

    running = Running.read(model, tokenizer, wordnet, passages(answers), layer=15, fingerprint=mark, folder=cache)
    running.words[running.word[i]].mass       # {"n02086723": 1.0}: what the word at token i may mean; word -1: no noun

The labels come "by distance", from the word alone: nobody read these texts. See `labels_by_distance`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from .concepts import NOUN_SHARE, ancestors, spread
from .mentions import DOMINANT_MASS, MARKUP, head_word, spans_of, split_of
from .passages import Passage
from .states import Tokens, extract
from .wordnet import WordNet
from .words import words_of

MAX_TOKENS = 400
SENTENCE_END = re.compile(r"[.!?]\s*$|\n")
# A concept with less than this share of a word's meaning is one that the word does not mean.
NEGLIGIBLE, NEGLIGIBLE_AMONG_NOUNS = 0.03, 0.05


@dataclass(frozen=True)
class Word:
    """A word (or several that form one lemma): its head word, and the share of each noun synset in its meaning."""

    head: str
    mass: dict[str, float]


@dataclass
class Running:
    """N tokens, one after another, passage after passage."""

    passages: list[Passage]
    words: list[Word]
    passage: torch.Tensor  # [N] int64
    token_id: torch.Tensor  # [N] int64
    word: torch.Tensor  # [N] int64, index into the words; -1 where the token is of no word that can be a noun
    is_last: torch.Tensor  # [N] bool: the last token of its word, where the whole word has been read
    sentence: torch.Tensor  # [N] int64, numbered through all passages
    states: torch.Tensor  # [N, D], the host's dtype, raw

    @classmethod
    def read(
        cls,
        model: Any,
        tokenizer: Any,
        wordnet: WordNet,
        passages: list[Passage],
        *,
        layer: int,
        fingerprint: str,
        folder: Path,
    ) -> Running:
        """Tokenise the passages, find their words, and read the hidden state of every token (cached in the folder)."""
        words: dict[tuple[str, tuple[tuple[str, float], ...]], int] = {}
        ids: list[list[int]] = []
        word: list[np.ndarray] = []
        is_last: list[np.ndarray] = []
        for passage in tqdm(passages, desc="words of running text", unit="passage"):
            own = _tokens_and_words(tokenizer, wordnet, passage.text, words)
            ids.append(own[0])
            word.append(own[1])
            is_last.append(own[2])
        sizes = torch.tensor([len(row) for row in ids])
        number = torch.repeat_interleave(torch.arange(len(ids)), sizes)
        at = torch.cat([torch.arange(len(row)) for row in ids])
        token_id = torch.tensor([token for row in ids for token in row])
        tokens = Tokens(ids, number, at, token_id)
        states = extract(model, tokens, [layer], fingerprint, folder)[layer]
        return cls(
            passages,
            [Word(head, dict(mass)) for head, mass in words],
            number,
            token_id,
            torch.from_numpy(np.concatenate(word)),
            torch.from_numpy(np.concatenate(is_last)),
            _sentences(tokenizer, token_id, number),
            states,
        )

    def where(self, *, split: str | None = None, domains: tuple[str, ...] | None = None) -> torch.Tensor:
        """[N] bool: tokens of the passages of a split and of some domains."""
        chosen = [
            (split is None or passage.split == split) and (domains is None or passage.domain in domains)
            for passage in self.passages
        ]
        return torch.tensor(chosen)[self.passage]

    def words_of_split(self, split: str) -> torch.Tensor:
        """[N] bool: tokens of the words whose head word is of a split; a token of no word is of none."""
        chosen = torch.tensor([split_of(word.head) == split for word in self.words] + [False])
        return chosen[self.word]  # -1 is the last


def _sentences(tokenizer: Any, token_id: torch.Tensor, passage: torch.Tensor) -> torch.Tensor:
    """[N]: the sentence of each token; one ends with a token that ends in a stop or has the end of a line."""
    ids, index = token_id.unique(return_inverse=True)
    ends = torch.tensor([SENTENCE_END.search(tokenizer.decode([token])) is not None for token in ids.tolist()])[index]
    begins = torch.ones(len(token_id), dtype=torch.bool)
    begins[1:] = ends[:-1] | (passage[1:] != passage[:-1])
    return begins.long().cumsum(0) - 1


def _tokens_and_words(
    tokenizer: Any, wordnet: WordNet, text: str, words: dict[tuple[str, tuple[tuple[str, float], ...]], int]
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return token ids, the number of each token's word among `words` (which grows), and whether it is its last."""
    bos = tokenizer.bos_token
    shift = 0 if text.startswith(bos) else len(bos)
    whole = text if text.startswith(bos) else bos + text
    encoded = tokenizer(
        whole, add_special_tokens=False, return_offsets_mapping=True, truncation=True, max_length=MAX_TOKENS
    )
    ends = [end for _, end in encoded["offset_mapping"]]
    word = np.full(len(ends), -1, dtype=np.int64)
    is_last = np.zeros(len(ends), dtype=bool)
    plain = MARKUP.sub(lambda mark: " " * len(mark.group()), text)
    pieces = words_of(plain)
    at = 0
    for span in spans_of(wordnet, plain, pieces):
        if not span.mass:
            continue
        start, end = pieces[span.start].start + shift, pieces[span.stop - 1].end + shift
        key = head_word(span.lemma), tuple(sorted(span.mass.items()))
        number = words.setdefault(key, len(words))
        while at < len(ends) and ends[at] <= start:
            at += 1
        while at < len(ends) and ends[at] < end:
            word[at] = number
            at += 1
        if at < len(ends):
            word[at], is_last[at] = number, True
    return list(encoded["input_ids"]), word, is_last


@dataclass(frozen=True)
class Truth:
    """What words say of concepts, a row a word and a last one for "no noun"; `[W + 1, P]`.

    `strict` int8: 1 applies, 0 does not, -1 unknown. `any_sense` bool: some noun sense of the word lies under it.
    """

    strict: torch.Tensor
    any_sense: torch.Tensor

    def labels(self, running: Running, rows: torch.Tensor) -> torch.Tensor:
        """[n, P] int8 of the tokens `rows`: at a word that is not read to its end, what may apply is unknown."""
        labels = self.strict[running.word[rows]]
        begun = ((running.word[rows] >= 0) & ~running.is_last[rows]).unsqueeze(1)
        return torch.where(begun & (labels == 1), torch.tensor(-1, dtype=torch.int8), labels)


def labels_by_distance(wordnet: WordNet, words: list[Word], keys: list[str]) -> Truth:
    """What each word says of the concepts with these synset keys.

    A concept applies where at least DOMINANT_MASS of the word's noun senses, by tagged occurrences, lie under it, and
    the word is mostly a noun. It does not apply where next to none do, and is unknown between.
    """
    up = ancestors(wordnet)
    index = {key: i for i, key in enumerate(keys)}
    strict = np.zeros((len(words) + 1, len(keys)), dtype=np.int8)
    any_sense = np.zeros((len(words) + 1, len(keys)), dtype=bool)
    for row, word in enumerate(words):
        noun = sum(word.mass.values())
        for key, share in spread(word.mass, up).items():
            if key not in index:
                continue
            column, among_nouns = index[key], share / noun
            any_sense[row, column] = True
            if among_nouns >= DOMINANT_MASS and noun >= NOUN_SHARE:
                strict[row, column] = 1
            elif share >= NEGLIGIBLE or among_nouns >= NEGLIGIBLE_AMONG_NOUNS:
                strict[row, column] = -1
    return Truth(torch.from_numpy(strict), torch.from_numpy(any_sense))

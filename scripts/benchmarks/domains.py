"""Real texts of domains that conflict, on the demo model: the same word is continued in three ways, and a line before
it says in which.

    data = Domains("marks")                     # its rows, over the upper layers of the demo model (`cut_model.py`)
    host = data.host()
    parts = data.parts(seed)                    # batches to learn from, to choose by, to be tested on

The texts are WordNet's: of a noun its definition, kinds of it, and what it is a kind of. The line before it is a
mark ("marks": "List B:"), which by itself says nothing, or names the domain ("words": "Its kinds:"). Both have four
tokens.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cut_model import CutModel
from probemon.bundled import load_bundled
from wordnet_pack.wordnet import WordNet, find_wordnet

DOMAINS = ("definition", "kinds", "above")
HEADERS = {
    "marks": {"definition": "List B:\n", "kinds": "List K:\n", "above": "List R:\n"},
    "words": {"definition": "Its meaning:\n", "kinds": "Its kinds:\n", "above": "Its classes:\n"},
}
N_HEADER, MOST_PROMPT, MOST_ANSWER = 4, 5, 10  # tokens
FIRST = 29  # the layer that learns, and all that are over it: of this model, the last
N_WORDS, N_TRAIN, N_CHOOSE, N_TEST = 370, 270, 40, 60  # words, and how many of them are in the parts of a seed
ROWS = 8  # of a batch


@dataclass(frozen=True)
class Row:
    """One text: `ids` of header, prompt and answer, of which the last `n_answer` are to be said."""

    word: str
    domain: str
    ids: list[int]
    n_answer: int


def entries(wordnet: WordNet, n: int) -> list[tuple[str, dict[str, str]]]:
    """`n` nouns with their answer in each domain, drawn once: of synsets with a definition, three kinds and three
    classes over them, the most frequent sense of their word.
    """
    below: dict[str, list[str]] = {}
    for synset in wordnet.synsets.values():
        if synset.hypernym is not None and synset.key[0] == "n":
            below.setdefault(synset.hypernym, []).append(synset.lemmas[0])
    found = []
    for key in sorted(below):
        synset = wordnet.synsets[key]
        word, above = synset.lemmas[0], [up.lemmas[0] for up in wordnet.chain(synset)[1:]]
        first = next((sense for sense in wordnet.senses.get(word.lower(), []) if sense.key[0] == "n"), None)
        if len(below[key]) >= 3 and len(above) >= 3 and first is not None and first.key == key and word.islower():
            answers = {"definition": synset.definition, "kinds": ", ".join(below[key]), "above": ", ".join(above)}
            found.append((word, answers))
    return random.Random(0).sample(found, n)


def rows(tokenizer: Any, kind: str) -> list[Row]:
    """Every word in every domain, words in order."""
    made = []
    for word, answers in entries(WordNet.read(find_wordnet(None)), N_WORDS):
        for domain in DOMAINS:
            header, prompt, answer = (
                tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in (HEADERS[kind][domain], f"{word}:", f" {answers[domain]}\n")
            )
            assert len(header) == N_HEADER, (HEADERS[kind][domain], tokenizer.convert_ids_to_tokens(header))
            answer = answer[:MOST_ANSWER]
            made.append(Row(word, domain, header + prompt[-MOST_PROMPT:] + answer, len(answer)))
    return made


class Domains(CutModel):
    """The rows of one kind of header, over the layers from `FIRST` on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(rows(load_bundled()[1], kind), FIRST, kind)

    def batch(self, numbers: list[int]) -> dict[str, Tensor]:
        """As `CutModel`, with the number of each row's domain."""
        domain = torch.tensor([DOMAINS.index(self.rows[i].domain) for i in numbers])
        return {**super().batch(numbers), "domain": domain}

    def words(self, seed: int) -> list[int]:
        """Numbers of the words of a seed: first those to learn from, then those to choose by, then the test's."""
        words = list(range(N_WORDS))
        random.Random(1000 + seed).shuffle(words)
        return words[: N_TRAIN + N_CHOOSE + N_TEST]

    def parts(self, seed: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], dict[str, Any]]:
        """Batches of all domains to learn from and to choose by, and of each domain those of the test. No word is in
        two parts.
        """
        words, n = self.words(seed), len(DOMAINS)

        def of(some: list[int], domains: tuple[str, ...] = DOMAINS) -> list[dict[str, Tensor]]:
            numbers = [n * word + DOMAINS.index(domain) for word in some for domain in domains]
            random.Random(seed).shuffle(numbers)
            return [self.batch(numbers[at : at + ROWS]) for at in range(0, len(numbers), ROWS)]

        train, choose, test = words[:N_TRAIN], words[N_TRAIN:][:N_CHOOSE], words[N_TRAIN + N_CHOOSE :]
        return of(train), of(choose), {domain: of(test, (domain,)) for domain in DOMAINS}

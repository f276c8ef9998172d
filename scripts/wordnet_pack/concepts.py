"""Which synsets become concepts, and what each point says about them.

    concepts = choose(wordnet, points, Choice())     # parents before children
    labels = label(wordnet, points, concepts)        # [N, P] int8: 1 applies, 0 does not, -1 unknown

The hierarchy is WordNet's, by first hypernym, collapsed to the concepts that have enough training points.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from .mentions import DOMINANT_MASS, LABELLED, Point
from .wordnet import Synset, WordNet

# A word that means a concept with less than this share of its tagged occurrences counts as not meaning it.
NEGLIGIBLE_MASS = 0.05
NOUN_SOURCES = ("example", "dominant", "gloss")


@dataclass(frozen=True)
class Choice:
    """What a synset needs to become a concept; counts of points are over the training split unless named otherwise."""

    min_points: int = 40
    min_heads: int = 15  # distinct head words: fewer would be learning words, not a concept
    min_validation: int = 8
    max_share: float = 0.25  # of all noun points: broader synsets (entity, abstraction) say nothing
    max_child_share: float = 0.85  # a synset with a child this large is left out in favour of the child
    max_concepts: int = 384


@dataclass(frozen=True)
class Concept:
    id: str
    name: str
    key: str  # WordNet synset key
    parent: str | None  # id
    level: int
    definition: str
    lemmas: tuple[str, ...]
    n_train: int
    n_heads: int


def ancestors(wordnet: WordNet) -> dict[str, tuple[str, ...]]:
    """For every noun synset key: itself and its ancestors by first hypernym, nearest first."""
    return {
        key: tuple(up.key for up in wordnet.chain(synset)) for key, synset in wordnet.synsets.items() if key[0] == "n"
    }


def spread(mass: dict[str, float], up: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Share of a word's meaning that lies under each synset that has any of it."""
    total: dict[str, float] = defaultdict(float)
    for key, share in mass.items():
        for above in up[key]:
            total[above] += share
    return total


def choose(wordnet: WordNet, points: list[Point], choice: Choice) -> list[Concept]:
    """Concepts in an order where parents come first, chosen without a look at the test split."""
    up = ancestors(wordnet)
    n_train: Counter[str] = Counter()
    n_validation: Counter[str] = Counter()
    heads: dict[str, set[str]] = defaultdict(set)
    n_nouns = 0
    for point in points:
        if point.source not in NOUN_SOURCES or point.split == "test":
            continue
        n_nouns += point.split == "train"
        for key, share in spread(point.mass, up).items():
            if share >= DOMINANT_MASS:
                if point.split == "train":
                    n_train[key] += 1
                    heads[key].add(point.head)
                else:
                    n_validation[key] += 1
    kept = {
        key
        for key, n in n_train.items()
        if n >= choice.min_points
        and len(heads[key]) >= choice.min_heads
        and n_validation[key] >= choice.min_validation
        and n <= choice.max_share * n_nouns
    }
    kept -= {above for key in kept for above in up[key][1:] if n_train[key] >= choice.max_child_share * n_train[above]}
    kept = set(sorted(kept, key=lambda key: (-n_train[key], key))[: choice.max_concepts])
    chains = {key: [above for above in up[key] if above in kept] for key in kept}
    order = sorted(kept, key=lambda key: (len(chains[key]), [wordnet.ids[above] for above in reversed(chains[key])]))
    return [_concept(wordnet, wordnet.synsets[key], chains[key], n_train[key], len(heads[key])) for key in order]


def _concept(wordnet: WordNet, synset: Synset, chain: list[str], n_train: int, n_heads: int) -> Concept:
    return Concept(
        id=wordnet.ids[synset.key],
        name=synset.lemmas[0],
        key=synset.key,
        parent=wordnet.ids[chain[1]] if len(chain) > 1 else None,
        level=len(chain) - 1,
        definition=synset.definition,
        lemmas=synset.lemmas,
        n_train=n_train,
        n_heads=n_heads,
    )


def without(concepts: list[Concept], dropped: set[str]) -> list[Concept]:
    """The concepts less those whose ids are dropped; children of a dropped one move up to its parent."""
    by_id = {concept.id: concept for concept in concepts}
    kept: dict[str, Concept] = {}
    for concept in concepts:
        if concept.id in dropped:
            continue
        parent = concept.parent
        while parent is not None and parent in dropped:
            parent = by_id[parent].parent
        level = 0 if parent is None else kept[parent].level + 1
        kept[concept.id] = Concept(**{**concept.__dict__, "parent": parent, "level": level})
    return sorted(kept.values(), key=lambda concept: concept.level)


def parents_of(concepts: list[Concept]) -> torch.Tensor:
    """[P] int64: index of each concept's parent, -1 for a root."""
    index = {concept.id: i for i, concept in enumerate(concepts)}
    return torch.tensor([-1 if c.parent is None else index[c.parent] for c in concepts], dtype=torch.int64)


def label(wordnet: WordNet, points: list[Point], concepts: list[Concept]) -> torch.Tensor:
    """[N, P] int8: 1 where at least 80 % of the word's meaning lies under the concept, 0 under 5 %, -1 between."""
    up = ancestors(wordnet)
    index = {concept.key: i for i, concept in enumerate(concepts)}
    labels = torch.zeros(len(points), len(concepts), dtype=torch.int8)
    for row, point in enumerate(points):
        for key, share in spread(point.mass, up).items():
            if key in index and share >= NEGLIGIBLE_MASS:
                labels[row, index[key]] = 1 if share >= DOMINANT_MASS else -1
    return labels


def is_labelled(points: list[Point]) -> torch.Tensor:
    """[N] bool: points of the labelled sources, those that the evaluation ranks."""
    return torch.tensor([point.source in LABELLED for point in points])

"""Which synsets become concepts, what they are called, and what each point says about them.

    concepts = choose(wordnet, uses, Choice())       # parents before children
    labels = label(wordnet, points, concepts)        # [N, P] int8: 1 applies, 0 does not, -1 unknown

The hierarchy is WordNet's, by first hypernym, collapsed to the concepts that the texts have enough of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .mentions import DOMINANT_MASS, EVERYDAY, Point, sense_mass
from .wordnet import Synset, WordNet
from .words import FUNCTION_WORDS

# A word that means a concept with less than this share of its tagged occurrences counts as not meaning it.
NEGLIGIBLE_MASS = 0.05
# A word whose tagged occurrences are nouns less often than this stands for no concept, and against none.
NOUN_SHARE = 0.5
# Of the nouns under a concept, those that a pack lists: the first stand as examples, all lead from a word to a concept.
COMMON_WORDS, COMMON_USES = 8, 3
RARELY_A_NOUN = 0.2  # of a word's tagged occurrences
# Names for what WordNet calls the same and puts in the same group, where an id would have to tell them apart.
PLAIN_NAMES = {
    "administration.n.02": "administration",
    "address.n.03": "speech (address)",
    "attempt.n.01": "effort (attempt)",
    "country.n.02": "country (territory)",
    "country.n.04": "countryside",
    "effort.n.02": "effort (exertion)",
    "food.n.01": "food (nutrient)",
    "food.n.02": "food (solid)",
    "homo.n.02": "human",
    "region.n.01": "region (part)",
    "region.n.03": "region (area)",
    "scholar.n.01": "scholar",
    "speech.n.02": "speech (language)",
    "state.n.04": "country (nation)",
    "writing.n.02": "writing (works)",
    "writing.n.04": "writing (letters)",
}
TAXONOMY = "taxonomic group"  # genera, families, orders: names that nobody uses in running text


@dataclass(frozen=True)
class Use:
    """A word that stands in the texts, and how often: in WordNet's own, and in running text."""

    head: str
    mass: dict[str, float]
    n_mentions: int = 0
    n_running: int = 0


@dataclass(frozen=True)
class Choice:
    """What a synset needs to become a concept; uses are those of the training split of texts, test words left out."""

    min_uses: int = 40
    min_running: int = 15
    min_heads: int = 5  # distinct head words: fewer would be learning words, not a concept
    min_named: int = 3  # uses in running text of a word for the concept itself: people speak of it...
    min_branches: int = 3  # ... or so many concepts that stand right below it: it holds them together
    min_depth: int = 3  # from the root: entity, abstraction and their like say nothing
    # Of the commonest sense of one of these words less is asked.
    everyday: frozenset[str] = EVERYDAY
    everyday_uses: int = 25
    everyday_heads: int = 2
    max_share: float = 0.25  # of all uses: as with depth, what applies everywhere says nothing
    max_child_share: float = 0.9  # of a synset's uses that a single child has: one of the two is left out
    max_concepts: int = 500


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


def choose(wordnet: WordNet, uses: Iterable[Use], choice: Choice) -> list[Concept]:
    """Concepts in an order where parents come first. `uses`: of words that are not of the test split."""
    up = ancestors(wordnet)
    n_uses: Counter[str] = Counter()
    n_running: Counter[str] = Counter()
    heads: dict[str, set[str]] = defaultdict(set)
    named: Counter[str] = Counter()
    n_nouns = 0
    for use in uses:
        n, noun = use.n_mentions + use.n_running, sum(use.mass.values())
        if noun < NOUN_SHARE:
            continue
        n_nouns += n
        for key, share in use.mass.items():
            named[key] += use.n_running if share / noun >= 0.5 else 0
        for key, share in spread(use.mass, up).items():
            if share / noun >= DOMINANT_MASS:
                n_uses[key] += n
                n_running[key] += use.n_running
                heads[key].add(use.head)
    everyday = {key for word in choice.everyday if (key := commonest_sense(wordnet, word)) is not None}
    candidates = {
        key
        for key, n in n_uses.items()
        if n >= (choice.everyday_uses if key in everyday else choice.min_uses)
        and len(heads[key]) >= (choice.everyday_heads if key in everyday else choice.min_heads)
        and n_running[key] >= choice.min_running
        and len(up[key]) >= choice.min_depth
        and n <= choice.max_share * n_nouns
        and not any(TAXONOMY in wordnet.synsets[above].lemmas for above in up[key])
    }
    swallowed = {
        # Where nearly all that is under a synset is under one below it, what people speak of stays, else the lower one.
        key if (key in everyday, named[key] >= choice.min_named) < (above in everyday, named[above] >= choice.min_named)
        else above
        for key in candidates
        for above in up[key][1:]
        if above in candidates
        and n_uses[key] >= choice.max_child_share * n_uses[above]
        and not {key, above} <= everyday
    }  # fmt: skip
    spoken = {key for key in candidates - swallowed if named[key] >= choice.min_named}
    ranked = sorted(spoken, key=lambda key: (key not in everyday, -n_uses[key], key))
    kept = _with_branching(set(ranked[: choice.max_concepts]), candidates - swallowed, up, choice.min_branches)
    chains = {key: [above for above in up[key] if above in kept] for key in kept}
    order = sorted(kept, key=lambda key: (len(chains[key]), [wordnet.ids[above] for above in reversed(chains[key])]))
    names = _names(wordnet, order)
    return [_concept(wordnet, key, names[key], chains[key], n_uses[key], len(heads[key])) for key in order]


def _with_branching(
    kept: set[str], candidates: set[str], up: dict[str, tuple[str, ...]], min_branches: int
) -> set[str]:
    """The kept synsets and those candidates above them under which so many of them, or of these, stand side by side."""
    whole = set(kept)
    for key in sorted(candidates - kept, key=lambda key: (-len(up[key]), key)):  # the deepest first
        right_below = {
            next((between for between in reversed(up[below][: up[below].index(key)]) if between in whole), None)
            for below in kept
            if key in up[below][1:]
        }
        if len(right_below - {None}) >= min_branches:
            whole.add(key)
    return whole


def commonest_sense(wordnet: WordNet, word: str) -> str | None:
    """The noun synset that a word means most often in tagged text, the first of equals; None for no noun."""
    nouns = [sense for sense in wordnet.senses.get(word, ()) if sense.key[0] == "n"]
    return max(nouns, key=lambda sense: sense.count).key if nouns else None


def name_of(wordnet: WordNet, key: str) -> str:
    """The lemma of a synset that people use most for it, by tagged text; the first of equals."""
    counts = {
        sense.lemma: sense.count
        for lemma in wordnet.synsets[key].lemmas
        for sense in wordnet.senses.get(lemma.lower(), ())
        if sense.key == key
    }
    return max(wordnet.synsets[key].lemmas, key=lambda lemma: counts.get(lemma, 0))


def _names(wordnet: WordNet, keys: list[str]) -> dict[str, str]:
    """A name for each, no two alike: what would be is told apart by its kind, and then by its id.

    A concept in PLAIN_NAMES has the name that stands there.
    """
    names = {key: PLAIN_NAMES.get(wordnet.ids[key]) or name_of(wordnet, key) for key in keys}
    kinds, ids = {key: _kind(wordnet, key) for key in keys}, {key: wordnet.ids[key] for key in keys}
    n_named, n_of_kind = Counter(names.values()), Counter((names[key], kinds[key]) for key in keys)
    return {
        key: name if n_named[name] == 1 else f"{name} ({kinds[key] if n_of_kind[name, kinds[key]] == 1 else ids[key]})"
        for key, name in names.items()
    }


def _kind(wordnet: WordNet, key: str) -> str:
    """WordNet's group of a synset; of one that stands above all groups ("top"), what it is a kind of."""
    synset = wordnet.synsets[key]
    above = list(wordnet.chain(synset))[1:]
    return name_of(wordnet, above[0].key) if synset.kind == "top" and above else synset.kind


def _concept(wordnet: WordNet, key: str, name: str, chain: list[str], n_train: int, n_heads: int) -> Concept:
    synset: Synset = wordnet.synsets[key]
    return Concept(
        id=wordnet.ids[key],
        name=name,
        key=key,
        parent=wordnet.ids[chain[1]] if len(chain) > 1 else None,
        level=len(chain) - 1,
        definition=synset.definition,
        lemmas=synset.lemmas,
        n_train=n_train,
        n_heads=n_heads,
    )


def words_under(wordnet: WordNet, concepts: list[Concept], uses: Iterable[Use]) -> dict[str, list[str]]:
    """The nouns that mean something under each concept, by its id, the commonest first.

    A word stands at the lowest concept over what it most often means as a noun, so at one alone, and not where it is
    the concept's own lemma. How common it is: its tagged occurrences in that sense, and its uses in running text, as
    far as they are nouns. Listed are the COMMON_WORDS first of each concept, and what is at hand COMMON_USES times.
    """
    n_uses: Counter[tuple[str, str]] = Counter()
    for use in uses:
        if use.mass:
            n_uses[use.head, max(use.mass, key=lambda key: use.mass[key])] += use.n_running
    by_key = {concept.key: concept for concept in concepts}
    words: dict[str, list[tuple[int, int, str]]] = {concept.id: [] for concept in concepts}
    for lemma, senses in wordnet.senses.items():
        meant, noun = commonest_sense(wordnet, lemma), sum(sense_mass(senses, capitalised=False, lower=False).values())
        if meant is None or noun < RARELY_A_NOUN or lemma in FUNCTION_WORDS:
            continue
        above = next((up.key for up in wordnet.chain(wordnet.synsets[meant]) if up.key in by_key), None)
        if above is None or meant == above:
            continue
        sense = next(sense for sense in senses if sense.key == meant)
        n = sense.count + int(noun * n_uses[lemma, meant])
        words[by_key[above].id].append((-n, len(lemma), sense.lemma))
    return {
        concept: [word for i, (n, _, word) in enumerate(sorted(ranked)) if i < COMMON_WORDS or -n >= COMMON_USES]
        for concept, ranked in words.items()
    }


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

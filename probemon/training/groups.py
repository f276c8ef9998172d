"""Which texts must not be parted: those of one group, one pair, and those that are nearly the same.

    group = group_texts(texts, groups)                     # [N] int64: texts of one number belong together
    parts = split_groups(group, labels, {"train": 0.5, "calibrate": 0.2, "test": 0.3}, seed=0)
    parts["test"]                                          # [N] bool

Near duplicates are those whose sets of three successive words overlap by at least `NEAR` (Jaccard), found by MinHash
with banding (Broder 1997; Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, ch. 3) and then compared exactly.
Labels are spread evenly over the parts by iterative stratification (Sechidis, Tsoumakas & Vlahavas 2011), whole groups
at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints, Mask
from probemon.training.examples import Example
from probemon.training.texts import Text
from probemon.training.words import words_in

NEAR = 0.7
# A pair that overlaps by .7 shares one of the bands with a chance of .9999, one that overlaps by .3 with .23.
_BANDS, _ROWS = 32, 4
_SHINGLE = 3  # words
_PRIME = (1 << 61) - 1


def group_texts(texts: Sequence[str], groups: Sequence[str | None]) -> Ints:
    """Number the groups of texts, in the order of their first text. Texts of one `groups` entry, the same text but for
    case, marks, spaces and how it is encoded, and near duplicates have one number.
    """
    parent = list(range(len(texts)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(i: int, j: int) -> None:
        a, b = root(i), root(j)
        parent[max(a, b)] = min(a, b)

    named: dict[str, int] = {}
    words = [words_in(text, marks=False) for text in texts]
    same: dict[tuple[str, ...] | str, int] = {}
    for i, name in enumerate(groups):
        if name is not None:
            join(i, named.setdefault(name, i))
        # A text without words is the same as another by its characters.
        join(i, same.setdefault(tuple(words[i]) or texts[i].strip(), i))
    distinct = sorted(same.values())
    for i, j in _near([words[i] for i in distinct]):
        join(distinct[i], distinct[j])
    numbers: dict[int, int] = {}
    return np.asarray([numbers.setdefault(root(i), len(numbers)) for i in range(len(texts))], dtype=np.int64)


def group_examples(examples: Sequence[Example], texts: Sequence[Text]) -> Ints:
    """Number the groups of examples: by all that they say, and of chats by what counts of it, too."""
    counted = [" ".join(text.text[a:b] for a, b in text.counted or ()) for text in texts]
    both = [(i, counted[i]) for i, example in enumerate(examples) if example.messages]
    groups = [example.group or f"\0{i}" for i, example in enumerate(examples)]
    contents = [example.content for example in examples]
    return group_texts([*contents, *(own for _, own in both)], [*groups, *(groups[i] for i, _ in both)])[: len(texts)]


def _near(texts: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return pairs of texts whose shingles overlap by at least `NEAR`; every two that do are joined through them."""
    shingles = [_shingles(words) for words in texts]
    generator = np.random.default_rng(0)  # not of the user's seed: which texts are alike is a fact about them
    factors, shifts = generator.integers(1, 1 << 31, (2, _BANDS * _ROWS), dtype=np.uint64)
    found: list[tuple[int, int]] = []
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for i, own in enumerate(shingles):
        if not len(own):
            continue
        # Products of two numbers under 2**31 and 2**32 fit 64 bits.
        signature = ((own[:, None] * factors + shifts) % np.uint64(_PRIME)).min(axis=0).reshape(_BANDS, _ROWS)
        compared: set[int] = set()
        for band, row in enumerate(signature):
            bucket = buckets[band, row.tobytes()]
            for other in bucket:
                if other not in compared:
                    compared.add(other)
                    if _overlap(own, shingles[other]) >= NEAR:
                        found.append((other, i))
                        break  # the others of this bucket that are as near are joined to this one
            bucket.append(i)
    return found


def _shingles(words: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return hashes under 2**32 of the runs of three words; of a shorter text of all of it."""
    runs = {" ".join(words[i : i + _SHINGLE]) for i in range(max(1, len(words) - _SHINGLE + 1))} if words else set()
    hashes = [int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest(), "big") for run in runs]
    return np.asarray(sorted(set(hashes)), dtype=np.uint64)


def _overlap(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> float:
    n_both = len(np.intersect1d(a, b, assume_unique=True))
    return n_both / (len(a) + len(b) - n_both)


def split_groups(
    group: Ints, labels: npt.NDArray[np.int8], shares: Mapping[str, float], *, seed: int
) -> dict[str, Mask]:
    """Part texts by whole groups, `shares` of each label: labels `[N, P]` 1, 0 and -1 for unknown. Return `[N]` a part.

    A concept's rarer side is dealt out first, each group to the part that lacks most of it.
    """
    n_groups = int(group.max()) + 1 if len(group) else 0
    sides = np.concatenate([labels == 1, labels == 0], axis=1)
    counts = np.zeros((n_groups, sides.shape[1] + 1))
    np.add.at(counts, group, np.concatenate([sides, np.ones((len(group), 1), dtype=bool)], axis=1))
    share = np.asarray(list(shares.values()))
    wanted = share[:, None] / share.sum() * counts.sum(axis=0)
    order = np.random.default_rng(seed).permutation(n_groups)
    part = np.full(n_groups, -1)
    # From the rarest side to the last column, by which texts without labels are dealt out, too.
    left = counts.sum(axis=0)
    while (part < 0).any():
        open_sides = np.flatnonzero(left > 0)
        side = int(open_sides[np.argmin(left[open_sides])]) if len(open_sides) else counts.shape[1] - 1
        for g in order[(part[order] < 0) & (counts[order, side] > 0)]:
            best = np.flatnonzero(wanted[:, side] >= wanted[:, side].max() - 1e-9)
            best = best[wanted[best, -1] >= wanted[best, -1].max() - 1e-9]
            part[g] = best[0]
            wanted[best[0]] -= counts[g]
            left -= counts[g]
    return {name: (part == i)[group] for i, name in enumerate(shares)}

"""Groups texts that must not be split: same group, same pair, near duplicates, twins across labels.

    group = group_texts(texts, groups)                     # [N] int64
    parts = split_groups(group, labels, {"train": 0.5, "calibrate": 0.2, "test": 0.3}, seed=0)

Near duplicates share three-word runs (Jaccard, at least `NEAR`), by prefix filtering (Bayardo, Ma & Srikant 2007).
Splits are stratified iteratively (Sechidis, Tsoumakas & Vlahavas 2011).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from probemon.core.hierarchy import Ints, Mask
from probemon.lab.training.examples import Example
from probemon.lab.training.texts import Text
from probemon.lab.training.words import words_in

NEAR = 0.7
TWIN = 0.4
SURELY = 0.75  # of one that is the nearest of several
_WIDTH, _LOOKED, _AT_ONCE = 1024, 3, 1024  # of hashed words; candidates of a text; texts compared at once
_SHINGLE = 3  # words


def group_texts(texts: Sequence[str], groups: Sequence[str | None]) -> Ints:
    """Number the groups of texts, in order of their first text: same `groups` entry, near duplicates, or same text up
    to case, marks, spaces and encoding.
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
        # Without words, compare characters.
        join(i, same.setdefault(tuple(words[i]) or texts[i].strip(), i))
    _join_near({i: _shingles(words[i]) for i in sorted(same.values()) if words[i]}, root, join)
    numbers: dict[int, int] = {}
    return np.asarray([numbers.setdefault(root(i), len(numbers)) for i in range(len(texts))], dtype=np.int64)


@dataclass(frozen=True)
class Groups:
    """`number [N]` of each example; `n_twins` pairs were joined that no field and no near duplicate joined."""

    number: Ints
    n_twins: int = 0


def group_examples(examples: Sequence[Example], texts: Sequence[Text], known: npt.NDArray[np.int8]) -> Groups:
    """Group examples by content, and twins by their labels `known [N, P]`; chats also by counted turns."""
    number = _by_content(examples, texts)
    # Of chats what counts: unlike answers to one question are no twins.
    contents = [
        " ".join(text.text[a:b] for a, b in text.counted or ()) if example.messages else example.content
        for example, text in zip(examples, texts, strict=True)
    ]
    pairs = [(i, j) for i, j in twins(contents, known) if number[i] != number[j]]
    for i, j in pairs:
        number[number == number[j]] = number[i]
    return Groups(np.unique(number, return_inverse=True)[1].astype(np.int64), len(pairs))


def twins(texts: Sequence[str], known: npt.NDArray[np.int8]) -> list[tuple[int, int]]:
    """Return pairs of texts that differ in little but a concept: one has it, the other is known to lack it.

    Each is the other's nearest among texts of unlike labels, by the words both have, or what they begin and end with,
    and they share at least `TWIN` of the longer one; or they share `SURELY`, so that several edits of one text are its
    twins.
    """
    words = [Counter(words_in(text)) for text in texts]
    present, absent = (torch.from_numpy((known == side).astype(np.float32)) for side in (1, 0))
    x = _hashed(words)
    best, other = np.zeros(len(texts)), np.full(len(texts), -1)
    for begin in range(0, len(texts), _AT_ONCE):
        rows = slice(begin, begin + _AT_ONCE)
        unlike = (present[rows] @ absent.T + absent[rows] @ present.T) > 0
        near = torch.where(unlike, x[rows] @ x.T, -1.0).topk(min(_LOOKED, len(texts)), dim=1)
        for i, values, places in zip(
            range(begin, len(texts)), near.values.tolist(), near.indices.tolist(), strict=False
        ):
            for value, j in zip(values, places, strict=True):
                if value >= 0 and (share := _shared(words[i], words[j], texts[i], texts[j])) > best[i]:
                    best[i], other[i] = share, j
    found = []
    for i, j in enumerate(other.tolist()):
        if (j > i and other[j] == i and best[i] >= TWIN) or (other[j] != i and best[i] >= SURELY):
            found.append((i, j))
    return found


def _hashed(words: Sequence[Counter[str]]) -> torch.Tensor:
    """Return unit vectors `[N, _WIDTH]` of rare words, to find candidates."""
    n_with = Counter(word for counts in words for word in counts)
    x = np.zeros((len(words), _WIDTH), dtype=np.float32)
    for row, counts in zip(x, words, strict=True):
        for word, n in counts.items():
            row[int.from_bytes(hashlib.blake2b(word.encode(), digest_size=2).digest(), "big") % _WIDTH] += (
                n** 0.5 * math.log(1 + len(words) / n_with[word])
            )
    return torch.nn.functional.normalize(torch.from_numpy(x))


def _shared(a: Counter[str], b: Counter[str], text: str, other: str) -> float:
    """Return the share of the longer text that both have: of its words, or of its characters at both ends."""
    of_words = (a & b).total() / max(a.total(), b.total(), 1)
    start = _common(text, other)
    end = _common(text[start:][::-1], other[start:][::-1])
    return max(of_words, (start + end) / max(len(text), len(other), 1))


def _common(text: str, other: str) -> int:
    """Return how many first characters are the same."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def _by_content(examples: Sequence[Example], texts: Sequence[Text]) -> Ints:
    """Number the groups of examples, by content; for chats also by counted turns."""
    counted = [" ".join(text.text[a:b] for a, b in text.counted or ()) for text in texts]
    chat_turns = [(i, counted[i]) for i, example in enumerate(examples) if example.messages]
    groups = [example.group or f"\0{i}" for i, example in enumerate(examples)]
    contents = [example.content for example in examples]
    return group_texts(
        [*contents, *(turns for _, turns in chat_turns)], [*groups, *(groups[i] for i, _ in chat_turns)]
    )[: len(texts)]


def _join_near(
    shingles: Mapping[int, npt.NDArray[np.uint64]], root: Callable[[int], int], join: Callable[[int, int], None]
) -> None:
    if not shingles:
        return
    vocabulary, counts = np.unique(np.concatenate(list(shingles.values())), return_counts=True)
    holders: dict[int, list[int]] = defaultdict(list)
    for i, hashes in shingles.items():
        n_holders = counts[np.searchsorted(vocabulary, hashes)]
        rarest = np.lexsort((hashes, n_holders))
        # A near text shares NEAR * n shingles, so one of these, also among its rarest.
        looked_up = rarest[: len(hashes) - math.ceil(NEAR * len(hashes) - 1e-9) + 1]
        shared = hashes[looked_up[n_holders[looked_up] > 1]].tolist()
        for other in set[int]().union(*(holders[shingle] for shingle in shared)):
            if root(other) != root(i) and _overlap(hashes, shingles[other]) >= NEAR:
                join(other, i)
        for shingle in shared:
            holders[shingle].append(i)


def _shingles(words: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return 32-bit hashes of runs of three words; of the whole text if shorter."""
    runs = {" ".join(words[i : i + _SHINGLE]) for i in range(max(1, len(words) - _SHINGLE + 1))}
    hashes = [int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest(), "big") for run in runs]
    return np.asarray(sorted(set(hashes)), dtype=np.uint64)


def _overlap(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> float:
    n_both = len(np.intersect1d(a, b, assume_unique=True))
    return n_both / (len(a) + len(b) - n_both)


def split_groups(
    group: Ints, labels: npt.NDArray[np.int8], shares: Mapping[str, float], *, seed: int
) -> dict[str, Mask]:
    """Split whole groups into `shares` of each label, `labels [N, P]` 1, 0, or -1. Returns masks `[N]`.

    Rarer sides are dealt first, each group to the part that lacks most.
    """
    n_groups = int(group.max()) + 1 if len(group) else 0
    sides = np.concatenate([labels == 1, labels == 0], axis=1)
    counts = np.zeros((n_groups, sides.shape[1] + 1))
    np.add.at(counts, group, np.concatenate([sides, np.ones((len(group), 1), dtype=bool)], axis=1))
    share = np.asarray(list(shares.values()))
    wanted = share[:, None] / share.sum() * counts.sum(axis=0)
    order = np.random.default_rng(seed).permutation(n_groups)
    part = np.full(n_groups, -1)
    # The last column is for texts without labels.
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

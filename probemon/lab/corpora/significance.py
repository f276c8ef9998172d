"""Computes p-values of two sets of documents, and corrects many of them together.

p = mann_whitney(dominance, ties, n, m)         # one concept: are documents of one side larger?
q = benjamini_hochberg(ps)                      # many: the false-discovery rate at which each would be listed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.errors import ConfigError

Doubles = npt.NDArray[np.float64]
_COUNTED = 1_000_000  # additions, a millisecond or two of them, that counting all ways may take
_erfc = np.frompyfunc(math.erfc, 1, 1)
_lgamma = np.frompyfunc(math.lgamma, 1, 1)


def mann_whitney(dominance: int, ties: Sequence[int], n: int, m: int) -> float:
    """Return the two-sided p-value of n and m documents being of one distribution, by the rank sum.

    Mann & Whitney 1947, "On a test of whether one of two random variables is stochastically larger than the other",
    Annals of Mathematical Statistics 18.

    - `dominance`: pairs in which the document of one side is larger, less those in which it is smaller: n m times
      Cliff's delta.
    - `ties`: how many of all documents have each value, the lowest first; 0 is allowed.

    With few documents this counts every way to deal them out. With more it approximates. Most documents have one value,
    0, where the textbook's normal approximation fails: it gives 1 document of 100 against none of 5,000 p = 1e-12,
    where 0.04 is right. So the number of a side's documents with other values than the commonest has its exact
    (hypergeometric) distribution; only their rank sum, given that number, has the normal one, with the variance that
    ties leave and a correction for continuity. With two values in all this is Fisher's exact test. The smaller tail is
    doubled.
    """
    sizes = np.asarray([size for size in ties if size], dtype=np.int64)
    total = n + m
    if sizes.sum() != total:
        raise ConfigError(f"{sizes.sum()} values for {n} and {m} documents: give every document's")
    rank: Ints = 2 * np.cumsum(sizes) - sizes  # twice the midrank, less 1, whose mean over all documents is `total`
    if n > m:
        n, m, dominance = m, n, -dominance
    if 2 * (n * total) ** 2 <= _COUNTED:
        return _counted(np.repeat(rank, sizes).tolist(), n, dominance)
    common = int(np.argmax(sizes))
    sizes_other, rank_other = np.delete(sizes, common), np.delete(rank, common)
    k = int(sizes_other.sum())
    if not k:
        return 1.0
    j = np.arange(max(0, k - m), min(k, n) + 1)  # of the k with other values, how many are on the first side
    share = np.exp(_log_choose(k, j) + _log_choose(total - k, n - j) - _log_choose(total, n))
    mean = (total - int(rank[common])) * ((j * total - k * n) / k)  # of the dominance, given j
    spread = float((sizes_other * (rank_other - (sizes_other * rank_other).sum() / k) ** 2).sum())
    deviation = np.sqrt(j * (k - j) / max(1, k * (k - 1)) * spread)
    tails = [float(share @ _not_under(gap, deviation)) for gap in (mean - dominance, dominance - mean)]
    return min(1.0, 2 * min(tails))


def benjamini_hochberg(p: npt.ArrayLike) -> Doubles:
    """Return q-values [K] of p-values [K]: the least false-discovery rate at which each is listed.

    Benjamini & Hochberg 1995, "Controlling the false discovery rate" (JRSS B 57). The rate holds for independent tests
    and for positively dependent ones (Benjamini & Yekutieli 2001, "The control of the false discovery rate in multiple
    testing under dependency", Annals of Statistics 29), as a hierarchy's are: an ancestor tends to be over the floor
    where its descendant is. The theorem is of one-sided tests; for these two-sided ones the tests simulate it.
    """
    p_values = np.asarray(p, dtype=np.float64)
    order = np.argsort(-p_values, kind="stable")
    rank = len(p_values) - np.arange(len(p_values))
    q = np.empty(len(p_values))
    q[order] = np.minimum.accumulate(p_values[order] * len(p_values) / rank)
    return q


def _counted(ranks: list[int], n: int, dominance: int) -> float:
    """Return the p-value by all ways to choose n of the documents with these ranks."""
    # In doubles: all terms are positive, so sums are good to the last digits.
    ways = np.zeros((n + 1, 2 * n * len(ranks) + 1))  # to take so many documents with so large a sum
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    of_n, at = ways[n], dominance + n * len(ranks)
    return min(1.0, 2 * float(min(of_n[at:].sum(), of_n[: at + 1].sum()) / of_n.sum()))


def _not_under(gap: Doubles, deviation: Doubles) -> Doubles:
    """Return the probability that a whole number is not under another one, which is `gap` below its mean.

    It is the normal one, half a unit of the rank sum off, and certain where the number does not vary.
    """
    z = (gap + 1) / np.where(deviation > 0, deviation, 1)
    return np.where(deviation > 0, np.asarray(_erfc(-z / math.sqrt(2)), dtype=np.float64) / 2, gap > -0.5)


def _log_choose(n: int, k: Any) -> Doubles:
    whole, part, rest = (np.asarray(_lgamma(np.asarray(x) + 1.0), dtype=np.float64) for x in (n, k, n - k))
    return whole - part - rest

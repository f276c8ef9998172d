"""P-values of differences between two sets of documents, and their correction for multiple tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.errors import ConfigError

Doubles = npt.NDArray[np.float64]
_COUNTED = 1_000_000  # additions: a millisecond or two
_erfc = np.frompyfunc(math.erfc, 1, 1)
_lgamma = np.frompyfunc(math.lgamma, 1, 1)


def mann_whitney(dominance: int, ties: Sequence[int], n: int, m: int) -> float:
    """Return the two-sided p-value that n and m documents have one distribution, by the rank sum (Mann & Whitney 1947,
    Annals of Mathematical Statistics 18).

    - `dominance`: n m times Cliff's delta.
    - `ties`: number of documents with each value, lowest first.

    Exact for few documents. With many, most have the value 0 and the usual normal approximation fails (1 of 100 against
    0 of 5,000: p = 1e-12 instead of 0.04). So the number of a side's documents with uncommon values is hypergeometric;
    only their rank sum, given that number, is normal, with ties and continuity correction. The smaller tail is doubled.
    """
    sizes = np.asarray([size for size in ties if size], dtype=np.int64)
    total = n + m
    if sizes.sum() != total:
        raise ConfigError(f"{sizes.sum()} values for {n} and {m} documents: give every document's")
    rank: Ints = 2 * np.cumsum(sizes) - sizes  # twice the midrank, minus 1
    if n > m:
        n, m, dominance = m, n, -dominance
    if 2 * (n * total) ** 2 <= _COUNTED:
        return _counted(np.repeat(rank, sizes).tolist(), n, dominance)
    common = int(np.argmax(sizes))
    sizes_other, rank_other = np.delete(sizes, common), np.delete(rank, common)
    k = int(sizes_other.sum())
    if not k:
        return 1.0
    j = np.arange(max(0, k - m), min(k, n) + 1)  # uncommon values on the first side
    share = np.exp(_log_choose(k, j) + _log_choose(total - k, n - j) - _log_choose(total, n))
    mean = (total - int(rank[common])) * ((j * total - k * n) / k)  # of the dominance, given j
    spread = float((sizes_other * (rank_other - (sizes_other * rank_other).sum() / k) ** 2).sum())
    deviation = np.sqrt(j * (k - j) / max(1, k * (k - 1)) * spread)
    tails = [float(share @ _not_under(gap, deviation)) for gap in (mean - dominance, dominance - mean)]
    return min(1.0, 2 * min(tails))


def benjamini_hochberg(p: npt.ArrayLike) -> Doubles:
    """Return q-values [K] of p-values [K]: the least false-discovery rate at which each is listed.

    Benjamini & Hochberg 1995, "Controlling the false discovery rate" (JRSS B 57). Valid for independent and positively
    dependent tests (Benjamini & Yekutieli 2001, Annals of Statistics 29), like those of a hierarchy.
    """
    p_values = np.asarray(p, dtype=np.float64)
    order = np.argsort(-p_values, kind="stable")
    rank = len(p_values) - np.arange(len(p_values))
    q = np.empty(len(p_values))
    q[order] = np.minimum.accumulate(p_values[order] * len(p_values) / rank)
    return q


def _counted(ranks: list[int], n: int, dominance: int) -> float:
    # All terms are positive: doubles suffice.
    ways = np.zeros((n + 1, 2 * n * len(ranks) + 1))  # by number and sum
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    ways_of_n, at = ways[n], dominance + n * len(ranks)
    return min(1.0, 2 * float(min(ways_of_n[at:].sum(), ways_of_n[: at + 1].sum()) / ways_of_n.sum()))


def _not_under(gap: Doubles, deviation: Doubles) -> Doubles:
    """Normal probability, with continuity correction, of an integer not under one `gap` below its mean."""
    z = (gap + 1) / np.where(deviation > 0, deviation, 1)
    return np.where(deviation > 0, np.asarray(_erfc(-z / math.sqrt(2)), dtype=np.float64) / 2, gap > -0.5)


def _log_choose(n: int, k: Any) -> Doubles:
    whole, part, rest = (np.asarray(_lgamma(np.asarray(x) + 1.0), dtype=np.float64) for x in (n, k, n - k))
    return whole - part - rest

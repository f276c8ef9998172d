"""Softmax groups: probes that exclude one another, whose scores are a softmax of their logits and add up to 1.

    groups = SoftmaxGroups([0, -1, 0, 0])                  # probes 0, 2 and 3 are one group, probe 1 stands alone
    groups.close(mask)                                     # [N, P]: with every member of a group that has one
    order, starts = groups.segments(rows, probes)          # of pairs of members: group by group
    scores = softmax(logits[order], starts)

The score of a member is exp(z - logsumexp of the logits of its group), in fp64, then rounded to fp32. So one member is
known only where all are: a group is evaluated whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class SoftmaxGroups:
    """The groups of P probes: `of [P]`, the group of each, -1 for none, numbered by first members; `members [E]`, group
    by group and ascending within one, `ptr [G+1]`, `sizes [G]`. It is false where there are none.
    """

    def __init__(self, of: npt.ArrayLike) -> None:
        given = np.asarray(of, dtype=np.int64)
        self.of: Ints = np.full(len(given), -1, dtype=np.int64)
        probes = np.flatnonzero(given >= 0)
        _, first, group = np.unique(given[probes], return_index=True, return_inverse=True)
        number = np.empty(len(first), dtype=np.int64)
        number[np.argsort(first)] = np.arange(len(first))
        self.of[probes] = number[group]
        self.members: Ints = probes[np.argsort(self.of[probes], kind="stable")]
        self.sizes: Ints = np.bincount(self.of[probes], minlength=len(first)).astype(np.int64)
        self.ptr: Ints = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def firsts(self) -> Ints:
        """The first member of the group of each of `members` `[E]`."""
        return np.repeat(self.members[self.ptr[:-1]], self.sizes)

    def mates(self, probe: int) -> Ints:
        """Return all members of a probe's group, itself too; itself alone where it has none."""
        group = self.of[probe]
        return np.array([probe]) if group < 0 else self.members[self.ptr[group] : self.ptr[group + 1]]

    def close(self, mask: Mask) -> Mask:
        """Return `mask [N, P]` with every member of a group that has a member in it."""
        if not len(self):
            return mask
        closed = mask.copy()
        closed[:, self.members] = np.repeat(self.any_member(mask), self.sizes, axis=1)
        return closed

    def any_member(self, mask: Mask) -> Mask:
        """Return whether a member of each group is in `mask [N, P]`, `[N, G]`."""
        return np.logical_or.reduceat(mask[:, self.members], self.ptr[:-1], axis=1)

    def segments(self, rows: Ints, probes: Ints) -> tuple[Ints, Ints]:
        """Lay out M pairs of a row and a member: return their order, group by group and ascending within one, and where
        each group of a row begins. Every group of a row must be there whole.
        """
        key = rows * len(self) + self.of[probes]
        order = np.lexsort((probes, key))
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        sizes = np.diff(starts, append=len(order))
        if not np.array_equal(sizes, self.sizes[self.of[probes[order[starts]]]]):
            raise AssertionError("a softmax group is evaluated in part: its scores would be wrong")
        return order, starts

    @staticmethod
    def join(several: list[SoftmaxGroups]) -> SoftmaxGroups:
        """Return the groups of several sets of probes, which are numbered one set after another."""
        before = np.cumsum([0, *map(len, several)])
        return SoftmaxGroups(
            np.concatenate(
                [np.where(one.of < 0, -1, one.of + n) for one, n in zip(several, before[:-1].tolist(), strict=True)]
            )
        )


def softmax(logits: Floats, starts: Ints) -> Floats:
    """Return the softmax `[M]` fp32 of logits `[M]` over segments, which begin at `starts`; NaN for a whole segment
    where one of its logits is not finite.
    """
    z = logits.astype(np.float64)
    sizes = np.diff(starts, append=len(z))
    if not len(z):
        return np.zeros(0, dtype=np.float32)
    with np.errstate(invalid="ignore"):  # infinity - infinity
        powers = np.exp(z - np.repeat(np.maximum.reduceat(z, starts), sizes))
    scores: Any = (powers / np.repeat(np.add.reduceat(powers, starts), sizes)).astype(np.float32)
    return scores

"""Softmax groups: mutually exclusive probes, whose scores are a softmax of their logits.

A score needs all logits of its group, so groups are evaluated whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class SoftmaxGroups:
    """The groups of P probes; false if there are none.

    `of [P]`: each probe's group or -1, numbered by first members; `members [E]`: by group, ascending; `ptr [G+1]`,
    `sizes [G]`.
    """

    def __init__(self, of: npt.ArrayLike) -> None:
        labels = np.asarray(of, dtype=np.int64)
        self.of: Ints = np.full(len(labels), -1, dtype=np.int64)
        probes = np.flatnonzero(labels >= 0)
        _, first, group = np.unique(labels[probes], return_index=True, return_inverse=True)
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
        """First member of the group of each of `members`, `[E]`."""
        return np.repeat(self.members[self.ptr[:-1]], self.sizes)

    def mates(self, probe: int) -> Ints:
        """Return all members of a probe's group, or the probe alone."""
        group = self.of[probe]
        return np.array([probe]) if group < 0 else self.members[self.ptr[group] : self.ptr[group + 1]]

    def close(self, mask: Mask) -> Mask:
        """Return `mask [N, P]` with groups completed."""
        if not len(self):
            return mask
        closed = mask.copy()
        closed[:, self.members] = np.repeat(self.any_member(mask), self.sizes, axis=1)
        return closed

    def any_member(self, mask: Mask) -> Mask:
        """Mask `[N, G]`: groups with a member in `mask [N, P]`."""
        return np.logical_or.reduceat(mask[:, self.members], self.ptr[:-1], axis=1)

    def segments(self, rows: Ints, probes: Ints) -> tuple[Ints, Ints]:
        """Sort M (row, member) pairs of complete groups; return their order and each group's start."""
        key = rows * len(self) + self.of[probes]
        order = np.lexsort((probes, key))
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        sizes = np.diff(starts, append=len(order))
        if not np.array_equal(sizes, self.sizes[self.of[probes[order[starts]]]]):
            raise AssertionError("a softmax group is evaluated in part: its scores would be wrong")
        return order, starts

    @staticmethod
    def join(several: list[SoftmaxGroups]) -> SoftmaxGroups:
        """Return the groups of sets of probes numbered one after another."""
        before = np.cumsum([0, *map(len, several)])
        return SoftmaxGroups(
            np.concatenate(
                [np.where(one.of < 0, -1, one.of + n) for one, n in zip(several, before[:-1].tolist(), strict=True)]
            )
        )


def softmax(logits: Floats, starts: Ints) -> Floats:
    """Return the softmax `[M]` fp32 over segments, computed in fp64; NaN for a segment with a non-finite logit."""
    z = logits.astype(np.float64)
    sizes = np.diff(starts, append=len(z))
    if not len(z):
        return np.zeros(0, dtype=np.float32)
    with np.errstate(invalid="ignore"):  # inf - inf
        powers = np.exp(z - np.repeat(np.maximum.reduceat(z, starts), sizes))
    scores: Any = (powers / np.repeat(np.add.reduceat(powers, starts), sizes)).astype(np.float32)
    return scores

"""Branches: which part of a hierarchy is watched.

    watched = watched_probes(tree, include=[3], exclude=[17], depth={3: 2})     # [P] bool, None: all of it
    narrower = without(tree, watched)                                           # nothing opens into the rest

What is left out goes with everything below it, so whatever is watched keeps all its parents, and its scores. For these
a softmax group is watched whole, too: including a member includes the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from probemon.core.hierarchy import ConceptTree, Ints, Mask


def watched_probes(
    tree: ConceptTree, include: Sequence[int] | Ints, exclude: Sequence[int] | Ints, depth: Mapping[int, int]
) -> Mask | None:
    """Return the probes that are watched `[P]`, None where all are.

    `include`: these, all below, and all that is above any of these; all of the hierarchy where there are none.
    `exclude`: without these and all below them. `depth`: of these branches only so many levels below, by the longest
    way down to a concept. `cut_group` finds a softmax group that this leaves out in part.
    """
    if not len(include) and not len(exclude) and not depth:
        return None
    left_out = _below(tree, exclude)
    for top, n_levels in depth.items():
        left_out |= _below(tree, np.flatnonzero(_steps_below(tree, top) > n_levels))
    if len(include):
        left_out |= ~tree.groups.close(tree.close(_below(tree, include)[None]))[0]
    return ~left_out


def cut_group(tree: ConceptTree, watched: Mask) -> tuple[int, int] | None:
    """Return a member that is watched `[P]` and one that is not, of a softmax group that is left out in part."""
    cut = watched != tree.groups.close(watched[None])[0]
    if not cut.any():
        return None
    lost = int(np.flatnonzero(cut)[0])
    return next(int(mate) for mate in tree.groups.mates(lost) if watched[mate]), lost


def without(tree: ConceptTree, watched: Mask) -> ConceptTree:
    """Return the hierarchy in which nothing opens into what is not watched; numbers and order are the same."""
    parent = np.repeat(np.arange(tree.n), np.diff(tree.child_ptr))
    kept = watched[tree.child_idx]
    counts = np.bincount(parent[kept], minlength=tree.n)
    # Its levels are the ranks of the whole, since without some edges lower ones would do and the numbering would not.
    return ConceptTree(np.concatenate([[0], np.cumsum(counts)]), tree.child_idx[kept], tree.rank, tree.groups.of)


def _below(tree: ConceptTree, probes: Sequence[int] | Ints) -> Mask:
    """Return these probes and all below them `[P]`."""
    below = np.zeros(tree.n, dtype=bool)
    below[list(probes)] = True
    for probe in range(tree.n):  # a parent's number is smaller than its child's
        if below[probe]:
            below[tree.children(probe)] = True
    return below


def _steps_below(tree: ConceptTree, top: int) -> Ints:
    """Return how many edges the longest way down from `top` to each probe has, -1 where there is none `[P]`."""
    steps = np.full(tree.n, -1, dtype=np.int64)
    steps[top] = 0
    for probe in range(top, tree.n):
        if steps[probe] >= 0:
            children = tree.children(probe)
            steps[children] = np.maximum(steps[children], steps[probe] + 1)
    return steps

"""Branches: the watched part of a hierarchy.

Exclusion covers everything below a probe, so watched probes keep their parents and scores. Softmax groups are included
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from probemon.core.hierarchy import ConceptTree, Ints, Mask


def watched_probes(
    tree: ConceptTree, include: Sequence[int] | Ints, exclude: Sequence[int] | Ints, depth: Mapping[int, int]
) -> Mask | None:
    """Return the watched probes `[P]`, None for all.

    - `include`: these, all below and all above; empty for everything.
    - `exclude`: not these, nor any below.
    - `depth`: maximum levels below a probe, by the longest path.
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
    """Return a watched and an unwatched member of a partly watched softmax group, or None."""
    cut = watched != tree.groups.close(watched[None])[0]
    if not cut.any():
        return None
    lost = int(np.flatnonzero(cut)[0])
    return next(int(mate) for mate in tree.groups.mates(lost) if watched[mate]), lost


def without(tree: ConceptTree, watched: Mask) -> ConceptTree:
    """Return the hierarchy without edges to unwatched probes; numbering is unchanged."""
    parent = np.repeat(np.arange(tree.n), np.diff(tree.child_ptr))
    is_kept = watched[tree.child_idx]
    counts = np.bincount(parent[is_kept], minlength=tree.n)
    # Ranks become levels: fewer edges would give lower ranks, against the numbering.
    return ConceptTree(np.concatenate([[0], np.cumsum(counts)]), tree.child_idx[is_kept], tree.rank, tree.groups.of)


def _below(tree: ConceptTree, probes: Sequence[int] | Ints) -> Mask:
    """Mask `[P]` of these probes and all below."""
    below = np.zeros(tree.n, dtype=bool)
    below[list(probes)] = True
    for probe in range(tree.n):  # parents come first
        if below[probe]:
            below[tree.children(probe)] = True
    return below


def _steps_below(tree: ConceptTree, top: int) -> Ints:
    """Longest path from `top` to each probe `[P]`, in edges; -1 if none."""
    steps = np.full(tree.n, -1, dtype=np.int64)
    steps[top] = 0
    for probe in range(top, tree.n):
        if steps[probe] >= 0:
            children = tree.children(probe)
            steps[children] = np.maximum(steps[children], steps[probe] + 1)
    return steps

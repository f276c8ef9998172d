"""ConceptTree: the concept hierarchy, a forest or DAG over probes 0..P-1.

    order, tree = ConceptTree.build(ids, parents)       # from names
    tree.children(3), tree.path(17), tree.ancestors(17)

Levels are named by the pack; edges usually go down a level, but need not. `rank` gives the order of evaluation: a
probe's level, or one more than its parents' highest rank if larger. Probes are numbered by rank, then first parent, so
a parent's number is smaller than its child's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from probemon.core.softmax_groups import Ints, Mask, SoftmaxGroups
from probemon.errors import HierarchyError

_NUMBERING = "probes must be numbered by level, each after its parents: write the pack with ProbePack.write"
_UNLIKE = (
    "{!r} and {!r} are of one softmax group, which is scored as a whole: give its members the same parents and the"
    " same level"
)
MAX_LEVEL = 2**15 - 1  # results keep levels in 16 bits


class ConceptTree:
    """Children and parents of every probe in CSR form, validated. Raises `HierarchyError`.

    `child_ptr [P+1]`, `child_idx [E]`, `level [P]`; derived: `parent_ptr [P+1]`, `parent_idx [E]` (ascending within a
    probe), `first_parent [P]` (-1 for a root), `roots`, `is_tree` (at most one parent each), `rank [P]` (never falls),
    `rank_slices` (probes of each rank) and `groups`, from `softmax_group [P]`.
    """

    def __init__(
        self,
        child_ptr: npt.ArrayLike,
        child_idx: npt.ArrayLike,
        level: npt.ArrayLike,
        softmax_group: npt.ArrayLike | None = None,
    ) -> None:
        self.child_ptr = np.asarray(child_ptr, dtype=np.int64)
        self.child_idx = np.asarray(child_idx, dtype=np.int64)
        self.level = np.asarray(level, dtype=np.int64)
        n = self.n = len(self.level)
        ptr, idx = self.child_ptr, self.child_idx
        # Bounds first: differences of arbitrary numbers may wrap around.
        if (
            len(ptr) != n + 1
            or ptr[0] != 0
            or ptr[-1] != len(idx)
            or ptr.min() < 0
            or ptr.max() > len(idx)
            or (np.diff(ptr) < 0).any()
        ):
            raise HierarchyError(f"child_ptr must rise from 0 to {len(idx)} in {n + 1} entries, one more than probes")
        if len(idx) and (idx.min() < 0 or idx.max() >= n):
            raise HierarchyError(f"child_idx must lie in 0..{n - 1}, found {idx.min()}..{idx.max()}")
        edge_parent = np.repeat(np.arange(n), np.diff(ptr))
        if n and (self.level.min() < 0 or self.level.max() > MAX_LEVEL):
            raise HierarchyError(f"levels must lie in 0..{MAX_LEVEL}, found {self.level.min()}..{self.level.max()}")
        if (idx <= edge_parent).any():
            cycle = _find_cycle({i: idx[ptr[i] : ptr[i + 1]].tolist() for i in range(n)})
            if cycle is not None:
                raise HierarchyError(f"the hierarchy has a cycle through probes {cycle}: remove one of these edges")
            raise HierarchyError(_NUMBERING)
        rank = self.level
        if (rank[idx] <= rank[edge_parent]).any():
            rank = rank.copy()
            # In order of parents, so that each one's rank is final.
            for parent, child in zip(edge_parent.tolist(), idx.tolist(), strict=True):
                rank[child] = max(rank[child], rank[parent] + 1)
        if n and (np.diff(rank) < 0).any():
            raise HierarchyError(_NUMBERING)
        order = np.lexsort((edge_parent, idx))
        self.parent_idx = edge_parent[order]
        counts = np.bincount(idx, minlength=n) if n else np.zeros(0, dtype=np.int64)
        if ((np.diff(idx[order]) == 0) & (np.diff(self.parent_idx) == 0)).any():
            raise HierarchyError("an edge of the hierarchy occurs twice")
        self.parent_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.roots: Ints = np.flatnonzero(counts == 0)
        self.is_tree = bool((counts <= 1).all())
        self.first_parent = np.full(n, -1, dtype=np.int64)
        has_parents = self.has_parents = counts > 0
        self.first_parent[has_parents] = self.parent_idx[self.parent_ptr[:-1][has_parents]]
        self.has_children = np.diff(ptr) > 0
        self._edge_child = idx[order]
        # Starts for reduceat, without empty segments.
        self._segments = self.parent_ptr[:-1][has_parents]
        self.rank: Ints = rank
        # Only ranks that occur: a forged level may be any number.
        bounds = [*np.searchsorted(rank, np.unique(rank)).tolist(), n]
        self.rank_slices = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self._with_parents = [
            (probes, self.first_parent[probes])
            for probes in (np.arange(at.start, at.stop)[has_parents[at]] for at in self.rank_slices)
            if len(probes)
        ]
        self.groups = SoftmaxGroups(np.full(n, -1) if softmax_group is None else self._checked_groups(softmax_group))
        self._check_siblings()
        # Deepest rank first: inner probes, their children, starts of these.
        self._below: list[tuple[Ints, Ints, Ints]] = []
        for at in reversed(self.rank_slices):
            inner = np.arange(at.start, at.stop)[self.has_children[at]]
            if len(inner):
                first, last = self.child_ptr[at.start], self.child_ptr[at.stop]
                self._below.append((inner, self.child_idx[first:last], self.child_ptr[inner] - first))

    @classmethod
    def build(
        cls,
        ids: Sequence[str],
        parents: Sequence[Sequence[str]],
        levels: Sequence[int] | None = None,
        softmax_group: Sequence[int] | None = None,
    ) -> tuple[Ints, ConceptTree]:
        """Number named concepts. Return `(order, tree)`: probe i is the concept at position `order[i]`.

        `levels` defaults to the longest path from a root. Errors name the concept.
        """
        up = _parent_positions(ids, parents)
        down: dict[int, list[int]] = {i: [] for i in range(len(ids))}
        for child, above in enumerate(up):
            for parent in above:
                down[parent].append(child)
        cycle = _find_cycle(down)
        if cycle is not None:
            raise HierarchyError(
                f"the hierarchy has a cycle: {' > '.join(ids[i] for i in cycle)}: remove one of these edges"
            )
        depth = list(levels) if levels is not None else _ranks(down, up, [0] * len(up))
        for name, level in zip(ids, depth, strict=True):
            if not 0 <= level <= MAX_LEVEL:
                raise HierarchyError(f"concept {name!r} is at level {level}: levels lie in 0..{MAX_LEVEL}")
        order = _by_rank_and_first_parent(_ranks(down, up, depth), up)
        number = {position: i for i, position in enumerate(order)}
        ptr, idx = [0], []
        for position in order:
            idx += sorted(number[child] for child in down[position])
            ptr.append(len(idx))
        groups = None
        if softmax_group is not None:
            _check_groups(softmax_group, ids, parents, depth)
            groups = [softmax_group[i] for i in order]
        return np.asarray(order, dtype=np.int64), cls(ptr, idx, [depth[i] for i in order], groups)

    def _checked_groups(self, softmax_group: npt.ArrayLike) -> Ints:
        of = np.asarray(softmax_group, dtype=np.int64)
        if of.shape != (self.n,) or (self.n and of.min() < -1):
            raise HierarchyError(
                f"softmax_group has shape {of.shape} and values from {of.min(initial=0)}: expected ({self.n},), -1 for"
                " a probe without a group, and else the number of its group"
            )
        return of

    def _check_siblings(self) -> None:
        groups = self.groups
        if not len(groups):
            return
        if (groups.sizes < 2).any():
            alone = groups.members[groups.ptr[:-1][groups.sizes < 2]][0]
            raise HierarchyError(f"probe {alone} is alone in its softmax group: a group has two members or more")
        members, firsts = groups.members, groups.firsts
        n_parents = np.diff(self.parent_ptr)
        unlike = (self.level[members] != self.level[firsts]) | (n_parents[members] != n_parents[firsts])
        if not unlike.any():
            (parents, _, lengths), (parents_of_firsts, _, _) = self._parents_of(members), self._parents_of(firsts)
            unlike[np.repeat(np.arange(len(members)), lengths)[parents != parents_of_firsts]] = True
        if unlike.any():
            at = int(np.flatnonzero(unlike)[0])
            raise HierarchyError(_UNLIKE.format(int(firsts[at]), int(members[at])))

    def children(self, probe: int) -> Ints:
        """Ascending children."""
        return self.child_idx[self.child_ptr[probe] : self.child_ptr[probe + 1]]

    def parents(self, probe: int) -> Ints:
        """Ascending parents."""
        return self.parent_idx[self.parent_ptr[probe] : self.parent_ptr[probe + 1]]

    def ancestors(self, probe: int) -> set[int]:
        """Every probe above this one."""
        ancestors: set[int] = set()
        pending = [probe]
        while pending:
            new = set(self.parents(pending.pop()).tolist()) - ancestors
            ancestors |= new
            pending += new
        return ancestors

    def levels_below(self, probes: Sequence[int]) -> list[list[int]]:
        """Return the probes, then their children, and so on, each at its first occurrence."""
        levels, met = [list(probes)], set(probes)
        while levels[-1]:
            children = [child for probe in levels[-1] for child in self.children(probe).tolist()]
            levels.append([child for child in dict.fromkeys(children) if child not in met])
            met.update(levels[-1])
        return levels[:-1]

    def path(self, probe: int) -> list[int]:
        """From the root to the probe, by first parents."""
        path = [probe]
        while self.first_parent[path[-1]] >= 0:
            path.append(int(self.first_parent[path[-1]]))
        return path[::-1]

    def children_of(self, mask: Mask) -> Mask:
        """Children of the probes in `mask [N, P]`, `[N, P]`."""
        out = np.zeros_like(mask)
        if self.is_tree:
            out[:, self.has_parents] = mask[:, self.first_parent[self.has_parents]]
        elif len(self.parent_idx):
            out[:, self.has_parents] = np.logical_or.reduceat(mask[:, self.parent_idx], self._segments, axis=1)
        return out

    def close(self, mask: Mask) -> Mask:
        """`mask [N, P]` with all ancestors added."""
        out = mask.copy()
        # Pruned masks are usually closed already.
        if not (mask[:, self._edge_child] & ~mask[:, self.parent_idx]).any():
            return out
        for parents, children, starts in self._below:
            out[:, parents] |= np.logical_or.reduceat(out[:, children], starts, axis=1)
        return out

    def times_best_parent(self, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Turn scores `[N, P]` into path scores, in place: each times its best parent's."""
        for probes, first_parent in self._with_parents:
            scores[:, probes] *= scores[:, first_parent] if self.is_tree else self.best_parent(scores, probes)
        return scores

    def times_best_parent_of(self, scores: npt.NDArray[np.float32], rows: Ints, probes: Ints) -> None:
        """Make path scores of (row, probe) pairs in place; parents are final or among the pairs."""
        ranks = self.rank[probes]
        for rank in np.unique(ranks[self.has_parents[probes]]):  # parents first
            in_rank = (ranks == rank) & self.has_parents[probes]
            row, probe = rows[in_rank], probes[in_rank]
            if self.is_tree:
                scores[row, probe] *= scores[row, self.first_parent[probe]]
            else:
                parents, starts, lengths = self._parents_of(probe)
                scores[row, probe] *= np.maximum.reduceat(scores[np.repeat(row, lengths), parents], starts)

    def best_parent(self, scores: npt.NDArray[np.float32], probes: Ints) -> npt.NDArray[np.float32]:
        """Largest parent score of each of `probes`, `[N, len(probes)]`; all must have parents."""
        if self.is_tree:
            return scores[:, self.first_parent[probes]]
        parents, starts, _ = self._parents_of(probes)
        best: npt.NDArray[np.float32] = np.maximum.reduceat(scores[:, parents], starts, axis=1)
        return best

    def _parents_of(self, probes: Ints) -> tuple[Ints, Ints, Ints]:
        """Concatenated parents of the probes, their starts and counts."""
        starts = self.parent_ptr[probes]
        lengths = self.parent_ptr[probes + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        return self.parent_idx[np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())], offsets, lengths

    def min_over_descendants(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Smallest of `values [P]` strictly below each probe; +inf for a leaf."""
        below = np.full(self.n, np.inf, dtype=np.float32)
        for probe in range(self.n - 1, -1, -1):
            for parent in self.parents(probe).tolist():
                below[parent] = min(below[parent], values[probe], below[probe])
        return below


def _parent_positions(ids: Sequence[str], parents: Sequence[Sequence[str]]) -> list[list[int]]:
    position: dict[str, int] = {}
    for i, name in enumerate(ids):
        if name in position:
            raise HierarchyError(f"concept id {name!r} is given twice: ids are unique in a pack")
        position[name] = i
    up: list[list[int]] = []
    for name, names in zip(ids, parents, strict=True):
        for parent in names:
            if parent not in position:
                raise HierarchyError(f"concept {name!r} names a parent {parent!r} that is not in the pack")
        if len(set(names)) != len(names):
            raise HierarchyError(f"concept {name!r} names a parent twice: {list(names)}")
        up.append([position[parent] for parent in names])
    return up


def _check_groups(
    softmax_group: Sequence[int], ids: Sequence[str], parents: Sequence[Sequence[str]], levels: Sequence[int]
) -> None:
    members: dict[int, list[int]] = {}
    for i, group in enumerate(softmax_group):
        if group >= 0:
            members.setdefault(group, []).append(i)
    for first, *others in members.values():
        if not others:
            raise HierarchyError(f"concept {ids[first]!r} is alone in its softmax group: a group has two or more")
        for other in others:
            if set(parents[first]) != set(parents[other]) or levels[first] != levels[other]:
                raise HierarchyError(_UNLIKE.format(ids[first], ids[other]))


def _by_rank_and_first_parent(ranks: Sequence[int], up: Sequence[Sequence[int]]) -> list[int]:
    by_rank: dict[int, list[int]] = {}
    for i, rank in enumerate(ranks):
        by_rank.setdefault(rank, []).append(i)
    number: dict[int, int] = {}
    for rank in sorted(by_rank):  # parents are numbered first
        members = sorted(by_rank[rank], key=lambda i: (min((number[p] for p in up[i]), default=-1), i))
        number |= {member: len(number) + i for i, member in enumerate(members)}
    return list(number)


def _ranks(down: Mapping[int, Sequence[int]], up: Sequence[Sequence[int]], levels: Sequence[int]) -> list[int]:
    """Return each concept's level, or one more than its parents' highest rank if that is more."""
    rank = list(levels)
    waiting = [len(above) for above in up]
    ready = [i for i, count in enumerate(waiting) if count == 0]
    while ready:
        parent = ready.pop()
        for child in down[parent]:
            rank[child] = max(rank[child], rank[parent] + 1)
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)
    return rank


def _find_cycle(down: Mapping[int, Sequence[int]]) -> list[int] | None:
    """One cycle that ends where it begins, or None. Iterative: a bad pack must not exhaust the stack."""
    done: set[int] = set()
    for start in down:
        if start in done:
            continue
        trail, on_trail = [start], {start: 0}
        pending = [iter(down[start])]
        while pending:
            child = next(pending[-1], None)
            if child is None:
                done.add(trail[-1])
                del on_trail[trail.pop()]
                pending.pop()
            elif child in on_trail:
                return [*trail[on_trail[child] :], child]
            elif child not in done:
                on_trail[child] = len(trail)
                trail.append(child)
                pending.append(iter(down[child]))
    return None

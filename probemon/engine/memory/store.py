"""ProbeStore keeps probe state dicts in RAM, in an LRU cache of bounded bytes.

store = ProbeStore(PackSource(pack), max_bytes=64 << 20)
loaded = store.get_many([3, 4, 5])          # {3: {"w1": ..., "b1": ...}, ...}
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import cachetools
import numpy as np
import torch
from torch import Tensor

from probemon.engine.memory.slab import Layout, Slab, SlabRecord
from probemon.errors import PackCorrupt, ProbeLoadError
from probemon.packs.opened import read_rows, read_soon
from probemon.packs.pack import ProbePack
from probemon.util.checks import check_count

StateDict = dict[str, Tensor]


class ProbeSource(Protocol):
    """Loads probes."""

    def load(self, probes: Sequence[int]) -> list[StateDict]:
        """Return copies of distinct probes' weights. Raises `ProbeLoadError` that names the concept."""


class PackSource:
    """Loads from an open pack, each run of neighbours in one read.

    `n_registered`: rows for the copies in a slab registered with the GPU; further copies have their own memory.
    """

    def __init__(self, pack: ProbePack, *, n_registered: int = 0) -> None:
        self._pack = pack
        self._layout = Layout.of(pack.weights)
        self._slab = Slab(self._layout, n_registered, register=torch.cuda.is_available()) if n_registered else None

    def load(self, probes: Sequence[int]) -> list[StateDict]:
        """As `ProbeSource`. Raises `PackChanged` if the file was modified."""
        at = np.asarray(probes, dtype=np.int64)
        order = np.argsort(at)
        runs = np.split(order, np.flatnonzero(np.diff(at[order]) != 1) + 1) if len(at) else []
        states: dict[int, StateDict] = {}
        bounds = [(int(at[run[0]]), int(at[run[-1]]) + 1) for run in runs]
        read_soon(self._pack, bounds)
        for run, (first, last) in zip(runs, bounds, strict=True):
            stacked = read_rows(self._pack, first, last)
            try:
                self._pack.check_rows(stacked, first)
            except PackCorrupt as error:
                raise ProbeLoadError(str(error)) from error
            rows = {name: tensor.unbind(0) for name, tensor in stacked.items()}
            if self._slab is None:
                for i, position in enumerate(run.tolist()):
                    states[position] = {name: parts[i].clone() for name, parts in rows.items()}
                continue
            memory = self._slab.take(len(run))
            for i, position in enumerate(run.tolist()):
                state = {name: parts[i] for name, parts in rows.items()}
                states[position] = SlabRecord.of(self._layout, state, memory[i] if i < len(memory) else None)
        return [states[i] for i in range(len(at))]


class JoinedSource:
    """Loads from several sources, numbered one after another. `sizes`: how many probes each has."""

    def __init__(self, sources: Sequence[ProbeSource], sizes: Sequence[int]) -> None:
        self._sources, self._ends = list(sources), np.cumsum(sizes)

    def load(self, probes: Sequence[int]) -> list[StateDict]:
        """As `ProbeSource`."""
        at = np.asarray(probes, dtype=np.int64)
        source_of = np.searchsorted(self._ends, at, side="right")
        states: dict[int, StateDict] = {}
        for source in np.unique(source_of).tolist():
            places = np.flatnonzero(source_of == source)
            first = int(self._ends[source - 1]) if source else 0
            states.update(zip(places.tolist(), self._sources[source].load((at[places] - first).tolist()), strict=True))
        return [states[i] for i in range(len(at))]


@dataclass(frozen=True)
class StoreStats:
    """Counts of events, and current contents."""

    hits: int
    misses: int
    evictions: int
    n_probes: int
    n_bytes: int


def _bytes_of(state: StateDict) -> int:
    if isinstance(state, SlabRecord):
        return len(state.memory)
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


class _CountingLRU(cachetools.LRUCache[int, StateDict]):
    evictions = 0

    def popitem(self) -> tuple[int, StateDict]:
        self.evictions += 1
        return super().popitem()


class ProbeStore:
    """Caches a source's probes, up to `max_bytes`; thread-safe."""

    def __init__(self, source: ProbeSource, *, max_bytes: int) -> None:
        max_bytes = check_count("max_bytes", max_bytes, remedy="give 0 (keep nothing) or more")
        self._source = source
        self._cache = _CountingLRU(maxsize=max_bytes, getsizeof=_bytes_of)
        self.lock = threading.Lock()
        self._hits = self._misses = 0

    def get_many(self, probes: Sequence[int]) -> dict[int, StateDict]:
        """Return state dicts by probe, loading missing ones in one call; if it fails, none is cached."""
        wanted = list(dict.fromkeys(int(p) for p in probes))
        with self.lock:
            states = {p: self._cache[p] for p in wanted if p in self._cache}
            missing = [p for p in wanted if p not in states]
            loaded = self._source.load(missing) if missing else []
            self._hits += len(states)
            self._misses += len(missing)
            for probe, state in zip(missing, loaded, strict=True):
                states[probe] = state
                if _bytes_of(state) <= self._cache.maxsize:
                    self._cache[probe] = state
        return {p: states[p] for p in wanted}

    def stats(self) -> StoreStats:
        """Return a consistent snapshot."""
        cache = self._cache
        with self.lock:
            return StoreStats(self._hits, self._misses, cache.evictions, len(cache), int(cache.currsize))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if bytes are miscounted."""
        with self.lock:
            cache, held = self._cache, sum(_bytes_of(state) for state in self._cache.values())
            assert held == cache.currsize <= cache.maxsize, (held, cache.currsize, cache.maxsize)

"""ProbeStore: a byte-bounded LRU of probe state dicts in RAM, loaded many at a time.

    store = ProbeStore(PackSource(pack), max_bytes=64 << 20)
    loaded = store.get_many([3, 4, 5])          # {3: {"w1": ..., "b1": ...}, ...}; one call, siblings as one slice
    store.stats().misses

A source knows how to load; the store knows what to keep. An entry is a copy of its own, so that
evicting it frees its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import cachetools
import numpy as np
import torch
from torch import Tensor

from probemon.core.checks import check_count
from probemon.engine.memory.slab import Layout, Record, Slab
from probemon.errors import PackCorrupt, ProbeLoadError
from probemon.packs.pack import ProbePack

StateDict = dict[str, Tensor]


class ProbeSource(Protocol):
    """Where probes are loaded from."""

    def load(self, probes: Sequence[int]) -> list[StateDict]:
        """State dicts of distinct probes in the order asked. Raises `ProbeLoadError` naming the concept."""
        ...


class PackSource:
    """The stacked tensors of an opened pack: a run of neighbours is one slice of each, or one read, never of a map.

    `n_registered`: copies are records in a slab of so many rows that is registered with the GPU (in memory of their own
    when it is full), siblings next to one another.
    """

    def __init__(self, pack: ProbePack, *, n_registered: int = 0) -> None:
        self._pack = pack
        self._layout = Layout.of(pack.weights)
        self._slab = Slab(self._layout, n_registered, register=torch.cuda.is_available()) if n_registered else None

    def load(self, probes: Sequence[int]) -> list[StateDict]:
        """Copies of the probes' weights, checked for finiteness. Raises `PackChanged` where the pack's file was written
        to since it was opened.
        """
        at = np.asarray(probes, dtype=np.int64)
        order = np.argsort(at)
        runs = np.split(order, np.flatnonzero(np.diff(at[order]) != 1) + 1) if len(at) else []
        states: dict[int, StateDict] = {}
        for run in runs:
            first, last = int(at[run[0]]), int(at[run[-1]]) + 1
            stacked = self._pack.read_rows(first, last)
            try:
                self._pack.check_rows(stacked, first)
            except PackCorrupt as error:
                raise ProbeLoadError(str(error)) from error
            rows = {name: tensor.unbind(0) for name, tensor in stacked.items()}
            if self._slab is None:
                for i, where in enumerate(run.tolist()):
                    states[where] = {name: parts[i].clone() for name, parts in rows.items()}
                continue
            memory = self._slab.take(len(run))
            for i, where in enumerate(run.tolist()):
                state = {name: parts[i] for name, parts in rows.items()}
                states[where] = Record.of(self._layout, state, memory[i] if i < len(memory) else None)
        return [states[i] for i in range(len(at))]


class JoinedSource:
    """The probes of several sources, numbered one source after another. `sizes`: how many each has."""

    def __init__(self, sources: Sequence[ProbeSource], sizes: Sequence[int]) -> None:
        self._sources, self._ends = list(sources), np.cumsum(sizes)

    def load(self, probes: Sequence[int]) -> list[StateDict]:
        """State dicts in the order asked, each source asked once."""
        at = np.asarray(probes, dtype=np.int64)
        of = np.searchsorted(self._ends, at, side="right")
        states: dict[int, StateDict] = {}
        for which in np.unique(of).tolist():
            places = np.flatnonzero(of == which)
            first = int(self._ends[which - 1]) if which else 0
            states.update(zip(places.tolist(), self._sources[which].load((at[places] - first).tolist()), strict=True))
        return [states[i] for i in range(len(at))]


class FileSource:
    """One `torch.save`d state dict a probe (keys as in a pack), read by threads, `weights_only=True` always."""

    def __init__(self, paths: Sequence[str | Path], *, n_threads: int = 4) -> None:
        self._paths = [Path(path) for path in paths]
        self._n_threads = n_threads

    def load(self, probes: Sequence[int]) -> list[StateDict]:
        """State dicts in the order asked."""
        with ThreadPoolExecutor(self._n_threads) as pool:
            return list(pool.map(self._load_one, probes))

    def _load_one(self, probe: int) -> StateDict:
        path = self._paths[probe]
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds; each becomes one that names the file
            raise ProbeLoadError(
                f"probe {probe} could not be loaded from {path} ({error}): restore the file"
            ) from error
        if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
            raise ProbeLoadError(f"probe {probe}: {path} holds no state dict of tensors")
        for name, tensor in state.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ProbeLoadError(f"probe {probe}: {name} in {path} is not finite: the file is damaged")
        return state


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was made, and what it holds now."""

    hits: int
    misses: int
    evictions: int
    n_probes: int
    n_bytes: int


def _bytes_of(state: StateDict) -> int:
    if isinstance(state, Record):
        return len(state.memory)
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


class _CountingLRU(cachetools.LRUCache[int, StateDict]):
    evictions = 0

    def popitem(self) -> tuple[int, StateDict]:
        self.evictions += 1
        return super().popitem()


class ProbeStore:
    """LRU over a source, bounded in bytes; safe to share between threads."""

    def __init__(self, source: ProbeSource, *, max_bytes: int) -> None:
        max_bytes = check_count("max_bytes", max_bytes, remedy="give 0 (keep nothing) or more")
        self._source = source
        self._cache = _CountingLRU(maxsize=max_bytes, getsizeof=_bytes_of)
        self.lock = threading.Lock()
        self._hits = self._misses = 0

    def get_many(self, probes: Sequence[int]) -> dict[int, StateDict]:
        """State dicts by probe; what is missing is loaded in one call of the source, and nothing is kept if
        that fails.
        """
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
        """A consistent snapshot."""
        with self.lock:
            return StoreStats(
                self._hits, self._misses, self._cache.evictions, len(self._cache), int(self._cache.currsize)
            )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the bytes counted are the bytes held and within the bound."""
        with self.lock:
            held = sum(_bytes_of(state) for state in self._cache.values())
            assert held == self._cache.currsize <= self._cache.maxsize, (
                held,
                self._cache.currsize,
                self._cache.maxsize,
            )

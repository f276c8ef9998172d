"""An arena holds probe weights on the device, one slot per probe.

    arena = ResidentArena(pack.weights, device, pack.check_finite)      # slot = probe
    arena = PagedArena(store, like=pack.weights, n_slots=64, device=device)
    arena.pin(base)
    for at, slots in arena.waves(probes):                               # probes[at] are in arena.weights at `slots`
        score_probes(hidden, arena.weights, rows[at], slots, impl=impl)

A wave is as many probes as fit; its slots are valid until the next one.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.engine.memory.store import ProbeStore, StateDict
from probemon.engine.memory.uploads import Upload, upload_to
from probemon.errors import ArenaFull, PackCorrupt, ProbeLoadError
from probemon.util.checks import check_count

HALF_LIFE = 20  # waves, about one per token
UNUSED = 0.1  # worth of a probe used once, over 66 waves ago


@dataclass(frozen=True)
class ArenaStats:
    """Slots, and counts of events. `late`: not resident when needed; `fetched`: loaded in the background."""

    n_slots: int
    n_free: int
    n_pinned: int
    hits: int
    misses: int
    evictions: int
    uploaded_bytes: int
    late: int = 0
    fetched: int = 0


class Arena(Protocol):
    """`weights`: stacked tensors, `[n_slots, ...]`. Hold `lock` while reading a wave's slots."""

    weights: Mapping[str, Tensor]
    lock: AbstractContextManager[Any]

    def waves(self, probes: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield positions in `probes` (distinct) and slots. Raises `ProbeLoadError`, `ArenaFull`."""

    def pin(self, probes: Sequence[int] | Ints) -> None:
        """Load these and keep them until as many `unpin`. All or nothing."""

    def unpin(self, probes: Sequence[int] | Ints) -> None:
        """Undo one `pin`."""

    def stats(self) -> ArenaStats:
        """Return a snapshot."""

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a slot holds wrong weights."""


class ResidentArena:
    """Holds whole packs, slot = probe: on a CPU the pack's own weights, on a GPU a copy.

    `weights`: of a pack, or of several, to be copied.
    `check(probes)`: raises if weights are not finite; called before first use (`checked [P]`).
    `unchanged()`: raises if a mapped file was modified; called before reads, and after those without a wave.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        device: torch.device,
        check: Callable[[Ints], None],
        unchanged: Callable[[], None] | None = None,
    ) -> None:
        self._sources = [weights] if isinstance(weights, Mapping) else list(weights)
        self.weights: Mapping[str, Tensor] = (
            {name: tensor.to(device) for name, tensor in self._sources[0].items()}
            if len(self._sources) == 1
            else _stacked(self._sources, device)
        )
        self.lock: AbstractContextManager[Any] = nullcontext()
        self._check = check
        if unchanged is not None:
            unchanged()
        in_place = all(tensor is self._sources[0][name] for name, tensor in self.weights.items())
        self._unchanged = unchanged if in_place else None
        self._n = len(self.weights["w1"])
        self._checked = np.zeros(self._n, dtype=bool)
        self._pins: Counter[int] = Counter()
        self._hits = 0

    def waves(self, probes: Ints) -> Iterator[tuple[Ints, Ints]]:
        checked = self.checked
        if not checked[probes].all():
            self.check(probes[~checked[probes]])
        self._hits += len(probes)
        yield np.arange(len(probes)), probes

    @property
    def is_mapped(self) -> bool:
        """True if weights are read from a mapped file."""
        return self._unchanged is not None

    def used(self, n: int) -> None:
        """Count slots read without a wave. Raises `PackChanged`."""
        if self._unchanged is not None:
            self._unchanged()
        self._hits += n

    @property
    def checked(self) -> Any:
        """Which probes were checked, `[P]` bool; call before reading. Raises `PackChanged`."""
        if self._unchanged is not None:
            self._unchanged()
        return self._checked

    def check(self, probes: Ints) -> None:
        """Check weights before first use. Raises `ProbeLoadError`."""
        try:
            self._check(probes)
        except PackCorrupt as error:
            raise ProbeLoadError(str(error)) from error
        self._checked[probes] = True

    def pin(self, probes: Sequence[int] | Ints) -> None:
        self._pins.update({int(p) for p in probes})

    def unpin(self, probes: Sequence[int] | Ints) -> None:
        _take_back(self._pins, probes)

    def stats(self) -> ArenaStats:
        moved = any(tensor.device.type != "cpu" for tensor in self.weights.values())
        n_bytes = sum(t.numel() * t.element_size() for t in self.weights.values()) if moved else 0
        return ArenaStats(self._n, 0, len(self._pins), self._hits, 0, 0, n_bytes)

    def check_integrity(self) -> None:
        first = 0
        for source in self._sources:
            for name, tensor in source.items():
                assert torch.equal(self.weights[name][first : first + len(tensor)].cpu(), tensor), name
            first += len(source["w1"])
        assert first == self._n, (first, self._n)


class PagedArena:
    """Holds `n_slots` probes of a store; evicts the least used that are not pinned or in use.

    A use counts half after `HALF_LIFE` waves (docs/decisions/engine.md). Empty slots are NaN (int8: their scales), to
    show misuse. `like`: stacked weights `[P, ...]`.
    """

    def __init__(
        self,
        store: ProbeStore,
        *,
        like: Mapping[str, Tensor],
        n_slots: int,
        device: torch.device,
        upload: Callable[[Mapping[str, Tensor]], Upload] | None = None,
    ) -> None:
        n_slots = check_count("n_slots", n_slots, least=1, remedy="an arena has at least one slot")
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._store = store
        self.locks = (self.lock, store.lock)  # in locking order
        self._n_slots = n_slots
        with torch.inference_mode(False):  # else not writable outside inference mode
            self.weights: Mapping[str, Tensor] = {
                name: torch.full(
                    (n_slots, *t.shape[1:]), math.nan if t.is_floating_point() else 0, dtype=t.dtype, device=device
                )
                for name, t in like.items()
            }
        self._upload = upload_to(self.weights, device) if upload is None else upload(self.weights)
        n_probes = len(like["w1"])
        self._slot_of = np.full(n_probes, -1, dtype=np.int64)
        self._worth, self._used_at, self._now = np.zeros(n_probes), np.zeros(n_probes), 0
        self._free = list(range(n_slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        self._one = sum(t[0].numel() * t.element_size() for t in like.values())
        self._hits = self._misses = self._late = self._fetched = self._evictions = self._uploaded = 0

    def waves(self, probes: Ints) -> Iterator[tuple[Ints, Ints]]:
        probes = np.asarray(probes, dtype=np.int64)
        held, missing = np.flatnonzero(self._slot_of[probes] >= 0), np.flatnonzero(self._slot_of[probes] < 0)
        # Resident probes first, so no wave reloads what an earlier one evicted.
        self._hits += len(held)
        room = self._n_slots - len(self._pins.keys() | set(probes[held].tolist()))
        first, rest = np.concatenate([held, missing[:room]]), missing[room:]
        if len(first):
            yield first, self._make_resident(probes[first])
        room = self._n_slots - len(self._pins)
        if len(rest) and not room:
            raise ArenaFull(
                f"{self._n_slots} slots, all pinned, none for {len(rest)} more probes: raise arena_bytes or lower"
                " max_loaded_probes"
            )
        for at in range(0, len(rest), max(room, 1)):
            wave = rest[at : at + room]
            yield wave, self._make_resident(probes[wave])

    def pin(self, probes: Sequence[int] | Ints) -> None:
        wanted = list(dict.fromkeys(int(p) for p in probes))
        needed = len(self._pins.keys() | set(wanted))
        if needed > self._n_slots:
            raise ArenaFull(f"{needed} probes to pin, {self._n_slots} slots: raise arena_bytes")
        with self.lock:
            self._make_resident(np.asarray(wanted, dtype=np.int64))
            self._upload.wait()  # for readers on other streams
            self._pins.update(wanted)

    def unpin(self, probes: Sequence[int] | Ints) -> None:
        with self.lock:
            _take_back(self._pins, probes)

    def _make_resident(self, probes: Ints) -> Ints:
        missing = probes[self._slot_of[probes] < 0].tolist()
        loaded = self._load(missing)  # may raise: before evictions
        if len(missing) > len(self._free):
            self._evict(len(missing) - len(self._free), probes)
        self._use(probes)
        self._fill(missing, loaded)
        self._misses += len(missing)
        return self._slot_of[probes]

    def _load(self, missing: Sequence[int]) -> dict[int, StateDict]:
        loaded = self._store.get_many(missing) if missing else {}
        for probe, state in loaded.items():
            shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
            if shapes != {name: tuple(tensor.shape[1:]) for name, tensor in self.weights.items()}:
                raise ProbeLoadError(
                    f"probe {probe} was loaded with tensors {shapes}: expected those of the pack's other probes"
                )
        return loaded

    def _use(self, probes: Ints) -> None:
        self._now += 1
        self._worth[probes] = self._worth[probes] * 0.5 ** ((self._now - self._used_at[probes]) / HALF_LIFE) + 1
        self._used_at[probes] = self._now

    def _fill(self, probes: Sequence[int], loaded: Mapping[int, StateDict]) -> None:
        slots = [self._free.pop() for _ in probes]
        try:
            self._upload([loaded[probe] for probe in probes], slots)
        except BaseException:
            self._free += slots
            raise
        self._slot_of[list(probes)] = slots
        self._uploaded += len(slots) * self._one

    # -- in the background -----------------------------------------------------------------------

    def held(self, probes: Ints) -> Ints:
        """Return slots `[n]` of distinct probes, -1 if not resident. Hold `lock` while reading them."""
        slots = self._slot_of[probes]
        present = slots >= 0
        self._hits += int(present.sum())
        self._late += int((~present).sum())
        self._use(probes[present])
        return slots

    def fetch(self, probes: Sequence[int], *, prefetched: bool = False) -> None:
        """Load missing probes into unpinned slots; readers wait only while slots change.

        `prefetched`: only into free or unused slots, to be evicted first; else into RAM. Raises `ProbeLoadError`.
        """
        loaded = self._load([p for p in probes if self._slot_of[p] < 0])
        with self.lock:
            nobody = np.empty(0, dtype=np.int64)
            candidates, worth = self._evictable(nobody)
            room = len(self._free) + int((worth < UNUSED).sum() if prefetched else len(candidates))
            missing = np.asarray([p for p in loaded if self._slot_of[p] < 0][:room], dtype=np.int64)
            if len(missing) > len(self._free):
                self._evict(len(missing) - len(self._free), nobody)
            if prefetched:
                self._worth[missing], self._used_at[missing] = UNUSED, self._now
            else:
                self._use(missing)
            with self._upload.on_background_stream():
                self._fill(missing.tolist(), loaded)
                self._upload.wait()
            self._fetched += len(missing)

    def _evict(self, n: int, in_use: Ints) -> None:
        """Evict the `n` least used probes, ties to the lower id."""
        candidates, worth = self._evictable(in_use)
        if len(candidates) < n:
            raise ArenaFull(
                f"{self._n_slots} slots, {len(self._pins)} pinned, {len(candidates)} evictable, {n} needed: raise"
                " arena_bytes or lower max_loaded_probes"
            )
        for probe in candidates[np.lexsort((candidates, worth))[:n]].tolist():
            self._free.append(int(self._slot_of[probe]))
            self._slot_of[probe] = -1
            self._evictions += 1

    def _evictable(self, in_use: Ints) -> tuple[Ints, Any]:
        held = np.flatnonzero(self._slot_of >= 0)
        candidates = held[~np.isin(held, in_use) & ~np.isin(held, list(self._pins))]
        return candidates, self._worth[candidates] * 0.5 ** ((self._now - self._used_at[candidates]) / HALF_LIFE)

    def stats(self) -> ArenaStats:
        counts = self._hits, self._misses, self._evictions, self._uploaded, self._late, self._fetched
        return ArenaStats(self._n_slots, len(self._free), len(self._pins), *counts)

    def check_integrity(self) -> None:
        held = np.flatnonzero(self._slot_of >= 0)
        taken = self._slot_of[held].tolist()
        assert sorted(taken + self._free) == list(range(self._n_slots)), (taken, self._free)
        assert all(self._slot_of[p] >= 0 for p in self._pins), self._pins
        for name, tensor in self.weights.items():
            assert not tensor.dtype.is_floating_point or bool(torch.isnan(tensor[self._free]).all()), name
        for probe, state in self._store.get_many(held.tolist()).items():
            for name, tensor in state.items():
                assert torch.equal(self.weights[name][int(self._slot_of[probe])].cpu(), tensor), (probe, name)


def _stacked(sources: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    n = sum(len(source["w1"]) for source in sources)
    with torch.inference_mode(False):
        stacked = {name: torch.empty((n, *t.shape[1:]), dtype=t.dtype, device=device) for name, t in sources[0].items()}
    first = 0
    for source in sources:
        for name, tensor in source.items():
            stacked[name][first : first + len(tensor)].copy_(tensor)
        first += len(source["w1"])
    return stacked


def _take_back(pins: Counter[int], probes: Sequence[int] | Ints) -> None:
    pins.subtract({int(p) for p in probes})
    for probe in [p for p, n in pins.items() if n <= 0]:
        del pins[probe]

"""engines_of assigns packs to arenas, divides the bytes, and builds the engines.

Packs of one architecture and dtype share an arena if their weights are copied: on a GPU, or paged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from probemon.core.hierarchy import Ints
from probemon.engine.engine import Engine
from probemon.engine.kernels import check_impl, choose_impl
from probemon.engine.memory.arena import Arena, PagedArena, ResidentArena
from probemon.engine.memory.slab import Layout
from probemon.engine.memory.store import JoinedSource, PackSource, ProbeStore
from probemon.engine.pairs import PairScorer
from probemon.errors import ConfigError, KernelUnavailable
from probemon.packs.configured import ConfiguredPack
from probemon.packs.pack import ProbePack
from probemon.util.checks import check_bool, check_count, check_number


def choose_for(packs: Sequence[ProbePack], impl: str | None, device: torch.device) -> tuple[str, str]:
    """Return one implementation for all packs, and why. Raises `KernelUnavailable`, `ConfigError`."""
    largest = max(packs, key=ProbePack.weight_bytes)
    chosen, why = choose_impl(device, largest.dtype) if impl is None else (impl, "as asked")
    for pack in packs:
        try:
            check_impl(chosen, device, pack.dtype)
        except KernelUnavailable as error:
            if impl is not None:
                raise
            chosen, why = "cpu", f"of another: {error}"
    return chosen, why


def engines_of(
    parts: Sequence[ConfiguredPack],
    device: torch.device,
    impl: str,
    *,
    arena_bytes: int | None,
    cache_bytes: int,
    late: bool = False,
    prefetch: float = 0.0,
) -> list[Engine]:
    """Build an engine for each part. Raises `ConfigError`."""
    packs = [part.pack for part in parts]
    if arena_bytes is not None:
        arena_bytes = check_count(
            "arena_bytes", arena_bytes, remedy="give a whole number of bytes, or None to hold the whole pack"
        )
    cache_bytes = check_count("cache_bytes", cache_bytes, remedy="give a whole number of bytes, 0 to keep nothing")
    resident = arena_bytes is None or arena_bytes >= sum(pack.weight_bytes() for pack in packs)
    prefetch = check_number(
        "prefetch", prefetch, low=0, high=1, remedy="give a margin of score from 0 (nothing is prefetched) to 1"
    )
    late = check_bool("late", late)
    if (late or prefetch) and resident:
        raise ConfigError(
            "late and prefetch need a paged arena, but the whole pack is on the device: leave them out, or lower"
            " arena_bytes"
        )
    copied = not resident or device.type != "cpu" or impl == "triton"
    kinds: dict[Any, list[int]] = {}
    for i, pack in enumerate(packs):
        kinds.setdefault((pack.architecture, pack.dtype) if copied else i, []).append(i)
    groups = [_ArenaGroup([parts[i] for i in members]) for members in kinds.values()]
    shares = [None] * len(groups) if resident else _divided(groups, arena_bytes or 0)
    n_bytes = sum(group.n_bytes for group in groups)
    engines: dict[int, Engine] = {}
    for members, group, share in zip(kinds.values(), groups, shares, strict=True):
        arena = (
            group.resident(device)
            if share is None
            else group.paged(share, cache_bytes * group.n_bytes // n_bytes, device)
        )
        scorer = PairScorer(
            [parts[i].pack for i in members], arena, device, impl, resident=resident, late=late, prefetch=prefetch
        )
        for i, first in zip(members, group.firsts, strict=True):
            engines[i] = Engine(packs[i], scorer, first)
    return [engines[i] for i in range(len(parts))]


class _ArenaGroup:
    def __init__(self, parts: Sequence[ConfiguredPack]) -> None:
        self.packs = [part.pack for part in parts]
        sizes = [pack.n_probes for pack in self.packs]
        self.n_probes = sum(sizes)
        self.firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.n_bytes = sum(pack.weight_bytes() for pack in self.packs)
        self.one = -(-self.n_bytes // self.n_probes)
        self.always: Ints = np.concatenate(
            [part.plan_with(()).start + first for part, first in zip(parts, self.firsts, strict=True)]
        )
        self.needed = min((len(self.always) + 1) * self.one, self.n_bytes)

    def resident(self, device: torch.device) -> Arena:
        mapped = [pack for pack in self.packs if not pack.in_memory]

        def unchanged() -> None:
            for pack in mapped:
                pack.check_unchanged()

        return ResidentArena([pack.weights for pack in self.packs], device, self._check, unchanged if mapped else None)

    def paged(self, n_bytes: int, cache_bytes: int, device: torch.device) -> Arena:
        n_registered = cache_bytes // Layout.of(self.packs[0].weights).n_bytes if device.type == "cuda" else 0
        sources = [
            PackSource(pack, n_registered=min(pack.n_probes, n_registered * pack.n_probes // self.n_probes))
            for pack in self.packs
        ]
        source = sources[0] if len(sources) == 1 else JoinedSource(sources, [pack.n_probes for pack in self.packs])
        like = {
            name: tensor[:1].expand(self.n_probes, *tensor.shape[1:]) for name, tensor in self.packs[0].weights.items()
        }
        arena = PagedArena(
            ProbeStore(source, max_bytes=cache_bytes), like=like, n_slots=n_bytes // self.one, device=device
        )
        arena.pin(self.always)
        return arena

    def _check(self, probes: Ints) -> None:
        for pack, first in zip(self.packs, self.firsts, strict=True):
            members = probes[(probes >= first) & (probes < first + pack.n_probes)] - first
            if len(members):
                pack.check_finite(members)


def _divided(groups: Sequence[_ArenaGroup], arena_bytes: int) -> list[int]:
    """Divide bytes: arenas get room for always-active probes and one more; the rest by size."""
    needed = sum(group.needed for group in groups)
    if arena_bytes < needed:
        extra = "one more" if len(groups) == 1 else f"one more of each of {len(groups)} architectures"
        raise ConfigError(
            f"arena_bytes is {arena_bytes}, room for {arena_bytes // max(group.one for group in groups)} probes;"
            f" {sum(len(group.always) for group in groups)} are always active and {extra} is needed: give at least"
            f" {needed}"
        )
    others = [group.n_bytes - group.needed for group in groups]
    room = arena_bytes - needed
    return [group.needed + room * n // max(1, sum(others)) for group, n in zip(groups, others, strict=True)]

"""PairScorer: scores of (hidden state, probe) pairs over one arena, wherever it holds the probes.

    scorer = PairScorer([pack], arena, device, impl, resident=True)
    inputs = scorer.inputs({"resid_post.15": hidden})             # hidden [N, D]
    scorer.score(inputs.values, at, slots)                        # own scores [M] of rows `at` of the inputs

Packs of one architecture and dtype may share an arena: their probes are numbered there one pack after another, what
they read is prepared once, and pairs of all of them are scored by one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import largest_values, prepare_input
from probemon.core.probes import InputSpec
from probemon.core.scores import Floats
from probemon.engine.kernels import score_probes
from probemon.engine.memory.arena import Arena, PagedArena
from probemon.engine.memory.fetcher import Fetcher
from probemon.errors import ArenaFull
from probemon.packs.pack import ProbePack

# What was normalised and rounded already, by what it is and to which dtype.
Prepared = dict[tuple[InputSpec, torch.dtype], Tensor]


# Why a state has no scores: what is no number, in the order in which it is noticed. SEEN: it has.
SEEN, NOT_FINITE, NOT_PREPARED, NO_SCORE = range(4)


@dataclass(frozen=True)
class Inputs:
    """Prepared inputs `[I * N, D]`, one block of N for each of the scorer's inputs.

    `raw`: the hidden states `[N, D]` that each block was made of, or nothing where the values say of themselves what
    they were made of (`normalise_triton`): NaN of what was not finite, infinite of what became so.
    """

    values: Tensor
    n: int
    raw: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.n

    def take(self, which: Ints) -> Inputs:
        """Some of the states."""
        blocks = [_rows(x, which) for x in self.values.split(self.n)]
        return Inputs(
            blocks[0] if len(blocks) == 1 else torch.cat(blocks), len(which), tuple(_rows(x, which) for x in self.raw)
        )

    @cached_property
    def largest(self) -> Floats:
        """The largest absolute value of each prepared input `[I * N]`: infinite where it overflowed when it was
        normalised or rounded, NaN where the hidden state was not finite. Looked at when it is asked for, since on a GPU
        that waits.
        """
        largest: Floats = largest_values(self.values).cpu().numpy()
        if self.raw and not np.isfinite(largest).all():
            raw = np.concatenate([torch.isfinite(x).all(dim=-1).cpu().numpy() for x in self.raw])
            largest = np.where(np.isfinite(largest), largest, np.where(raw, np.inf, np.nan)).astype(np.float32)
        return largest

    @cached_property
    def unseen(self) -> Ints:
        """Of each state `[N]`, SEEN, NOT_FINITE or NOT_PREPARED."""
        return unseen_inputs(self.largest, self.n)


def unseen_inputs(largest: Floats, n: int) -> Ints:
    """Of each of N states SEEN, NOT_FINITE or NOT_PREPARED, by the largest values `[I * N]` of its prepared inputs."""
    if np.isfinite(largest).all():
        return np.zeros(n, dtype=np.int64)
    blocks = largest.reshape(-1, n)
    return np.where(
        np.isnan(blocks).any(axis=0), NOT_FINITE, np.where(np.isinf(blocks).any(axis=0), NOT_PREPARED, SEEN)
    )


def _rows(x: Tensor, which: Ints) -> Tensor:
    return x.index_select(0, torch.from_numpy(which).to(x.device))


class PairScorer:
    """`arena` holds the probes of `packs`, one pack after another; `specs`: what they read, each once; `late`: nobody
    waits for weights.
    """

    def __init__(
        self,
        packs: Sequence[ProbePack],
        arena: Arena,
        device: torch.device,
        impl: str,
        *,
        resident: bool,
        late: bool = False,
        prefetch: float = 0.0,
    ) -> None:
        self.arena, self.device, self.impl = arena, device, impl
        self.resident, self.prefetch = resident, prefetch
        self.specs = list(dict.fromkeys(spec for pack in packs for spec in pack.inputs))
        self.n_probes = sum(pack.n_probes for pack in packs)
        self._dtype = packs[0].input_dtype
        self.fetcher = Fetcher(arena.fetch, arena.locks) if isinstance(arena, PagedArena) and late else None
        self.prefetcher = (
            Fetcher(partial(arena.fetch, prefetched=True), arena.locks)
            if isinstance(arena, PagedArena) and prefetch
            else None
        )

    def block_of(self, pack: ProbePack) -> Ints:
        """Of each probe of a pack the block of the inputs that it reads, `[P]`."""
        return np.asarray([self.specs.index(spec) for spec in pack.inputs], dtype=np.int64)[pack.input_index.numpy()]

    def inputs(self, hidden: Mapping[str, Tensor], prepared: Prepared | None = None) -> Inputs:
        """Normalised and rounded hidden states, `[N, D]` at every site. What is in `prepared` is not made again, what
        is made is put there.
        """
        made: Prepared = {} if prepared is None else prepared
        blocks = []
        for spec in self.specs:
            key = spec, self._dtype
            if key not in made:
                made[key] = self._prepare(hidden[spec.site].to(self.device), spec)
            blocks.append(made[key])
        raw = () if self.impl == "triton" else tuple(hidden[spec.site] for spec in self.specs)
        return Inputs(blocks[0] if len(blocks) == 1 else torch.cat(blocks), len(blocks[0]), raw)

    def _prepare(self, hidden: Tensor, spec: InputSpec) -> Tensor:
        if self.impl != "triton":
            return prepare_input(hidden, spec, self._dtype)
        from probemon.engine.kernels.triton_pairs import normalise_triton

        return normalise_triton(hidden, spec.norm, spec.eps, self._dtype)

    def score(self, values: Tensor, at: Ints, probes: Ints) -> Floats:
        """Own scores `[M]` fp32 of M pairs, each once: rows `at` of `values`, probes as the arena numbers them."""
        with self.arena.lock:
            if self.resident:
                for _ in self.arena.waves(probes):
                    return self._score(values, at, probes)
            distinct, pair_of = np.unique(probes, return_inverse=True)
            scores = np.empty(len(probes), dtype=np.float32)
            for wave, slots in self.arena.waves(distinct):
                slot_of = np.full(len(distinct), -1, dtype=np.int64)
                slot_of[wave] = slots
                slot = slot_of[pair_of]
                here = np.flatnonzero(slot >= 0)
                scores[here] = self._score(values, at[here], slot[here])
            return scores

    def score_held(self, values: Tensor, at: Ints, probes: Ints) -> tuple[Floats, Mask]:
        """`score` that waits for no weights: NaN where they are not there, which of the pairs these are, and they are
        fetched in the background.
        """
        assert isinstance(self.arena, PagedArena) and self.fetcher is not None
        self.fetcher.raise_error()
        scores = np.full(len(probes), np.nan, dtype=np.float32)
        with self.arena.lock:
            distinct, pair_of = np.unique(probes, return_inverse=True)
            slot = self.arena.held(distinct)[pair_of]
            here = np.flatnonzero(slot >= 0)
            if len(here):
                scores[here] = self._score(values, at[here], slot[here])
        missing = np.asarray(slot < 0)
        self.fetcher.ask(np.unique(probes[missing]).tolist())
        return scores, missing

    def prefetch_probes(self, probes: Iterable[int]) -> None:
        """Have these fetched, since they may be wanted next."""
        assert self.prefetcher is not None
        self.prefetcher.ask(probes)

    def check_room(self, n_always: int, what: str) -> None:
        """Raise `ArenaFull` where so many probes that are always active leave a paged arena no slot for another."""
        n_slots = self.arena.stats().n_slots
        if not self.resident and n_always >= n_slots and n_slots < self.n_probes:
            raise ArenaFull(
                f"with {what} (and ancestors) {n_always} probes are always active, the arena has {n_slots} slots and"
                " needs one more: raise arena_bytes"
            )

    def background_errors(self) -> list[Exception]:
        """What loads in the background met and nobody was told yet."""
        return [
            error
            for fetcher in (self.fetcher, self.prefetcher)
            if fetcher is not None and (error := fetcher.take_error()) is not None
        ]

    def _score(self, values: Tensor, rows: Ints, slots: Ints) -> Floats:
        rows_t, slots_t = torch.from_numpy(rows).to(self.device), torch.from_numpy(slots).to(self.device)
        scores: Floats = score_probes(values, self.arena.weights, rows_t, slots_t, impl=self.impl).cpu().numpy()
        return scores

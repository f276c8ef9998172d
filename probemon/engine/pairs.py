"""PairScorer scores (hidden state, probe) pairs through an arena.

scorer = PairScorer([pack], arena, device, impl, resident=True)
inputs = scorer.inputs.make({"resid_post.15": hidden})        # hidden [N, D]
scorer.score(inputs.values, at, slots)                        # own scores [M] of rows `at` of the inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import InputMaker, Inputs
from probemon.core.probes import InputSpec
from probemon.core.scores import Floats
from probemon.core.softmax_groups import SoftmaxGroups
from probemon.engine.kernels import group_scores, probe_logits, score_probes
from probemon.engine.memory.arena import Arena, PagedArena, ResidentArena
from probemon.engine.memory.fetcher import Fetcher
from probemon.engine.step_thread import StepThread
from probemon.errors import ArenaFull
from probemon.packs.pack import ProbePack


class PairScorer:
    """Scores pairs over `arena`, which numbers the probes of `packs` one pack after another.

    `resident`: it holds all of them.
    `late`: do not wait for weights.
    `prefetch`: margin of score within which a probe's children are fetched.
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
        specs = list(dict.fromkeys(spec for pack in packs for spec in pack.inputs))
        self.inputs = input_maker(specs, packs[0].input_dtype, device, impl)
        self.n_probes = sum(pack.n_probes for pack in packs)
        self.groups = SoftmaxGroups.join([pack.tree.groups for pack in packs])
        self.thread = StepThread() if isinstance(arena, ResidentArena) and arena.is_mapped else None
        self.fetcher = Fetcher(arena.fetch, arena.locks) if isinstance(arena, PagedArena) and late else None
        self.prefetcher = (
            Fetcher(partial(arena.fetch, prefetched=True), arena.locks)
            if isinstance(arena, PagedArena) and prefetch
            else None
        )

    def score(self, values: Tensor, at: Ints, probes: Ints) -> Floats:
        """Return own scores `[M]` fp32 of distinct pairs: rows `at` of `values`, the arena's `probes`, whole groups."""
        grouped = self._grouped(probes)
        return self._finished(self._unfinished_waves(values, at, probes, grouped), at, probes, grouped)

    def _unfinished_waves(self, values: Tensor, at: Ints, probes: Ints, grouped: Mask | None) -> Floats:
        with self.arena.lock:
            if self.resident:
                for _ in self.arena.waves(probes):
                    return self._unfinished(values, at, probes, grouped)
            distinct, pair_of = np.unique(probes, return_inverse=True)
            scores = np.empty(len(probes), dtype=np.float32)
            for wave, slots in self.arena.waves(distinct):
                slot_of = np.full(len(distinct), -1, dtype=np.int64)
                slot_of[wave] = slots
                slot = slot_of[pair_of]
                held = np.flatnonzero(slot >= 0)
                scores[held] = self._unfinished(
                    values, at[held], slot[held], None if grouped is None else grouped[held]
                )
            return scores

    def score_held(self, values: Tensor, at: Ints, probes: Ints) -> tuple[Floats, Mask]:
        """Score resident probes; fetch the others in the background.

        Returns scores (NaN if missing), and which pairs are missing: whole softmax groups.
        """
        assert isinstance(self.arena, PagedArena) and self.fetcher is not None
        self.fetcher.raise_error()
        scores, grouped = np.full(len(probes), np.nan, dtype=np.float32), self._grouped(probes)
        with self.arena.lock:
            distinct, pair_of = np.unique(probes, return_inverse=True)
            slot = self.arena.held(distinct)[pair_of]
            present = np.flatnonzero(slot >= 0)
            if len(present):
                present_grouped = None if grouped is None else grouped[present]
                scores[present] = self._unfinished(values, at[present], slot[present], present_grouped)
        self.fetcher.ask(np.unique(probes[slot < 0]).tolist())
        missing = np.asarray(slot < 0)
        if grouped is not None:
            order, starts = self.groups.segments(at[grouped], probes[grouped])
            sizes, members = np.diff(starts, append=len(order)), np.flatnonzero(grouped)[order]
            missing[members] = np.repeat(np.logical_or.reduceat(missing[members], starts), sizes)
        return self._finished(scores, at, probes, grouped), missing

    def prefetch_probes(self, probes: Iterable[int]) -> None:
        """Load these in the background."""
        assert self.prefetcher is not None
        self.prefetcher.ask(probes)

    def check_room(self, n_always: int, what: Callable[[], str]) -> None:
        """Raise `ArenaFull` if `n_always` probes (described by `what`) leave a paged arena no other slot."""
        n_slots = self.arena.stats().n_slots
        if not self.resident and n_always >= n_slots and n_slots < self.n_probes:
            raise ArenaFull(
                f"with {what()} (and ancestors) {n_always} probes are always active, the arena has {n_slots} slots and"
                " needs one more: raise arena_bytes"
            )

    def background_errors(self) -> list[Exception]:
        """Return and clear the errors of background loading."""
        return [
            error
            for fetcher in (self.fetcher, self.prefetcher)
            if fetcher is not None and (error := fetcher.take_error()) is not None
        ]

    def _grouped(self, probes: Ints) -> Mask | None:
        """Return which pairs are of softmax groups `[M]`, or None."""
        if not len(self.groups):
            return None
        grouped = self.groups.of[probes] >= 0
        return grouped if grouped.any() else None

    def _unfinished(self, values: Tensor, rows: Ints, slots: Ints, grouped: Mask | None) -> Floats:
        if grouped is None:
            return self._by_kernel(score_probes, values, rows, slots)
        result = np.empty(len(rows), dtype=np.float32)
        for kernel, members in ((score_probes, np.flatnonzero(~grouped)), (probe_logits, np.flatnonzero(grouped))):
            if len(members):
                result[members] = self._by_kernel(kernel, values, rows[members], slots[members])
        return result

    def _by_kernel(self, kernel: Callable[..., Tensor], values: Tensor, rows: Ints, slots: Ints) -> Floats:
        rows_t, slots_t = torch.from_numpy(rows).to(self.device), torch.from_numpy(slots).to(self.device)
        result: Floats = kernel(values, self.arena.weights, rows_t, slots_t, impl=self.impl).cpu().numpy()
        return result

    def _finished(self, unfinished: Floats, at: Ints, probes: Ints, grouped: Mask | None) -> Floats:
        if grouped is None:
            return unfinished
        members = np.flatnonzero(grouped)
        order, starts = self.groups.segments(at[members], probes[members])
        unfinished[members[order]] = group_scores(unfinished[members[order]], starts, self.device, impl=self.impl)
        return unfinished


class PackScores:
    """Scores one pack's probes, numbered from `first` on in the arena."""

    def __init__(self, pack: ProbePack, scorer: PairScorer, first: int = 0) -> None:
        self._pack, self._scorer, self._first = pack, scorer, first
        specs = scorer.inputs.specs
        blocks = np.asarray([specs.index(spec) for spec in pack.inputs], dtype=np.int64)
        self.block_of: Ints = blocks[pack.input_index.numpy()]
        self.prefetches, self.prefetch_margin = scorer.prefetcher is not None, scorer.prefetch

    def of(self, inputs: Inputs, rows: Ints, probes: Ints, late: Mask | None = None) -> Floats:
        """Return own scores `[M]` fp32 of distinct pairs. With `late [N, P]`, missing ones are NaN and marked in it."""
        at, numbers = self.numbered(len(inputs), rows, probes)
        if late is None:
            return self._scorer.score(inputs.values, at, numbers)
        scores, missing = self._scorer.score_held(inputs.values, at, numbers)
        late[rows[missing], probes[missing]] = True
        return scores

    def numbered(self, n: int, rows: Ints, probes: Ints) -> tuple[Ints, Ints]:
        """Convert pairs to the scorer's numbers."""
        at = self.block_of[probes] * n + rows if len(self._scorer.inputs.specs) > 1 else rows
        return at, probes + self._first if self._first else probes

    def late(self, n: int, retained: Mask | None) -> Mask | None:
        """Return a mask `[N, P]` for late pairs, or None to wait for weights, as prompts do."""
        waits = self._scorer.fetcher is None or retained is None
        return None if waits else np.zeros((n, self._pack.n_probes), dtype=bool)

    def prefetch(self, probes: Iterable[int]) -> None:
        """Load these in the background."""
        self._scorer.prefetch_probes(sorted({self._first + int(probe) for probe in probes}))

    def weights(self) -> dict[str, Tensor]:
        """Return the pack's weights (resident arenas)."""
        span = slice(self._first, self._first + self._pack.n_probes)
        return {name: tensor[span] for name, tensor in self._scorer.arena.weights.items()}

    def check_weights(self) -> None:
        """Check all weights."""
        for _ in self._scorer.arena.waves(np.arange(self._pack.n_probes) + self._first):
            pass


def input_maker(specs: Sequence[InputSpec], dtype: torch.dtype, device: torch.device, impl: str) -> InputMaker:
    """Return an implementation's preparation of hidden states."""
    if impl == "triton":
        from probemon.engine.kernels.triton_pairs import normalise_triton

        def normalise(hidden: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
            return normalise_triton(hidden, spec.norm, spec.eps, dtype)

        return InputMaker(specs, dtype, device, normalise, keeps_raw=False)
    if impl == "numba":
        from probemon.engine.kernels.numba_inputs import prepare_few, prepare_numba, rounded_numba

        return InputMaker(specs, dtype, device, prepare_numba, rounded=rounded_numba, few=prepare_few)
    return InputMaker(specs, dtype, device, rounded=Tensor.to)

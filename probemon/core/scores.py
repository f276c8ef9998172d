"""Scores, with coverage, token batches and model state. N states, P probes, E active pairs in CSR."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError
from probemon.util.checks import check_count, is_int, shown

PHASES = ("prompt", "generated")
PROMPT, GENERATED = 0, 1
Floats = npt.NDArray[np.float32]
# one per state
COUNTS = ("active", "dropped", "not_reached", "evaluated", "released", "late", "excluded", "shed")
AUDITED = ("audited", "top_missed", "firing", "firing_missed")  # 0 if not audited
_EACH = (*COUNTS, *AUDITED, "far", "from_cache")
UNLIKE, FEWEST = 0.05, 3  # share, number of far tokens


@dataclass(frozen=True)
class Coverage:
    """Evaluation counts per state: `active + dropped + not_reached == P` unless unseen.

    - `evaluated`: probes computed (all of them if that was cheaper).
    - `released`: retained probes given up for room; `late`: dropped because weights had not arrived.
    - `excluded`: not reached because not watched; `shed`: because of a budget.
    - `audited`: 1 if every probe was evaluated; `firing` of them fire, `firing_missed` of those were not active, nor
      `top_missed` of the best 10 (`probemon.engine.audit`).
    - `far`: 1 if unlike the calibration states; 0 if these are unknown.
    - `from_cache`: 1 if the scores are those of the forward that filled an engine's prefix cache.
    - `unseen`: why a state has no scores, else "".
    """

    n_probes: int
    active: npt.NDArray[np.int64]
    dropped: npt.NDArray[np.int64]
    not_reached: npt.NDArray[np.int64]
    evaluated: npt.NDArray[np.int64]
    released: npt.NDArray[np.int64]
    late: npt.NDArray[np.int64]
    excluded: npt.NDArray[np.int64]
    shed: npt.NDArray[np.int64]
    unseen: tuple[str, ...]
    audited: npt.NDArray[np.int64]
    top_missed: npt.NDArray[np.int64]
    firing: npt.NDArray[np.int64]
    firing_missed: npt.NDArray[np.int64]
    far: npt.NDArray[np.int64]
    from_cache: npt.NDArray[np.int64]

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Mask of scored states."""
        return np.asarray([reason == "" for reason in self.unseen], dtype=bool)

    @property
    def all_seen(self) -> bool:
        """True if every state was scored."""
        return not any(self.unseen)

    @property
    def n_unseen(self) -> int:
        """States not scored."""
        return sum(reason != "" for reason in self.unseen)

    def totals(self) -> dict[str, int]:
        """Sums over the states, with `tokens` and `unseen`."""
        return {"tokens": len(self.unseen), "unseen": self.n_unseen} | {n: int(getattr(self, n).sum()) for n in _EACH}

    def __len__(self) -> int:
        return len(self.unseen)

    def take(self, which: npt.NDArray[np.int64], unseen: Mapping[int, str] | None = None) -> Coverage:
        """Return states by index; -1 gives an unseen state with the reason `unseen[place]`."""
        missing = which < 0
        arrays = {}
        for name in _EACH:
            values = getattr(self, name)
            arrays[name] = np.where(missing, 0, values[np.where(missing, 0, which)] if len(values) else 0)
        reasons = unseen or {}
        texts = tuple(reasons[i] if at < 0 else self.unseen[at] for i, at in enumerate(which.tolist()))
        return Coverage(n_probes=self.n_probes, unseen=texts, **arrays)

    def between(self, begin: int, end: int) -> Coverage:
        """Return states `begin` to before `end`, as views."""
        arrays = {name: getattr(self, name)[begin:end] for name in _EACH}
        return Coverage(n_probes=self.n_probes, unseen=self.unseen[begin:end], **arrays)

    @staticmethod
    def nothing(n: int, n_probes: int, reason: str) -> Coverage:
        """Return `n` states unseen for one reason."""
        none = np.zeros(n, dtype=np.int64)
        return Coverage(n_probes=n_probes, unseen=(reason,) * n, **dict.fromkeys(_EACH, none))

    @staticmethod
    def join(parts: Sequence[Coverage], n_probes: int) -> Coverage:
        """Concatenate."""
        empty = np.zeros(0, dtype=np.int64)
        arrays = {n: np.concatenate([empty, *(getattr(part, n) for part in parts)]) for n in _EACH}
        return Coverage(n_probes=n_probes, unseen=tuple(r for part in parts for r in part.unseen), **arrays)


def unlike(n_far: int, n_seen: int) -> str:
    """Return a warning if many seen tokens are far, else ""."""
    if n_far < FEWEST or n_far <= UNLIKE * n_seen:
        return ""
    return (
        f"{n_far:,} of {n_seen:,} tokens ({n_far / n_seen:.0%}) are unlike the text that this pack was calibrated on:"
        " its thresholds and precisions may not hold here"
    )


@dataclass(frozen=True)
class Scores:
    """Scores of N hidden states: active probes of each, ascending, in CSR.

        scores.active(t), scores.fired(t)          # probe numbers
        scores.top(t, 5)                           # [(probe, score), ...], ties to the lower number

    `ptr [N+1]` int64, `probes [E]` int32, `values [E]` fp32, `fired_mask [E]` bool.
    """

    ptr: npt.NDArray[np.int64]
    probes: npt.NDArray[np.int32]
    values: Floats
    fired_mask: npt.NDArray[np.bool_]
    coverage: Coverage
    report_top_k: int = field(default=10)

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @property
    def state_of(self) -> npt.NDArray[np.int64]:
        """State of each active pair `[E]`."""
        return np.repeat(np.arange(len(self)), np.diff(self.ptr))

    def column(self, probe: int) -> Floats:
        """Scores of one probe `[N]`, 0 if not active. Raises `ConfigError` for an invalid number."""
        check_count(
            "probe",
            probe,
            most=self.coverage.n_probes - 1,
            remedy=f"give a probe's number, of {self.coverage.n_probes} from 0",
        )
        column = np.zeros(len(self), dtype=np.float32)
        pairs = self.probes == probe
        column[self.state_of[pairs]] = self.values[pairs]
        return column

    def active(self, t: int) -> npt.NDArray[np.int32]:
        """Active probes of state t, ascending."""
        return self.probes[self._at(t)]

    def active_scores(self, t: int) -> Floats:
        """Scores of `active(t)`."""
        return self.values[self._at(t)]

    def fired(self, t: int) -> npt.NDArray[np.int32]:
        """Active probes over their alert threshold, ascending."""
        at = self._at(t)
        return self.probes[at][self.fired_mask[at]]

    def top(self, t: int, k: int | None = None) -> list[tuple[int, float]]:
        """The best `k` (default `report_top_k`) active probes with scores."""
        if k is not None:
            k = check_count("k", k)
        at = self._at(t)
        probes, values = self.probes[at], self.values[at]
        order = np.lexsort((probes, -values))[: self.report_top_k if k is None else k]
        return [(int(probes[i]), float(values[i])) for i in order]

    def take(self, which: npt.NDArray[np.int64], unseen: Mapping[int, str] | None = None) -> Scores:
        """As `Coverage.take`."""
        indices = np.where(which < 0, 0, which)
        sizes = np.where(which < 0, 0, np.diff(self.ptr)[indices] if len(self) else 0)
        ptr = np.concatenate([[0], np.cumsum(sizes)])
        begin = self.ptr[indices] if len(self) else np.zeros(len(which), np.int64)
        at = np.repeat(begin - ptr[:-1], sizes) + np.arange(ptr[-1])
        return Scores(
            ptr=ptr,
            probes=self.probes[at],
            values=self.values[at],
            fired_mask=self.fired_mask[at],
            coverage=self.coverage.take(which, unseen),
            report_top_k=self.report_top_k,
        )

    def between(self, begin: int, end: int) -> Scores:
        """Return states `begin` to before `end`; all but `ptr` are views."""
        first, last = int(self.ptr[begin]), int(self.ptr[end])
        return Scores(
            ptr=self.ptr[begin : end + 1] - first,
            probes=self.probes[first:last],
            values=self.values[first:last],
            fired_mask=self.fired_mask[first:last],
            coverage=self.coverage.between(begin, end),
            report_top_k=self.report_top_k,
        )

    def _at(self, t: int) -> slice:
        if not is_int(t):
            raise ConfigError(f"t is {shown(t)}: give the number of a state")
        if not -len(self) <= t < len(self):
            raise IndexError(f"state {t} of {len(self)}")
        t %= len(self)
        return slice(int(self.ptr[t]), int(self.ptr[t + 1]))

    @staticmethod
    def nothing(n: int, n_probes: int, reason: str, report_top_k: int = 10) -> Scores:
        """Return `n` states unseen for one reason."""
        empty = Scores.join([], n_probes, report_top_k)
        return dataclasses.replace(
            empty, ptr=np.zeros(n + 1, dtype=np.int64), coverage=Coverage.nothing(n, n_probes, reason)
        )

    @staticmethod
    def join(parts: Sequence[Scores], n_probes: int, report_top_k: int = 10) -> Scores:
        """Concatenate."""
        sizes = np.concatenate([[0], *(np.diff(part.ptr) for part in parts)]).astype(np.int64)
        return Scores(
            ptr=np.cumsum(sizes),
            probes=np.concatenate([np.zeros(0, np.int32), *(part.probes for part in parts)]),
            values=np.concatenate([np.zeros(0, np.float32), *(part.values for part in parts)]),
            fired_mask=np.concatenate([np.zeros(0, bool), *(part.fired_mask for part in parts)]),
            coverage=Coverage.join([part.coverage for part in parts], n_probes),
            report_top_k=report_top_k,
        )


@dataclass(frozen=True)
class ModelState:
    """What changes a model's hidden states besides its weights, when a generation began.

    - `adapters`: running PEFT adapters, "bem", "memory", or "closed memory" (adds nothing).
    - `adapters_disabled`: active, but off in every layer; `adapters_merged`: merged into weights.
    - `adapter_scales`: scales of each running LoRA, over layers.
    - `quantisation`: "" or the kinds of tensor; `devices`: may include "offloaded"; `n_ranks`: of tensor parallelism.
    """

    model: str
    dtype: str
    adapters: tuple[str, ...]
    adapters_disabled: tuple[str, ...]
    adapters_merged: tuple[str, ...]
    adapter_scales: tuple[tuple[str, float], ...]
    quantisation: str
    devices: tuple[str, ...]
    n_ranks: int


@dataclass(frozen=True)
class Gap:
    """Columns `first` to `last` of a generation that the model ran unseen, and why."""

    generation: int
    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class TokenBatch:
    """Scored tokens of one generation, as sinks receive them.

    - `generation`: its number in the run.
    - `row`, `position`, `token_id` `[N]` int64; `position`: column in the output of `generate`, negative for prompt
      embeddings.
    - `phase`: PROMPT or GENERATED.
    - `provisional`: of beams. Then `row` is `text * num_beams + beam`; `run.result` has the returned beams.
    - `request`: id in continuous batching; `deployment`: hash of the deployment file; else "".
    """

    generation: int
    row: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    token_id: npt.NDArray[np.int64]
    phase: int
    provisional: bool
    scores: Scores
    request: str = ""
    deployment: str = ""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class RowState:
    """Retained sets `retained [B, P]`; a step takes None for empty ones."""

    retained: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.retained)

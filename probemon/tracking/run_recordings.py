"""RunRecordings: a run's recordings, found by cache or output.

recordings = RunRecordings(model, n_probes=363)
recording = recordings.new(SequenceColumns(prompt_columns=12))
recordings.remember_cache(cache, recording)
recordings.of_cache(cache, n_columns=12)
find_recording(recordings.kept, ids, out)
keep_newest(recordings.kept, n_tokens=100_000)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from probemon.errors import AlignmentError
from probemon.host.changes import ModelMarks
from probemon.tracking.align import Ints, SequenceColumns
from probemon.tracking.cache_rows import CacheRows, CacheState
from probemon.tracking.generation import Generation
from probemon.tracking.recording import Recording


@dataclass(frozen=True)
class Earlier:
    """A cache's recording; row i continues its row `rows[i]`, or row i if None."""

    recording: Recording
    rows: Ints | None = None


@dataclass(frozen=True)
class _Filled:
    """A cache after its newest forward."""

    recording: Recording
    n_columns: int
    rows: CacheRows | CacheState

    @classmethod
    def of(cls, cache: Any, recording: Recording) -> _Filled:
        return cls(recording, recording.call.frontier, CacheRows.of(cache) or CacheState.of(cache))

    def is_untouched(self, cache: Any) -> bool:
        """True if nothing shows that the state was touched."""
        return isinstance(self.rows, CacheState) and self.rows.is_untouched(cache)

    def has_known_rows(self) -> bool:
        """True if an untouched cache's rows are surely in order."""
        return self.recording.call.n_rows == 1 or (isinstance(self.rows, CacheState) and self.rows.counts_writes)


class RunRecordings:
    """A run's recordings. Thread-safe.

    - `kept`: those with scores, oldest first
    - `documents`: numbers of plain forwards that no generation continued
    """

    def __init__(self, model: Any, n_probes: int) -> None:
        self.kept: list[Recording] = []
        self.documents: set[int] = set()
        self.marks = ModelMarks(model)
        self._n_probes, self._n_made = n_probes, 0
        self._by_cache: weakref.WeakKeyDictionary[Any, _Filled] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def new(self, call: SequenceColumns, offset: int = 0, **attributes: Any) -> Recording:
        """Make the next recording with `attributes`."""
        mark = self.marks.now()
        with self._lock:
            recording = Recording(
                call, offset, self._n_probes, host=mark.state, mark=mark, number=self._n_made, **attributes
            )
            self._n_made += 1
            self.kept.append(recording)
        return recording

    def begin(self, generation: Generation, column: int, n_rows: int) -> Recording:
        """Begin a generation's recording, once; `column` is its first."""
        recording = generation.recording
        if recording.call.first_column < 0:
            earlier = self.of_cache(generation.prompt.cache, column)
            recording.begin(column, n_rows, *((None, None) if earlier is None else (earlier.recording, earlier.rows)))
            for turn in recording.turns():  # a prefix read for this generation
                self.documents.discard(turn.recording.number)
        return recording

    def document(self, known: Earlier | None, start: int, n_rows: int) -> Recording:
        """Return the recording that a plain forward after `start` columns continues: `known`, or a new one."""
        if known is not None and known.rows is None and known.recording.call.prompt_columns is None:
            same = known.recording
            if same.call.frontier == start > 0 and same.call.n_rows == n_rows:
                if not any(recording is same for recording in self.kept):  # all tokens were forgotten
                    self.kept.append(same)
                same.keep_mark(self.marks.now())
                return same
        # another forward may continue it
        earlier: dict[str, Any] = {} if known is None else {"earlier": known.recording, "earlier_rows": known.rows}
        document = self.new(SequenceColumns(None), done=True, **earlier)
        self.documents.add(document.number)
        return document

    def claim_cache(self, cache: Any, recording: Recording) -> None:
        """Assign `cache` to `recording` when a forward begins."""
        filled = self._by_cache.get(cache)
        if filled is None or filled.recording is not recording:
            self.remember_cache(cache, recording)

    def remember_cache(self, cache: Any, recording: Recording) -> None:
        """Note that `cache` holds `recording`, rows in order."""
        self._by_cache[cache] = _Filled.of(cache, recording)

    def of_cache(self, cache: Any, n_columns: int) -> Earlier | None:
        """Return the recording and rows of a cache's first `n_columns`, or None."""
        if cache is None or n_columns == 0:
            return None
        rows, filled_here = CacheRows.of(cache), self._by_cache.get(cache)
        if rows is None:  # nothing to compare
            is_known = filled_here is not None and filled_here.is_untouched(cache) and filled_here.has_known_rows()
            return Earlier(filled_here.recording) if filled_here is not None and is_known else None
        if filled_here is not None and (earlier := self._goes_on_from(filled_here, rows, n_columns, in_place=True)):
            return earlier
        # keyrefs() is a list, safe with threads.
        others = (reference() for reference in reversed(self._by_cache.keyrefs()))
        hits = list[Earlier]()
        for filled in (filled_here, *(self._by_cache.get(other) for other in others if other not in (None, cache))):
            if filled is not None and (earlier := self._goes_on_from(filled, rows, n_columns)):
                hits.append(earlier)
        # Copies may match several, which must agree.
        hits.sort(key=lambda earlier: -min(n_columns, earlier.recording.call.frontier))
        return hits[0] if hits and all(_alike(hits[0], one, rows.n_rows, n_columns) for one in hits[1:]) else None

    def _goes_on_from(
        self, filled: _Filled, rows: CacheRows, n_columns: int, *, in_place: bool = False
    ) -> Earlier | None:
        """Return recording and rows if `filled` is continued; `in_place`: in the same memory."""
        recording, before = filled.recording, filled.rows
        if isinstance(before, CacheState) or recording.beams is not None:
            return None  # beams move at every step
        if before.n_rows != recording.call.n_rows or (in_place and not rows.is_in_place(before)):
            return None
        alike = partial(recording.scores_alike, end=n_columns)
        origin = rows.rows_of(before, n_columns, alike, same_length=n_columns == filled.n_columns)
        if origin is None:
            return None
        same = len(origin) == before.n_rows and bool((origin == np.arange(len(origin))).all())
        return Earlier(recording, None if same else origin)

    def check_same_rows(self, cache: Any, recording: Recording, n_columns: int) -> None:
        """Raise `AlignmentError` if the cache's rows moved since the newest forward."""
        filled = self._by_cache.get(cache)
        if n_columns == 0 or (filled is not None and filled.recording is recording and filled.is_untouched(cache)):
            return
        earlier = self.of_cache(cache, n_columns)
        if earlier is None or earlier.recording is not recording or earlier.rows is not None:
            raise AlignmentError(
                f"rows of the cache were moved or written to between two forwards of a loop (at column {n_columns}), so"
                " which row a token belongs to is unknown. Leave the rows of a batch in their order, or begin another"
                " run.generating with the cache as it is now"
            )


def _alike(one: Earlier, other: Earlier, n_rows: int, end: int) -> bool:
    """True if two candidates agree on tokens and scores before `end`."""
    end = min(end, one.recording.call.frontier, other.recording.call.frontier)
    rows, its = (np.arange(n_rows) if earlier.rows is None else earlier.rows for earlier in (one, other))
    if one.recording is other.recording and np.array_equal(rows, its):
        return True
    pairs = zip(rows.tolist(), its.tolist(), strict=True)
    return all(one.recording.scores_alike(row, its_row, end, other.recording) for row, its_row in pairs)


def find_recording(
    recordings: Sequence[Recording],
    ids: Ints,
    out: Any,
    request: str = "",
    *,
    generation: int | None = None,
    keep_tokens: int | None = None,
) -> Recording:
    """Return the recording of an output: the same object, else the only one with ids `[B, L]`.

    Raises `AlignmentError`.
    """
    watched = [recording for recording in recordings if recording.request == request]
    if not watched:
        raise AlignmentError(
            f"request {request!r} was not watched"
            if request
            else "nothing was watched: call model.generate() inside the with block"
        )
    if generation is not None:
        watched = [recording for recording in watched if recording.number == generation]
        if not watched:
            raise AlignmentError(
                f"generation {generation} was not watched, or is no longer kept: run.recordings has"
                f" {_numbers(recordings)}"
            )
    same = next((recording for recording in watched[::-1] if recording.output is out), None)
    if same is not None:
        return same
    watched = [recording for recording in watched if recording.n_entries]  # only failed forwards
    agreeing = [recording for recording in watched if recording.mismatch(ids) is None]
    # Prefer returned outputs, then equal lengths.
    agreeing = [
        recording for recording in agreeing if recording.ids is not None or recording.call.prompt_columns is None
    ] or agreeing
    agreeing = [
        recording for recording in agreeing if recording.ids is not None or recording.call.frontier == ids.shape[1]
    ] or agreeing
    if len(agreeing) == 1:
        return agreeing[0]
    if agreeing:
        raise AlignmentError(
            f"generations {_numbers(agreeing)} of this run have these ids, and which of them is meant is unknown: give"
            " the very object that generate() returned, or its number, as in run.result(out,"
            f" generation={agreeing[-1].number})"
        )
    if keep_tokens is not None:
        raise AlignmentError(
            "no generation whose scores are kept has these ids: they may have been forgotten"
            f" (keep_tokens={keep_tokens}), or it is not an output of this run"
        )
    if not watched:
        raise AlignmentError("no token was watched: every forward failed, or none was run")
    if len(watched) > 1:
        raise AlignmentError(
            f"none of the generations {_numbers(watched)} of this run has these ids. The newest:"
            f" {watched[-1].mismatch(ids)}"
        )
    return watched[0]


def _numbers(recordings: Sequence[Recording]) -> str:
    numbers = [str(recording.number) for recording in recordings]
    return ", ".join(numbers if len(numbers) <= 8 else [*numbers[:3], "...", *numbers[-3:]]) or "none"


def keep_newest(recordings: list[Recording], n_tokens: int) -> list[Recording]:
    """Drop the oldest scores beyond `n_tokens`; return the ended recordings that are empty.

    `n_tokens` ids per row stay.
    """
    surplus = sum(recording.n_kept for recording in recordings) - n_tokens
    while surplus > 0 and any(recording.n_kept for recording in recordings):
        oldest = min(
            (recording for recording in recordings if recording.n_kept), key=lambda recording: recording.ages[0]
        )
        n_dropped = oldest.forget(surplus, keep_ids=n_tokens)
        if not n_dropped:
            break
        surplus -= n_dropped
    forgotten = [recording for recording in recordings if recording.done and not recording.n_kept]
    for recording in forgotten:
        recordings.remove(recording)
    return forgotten

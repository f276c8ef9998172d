"""RunRecordings: every recording of a run, made and numbered, found again by the cache or the output it belongs to.

recordings = RunRecordings(model, n_probes=363)
recording = recordings.new(SequenceColumns(prompt_columns=12))
recordings.remember_cache(cache, recording)
recordings.of_cache(cache, n_columns=12)               # which recording filled this cache, or one that it was made of
find_recording(recordings.kept, ids, out)              # the one that belongs to an output
keep_newest(recordings.kept, n_tokens=100_000)         # drops the oldest scores
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
from probemon.host.changes import HostMarks
from probemon.tracking.align import Ints, SequenceColumns
from probemon.tracking.cache_rows import CacheRows, CacheState
from probemon.tracking.generation import Generation
from probemon.tracking.recording import Recording


@dataclass(frozen=True)
class Earlier:
    """The recording that showed the columns of a cache. Row i of the cache goes on from its row `rows[i]`, from row i
    where `rows` is None.
    """

    recording: Recording
    rows: Ints | None = None


@dataclass(frozen=True)
class _Filled:
    """The recording that a cache was filled by; after the newest forward, how many columns it held and what told its
    rows apart, or all of it, where nothing does.
    """

    recording: Recording
    n_columns: int
    rows: CacheRows | CacheState

    @classmethod
    def of(cls, cache: Any, recording: Recording) -> _Filled:
        return cls(recording, recording.call.frontier, CacheRows.of(cache) or CacheState.of(cache))

    def is_untouched(self, cache: Any) -> bool:
        """Whether nobody is known to have touched a cache of which nothing tells rows apart."""
        return isinstance(self.rows, CacheState) and self.rows.is_untouched(cache)

    def has_known_rows(self) -> bool:
        """Whether rows of a cache that is untouched are known to be in their order."""
        return self.recording.call.n_rows == 1 or (isinstance(self.rows, CacheState) and self.rows.counts_writes)


class RunRecordings:
    """`kept`: recordings of which scores are kept, oldest first.

    `documents`: numbers of the plain forwards that no generation went on from. `marks`: what the host is. Any thread
    may call its methods.
    """

    def __init__(self, model: Any, n_probes: int) -> None:
        self.kept: list[Recording] = []
        self.documents: set[int] = set()
        self.marks = HostMarks(model)
        self._n_probes, self._n_made = n_probes, 0
        self._by_cache: weakref.WeakKeyDictionary[Any, _Filled] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def new(self, call: SequenceColumns, offset: int = 0, **attributes: Any) -> Recording:
        """Make the next recording; `attributes`: others of a `Recording` that are known by now."""
        mark = self.marks.now()
        with self._lock:
            recording = Recording(
                call, offset, self._n_probes, host=mark.state, mark=mark, number=self._n_made, **attributes
            )
            self._n_made += 1
            self.kept.append(recording)
        return recording

    def begin(self, generation: Generation, column: int, n_rows: int) -> Recording:
        """Begin a generation's recording, unless it has begun: columns before `column` are of earlier turns."""
        recording = generation.recording
        if recording.call.first_column < 0:
            earlier = self.of_cache(generation.prompt.cache, column)
            recording.begin(column, n_rows, *((None, None) if earlier is None else (earlier.recording, earlier.rows)))
            for turn in recording.turns():  # a prefix that was read for this generation
                self.documents.discard(turn.recording.number)
        return recording

    def document(self, known: Earlier | None, start: int, n_rows: int) -> Recording:
        """Return the recording that a plain forward of so many rows after `start` columns goes on with.

        It is the known one, that of its cache, if the forward continues exactly there, else a new one.
        """
        if known is not None and known.rows is None and known.recording.call.prompt_columns is None:
            same = known.recording
            if same.call.frontier == start > 0 and same.call.n_rows == n_rows:
                if not any(recording is same for recording in self.kept):  # all of it had been forgotten
                    self.kept.append(same)
                same.keep_mark(self.marks.now())
                return same
        # done, for all that is known: another forward may go on with it
        earlier: dict[str, Any] = {} if known is None else {"earlier": known.recording, "earlier_rows": known.rows}
        document = self.new(SequenceColumns(None), done=True, **earlier)
        self.documents.add(document.number)
        return document

    def claim_cache(self, cache: Any, recording: Recording) -> None:
        """Say, as a forward begins, that it fills `cache` for `recording`."""
        filled = self._by_cache.get(cache)
        if filled is None or filled.recording is not recording:
            self.remember_cache(cache, recording)

    def remember_cache(self, cache: Any, recording: Recording) -> None:
        """Say that `cache` holds the columns of `recording`, and that its rows are in their order now."""
        self._by_cache[cache] = _Filled.of(cache, recording)

    def of_cache(self, cache: Any, n_columns: int) -> Earlier | None:
        """Return which recording showed the first `n_columns` of a cache, all or some, and in which rows; or None."""
        if cache is None or n_columns == 0:
            return None
        rows, own = CacheRows.of(cache), self._by_cache.get(cache)
        if rows is None:  # nothing to compare
            is_known = own is not None and own.is_untouched(cache) and own.has_known_rows()
            return Earlier(own.recording) if own is not None and is_known else None
        if own is not None and (earlier := self._goes_on_from(own, rows, n_columns, in_place=True)):
            return earlier
        # keyrefs() is a list: other threads may add to the dictionary meanwhile.
        others = (reference() for reference in reversed(self._by_cache.keyrefs()))
        found = list[Earlier]()
        for filled in (own, *(self._by_cache.get(other) for other in others if other not in (None, cache))):
            if filled is not None and (earlier := self._goes_on_from(filled, rows, n_columns)):
                found.append(earlier)
        # A copy may equal several, as far as caches keep columns: which it is of must make no difference.
        found.sort(key=lambda earlier: -min(n_columns, earlier.recording.call.frontier))
        return found[0] if found and all(_alike(found[0], one, rows.n_rows, n_columns) for one in found[1:]) else None

    def _goes_on_from(
        self, filled: _Filled, rows: CacheRows, n_columns: int, *, in_place: bool = False
    ) -> Earlier | None:
        """Return a recording and its rows if a cache goes on from the one that was filled; `in_place`: as the same."""
        recording, before = filled.recording, filled.rows
        if isinstance(before, CacheState) or recording.beams is not None:
            return None  # the rows of beams change places at every step
        if before.n_rows != recording.call.n_rows or (in_place and not rows.is_in_place(before)):
            return None
        alike = partial(recording.scores_alike, end=n_columns)
        origin = rows.rows_of(before, n_columns, alike, same_length=n_columns == filled.n_columns)
        if origin is None:
            return None
        same = len(origin) == before.n_rows and bool((origin == np.arange(len(origin))).all())
        return Earlier(recording, None if same else origin)

    def check_same_rows(self, cache: Any, recording: Recording, n_columns: int) -> None:
        """Raise `AlignmentError` if the rows of a recording's own cache changed places since its newest forward."""
        own = self._by_cache.get(cache)
        if n_columns == 0 or (own is not None and own.recording is recording and own.is_untouched(cache)):
            return
        earlier = self.of_cache(cache, n_columns)
        if earlier is None or earlier.recording is not recording or earlier.rows is not None:
            raise AlignmentError(
                f"rows of the cache were moved or written to between two forwards of a loop (at column {n_columns}), so"
                " which row a token belongs to is unknown. Leave the rows of a batch in their order, or begin another"
                " run.generating with the cache as it is now"
            )


def _alike(one: Earlier, other: Earlier, n_rows: int, end: int) -> bool:
    """Whether each row of a cache goes on from the same tokens and scores by two recordings, before column `end` and as
    far as both have come.
    """
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
    """Return the recording of an output: that of the same object if known, else the only one with its ids `[B, L]`.

    Raises `AlignmentError` where there is none, or more than one.
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
    watched = [recording for recording in watched if recording.n_entries]  # not one whose only forward failed
    agreeing = [recording for recording in watched if recording.mismatch(ids) is None]
    # A generate() that raised returned nothing, a document that goes on is another one: what is left may yet be the
    # only one.
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
            "no generation of which scores are kept has these ids: they may have been forgotten"
            f" (keep_tokens={keep_tokens}), or it is not an output of this run"
        )
    if not watched:
        raise AlignmentError("no token was watched: every forward failed, or none was run")
    if len(watched) > 1:
        raise AlignmentError(
            f"none of the generations {_numbers(watched)} of this run has these ids. Of the newest:"
            f" {watched[-1].mismatch(ids)}"
        )
    return watched[0]


def _numbers(recordings: Sequence[Recording]) -> str:
    numbers = [str(recording.number) for recording in recordings]
    return ", ".join(numbers if len(numbers) <= 8 else [*numbers[:3], "...", *numbers[-3:]]) or "none"


def keep_newest(recordings: list[Recording], n_tokens: int) -> list[Recording]:
    """Drop the oldest scores beyond `n_tokens`, and the recordings that ended and of which nothing is left: return
    these. The ids of so many tokens of each row stay.
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

"""RunRecordings: every recording of a run, made and numbered, found again by the cache or the output it belongs to.

recordings = RunRecordings(model, n_probes=363)
recording = recordings.new(SequenceColumns(prompt_columns=12))
recordings.remember_cache(cache, recording)
recordings.of_cache(cache, n_rows=1, n_columns=12)     # the recording that filled this cache, or a copy of it
find_recording(recordings.kept, ids, out)              # the one that belongs to an output
keep_newest(recordings.kept, n_tokens=100_000)         # drops the oldest scores
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from probemon.errors import AlignmentError
from probemon.host.changes import HostMarks
from probemon.tracking.align import Ints, SequenceColumns
from probemon.tracking.copied_caches import same_columns
from probemon.tracking.generation import Generation
from probemon.tracking.recording import Recording


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
        self._by_cache: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
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
            earlier = self.of_cache(generation.prompt.cache, n_rows, column)
            recording.begin(column, n_rows, earlier)
            while earlier is not None:  # a prefix that was read for this generation
                self.documents.discard(earlier.number)
                earlier = earlier.earlier
        return recording

    def document(self, known: Recording | None, start: int) -> Recording:
        """Return the recording that a plain forward after `start` columns goes on with.

        It is `known`, that of its cache, if the forward continues exactly there, else a new one.
        """
        if known is not None and known.call.prompt_columns is None and known.call.frontier == start > 0:
            if not any(recording is known for recording in self.kept):  # all of it had been forgotten
                self.kept.append(known)
            known.keep_mark(self.marks.now())
            return known
        # done, for all that is known: another forward may go on with it
        document = self.new(SequenceColumns(None), earlier=known, done=True)
        self.documents.add(document.number)
        return document

    def remember_cache(self, cache: Any, recording: Recording) -> None:
        """Say that the columns of `cache` are those of `recording`."""
        self._by_cache[cache] = recording

    def of_cache(self, cache: Any, n_rows: int, n_columns: int) -> Recording | None:
        """Return the recording that showed some or all of the columns of a cache of so many, or None."""
        if cache is None or n_columns == 0:
            return None
        known = self._by_cache.get(cache)
        if known is None:
            # keyrefs() is a list: other threads may add to the dictionary meanwhile.
            others = (reference() for reference in reversed(self._by_cache.keyrefs()))
            copied_from = (other for other in others if other is not None and same_columns(cache, other, n_columns))
            known = next((self._by_cache.get(other) for other in copied_from), None)
        return known if known is not None and known.call.n_rows == n_rows else None


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

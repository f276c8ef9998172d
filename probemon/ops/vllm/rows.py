"""The request and column of each row of a vLLM step.

    placing = Placing()
    placing.begin("chatcmpl-1-3fd0", prompt_ids, n_cached=128)
    placing.place(rows_of_v1(runner, scheduled), {"chatcmpl-1-3fd0": 2})     # the last 2 rows are drafts
    placing.settle({"chatcmpl-1-3fd0": 1})                                   # 1 was accepted

Rows are identified by request and position. Each column is placed once; rows that repeat it (after preemption) are left
out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.errors import AlignmentError
from probemon.tracking.align import NO_ID, DecoderForward, PlacedTokens, SequenceColumns

CACHED = "its keys and values came from vLLM's prefix cache, so that no forward ran it"
_NOT_ENDED = np.zeros(1, dtype=bool)  # requests are not fed padding


@dataclass(frozen=True)
class StepRows:
    """Rows `starts[i]` to `starts[i + 1]` are those of `requests[i]`, without padding."""

    requests: tuple[str, ...]
    starts: Ints
    ids: Ints
    positions: Ints

    def check(self, scheduled: Mapping[str, int]) -> StepRows:
        """Return it if row counts match the schedule. Raises `AlignmentError`."""
        rows = dict(zip(self.requests, np.diff(self.starts).tolist(), strict=True))
        if rows != dict(scheduled) or len(rows) != len(self.requests):
            wrong = sorted(name for name in rows | dict(scheduled) if rows.get(name) != scheduled.get(name))
            raise AlignmentError(
                f"a step of vLLM has {[rows.get(name) for name in wrong[:3]]} rows of {wrong[:3]}, its scheduler asked"
                f" for {[scheduled.get(name) for name in wrong[:3]]}: whose rows these are would be a guess"
            )
        return self


def rows_of_v1(runner: Any, scheduled: Mapping[str, int]) -> StepRows:
    """Read the rows of a v1 runner's last step. `scheduled`: rows by request. Raises `AlignmentError` if they
    differ.
    """
    batch = runner.input_batch
    return _step_rows(batch, runner.query_start_loc.np, runner.input_ids.gpu, runner.positions, scheduled)


def rows_of_v2(batch: Any, scheduled: Mapping[str, int]) -> StepRows:
    """Read the rows of a v2 runner's `input_batch`, like `rows_of_v1`."""
    return _step_rows(batch, batch.query_start_loc_np, batch.input_ids, batch.positions, scheduled)


def _step_rows(batch: Any, all_starts: Any, ids: Tensor, positions: Tensor, scheduled: Mapping[str, int]) -> StepRows:
    """Return copies, for the runner reuses its memory: ids and positions in one, which waits for the GPU."""
    n_requests = int(batch.num_reqs)
    starts = np.array(all_starts[: n_requests + 1], dtype=np.int64)
    n_rows = int(starts[-1])
    both = torch.stack([ids[:n_rows].long(), positions[:n_rows].long()]).cpu().numpy()
    return StepRows(tuple(batch.req_ids[:n_requests]), starts, both[0], both[1]).check(scheduled)


@dataclass
class RequestRows:
    """The rows of a request.

    - `ids`: of the columns so far
    - `known`: the sequence as the engine last reported it
    - `n_cached`: columns from the prefix cache; `begins_at`: how many at its beginning
    - `n_again`: rows placed before, and rejected drafts
    - `unseen`: why it is not scored from now on
    - `drafts`: of the newest step
    """

    request: str
    prompt: Ints
    call: SequenceColumns
    ids: list[int]
    known: list[int]
    n_cached: int = 0
    begins_at: int = 0
    n_again: int = 0
    unseen: str = ""
    drafts: list[tuple[int, int, int]] = field(default_factory=list)  # column, row, id

    @property
    def n_columns(self) -> int:
        """Number of final columns, run or cached."""
        return self.call.frontier

    def place(self, first: int, ids: Ints, row: int, n_drafts: int) -> list[tuple[PlacedTokens, str]]:
        """Place rows from `row` on, at columns from `first` on; the last `n_drafts` may be rejected.

        Each batch has a reason if no row shows its tokens, else "".
        """
        self._reject()
        final = len(ids) - n_drafts
        if self.unseen:
            before = [*self.ids, *self.known[len(self.ids) :]]
            before += [NO_ID] * (first - len(before))
            return self._missed(first + final, [*before[:first], *ids[:final].tolist()], self.unseen)
        self.drafts = [(first + i, row + i, int(ids[i])) for i in range(final, len(ids))]
        again = min(max(self.call.frontier - first, 0), final)
        self.n_again += again
        self._check_again(first, ids[:again])
        if again == final:
            return []
        placed = self._from_cache(first) if first > self.call.frontier else []
        return placed + self._place_new(first + again, ids[again:final], row + again)

    def settle(self, n_accepted: int) -> list[tuple[PlacedTokens, str]]:
        """Place accepted drafts, token by token; forget the others."""
        accepted, self.drafts = self.drafts[:n_accepted], self.drafts[n_accepted:]
        placed: list[tuple[PlacedTokens, str]] = []
        for column, row, token in accepted:
            placed += self._place_new(column, np.array([token]), row)
        self._reject()
        return placed

    def _reject(self) -> None:
        self.n_again += len(self.drafts)
        self.drafts = []

    def _check_again(self, first: int, ids: Ints) -> None:
        for i, (previous, token) in enumerate(zip(self.ids[first : first + len(ids)], ids.tolist(), strict=True)):
            if previous != token:
                raise AlignmentError(
                    f"request {self.request} runs column {first + i} again with token {token}, and had {previous} there"
                )

    def _from_cache(self, column: int) -> list[tuple[PlacedTokens, str]]:
        if column > len(self.known):
            raise AlignmentError(
                f"request {self.request} runs on at column {column}, {self.call.frontier} were run and"
                f" {len(self.known)} are known"
            )
        self.n_cached += column - self.call.frontier
        return self._missed(column, self.known[:column], CACHED)

    def _missed(self, column: int, ids: list[int], reason: str) -> list[tuple[PlacedTokens, str]]:
        if column <= self.call.frontier:
            return []
        self.ids += ids[len(self.ids) : column]
        missed = self.call.missed(np.array([self.ids], dtype=np.int64), 0, column, None)
        return [(placed, reason) for placed in missed]

    def _place_new(self, first: int, ids: Ints, row: int) -> list[tuple[PlacedTokens, str]]:
        n_prompt = len(self.prompt)
        end = first + len(ids)
        expected = self.prompt[first:end]
        if not np.array_equal(ids[: len(expected)], expected):
            at = int(np.flatnonzero(ids[: len(expected)] != expected)[0])
            raise AlignmentError(
                f"request {self.request}: a row at column {first + at} has token {ids[at]}, its prompt has"
                f" {expected[at]}"
            )
        placed: list[tuple[PlacedTokens, str]] = []
        # One generated token at a time: each begins with what the last one retained.
        bounds = [first, *range(max(first, n_prompt) + 1, end + 1)] if end > n_prompt else [first, end]
        for begin, stop in itertools.pairwise(bounds):
            if stop > n_prompt:
                self.call.ended(_NOT_ENDED)
            forward = DecoderForward(begin, ids[None, begin - first : stop - first], None)
            placed += [(part.moved(row + begin - first), "") for part in self.call.place(forward)]
        self.ids += ids.tolist()
        return placed


class Placing:
    """Requests under way, by vLLM's ids. Methods raise `AlignmentError` if rows contradict."""

    def __init__(self) -> None:
        self.live: dict[str, RequestRows] = {}

    def begin(self, request: str, prompt: Any, n_cached: int) -> RequestRows:
        """Begin a request with `n_cached` columns from the cache."""
        ids = np.asarray(prompt, dtype=np.int64)
        if request in self.live:
            raise AlignmentError(f"request {request} begins, and is under way")
        if not 0 <= n_cached < len(ids):
            raise AlignmentError(f"request {request}: {n_cached} of {len(ids)} tokens of its prompt are cached")
        rows = RequestRows(request, ids, SequenceColumns(len(ids)), [], ids.tolist(), begins_at=n_cached)
        rows.call.begin(0, 1)
        self.live[request] = rows
        return rows

    def resume(self, request: str, ids: Sequence[int]) -> None:
        """Take the ids of a request that runs again after preemption."""
        rows = self.live[request]
        if list(ids[: len(rows.ids)]) != rows.ids:
            rows.unseen = f"it ran again with other tokens than it had ({request})"
            raise AlignmentError(f"request {request} runs again with other tokens than it had")
        rows.known = list(ids)

    def place(self, step: StepRows, n_drafts: Mapping[str, int]) -> list[tuple[RequestRows, PlacedTokens, str]]:
        """Place the rows of a step; offsets are rows of the step."""
        return [
            (self.live[request], part, reason)
            for i, request in enumerate(step.requests)
            for part, reason in self.place_request(step, i, n_drafts.get(request, 0))
        ]

    def place_request(self, step: StepRows, i: int, n_drafts: int = 0) -> list[tuple[PlacedTokens, str]]:
        """Place the rows of request i of a step."""
        request, begin, end = step.requests[i], int(step.starts[i]), int(step.starts[i + 1])
        if request not in self.live:
            raise AlignmentError(f"a step has rows of request {request}, whose beginning was not seen")
        columns, rows = step.positions[begin:end], self.live[request]
        if begin == end:
            return []
        if not np.array_equal(columns, np.arange(columns[0], columns[0] + len(columns))):
            raise AlignmentError(f"request {request} has rows at positions {columns.tolist()[:8]}, not one by one")
        return rows.place(int(columns[0]), step.ids[begin:end], begin, n_drafts)

    def settle(self, n_accepted: Mapping[str, int]) -> list[tuple[RequestRows, PlacedTokens, str]]:
        """Place accepted drafts, by request; forget the others."""
        return [
            (rows, part, reason)
            for rows in self.live.values()
            if rows.drafts
            for part, reason in rows.settle(n_accepted.get(rows.request, 0))
        ]

    def end(self, request: str) -> RequestRows | None:
        """Forget a request, and return its rows; None if it never began."""
        rows = self.live.pop(request, None)
        if rows is not None:
            rows.settle(0)
        return rows

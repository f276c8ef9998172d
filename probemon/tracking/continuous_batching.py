"""ContinuousBatches: assigns the tokens of packed forwards to requests.

    batches = ContinuousBatches(model, recordings, check_seen, take_stop, reports)
    batches.shadow(stack, owner)                     # follow managers opened from now on
    for generation, placed in batches.place(given):  # before a forward
        ...

Several requests share one row. transformers' assignment is checked against the forward's tensors; only its newest
layout is supported.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from probemon.errors import AlignmentError, UnsupportedDecoding
from probemon.host.internals import (
    attention_before_batches,
    batch_cache,
    can_follow_batches,
    compiles_batches,
    end_at_next_token,
    has_left_queues,
    is_warm_up,
    may_share_columns,
    parent_of,
    patch_delivery,
    preempted_prompt_length,
    requests_in_batch,
    runs_in_this_thread,
)
from probemon.tracking.align import DecoderForward, Ints, PlacedTokens, SequenceColumns
from probemon.tracking.generate_call import GenerateCall
from probemon.tracking.generation import Generation
from probemon.tracking.recording import SHARED, Recording
from probemon.tracking.run_recordings import RunRecordings
from probemon.tracking.source_reports import SourceReports
from probemon.util.shadow import Owner, shadow


@dataclass
class BatchRequest:
    """A followed request. `state`: transformers' object, replaced after preemption."""

    generation: Generation
    prompt: list[int]
    state: Callable[[], Any] = lambda: None

    def follow(self, state: Any) -> None:
        """Follow `state` from now on."""
        self.state = weakref.ref(state)
        self.generation.end_by(self._end)

    def _end(self) -> None:
        state = self.state()
        if state is not None:
            end_at_next_token(state)


class ContinuousBatches:
    """Follows managers opened while attached.

    - `check_seen(recording, ids, 0, end, generation)`: columns before `end` of `ids [1, L]` were run
    - `take_stop()`: True if a stop was requested before
    - `n_calls`: running `generate_batch` calls
    - `errors`: of forwards; transformers hides them
    """

    def __init__(
        self,
        model: Any,
        recordings: RunRecordings,
        check_seen: Callable[[Recording, Ints, int, int, Generation], None],
        take_stop: Callable[[], bool],
        reports: SourceReports,
    ) -> None:
        self._model, self._recordings, self._reports = model, recordings, reports
        self._check_seen, self._take_stop = check_seen, take_stop
        self.n_calls, self._stack = 0, ExitStack()
        self.errors: list[BaseException] = []
        # weak: users may drop managers
        self._live: weakref.WeakKeyDictionary[Any, dict[str, BatchRequest]] = weakref.WeakKeyDictionary()
        self._stop_new = False  # waiting requests end at once
        self._lock = threading.Lock()

    def shadow(self, stack: ExitStack, owner: Owner) -> None:
        """Follow managers until `stack` closes."""
        self._stack = stack.enter_context(ExitStack())
        shadow(stack, owner, self._model, "init_continuous_batching", partial(self._open, owner))
        shadow(stack, owner, self._model, "generate_batch", self._generate_batch)

    @property
    def open(self) -> bool:
        """True if a manager is followed."""
        return len(self._live) > 0

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Keep errors for the waiting caller."""
        try:
            yield
        except BaseException as error:
            self.errors.append(error)
            raise

    def stop(self) -> int:
        """End running and waiting requests; return the number running."""
        with self._lock:
            running = [request.generation for live in self._live.values() for request in list(live.values())]
            self._stop_new = self.n_calls > 0
        for generation in running:
            generation.stop_all_rows()
        return len(running)

    def _open(self, owner: Owner, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        manager = original(*args, **kwargs)
        try:
            if self._register(manager):
                patch_delivery(self._stack, owner, manager, partial(self._deliver, weakref.ref(manager)))
        except UnsupportedDecoding:
            before = attention_before_batches(manager)
            # Creating a manager changes the attention; stopping an unstarted one does not restore it.
            if before is not None:
                self._model.set_attn_implementation(before)
            raise
        return manager

    def _generate_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stopped = self._take_stop()
        with self._lock:
            self.n_calls += 1
            self._stop_new = stopped or self._stop_new
        try:
            outputs = original(*args, **kwargs)
        finally:
            with self._lock:
                self.n_calls -= 1
                self._stop_new = self._stop_new and self.n_calls > 0
        errors, self.errors = self.errors, []
        if errors:  # transformers only fails the requests
            raise errors[0]
        return outputs

    def _deliver(self, manager: Callable[[], Any], original: Callable[..., Any], outputs: Sequence[Any]) -> Any:
        """Check ending requests: all but the last token must have passed the taps."""
        for generation, ids in self._end_requests(manager(), outputs):
            with suppress(AlignmentError), self.reporting():
                self._check_seen(generation.recording, ids, 0, ids.shape[1] - 1, generation)
            self._reports.ended(generation.recording, None)
        return original(outputs)

    def _register(self, manager: Any) -> bool:
        """Follow a manager; False if it is followed already. Raises `UnsupportedDecoding`."""
        if not can_follow_batches(manager):
            raise UnsupportedDecoding(
                "continuous batching of this version of transformers keeps its requests where we do not look: use a"
                " newer one, or detach"
            )
        if compiles_batches(manager):
            raise UnsupportedDecoding(
                "continuous batching with CUDA graphs or compilation is not supported while probemon is attached: hooks"
                " do not run in a replay. Give ContinuousBatchingConfig(use_cuda_graph=False) without compile configs,"
                " or detach"
            )
        with self._lock:
            if manager in self._live:
                return False
            live: dict[str, BatchRequest] = {}
            self._live[manager] = live
        weakref.finalize(manager, _close_all, live)
        return True

    def place(self, given: Mapping[str, Any]) -> list[tuple[Generation, PlacedTokens]]:
        """Return a packed forward's new tokens by request; `given`: the decoder's arguments.

        Raises `UnsupportedDecoding`, `AlignmentError`.
        """
        cache = given.get("cache")
        managers = [] if cache is None else [manager for manager in list(self._live) if batch_cache(manager) is cache]
        if len(managers) != 1:
            raise UnsupportedDecoding(
                "a packed forward of a continuous batching that was opened before probemon was attached: its requests"
                " are unknown. Open it inside the with block, or detach"
            )
        [manager] = managers
        batch = requests_in_batch(manager)
        if any(is_warm_up(future.state.request_id) for future in batch):
            return []
        bounds = [0, *itertools.accumulate(future.query_length for future in batch)]
        lengths, ids, positions = given["cu_seq_lens_q"].tolist(), given["input_ids"], given["position_ids"]
        same_bounds = lengths[: len(bounds)] == bounds and all(end == bounds[-1] for end in lengths[len(bounds) :])
        own_batch = len({future.state.request_id for future in batch}) == len(batch) and runs_in_this_thread(manager)
        if (
            not same_bounds
            or not own_batch
            or ids.dim() != 2
            or len(ids) != 1
            or positions.shape != ids.shape
            or bounds[-1] > ids.shape[1]
        ):
            raise AlignmentError(
                f"a packed forward of {tuple(ids.shape)} tokens with bounds {lengths} does not hold the requests that"
                f" transformers names, which end at {bounds[1:]}"
            )
        # The manager reuses this memory.
        token_ids, columns = (
            ids[0].detach().cpu().numpy().astype(np.int64),
            positions[0].detach().cpu().numpy().astype(np.int64),
        )
        self._close_cancelled(manager)
        placed_tokens = []
        for future, begin, end in zip(batch, bounds[:-1], bounds[1:], strict=True):
            if begin < end and future.state.status.name != "FINISHED":  # prepared before it ended
                generation = self._request(manager, future.state).generation
                segment = self._place_segment(
                    manager, generation, future.state, token_ids[begin:end], columns[begin:end], begin
                )
                placed_tokens += [(generation, placed) for placed in segment]
        return placed_tokens

    def _end_requests(self, manager: Any, outputs: Sequence[Any]) -> list[tuple[Generation, Ints]]:
        """Stop following ended requests; return their generations and ids `[1, L]`."""
        live, ended = self._live[manager], []
        for output in outputs:
            if output.error is not None or not output.is_finished():
                continue
            request = live.pop(output.request_id, None)
            # None: no forward was seen
            generation = (
                self._new_request(live, output.request_id, list(output.prompt_ids))
                if request is None
                else request.generation
            )
            ids = np.asarray([[*output.prompt_ids, *output.generated_tokens]])
            generation.recording.keep_output(output, ids, self._recordings.marks.now())
            generation.recording.close()
            ended.append((generation, ids))
        return ended

    def _close_cancelled(self, manager: Any) -> None:
        """Close requests without output."""
        live = self._live[manager]
        for request_id in [name for name in live if has_left_queues(manager, name)]:
            recording = live.pop(request_id).generation.recording
            recording.close()
            self._reports.ended(recording, CancelledError("it left its manager without an answer"))

    def _request(self, manager: Any, state: Any) -> BatchRequest:
        live = self._live[manager]
        followed = live.get(state.request_id)
        if followed is not None and followed.state() is state:
            return followed
        prompt_length = preempted_prompt_length(state)
        if followed is not None and prompt_length:
            # Preempted: runs again with its generated tokens.
            if state.initial_tokens[: len(followed.prompt)] != followed.prompt:
                raise AlignmentError(f"request {state.request_id} runs again with another prompt than it began with")
            followed.follow(state)
            return followed
        prompt = list(state.initial_tokens[: prompt_length or len(state.initial_tokens)])
        live[state.request_id] = BatchRequest(self._new_request(live, state.request_id, prompt), prompt)
        live[state.request_id].follow(state)
        return live[state.request_id]

    def _new_request(self, live: dict[str, BatchRequest], request_id: str, prompt: list[int]) -> Generation:
        parent_id = parent_of(request_id)
        parent = None if parent_id is None else live.get(parent_id)
        # A fork continues its parent.
        forked = parent.generation.recording if parent is not None and parent.prompt == prompt else None
        recording = self._recordings.new(
            SequenceColumns(len(prompt)),
            request=request_id,
            before=SHARED,
            prompt=np.asarray([prompt], dtype=np.int64),
            earlier=forked,
        )
        return Generation(recording, GenerateCall(len(prompt), 0), stop_all=self._stop_new)

    def _place_segment(
        self, manager: Any, generation: Generation, state: Any, ids: Any, columns: Any, begin: int
    ) -> list[PlacedTokens]:
        call, first = generation.recording.call, int(columns[0])
        sequence = [*state.initial_tokens, *state.generated_tokens]
        expected = sequence[first : first + len(ids)]
        if columns.tolist() != list(range(first, first + len(ids))) or expected != ids[: len(expected)].tolist():
            raise AlignmentError(
                f"request {state.request_id}: a packed forward has other tokens at columns {first}.. than the request"
            )
        if call.first_column >= 0 and first + len(ids) <= call.frontier:
            return []  # preempted, already scored
        if first > max(call.frontier, 0) and not (
            call.first_column < 0 and (may_share_columns(manager, first) or parent_of(state.request_id) is not None)
        ):
            self._check_seen(generation.recording, np.asarray([sequence]), 0, first, generation)
        assert call.prompt_columns is not None
        if first + len(ids) > call.prompt_columns:
            call.ended([])  # requests are not padded
        # Offsets in the packed row.
        return [placed.moved(begin) for placed in call.place(DecoderForward(first, ids[None], None))]


def _close_all(live: dict[str, BatchRequest]) -> None:
    for request in live.values():
        request.generation.recording.close()

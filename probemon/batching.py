"""Batches: which request, and which of its columns, each token of a packed forward of continuous batching is.

    batches = Batches(new_recording)
    batches.opened(manager)                        # raises NotSupportedDecoding where hooks would not run
    for generation, placed in batches.place(given):  # before a forward: given, the decoder's arguments
        ...
    batches.finish(outputs)                        # afterwards: every request was seen to its end

A packed forward has one row with the tokens of several requests behind one another. The manager of transformers says
whose they are; what it says is compared with the forward's own tensors, and refused where the two differ. Only the
newest of transformers' layouts of that manager is read.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from probemon.align import Call, Forward, Ints, Placed
from probemon.errors import AlignmentError, NotSupportedDecoding
from probemon.generation import Prompt
from probemon.record import SHARED, Recording
from probemon.running import Generation

_CHILD = "__child#"  # how transformers names the sequences forked from one request
_WARM_UP = "__warmup_"


@dataclass
class Request:
    """One request as it is followed. `state`: transformers' own, replaced when a request is preempted and run again."""

    generation: Generation
    prompt: list[int]
    state: Callable[[], Any] = lambda: None

    def follow(self, state: Any) -> None:
        """It runs as `state` from now on."""
        self.state = weakref.ref(state)
        self.generation.end = self._end
        if self.generation.stop.any():
            self._end()

    def _end(self) -> None:
        state = self.state()
        if state is not None:
            state._new_tokens_limit = state.generated_len() + 1


class Batches:
    """Follows every manager opened while a run is attached; `new_recording(call)` makes a recording in the run."""

    def __init__(self, new_recording: Callable[[Call], Recording]) -> None:
        self._new_recording = new_recording
        # A manager and its cache go when its user lets go of them; what was seen of its requests stays until they are finished.
        self._live: weakref.WeakKeyDictionary[Any, dict[str, Request]] = weakref.WeakKeyDictionary()
        self._unfinished: list[dict[str, Request]] = []
        self._n_collecting = 0  # calls of generate_batch that will ask for their requests when these are done
        self._lock = threading.Lock()

    def opened(self, manager: Any) -> None:
        """A manager was made. Raises `NotSupportedDecoding` where forwards would not pass our hooks."""
        config = getattr(manager, "continuous_batching_config", None)
        graphs = getattr(config, "cuda_graph_booleans", None)
        if config is None or graphs is None:
            raise NotSupportedDecoding("continuous batching of this version of transformers keeps its requests where we do not look: use a newer one, or detach")
        if any(graphs) or config.varlen_compile_config is not None or config.decode_compile_config is not None:
            raise NotSupportedDecoding(
                "continuous batching with CUDA graphs or compilation is not supported while probemon is attached: hooks do not run in a replay. "
                "Give ContinuousBatchingConfig(use_cuda_graph=False) without compile configs, or detach"
            )
        if manager not in self._live:  # a persistent one is handed out again
            self._unfinished = [live for live in self._unfinished if live]
            self._live[manager] = {}
            self._unfinished.append(self._live[manager])

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """For the time of the block, requests that end are kept for `finish`."""
        with self._lock:
            self._n_collecting += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_collecting -= 1

    def place(self, given: Mapping[str, Any]) -> list[tuple[Generation, Placed]]:
        """The new tokens of a packed forward, request by request. Raises `NotSupportedDecoding`, `AlignmentError`."""
        managers = [m for m in list(self._live) if m.batch_processor is not None and m.batch_processor.cache is given.get("cache")]
        if given.get("cache") is None or len(managers) != 1:
            raise NotSupportedDecoding(
                "a packed forward of a continuous batching that was opened before probemon was attached: its requests are unknown. Open it inside the with block, or detach"
            )
        [manager] = managers
        io = manager.batch_processor.inputs_and_outputs
        if hasattr(io, "io_pairs"):  # two batches are prepared in turns
            io = io.io_pairs[io.current_pair].host_io
        batch = io.requests_in_batch
        if any(future.state.request_id.startswith(_WARM_UP) for future in batch):
            return []
        bounds = [0, *itertools.accumulate(future.query_length for future in batch)]
        lengths, ids, positions = given["cu_seq_lens_q"].tolist(), given["input_ids"], given["position_ids"]
        told = lengths[: len(bounds)] == bounds and all(at == bounds[-1] for at in lengths[len(bounds) :])
        known = len({future.state.request_id for future in batch}) == len(batch) and threading.current_thread() is manager._generation_thread
        if not told or not known or ids.dim() != 2 or len(ids) != 1 or positions.shape != ids.shape or bounds[-1] > ids.shape[1]:
            raise AlignmentError(
                f"a packed forward of {tuple(ids.shape)} tokens with bounds {lengths} does not hold the requests that transformers names, which end at {bounds[1:]}"
            )
        # Copied at once: the manager writes the next batch into the same memory.
        token_ids, columns = ids[0].detach().cpu().numpy().astype(np.int64), positions[0].detach().cpu().numpy().astype(np.int64)
        if not self._n_collecting:
            self._let_go(manager)
        found = []
        for future, begin, end in zip(batch, bounds[:-1], bounds[1:], strict=True):
            if begin < end:
                generation = self._request(manager, future.state).generation
                found += [(generation, placed) for placed in self._segment(manager, generation, future.state, token_ids[begin:end], columns[begin:end], begin)]
        return found

    def finish(self, outputs: Mapping[str, Any]) -> list[tuple[Recording, Ints]]:
        """The recordings of requests that ended, and their ids `[1, L]`; they are followed no longer."""
        ended = []
        for request_id, output in outputs.items():
            if output.error is not None or not output.is_finished():
                continue
            ids = np.asarray([[*output.prompt_ids, *output.generated_tokens]])
            # Several managers may have a request of this name: tokens tell which is meant.
            found = [live for live in self._unfinished if request_id in live and live[request_id].prompt == list(output.prompt_ids)]
            mine = next((live for live in found if live[request_id].generation.recording.matches(ids)), found[0] if found else None)
            if mine is not None:
                recording = mine.pop(request_id).generation.recording
            else:  # no forward of it was seen at all
                recording = self._new_recording(Call(len(output.prompt_ids)))
                recording.request = request_id
            recording.output, recording.done = output, True
            ended.append((recording, ids))
        return ended

    # -- inside ----------------------------------------------------------------------------------

    def _let_go(self, manager: Any) -> None:
        """Of a manager that its user feeds: requests that are in neither of its queues any more."""
        live = self._live[manager]
        for request_id in [name for name in live if manager.batch_processor.scheduler.request_is_cancelled(name)]:
            live.pop(request_id).generation.recording.done = True

    def _request(self, manager: Any, state: Any) -> Request:
        live = self._live[manager]
        known = live.get(state.request_id)
        if known is not None and known.state() is state:
            return known
        if known is not None and state._true_initial_tokens:  # preempted: it runs again from its beginning, with what it had generated
            if state.initial_tokens[: len(known.prompt)] != known.prompt:
                raise AlignmentError(f"request {state.request_id} runs again with another prompt than it began with")
            known.follow(state)
            return known
        prompt = list(state.initial_tokens[: state._true_initial_tokens or len(state.initial_tokens)])
        recording = self._new_recording(Call(len(prompt)))
        recording.request, recording.before = state.request_id, SHARED
        parent = live.get(state.request_id.split(_CHILD)[0]) if _CHILD in state.request_id else None
        if parent is not None and parent.prompt == prompt:
            recording.earlier = parent.generation.recording  # a fork begins where its parent had come to
        live[state.request_id] = Request(Generation(recording, Prompt(len(prompt), 0), stop=np.zeros(1, dtype=bool)), prompt)
        live[state.request_id].follow(state)
        return live[state.request_id]

    def _shared(self, manager: Any, n_columns: int) -> bool:
        """Whether so many columns may have been shared with another request: whole pages, where sharing is on."""
        return bool(manager.batch_processor.cache.use_prefix_sharing) and n_columns % int(manager.continuous_batching_config.page_size) == 0

    def _segment(self, manager: Any, generation: Generation, state: Any, ids: Any, columns: Any, begin: int) -> list[Placed]:
        call, first = generation.recording.call, int(columns[0])
        sequence = [*state.initial_tokens, *state.generated_tokens][first : first + len(ids)]
        if columns.tolist() != list(range(first, first + len(ids))) or sequence != ids[: len(sequence)].tolist():
            raise AlignmentError(f"request {state.request_id}: a packed forward has other tokens at columns {first}.. than the request")
        if call.first_column >= 0 and first + len(ids) <= call.frontier:
            return []  # run again after preemption: these have their scores
        if first > max(call.frontier, 0) and not (call.first_column < 0 and (self._shared(manager, first) or _CHILD in state.request_id)):
            raise AlignmentError(
                f"request {state.request_id} runs column {first}, the taps saw {max(call.frontier, 0)}: the host ran a packed forward past our hooks, so nothing is reported"
            )
        assert call.prompt_columns is not None
        if first + len(ids) > call.prompt_columns:
            call.ended(np.zeros(1, dtype=bool))  # requests end by themselves, and are not fed padding
        # In the packed row, offsets count from the beginning of the segment.
        return [placed.moved(begin) for placed in call.place(Forward(first, ids[None], None))]

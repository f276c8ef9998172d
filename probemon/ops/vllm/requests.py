"""The requests of vLLM as a source of tokens for a run.

with MonitorRun(manager, model, source=partial(EngineRequests, host=host)) as run:
    run.source.begin("0-1a2b", prompt_ids, n_cached=0)
    run.source.step(rows, n_drafts, states, began)      # states: by site, one row each
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from probemon.core.scores import GENERATED, PROMPT, Gap, ModelState, Scores
from probemon.errors import AlignmentError, UnsupportedDecoding
from probemon.host.ranks import Ranks
from probemon.host.site import Site
from probemon.ops.vllm.kept_scores import KeptScores
from probemon.ops.vllm.rows import CACHED, Placing, RequestRows, StepRows
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report, ScoreTokens
from probemon.tracking.generate_call import GenerateCall
from probemon.tracking.generation import Generation, States
from probemon.tracking.hand_loop import HandLoop
from probemon.tracking.hook_faults import HookFaults
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import keep_newest
from probemon.tracking.source_reports import ForwardTime, SourceReports

LOG = logging.getLogger("probemon")
_MOST_LOGGED = 100
_KEEP_TOKENS = 50_000  # with scores; the client has all


class EngineRequests:
    """A `TokenSource`. Only `stop` may be called outside the thread that runs the model.

    - `host`: model state for the recordings
    - `score_together`: scores several requests at once; set from `run.scorer`
    """

    ranks: Ranks | None = None

    def __init__(
        self,
        model: Any,
        sites: Sequence[str | Site],
        n_probes: int,
        score: ScoreTokens,
        *,
        host: ModelState | None = None,
        check: Callable[[GenerateCall], None] = lambda prompt: None,
        report_gaps: bool = True,
        acts: Callable[[], bool] = lambda: False,
        reports: SourceReports,
        one_thread: bool = False,
    ) -> None:
        self.model, self.open, self.called, self.n_gaps = model, False, False, 0
        self.score_together: Callable[..., Report | None] | None = None
        self.recordings: list[Recording] = []
        self.forward_seconds: deque[float] = deque(maxlen=10_000)
        self.batch_errors: list[BaseException] = []
        self.n_documents, self.running_beams = 0, False
        self.kept: KeptScores | None = None  # of the prefix cache
        self._n_probes, self._host = n_probes, host
        self._check, self._reports = check, reports
        self._placing, self._n_made = Placing(), 0
        self._generations: dict[str, Generation] = {}
        self._step: tuple[StepRows, States] | None = None  # the newest, until its drafts are settled
        self._lock = threading.Lock()

    # -- called by the worker ---------------------------------------------------------------------

    def begin(self, request: str, prompt: Any, n_cached: int, unseen: str = "") -> None:
        """Begin a request. `unseen`: why it is not scored."""
        rows = self._placing.begin(request, prompt, n_cached)
        rows.unseen = unseen
        call = GenerateCall(len(rows.prompt), 0)
        self._check(call)
        recording = Recording(rows.call, 0, self._n_probes, host=self._host, number=self._n_made, request=request)
        self._n_made += 1
        with self._lock:
            self._generations[request] = Generation(recording, call)
        self.recordings.append(recording)

    def knows(self, request: str) -> bool:
        """True if a request is under way."""
        return request in self._generations

    def resume(self, request: str, ids: Sequence[int]) -> None:
        """Take the ids of a request that runs again after preemption."""
        try:
            self._placing.resume(request, ids)
        except AlignmentError as error:
            self._lose(self._placing.live[request], error)

    def step(self, rows: StepRows, n_drafts: Mapping[str, int], states: States, began: float) -> None:
        """Score a step, except drafts. `began`: by `time.perf_counter`."""
        begin, self.called, n_tokens = time.perf_counter(), True, [0, 0]
        self._step = (rows, states)
        waiting = dict[str, list[tuple[PlacedTokens, str]]]()
        for i, request in enumerate(rows.requests):
            waiting[request] = list(self._place(rows, i, n_drafts.get(request, 0)))
            for placed, _ in waiting[request]:
                n_tokens[placed.phase != PROMPT] += len(placed)
        while waiting:
            # A request may have blocks from the cache that another one fills in this very step.
            ready = [one for one, parts in waiting.items() if self._has_its_blocks(one, parts)] or list(waiting)
            self._score_tokens(
                [
                    (request, placed, self._from_cache(request, placed) if reason == CACHED else reason or states)
                    for request in ready
                    for placed, reason in waiting.pop(request)
                ]
            )
        if not n_drafts:
            self._step = None
        keep_newest(self.recordings, _KEEP_TOKENS)
        now = time.perf_counter()
        self.forward_seconds.append(now - begin)
        self._reports.forward(ForwardTime(now - begin, now - began, *n_tokens))

    def settle(self, n_accepted: Mapping[str, int]) -> None:
        """Score the accepted drafts of the newest step; forget the others."""
        if self._step is None:
            return
        _, states = self._step
        settled = self._placing.settle(n_accepted)
        self._score_tokens([(rows.request, placed, reason or states) for rows, placed, reason in settled])
        self._step = None

    def lose(self, requests: Sequence[str], error: Exception) -> None:
        """Stop scoring requests whose step could not be read."""
        for request in requests:
            if request in self._placing.live:
                self._lose(self._placing.live[request], error)

    def stopping(self, requests: Sequence[str]) -> list[int]:
        """Return the indices of requests that end with their next token."""
        return [i for i, request in enumerate(requests) if request in self._generations and self._stops(request)]

    def stops(self, request: str) -> bool:
        """True if a request ends with its next token."""
        return request in self._generations and self._stops(request)

    def end(self, request: str) -> tuple[RequestRows, Generation] | None:
        """Forget a request; None if it never began."""
        rows = self._placing.end(request)
        if self.kept is not None:
            self.kept.release(request)
        with self._lock:
            generation = self._generations.pop(request, None)
        if rows is None or generation is None:
            return None
        recording = generation.recording
        recording.close()
        self._reports.ended(recording, None)
        self.recordings[:] = [one for one in self.recordings if one is not recording]
        return rows, generation

    def keep(self, recording: Recording, placed: PlacedTokens, scores: Scores) -> None:
        """Keep new scores for requests whose tokens come from the prefix cache."""
        coverage = scores.coverage
        if self.kept is not None and not (coverage.from_cache[0] or coverage.unseen[0] == CACHED):
            self.kept.add(recording.request, int(placed.columns[0]), placed.ids.tolist(), scores)

    def n_cached(self, request: str) -> int:
        """Return how many columns of a request came from the prefix cache at its beginning."""
        return self._placing.live[request].begins_at

    # -- called by a run --------------------------------------------------------------------------

    def hook_faults(self) -> HookFaults:
        """Return none: the canary checks the layers."""
        return HookFaults()

    @property
    def n_generating(self) -> int:
        """Number of requests under way."""
        return len(self._generations)

    @property
    def generating(self) -> bool:
        """True if a request is under way."""
        return bool(self._generations)

    def stop(self) -> None:
        """End every request with its next token. Thread-safe."""
        with self._lock:
            for generation in self._generations.values():
                generation.stop_all_rows()

    def by_hand(self, from_column: int) -> AbstractContextManager[HandLoop]:
        """Raise `UnsupportedDecoding`: an engine generates by itself."""
        raise UnsupportedDecoding("inside vLLM nothing is generated by hand: send a request")

    def current(self) -> Generation | None:
        """Return None: no generation is the current one, since tokens of several requests are scored at once."""
        return None

    def stopped(self, like: Tensor) -> Tensor:
        """Return no rows: requests stop one by one."""
        return torch.zeros_like(like)

    def __enter__(self) -> EngineRequests:
        self.open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open = False

    # -- inside ----------------------------------------------------------------------------------

    def _place(self, step: StepRows, i: int, n_drafts: int) -> Iterator[tuple[PlacedTokens, str]]:
        request = step.requests[i]
        if request not in self._placing.live:
            self.n_gaps += 1
            if self.n_gaps <= _MOST_LOGGED:
                LOG.error("a step of vLLM has rows of request %s, whose beginning was not seen", request)
            return
        try:
            yield from self._placing.place_request(step, i, n_drafts)
        except AlignmentError as error:
            self._lose(self._placing.live[request], error)
            yield from self._placing.place_request(step, i, n_drafts)

    def _has_its_blocks(self, request: str, parts: Sequence[tuple[PlacedTokens, str]]) -> bool:
        return self.kept is None or not any(
            self.kept.n_unknown(request, placed.ids.tolist()) for placed, reason in parts if reason == CACHED
        )

    def _from_cache(self, request: str, placed: PlacedTokens) -> Scores | str:
        if self.kept is None or self._placing.live[request].unseen:
            return CACHED
        return self.kept.find(request, int(placed.columns[0]), placed.ids.tolist(), self._n_probes, CACHED)

    def _lose(self, rows: RequestRows, error: Exception) -> None:
        rows.unseen = f"its rows could not be attributed, or scored: {type(error).__name__}: {error}"
        recording = self._generations[rows.request].recording
        self.n_gaps += 1
        LOG.error("request %s is not scored any more: %s", rows.request, error)
        self._reports.gap(Gap(recording.number, rows.n_columns, rows.n_columns, rows.unseen))

    def _score_tokens(self, parts: Sequence[tuple[str, PlacedTokens, States | Scores | str]]) -> None:
        """Score tokens in turns: each begins with what the last one of its request retained."""
        turns: list[dict[str, tuple[Generation, Recording, PlacedTokens, States | Scores | str]]] = []
        n_parts = Counter[str]()
        for request, placed, states in parts:
            if not isinstance(states, (str, Scores)):
                at = torch.from_numpy(placed.offsets)
                states = {site: hidden[at.to(hidden.device)] for site, hidden in states.items()}
            generation = self._generations[request]
            turn = n_parts[request]
            n_parts[request] += 1
            if turn == len(turns):
                turns.append({})
            turns[turn][request] = (generation, generation.recording, placed, states)
        for turn_parts in turns:
            for phase in (PROMPT, GENERATED):
                self._score_turn([part for part in turn_parts.values() if part[2].phase == phase])

    def _score_turn(self, parts: Sequence[tuple[Generation, Recording, PlacedTokens, States | Scores | str]]) -> None:
        assert self.score_together is not None
        report = self.score_together(parts)
        if report is not None:
            report(True)

    def _stops(self, request: str) -> bool:
        generation = self._generations[request]
        return generation.stopping or generation.raising is not None

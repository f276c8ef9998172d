"""One run over the requests of a vLLM worker, reported to its client.

watch.begin_step(scheduler_output)                       # before the model runs
watch.step(rows, n_drafts, states)                       # after it
watch.settle(n_accepted)                                 # with speculation, after sampling
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from probemon.core.scores import ModelState, Scores
from probemon.errors import AlignmentError
from probemon.manager import DynamicProbeManager
from probemon.monitor.breaker import Breaker
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.rules import Event
from probemon.monitor.run import MonitorRun, RunOptions
from probemon.ops.vllm.channel import Channel
from probemon.ops.vllm.kept_scores import KeptScores
from probemon.ops.vllm.messages import Ended, RequestHead, RuleMet, StepTokens, WorkerSettings
from probemon.ops.vllm.refusals import unseen_request
from probemon.ops.vllm.requests import EngineRequests
from probemon.ops.vllm.rows import StepRows
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import States
from probemon.tracking.recording import Recording

LOG = logging.getLogger("probemon")


class EngineWatch:
    """`run`: a `MonitorRun`; `n_steps` were scored, in `seconds`.

    `tokenizer`: for judges; `kept`: scores of the prefix cache, None without one.
    """

    def __init__(
        self,
        manager: DynamicProbeManager,
        settings: WorkerSettings,
        host: ModelState,
        channel: Channel,
        model: Any,
        tokenizer: Any = None,
        kept: KeptScores | None = None,
    ) -> None:
        self.n_steps, self.seconds, self.ended = 0, 0.0, Counter[str]()
        self._channel, self._stop = channel, settings.stop
        deployment = manager.deployment
        # Scoring errors must not end all requests, so there is always a breaker.
        breaker = Breaker() if deployment is None or deployment.breaker is None else deployment.breaker
        self.run = MonitorRun(
            manager,
            model,
            tokenizer,
            [_Teller(self, channel, settings.stop)],
            RunOptions(on_gap="report", callback_errors="report", breaker=breaker),
            deployment,
            source=partial(EngineRequests, host=host),
        )
        source = self.run.source
        assert isinstance(source, EngineRequests)
        self.requests = source
        self.requests.kept = kept
        self.requests.score_together = self.run.scorer.score_together
        self._entries: list[tuple[Recording, PlacedTokens, Scores, int]] = []
        self._began = (0.0, 0.0)  # of the newest step: time.time(), time.perf_counter()
        self.run.__enter__()

    def begin_step(self, scheduled: Any) -> None:
        """Take the scheduler's requests, before a step."""
        self._began = (time.time(), time.perf_counter())
        for request in scheduled.finished_req_ids:
            self._end(request)
        for new in scheduled.scheduled_new_reqs:
            try:
                self._begin(new)
            except AlignmentError as error:
                LOG.error("request %s cannot be followed: %s", new.req_id, error)
        cached = scheduled.scheduled_cached_reqs
        for request in cached.resumed_req_ids:
            self._resume(request, cached.all_token_ids.get(request))

    def step(self, rows: StepRows, n_drafts: Mapping[str, int], states: States) -> list[int]:
        """Score and report a step; return the indices of requests that end."""
        begin = time.perf_counter()
        self.requests.step(rows, n_drafts, states, self._began[1])
        self._tell(time.perf_counter() - begin)
        return self.requests.stopping(rows.requests) if self._stop else []

    def settle(self, n_accepted: Mapping[str, int]) -> None:
        """Score and report accepted drafts."""
        begin = time.perf_counter()
        self.requests.settle(n_accepted)
        self._tell(time.perf_counter() - begin)

    def lose(self, requests: Sequence[str], error: Exception) -> None:
        """Stop scoring requests whose step could not be read, or reported."""
        self._entries = []
        self.requests.lose(requests, error)

    def stats(self) -> dict[str, Any]:
        """Return counts as JSON."""
        return {
            "steps": self.n_steps,
            "seconds": self.seconds,
            "requests": self.requests.n_generating,
            "ended": self.ended.total(),
            "sent": self._channel.n_sent,
            "dropped": self._channel.n_dropped,
            "gaps": self.run.n_gaps,
            "failures": self.run.n_failures,
            "health": self.run.health().as_dict(),
        }

    def close(self) -> None:
        """End the run, and report nothing more."""
        self.run.__exit__(None, None, None)
        self._channel.close()

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self, new: Any) -> None:
        prompt, unseen = new.prompt_token_ids, unseen_request(new)
        if self.requests.knows(new.req_id):  # the v2 runner reports resumed requests as new
            self._resume(new.req_id, getattr(new, "prefill_token_ids", None) or prompt)
            return
        if prompt is None:
            prompt = [-1] * len(new.prompt_embeds)
        self.requests.begin(new.req_id, prompt, int(new.num_computed_tokens), unseen)

    def _resume(self, request: str, ids: Sequence[int] | None) -> None:
        if ids is not None and self.requests.knows(request):
            self.requests.resume(request, ids)

    def _end(self, request: str) -> None:
        ended = self.requests.end(request)
        if ended is None:
            return
        rows, generation = ended
        self.ended["stopped" if generation.stop_column is not None else ""] += 1
        number = generation.recording.number
        stop_column = -1 if generation.stop_column is None else generation.stop_column
        self._channel.send(
            lambda sequence: Ended(sequence, request, number, rows.n_columns, rows.n_cached, rows.n_again, stop_column)
        )

    def take(self, batch: Batch, scores: Scores) -> None:
        """Keep scores until the step is reported."""
        self.requests.keep(batch.recording, batch.placed, scores)
        self._entries.append((batch.recording, batch.placed, scores, batch.watch.number))

    def _tell(self, seconds: float) -> None:
        self.seconds += seconds
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        self.n_steps += 1
        recordings = list({id(entry[0]): entry[0] for entry in entries}.values())
        place = {id(recording): i for i, recording in enumerate(recordings)}
        lengths = [len(placed) for _, placed, _, _ in entries]
        pack = self.run.manager.pack
        watches = self.run.watches
        message = partial(
            StepTokens,
            step=self.n_steps,
            began_seconds=self._began[0],
            seconds=seconds,
            requests=tuple(self._head(recording) for recording in recordings),
            of_request=np.repeat([place[id(recording)] for recording, *_ in entries], lengths).astype(np.int32),
            columns=np.concatenate([placed.columns for _, placed, _, _ in entries]).astype(np.int64),
            ids=np.concatenate([placed.ids for _, placed, _, _ in entries]).astype(np.int64),
            phases=np.repeat([placed.phase for _, placed, _, _ in entries], lengths).astype(np.int8),
            watches=np.repeat([watch for *_, watch in entries], lengths).astype(np.int32),
            deployments={watch: watches[watch].deployment or "" for watch in {entry[3] for entry in entries}},
            scores=Scores.join([entry[2] for entry in entries], pack.n_probes, self.run.manager.report_top_k),
        )
        self._channel.send(lambda sequence: message(sequence=sequence))

    def _head(self, recording: Recording) -> RequestHead:
        assert recording.call.prompt_columns is not None
        n_cached = self.requests.n_cached(recording.request)
        return RequestHead(recording.request, recording.number, recording.call.prompt_columns, n_cached)


class _Teller(Follower):
    """Keeps scores, and reports rules at once."""

    def __init__(self, watch: EngineWatch, channel: Channel, stops: bool) -> None:
        self._watch, self._channel, self._stops = watch, channel, stops

    def scored(self, batch: Batch, scores: Scores) -> None:
        self._watch.take(batch, scores)

    def event(self, event: Event, action: str) -> None:
        self._send(event, action, self._stops and action == "stop")

    def verdict(self, event: Event) -> None:
        ruling = None if event.verdict is None else event.verdict.ruling
        self._send(event, "escalate", self._stops and ruling == "stop")

    def _send(self, event: Event, action: str, stopping: bool) -> None:
        fields = {**dataclasses.asdict(event), "reading": []}
        self._channel.send(lambda sequence: RuleMet(sequence, fields, action, stopping))

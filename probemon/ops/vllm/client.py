"""The scores of a vLLM engine, in the process that asks for answers.

    with VllmClient("watch.yaml") as client:                       # a deployment file
        llm = LLM(model, **client.engine_arguments())
        outputs = llm.generate(prompts, SamplingParams(max_tokens=50))
        result = client.result(outputs)                            # row i is the i-th answer

The worker scores, inside the step; a client receives, without vLLM.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.scores import PROMPT, ModelState, Scores
from probemon.errors import AlignmentError, ConfigError
from probemon.manager import DynamicProbeManager
from probemon.monitor.failures import MAX_KEPT, Failures
from probemon.monitor.health import Health
from probemon.monitor.result import Result
from probemon.monitor.rule_spec import Rule
from probemon.monitor.rules import Event
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.judges.escalation import Escalate
from probemon.ops.vllm.client_health import client_health
from probemon.ops.vllm.engine_run import EngineRun, ends_row
from probemon.ops.vllm.event_fields import event_of
from probemon.ops.vllm.messages import (
    CHANNEL_VARIABLE,
    CONFIG_KEY,
    WORKER,
    Ended,
    Hello,
    Message,
    RequestHead,
    RuleMet,
    StepTokens,
    WorkerSettings,
)
from probemon.ops.vllm.receiver import Receiver
from probemon.ops.vllm.request_log import END_SECONDS, RequestLog, is_cut_short, is_same
from probemon.ops.vllm.request_names import name_of, names_of_output, place_of
from probemon.ops.vllm.watched import check_parts, check_rules, watched_sha256
from probemon.tracking.recording import RecordedTokens
from probemon.util.checks import check_choice, check_count

Reader = Callable[[Message], object]
FIXED_NAMES = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
STOP_ROWS = "probemon.ops.vllm.stop:StopRows"
IN_STEP, ABORT, TOLD = STOPS = ("in_step", "abort", "told")
NOT_RUN = "its request ended before the engine ran it"
NOT_KNOWN = "its request ended before the engine ran it, or what came of it was dropped or is forgotten (keep_requests)"


class VllmClient:
    """Give `deployment`, a file, or `packs`, folders or names, with `cascade`, settings of their manager.

    - `tokenizer`: for texts; may be set later
    - `stops`: "in_step" ends a sequence with the token that met the rule; "abort" aborts it (`abort_with`), for
      speculation; "told" only reports
    - `canary`: what is compared before the engine serves (`WorkerSettings`)
    - `untried_version`: take a version of vLLM that was not tested, if the canary's scores are right
    - `keep_requests`: ended ones that keep their scores; None: all
    - `high_water_mark`: messages that may wait; further ones are dropped
    - `followers`: as those of `attach`, called in the receiving thread; hidden states stay in the worker

    Raises `DeploymentError`, `PackError`, `ConfigError`, `MissingExtra`.
    """

    def __init__(
        self,
        deployment: str | Path | Deployment | None = None,
        *,
        packs: Sequence[str] = (),
        cascade: dict[str, Any] | None = None,
        tokenizer: Any = None,
        stops: str = IN_STEP,
        canary: str = "auto",
        untried_version: bool = False,
        keep_requests: int | None = None,
        high_water_mark: int = 10_000,
        followers: Sequence[Any] = (),
    ) -> None:
        self.stops = check_choice("stops", stops, STOPS)
        if keep_requests is not None:
            keep_requests = check_count("keep_requests", keep_requests, least=1, remedy="give None for all")
        if isinstance(deployment, (str, Path)):
            deployment = Deployment.read(deployment)
        self.deployment = deployment
        self.manager, self.rules = _opened(deployment, packs, cascade or {})
        stops_rows = any(one == "stop" or isinstance(one, Escalate) for rule in self.rules for one in rule.actions)
        settings = WorkerSettings(
            deployment="" if deployment is None else str(deployment.path),
            packs=tuple(os.path.abspath(pack) if os.path.isdir(pack) else pack for pack in packs),
            cascade=cascade or {},
            stop=stops_rows and stops == IN_STEP,
            canary=canary,
            untried_version=untried_version,
            high_water_mark=high_water_mark,
        )
        pack = self.manager.pack
        sha256 = watched_sha256(pack, deployment, cascade or {})
        self.settings = replace(settings, sites=tuple(pack.sites), sha256=sha256)
        self.tokenizer = tokenizer
        self.hello: Hello | None = None
        self.mismatch: ConfigError | None = None  # set by a worker with other settings
        self.n_hellos = self.n_steps = 0
        self.n_untold = 0  # requests that ended without tokens, since tokens last came
        self.step_seconds = self.in_worker_seconds = 0.0
        self.actions: deque[tuple[Event, str]] = deque(maxlen=MAX_KEPT)
        self._early: list[tuple[Event, str, bool]] = []  # of requests whose first tokens have not come
        self.tokens = Counter[str]()  # by why they have no scores; "" if they have
        self.failures = Failures()
        self._keep_requests, self._n_lost_before = keep_requests, 0
        self._logs: OrderedDict[str, RequestLog] = OrderedDict()  # by vLLM's ids, oldest first
        self._by_name: dict[str, list[str]] = {}
        self._over: deque[str] = deque()
        self._readers: list[Reader] = []
        self._changed = threading.Condition()
        self.run = EngineRun(self, followers)
        self.receiver = Receiver(self._take, high_water_mark)

    def __enter__(self) -> VllmClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Receive nothing more; end the followers."""
        self.receiver.close()
        self.run.close()

    # -- the engine ------------------------------------------------------------------------------

    def engine_arguments(self, **arguments: Any) -> dict[str, Any]:
        """Return the arguments of `LLM` and `AsyncEngineArgs` for a watched engine, yours included.

        Call it before the engine is made: it sets an environment variable. Raises `ConfigError`.
        """
        if os.environ.get(FIXED_NAMES, "0") not in ("", "0"):
            raise ConfigError(f"{FIXED_NAMES} is set: requests of one name could not be told apart, so unset it")
        os.environ[CHANNEL_VARIABLE] = self.receiver.address
        other_config = arguments.pop("additional_config", {})
        watched: dict[str, Any] = {
            "worker_cls": WORKER,
            "additional_config": {**other_config, CONFIG_KEY: self.settings.as_config()},
        }
        for name in watched.keys() & arguments.keys():
            raise ConfigError(f"{name} is {arguments[name]!r}: probemon's worker is one itself, so leave it out")
        if self.settings.stop:
            watched["logits_processors"] = [*arguments.pop("logits_processors", ()), STOP_ROWS]
        return {**arguments, **watched}

    def abort_with(self, engine: Any) -> None:
        """With `stops="abort"`, abort the answers of an `AsyncLLM` at which a rule stops. Call it in the engine's event
        loop.

        Errors of aborts are in `client.failures`.
        """
        if self.stops != ABORT:
            raise ConfigError(f"this client has stops={self.stops!r}: give stops='abort'")
        if not asyncio.iscoroutinefunction(getattr(engine, "abort", None)):
            raise ConfigError(f"engine is {engine!r:.100}: give an AsyncLLM, whose abort() is awaited")
        loop = asyncio.get_running_loop()
        under_way = set[asyncio.Task[None]]()  # a loop holds its tasks weakly

        async def abort(request: str) -> None:
            try:
                await engine.abort(request, internal=True)  # vLLM's id: a name covers all answers
            except Exception as error:
                self.failures.add("an abort", error)

        def begin(request: str) -> None:
            task = loop.create_task(abort(request))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        def aborting(message: Message) -> None:
            if isinstance(message, RuleMet) and ends_row(message):
                loop.call_soon_threadsafe(begin, message.event["request"])

        self.add_reader(aborting)

    @property
    def events(self) -> list[Event]:
        """The newest 1,000 events."""
        return [event for event, _ in list(self.actions)]

    def add_reader(self, reader: Reader) -> None:
        """Call `reader(message)` for new messages, in the receiving thread: for routes, which pass on raw messages.

        Your own code is a follower.
        """
        self._readers.append(reader)

    # -- what came -------------------------------------------------------------------------------

    def result(self, out: Any, *, timeout_seconds: float = 10.0) -> Result:
        """Return the scores of one or several outputs of the engine, one row per answer.

        `out`: finished `RequestOutput`s, or the like. Waits up to `timeout_seconds` for scores. Raises `AlignmentError`
        if the engine ran other tokens, or more; `ConfigError` if an engine with other settings found this client.
        """
        self.check()
        began = time.monotonic()
        outputs = list(out) if isinstance(out, (list, tuple)) else [out]
        if not outputs:
            raise ConfigError("out is empty: give what the engine returned")
        parts = list[tuple[str, RequestLog | None, RecordedTokens]]()
        for output in outputs:
            for answer in output.outputs:
                ids = np.array([*output.prompt_token_ids, *answer.token_ids], dtype=np.int64)
                parts.append((output.request_id, *self._tokens(output, answer, ids, began, timeout_seconds)))
        return self._result(parts)

    def result_of(self, request: str) -> Result:
        """Return the scores of all that the engine ran for a request, one row per answer: of one that was aborted, or
        whose output you left. Raises `AlignmentError` for a request that is not kept.

        The last row may have tokens that no output shows: drafts, or those that an abort came too late for.
        """
        self.check()
        logs = self.logs_of_reply(request) or self.logs_of(request)[:1]
        if not logs:
            raise AlignmentError(
                f"request {request!r} is not one that the worker scored, or it is forgotten"
                f" (keep_requests={self._keep_requests})"
            )
        return self._result([(request, log, log.ran(lost=log.lost(self.receiver.n_lost))) for log in logs])

    def result_of_log(self, request: str, log: RequestLog | None, ids: Sequence[int], n_prompt: int) -> Result:
        """Return what is known by now of an answer with known tokens. `log`: None if nothing is known of it."""
        every = np.array(ids, dtype=np.int64)
        if log is None:
            return self._result([(request, None, _not_run(every, self.manager.pack.n_probes, NOT_KNOWN))])
        lost = log.lost(self.receiver.n_lost)
        return self._result([(request, log, log.tokens(every, n_prompt, lost=lost, cut_short=True))])

    def _result(self, parts: Sequence[tuple[str, RequestLog | None, RecordedTokens]]) -> Result:
        watches, deployments = list[tuple[int, int, int]](), dict[int, str | None]()
        for row, (_, log, _) in enumerate(parts):
            if log is not None:
                watches += [(row, *one) for one in log.watched_from()]
                deployments |= log.deployments
        result = Result(
            self.manager.pack,
            self.tokenizer,
            RecordedTokens.join([tokens for *_, tokens in parts], self.manager.pack.n_probes),
            None if self.hello is None else host_of(self.hello),
            requests=tuple(name for name, *_ in parts),
            watches=tuple(watches),
        )
        result.deployments = deployments
        return result

    def log_of(self, request: str) -> RequestLog | None:
        """Return the newest log of a name, or of vLLM's id; None if there is none."""
        return next(iter(self.logs_of(request)), None)

    def logs_of(self, request: str) -> list[RequestLog]:
        """Return all logs of a name, newest first, or of vLLM's id."""
        with self._changed:
            if request in self._logs:
                return [self._logs[request]]
            return [self._logs[request_id] for request_id in reversed(self._by_name.get(request, ()))]

    def logs_of_reply(self, reply: str) -> list[RequestLog]:
        """Return the logs of the choices of a server's reply, in their order; [] if none is kept."""
        with self._changed:
            answers = [name for name in self._by_name if name.endswith(reply) or f"{reply}-" in name]
        choices = dict[tuple[int, int], RequestLog]()
        for name in answers:
            place = place_of(reply, name)
            if place is not None and (log := self.log_of(name)) is not None:
                choices[place] = log
        return [choices[place] for place in sorted(choices)]

    def check(self) -> None:
        """Raise `ConfigError` if an engine with other settings found this client."""
        if self.mismatch is not None:
            raise self.mismatch

    def wait(self, ready: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait until `ready()`, called after every message; return its result."""
        with self._changed:
            return self._changed.wait_for(ready, timeout_seconds)

    def requests(self) -> list[RequestLog]:
        """Return the kept requests, oldest first."""
        with self._changed:
            return list(self._logs.values())

    def health(self) -> Health:
        """Return the health of worker and messages."""
        return client_health(self)

    # -- inside ----------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        with self._changed:
            if isinstance(message, Hello):
                self._begin(message)
            elif self.mismatch is not None:
                return
            elif isinstance(message, StepTokens):
                self._add(message)
            elif isinstance(message, RuleMet):
                self._met(message)
            elif isinstance(message, Ended):
                log = self._logs.get(message.request)
                if log is not None and log.under_way:
                    self._end(log, message)
                self.n_untold += log is None and not self.receiver.n_lost
            self._n_lost_before = self.receiver.n_lost
            self._changed.notify_all()
        self.check()
        self.run.hear(message)
        for reader in self._readers:
            self.failures.call("a reader of messages", reader, message)

    def _begin(self, message: Hello) -> None:
        """End all requests of the previous engine."""
        self.hello, self.n_hellos, self.n_untold = message, self.n_hellos + 1, 0
        for log in [log for log in self._logs.values() if log.under_way]:
            self._end(log, None)
        if message.sha256 != self.settings.sha256:
            self.mismatch = self.mismatch or ConfigError(
                f"a worker watches {message.sha256[:16]}, this client {self.settings.sha256[:16]}: another engine found"
                " this client's address, and no scores are taken any more. Make each engine after engine_arguments() of"
                " its client, and create both again"
            )

    def _add(self, message: StepTokens) -> None:
        self.n_steps, self.n_untold = self.n_steps + 1, 0
        self.in_worker_seconds += message.seconds
        self.tokens.update(message.scores.coverage.unseen)
        for at, head in enumerate(message.requests):
            log = self._logs.get(head.request) or self._new_log(head)
            log.add(message, np.flatnonzero(message.of_request == at), self.receiver.n_lost, self._n_lost_before)

    def _new_log(self, head: RequestHead) -> RequestLog:
        n_ahead = 0 if self.hello is None else self.hello.n_ahead
        log = self._logs[head.request] = RequestLog(head, self.manager.pack.n_probes, n_ahead)
        self._by_name.setdefault(name_of(head.request), []).append(head.request)
        for event, action, ends in self._early:
            if event.request == head.request:
                log.meet(event, action, ends=ends)
        self._early = [one for one in self._early if one[0].request != head.request]
        if self._keep_requests is not None and self.receiver.n_lost:  # its end may have been dropped
            silent = [one for one in self._logs.values() if one.under_way and one.n_lost < self.receiver.n_lost]
            for one in silent[: max(0, len(silent) - 1 - self._keep_requests)]:  # the new one is among them
                self._end(one, None)
        return log

    def _met(self, message: RuleMet) -> None:
        event = event_of(message.event)
        log = self._logs.get(event.request)
        if log is not None:
            log.meet(event, message.action, ends=ends_row(message))
        else:  # in the first step of a request, rules are told before its tokens
            self._early = [*self._early[-MAX_KEPT:], (event, message.action, ends_row(message))]
        for i, (one, action) in enumerate(self.actions):
            if event.verdict is not None and is_same(one, event):
                self.actions[i] = event, action
                return
        self.actions.append((event, message.action))

    def _end(self, log: RequestLog, message: Ended | None) -> None:
        log.end(message, self.receiver.n_lost)
        self._over.append(log.request)
        while self._keep_requests is not None and len(self._over) > self._keep_requests:
            request = self._over.popleft()
            del self._logs[request]
            named = self._by_name[name_of(request)]
            named.remove(request)
            if not named:
                del self._by_name[name_of(request)]

    def _tokens(
        self, output: Any, answer: Any, ids: Ints, began: float, timeout_seconds: float
    ) -> tuple[RequestLog | None, RecordedTokens]:
        """Return an answer's log and tokens; None if the engine ran nothing. Names may repeat."""
        n_prompt, n_outputs = len(output.prompt_token_ids), len(output.outputs)
        cached = getattr(output, "num_cached_tokens", None) if n_outputs == 1 and len(answer.token_ids) else None
        cut_short = is_cut_short(getattr(answer, "finish_reason", None), getattr(answer, "stop_reason", None))
        wrong: dict[str, AlignmentError] = {}
        n_run = len(ids) - (len(ids) > n_prompt)

        def candidates() -> Iterator[RequestLog]:
            for name in names_of_output(output.request_id, answer.index, n_outputs):
                yield from (log for log in self.logs_of(name) if log.request not in wrong)

        def is_complete(log: RequestLog, with_end: bool) -> bool:
            whole = log.is_whole(n_run, with_end=with_end)
            full_length = log.ended is None or log.ended.n_columns >= n_run  # else a shorter answer of the same name
            return whole and full_length and (cached is None or cached == log.n_cached)

        def best_match(*, complete: bool, with_end: bool = False) -> tuple[RequestLog, RecordedTokens] | None:
            """Return the log with the most scores, the newest of several."""
            fitting = list[tuple[RequestLog, RecordedTokens]]()
            for log in candidates():
                # vLLM counts once, as the log does; an abort may come before.
                is_other = cached not in (None, log.n_cached) and not cut_short
                if is_complete(log, with_end) if complete else not is_other:
                    lost = log.lost(self.receiver.n_lost)
                    try:
                        fitting.append((log, log.tokens(ids, n_prompt, lost=lost, cut_short=cut_short)))
                    except AlignmentError as error:
                        wrong[log.request] = error

            def rank(one: tuple[RequestLog, RecordedTokens]) -> tuple[bool, int]:
                return cached in (None, one[0].n_cached), int(one[1].scores.coverage.seen.sum())

            return max(fitting, key=rank, default=None)

        # An end comes soon; with an engine in this process only in the next step.
        for with_end, seconds in ((True, min(END_SECONDS, timeout_seconds)), (False, timeout_seconds)):
            end = began + seconds
            while self.wait(lambda: any(is_complete(log, with_end) for log in candidates()), end - time.monotonic()):  # noqa: B023
                with self._changed:
                    match = best_match(complete=True, with_end=with_end)
                if match is not None:
                    return match
        with self._changed:
            match = best_match(complete=False)
        if match is not None:
            return match
        if wrong:
            raise next(iter(wrong.values()))
        if len(ids) > n_prompt:
            raise AlignmentError(
                f"request {output.request_id!r} is not one that the worker scored: none of its tokens came"
                f" ({self.receiver.n_lost} messages were dropped), or they are forgotten"
                f" (keep_requests={self._keep_requests})"
            )
        all_known = self._keep_requests is None and not self.receiver.n_lost
        return None, _not_run(ids, self.manager.pack.n_probes, NOT_RUN if all_known else NOT_KNOWN)


def _opened(
    deployment: Deployment | None, packs: Sequence[str], cascade: Mapping[str, Any]
) -> tuple[DynamicProbeManager, list[Rule]]:
    """Return manager and rules; metrics and sinks are the worker's."""
    if deployment is None:
        chosen: Any = packs[0] if len(packs) == 1 else list(packs)
        return DynamicProbeManager(chosen, **cascade), []
    check_parts(deployment)
    pack = deployment.open_packs()
    rules = deployment.rules(pack)
    check_rules(rules, pack)
    with deployment.errors_of_settings():
        manager = DynamicProbeManager(pack, **deployment.settings)
    manager.deployment = deployment
    return manager, rules


def host_of(hello: Hello) -> ModelState:
    """Return the model state that a worker reported."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in hello.host.items()}
    scales = tuple((str(name), float(scale)) for name, scale in fields.get("adapter_scales", ()))
    return ModelState(**{**fields, "adapter_scales": scales})  # type: ignore[arg-type]


def _not_run(ids: Ints, n_probes: int, reason: str) -> RecordedTokens:
    n = len(ids)
    none = np.zeros(n, dtype=np.int64)
    return RecordedTokens(none, np.arange(n), ids, np.full(n, PROMPT), Scores.nothing(n, n_probes, reason))

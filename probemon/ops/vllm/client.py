"""VllmClient: the scores of a vLLM engine, in the process that asks it for answers.

    from vllm import LLM, SamplingParams

    with VllmClient("watch.yaml") as client:                       # a deployment file
        llm = LLM(model, **client.engine_arguments())
        outputs = llm.generate(prompts, SamplingParams(max_tokens=50))
        result = client.result(outputs)                            # a Result: row i is the i-th answer
        client.events, client.health()

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **client.engine_arguments()))
    async for piece in hold(client, engine.generate(prompt, params, "my-request")):      # of held_answers
        print(piece.text, end="")                                  # once the score of its token is known

The worker scores and asks the rules, inside the step; a client receives. vLLM itself is needed by the engine alone.
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
from probemon.core.scores import PROMPT, HostState, Scores
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
from probemon.ops.vllm.request_log import END_SECONDS, RequestLog, is_cut_short
from probemon.ops.vllm.request_names import name_of, names_of_output
from probemon.ops.vllm.watched import check_rules, watched_sha256
from probemon.tracking.recording import RecordedTokens
from probemon.util.checks import check_choice, check_count

Listener = Callable[[Message], object]
FIXED_NAMES = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
STOP_ROWS = "probemon.ops.vllm.stop:StopRows"
IN_STEP, ABORT, TOLD = STOPS = ("in_step", "abort", "told")
NOT_RUN = "its request ended before the engine ran it"
NOT_KNOWN = "its request ended before the engine ran it, or what came of it was dropped or is forgotten (keep_requests)"


class VllmClient:
    """Give `deployment`, a file, or `packs`, folders or names of them, with `cascade`, settings of a manager by name.

    `tokenizer`: for texts in results, and for `hold`; it may be set later (`client.tokenizer = llm.get_tokenizer()`).
    `stops`: what a rule's stop does: "in_step" ends the row with the token that met the rule, by vLLM's logits
    processors; "abort" has the client abort the request (`abort_with`), for engines that speculate; "told" nothing.
    `keep_requests`: how many requests that have ended keep their scores, the newest (None: all); those under way do.
    `high_water_mark`: how many messages may wait; what comes then is dropped, and its tokens are unseen for that.

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
        canary: str = "weights",
        keep_requests: int | None = None,
        high_water_mark: int = 10_000,
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
            high_water_mark=high_water_mark,
        )
        pack = self.manager.pack
        sha256 = watched_sha256(pack, deployment, cascade or {})
        self.settings = replace(settings, sites=tuple(pack.sites), sha256=sha256)
        self.tokenizer = tokenizer
        self.hello: Hello | None = None  # what the newest worker said of itself
        self.mismatch: ConfigError | None = None  # once a worker of something else has sent to this client
        self.n_hellos = self.n_steps = 0
        self.n_untold = 0  # requests that ended since tokens came, and none of theirs had: their rows could not be read
        self.step_seconds = self.in_worker_seconds = 0.0
        self.actions: deque[tuple[Event, str]] = deque(maxlen=MAX_KEPT)
        self.tokens = Counter[str]()  # every token that came, by why it has no scores: "" for those that have
        self.failures = Failures()
        self._keep_requests, self._n_lost_before = keep_requests, 0
        self._logs: OrderedDict[str, RequestLog] = OrderedDict()  # by vLLM's own ids, oldest first
        self._by_name: dict[str, list[str]] = {}
        self._over: deque[str] = deque()  # of these, those that have ended, in that order
        self._listeners: list[Listener] = []
        self._changed = threading.Condition()
        self.receiver = Receiver(self._take, high_water_mark)

    def __enter__(self) -> VllmClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Receive nothing more. What was received stays."""
        self.receiver.close()

    # -- the engine ------------------------------------------------------------------------------

    def engine_arguments(self, **arguments: Any) -> dict[str, Any]:
        """Return the arguments of `LLM` and `AsyncEngineArgs` by which an engine is watched, beside your own.

        Its processes find this client by an environment variable, which is set here: call it, then make the engine.
        """
        if os.environ.get(FIXED_NAMES, "0") not in ("", "0"):
            raise ConfigError(f"{FIXED_NAMES} is set: requests of one name could not be told apart, so unset it")
        os.environ[CHANNEL_VARIABLE] = self.receiver.address
        more = arguments.pop("additional_config", {})
        watched: dict[str, Any] = {
            "worker_cls": WORKER,
            "additional_config": {**more, CONFIG_KEY: self.settings.as_config()},
        }
        for name in watched.keys() & arguments.keys():
            raise ConfigError(f"{name} is {arguments[name]!r}: probemon's worker is one itself, so leave it out")
        if self.settings.stop:
            watched["logits_processors"] = [*arguments.pop("logits_processors", ()), STOP_ROWS]
        # A step that begins before the one before it was read was never seen attributed right.
        return {"async_scheduling": False, **arguments, **watched}

    def abort_with(self, engine: Any) -> None:
        """Have an `AsyncLLM` abort each answer at which a rule stops, with `stops="abort"`. Call it in the engine's
        event loop.

        Of several answers to one request (`n`) that one alone is aborted. Tokens that were scheduled by then still
        come; `hold` shows none of them. What an abort raises is in `client.failures`.
        """
        if self.stops != ABORT:
            raise ConfigError(f"this client has stops={self.stops!r}: give stops='abort'")
        if not asyncio.iscoroutinefunction(getattr(engine, "abort", None)):
            raise ConfigError(f"engine is {engine!r:.100}: give an AsyncLLM, whose abort() is awaited")
        loop = asyncio.get_running_loop()
        under_way = set[asyncio.Task[None]]()  # a loop itself holds its tasks weakly

        async def abort(request: str) -> None:
            try:
                await engine.abort(request, internal=True)  # vLLM's own id: a name stands for all answers of a request
            except Exception as error:
                self.failures.add("an abort", error)

        def begin(request: str) -> None:
            task = loop.create_task(abort(request))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        def aborting(message: Message) -> None:
            if isinstance(message, RuleMet) and ends_row(message):  # a coroutine is made in the loop: it may be closed
                loop.call_soon_threadsafe(begin, message.event["request"])

        self.listen(aborting)

    @property
    def events(self) -> list[Event]:
        """Return the newest 1,000 events of rules, whatever their action."""
        return [event for event, _ in list(self.actions)]

    def listen(self, listener: Listener) -> None:
        """Call `listener(message)` for everything that comes from now on, in the thread that receives."""
        self._listeners.append(listener)

    # -- what came -------------------------------------------------------------------------------

    def result(self, out: Any, *, timeout_seconds: float = 10.0) -> Result:
        """Return the scores of one of the engine's outputs, or of several: a row for each answer of each.

        `out`: a `RequestOutput` of vLLM that is finished and whole, or what has its `request_id`, `prompt_token_ids`
        and `outputs`, each with `index` and `token_ids`. Waits at most `timeout_seconds` for scores under way. Raises
        `AlignmentError` where the tokens are not those that the engine ran, or not all of them, and `ConfigError` once
        an engine that watches something else has found this client.
        """
        self.check()
        began = time.monotonic()
        outputs = list(out) if isinstance(out, (list, tuple)) else [out]
        if not outputs:
            raise ConfigError("out is empty: give what the engine returned")
        parts, names, watches = list[RecordedTokens](), list[str](), list[tuple[int, int, int]]()
        deployments: dict[int, str | None] = {}
        for output in outputs:
            for answer in output.outputs:
                ids = np.array([*output.prompt_token_ids, *answer.token_ids], dtype=np.int64)
                log, tokens = self._tokens(output, answer, ids, began, timeout_seconds)
                parts.append(tokens)
                if log is not None:
                    watches += [(len(names), *one) for one in log.watched_from()]
                    deployments |= log.deployments
                names.append(output.request_id)
        result = Result(
            self.manager.pack,
            self.tokenizer,
            RecordedTokens.join(parts, self.manager.pack.n_probes),
            None if self.hello is None else host_of(self.hello),
            requests=tuple(names),
            watches=tuple(watches),
        )
        result.deployments = deployments
        return result

    def log_of(self, request: str) -> RequestLog | None:
        """Return what came of the newest request of a name, or of the one with this id of vLLM's own; None where
        nothing has come, or is kept.
        """
        return next(iter(self.logs_of(request)), None)

    def logs_of(self, request: str) -> list[RequestLog]:
        """Return what came of all requests of a name, the newest first, or of the one with this id of vLLM's own."""
        with self._changed:
            if request in self._logs:
                return [self._logs[request]]
            return [self._logs[own] for own in reversed(self._by_name.get(request, ()))]

    def check(self) -> None:
        """Raise `ConfigError` once an engine that watches something else has found this client."""
        if self.mismatch is not None:
            raise self.mismatch

    def wait(self, ready: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait until `ready()`, which is asked after every message; return whether it is."""
        with self._changed:
            return self._changed.wait_for(ready, timeout_seconds)

    def requests(self) -> list[RequestLog]:
        """Return the requests whose scores are kept, oldest first."""
        with self._changed:
            return list(self._logs.values())

    def health(self) -> Health:
        """Say whether the worker sees what the engine runs, and whether what it says comes. It runs nothing."""
        return client_health(self)

    # -- inside ----------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        with self._changed:
            if isinstance(message, Hello):
                self._begin(message)
            elif self.mismatch is not None:  # its probes may be others; which worker sent it is not told
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
        for listener in self._listeners:
            self.failures.call("a listener", listener, message)

    def _begin(self, message: Hello) -> None:
        """Take that an engine begins: what was under way in the one before it has ended."""
        self.hello, self.n_hellos, self.n_untold = message, self.n_hellos + 1, 0
        for log in [log for log in self._logs.values() if log.under_way]:
            self._end(log, None)
        if message.sha256 != self.settings.sha256:
            self.mismatch = self.mismatch or ConfigError(
                f"a worker watches {message.sha256[:16]}, this client {self.settings.sha256[:16]}: another engine found"
                " this client's address, and no scores are taken any more. Make each engine after engine_arguments() of"
                " its client, both anew"
            )

    def _add(self, message: StepTokens) -> None:
        self.n_steps, self.n_untold = self.n_steps + 1, 0
        self.in_worker_seconds += message.seconds
        self.tokens.update(message.scores.coverage.unseen)
        for at, head in enumerate(message.requests):
            log = self._logs.get(head.request) or self._new_log(head)
            log.add(message, np.flatnonzero(message.of_request == at), self.receiver.n_lost, self._n_lost_before)

    def _new_log(self, head: RequestHead) -> RequestLog:
        n_drafts = 0 if self.hello is None else self.hello.n_drafts
        log = self._logs[head.request] = RequestLog(head, self.manager.pack.n_probes, n_drafts)
        self._by_name.setdefault(name_of(head.request), []).append(head.request)
        if self._keep_requests is not None and self.receiver.n_lost:  # the message of an end may have been dropped
            silent = [one for one in self._logs.values() if one.under_way and one.n_lost < self.receiver.n_lost]
            for one in silent[: max(0, len(silent) - 1 - self._keep_requests)]:  # the new one is among them
                self._end(one, None)
        return log

    def _met(self, message: RuleMet) -> None:
        event = event_of(message.event)
        log = self._logs.get(event.request)
        if log is not None and ends_row(message):
            log.meet(event)
        for i, (one, action) in enumerate(self.actions):
            if event.verdict is not None and _same(one, event):  # asked before, and now ruled
                self.actions[i] = event, action
                return
        self.actions.append((event, message.action))

    def _end(self, log: RequestLog, message: Ended | None) -> None:
        """Take the end of a request, and forget those that ended first."""
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
        """Return the tokens of an answer, and what they were made of; None where the engine ran nothing of it.

        A name may have been used before: what it is made of has the tokens of the answer.
        """
        n_prompt, n_outputs = len(output.prompt_token_ids), len(output.outputs)
        cached = getattr(output, "num_cached_tokens", None) if n_outputs == 1 and len(answer.token_ids) else None
        cut_short = is_cut_short(getattr(answer, "finish_reason", None), getattr(answer, "stop_reason", None))
        wrong: dict[str, AlignmentError] = {}
        n_run = len(ids) - (len(ids) > n_prompt)

        def known() -> Iterator[RequestLog]:
            for name in names_of_output(output.request_id, answer.index, n_outputs):
                yield from (log for log in self.logs_of(name) if log.request not in wrong)

        def is_complete(log: RequestLog, with_end: bool) -> bool:
            whole = log.is_whole(n_run, with_end=with_end)
            of_all = log.ended is None or log.ended.n_columns >= n_run  # else of a shorter answer of its name
            return whole and of_all and (cached is None or cached == log.first_column)

        def of_best(*, complete: bool, with_end: bool = False) -> tuple[RequestLog, RecordedTokens] | None:
            """Return the log with the most scores of the answer, of several such the newest: all have its tokens."""
            fitting = list[tuple[RequestLog, RecordedTokens]]()
            for log in known():
                # vLLM counts once, as the log does; an abort may come before it counts.
                is_other = cached not in (None, log.first_column) and not cut_short
                if is_complete(log, with_end) if complete else not is_other:
                    lost = log.lost(self.receiver.n_lost)
                    try:
                        fitting.append((log, log.tokens(ids, n_prompt, lost=lost, cut_short=cut_short)))
                    except AlignmentError as error:
                        wrong[log.request] = error

            def rank(one: tuple[RequestLog, RecordedTokens]) -> tuple[bool, int]:
                return cached in (None, one[0].first_column), int(one[1].scores.coverage.seen.sum())

            return max(fitting, key=rank, default=None)

        # An end comes soon after its answer; but of an engine in this process with the next step, which nobody may ask.
        for with_end, seconds in ((True, min(END_SECONDS, timeout_seconds)), (False, timeout_seconds)):
            end = began + seconds
            while self.wait(lambda: any(is_complete(log, with_end) for log in known()), end - time.monotonic()):  # noqa: B023
                with self._changed:
                    made = of_best(complete=True, with_end=with_end)
                if made is not None:
                    return made
        with self._changed:  # what there is, in time
            made = of_best(complete=False)
        if made is not None:
            return made
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
    """Return a manager of what is watched, and the rules. It shows no metrics and writes no sinks: the worker does."""
    if deployment is None:
        chosen: Any = packs[0] if len(packs) == 1 else list(packs)
        return DynamicProbeManager(chosen, **cascade), []
    pack = deployment.open_packs()
    rules = deployment.rules(pack)
    check_rules(rules, pack)
    with deployment.errors_of_settings():
        manager = DynamicProbeManager(pack, **deployment.settings)
    manager.deployment = deployment
    return manager, rules


def ends_row(message: RuleMet) -> bool:
    """Whether a row is to end for what was met, by its rule or by the judge that was asked."""
    verdict = message.event.get("verdict") or {}
    return message.action == "stop" or verdict.get("ruling") == "stop"


def host_of(hello: Hello) -> HostState:
    """Return what the worker said of its host."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in hello.host.items()}
    scales = tuple((str(name), float(scale)) for name, scale in fields.get("adapter_scales", ()))
    return HostState(**{**fields, "adapter_scales": scales})  # type: ignore[arg-type]


def _not_run(ids: Ints, n_probes: int, reason: str) -> RecordedTokens:
    n = len(ids)
    none = np.zeros(n, dtype=np.int64)
    return RecordedTokens(none, np.arange(n), ids, np.full(n, PROMPT), Scores.nothing(n, n_probes, reason))


def _same(one: Event, other: Event) -> bool:
    """Whether an event is another one, apart from its verdict."""
    return replace(one, verdict=None) == replace(other, verdict=None)

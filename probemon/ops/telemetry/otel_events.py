"""Met rules and ended generations as OpenTelemetry events.

events = OpenTelemetryEvents()                                  # the application's provider of logs
events = OpenTelemetryEvents(endpoint="http://localhost:4318")  # a collector, OTLP over HTTP

Each is a log record `gen_ai.evaluation.result`, without text or token ids, by the conventions for generative AI
(open-telemetry/semantic-conventions-genai at 997a19cc9be3bcd54fe4f45213df8c274f4776f0). docs/metrics.md lists the
attributes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from probemon.core.scores import PROMPT
from probemon.errors import ConfigError, MissingExtra
from probemon.monitor.followers import Follower
from probemon.monitor.rules import ESCALATE, Event
from probemon.ops.telemetry.otlp_logs import SCOPE, OtlpLogs, check_endpoint
from probemon.packs.strength import in_short
from probemon.tracking.recording import GAP, Recording

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

LOG = logging.getLogger("probemon")
EVENT = "gen_ai.evaluation.result"
FIRED, NOT_FIRED, UNSEEN = LABELS = ("fired", "not_fired", "unseen")
NOT_FINITE, ALIGNMENT_GAP, NOT_SCORED = UNSEEN_ERRORS = ("not_finite", "alignment_gap", "not_scored")
_COVERAGE = ("active", "dropped", "not_reached", "evaluated", "excluded", "shed")
_MOST_NAMED = 100


class OpenTelemetryEvents(Follower):
    """Follows any number of runs. Raises `MissingExtra`, `ConfigError`.

    - `endpoint`: a collector's address; a thread sends to it while runs are open, and ends within 2 seconds. `with
      events: ...` keeps it open between runs
    - `provider`: of logs, by default the application's
    """

    def __init__(self, endpoint: str | None = None, *, provider: Any = None) -> None:
        try:
            from opentelemetry.context import Context
            from opentelemetry.trace import INVALID_SPAN, set_span_in_context
        except ImportError as error:
            name = type(self).__name__
            raise MissingExtra(f"{name} needs OpenTelemetry: pip install 'probemon[otel]'") from error
        if endpoint is not None and provider is not None:
            raise ConfigError("an endpoint has its own provider of logs: give one of them")
        self._endpoint = None if endpoint is None else check_endpoint(endpoint)
        self._provider = provider
        self._no_span = set_span_in_context(INVALID_SPAN, Context())  # an empty context means the current span
        self._logs: Any = None
        self._n_users, self._lock = 0, threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self._endpoint is None else repr(self._endpoint)})"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def began(self, run: MonitorRun) -> None:
        """Follow a run."""
        run.follow(self.of_response(""))

    def of_response(self, response_id: str) -> Follower:
        """Return a follower of one run, for the response of this id."""
        return _RunEvents(self, response_id)

    def open(self) -> None:
        """Add a user; the first one opens it."""
        with self._lock:
            if not self._n_users:
                self._logs = self._logger() if self._endpoint is None else OtlpLogs(self._endpoint)
            self._n_users += 1

    def close(self) -> None:
        """Remove a user; the last one closes it."""
        with self._lock:
            self._n_users -= 1
            logs = self._logs
            if self._n_users:
                return
            self._logs = None
        if self._endpoint is not None:
            logs.close()

    def emit(self, attributes: dict[str, Any], *, in_span: bool) -> None:
        """Emit one event; `in_span`: within the calling thread's span."""
        logs = self._logs
        if logs is not None:  # else it has ended
            context = None if in_span else self._no_span
            logs.emit(timestamp=time.time_ns(), event_name=EVENT, attributes=attributes, context=context)

    def _logger(self) -> Any:
        from opentelemetry._logs import get_logger_provider

        provider = get_logger_provider() if self._provider is None else self._provider
        if type(provider).__module__.startswith("opentelemetry._logs"):  # the API's, which sends nowhere
            LOG.warning(
                "OpenTelemetry has no provider of logs, so its events go nowhere: call set_logger_provider, or give"
                " OpenTelemetryEvents an endpoint"
            )
        return provider.get_logger(SCOPE, version("probemon"))


class _RunEvents(Follower):
    """Follows one run."""

    def __init__(self, events: OpenTelemetryEvents, response_id: str) -> None:
        self._events, self._response_id = events, response_id
        self._run: MonitorRun | None = None
        self._met: dict[int, set[str]] = {}

    def began(self, run: MonitorRun) -> None:
        self._run = run
        self._events.open()

    def closed(self, run: MonitorRun) -> None:
        self._events.close()

    def event(self, event: Event, action: str) -> None:
        if not event.blind:
            self._met.setdefault(event.generation, set()).add(event.concept)
        self._emit({**self._of_event(event), "probemon.action": action}, event.generation, event.request)

    def verdict(self, event: Event) -> None:
        assert event.verdict is not None
        attributes = {
            **self._of_event(event),
            "probemon.action": ESCALATE,
            "probemon.verdict.ruling": event.verdict.ruling,
            "probemon.verdict.seconds": event.verdict.seconds,
        }
        if event.verdict.failure:
            attributes["probemon.verdict.failure"] = event.verdict.failure
        self._emit(attributes, event.generation, event.request)

    def _of_event(self, event: Event) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.evaluation.name": f"probemon.{event.concept}",
            "gen_ai.evaluation.score.label": UNSEEN if event.blind else FIRED,
            "gen_ai.evaluation.explanation": _why(event),
            "probemon.concept": event.concept,
            "probemon.threshold": event.above,
            "probemon.aggregator": event.aggregate,
            "probemon.for_tokens": event.for_tokens,
            "probemon.token.row": event.row,
            "probemon.token.column": event.column,
        }
        if event.blind:
            attributes["error.type"] = self._error_of(event.blind)
        else:
            attributes |= {"gen_ai.evaluation.score.value": event.value, "probemon.score": event.score}
        if event.alert_set is not None:
            attributes["probemon.alert_set"] = event.alert_set
        if event.provisional:
            attributes["probemon.provisional"] = True
        return attributes

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        assert self._run is not None
        met, n_rules = sorted(self._met.pop(recording.number, ())), len(self._run.watches[-1].rules)
        tokens, covered, unseen = Counter[str](), Counter[str](), Counter(recording.why_unseen)
        if n_before := recording.n_before():  # they came in a cache, without a forward of this generation
            unseen[recording.before] += n_before
            tokens["prompt"] += n_before
        for placed, scores in list(zip(recording.placed, recording.scores, strict=False)):
            coverage = scores.coverage
            tokens["prompt" if placed.phase == PROMPT else "generated"] += len(placed)
            covered.update({name: int(getattr(coverage, name).sum()) for name in _COVERAGE})
        n_pairs = covered["active"] + covered["dropped"] + covered["not_reached"]
        attributes: dict[str, Any] = {
            "gen_ai.evaluation.name": "probemon.generation",
            "gen_ai.evaluation.explanation": (
                f"{len(met)} concepts of {n_rules} rules; {unseen.total()} of {recording.n_entries + n_before} tokens"
                f" unseen; {covered['active']} of {n_pairs} scores known, {covered['dropped']} dropped"
            ),
            "probemon.rows": recording.call.n_rows,
            "probemon.rules": n_rules,
            "probemon.fired": met[:_MOST_NAMED],
            "probemon.tokens.prompt": tokens["prompt"],
            "probemon.tokens.generated": tokens["generated"],
            "probemon.tokens.unseen": unseen.total(),
            "probemon.tokens.forgotten": recording.n_forgotten,
            "probemon.coverage.probes": n_pairs,
            **{f"probemon.coverage.{name}": covered[name] for name in _COVERAGE},
        }
        if error is not None:
            attributes["error.type"] = type(error).__qualname__
        elif unseen:
            attributes["error.type"] = self._error_of(unseen.most_common(1)[0][0])
        elif n_rules and not recording.n_generated:  # no token was scored
            attributes["error.type"] = NOT_SCORED
        if n_rules or met:
            blind = "error.type" in attributes
            attributes["gen_ai.evaluation.score.label"] = FIRED if met else UNSEEN if blind else NOT_FIRED
        self._emit(attributes, recording.number, recording.request)

    def _error_of(self, reason: str) -> str:
        assert self._run is not None
        if reason in self._run.manager.not_numbers:
            return NOT_FINITE
        return ALIGNMENT_GAP if reason == GAP or reason.startswith("the host did not run through") else NOT_SCORED

    def _emit(self, attributes: dict[str, Any], generation: int, request: str) -> None:
        assert self._run is not None
        deployment, response_id = self._run.deployment, request or self._response_id
        attributes |= {"probemon.pack": self._run.manager.pack.name, "probemon.generation": generation}
        if deployment is not None:
            attributes["probemon.deployment"] = deployment.sha256
        if response_id:
            attributes["gen_ai.response.id"] = response_id
        # Continuous batching runs in a thread of transformers, outside the caller's span.
        self._events.emit(attributes, in_span=not request)


def _why(event: Event) -> str:
    path = " > ".join(event.path)
    if event.blind:
        return f"{path}: not known at this token: {event.blind}"
    n = event.for_tokens
    of = "score" if event.aggregate == "each" else event.aggregate
    value, above = (in_short(one, ".4g") for one in (event.value, event.above))
    return f"{path}: {of} {value} over {above} at {n} token{'s' * (n > 1)} in a row"

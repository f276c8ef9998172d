"""Met rules and ended generations as OpenTelemetry events.

events = OpenTelemetryEvents()                                  # the application's provider of logs
events = OpenTelemetryEvents(endpoint="http://localhost:4318")  # a collector, OTLP over HTTP

Each is a log record `gen_ai.evaluation.result`, without text or token ids, by the conventions for generative AI
(open-telemetry/semantic-conventions-genai at 997a19cc9be3bcd54fe4f45213df8c274f4776f0). docs/metrics.md lists the
attributes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
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
    from opentelemetry.context import Context

    from probemon.monitor.run import MonitorRun

LOG = logging.getLogger("probemon")
EVENT = "gen_ai.evaluation.result"
FIRED, NOT_FIRED, UNSEEN = LABELS = ("fired", "not_fired", "unseen")
NOT_FINITE, ALIGNMENT_GAP, NOT_SCORED = UNSEEN_ERRORS = ("not_finite", "alignment_gap", "not_scored")
RANKED = INFO, WARN, ERROR = ("INFO", "WARN", "ERROR")  # names of OpenTelemetry
SEVERITIES = {"stop": WARN, "raise": ERROR}  # by action or ruling
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
        run.follow(_RunEvents(self, "", "", None))

    def of_response(self, response_id: str, *, model: str = "", traceparent: str = "") -> Follower:
        """Return a follower of one run, for the response of this id.

        `model`: as the request names it; by default the watched model's name. `traceparent`: the header of W3C's trace
        context; the events join that trace, unless it is invalid.
        """
        return _RunEvents(self, response_id, model, self._joining(traceparent))

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

    def emit(
        self, attributes: dict[str, Any], *, in_span: bool, severity: str = INFO, context: Context | None = None
    ) -> None:
        """Emit one event; `in_span`: within the calling thread's span, if no `context` is given."""
        from opentelemetry._logs import SeverityNumber

        logs = self._logs
        if logs is None:  # it has ended
            return
        if context is None and not in_span:
            context = self._no_span
        logs.emit(
            timestamp=time.time_ns(),
            event_name=EVENT,
            body=attributes.get("gen_ai.evaluation.explanation"),
            severity_number=SeverityNumber[severity],
            severity_text=severity,
            attributes=attributes,
            context=context,
        )

    def _joining(self, traceparent: str) -> Context | None:
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if not traceparent:
            return None
        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, self._no_span)
        return context if get_current_span(context).get_span_context().is_valid else None

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

    def __init__(self, events: OpenTelemetryEvents, response_id: str, model: str, context: Context | None) -> None:
        self._events, self._response_id, self._model, self._context = events, response_id, model, context
        self._run: MonitorRun | None = None
        self._met: dict[int, set[str]] = {}

    def began(self, run: MonitorRun) -> None:
        self._run, self._model = run, self._model or _name_of(run.model)
        self._events.open()

    def closed(self, run: MonitorRun) -> None:
        self._events.close()

    def event(self, event: Event, action: str) -> None:
        if not event.blind:
            self._met.setdefault(event.generation, set()).add(event.concept)
        severity = max(SEVERITIES.get(action, INFO), WARN if event.blind else INFO, key=RANKED.index)
        attributes = {**self._of_event(event), "probemon.action": action}
        self._emit(attributes, event.generation, event.request, severity)

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
        severity = max(
            SEVERITIES.get(event.verdict.ruling, INFO), WARN if event.verdict.failure else INFO, key=RANKED.index
        )
        self._emit(attributes, event.generation, event.request, severity)

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
        if recording.cancelled:
            attributes["probemon.cancelled"] = True
        if error is not None:
            attributes["error.type"] = type(error).__qualname__
        elif unseen:
            attributes["error.type"] = self._error_of(unseen.most_common(1)[0][0])
        elif n_rules and not recording.n_generated:  # no token was scored
            attributes["error.type"] = NOT_SCORED
        if n_rules or met:
            blind = "error.type" in attributes
            attributes["gen_ai.evaluation.score.label"] = FIRED if met else UNSEEN if blind else NOT_FIRED
        severity = ERROR if error is not None else WARN if "error.type" in attributes else INFO
        self._emit(attributes, recording.number, recording.request, severity)

    def _error_of(self, reason: str) -> str:
        assert self._run is not None
        if reason in self._run.manager.not_numbers:
            return NOT_FINITE
        return ALIGNMENT_GAP if reason == GAP or reason.startswith("the host did not run through") else NOT_SCORED

    def _emit(self, attributes: dict[str, Any], generation: int, request: str, severity: str) -> None:
        assert self._run is not None
        deployment, response_id = self._run.deployment, request or self._response_id
        attributes |= {"probemon.pack": self._run.manager.pack.name, "probemon.generation": generation}
        if deployment is not None:
            attributes["probemon.deployment"] = deployment.sha256
        if response_id:
            attributes["gen_ai.response.id"] = response_id
        if self._model:
            attributes["gen_ai.request.model"] = self._model
        # Continuous batching runs in a thread of transformers, outside the caller's span.
        self._events.emit(attributes, in_span=not request, severity=severity, context=self._context)


def _name_of(model: Any) -> str:
    """Return a model's name; of a folder, the last part."""
    name = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    return Path(name).name if os.path.isdir(name) or os.path.isabs(name) else str(name)


def _why(event: Event) -> str:
    path = " > ".join(event.path)
    if event.blind:
        return f"{path}: not known at this token: {event.blind}"
    n = event.for_tokens
    of = "score" if event.aggregate == "each" else event.aggregate
    value, above = (in_short(one, ".4g") for one in (event.value, event.above))
    return f"{path}: {of} {value} over {above} at {n} token{'s' * (n > 1)} in a row"

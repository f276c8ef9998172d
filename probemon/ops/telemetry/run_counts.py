"""Adds one run to the families of a ProcessMetrics.

Work is done per batch and per forward, never per (token, concept).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.scores import COUNTS, PHASES, Gap, Scores
from probemon.engine.audit import Audit
from probemon.monitor.breaker import CLOSED, PAUSED, SCORING_FAILED
from probemon.monitor.degradations import LEFT_OUT, NAMES
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.rules import ESCALATE, TOLD_ACTIONS, Event
from probemon.ops.budget import Budget, HeldSeconds
from probemon.ops.drift.drift_monitor import DriftMonitor
from probemon.ops.judges.judge_desk import FAILURES
from probemon.tracking.recording import GAP, Recording
from probemon.tracking.source_reports import ForwardTime

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun
    from probemon.ops.telemetry.metrics import ProcessMetrics

SEEN, BLIND, NOT_FINITE, BUDGET, FAILED, OTHER = REASONS = ("", "gap", "not_finite", "budget", "failed", "other")
LAST_LEVEL = 15  # and below


class RunCounts(Follower):
    """Follows one run. `exemplar`: labels in addition to the trace's."""

    def __init__(
        self, metrics: ProcessMetrics, run: MonitorRun, probes: Sequence[int], exemplar: Mapping[str, str]
    ) -> None:
        self._metrics, self._run, self._exemplar = metrics, run, dict(exemplar)
        self._held = HeldSeconds()
        self._lock = threading.Lock()  # several threads may generate in one run
        pack, family = run.manager.pack, metrics.family
        self._reasons = {SEEN: SEEN, GAP: BLIND, PAUSED: FAILED} | dict.fromkeys(run.manager.not_numbers, NOT_FINITE)
        self._reasons |= dict.fromkeys(LEFT_OUT.values(), BUDGET)
        tokens = family("probemon_tokens_total")
        self._tokens = [{reason: tokens.labels(phase, reason) for reason in REASONS} for phase in PHASES]
        pairs = family("probemon_probes_total")
        self._pairs = {name: pairs.labels(name) for name in (*COUNTS, "fired")}
        self._level = np.minimum(pack.tree.level, LAST_LEVEL)
        by_level = family("probemon_level_probes_total")
        levels = [str(level) for level in range(LAST_LEVEL)] + [f"{LAST_LEVEL}+"]
        self._levels = {
            int(level): (by_level.labels(levels[level], "active"), by_level.labels(levels[level], "fired"))
            for level in np.unique(self._level)
        }
        self._place = np.zeros(pack.n_probes, dtype=np.int64)  # of named concepts, from 1
        self._place[list(probes)] = np.arange(1, len(probes) + 1)
        fired = family("probemon_fired_total")
        self._named = [fired.labels(pack.concepts[probe]["id"]) for probe in probes]
        events = family("probemon_events_total")
        self._events = {action: events.labels(action) for action in TOLD_ACTIONS}
        self._rulings: dict[tuple[str, str], Any] = {}
        self._verdicts, self._judged = family("probemon_verdicts_total"), family("probemon_verdict_seconds_total")
        sinks = family("probemon_sink_tokens_total")
        self._sinks = {"n_written": sinks.labels("written"), "n_dropped": sinks.labels("dropped")}
        self._sent: dict[str, list[int]] = {name: [] for name in self._sinks}
        self._audit = {name: family("probemon_audit_total").labels(label) for name, label in AUDIT_SUMS.items()}
        self._overhead, self._watched = (
            family("probemon_forward_overhead_seconds"),
            family("probemon_watched_seconds_total"),
        )
        self._gaps, self._failures = family("probemon_gaps_total"), family("probemon_failures_total")
        self._n_failures = 0
        self._budget, self._drift = run.follower(Budget), run.follower(DriftMonitor)
        shed = family("probemon_budget_shed_tokens_total")
        self._shed = (
            {}
            if self._budget is None
            else {degradation: shed.labels(NAMES[degradation]) for degradation in range(1, len(NAMES))}
        )
        self._said: dict[str, int] = {}
        self._labels: tuple[str, ...] | None = None
        self._look()

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Add one batch of tokens."""
        coverage, tokens = scores.coverage, self._tokens[batch.placed.phase]
        if batch.watch.degradation in self._shed:
            self._shed[batch.watch.degradation].inc(len(batch.placed))
        for reason, n in Counter(coverage.unseen).items():
            tokens[self._reason(reason)].inc(n)
        for name in COUNTS:
            n = int(getattr(coverage, name).sum())
            if n:
                self._pairs[name].inc(n)
        level = self._level[scores.probes]
        active = np.bincount(level, minlength=LAST_LEVEL + 1).tolist()
        fired = np.bincount(level[scores.fired_mask], minlength=LAST_LEVEL + 1).tolist()
        for number, (active_counter, fired_counter) in self._levels.items():
            if active[number]:
                active_counter.inc(active[number])
            if fired[number]:
                fired_counter.inc(fired[number])
        n_fired = sum(fired)
        if n_fired:
            self._pairs["fired"].inc(n_fired)
            if self._named:
                counts = np.bincount(self._place[scores.probes[scores.fired_mask]], minlength=len(self._named) + 1)
                for counter, n in zip(self._named, counts[1:].tolist(), strict=True):
                    counter.inc(n)
        if coverage.audited.any():
            audit = Audit.of(coverage)
            for name, counter in self._audit.items():
                counter.inc(getattr(audit, name))
            self._metrics.add_audit(audit)

    def event(self, event: Event, action: str) -> None:
        """Count an event."""
        self._events[action].inc()
        if action == ESCALATE:
            self._show_rulings()

    def verdict(self, event: Event) -> None:
        """Count a verdict, or its failure."""
        verdict = event.verdict
        assert verdict is not None
        self._show_rulings()
        self._rulings[verdict.ruling, verdict.failure].inc()
        self._judged.inc(verdict.seconds)

    def held(self, seconds: float) -> None:
        """Leave out the wait for judges."""
        self._held.seconds += seconds

    def forward(self, time: ForwardTime) -> None:
        """Observe the cost of a forward."""
        held, self._held.seconds = self._held.seconds, 0.0
        self._overhead.observe(max(0.0, time.inside - held), self._labels_of_exemplar())
        self._watched.inc(max(0.0, time.whole - held))
        self._look()

    def gap(self, gap: Gap) -> None:
        """Count a gap."""
        self._gaps.inc()

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Update drift alarms, which change when requests end."""
        if self._drift is not None:
            for kind, n in self._drift.counts().items():
                self._metrics.set_highest("probemon_drift_alarms", self._drift, n, kind)

    def closed(self, run: MonitorRun) -> None:
        """Add the last counts."""
        self._look()
        if self._run.recordings:
            self.ended(self._run.recordings[-1], None)
        assert self._labels is not None
        self._metrics.end_run(run, self._labels)

    # -- inside --------------------------------------------------------------------------------------

    def _show_rulings(self) -> None:
        """Start verdicts at 0, so that the first failure is a rise."""
        if not self._rulings:
            self._rulings = {
                (ruling, failure): self._verdicts.labels(ruling, failure)
                for ruling in ("pass", "stop", "raise")
                for failure in ("", *FAILURES)
            }

    def _reason(self, reason: str) -> str:
        category = self._reasons.get(reason)
        return category if category is not None else FAILED if reason.startswith(SCORING_FAILED) else OTHER

    def _look(self) -> None:
        run = self._run
        with self._lock:
            n_failures, self._n_failures = run.n_failures - self._n_failures, run.n_failures
            self._failures.inc(n_failures)
            stats = run.sinks
            for name, counter in self._sinks.items():
                before, self._sent[name] = self._sent[name], [getattr(one, name) for one in stats]
                for now, then in zip_longest(self._sent[name], before, fillvalue=0):
                    counter.inc(max(0, now - then))  # counters must not fall when written tokens are lost
            if self._budget is not None:
                self._say("probemon_budget_degradation", self._budget, self._budget.degradation)
            if run.breaker is not None:
                self._say("probemon_breaker_open", run.breaker, int(run.breaker.state != CLOSED))
            deployment = "" if run.deployment is None else run.deployment.sha256
            manager = run.manager
            labels = (manager.pack.name, str(manager.pack.n_probes), manager.impl, deployment)
            if labels != self._labels:
                self._metrics.describe_run(labels, self._labels)
                self._labels = labels

    def _say(self, name: str, of: object, value: int) -> None:
        if self._said.get(name) != value:
            self._said[name] = value
            self._metrics.set_highest(name, of, value)

    def _labels_of_exemplar(self) -> dict[str, str] | None:
        trace: Any = sys.modules.get("opentelemetry.trace")
        context = None if trace is None else trace.get_current_span().get_span_context()
        if context is None or not context.is_valid:
            return self._exemplar or None
        return {**self._exemplar, "trace_id": f"{context.trace_id:032x}"}


AUDIT_SUMS = {name: name.removeprefix("n_") for name in Audit(0).as_dict() if name != "n_probes"}

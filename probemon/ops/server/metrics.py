"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from probemon.errors import MissingExtra
from probemon.monitor.breaker import CLOSED
from probemon.ops.server.generator import Generator
from probemon.ops.server.served import Served
from probemon.ops.server.subscribers import Rings
from probemon.ops.telemetry.metric_families import FAMILIES, SERVER
from probemon.ops.telemetry.metrics import ProcessMetrics


def process_metrics(served: Served) -> ProcessMetrics | None:
    """Return the metrics of a server's runs; None without prometheus-client.

    Raises `MissingExtra` if the deployment asks for metrics.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        if served.metric_concepts is None:
            return None
        raise MissingExtra("metrics need prometheus-client: pip install 'probemon[metrics]'") from error
    return ProcessMetrics(concepts=served.metric_concepts or (), registry=CollectorRegistry())


class ServerMetrics:
    """Collects counts and the present load, in the registry of `process`."""

    def __init__(self, generator: Generator, ring: Rings, process: ProcessMetrics) -> None:
        self._generator, self._ring, self._process = generator, ring, process
        process.registry.register(self)

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type."""
        served = self._generator.served
        if served.circuit is not None:  # shared: may be open while nothing runs
            self._process.family("probemon_breaker_open").set(int(served.circuit.state != CLOSED))
        if served.budget is not None:
            self._process.family("probemon_budget_degradation").set(served.budget.degradation)
        if served.drift is not None:
            for kind, n in served.drift.counts().items():
                self._process.family("probemon_drift_alarms").labels(kind).set(n)
        return self._process.text(accept)

    def describe(self) -> list[Any]:
        """Return the families without samples."""
        return [family.scraped() for family in FAMILIES.values() if family.where == SERVER]

    def collect(self) -> Iterator[Any]:
        """Yield every family with its values."""
        generator, counts = self._generator, self._generator.counts
        for name, values in (
            ("probemon_requests_total", counts.requests),
            ("probemon_answers_total", counts.answers),
            ("probemon_answer_tokens_total", counts.tokens),
        ):
            family = FAMILIES[name].scraped()
            for value, count in sorted(values.items()):
                family.add_metric([value], count)
            yield family
        for name, number in (
            ("probemon_request_seconds_total", counts.seconds),
            ("probemon_requests_running", generator.n_running),
            ("probemon_requests_waiting", generator.n_waiting),
            ("probemon_subscribers", self._ring.n_subscribers),
            ("probemon_subscriber_events_dropped_total", self._ring.n_lost + self._ring.n_behind()),
        ):
            yield FAMILIES[name].scraped(number)

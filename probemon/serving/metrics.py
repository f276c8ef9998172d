"""ServingMetrics: a server as metrics of Prometheus, in text.

metrics = ServingMetrics(generator, ring)
body, content_type = metrics.text()        # MissingExtra without prometheus-client
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from probemon.serving.generator import Generator
from probemon.serving.subscribers import EventRing
from probemon.telemetry.collector import Collector


class ServingMetrics(Collector):
    """Counts since the server began, and what is under way now."""

    def __init__(self, generator: Generator, ring: EventRing) -> None:
        from prometheus_client import CollectorRegistry

        super().__init__(CollectorRegistry())
        self._generator, self._ring = generator, ring
        self._registry.register(self)

    def text(self) -> tuple[bytes, str]:
        """Return the metrics and their content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """Yield every family as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        generator, counts = self._generator, self._generator.counts
        for name, words, label, values in (
            ("probemon_requests", "Requests that ended, by what became of them", "outcome", counts.requests),
            ("probemon_answers", "Answers, by how they ended", "finish_reason", counts.answers),
            ("probemon_tokens", "Tokens: of prompts, generated, of these without scores", "what", counts.tokens),
        ):
            family = CounterMetricFamily(name, words, labels=[label])
            for value, count in sorted(values.items()):
                family.add_metric([value], count)
            yield family
        yield CounterMetricFamily("probemon_request_seconds", "Time that answers took", value=counts.seconds)
        yield GaugeMetricFamily("probemon_requests_running", "Requests being answered", value=generator.n_running)
        yield GaugeMetricFamily("probemon_requests_waiting", "Requests in the queue", value=generator.n_waiting)
        yield GaugeMetricFamily("probemon_subscribers", "Readers of the events", value=self._ring.n_subscribers)
        yield CounterMetricFamily(
            "probemon_subscriber_events_dropped",
            "Events that slow readers lost",
            value=self._ring.n_lost + self._ring.n_behind(),
        )

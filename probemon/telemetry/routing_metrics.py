"""Metrics of routing for Prometheus: what routers decided, what was not seen, which alerts hold, what it cost.

    from prometheus_client import start_http_server

    with RoutingMonitor(model) as monitor, RoutingMetrics(monitor):       # or run.routing, of manager.attach(routing=)
        start_http_server(9464)                       # http://localhost:9464/metrics
        model.generate(**inputs)

All of it is read from the recorder's report when somebody scrapes. Needs the extra `metrics`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from probemon.errors import ConfigError
from probemon.telemetry.collector import Collector
from probemon.telemetry.latency import BUCKETS
from probemon.telemetry.recorder import RoutingRecorder
from probemon.telemetry.statistics import METRICS

_TIMED = {
    "forward": "Time that a forward of the host took",
    "controller": "Time that the controller of a BEM adapter took in a forward",
    "token": "Time from one generated token to the next",
}


class RoutingMetrics(Collector):
    """A collector over one recorder of routing, registered while its `with` block is open.

    Each router is a series of every metric, so a model of many layers of experts has some hundreds. `registry` is the
    client's default one, or yours. Raises `MissingExtra`, and `ConfigError` where a registry holds these series
    already.
    """

    def __init__(self, routing: RoutingRecorder, *, registry: Any = None) -> None:
        if not isinstance(routing, RoutingRecorder):
            raise ConfigError(
                f"routing is {type(routing).__name__}: give a RoutingMonitor, or run.routing of"
                " manager.attach(..., routing=True)"
            )
        super().__init__(registry)
        self._routing = routing

    def collect(self) -> Iterator[Any]:
        """Yield every family as it is now, for `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
        from prometheus_client.utils import floatToGoString

        report = self._routing.report()
        family: Metric
        family = CounterMetricFamily(
            "probemon_routing_tokens", "Tokens of the host, by whether their routing was seen", labels=["seen"]
        )
        for seen, name in (("yes", "n_tokens"), ("no", "n_unseen")):
            family.add_metric([seen], report[name])
        yield family
        names = ("site", "layer", "level")
        decided = CounterMetricFamily(
            "probemon_routing_decisions", "Tokens that a router decided about, by what it gave", labels=[*names, "what"]
        )
        metrics = GaugeMetricFamily(
            "probemon_routing",
            "A metric of a router over all tokens so far: see docs/routing.md",
            labels=[*names, "metric"],
        )
        for stream in report["streams"]:
            labels = [str(stream[name]) for name in names]
            for what, name in (("finite", "n_tokens"), ("not_finite", "n_not_finite")):
                decided.add_metric([*labels, what], stream[name])
            for metric in METRICS:
                if metric in stream:
                    metrics.add_metric([*labels, metric], stream[metric])
        yield from (decided, metrics)
        family = GaugeMetricFamily(
            "probemon_recurrent",
            "A metric of a recurrent layer over all tokens so far: see docs/recurrent-hosts.md",
            labels=["site", "metric"],
        )
        for site, told in report["states"].items():
            for metric, value in told.items():
                if value is not None:
                    family.add_metric([site, metric], value)
        yield family
        family = GaugeMetricFamily(
            "probemon_routing_alerts", "Alerts of routing that hold now, by their rule", labels=["kind"]
        )
        kinds = [alert.kind for alert in self._routing.alerts]
        for kind in self._routing.kinds:
            family.add_metric([kind], kinds.count(kind))
        yield family
        yield CounterMetricFamily(
            "probemon_routing_alerts_raised", "Alerts of routing that were raised so far", value=report["n_alerts"]
        )
        family = GaugeMetricFamily(
            "probemon_routing_unjudged",
            "Tokens that a rule needs before it can be judged: until then no alert says nothing",
            labels=["kind"],
        )
        for kind, needed in sorted(report["unjudged"].items()):
            family.add_metric([kind], needed)
        yield family
        family = GaugeMetricFamily(
            "probemon_routing_capture_seconds", "Time that a decision's capture took", labels=["percentile"]
        )
        for name, value in report["latency_us"].items():
            if value is not None:
                family.add_metric([name.removeprefix("p")], value / 1e6)
        yield family
        for kind, (counts, total) in self._routing.latency.histograms().items():
            ends = [*map(floatToGoString, BUCKETS), "+Inf"]
            buckets = list(zip(ends, itertools.accumulate(counts), strict=True))
            yield HistogramMetricFamily(f"probemon_{kind}_seconds", _TIMED[kind], buckets=buckets, sum_value=total)
        yield GaugeMetricFamily(
            "probemon_routing_memory_watermark_bytes",
            "The most memory that was in use",
            value=report["memory_watermark_bytes"],
        )

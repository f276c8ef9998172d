"""RoutingSums: routing metrics of a process for Prometheus, and their families.

Counters add up over all recorders. Router metrics are those of open recorders, or of the last one.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from probemon.adapters.routing.latency import BUCKETS
from probemon.adapters.routing.recorder import Routing
from probemon.adapters.routing.statistics import METRICS
from probemon.core.metric_family import Family, table_of

_ROUTER = ("site", "layer", "level")
ROUTING = "routing"
_Sample = tuple[str, tuple[str, ...]]  # family name, labels


_FAMILIES = (
    ("probemon_routing_tokens_total", "counter", ("seen",), "Tokens of the model, by whether their routing was seen"),
    (
        "probemon_routing_decisions_total",
        "counter",
        (*_ROUTER, "what"),
        "Tokens that a router decided about, by what it gave: finite, not_finite",
    ),
    (
        "probemon_routing",
        "gauge",
        (*_ROUTER, "metric"),
        "A metric of a router over all tokens of the newest run: see docs/memory-and-routing.md",
    ),
    (
        "probemon_recurrent",
        "gauge",
        ("site", "metric"),
        "A metric of a recurrent layer over all tokens of the newest run: see docs/memory-and-routing.md",
    ),
    ("probemon_routing_alerts", "gauge", ("kind",), "Alerts of routing in force, by rule"),
    ("probemon_routing_alerts_raised_total", "counter", (), "Alerts of routing that were raised"),
    (
        "probemon_routing_unjudged",
        "gauge",
        ("kind",),
        "Tokens that a rule needs before it can judge; until then a missing alert means nothing",
    ),
    ("probemon_routing_capture_seconds", "gauge", ("percentile",), "Time that a decision's capture took"),
    ("probemon_forward_seconds", "histogram", (), "Time that a forward of the model took"),
    ("probemon_controller_seconds", "histogram", (), "Time that the controller of a BEM adapter took in a forward"),
    ("probemon_token_seconds", "histogram", (), "Time from one generated token to the next"),
    ("probemon_routing_memory_watermark_bytes", "gauge", (), "The most memory that was in use"),
)
FAMILIES = {name: Family(name, kind, labels, text, ROUTING) for name, kind, labels, text in _FAMILIES}


def table() -> str:
    """Return the families as a Markdown table."""
    return table_of("Runs that a `Routing` follows, and routing monitors", list(FAMILIES.values()))


class RoutingSums:
    """Thread-safe."""

    def __init__(self) -> None:
        self._open: list[Routing] = []
        self._ended: _Snapshot | None = None  # with counts of all ended recorders
        self._lock = threading.Lock()

    def begin(self, recorder: Routing) -> None:
        """Include a recorder."""
        with self._lock:
            self._open.append(recorder)

    def end(self, recorder: Routing) -> None:
        """Keep a recorder's counts and last metrics."""
        with self._lock:
            self._open.remove(recorder)
            snapshot = _Snapshot.of(recorder)
            self._ended = snapshot if self._ended is None else snapshot.after(self._ended)

    def collect(self) -> Iterator[Any]:
        """Yield the current families; none before the first recorder."""
        with self._lock:
            now = self._ended
            if self._open:
                open_snapshot = reduce(lambda before, snapshot: snapshot.beside(before), map(_Snapshot.of, self._open))
                now = open_snapshot if now is None else open_snapshot.after(now)
        if now is not None:
            yield from now.families()


# How gauges of several open recorders combine; others show the newest.
_OF_ALL: Mapping[str, Callable[[float, float], float]] = {
    "probemon_routing_alerts": operator.add,
    "probemon_routing_unjudged": max,
}


@dataclass(frozen=True)
class _Snapshot:
    """Recorder values by family and labels; of a histogram, by number of the bucket, and "sum"."""

    counts: Counter[_Sample]
    gauges: Mapping[_Sample, float]

    @classmethod
    def of(cls, recorder: Routing) -> _Snapshot:
        report = recorder.report()
        counts = Counter[_Sample]()
        gauges: dict[_Sample, float] = {}
        for seen, name in (("yes", "n_tokens"), ("no", "n_unseen")):
            counts["probemon_routing_tokens_total", (seen,)] = report[name]
        for stream in report["streams"]:
            router = tuple(str(stream[name]) for name in _ROUTER)
            for what, name in (("finite", "n_tokens"), ("not_finite", "n_not_finite")):
                counts["probemon_routing_decisions_total", (*router, what)] = stream[name]
            gauges |= {("probemon_routing", (*router, name)): stream[name] for name in METRICS if name in stream}
        for site, layer_metrics in report["states"].items():
            gauges |= {
                ("probemon_recurrent", (site, name)): value
                for name, value in layer_metrics.items()
                if value is not None
            }
        kinds = [alert.kind for alert in recorder.alerts]
        gauges |= {("probemon_routing_alerts", (kind,)): kinds.count(kind) for kind in recorder.kinds}
        counts["probemon_routing_alerts_raised_total", ()] = report["n_alerts"]
        gauges |= {("probemon_routing_unjudged", (kind,)): n for kind, n in report["unjudged"].items()}
        for name, value in report["latency_us"].items():
            if value is not None:
                gauges["probemon_routing_capture_seconds", (name.removeprefix("p"),)] = value / 1e6
        gauges["probemon_routing_memory_watermark_bytes", ()] = report["memory_watermark_bytes"]
        for kind, (numbers, total) in recorder.latency.histograms().items():
            name = f"probemon_{kind}_seconds"
            counts.update({(name, (f"{i:02}",)): number for i, number in enumerate(numbers)})
            counts[name, ("sum",)] = total  # type: ignore[assignment]
        return cls(counts, gauges)

    def after(self, before: _Snapshot) -> _Snapshot:
        """Add an earlier snapshot's counts."""
        counts = Counter(before.counts)
        counts.update(self.counts)
        return _Snapshot(counts, self.gauges)

    def beside(self, other: _Snapshot) -> _Snapshot:
        """Combine with another open recorder's snapshot."""
        gauges = {**other.gauges, **self.gauges}
        for sample, value in other.gauges.items():
            if sample in self.gauges and sample[0] in _OF_ALL:
                gauges[sample] = _OF_ALL[sample[0]](value, self.gauges[sample])
        return replace(self.after(other), gauges=gauges)

    def families(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        ends = [*map(floatToGoString, BUCKETS), "+Inf"]
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for (name, labels), value in sorted({**self.counts, **self.gauges}.items()):
            samples.setdefault(name, []).append((labels, value))
        for name, family in FAMILIES.items():
            if name in samples and family.kind == "histogram":
                *numbers, total = (value for _, value in samples[name])
                buckets = list(zip(ends, itertools.accumulate(numbers), strict=True))
                yield HistogramMetricFamily(name, family.help, buckets=buckets, sum_value=total)
            elif name in samples:
                metric = family.scraped()
                for labels, value in samples[name]:
                    metric.add_metric(labels, value)
                yield metric

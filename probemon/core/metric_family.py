"""Family: a metric for Prometheus; each part of the package has a table of its own.

counter = FAMILIES["probemon_gaps_total"].made(registry)     # an object of prometheus_client
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# 50 us to 100 ms: what hooks take of a forward, in steps of about 2.
OVERHEAD_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)


@dataclass(frozen=True)
class Family:
    """One family: its `name` as it is exposed, `kind` ("counter", "gauge", "histogram"), labels and a sentence.

    `mode`: how the values of a gauge from several processes become one.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    where: str = "process"
    mode: str = "livesum"

    @property
    def stem(self) -> str:
        """Return the name without the suffix that clients add to a counter's."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name

    def made(self, registry: Any) -> Any:
        """Return it as an object of `prometheus_client`, registered. Raises `ValueError` where it is there already."""
        from prometheus_client import Counter, Gauge, Histogram

        if self.kind == "counter":
            return Counter(self.stem, self.help, self.labels, registry=registry)
        if self.kind == "histogram":
            return Histogram(self.name, self.help, self.labels, registry=registry, buckets=OVERHEAD_BUCKETS)
        return Gauge(self.name, self.help, self.labels, registry=registry, multiprocess_mode=self.mode)  # type: ignore[arg-type]

    def scraped(self, value: float | None = None) -> Any:
        """Return it as a family of a collector, to which samples are added; `value`: of one without labels."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        if value is not None:
            return kind(self.stem, self.help, value=value)
        return kind(self.stem, self.help, labels=self.labels)


def table_of(title: str, families: Sequence[Family]) -> str:
    """Return families as a table of Markdown under a heading."""
    lines = [f"### {title}", "", "| family | type | labels | what it says |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines)

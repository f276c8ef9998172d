"""Family: a Prometheus metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Time of hooks per forward, 50 us to 5 s.
OVERHEAD_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Family:
    """A metric: exposed `name`, `kind` ("counter", "gauge", "histogram"), labels and help text.

    `mode`: how a gauge combines over processes.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    where: str = "process"
    mode: str = "livesum"

    @property
    def stem(self) -> str:
        """Name without a counter's suffix."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name

    def made(self, registry: Any) -> Any:
        """Return a registered `prometheus_client` metric. Raises `ValueError` if it exists already."""
        from prometheus_client import Counter, Gauge, Histogram

        if self.kind == "counter":
            return Counter(self.stem, self.help, self.labels, registry=registry)
        if self.kind == "histogram":
            return Histogram(self.name, self.help, self.labels, registry=registry, buckets=OVERHEAD_BUCKETS)
        return Gauge(self.name, self.help, self.labels, registry=registry, multiprocess_mode=self.mode)  # type: ignore[arg-type]

    def scraped(self, value: float | None = None) -> Any:
        """Return a collector's metric family; `value`: of one without labels."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        if value is not None:
            return kind(self.stem, self.help, value=value)
        return kind(self.stem, self.help, labels=self.labels)


def table_of(title: str, families: Sequence[Family]) -> str:
    """Return a Markdown table under a heading."""
    lines = [f"### {title}", "", "| family | type | labels | what it says |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines)

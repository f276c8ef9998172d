"""The metrics of deployment files: one exporter per process and address.

metrics = exporter(["weapon"], port=9464)       # until the process ends
metrics = exporter(["weapon"])                  # in the client's default registry
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from probemon.errors import ConfigError
from probemon.ops.telemetry.exposition import begin_serving
from probemon.ops.telemetry.metrics import ProcessMetrics

_Place = tuple[str, int] | None
_running: dict[_Place, tuple[ProcessMetrics, tuple[str, ...]]] = {}
_servers: list[Any] = []
_lock = threading.Lock()


def exporter(concepts: Sequence[str] = (), port: int | None = None, address: str = "127.0.0.1") -> ProcessMetrics:
    """Return the metrics shown there, started if necessary.

    Raises `MissingExtra`, or `ConfigError` if it cannot listen or shows other concepts.
    """
    place, named = None if port is None else (address, port), tuple(concepts)
    with _lock:
        if place not in _running:
            if place is None:
                metrics = ProcessMetrics(concepts=named)
            else:
                metrics = _own(named)
                _servers.append(begin_serving(metrics.registry, place[1], address))
            _running[place] = metrics, named
        metrics, shown = _running[place]
    if shown != named:
        where = "in the registry of prometheus_client" if place is None else f"at {address} port {port}"
        raise ConfigError(
            f"metrics {where} name {', '.join(shown) or 'no concepts'} in this process already: name the same, or give"
            " another port"
        )
    return metrics


def _own(concepts: Sequence[str]) -> ProcessMetrics:
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        return ProcessMetrics(concepts=concepts)  # raises MissingExtra
    return ProcessMetrics(concepts=concepts, registry=CollectorRegistry())

"""The text that Prometheus scrapes, and its port.

with served(registry, 9464): ...                      # http://127.0.0.1:9464/metrics

If `PROMETHEUS_MULTIPROC_DIR` is set before prometheus_client is imported, each process shows the sum of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from probemon.errors import ConfigError


def several_processes() -> bool:
    """True if the metrics of several processes are added up."""
    from prometheus_client import values

    return bool(values.ValueClass._multiprocess)


class Shown:
    """Collects a registry, or the sum over processes, without the `_created` samples of our families."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        if several_processes():
            from prometheus_client import CollectorRegistry
            from prometheus_client.multiprocess import MultiProcessCollector

            try:
                self._registry = MultiProcessCollector(CollectorRegistry())  # type: ignore[no-untyped-call]
            except ValueError as error:
                what = "PROMETHEUS_MULTIPROC_DIR has to be a folder, empty before the first start"
                raise ConfigError(f"{what}: {error}") from error

    def describe(self) -> list[Any]:
        """Return all families."""
        return list(self.collect())

    def collect(self) -> Iterator[Any]:
        """Yield every family with its values."""
        for family in self._registry.collect():
            if family.name.startswith("probemon_") and family.type in ("counter", "histogram"):
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def exposition(registry: Any, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics and their content type. `accept`: OpenMetrics has exemplars."""
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return encode(Shown(registry)), content_type  # type: ignore[arg-type]


@contextmanager
def served(registry: Any, port: int, address: str = "127.0.0.1") -> Iterator[int]:
    """Show the metrics at /metrics while the block is open; yields the port (0: a free one). Raises `ConfigError` if
    it cannot listen.
    """
    server, thread = begin_serving(registry, port, address)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def begin_serving(registry: Any, port: int, address: str = "127.0.0.1") -> tuple[Any, Any]:
    """Return a server of /metrics and its thread. Raises `ConfigError`."""
    from prometheus_client import CollectorRegistry, start_http_server

    shown = CollectorRegistry()
    shown.register(Shown(registry))  # type: ignore[arg-type]
    try:
        return start_http_server(port, addr=address, registry=shown)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot show metrics at {address} port {port}: {error}; give another port") from error

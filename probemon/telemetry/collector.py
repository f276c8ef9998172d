"""A collector of `prometheus_client`, registered while its `with` block is open.

class MyMetrics(Collector):
    def collect(self): yield CounterMetricFamily(...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

from probemon.errors import ConfigError, MissingExtra


class Collector(ABC):
    """Metrics that are read when somebody scrapes. `registry` is the client's default one, or yours.

    Raises `MissingExtra`, and `ConfigError` where a registry holds these series already.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            name = type(self).__name__
            raise MissingExtra(f"{name} needs prometheus-client: pip install 'probemon[metrics]'") from error
        self._registry = prometheus_client.REGISTRY if registry is None else registry

    def __enter__(self) -> Self:
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ConfigError(
                f"this registry has metrics of another run: leave its block first, or give registry= ({error})"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._registry.unregister(self)

    @abstractmethod
    def collect(self) -> Iterator[Any]:
        """Yield every family as it is now, for `prometheus_client`."""

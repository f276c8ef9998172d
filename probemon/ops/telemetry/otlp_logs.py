"""Sends log records to an OpenTelemetry collector, and never waits for it.

logs = OtlpLogs("http://localhost:4318")
logs.emit(event_name="...", attributes={...})  # queued, or lost beyond MOST_WAITING
logs.close()
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from probemon.errors import ConfigError, MissingExtra
from probemon.util.checks import shown

LOG = logging.getLogger("probemon")
SCOPE = "probemon"
MOST_WAITING = 2048
SEND_SECONDS = 1  # per attempt; the exporter's default is ten
CLOSE_SECONDS = 1.5  # runs end in less than two


class OtlpLogs:
    """`endpoint`: `http://host:4318`, or with the path of logs (`/v1/logs`). Raises `MissingExtra`, `ConfigError`.

    Headers, certificate and resource come from the environment (`OTEL_...`); `service.name` is probemon by default.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        self._exporter = _CountedExporter(OTLPLogExporter(endpoint=self.endpoint, timeout=SEND_SECONDS))
        # At exit it would wait without limit.
        self._provider = LoggerProvider(_resource(), shutdown_on_exit=False)
        processor = BatchLogRecordProcessor(
            self._exporter,  # type: ignore[arg-type]
            schedule_delay_millis=1000,
            max_export_batch_size=512,
            export_timeout_millis=1000 * SEND_SECONDS,
            max_queue_size=MOST_WAITING,
        )
        self._provider.add_log_record_processor(processor)
        self._logger = self._provider.get_logger(SCOPE, version("probemon"))
        self._lock = threading.Lock()
        self.n_emitted = 0

    @property
    def n_sent(self) -> int:
        """Records that the collector has taken."""
        return self._exporter.n_sent

    @property
    def n_lost(self) -> int:
        """Records not taken."""
        return self.n_emitted - self.n_sent

    def emit(self, **record: Any) -> None:
        """Queue a record; `record`: arguments of OpenTelemetry's `Logger.emit`."""
        with self._lock:
            self.n_emitted += 1
        self._logger.emit(**record)

    def close(self) -> None:
        """Send the queue within CLOSE_SECONDS, and log losses."""
        # The SDK would take half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="probemon closes OpenTelemetry", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        self._exporter.give_up()
        if self.n_lost:
            LOG.warning(
                "the collector at %s has not taken %d of %d records of OpenTelemetry",
                self.endpoint,
                self.n_lost,
                self.n_emitted,
            )


def _resource() -> Any:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the environment has no name
        resource = resource.merge(Resource({SERVICE_NAME: SCOPE}))
    return resource


class _CountedExporter:
    """Counts what an exporter has sent, until `give_up`."""

    def __init__(self, exporter: Any) -> None:
        self._exporter, self.n_sent, self._over = exporter, 0, False

    def give_up(self) -> None:
        self._over = True

    def export(self, batch: Sequence[Any]) -> Any:
        if self._over:
            return None
        result = self._exporter.export(batch)
        if result.name == "SUCCESS":
            self.n_sent += len(batch)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 1000 * SEND_SECONDS) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def check_endpoint(endpoint: object) -> str:
    """Return the URL to send logs to: `endpoint`, with `/v1/logs` if it has no path.

    Raises `ConfigError`, or `MissingExtra` without the exporter.
    """
    try:
        parts = urlsplit(endpoint if isinstance(endpoint, str) else "")
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"endpoint is {shown(endpoint)}: give the address of a collector that takes OTLP over HTTP, as"
            " http://localhost:4318"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http._log_exporter
        import opentelemetry.sdk._logs.export  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "an endpoint for OpenTelemetry needs its SDK and exporter: pip install 'probemon[otel]'"
        ) from error
    return parts._replace(path="/v1/logs").geturl() if parts.path in ("", "/") else parts.geturl()

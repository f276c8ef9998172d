"""RoutingMonitor: watches a model's routers and recurrent layers while its `with` block is open.

with RoutingMonitor(model) as monitor:
    monitor.add_sink(RoutingParquet("routing.parquet"))
    model.generate(**inputs, max_new_tokens=50)
monitor.report()                        # per router: entropies, load, flips, ...
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any

from probemon.adapters.routing.recorder import Routing
from probemon.adapters.routing.settings import RoutingSettings
from probemon.core.scores import Gap
from probemon.errors import ConfigError
from probemon.host.model import unwrap
from probemon.monitor.failures import MAX_KEPT, Failures, as_exception, raise_first_of
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import keep_newest
from probemon.tracking.watcher import Watcher
from probemon.util.checks import check_choice


class RoutingMonitor(Routing):
    """A `Routing` that watches a model by itself, without probes.

    Prompt and generated tokens of the returned sequences count, but not padding and dropped beams.
    `settings` may be given by name. `on_gap`: "raise" `AlignmentError` or "report" (`gaps`) if a forward bypasses the
    hooks. Raises `UnsupportedModel` without a known router or recurrent layer. Callback errors are raised as
    `CallbackFailed` when the block ends.
    """

    def __init__(
        self, model: Any, settings: RoutingSettings | None = None, *, on_gap: str = "raise", **by_name: Any
    ) -> None:
        check_choice("on_gap", on_gap, ("raise", "report"))
        super().__init__(settings, **by_name)
        model, failures = unwrap(model), Failures()
        self.watch(model, failures.call)
        self.failures, self.gaps = failures.errors, deque[Gap](maxlen=MAX_KEPT)
        self._watcher = Watcher(model, self.sites, 0, self._record, report_gaps=on_gap == "report", reports=self)
        self._entered = False

    def __enter__(self) -> RoutingMonitor:
        if self._entered:
            raise ConfigError("a monitor is entered once: make another")
        self._watcher.__enter__()
        self.latency.attach()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.__exit__(kind, error, trace)
        self.failures += self.close()
        self.failures += map(as_exception, self._watcher.batch_errors)
        if error is None:
            raise_first_of(self.failures, f"{len(self.failures)} callbacks or sinks failed while routing was watched")

    @property
    def forward_seconds(self) -> list[float]:
        """Seconds spent in the hooks, per forward; the newest 10,000."""
        return list(self._watcher.forward_seconds)

    def gap(self, gap: Gap) -> None:
        """Keep a gap."""
        self.gaps.append(gap)

    def _record(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> Report | None:
        taken = self.taking(recording, placed, states)
        with self._lock:  # number the tokens, keep nothing: memory must not grow
            recording.add_forgotten(len(placed))
            keep_newest(self._watcher.recordings, 0)

        def report(keep: bool) -> None:
            for record in taken if keep else ():
                record()

        return report if taken else None

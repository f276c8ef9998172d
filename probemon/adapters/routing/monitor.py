"""RoutingMonitor: watches the routers and the recurrent layers of one host model while its `with` block is open.

    with RoutingMonitor(model) as monitor:
        monitor.add_sink(RoutingParquet("routing.parquet"))
        out = model.generate(**inputs, max_new_tokens=50)
    monitor.report()                        # per router: entropies, load, flips, ...; latency, memory, alerts

Alongside probes a `Routing` (`probemon.adapters.routing.recorder`) does the same as a follower of their run. Only
tokens of the output count: rejected drafts, dropped beams and padding do not. Probes and routers share the code that
finds out which tokens those are (`probemon.tracking.watcher`): a router is one more site of it.
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

    `settings` may also be given by name: `RoutingMonitor(model, bem=bem)`. `on_gap`: "raise" `AlignmentError` where our
    hooks did not see a forward, or "report" it (`gaps`). Raises `NotSupportedHost` where no router and no recurrent
    layer is known, `ConfigError` (`UnknownSetting` for a typo). Errors of sinks, listeners and actions on alerts are
    raised as `CallbackFailed` when the block ends.
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
        """Seconds spent in our hooks, one entry a forward of the host, of the newest 10,000."""
        return list(self._watcher.forward_seconds)

    def gap(self, gap: Gap) -> None:
        """Keep a gap."""
        self.gaps.append(gap)

    def _record(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> Report | None:
        """Record decisions, number the tokens, and keep nothing of them, so that nothing grows."""
        taken = self.taking(recording, placed, states)
        with self._lock:
            recording.add_forgotten(len(placed))
            keep_newest(self._watcher.recordings, 0)

        def report(keep: bool) -> None:
            for record in taken if keep else ():
                record()

        return report if taken else None

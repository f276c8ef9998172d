"""RoutingMonitor: watches the routers and the recurrent layers of one host model while its `with` block is open.

    with RoutingMonitor(model) as monitor:
        monitor.add_sink(RoutingParquet("routing.parquet"))
        out = model.generate(**inputs, max_new_tokens=50)
    monitor.report()                        # per router: entropies, load, flips, ...; latency, memory, alerts

    with manager.attach(model, tokenizer, routing=True) as run:         # beside probes, of the same tokens
        model.generate(**inputs)
    run.routing.report()
    with manager.attach(model, tokenizer, routing=RoutingSettings(bem=bem)) as run: ...   # and those of a BEM adapter

Only tokens of the output count: rejected drafts, dropped beams and padding do not. Probes and routers share the code
that finds out which tokens those are (`probemon.tracking.watcher`): a router is one more site of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from probemon.adapters.routing.recorder import RoutingRecorder
from probemon.adapters.routing.settings import RoutingSettings
from probemon.core.scores import Gap
from probemon.errors import ConfigError
from probemon.host.model import unwrap
from probemon.monitor.failures import Failures, as_exception, raise_first_of
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import keep_newest
from probemon.tracking.watcher import Watcher


class RoutingMonitor(RoutingRecorder):
    """A recorder that watches a model by itself, without probes.

    `settings` may also be given by name: `RoutingMonitor(model, bem=bem)`. `on_gap` is that of `manager.attach`. Raises
    `NotSupportedHost` where no router and no recurrent layer is known, `ConfigError` (`UnknownSetting` for a typo).
    Errors of sinks, listeners and actions on alerts are raised as `CallbackFailed` when the block ends.
    """

    def __init__(
        self,
        model: Any,
        settings: RoutingSettings | None = None,
        *,
        on_gap: str | Callable[[Gap], object] = "raise",
        **by_name: Any,
    ) -> None:
        if settings is not None and by_name:
            raise ConfigError(f"settings and {', '.join(by_name)} beside them: give either")
        if not callable(on_gap) and on_gap != "raise":
            raise ConfigError(f'on_gap is {on_gap!r}: give "raise" or a callable that takes the gap')
        model = unwrap(model)
        failures = Failures()
        super().__init__(model, RoutingSettings.by_name(**by_name) if settings is None else settings, failures.call)
        self.failures = failures.errors
        guarded_on_gap = partial(failures.call, "on_gap", on_gap) if callable(on_gap) else None
        self._watcher = Watcher(
            model, self.sites, 0, self.beside(self._forget), on_gap=guarded_on_gap, on_end=self.ended
        )
        self._entered = False

    def __enter__(self) -> RoutingMonitor:
        if self._entered:
            raise ConfigError("a monitor is entered once: make another")
        self._watcher.__enter__()
        self.open()
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

    def _forget(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> None:
        """Number the tokens and keep nothing of them, so that nothing grows."""
        with self._lock:
            recording.add_forgotten(len(placed))
            keep_newest(self._watcher.recordings, 0)
